package vfs

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, fsys FS, name string, off int64, data string, sync bool) {
	t.Helper()
	f, err := fsys.OpenReadWrite(name)
	if errors.Is(err, fs.ErrNotExist) {
		f, err = fsys.Create(name)
	}
	must(t, err)
	_, err = f.WriteAt([]byte(data), off)
	must(t, err)
	if sync {
		must(t, f.SyncData())
	}
	must(t, f.Close())
}

func read(t *testing.T, fsys FS, name string) string {
	t.Helper()
	f, err := fsys.Open(name)
	must(t, err)
	size, err := f.Size()
	must(t, err)
	b := make([]byte, size)
	if size > 0 {
		_, err = f.ReadAt(b, 0)
		must(t, err)
	}
	must(t, f.Close())
	return string(b)
}

// TestConformance holds for every implementation.
func TestConformance(t *testing.T) {
	pass := func(Op) Fault { return Fault{} }
	for name, fsys := range map[string]FS{"os": OS, "mem": NewMem(), "faulty": Faulty(NewMem(), pass)} {
		t.Run(name, func(t *testing.T) {
			dir := "top"
			if name == "os" {
				dir = t.TempDir()
			}
			sub := filepath.Join(dir, "a", "b")
			must(t, MkdirAllDurable(fsys, sub, 0o755))
			must(t, fsys.MkdirAll(sub, 0o755))
			p := func(s string) string { return filepath.Join(sub, s) }
			write(t, fsys, p("x"), 3, "hello", true)
			if got := read(t, fsys, p("x")); got != "\x00\x00\x00hello" {
				t.Fatalf("read %q", got)
			}
			f, err := fsys.OpenReadWrite(p("x"))
			must(t, err)
			must(t, f.Truncate(4))
			must(t, f.Truncate(6))
			must(t, f.Sync())
			must(t, f.Close())
			if got := read(t, fsys, p("x")); got != "\x00\x00\x00h\x00\x00" {
				t.Fatalf("after truncation %q", got)
			}
			must(t, fsys.Link(p("x"), p("y")))
			if err := fsys.Link(p("x"), p("y")); !errors.Is(err, fs.ErrExist) {
				t.Errorf("link onto a file: %v", err)
			}
			must(t, fsys.Rename(p("x"), p("z")))
			write(t, fsys, p("z"), 0, "link", false)
			if got := read(t, fsys, p("y")); got != "link\x00\x00" {
				t.Errorf("the link reads %q", got)
			}
			names, err := fsys.List(sub)
			must(t, err)
			if fmt.Sprint(names) != "[y z]" {
				t.Errorf("list is %v", names)
			}
			must(t, fsys.SyncDir(sub))
			st, err := fsys.Stat(p("z"))
			must(t, err)
			if st.Size != 6 || st.Dir {
				t.Errorf("stat is %+v", st)
			}
			if st, err = fsys.Stat(sub); err != nil || !st.Dir {
				t.Errorf("stat of a directory: %+v, %v", st, err)
			}
			for what, err := range map[string]error{
				"open":   second(fsys.Open(p("none"))),
				"openrw": second(fsys.OpenReadWrite(p("none"))),
				"create": second(fsys.Create(filepath.Join(dir, "no", "file"))),
				"remove": fsys.Remove(p("none")),
				"stat":   second(fsys.Stat(p("none"))),
				"list":   second(fsys.List(p("none"))),
				"rename": fsys.Rename(p("none"), p("q")),
				"link":   fsys.Link(p("none"), p("q")),
			} {
				if !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s of what is not there: %v", what, err)
				}
			}
			if err := fsys.Remove(sub); err == nil {
				t.Error("a directory with files was removed")
			}
			must(t, fsys.Remove(p("y")))
			ro, err := fsys.Open(p("z"))
			must(t, err)
			if _, err := ro.WriteAt([]byte("x"), 0); err == nil {
				t.Error("a file open for reading was written")
			}
			must(t, ro.Close())
			testLock(t, fsys, p("LOCK"))
		})
	}
}

func second[T any](_ T, err error) error { return err }

// testLock is VF4.
func testLock(t *testing.T, fsys FS, name string) {
	l, err := fsys.Lock(name)
	must(t, err)
	if _, err := fsys.Lock(name); !errors.Is(err, base.ErrConflict) {
		t.Errorf("second lock: %v", err)
	}
	must(t, l.Close())
	l, err = fsys.Lock(name)
	must(t, err)
	must(t, l.Close())
}

// TestCrashKeepsSynced is VF1 and VF3.
func TestCrashKeepsSynced(t *testing.T) {
	m := NewMem()
	must(t, MkdirAllDurable(m, "d", 0o755))
	write(t, m, "d/synced", 0, "before", true)
	must(t, m.SyncDir("d"))
	write(t, m, "d/synced", 0, "after!", false)
	write(t, m, "d/nodir", 0, "x", true) // its name is not synced
	outcomes := map[string]int{}
	for seed := range int64(300) {
		c := m.CrashClone(seed)
		got := read(t, c, "d/synced")
		if len(got) != 6 {
			t.Fatalf("seed %d: %q", seed, got)
		}
		for k := range got {
			if got[k] != "before"[k] && got[k] != "after!"[k] {
				t.Fatalf("seed %d: %q was never written", seed, got)
			}
		}
		outcomes[got]++
		if _, err := c.Stat("d/nodir"); err == nil {
			outcomes["name kept"]++
			if read(t, c, "d/nodir") != "x" {
				t.Fatalf("seed %d: synced bytes of a kept name are gone", seed)
			}
		} else {
			outcomes["name lost"]++
		}
		if again := read(t, m.CrashClone(seed), "d/synced"); again != got {
			t.Fatalf("seed %d gives %q and %q", seed, got, again)
		}
		write(t, c, "d/synced", 0, "CLONE!", true)
	}
	for _, want := range []string{"before", "after!", "aftere", "name kept", "name lost"} {
		if outcomes[want] == 0 {
			t.Errorf("outcome %q never came in %v", want, outcomes)
		}
	}
	if got := read(t, m, "d/synced"); got != "after!" {
		t.Errorf("a clone changed its origin to %q", got)
	}
}

