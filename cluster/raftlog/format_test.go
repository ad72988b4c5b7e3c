package raftlog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

var goldenIdent = logID{0x4b, 0x53, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}

// goldenOps is a history with every kind of record. Each step is one batch.
func goldenOps(l *Log) []func() error {
	e := &raft.Log{
		Index: 4, Term: 2, Type: raft.LogConfiguration, Data: []byte("conf"), Extensions: []byte("ext"),
		AppendedAt: time.Unix(0, 1700000000123456789),
	}
	pad := strings.Repeat("p", 1500)
	return []func() error{
		func() error { return l.Group(0).StoreLogs(entries(1, 3, 1)) },
		func() error { return l.Group(0).StoreLog(e) },
		func() error { return l.Group(1).SetUint64([]byte(keyCurrentTerm), 7) },
		func() error { return l.Group(1).Set([]byte("LastVoteCand"), []byte("n2/1")) },
		func() error { return l.CreateGroup(2, 3) },
		func() error { return l.Group(2).StoreLogs(entries(50, 52, 4)) },
		func() error { return l.Group(0).DeleteRange(3, 4) },
		func() error { return l.Group(0).DeleteRange(1, 1) },
		func() error { return l.Tombstone(2) },
		func() error { return l.Group(1).StoreLog(entry(1, 7, raft.LogNoop, pad)) },
		func() error { return l.Group(1).StoreLog(entry(2, 7, raft.LogCommand, pad)) },
		func() error { return l.Group(1).StoreLog(entry(3, 7, raft.LogCommand, pad)) }, // reaches 4 KiB
		func() error { return l.Group(1).DeleteRange(1, 2) },                           // rolls
		func() error { return l.Group(1).SetUint64([]byte(keyLastVoteTerm), 7) },
	}
}

func goldenOptions() Options {
	return Options{SegmentBytes: 4 << 10, GarbageBytes: 1 << 30, MarkDelay: -1, CacheBytes: -1, ident: &goldenIdent}
}

// buildGolden runs the history and returns the file system after a clean close,
// the group states after each step, and the end of the active segment then.
func buildGolden(t testing.TB) (mem *vfs.Mem, states []string, segs []uint32, ends []int64) {
	t.Helper()
	mem = vfs.NewMem()
	l := mustOpen(t, mem, goldenOptions())
	note := func() {
		states = append(states, fmt.Sprint(describeForTest(t, l)))
		segs = append(segs, l.commit.active.id)
		ends = append(ends, l.commit.active.size.Load())
	}
	note()
	for _, step := range goldenOps(l) {
		must(t, step())
		note()
	}
	must(t, l.Close())
	return mem, states, segs, ends
}

func describeForTest(t testing.TB, l *Log) string { return fmt.Sprint(describeAll(t, l)) }

// reversion gives a valid header of another format version.
func reversion(header []byte, version uint32) []byte {
	h := bytes.Clone(header)
	binary.LittleEndian.PutUint32(h[8:], version)
	binary.LittleEndian.PutUint32(h[44:], crc32.Checksum(h[:44], castagnoli))
	return h
}

func fileBytes(t testing.TB, fsys vfs.FS, path string) []byte {
	t.Helper()
	data, err := readFile(fsys, path)
	must(t, err)
	return data
}

// withFile copies a log and replaces the bytes of one of its files.
func withFile(t testing.TB, from vfs.FS, name string, data []byte) *vfs.Mem {
	t.Helper()
	out := vfs.NewMem()
	must(t, out.MkdirAll("log", 0o755))
	names, err := from.List("log")
	must(t, err)
	for _, n := range names {
		b := data
		if n != name {
			b = fileBytes(t, from, filepath.Join("log", n))
		}
		f, err := out.Create(filepath.Join("log", n))
		must(t, err)
		_, err = f.WriteAt(b, 0)
		must(t, err)
		must(t, f.Sync())
		must(t, f.Close())
	}
	must(t, out.SyncDir("log"))
	must(t, out.SyncDir("/"))
	return out
}

func reopen(t testing.TB, fsys vfs.FS) (string, error) {
	t.Helper()
	opt := goldenOptions()
	opt.FS = fsys
	l, err := Open("log", opt)
	if err != nil {
		return "", err
	}
	s := describeForTest(t, l)
	must(t, l.Close())
	return s, nil
}

