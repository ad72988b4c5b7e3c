package metamorphic_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/metamorphic"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// RF12, SN11, SN12: the files of an earlier moment and the segments behind them are
// the shard as it was at the end of the segments, wherever the log is cut.
func TestSegmentsLeadFromTheirBaseToTheCutOnMem(t *testing.T) {
	segments(t, mem.NewDriver(), 20)
}

func TestSegmentsLeadFromTheirBaseToTheCutOnRocks(t *testing.T) {
	d, err := rocks.NewDriver(rocks.Options{MemoryBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	segments(t, d, 4)
}

func segments(t *testing.T, d engine.Driver, short int) {
	rounds := 0
	rapid.Check(t, func(rt *rapid.T) {
		if rounds++; rounds > short {
			return
		}
		dir := filepath.Join(t.TempDir(), fmt.Sprint(rounds))
		defer os.RemoveAll(dir)
		l := &logCut{T: rt, driver: d, dir: dir}
		l.check(t)
	})
}

// logCut is a log of which a part is in segments.
type logCut struct {
	*rapid.T
	driver   engine.Driver
	dir      string
	manifest *snapshot.Manifest
	want     raftfsm.Position
	segments [][]byte
}

func (l *logCut) must(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

func (l *logCut) open(name string) engine.Store {
	s, err := l.driver.Open(filepath.Join(l.dir, name))
	l.must(err)
	return s
}

func (l *logCut) check(t *testing.T) {
	log := metamorphic.Generate(l.T, *ops)
	entries := log.Entries()
	from := rapid.IntRange(1, len(entries)-1).Draw(l.T, "base")
	to := rapid.IntRange(from+1, len(entries)).Draw(l.T, "cut")
	l.must(os.MkdirAll(l.dir, 0o750))
	store := l.open("direct")
	m, err := raftfsm.Open(store, raftfsm.Options{})
	l.must(err)
	m.ApplyBatch(entries[:from])
	l.must(m.Err())
	base := m.Header()
	l.must(store.Checkpoint(filepath.Join(l.dir, "base")))
	m.ApplyBatch(entries[from:to])
	l.must(m.Err())
	h := m.Header()
	l.want = raftfsm.Position{Index: h.AppliedIndex, Term: h.AppliedTerm, Sequence: h.Sequence, ClockMs: h.ClockMs, Digest: m.Digest()}
	l.manifest = &snapshot.Manifest{Group: h.Group, Birth: h.Birth, Incarnation: h.Incarnation, Epoch: h.Epoch, Range: h.Range, M: h.M, Engine: l.driver.Name(),
		Index: h.AppliedIndex, Term: h.AppliedTerm, Sequence: h.Sequence, ClockMs: h.ClockMs,
		Changelog: &snapshot.Changelog{Base: snapshot.Cut{Index: base.AppliedIndex, Term: base.AppliedTerm, Sequence: base.Sequence, ClockMs: base.ClockMs}, Digest: l.want.Digest}}
	l.cut(entries[from:to])
	raw, err := l.manifest.Encode()
	l.must(err)
	l.manifest, err = snapshot.Decode(raw)
	l.must(err)

	l.must(os.CopyFS(filepath.Join(l.dir, "again"), os.DirFS(filepath.Join(l.dir, "base"))))
	replayed := l.open("again")
	l.must(raftfsm.Replay(t.Context(), replayed, l.batches(-1), l.want))
	l.must(replayed.Close())
	replayed = l.open("again") // what came out is durable
	r, err := raftfsm.Open(replayed, raftfsm.Options{})
	l.must(err)
	if got, want := l.content(t, r), l.content(t, m); got != want {
		l.Fatalf("the replay holds\n%s\nwant\n%s", got, want)
	}
	l.must(errors.Join(r.Close(), m.Close()))
	l.lacking(t)
}

// cut puts the entries into segments.
func (l *logCut) cut(entries []raftfsm.Entry) {
	for len(entries) > 0 {
		n := rapid.IntRange(1, len(entries)).Draw(l.T, "entries")
		s := snapshot.Segment{Group: l.manifest.Group, Birth: l.manifest.Birth, Incarnation: l.manifest.Incarnation, First: entries[0].Index}
		for _, e := range entries[:n] {
			s.Entries = append(s.Entries, snapshot.LogEntry{Term: e.Term, Command: e.Command})
		}
		raw, err := s.Encode()
		l.must(err)
		l.segments = append(l.segments, raw)
		l.manifest.Changelog.Segments = append(l.manifest.Changelog.Segments,
			snapshot.SegmentRef{First: s.First, Last: s.Last(), Size: int64(len(raw)), SHA256: sha256.Sum256(raw)})
		entries = entries[n:]
	}
}

// batches gives the entries of the segments, without one of them.
func (l *logCut) batches(without int) iter.Seq2[[]raftfsm.Entry, error] {
	return func(yield func([]raftfsm.Entry, error) bool) {
		for i, raw := range l.segments {
			if i == without {
				continue
			}
			s, err := l.manifest.OpenSegment(&l.manifest.Changelog.Segments[i], raw)
			var entries []raftfsm.Entry
			if err == nil {
				for k, e := range s.Entries {
					entries = append(entries, raftfsm.Entry{Index: s.First + uint64(k), Term: e.Term, Command: e.Command})
				}
			}
			if !yield(entries, err) {
				return
			}
		}
	}
}

// content is everything that must be equal.
func (l *logCut) content(t *testing.T, m *raftfsm.Machine) string {
	h := m.Header()
	v, err := m.ReadView(h.Epoch, h.Incarnation)
	l.must(err)
	defer v.Close()
	sums, err := v.HashAll(t.Context())
	l.must(err)
	sessions, err := v.SessionIDs()
	l.must(err)
	return fmt.Sprint(h.AppliedIndex, h.AppliedTerm, h.Sequence, h.ClockMs, h.Barrier, h.Forgotten, h.Sessions, sessions, sums, m.Digest())
}

// lacking: a replay that lacks a segment, or that is to end elsewhere, is refused.
func (l *logCut) lacking(t *testing.T) {
	wrong := l.want
	wrong.Digest[rapid.IntRange(0, len(wrong.Digest)-1).Draw(l.T, "byte")] ^= 1
	for name, run := range map[string]func(s engine.Store) error{
		"short": func(s engine.Store) error {
			return raftfsm.Replay(t.Context(), s, l.batches(rapid.IntRange(0, len(l.segments)-1).Draw(l.T, "without")), l.want)
		},
		"digest": func(s engine.Store) error { return raftfsm.Replay(t.Context(), s, l.batches(-1), wrong) },
	} {
		l.must(os.CopyFS(filepath.Join(l.dir, name), os.DirFS(filepath.Join(l.dir, "base"))))
		s := l.open(name)
		if err := run(s); !errors.Is(err, base.ErrCorrupt) {
			l.Fatalf("%s: %v", name, err)
		}
		l.must(s.Close())
	}
	i := rapid.IntRange(0, len(l.segments)-1).Draw(l.T, "segment")
	other := slices.Clone(l.segments[i])
	other[rapid.IntRange(0, len(other)-1).Draw(l.T, "at")] ^= 1
	if _, err := l.manifest.OpenSegment(&l.manifest.Changelog.Segments[i], other); !errors.Is(err, base.ErrCorrupt) {
		l.Fatalf("a changed segment: %v", err)
	}
}
