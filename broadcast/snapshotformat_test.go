package broadcast

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/keelstate/keelstate/internal/base"
)

// goldenStore has an entry with every extreme that the format knows.
func goldenStore(t testing.TB) *Store {
	s := New(Options{})
	put(t, s, "a", "first")
	put(t, s, "a", "second")
	apply(t, s, Txn{Stamp: 1_700_000_000_000, Then: []Op{Put("empty", nil), Put("\x00\xff", []byte{0, 255}), Put("long", bytes.Repeat([]byte("x"), 300))}})
	if _, err := s.Apply(1000, EncodeCompact(2)); err != nil {
		t.Fatal(err)
	}
	return s
}

func snapshotBytes(t testing.TB, s *Store) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := s.WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestSnapshotGolden(t *testing.T) {
	b := golden(t, "testdata/golden/v1/snapshot.bin", snapshotBytes(t, goldenStore(t)))
	v, err := ReadSnapshot(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	var dump strings.Builder
	dump.WriteString(hex.Dump(b))
	fmt.Fprintf(&dump, "index %d revision %d clock %d compacted %d keys %d\n", v.AppliedIndex(), v.Revision(), v.Clock(), v.Compacted(), v.Len())
	v.Scan("", "", func(key string, e *Entry) bool {
		fmt.Fprintf(&dump, "%q create %d mod %d %q\n", key, e.CreateRevision, e.ModRevision, e.Value)
		return true
	})
	golden(t, "testdata/golden/v1/snapshot.txt", []byte(dump.String()))
}

func TestRestoreGivesBackTheWholeState(t *testing.T) {
	for _, s := range []*Store{New(Options{}), goldenStore(t)} {
		b := snapshotBytes(t, s)
		back := New(Options{})
		put(t, back, "other", "state")
		if err := back.Restore(iotest.OneByteReader(bytes.NewReader(b))); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(snapshotBytes(t, back), b) {
			t.Error("the restored state differs")
		}
		put(t, back, "a", "goes on")
		put(t, s, "a", "goes on")
		if !bytes.Equal(snapshotBytes(t, back), snapshotBytes(t, s)) {
			t.Error("the restored state goes on in another way")
		}
	}
}

func TestSnapshotOfManyBlocks(t *testing.T) {
	s := New(Options{})
	for i := range 40 {
		apply(t, s, Txn{Then: []Op{Put(fmt.Sprintf("k%d", i), bytes.Repeat([]byte{byte(i)}, 50_000))}})
	}
	apply(t, s, Txn{Then: []Op{Put(strings.Repeat("k", MaxKeyBytes), make([]byte, MaxValueBytes))}})
	b := snapshotBytes(t, s)
	back := New(Options{})
	if err := back.Restore(bytes.NewReader(b)); err != nil || !bytes.Equal(snapshotBytes(t, back), b) {
		t.Fatalf("restoring %d bytes: %v", len(b), err)
	}
}

// BC8, and field case B21: a stream that is cut anywhere leaves the old state.
func TestCutSnapshotLeavesTheOldState(t *testing.T) {
	b := snapshotBytes(t, goldenStore(t))
	s := New(Options{})
	put(t, s, "old", "state")
	old := s.Snapshot()
	for n := range b {
		if err := s.Restore(bytes.NewReader(b[:n])); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("cut to %d: %v, want ErrCorrupt", n, err)
		}
		broken := errors.New("broken")
		if err := s.Restore(io.MultiReader(bytes.NewReader(b[:n]), iotest.ErrReader(broken))); !errors.Is(err, broken) || errors.Is(err, base.ErrCorrupt) {
			t.Errorf("broken at %d: %v, want the reader's error", n, err)
		}
	}
	if err := s.Restore(bytes.NewReader(append(bytes.Clone(b), 0))); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("with a byte more: %v", err)
	}
	if s.Snapshot() != old {
		t.Error("a failed restore replaced the state")
	}
	put(t, s, "old", "goes on")
}

func TestSnapshotWithAnyFlippedBitIsRefused(t *testing.T) {
	b := snapshotBytes(t, goldenStore(t))
	for i := range len(b) * 8 {
		c := bytes.Clone(b)
		c[i/8] ^= 1 << (i % 8)
		_, err := ReadSnapshot(bytes.NewReader(c))
		want := base.ErrCorrupt
		if i/8 == 4 || i/8 == 5 {
			want = base.ErrFormatVersion
		}
		if !errors.Is(err, want) {
			t.Errorf("bit %d: %v, want %v", i, err, want)
		}
	}
}

type failingWriter struct{ room int }

func (w *failingWriter) Write(b []byte) (int, error) {
	if w.room -= len(b); w.room < 0 {
		return 0, io.ErrShortWrite
	}
	return len(b), nil
}

func TestWriteSnapshotReportsEveryWriteError(t *testing.T) {
	s := goldenStore(t)
	size := len(snapshotBytes(t, s))
	for room := range size {
		if err := s.WriteSnapshot(&failingWriter{room}); !errors.Is(err, io.ErrShortWrite) {
			t.Errorf("room for %d: %v", room, err)
		}
	}
	if err := s.WriteSnapshot(&failingWriter{size}); err != nil {
		t.Errorf("room for all: %v", err)
	}
}

func FuzzReadSnapshot(f *testing.F) {
	f.Add(snapshotBytes(f, New(Options{})))
	f.Add(snapshotBytes(f, goldenStore(f)))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := ReadSnapshot(bytes.NewReader(b))
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := v.Write(&again); err != nil {
			t.Fatal(err)
		}
		if w, err := ReadSnapshot(&again); err != nil || w.Len() != v.Len() || w.Revision() != v.Revision() {
			t.Fatalf("read %d keys, wrote, read %v, %v", v.Len(), w, err)
		}
	})
}
