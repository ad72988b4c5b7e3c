package mem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/internal/durable"
	"github.com/keelstate/keelstate/internal/base"
)

var scanned = engine.FamilyOptions{Use: engine.UseScanned, GroupWidth: 2}

func openStore(t testing.TB, dir string) engine.Store {
	t.Helper()
	s, err := NewDriver().Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureFamily(1, scanned); err != nil {
		t.Fatal(err)
	}
	return s
}

func put(t testing.TB, s engine.Store, key, value string) {
	t.Helper()
	var b engine.Batch
	b.Put(1, []byte(key), []byte(value))
	b.Put(engine.MetaFamily, []byte(key), []byte(value))
	if err := s.Write(&b); err != nil {
		t.Fatal(err)
	}
}

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantValue(t testing.TB, s engine.Reader, key, want string) {
	t.Helper()
	for _, f := range []engine.FamilyID{1, engine.MetaFamily} {
		if v, ok, err := s.Get(f, []byte(key)); err != nil || ok != (want != "") || string(v) != want {
			t.Fatalf("family %d: %q is %q, %v, %v; want %q", f, key, v, ok, err, want)
		}
	}
}

func images(t testing.TB, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, imagePrefix+"*"))
	do(t, err)
	return names
}

// TestCrashStates: every directory that a crash during a Flush can leave opens
// as the state before or after it (ME3).
func TestCrashStates(t *testing.T) {
	for name, crash := range map[string]struct {
		leave func(t *testing.T, dir string)
		want  string
	}{
		"image half written": {func(t *testing.T, dir string) {
			do(t, os.WriteFile(filepath.Join(dir, imageName(2)+durable.TempSuffix), []byte("KSMEM"), 0o644))
		}, "old"},
		"image renamed, manifest not written": {func(t *testing.T, dir string) {
			do(t, os.WriteFile(filepath.Join(dir, imageName(2)), []byte("anything"), 0o644))
		}, "old"},
		"manifest half written": {func(t *testing.T, dir string) {
			do(t, os.WriteFile(filepath.Join(dir, manifestFile+durable.TempSuffix), []byte("KS"), 0o644))
		}, "old"},
		"old image not removed": {func(t *testing.T, dir string) {
			old, err := os.ReadFile(images(t, dir)[0])
			do(t, err)
			s := openStore(t, dir)
			put(t, s, "k", "new")
			do(t, s.Flush())
			do(t, s.Close())
			do(t, os.WriteFile(filepath.Join(dir, imageName(1)), old, 0o644))
		}, "new"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "s")
			s := openStore(t, dir)
			put(t, s, "k", "old")
			do(t, s.Flush())
			do(t, s.Close())
			crash.leave(t, dir)
			s = openStore(t, dir)
			wantValue(t, s, "k", crash.want)
			if left := images(t, dir); len(left) != 1 {
				t.Fatalf("images left: %v", left)
			}
			put(t, s, "k", "newer")
			do(t, s.Flush())
			do(t, s.Close())
			s = openStore(t, dir)
			wantValue(t, s, "k", "newer")
			do(t, s.Close())
			do(t, NewDriver().Verify(dir))
			if left, _ := filepath.Glob(filepath.Join(dir, "*"+durable.TempSuffix)); len(left) != 0 {
				t.Fatalf("temporary files left: %v", left)
			}
		})
	}
}

// TestCrashAtCreation: a crash between the marker and the first manifest leaves
// an empty store.
func TestCrashAtCreation(t *testing.T) {
	dir := t.TempDir()
	do(t, engine.WriteMarker(dir, marker))
	s := openStore(t, dir)
	wantValue(t, s, "k", "")
	do(t, s.Close())
}

// TestLossIsFound: a file that is missing or another file's content is an
// error, never an older state (ME5).
func TestLossIsFound(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, dir string){
		"no manifest": func(t *testing.T, dir string) { do(t, os.Remove(filepath.Join(dir, manifestFile))) },
		"no image":    func(t *testing.T, dir string) { do(t, os.Remove(images(t, dir)[0])) },
		"empty image": func(t *testing.T, dir string) { do(t, os.Truncate(images(t, dir)[0], 0)) },
		"another intact image": func(t *testing.T, dir string) {
			b, _ := encodeImage(t, testRoot(), 1)
			do(t, os.WriteFile(images(t, dir)[0], b, 0o644))
		},
		"empty manifest": func(t *testing.T, dir string) { do(t, os.Truncate(filepath.Join(dir, manifestFile), 0)) },
		"empty marker":   func(t *testing.T, dir string) { do(t, os.Truncate(filepath.Join(dir, engine.MarkerFile), 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "s")
			s := openStore(t, dir)
			put(t, s, "k", "v")
			do(t, s.Flush())
			do(t, s.Close())
			before := images(t, dir)
			damage(t, dir)
			d := NewDriver()
			if _, err := d.Open(dir); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("open: %v", err)
			}
			if err := d.Verify(dir); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("verify: %v", err)
			}
			if name == "no manifest" && len(images(t, dir)) != len(before) {
				t.Fatal("opening without a manifest removed the image")
			}
		})
	}
}

