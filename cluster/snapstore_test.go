package cluster

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

var rewrite = flag.Bool("rewrite", false, "rewrite golden files")

// golden compares bytes with a golden file.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", "golden", "v1", name)
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: the format changed:\n%s\nwant\n%s", name, got, want)
	}
}

// damaged demands that parse refuses every prefix and every flipped bit as
// damage. A flip that parse takes must be one that changes nothing: same says
// whether the result is the first one.
func damaged[T any](t *testing.T, raw []byte, parse func([]byte) (T, error), same func(T) bool) {
	t.Helper()
	body := bytes.TrimRight(raw, "\n")
	for n := range body {
		if _, err := parse(raw[:n]); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(raw), err)
		}
	}
	for bit := range 8 * len(raw) {
		b := bytes.Clone(raw)
		b[bit/8] ^= 1 << (bit % 8)
		v, err := parse(b)
		if err == nil && same(v) { // a letter of a key in another case, or white space
			continue
		}
		if !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("bit %d flipped (%q): %v", bit, b, err)
		}
	}
}

func newSnapStore(t testing.TB, dir string) *snapStore {
	t.Helper()
	s, err := openSnapStore(dir, slog.New(slog.DiscardHandler), os.RemoveAll)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// stageSnapshot makes a checkpoint of two files and stages it.
func stageSnapshot(t testing.TB, s *snapStore, index uint64) []byte {
	t.Helper()
	dir := filepath.Join(s.incoming(), fmt.Sprintf("tmp-%d", index))
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"1.sst": fmt.Sprint("data ", index), "CURRENT": "MANIFEST-1\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := s.stage(context.Background(), dir, &snapshot.Manifest{Group: 1, Birth: 9, Epoch: 1,
		Range: keygroup.Range{Lo: 0, Hi: 128}, M: 128, Engine: "mem", Index: index, Term: 3})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func createSink(t testing.TB, s *snapStore, index uint64) raft.SnapshotSink {
	t.Helper()
	sink, err := s.Create(raft.SnapshotVersionMax, index, 3, raft.Configuration{Servers: []raft.Server{{ID: "n1/1", Address: "n1"}}}, 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	return sink
}

// makeSnapshot makes a whole snapshot and returns its id and manifest.
func makeSnapshot(t testing.TB, s *snapStore, index uint64) (string, []byte) {
	t.Helper()
	raw := stageSnapshot(t, s, index)
	sink := createSink(t, s, index)
	if _, err := sink.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := sink.Close(); err != nil {
		t.Fatal(err)
	}
	return sink.ID(), raw
}

func ids(t testing.TB, s *snapStore) []string {
	t.Helper()
	metas, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, m := range metas {
		out = append(out, m.ID)
	}
	return out
}

func TestSnapStoreKeepsTheNewestWholeSnapshot(t *testing.T) {
	dir := t.TempDir()
	s := newSnapStore(t, dir)
	if m, _, _, err := s.newest(); m != nil || err != nil {
		t.Fatalf("an empty store: %v, %v", m, err)
	}
	makeSnapshot(t, s, 10)
	id, raw := makeSnapshot(t, s, 20)
	for range 2 { // and opened again
		if got := ids(t, s); !slices.Equal(got, []string{id}) {
			t.Fatalf("snapshots %v, want %s", got, id)
		}
		m, meta, files, err := s.newest()
		if err != nil || m.Index != 20 || meta.Index != 20 || meta.Term != 3 || meta.ConfigurationIndex != 2 {
			t.Fatalf("newest: %+v, %+v, %v", m, meta, err)
		}
		if err := snapshot.Verify(context.Background(), files, m); err != nil {
			t.Fatal(err)
		}
		meta, rc, err := s.Open(id)
		if err != nil || meta.Size != int64(len(raw)) {
			t.Fatalf("open: %+v, %v", meta, err)
		}
		if got, err := io.ReadAll(rc); err != nil || !bytes.Equal(got, raw) {
			t.Fatalf("the stream is not the manifest: %d bytes, %v", len(got), err)
		}
		if err := rc.Close(); err != nil {
			t.Fatal(err)
		}
		if d, err := s.filesOf(manifestSum(raw)); err != nil || d != files {
			t.Fatalf("files of the manifest: %q, %v", d, err)
		}
		s = newSnapStore(t, dir)
	}
	if _, err := s.filesOf(strings.Repeat("0", 64)); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("files of an unknown manifest: %v", err)
	}
}

// B21: a snapshot is whole or not there. What a crash leaves at any step of
// making one is never listed, goes at the next start, and hides nothing.
func TestSnapStoreNeverListsHalfASnapshot(t *testing.T) {
	dir := t.TempDir()
	s := newSnapStore(t, dir)
	whole, _ := makeSnapshot(t, s, 10)
	leftovers := map[string]func(string) error{
		"empty":        func(string) error { return nil },
		"meta only":    func(d string) error { return os.WriteFile(filepath.Join(d, "META"), []byte("{}"), 0o640) },
		"half a meta":  func(d string) error { return os.WriteFile(filepath.Join(d, "META.tmp1"), []byte("{"), 0o640) },
		"all in place": func(d string) error { return os.CopyFS(d, os.DirFS(filepath.Join(s.snapshots(), whole))) },
	}
	for name, fill := range leftovers {
		for _, prefix := range []string{"tmp-", "tmp-dead-"} {
			d := filepath.Join(s.snapshots(), prefix+"0000000000000003-0000000000000063-1")
			if err := os.Mkdir(d, 0o750); err != nil {
				t.Fatal(err)
			}
			if err := fill(d); err != nil {
				t.Fatal(err)
			}
			if got := ids(t, s); !slices.Equal(got, []string{whole}) {
				t.Errorf("%s: listed %v", name, got)
			}
			s = newSnapStore(t, dir)
			if left, err := dirNames(s.snapshots()); err != nil || !slices.Equal(left, []string{whole}) {
				t.Errorf("%s: after a start the directory holds %v, %v", name, left, err)
			}
		}
	}
}

