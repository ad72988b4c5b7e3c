package snapshot_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

func sampleSegment(first uint64, commands ...string) *snapshot.Segment {
	s := &snapshot.Segment{Group: 3, Birth: 0x1122334455667788, Incarnation: 2, First: first}
	for i, c := range commands {
		e := snapshot.LogEntry{Term: 5 + uint64(i)/2}
		if c != "-" {
			e.Command = []byte(c)
		}
		s.Entries = append(s.Entries, e)
	}
	return s
}

// withChangelog is a manifest whose files are older, and its segments by key.
func withChangelog(t testing.TB) (*snapshot.Manifest, map[string]*snapshot.Segment) {
	t.Helper()
	m := sampleContent().manifest()
	m.Changelog = &snapshot.Changelog{Base: snapshot.Cut{Index: 4700, Term: 5, Sequence: 8000, ClockMs: 1_600_000_000_000}, Digest: sha256.Sum256([]byte("digest"))}
	all := map[string]*snapshot.Segment{}
	for _, s := range []*snapshot.Segment{sampleSegment(4701, "first", "-", "", "fourth"), sampleSegment(4705, "a", "b", "c", "d", "e", "f"), sampleSegment(4711, "last")} {
		raw := mustSegment(t, s)
		sum := sha256.Sum256(raw)
		key := snapshot.ObjectKey(cluster, sum, 9)
		all[key] = s
		m.Changelog.Segments = append(m.Changelog.Segments, snapshot.SegmentRef{First: s.First, Last: s.Last(), Size: int64(len(raw)), SHA256: sum, Object: key})
	}
	return m, all
}