// TestCrashDirectoryChanges: unsynced renames, removals and links may or may not
// survive; a rename is never half done (VF2).
func TestCrashDirectoryChanges(t *testing.T) {
	m := NewMem()
	must(t, MkdirAllDurable(m, "d", 0o755))
	write(t, m, "d/tmp", 0, "new", true)
	write(t, m, "d/final", 0, "old", true)
	write(t, m, "d/gone", 0, "x", true)
	must(t, m.SyncDir("d"))
	must(t, m.Rename("d/tmp", "d/final"))
	must(t, m.Remove("d/gone"))
	seen := map[string]bool{}
	for seed := range int64(200) {
		c := m.CrashClone(seed)
		names, err := c.List("d")
		must(t, err)
		final := read(t, c, "d/final")
		_, tmpErr := c.Stat("d/tmp")
		if (final == "new") != errors.Is(tmpErr, fs.ErrNotExist) {
			t.Fatalf("seed %d: rename half done: final %q, names %v", seed, final, names)
		}
		seen[fmt.Sprint(names, final)] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d outcomes of two changes: %v", len(seen), seen)
	}
	must(t, m.SyncDir("d"))
	names, err := m.CrashClone(1).List("d")
	must(t, err)
	if fmt.Sprint(names) != "[final]" {
		t.Errorf("after SyncDir a crash leaves %v", names)
	}
}

// TestCrashLosesUnsyncedDirectory: a synced file in a directory whose own name is
// not durable is lost; MkdirAllDurable is what prevents it.
func TestCrashLosesUnsyncedDirectory(t *testing.T) {
	for _, durable := range []bool{false, true} {
		m := NewMem()
		if durable {
			must(t, MkdirAllDurable(m, "a/b", 0o755))
		} else {
			must(t, m.MkdirAll("a/b", 0o755))
		}
		write(t, m, "a/b/f", 0, "x", true)
		must(t, m.SyncDir("a/b"))
		lost := 0
		for seed := range int64(100) {
			if _, err := m.CrashClone(seed).Stat("a/b/f"); err != nil {
				lost++
			}
		}
		if durable == (lost > 0) {
			t.Errorf("durable %t: lost %d of 100", durable, lost)
		}
	}
}

// TestFaults: a predicate sees each call and decides on error, delay and tearing.
func TestFaults(t *testing.T) {
	boom := errors.New("boom")
	var fail OpKind
	var seen []Op
	hang := make(chan struct{})
	m := NewMem()
	f := Faulty(m, func(op Op) Fault {
		seen = append(seen, op)
		switch {
		case op.Kind == fail:
			return Fault{Err: boom, Partial: 2}
		case op.Kind == OpSyncDir:
			return Fault{Delay: time.Millisecond, Wait: hang}
		}
		return Fault{}
	})
	must(t, f.MkdirAll("d", 0o755))
	file, err := f.Create("d/x")
	must(t, err)
	calls := map[OpKind]func() error{
		OpCreate:   func() error { return second(f.Create("d/y")) },
		OpOpen:     func() error { return second(f.Open("d/x")) },
		OpOpenRW:   func() error { return second(f.OpenReadWrite("d/x")) },
		OpRemove:   func() error { return f.Remove("d/x") },
		OpRename:   func() error { return f.Rename("d/x", "d/y") },
		OpLink:     func() error { return f.Link("d/x", "d/y") },
		OpList:     func() error { return second(f.List("d")) },
		OpMkdir:    func() error { return f.MkdirAll("e", 0o755) },
		OpSyncDir:  func() error { return f.SyncDir("d") },
		OpStat:     func() error { return second(f.Stat("d")) },
		OpLock:     func() error { return second(f.Lock("d/L")) },
		OpRead:     func() error { return second(file.ReadAt(make([]byte, 1), 0)) },
		OpWrite:    func() error { return second(file.WriteAt([]byte("hello"), 0)) },
		OpSync:     func() error { return errors.Join(file.Sync(), file.SyncData()) },
		OpTruncate: func() error { return file.Truncate(0) },
	}
	for kind, call := range calls {
		fail = kind
		if err := call(); !errors.Is(err, boom) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	fail = ""
	if got := read(t, m, "d/x"); got != "he" {
		t.Errorf("a torn write left %q", got)
	}
	done := make(chan error)
	go func() { done <- f.SyncDir("d") }()
	close(hang)
	must(t, <-done)
	if last := seen[len(seen)-1]; last.Kind != OpSyncDir || last.Path != "d" {
		t.Errorf("last call seen is %+v", last)
	}
	must(t, file.Close())
	if err := file.Close(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
}