// TestGolden pins the bytes of format version 1 and that they are read back.
func TestGolden(t *testing.T) {
	mem, states, _, _ := buildGolden(t)
	dir := filepath.Join("testdata", "golden", "v1")
	var dump bytes.Buffer
	must(t, Dump(&dump, mem, "log"))
	got := map[string][]byte{"dump.txt": dump.Bytes()}
	for _, id := range []uint32{1, 2} {
		got[segmentName(id)] = fileBytes(t, mem, filepath.Join("log", segmentName(id)))
	}
	for name, data := range got {
		path := filepath.Join(dir, name)
		if *rewrite {
			must(t, os.MkdirAll(dir, 0o755))
			must(t, os.WriteFile(path, data, 0o644))
		}
		want, err := os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(data, want) {
			t.Errorf("%s differs from the golden file (rewrite with -rewrite if that is meant)", name)
		}
	}
	// The golden files themselves, read from the real disk, give the last state.
	rep, err := Verify(vfs.OS, dir)
	must(t, err)
	if rep.Segments != 2 || rep.TornBytes != 0 || len(rep.Groups) != 3 || rep.ID != goldenIdent.String() {
		t.Fatalf("report of the golden log: %+v", rep)
	}
	s, err := reopen(t, mem)
	must(t, err)
	if s != states[len(states)-1] {
		t.Fatalf("golden log holds\n%s\nwant\n%s", s, states[len(states)-1])
	}
}

// TestUnknownVersionIsNotCorruption tells a newer format from damage.
func TestUnknownVersionIsNotCorruption(t *testing.T) {
	mem, _, _, _ := buildGolden(t)
	name := segmentName(1)
	data := fileBytes(t, mem, filepath.Join("log", name))
	copy(data, reversion(data[:segmentHeaderBytes], 2))
	for _, b := range [][]byte{data, data[:segmentHeaderBytes]} {
		_, err := reopen(t, withFile(t, mem, name, b))
		if !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("version 2 gives %v", err)
		}
	}
}

// TestTruncationAtEveryOffset: the last segment cut anywhere gives the state after
// the last whole batch; an older one, or a cut in the head, is damage.
func TestTruncationAtEveryOffset(t *testing.T) {
	mem, states, segs, ends := buildGolden(t)
	headEnd := map[uint32]int64{}
	sc := scan{fs: mem, dir: "log", visit: func(s *scannedSegment, off int64, r record, _ []byte) {
		if r.typ == recHeadEnd {
			headEnd[s.id] = off + int64(r.size())
		}
	}}
	must(t, sc.run())
	for _, id := range []uint32{1, 2} {
		name := segmentName(id)
		data := fileBytes(t, mem, filepath.Join("log", name))
		for cut := range len(data) {
			got, err := reopen(t, withFile(t, mem, name, data[:cut]))
			want := ""
			for k := range states {
				whole := segs[k] < id && headEnd[id] <= int64(cut)
				if whole || segs[k] == id && ends[k] <= int64(cut) {
					want = states[k]
				}
			}
			if id == 1 || want == "" {
				if !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), segmentName(id)) {
					t.Fatalf("segment %d cut at %d: %v", id, cut, err)
				}
				continue
			}
			if err != nil || got != want {
				t.Fatalf("segment %d cut at %d: %v\n%s\nwant\n%s", id, cut, err, got, want)
			}
		}
	}
}

// TestTruncationOfTheOnlySegment: cut in the head it is a log that was never
// founded; anywhere else the state after the last whole batch.
func TestTruncationOfTheOnlySegment(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem, goldenOptions())
	head := l.commit.active.size.Load()
	must(t, l.Group(1).StoreLogs(entries(1, 3, 1)))
	end := l.commit.active.size.Load()
	must(t, l.Close())
	name := segmentName(1)
	data := fileBytes(t, mem, filepath.Join("log", name))
	for cut := range len(data) {
		got, err := reopen(t, withFile(t, mem, name, data[:cut]))
		must(t, err)
		if has := got != "map[]"; has != (int64(cut) >= end) {
			t.Fatalf("cut at %d of %d (head %d): %s", cut, end, head, got)
		}
	}
}

// TestBitFlips: after a clean close no flipped bit anywhere loses or changes
// anything unnoticed (RL3).
func TestBitFlips(t *testing.T) {
	mem, states, _, _ := buildGolden(t)
	want := states[len(states)-1]
	for _, id := range []uint32{1, 2} {
		name := segmentName(id)
		data := fileBytes(t, mem, filepath.Join("log", name))
		for off := range data {
			flipped := bytes.Clone(data)
			flipped[off] ^= 1 << (off % 8)
			got, err := reopen(t, withFile(t, mem, name, flipped))
			switch {
			case err == nil && got != want:
				t.Fatalf("segment %d, bit flipped in byte %d: silently became\n%s", id, off, got)
			case err != nil && !errors.Is(err, base.ErrCorrupt):
				t.Fatalf("segment %d, bit flipped in byte %d: %v", id, off, err)
			case err != nil && !strings.Contains(err.Error(), ".rlog at offset"):
				t.Fatalf("segment %d, bit flipped in byte %d: error names no place: %v", id, off, err)
			}
		}
	}
}

// TestMissingSegments: any segment file that vanishes is noticed.
func TestMissingSegments(t *testing.T) {
	mem := vfs.NewMem()
	opt := goldenOptions()
	l := mustOpen(t, mem, opt)
	for i := range uint64(200) {
		must(t, l.Group(1).StoreLogs(entries(i+1, i+1, 1)))
	}
	must(t, l.Close())
	ids, err := listSegments(mem, "log")
	must(t, err)
	if len(ids) < 4 {
		t.Fatalf("only %d segments", len(ids))
	}
	for _, id := range ids {
		c := mem.CrashClone(1)
		must(t, c.Remove(filepath.Join("log", segmentName(id))))
		if _, err := reopen(t, c); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("without segment %d of %v: %v", id, ids, err)
		}
	}
}