func mustSegment(t testing.TB, s *snapshot.Segment) []byte {
	t.Helper()
	b, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func goldenBytes(t *testing.T, path string, b []byte) {
	t.Helper()
	if *rewrite {
		if err := os.WriteFile(path, []byte(hex.Dump(b)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.Dump(b); got != string(want) {
		t.Errorf("%s: the encoding changed:\n%s\nwant\n%s", path, got, want)
	}
}

func segmentGoldens() map[string]*snapshot.Segment {
	edge := sampleSegment(1<<63, "-", strings.Repeat("x", 300))
	edge.Group, edge.Birth, edge.Incarnation = ^base.GroupID(0), ^base.Birth(0), ^base.Incarnation(0)
	edge.Entries[1].Term = ^uint64(0)
	return map[string]*snapshot.Segment{"full": sampleSegment(4701, "first", "-", "", "fourth"), "edge": edge}
}

// SN11: what is written is read again, and the bytes are frozen; every prefix is
// damage, and so is every bit that is flipped, but in the version.
func TestSegmentsAreFrozenAndWhole(t *testing.T) {
	for name, s := range segmentGoldens() {
		b := mustSegment(t, s)
		goldenBytes(t, filepath.Join("testdata", "golden", "v1", "segment-"+name+".hex"), b)
		back, err := snapshot.DecodeSegment(b)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(back, s) {
			t.Errorf("%s: decoded %+v, want %+v", name, back, s)
		}
		for n := range b {
			if _, err := snapshot.DecodeSegment(b[:n]); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s cut to %d of %d bytes: %v", name, n, len(b), err)
			}
		}
		for bit := range 8 * len(b) {
			b[bit/8] ^= 1 << (bit % 8)
			want := base.ErrCorrupt
			if bit/8 == 4 {
				want = base.ErrFormatVersion
			}
			if _, err := snapshot.DecodeSegment(b); !errors.Is(err, want) {
				t.Fatalf("%s with bit %d flipped: %v, want %v", name, bit, err, want)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
}

// SN11: a segment that says something impossible with a right checksum.
func TestImpossibleSegmentsAreCorrupt(t *testing.T) {
	b := mustSegment(t, sampleSegment(4701, "first", "-", "", "fourth"))
	for name, change := range map[string]func(b []byte){
		"one entry more":  func(b []byte) { b[37]++ },
		"one entry less":  func(b []byte) { b[37]-- },
		"first is 0":      func(b []byte) { clear(b[29:37]); b[37], b[38] = 3, 0 },
		"no entries":      func(b []byte) { copy(b[37:45], b[29:37]); b[37]-- },
		"kind":            func(b []byte) { b[45] = 2 },
		"empty has bytes": func(b []byte) { b[45] = 0 },
		"term is 0":       func(b []byte) { clear(b[46:54]) },
		"term goes back":  func(b []byte) { b[46] = 200 },
		"long command":    func(b []byte) { b[57] = 0xff },
	} {
		c := bytes.Clone(b)
		change(c)
		if _, err := snapshot.DecodeSegment(reseal(c)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// SN12: version 2 is frozen and whole, and without segments it is version 1.
func TestManifestsWithAChangelog(t *testing.T) {
	m, segments := withChangelog(t)
	b := mustEncode(t, m)
	goldenBytes(t, filepath.Join("testdata", "golden", "v2", "manifest-changelog.hex"), b)
	back, err := snapshot.Decode(b)
	if err != nil || !reflect.DeepEqual(back, m) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	for n := range b {
		if _, err := snapshot.Decode(b[:n]); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(b), err)
		}
	}
	for bit := range 8 * len(b) {
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := snapshot.Decode(b); !errors.Is(err, base.ErrCorrupt) && !(bit/8 == 4 && errors.Is(err, base.ErrFormatVersion)) {
			t.Fatalf("bit %d flipped: %v", bit, err)
		}
		b[bit/8] ^= 1 << (bit % 8)
	}
	if err := snapshot.Dump(&bytes.Buffer{}, b); err != nil {
		t.Error(err)
	}
	for i := range m.Changelog.Segments {
		ref := &m.Changelog.Segments[i]
		raw := mustSegment(t, segments[ref.Object])
		if _, err := m.OpenSegment(ref, raw); err != nil {
			t.Error(err)
		}
		if err := snapshot.Dump(&bytes.Buffer{}, raw); err != nil {
			t.Error(err)
		}
	}
	plain := m.BaseManifest()
	if plain.Index != 4700 || mustEncode(t, plain)[4] != 1 || m.FetchManifest().Bytes() != m.Bytes() {
		t.Errorf("the base is %+v", plain)
	}
}

// SN12: a gap, an overlap, an end elsewhere, a base that is not older.
func TestManifestsWithAnImpossibleChangelogAreRefused(t *testing.T) {
	for name, change := range map[string]func(m *snapshot.Manifest){
		"no segments":  func(m *snapshot.Manifest) { m.Changelog.Segments = nil },
		"gap":          func(m *snapshot.Manifest) { m.Changelog.Segments[1].First++ },
		"overlap":      func(m *snapshot.Manifest) { m.Changelog.Segments[0].Last++ },
		"other order":  func(m *snapshot.Manifest) { s := m.Changelog.Segments; s[0], s[1] = s[1], s[0] },
		"twice":        func(m *snapshot.Manifest) { m.Changelog.Segments[1] = m.Changelog.Segments[0] },
		"ends before":  func(m *snapshot.Manifest) { m.Changelog.Segments = m.Changelog.Segments[:2] },
		"ends behind":  func(m *snapshot.Manifest) { m.Index-- },
		"base behind":  func(m *snapshot.Manifest) { m.Changelog.Base.Index = m.Index },
		"base of term": func(m *snapshot.Manifest) { m.Changelog.Base.Term = m.Term + 1 },
		"later clock":  func(m *snapshot.Manifest) { m.Changelog.Base.ClockMs = m.ClockMs + 1 },
		"no bytes":     func(m *snapshot.Manifest) { m.Changelog.Segments[0].Size = 0 },
		"too large":    func(m *snapshot.Manifest) { m.Changelog.Segments[0].Size = snapshot.MaxSegmentBytes + 1 },
	} {
		m, _ := withChangelog(t)
		change(m)
		if _, err := m.Encode(); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	m, _ := withChangelog(t)
	ref, foreign := &m.Changelog.Segments[0], sampleSegment(4701, "first", "-", "", "fourth")
	foreign.Birth++
	raw := mustSegment(t, foreign)
	ref.SHA256, ref.Size = sha256.Sum256(raw), int64(len(raw))
	if _, err := m.OpenSegment(ref, raw); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("a segment of another birth: %v", err)
	}
	if err := m.CheckPlaces(); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("a segment under the name of another: %v", err)
	}
}

// Only what is missing of a changelog fails its upload, by name; verify and reading
// back find all of it.
func TestUploadedChangelogs(t *testing.T) {
	s := openStore(t)
	c := sampleContent()
	m := c.whole()
	known := registry{}
	m.Index, m.Term, m.Sequence, m.ClockMs = 4700, 5, 8000, 1_600_000_000_000
	first := mustUpload(t, c.write(t), m, uploadOptions(s, 1, known))
	known.add(first)
	later := c.whole()
	later.Files, later.Term = m.Files, 9
	later.Changelog = &snapshot.Changelog{Base: m.Cut()}
	fresh := map[string]bool{}
	for i, seg := range []*snapshot.Segment{sampleSegment(4701, "first", "-", "", "fourth"), sampleSegment(4705, "a", "b", "c", "d", "e", "f", "g")} {
		ref, err := snapshot.PutSegment(testCtx(t), seg, uploadOptions(s, uint64(2+i), nil))
		if err != nil {
			t.Fatal(err)
		}
		later.Changelog.Segments = append(later.Changelog.Segments, ref)
		fresh[ref.Object] = i == 1
	}
	o := uploadOptions(s, 3, nil)
	o.CheckReused = true
	u, err := snapshot.UploadChangelog(testCtx(t), later, fresh, o)
	if err != nil {
		t.Fatal(err)
	}
	if len(u.New) != 2 || u.New[0].Key != later.Changelog.Segments[1].Object || u.NewBytes != later.Changelog.Segments[1].Size || u.FullBytes != later.Bytes() {
		t.Errorf("uploaded %+v", u)
	}
	cp := checkpointOf(2, later, u)
	key := putCheckpoint(t, s, cp)
	v, err := verify(t, s, key, true)
	if err != nil || v.Segments != 2 {
		t.Fatalf("verified %+v, %v", v, err)
	}
	back, err := cp.ReadManifest(testCtx(t), s, &cp.Shards[0])
	if err != nil || !reflect.DeepEqual(back, later) {
		t.Fatalf("read %+v, %v", back, err)
	}
	dir := filepath.Join(t.TempDir(), "fetched")
	all := back.FetchManifest()
	if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, all), all, dir, snapshot.FetchOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range back.Changelog.Segments {
		if _, err := back.ReadSegment(dir, &back.Changelog.Segments[i]); err != nil {
			t.Error(err)
		}
	}
	lost := later.Changelog.Segments[0].Object
	putBack := s.keep(t, lost)
	if err := os.Remove(s.path(lost)); err != nil {
		t.Fatal(err)
	}
	if _, err := snapshot.UploadChangelog(testCtx(t), later, fresh, o); !errors.Is(err, base.ErrNotFound) || !strings.Contains(err.Error(), lost) {
		t.Errorf("a lost segment: %v", err)
	}
	v, err = verify(t, s, key, true)
	expectBad(t, v, err, lost, snapshot.FaultMissing)
	putBack()
	s.change(t, lost, func(b []byte) []byte { b[50] ^= 1; return b })
	v, err = verify(t, s, key, true)
	expectBad(t, v, err, lost, snapshot.FaultDamaged)
}

// A claimed checkpoint takes its segments with it, but none that another one uses.
func TestDeleteClaimedKnowsSegments(t *testing.T) {
	s := openStore(t)
	c := sampleContent()
	m := c.whole()
	m.Index, m.Term, m.Sequence, m.ClockMs = 4700, 5, 8000, 1_600_000_000_000
	alone := mustUpload(t, c.write(t), m, uploadOptions(s, 1, registry{})).ManifestKey // of no checkpoint
	var cut snapshot.Manifest
	var keys, segments []string
	for i, seg := range []*snapshot.Segment{sampleSegment(4701, "first", "-", "", "fourth"), sampleSegment(4705, "a", "b")} {
		o := uploadOptions(s, uint64(2+i), nil)
		ref, err := snapshot.PutSegment(testCtx(t), seg, o)
		if err != nil {
			t.Fatal(err)
		}
		segments = append(segments, ref.Object)
		next := *m
		next.Index, next.Term, next.Sequence, next.ClockMs = seg.Last(), 9, 9000, 1_700_000_000_000
		next.Changelog = &snapshot.Changelog{Base: m.Cut(), Segments: []snapshot.SegmentRef{ref}}
		if i > 0 {
			next.Changelog.Segments = append(slices.Clone(cut.Changelog.Segments), ref)
		}
		u, err := snapshot.UploadChangelog(testCtx(t), &next, map[string]bool{ref.Object: true}, o)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, putCheckpoint(t, s, checkpointOf(uint64(2+i), &next, u)))
		cut = next
	}
	for i, want := range []string{segments[1], segments[0]} { // the second one first: the other uses its first segment
		if _, err := snapshot.DeleteClaimed(testCtx(t), s, keys[1-i], [sha256.Size]byte{}); err != nil {
			t.Fatal(err)
		}
		left := keysOf(t, s)
		if slices.Contains(left, want) || i == 0 && !slices.Contains(left, segments[0]) || i == 1 && !slices.Equal(left, []string{alone}) {
			t.Errorf("left are %q", left)
		}
		if i == 0 {
			if _, err := verify(t, s, keys[0], true); err != nil {
				t.Error(err)
			}
		}
	}
}

// FuzzDecodeSegment: no bytes make it panic or allocate out of proportion, and what
// it accepts it writes the same.
func FuzzDecodeSegment(f *testing.F) {
	for _, s := range segmentGoldens() {
		f.Add(mustSegment(f, s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, in := range [][]byte{b, resealed(b)} {
			s, err := snapshot.DecodeSegment(in)
			if err != nil {
				continue
			}
			if again := mustSegment(t, s); !bytes.Equal(again, in) {
				t.Fatalf("%x became %x", in, again)
			}
		}
	})
}

func resealed(b []byte) []byte {
	if len(b) < sha256.Size {
		return b
	}
	return reseal(b)
}
