package enginetest

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// binaryKeys are keys that a store with terminators, prefixes or C strings
// would confuse.
var binaryKeys = []string{
	"", "\x00", "\x00\x00", "\x00\x00\x01", "\x00\x01", "\x00\x01\x00", "\x00\xff", "\x00\xff\x00\x01",
	"\x01", "a", "a\x00", "a\x00\x01", "a\x00\x01b", "a\x00\xff", "a\x01", "aa", "b", "\x7f", "\x80",
	"\xfe\xff", "\xff", "\xff\x00", "\xff\xff", "\xff\xff\xff",
}

func testFamilies(h *harness) {
	s := h.open()
	h.must(s.EnsureFamily(scanned, scannedOptions), "creating again with the same options")
	for name, o := range map[string]engine.FamilyOptions{
		"use":   {Use: engine.UsePoint, GroupWidth: 2},
		"merge": {Use: engine.UseScanned, Merge: engine.MergeMin, GroupWidth: 2},
		"width": {Use: engine.UseScanned, GroupWidth: 1},
	} {
		h.wantErr(s.EnsureFamily(scanned, o), base.ErrConflict, "creating with another %s", name)
	}
	for _, o := range []engine.FamilyOptions{
		{GroupWidth: 0}, {GroupWidth: 3}, {GroupWidth: 1, Merge: engine.MergeSumCount + 1}, {GroupWidth: 1, Use: engine.UsePoint + 1},
	} {
		h.wantErr(s.EnsureFamily(999, o), base.ErrInvalid, "creating with options %v", o)
	}
	h.wantFamilies(s, map[engine.FamilyID]engine.FamilyOptions{scanned: scannedOptions, point: pointOptions})
	h.must(s.DropFamily(12345), "dropping an absent family")
	h.wantErr(s.DropFamily(engine.MetaFamily), base.ErrInvalid, "dropping the metadata family")
	h.put(engine.MetaFamily, "k", "v")
	h.want(s, engine.MetaFamily, "k", []byte("v"))
}

// wantFamilies compares all families but the metadata family, which a store may
// list or not.
func (h *harness) wantFamilies(s engine.Store, want map[engine.FamilyID]engine.FamilyOptions) {
	h.Helper()
	got := s.Families()
	delete(got, engine.MetaFamily)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		h.Fatalf("families %v, want %v", got, want)
	}
}

func testFamiliesReopen(h *harness) {
	want := map[engine.FamilyID]engine.FamilyOptions{scanned: scannedOptions, point: pointOptions}
	s := h.openMerging()
	for _, k := range mergeKinds {
		f, o := mergeFamily(k)
		want[f] = o
	}
	h.close() // no flush: creation is durable at once
	s, err := h.driver.Open(h.dir)
	h.must(err, "opening")
	h.store = s
	h.wantFamilies(s, want)
	h.put(scanned, "k", "v")
	h.must(s.DropFamily(scanned), "dropping")
	delete(want, scanned)
	h.wantFamilies(s, want)
	h.close()
	s, err = h.driver.Open(h.dir)
	h.must(err, "opening")
	h.store = s
	h.wantFamilies(s, want)
}

func testDropAndRecreate(h *harness) {
	s := h.open()
	h.put(scanned, "old", "1")
	h.put(point, "stays", "1")
	h.flush()
	h.must(s.DropFamily(scanned), "dropping")
	h.must(s.EnsureFamily(scanned, scannedOptions), "creating again")
	h.want(s, scanned, "old", nil)
	h.want(s, point, "stays", []byte("1"))
	s = h.reopen() // without a flush, so an older image or file may still hold it
	h.want(s, scanned, "old", nil)
	h.want(s, point, "stays", []byte("1"))
	h.put(scanned, "new", "2")
	h.flush()
	s = h.reopen()
	h.want(s, scanned, "old", nil)
	h.want(s, scanned, "new", []byte("2"))
}

func testUnknownFamily(h *harness) {
	s := h.open()
	const absent engine.FamilyID = 4711
	_, _, err := s.Get(absent, []byte("k"))
	h.wantErr(err, base.ErrNotFound, "get")
	_, err = s.MultiGet(absent, [][]byte{[]byte("k")})
	h.wantErr(err, base.ErrNotFound, "multi-get")
	_, err = drain(s.Scan(absent, nil, nil, engine.ScanOptions{}))
	h.wantErr(err, base.ErrNotFound, "scan")
	var b engine.Batch
	b.Put(absent, []byte("k"), nil)
	h.wantErr(s.Write(&b), base.ErrNotFound, "write")
}