// A sink that is cancelled, gets no manifest, or whose files are not there or of
// another size, leaves nothing behind.
func TestSnapSinkFailsWithoutATrace(t *testing.T) {
	s := newSnapStore(t, t.TempDir())
	check := func(name string) {
		t.Helper()
		if left, err := dirNames(s.snapshots()); err != nil || len(left) != 0 {
			t.Errorf("%s: left %v, %v", name, left, err)
		}
	}
	raw := stageSnapshot(t, s, 10)
	sink := createSink(t, s, 10)
	if _, err := sink.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(sink.Cancel(), sink.Close()); err != nil {
		t.Errorf("cancel and close: %v", err)
	}
	check("cancelled")
	for name, b := range map[string][]byte{"nothing": nil, "garbage": []byte("garbage"), "half": raw[:len(raw)/2]} {
		sink := createSink(t, s, 10)
		if _, err := sink.Write(b); err != nil {
			t.Fatal(err)
		}
		if err := sink.Close(); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		check(name)
	}
	sink = createSink(t, s, 10)
	if _, err := sink.Write(make([]byte, maxManifestBytes+1)); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("a manifest that is too large: %v", err)
	}
	for name, spoil := range map[string]func(d string) error{
		"another size":  func(d string) error { return os.WriteFile(filepath.Join(d, "1.sst"), nil, 0o640) },
		"a file is out": func(d string) error { return os.Remove(filepath.Join(d, "1.sst")) },
		"all are out":   os.RemoveAll,
	} {
		raw := stageSnapshot(t, s, 11)
		if err := spoil(s.incomingDir(raw)); err != nil {
			t.Fatal(err)
		}
		sink := createSink(t, s, 11)
		if _, err := sink.Write(raw); err != nil {
			t.Fatal(err)
		}
		if err := sink.Close(); err == nil {
			t.Errorf("%s: a snapshot was made", name)
		}
		check(name)
	}
	if _, err := s.Create(raft.SnapshotVersionMin, 1, 1, raft.Configuration{}, 1, nil); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("an older version: %v", err)
	}
}

// A snapshot that a peer is fetching stays until it was quiet for a while.
func TestSnapStoreReapSparesWhatIsServed(t *testing.T) {
	s := newSnapStore(t, t.TempDir())
	old, raw := makeSnapshot(t, s, 10)
	if _, err := s.filesOf(manifestSum(raw)); err != nil {
		t.Fatal(err)
	}
	next, _ := makeSnapshot(t, s, 20)
	if got := ids(t, s); !slices.Equal(got, []string{next, old}) {
		t.Fatalf("while it is served: %v", got)
	}
	_, rc, err := s.Open(next) // sent to a peer: it will ask for the files
	if err != nil {
		t.Fatal(err)
	}
	if err := rc.Close(); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.mu.served[old] = time.Now().Add(-serveGrace - time.Second)
	s.mu.Unlock()
	newest, _ := makeSnapshot(t, s, 30)
	if got := ids(t, s); !slices.Equal(got, []string{newest, next}) {
		t.Fatalf("after the grace: %v", got)
	}
	s.mu.Lock()
	_, kept := s.mu.served[old]
	s.mu.Unlock()
	if kept {
		t.Error("the table of served snapshots grows for ever")
	}
}

// A newest snapshot that is damaged is named, never skipped in silence.
func TestSnapStoreNamesADamagedSnapshot(t *testing.T) {
	for name, spoil := range map[string]func(d string) error{
		"no META":          func(d string) error { return os.Remove(filepath.Join(d, "META")) },
		"half a META":      func(d string) error { return os.Truncate(filepath.Join(d, "META"), 30) },
		"no MANIFEST":      func(d string) error { return os.Remove(filepath.Join(d, "MANIFEST")) },
		"wrong MANIFEST":   func(d string) error { return os.WriteFile(filepath.Join(d, "MANIFEST"), []byte("KSSM\x01"), 0o640) },
		"under other name": func(d string) error { return os.Rename(d, d+"9") },
	} {
		s := newSnapStore(t, t.TempDir())
		id, _ := makeSnapshot(t, s, 10)
		if err := spoil(filepath.Join(s.snapshots(), id)); err != nil {
			t.Fatal(err)
		}
		_, _, _, err := s.newest()
		if !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), id) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// goldenMeta is the META file of a snapshot of fixed content.
func goldenMeta(t testing.TB) []byte {
	t.Helper()
	s := newSnapStore(t, t.TempDir())
	raw := stageSnapshot(t, s, 10)
	sink := createSink(t, s, 10).(*snapSink)
	sink.meta.ID = "0000000000000003-000000000000000a-1700000000000"
	if _, err := sink.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := sink.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(s.snapshots(), sink.meta.ID, "META"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestSnapshotMetaFormat(t *testing.T) {
	raw := goldenMeta(t)
	golden(t, "snapshot-META.json", raw)
	first, err := parseSnapMeta(raw)
	if err != nil {
		t.Fatal(err)
	}
	damaged(t, raw, parseSnapMeta, func(m *snapMeta) bool {
		return m.ManifestSHA256 == first.ManifestSHA256 && fmt.Sprint(*m.Raft) == fmt.Sprint(*first.Raft)
	})
	versioned(t, raw, "meta", func(b []byte) error { _, err := parseSnapMeta(b); return err })
}
