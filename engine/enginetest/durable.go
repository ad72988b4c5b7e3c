package enginetest

import (
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// allFamilies are those of openMerging's store and the metadata family.
func allFamilies() []engine.FamilyID {
	out := []engine.FamilyID{engine.MetaFamily, scanned, point}
	for _, k := range mergeKinds {
		f, _ := mergeFamily(k)
		out = append(out, f)
	}
	return out
}

// writeNumbered writes batch n, which sets "n" in every family.
func (h *harness) writeNumbered(n uint64) {
	h.Helper()
	h.write(func(b *engine.Batch) {
		for _, f := range allFamilies() {
			b.Put(f, []byte("n"), number(n))
			b.Put(f, fmt.Append(nil, "n", n), number(n))
		}
	})
}

// number is n as a value that has the length of a sum, so that any family
// takes it.
func number(n uint64) []byte { return binary.BigEndian.AppendUint64(value(n, make([]byte, 8)), n) }

func numberOf(b []byte) uint64 { return binary.BigEndian.Uint64(b[len(b)-8:]) }

// wantWhole checks that the store holds exactly the batches 1 to n, and returns
// n.
func (h *harness) wantWhole(s engine.Reader) uint64 {
	h.Helper()
	var n uint64
	for i, f := range allFamilies() {
		v, ok, err := s.Get(f, []byte("n"))
		h.must(err, "getting")
		var here uint64
		if ok {
			here = numberOf(v)
		}
		if i == 0 {
			n = here
		}
		if here != n {
			h.Fatalf("family %d is at batch %d, the metadata at %d", f, here, n)
		}
		if got := h.collect(s.Scan(f, []byte("n0"), nil, engine.ScanOptions{})); uint64(len(got)) != n {
			h.Fatalf("family %d has %d of %d batches", f, len(got), n)
		}
	}
	return n
}

func (h *harness) durableNumber() uint64 {
	h.Helper()
	v, ok, err := h.store.DurableGet([]byte("n"))
	h.must(err, "reading durable metadata")
	if !ok {
		return 0
	}
	return numberOf(v)
}

func testDurableGet(h *harness) {
	s := h.open()
	get := func(want string) {
		h.Helper()
		v, ok, err := s.DurableGet([]byte("k"))
		h.must(err, "reading durable metadata")
		if string(v) != want || ok != (want != "") {
			h.Fatalf("durable value %q, %v; want %q", v, ok, want)
		}
	}
	get("")
	h.put(engine.MetaFamily, "k", "1")
	get("")
	h.flush()
	get("1")
	h.put(engine.MetaFamily, "k", "2")
	get("1")
	h.want(s, engine.MetaFamily, "k", []byte("2"))
	s = h.reopen()
	get("1")
	h.want(s, engine.MetaFamily, "k", []byte("1"))
	h.write(func(b *engine.Batch) { b.Delete(engine.MetaFamily, []byte("k")) })
	get("1")
	h.flush()
	get("")
	h.put(scanned, "k", "not metadata")
	h.flush()
	get("")
}

// testLostSuffix: what a close without a flush loses is a suffix of whole
// batches (EN1), and never what DurableGet had promised.
func testLostSuffix(h *harness) {
	h.openMerging()
	var written, flushed uint64
	for round := range 6 {
		for range 5 {
			written++
			h.writeNumbered(written)
		}
		if round%2 == 0 {
			h.flush()
			flushed = written
		}
		promised := h.durableNumber()
		if promised < flushed || promised > written {
			h.Fatalf("durable at batch %d, flushed %d, written %d", promised, flushed, written)
		}
		h.close()
		s := h.openMerging()
		n := h.wantWhole(s)
		if n < promised || n > written {
			h.Fatalf("at batch %d after reopening, promised %d, written %d", n, promised, written)
		}
		written, flushed = n, n
	}
}

// testFlushAll: a flush covers every family up to the same batch (EN2).
func testFlushAll(h *harness) {
	h.openMerging()
	for n := uint64(1); n <= 20; n++ {
		h.writeNumbered(n)
	}
	h.flush()
	h.flush()
	if n := h.durableNumber(); n != 20 {
		h.Fatalf("durable at batch %d after the flush of 20", n)
	}
	h.close()
	if n := h.wantWhole(h.openMerging()); n != 20 {
		h.Fatalf("at batch %d after reopening, flushed 20", n)
	}
}

// testCheckpoint: a checkpoint holds everything written before it, opens as a
// store, and neither side sees the other's later writes.
func testCheckpoint(h *harness) {
	s := h.openMerging()
	h.writeNumbered(1)
	h.flush()
	h.writeNumbered(2)
	v, err := s.NewView()
	h.must(err, "taking a view")
	dir := filepath.Join(h.TempDir(), "checkpoint")
	h.must(s.Checkpoint(dir), "checkpointing")
	v.Close()
	h.writeNumbered(3)
	h.must(h.driver.Verify(dir), "verifying the checkpoint")

	c, err := h.driver.Open(dir)
	h.must(err, "opening the checkpoint")
	if n := h.wantWhole(c); n != 2 {
		h.Fatalf("the checkpoint is at batch %d, want 2", n)
	}
	if n := fmt.Sprint(c.Families()); n != fmt.Sprint(s.Families()) {
		h.Fatalf("families %s, want %v", n, s.Families())
	}
	var b engine.Batch
	b.Put(scanned, []byte("only here"), []byte("1"))
	b.DeleteRange(point, nil, []byte("\xff"))
	h.must(c.Write(&b), "writing to the checkpoint")
	h.must(c.Flush(), "flushing the checkpoint")
	h.must(c.Compact(), "compacting the checkpoint")
	h.want(s, scanned, "only here", nil)
	if n := h.wantWhole(s); n != 3 {
		h.Fatalf("the store is at batch %d, want 3", n)
	}
	h.flush()
	h.must(s.Compact(), "compacting")
	h.close()
	h.must(os.RemoveAll(h.dir), "removing the store")
	h.want(c, scanned, "n", number(2))
	h.must(c.Close(), "closing the checkpoint")
	c, err = h.driver.Open(dir)
	h.must(err, "opening the checkpoint again")
	h.want(c, scanned, "only here", []byte("1"))
	h.want(c, point, "n", nil)
	h.must(c.Close(), "closing the checkpoint")
}

func testCheckpointExisting(h *harness) {
	s := h.open()
	dir := h.TempDir()
	if err := s.Checkpoint(dir); err == nil {
		h.Fatal("a checkpoint into an existing directory succeeded")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		h.Fatalf("the existing directory was changed: %v, %v", entries, err)
	}
	h.put(scanned, "a", "1")
	h.want(s, scanned, "a", []byte("1"))
}

func testForeignDirectory(h *harness) {
	s := h.open()
	h.put(scanned, "a", "1")
	h.flush()
	h.close()
	own, err := engine.ReadMarker(h.dir)
	h.must(err, "reading the store's marker")
	if own.Engine != h.driver.Name() {
		h.Fatalf("marker of %q in a store of %q", own.Engine, h.driver.Name())
	}
	for name, c := range map[string]struct {
		marker engine.Marker
		want   error
	}{
		"another engine": {engine.Marker{Engine: "other", Layout: own.Layout}, base.ErrIdentity},
		"newer layout":   {engine.Marker{Engine: own.Engine, Layout: own.Layout + 1}, base.ErrFormatVersion},
	} {
		h.must(engine.WriteMarker(h.dir, c.marker), "writing a marker")
		_, err := h.driver.Open(h.dir)
		h.wantErr(err, c.want, "opening: %s", name)
		h.wantErr(h.driver.Verify(h.dir), c.want, "verifying: %s", name)
	}
	h.must(engine.WriteMarker(h.dir, own), "writing the marker back")
	s = h.open()
	h.want(s, scanned, "a", []byte("1"))

	foreign := h.TempDir()
	h.must(os.WriteFile(filepath.Join(foreign, "precious"), []byte("data"), 0o644), "writing a file")
	_, err = h.driver.Open(foreign)
	h.wantErr(err, base.ErrIdentity, "opening a directory with other files")
	if entries, err := os.ReadDir(foreign); err != nil || len(entries) != 1 {
		h.Fatalf("the foreign directory was changed: %v, %v", entries, err)
	}
}

func testOpenTwice(h *harness) {
	s := h.open()
	if second, err := h.driver.Open(h.dir); err == nil {
		_ = second.Close()
		h.Fatal("a store that is open was opened again")
	}
	h.put(scanned, "a", "1")
	h.want(s, scanned, "a", []byte("1"))
	h.close()
	h.open()
}

// testVerify: a byte that changed in the largest file is found.
func testVerify(h *harness) {
	s := h.open()
	for i := range 200 {
		h.put(scanned, fmt.Sprintf("key%03d", i), fmt.Sprint("value", i*i))
	}
	h.flush()
	h.must(s.Compact(), "compacting")
	h.close()
	h.must(h.driver.Verify(h.dir), "verifying a good store")
	path, size := largestFile(h)
	b, err := os.ReadFile(path)
	h.must(err, "reading %s", path)
	for _, at := range []int64{size / 4, size / 2} {
		b[at] ^= 0x40
		h.must(os.WriteFile(path, b, 0o644), "writing %s", path)
		h.wantErr(h.driver.Verify(h.dir), base.ErrCorrupt, "verifying with byte %d of %s changed", at, filepath.Base(path))
		b[at] ^= 0x40
	}
	h.must(os.WriteFile(path, b, 0o644), "writing %s", path)
	h.must(h.driver.Verify(h.dir), "verifying the repaired store")
	if err := h.driver.Verify(filepath.Join(h.dir, "absent")); err == nil {
		h.Fatal("verifying an absent directory succeeded")
	}
}

// largestFile finds the data: the largest file that is not a text log.
func largestFile(h *harness) (path string, size int64) {
	h.Helper()
	err := filepath.WalkDir(h.dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		name := d.Name()
		// RocksDB's OPTIONS file is text that it writes and nobody reads.
		data := filepath.Ext(name) == ".sst" || filepath.Ext(name) == "" && name != "LOG" && name != "LOCK" &&
			!strings.HasPrefix(name, "OPTIONS-")
		if err == nil && data && info.Size() > size {
			path, size = p, info.Size()
		}
		return err
	})
	h.must(err, "listing %s", h.dir)
	if size < 100 {
		h.Fatalf("no file with data in %s", h.dir)
	}
	return path, size
}