// TestFlushFailure: a Flush that cannot write leaves the older image durable,
// and the store usable.
func TestFlushFailure(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "s")
	s := openStore(t, dir)
	put(t, s, "k", "old")
	do(t, s.Flush())
	put(t, s, "k", "new")
	// A directory in the place of the temporary file makes its creation fail,
	// for any user.
	block := filepath.Join(dir, imageName(2)+durable.TempSuffix)
	do(t, os.MkdirAll(filepath.Join(block, "x"), 0o755))
	if err := s.Flush(); !errors.Is(err, base.ErrDiskFailed) {
		t.Fatalf("flush: %v", err)
	}
	if v, _, err := s.DurableGet([]byte("k")); err != nil || string(v) != "old" {
		t.Fatalf("durable %q, %v", v, err)
	}
	wantValue(t, s, "k", "new")
	do(t, os.RemoveAll(block))
	do(t, s.Flush())
	do(t, s.Close())
	s = openStore(t, dir)
	wantValue(t, s, "k", "new")

	// The same for the manifest: nothing is created or dropped.
	block = filepath.Join(dir, manifestFile+durable.TempSuffix)
	do(t, os.MkdirAll(filepath.Join(block, "x"), 0o755))
	if err := s.EnsureFamily(2, scanned); !errors.Is(err, base.ErrDiskFailed) {
		t.Fatalf("creating a family: %v", err)
	}
	if err := s.DropFamily(1); !errors.Is(err, base.ErrDiskFailed) {
		t.Fatalf("dropping a family: %v", err)
	}
	if n := len(s.Families()); n != 2 {
		t.Fatalf("%d families", n)
	}
	put(t, s, "k", "newest")
	if err := s.Flush(); !errors.Is(err, base.ErrDiskFailed) {
		t.Fatalf("flush: %v", err)
	}
	do(t, os.RemoveAll(block))
	do(t, s.Flush())
	do(t, s.Close())
	s = openStore(t, dir)
	wantValue(t, s, "k", "newest")
	do(t, s.Close())
}

// TestUnknownDurability: after a directory could not be synced, nothing is
// written any more, but reads go on.
func TestUnknownDurability(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "s")
	s := openStore(t, dir)
	put(t, s, "k", "v")
	s.(*store).fail(fmt.Errorf("flushing: %w", &durable.DirError{Dir: dir, Err: os.ErrInvalid}))
	var b engine.Batch
	b.Put(1, []byte("k"), []byte("w"))
	for name, err := range map[string]error{
		"Write": s.Write(&b), "Flush": s.Flush(), "EnsureFamily": s.EnsureFamily(5, scanned), "DropFamily": s.DropFamily(1),
	} {
		if !errors.Is(err, base.ErrDiskFailed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantValue(t, s, "k", "v")
	do(t, s.Close())
}

func TestCheckpointLeftover(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, filepath.Join(dir, "s"))
	put(t, s, "k", "v")
	do(t, os.MkdirAll(filepath.Join(dir, "c"+durable.TempSuffix, "half"), 0o755))
	do(t, s.Checkpoint(filepath.Join(dir, "c")))
	do(t, s.Close())
	c := openStore(t, filepath.Join(dir, "c"))
	wantValue(t, c, "k", "v")
	do(t, c.Close())
}

func TestTooLarge(t *testing.T) {
	s := openStore(t, filepath.Join(t.TempDir(), "s"))
	defer s.Close()
	var b engine.Batch
	b.Put(1, []byte("a"), nil)
	b.Put(1, []byte("k"), make([]byte, maxEntryBytes))
	if err := s.Write(&b); !errors.Is(err, base.ErrTooLarge) {
		t.Fatal(err)
	}
	wantValue(t, s, "a", "")
	b.Reset()
	b.Put(1, []byte("k"), make([]byte, maxEntryBytes-1))
	do(t, s.Write(&b))
	do(t, s.Flush())
	do(t, s.Close())
	do(t, NewDriver().Verify(s.(*store).dir))
}

// TestSnapshotUnderWrites: roots that were published long ago stay as they were
// while the writer goes on (ME1); run it with -race.
func TestSnapshotUnderWrites(t *testing.T) {
	s := openStore(t, filepath.Join(t.TempDir(), "s"))
	const keys, rounds = 500, 40
	type taken struct {
		view  engine.View
		round int
	}
	views := make(chan taken, rounds)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for v := range views {
				for pass := range 3 {
					it := v.view.Scan(1, nil, nil, engine.ScanOptions{Reverse: pass == 1})
					n := 0
					for ; it.Next(); n++ {
						if want := fmt.Sprint(v.round); string(it.Value()) != want {
							t.Errorf("view of round %d: %q is %q", v.round, it.Key(), it.Value())
						}
					}
					it.Close()
					if n != keys {
						t.Errorf("view of round %d has %d keys", v.round, n)
					}
				}
				v.view.Close()
			}
		})
	}
	for round := range rounds {
		var b engine.Batch
		if round%7 == 3 {
			b.DeleteRange(1, nil, []byte("\xff"))
		}
		for k := range keys {
			b.Put(1, fmt.Appendf(nil, "%d-%d", k*7919%keys, k), fmt.Append(nil, round))
		}
		do(t, s.Write(&b))
		v, err := s.NewView()
		do(t, err)
		views <- taken{v, round}
	}
	close(views)
	wg.Wait()
	do(t, s.Close())
}

func TestClosedDriver(t *testing.T) {
	d := NewDriver()
	do(t, d.Close())
	if _, err := d.Open(filepath.Join(t.TempDir(), "s")); !errors.Is(err, base.ErrClosed) {
		t.Fatal(err)
	}
}