func testPutGetDelete(h *harness) {
	s := h.open()
	for _, f := range []engine.FamilyID{engine.MetaFamily, scanned, point} {
		for i, k := range binaryKeys {
			h.want(s, f, k, nil)
			h.put(f, k, fmt.Sprint("v", i))
		}
		for i, k := range binaryKeys {
			h.want(s, f, k, []byte(fmt.Sprint("v", i)))
		}
		h.put(f, "a", "")
		h.want(s, f, "a", []byte{})
		h.write(func(b *engine.Batch) {
			b.Delete(f, []byte("a"))
			b.Delete(f, []byte("never there"))
		})
		h.want(s, f, "a", nil)
		h.want(s, f, "a\x00", []byte(fmt.Sprint("v", 10)))
	}
	var empty engine.Batch
	h.must(s.Write(&empty), "writing an empty batch")
	h.flush()
	h.must(s.Compact(), "compacting")
	h.want(s, point, "b", []byte("v16"))
}

func testMultiGet(h *harness) {
	s := h.open()
	for _, f := range []engine.FamilyID{scanned, point} {
		h.put(f, "a", "1")
		h.put(f, "empty", "")
		h.flush()
		h.put(f, "b", "2")
		keys := [][]byte{[]byte("b"), []byte("absent"), []byte("a"), []byte("empty"), []byte("b"), []byte("")}
		got, err := s.MultiGet(f, keys)
		h.must(err, "multi-get")
		want := [][]byte{[]byte("2"), nil, []byte("1"), {}, []byte("2"), nil}
		for i := range want {
			if len(got) != len(want) || (got[i] == nil) != (want[i] == nil) || !bytes.Equal(got[i], want[i]) {
				h.Fatalf("got %q, want %q", got, want)
			}
		}
		got, err = s.MultiGet(f, nil)
		if err != nil || len(got) != 0 {
			h.Fatalf("multi-get of nothing: %q, %v", got, err)
		}
	}
}

func testSlices(h *harness) {
	s := h.open()
	key, val := []byte("key"), []byte("value")
	var b engine.Batch
	b.Put(scanned, key, val)
	h.must(s.Write(&b), "writing")
	b.Reset()
	b.Put(scanned, []byte("kez"), []byte("VALUE"))
	copy(key, "xxx")
	copy(val, "xxxxx")
	h.want(s, scanned, "key", []byte("value"))
	got, _, err := s.Get(scanned, []byte("key"))
	h.must(err, "get")
	copy(got, "XXXXX")
	many, err := s.MultiGet(scanned, [][]byte{[]byte("key")})
	h.must(err, "multi-get")
	if string(many[0]) != "value" {
		h.Fatalf("value is %q after the caller changed its copy", many[0])
	}
	copy(many[0], "YYYYY")
	h.want(s, scanned, "key", []byte("value"))

	lo, hi := []byte("a"), []byte("z")
	it := s.Scan(scanned, lo, hi, engine.ScanOptions{})
	copy(lo, "z")
	copy(hi, "a")
	if got := h.collect(it); len(got) != 1 {
		h.Fatalf("scan after its bounds were changed by the caller: %v", got)
	}
}

func testBatchOrder(h *harness) {
	s := h.open()
	h.put(scanned, "m", "old")
	h.write(func(b *engine.Batch) {
		b.Put(scanned, []byte("a"), []byte("1"))
		b.Put(scanned, []byte("a"), []byte("2"))
		b.Put(scanned, []byte("b"), []byte("1"))
		b.Delete(scanned, []byte("b"))
		b.Delete(scanned, []byte("c"))
		b.Put(scanned, []byte("c"), []byte("1"))
		b.Put(scanned, []byte("l"), []byte("1"))
		b.DeleteRange(scanned, []byte("l"), []byte("o"))
		b.Put(scanned, []byte("n"), []byte("2"))
		b.Put(point, []byte("a"), []byte("other family"))
	})
	check := func() {
		h.Helper()
		h.want(s, scanned, "a", []byte("2"))
		h.want(s, scanned, "b", nil)
		h.want(s, scanned, "c", []byte("1"))
		h.want(s, scanned, "l", nil)
		h.want(s, scanned, "m", nil)
		h.want(s, scanned, "n", []byte("2"))
		h.want(s, point, "a", []byte("other family"))
	}
	check()
	h.flush()
	h.must(s.Compact(), "compacting")
	check()
	s = h.reopen()
	check()
}