// TestUserBytesThatLookLikeRecords: an entry that holds a whole segment of a log
// does not confuse recovery from a torn tail.
func TestUserBytesThatLookLikeRecords(t *testing.T) {
	golden, _, _, _ := buildGolden(t)
	inner := fileBytes(t, golden, filepath.Join("log", segmentName(1)))
	mem := vfs.NewMem()
	l := mustOpen(t, mem, Options{MarkDelay: -1})
	must(t, l.Group(1).StoreLogs(entries(1, 3, 1)))
	end := l.commit.active.size.Load()
	must(t, l.Group(1).StoreLog(entry(4, 1, raft.LogCommand, string(inner))))
	must(t, l.Close())
	name := segmentName(1)
	data := fileBytes(t, mem, filepath.Join("log", name))
	data = data[:len(data)-recordHeaderBytes-8] // the mark and the last bytes
	data[end+5] ^= 0xff
	c := withFile(t, mem, name, data)
	l, err := Open("log", Options{FS: c})
	must(t, err)
	last, err := l.Group(1).LastIndex()
	must(t, err)
	must(t, l.Close())
	if last != 3 {
		t.Fatalf("last entry is %d, want 3", last)
	}
}

// TestReopenWritesTheTailAgain is RL5: what recovery accepted may be in the page
// cache only, and clean there after a failed fsync.
func TestReopenWritesTheTailAgain(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem, small())
	must(t, l.Group(1).StoreLogs(entries(1, 3, 1)))
	head := int64(segmentHeaderBytes + recordHeaderBytes + 8)
	crashed := mem.CrashClone(1)
	must(t, l.Close())
	var ops []vfs.Op
	l = mustOpen(t, vfs.Faulty(crashed, func(op vfs.Op) vfs.Fault {
		if op.Kind == vfs.OpWrite || op.Kind == vfs.OpSync {
			ops = append(ops, op)
		}
		return vfs.Fault{}
	}), small())
	seen := append([]vfs.Op(nil), ops...)
	must(t, l.Close())
	if len(seen) != 2 || seen[0].Kind != vfs.OpWrite || seen[0].Offset != head || seen[1].Kind != vfs.OpSync {
		t.Fatalf("reopening did %+v, want one write at %d and one sync", seen, head)
	}
}

func FuzzRecovery(f *testing.F) {
	mem, _, _, _ := buildGolden(f)
	for _, id := range []uint32{1, 2} {
		f.Add(fileBytes(f, mem, filepath.Join("log", segmentName(id))), uint16(0), []byte{})
	}
	f.Add([]byte{}, uint16(100), []byte("KR\x01"))
	f.Fuzz(func(t *testing.T, data []byte, at uint16, patch []byte) {
		// Raw bytes as the only segment, and a patch on the golden log's last.
		for _, c := range []struct {
			name string
			mem  *vfs.Mem
		}{
			{segmentName(1), withFile(t, vfsWithDir(t), segmentName(1), data)},
			{segmentName(2), mem},
		} {
			fsys := c.mem
			if c.name == segmentName(2) {
				b := fileBytes(t, mem, filepath.Join("log", c.name))
				copy(b[int(at)%len(b):], patch)
				fsys = withFile(t, mem, c.name, b)
			} else {
				fl, err := fsys.Create(filepath.Join("log", c.name))
				must(t, err)
				_, err = fl.WriteAt(data, 0)
				must(t, err)
				must(t, fl.Close())
			}
			if _, err := reopen(t, fsys); err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatal(err)
			}
		}
	})
}

// FuzzPayloads decodes payloads whose checksum is good but whose content is not.
func FuzzPayloads(f *testing.F) {
	f.Add(byte(recAppend), newTestPayload())
	f.Add(byte(recState), appendImage(nil, groupImage{generation: 1, first: 1, last: 3, stable: map[string][]byte{"k": {1}}}))
	f.Fuzz(func(t *testing.T, typ byte, payload []byte) {
		rp := replay{groups: map[base.GroupID]*replayGroup{}}
		if im, err := parseImage(payload); err == nil && im.last-im.first < 1<<16 {
			_ = rp.state(1, payload, true)
		}
		_ = rp.apply(1, record{typ: recordType(typ), group: 1}, payload, 0)
		var e raft.Log
		_ = decodeEntry(payload, 0, &e)
	})
}

func newTestPayload() []byte {
	b := []byte{2, 0, 0, 0}
	for _, e := range entries(1, 2, 1) {
		b = appendEntry(b, e, 0)
	}
	return b
}

func vfsWithDir(t testing.TB) *vfs.Mem {
	m := vfs.NewMem()
	must(t, m.MkdirAll("log", 0o755))
	return m
}