// testRefusedBatch: a batch that is refused has written nothing (EN1).
func testRefusedBatch(h *harness) {
	s := h.open()
	h.put(scanned, "a", "1")
	for name, c := range map[string]struct {
		spoil func(b *engine.Batch)
		want  error
	}{
		"unknown family":          {func(b *engine.Batch) { b.Put(4711, []byte("k"), nil) }, base.ErrNotFound},
		"merge without a kind":    {func(b *engine.Batch) { b.Merge(scanned, []byte("k"), value(1, nil)) }, base.ErrInvalid},
		"merge into the metadata": {func(b *engine.Batch) { b.Merge(engine.MetaFamily, []byte("k"), value(1, nil)) }, base.ErrInvalid},
	} {
		var b engine.Batch
		b.Put(scanned, []byte("a"), []byte("2"))
		b.Put(scanned, []byte("z"), []byte("2"))
		b.Put(point, []byte("b"), []byte("2"))
		c.spoil(&b)
		b.Put(scanned, []byte("c"), []byte("2"))
		h.wantErr(s.Write(&b), c.want, "%s", name)
		h.want(s, scanned, "a", []byte("1"))
		h.want(s, point, "b", nil)
		h.want(s, scanned, "c", nil)
	}
	// Nor does anything of it come with a later batch.
	h.put(scanned, "a", "3")
	h.put(point, "other", "3")
	h.want(s, scanned, "a", []byte("3"))
	h.want(s, scanned, "z", nil)
	h.want(s, point, "b", nil)
	h.flush()
	s = h.reopen()
	h.want(s, scanned, "a", []byte("3"))
	h.want(s, scanned, "c", nil)
}

func testLargeValues(h *harness) {
	s := h.open()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB
	for _, f := range []engine.FamilyID{engine.MetaFamily, scanned, point} {
		h.put(f, "big", string(big))
		h.put(f, string(big[:32<<10]), "long key")
	}
	check := func() {
		h.Helper()
		for _, f := range []engine.FamilyID{engine.MetaFamily, scanned, point} {
			h.want(s, f, "big", big)
			h.want(s, f, string(big[:32<<10]), []byte("long key"))
			if got := h.collect(s.Scan(f, []byte("b"), []byte("c"), engine.ScanOptions{})); len(got) != 1 || got[0].value != string(big) {
				h.Fatalf("scan of family %d: %d entries", f, len(got))
			}
		}
	}
	check()
	h.flush()
	s = h.reopen()
	check()
}

func testUseAfterClose(h *harness) {
	s := h.open()
	h.put(scanned, "a", "1")
	h.close()
	key := []byte("a")
	var b engine.Batch
	b.Put(scanned, key, key)
	_, _, getErr := s.Get(scanned, key)
	_, multiErr := s.MultiGet(scanned, [][]byte{key})
	_, scanErr := drain(s.Scan(scanned, nil, nil, engine.ScanOptions{}))
	_, viewErr := s.NewView()
	_, _, durableErr := s.DurableGet(key)
	for name, err := range map[string]error{
		"Get": getErr, "MultiGet": multiErr, "Scan": scanErr, "NewView": viewErr, "DurableGet": durableErr,
		"Write": s.Write(&b), "EnsureFamily": s.EnsureFamily(scanned, scannedOptions), "EnsureFamily of a new": s.EnsureFamily(44, pointOptions),
		"DropFamily": s.DropFamily(scanned), "Flush": s.Flush(), "Checkpoint": s.Checkpoint(h.TempDir() + "/c"), "Compact": s.Compact(),
	} {
		h.wantErr(err, base.ErrClosed, "%s after Close", name)
	}
	if err := s.Close(); err != nil && !errors.Is(err, base.ErrClosed) {
		h.Fatalf("closing again: %v", err)
	}
	_ = s.Families() // must not crash
	_ = s.Stats()
}

// testCloseWithReaders: Close either refuses while views and iterators are
// open, or succeeds and leaves them safe.
func testCloseWithReaders(h *harness) {
	s := h.open()
	h.put(scanned, "a", "1")
	h.put(scanned, "b", "2")
	v, err := s.NewView()
	h.must(err, "taking a view")
	it := v.Scan(scanned, nil, nil, engine.ScanOptions{})
	if !it.Next() {
		h.Fatalf("no entry: %v", it.Err())
	}
	if err := s.Close(); err == nil {
		h.store = nil
		if got, ok, err := v.Get(scanned, []byte("a")); err != nil && !errors.Is(err, base.ErrClosed) || err == nil && (!ok || string(got) != "1") {
			h.Fatalf("view after Close: %q, %v, %v", got, ok, err)
		}
		for it.Next() {
		}
		if err := it.Err(); err != nil && !errors.Is(err, base.ErrClosed) {
			h.Fatalf("iterator after Close: %v", err)
		}
	}
	it.Close()
	it.Close()
	v.Close()
	v.Close()
	h.close()
	s = h.open()
	h.put(scanned, "c", "3")
	h.want(s, scanned, "c", []byte("3"))
}

func testStats(h *harness) {
	s := h.open()
	for i := range 100 {
		h.put(scanned, fmt.Sprint("key", i), "value")
	}
	h.flush()
	st := s.Stats()
	if st.Implementation != h.driver.Name() || st.Keys == 0 || st.DiskBytes == 0 || st.LastFlush <= 0 || st.WriteStalled {
		h.Fatalf("stats %+v of driver %q", st, h.driver.Name())
	}
}
