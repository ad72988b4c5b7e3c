package file

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

func open(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestConformance(t *testing.T) {
	objectstoretest.Run(t, objectstoretest.Options{Open: func(t testing.TB) objectstore.Store { return open(t, t.TempDir()) }})
}

// OF2: an object whose folder could not be synced is not said to be there, for who
// finds it there takes it for stored; nor is one in a folder whose own name may be
// lost.
func TestNamesThatAreNotDurableAreNotTaken(t *testing.T) {
	for _, failing := range []string{"a/b", "a"} {
		s := open(t, t.TempDir())
		sync, troubles := s.syncFolder, 2
		s.syncFolder = func(f *os.File) error {
			if name, err := filepath.Rel(s.dir, f.Name()); err == nil && name == failing && troubles > 0 {
				troubles--
				return unix.EIO
			}
			return sync(f)
		}
		put := func() error { return s.Put(context.Background(), "a/b/c", objectstore.Bytes([]byte("x"))) }
		for try := range 2 {
			if err := put(); !errors.Is(err, base.ErrObjectStore) || errors.Is(err, base.ErrConflict) {
				t.Fatalf("try %d with folder %s in trouble: %v", try, failing, err)
			}
		}
		if err := put(); failing == "a/b" != errors.Is(err, base.ErrConflict) || failing == "a" && err != nil {
			t.Errorf("folder %s: %v", failing, err)
		}
	}
}

// What is stored is there when the directory is opened again, also by another
// process beside; nothing else is left in it.
func TestObjectsSurviveTheStore(t *testing.T) {
	dir := t.TempDir()
	ctx := context.Background()
	a, b := open(t, dir), open(t, dir)
	if err := a.Put(ctx, "x/y", objectstore.Bytes([]byte("z"))); err != nil {
		t.Fatal(err)
	}
	if err := b.Put(ctx, "x/y", objectstore.Bytes(nil)); !errors.Is(err, base.ErrConflict) {
		t.Errorf("the other store: %v", err)
	}
	if o, err := open(t, dir).Stat(ctx, "x/y"); err != nil || o.Size != 1 {
		t.Errorf("opened again: %+v, %v", o, err)
	}
	if err := b.Delete(ctx, "x/y"); err != nil {
		t.Fatal(err)
	}
	var left []string
	_ = filepath.WalkDir(dir, func(p string, _ fs.DirEntry, _ error) error {
		left = append(left, filepath.Base(p))
		return nil
	})
	if !slices.Equal(left, []string{filepath.Base(dir), uploads}) {
		t.Errorf("left: %v", left)
	}
}

func TestNoKeyIsAFolderOfAnother(t *testing.T) {
	s := open(t, t.TempDir())
	ctx := context.Background()
	for _, key := range []string{"a", "b/c/d"} {
		if err := s.Put(ctx, key, objectstore.Bytes(nil)); err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range []string{"a/b", "a/b/c", "b", "b/c", "b/c/d/e"} {
		if err := s.Put(ctx, key, objectstore.Bytes(nil)); !errors.Is(err, base.ErrConflict) {
			t.Errorf("put of %s: %v", key, err)
		}
		if _, err := s.Stat(ctx, key); !errors.Is(err, base.ErrNotFound) {
			t.Errorf("stat of %s: %v", key, err)
		}
		if _, err := s.Get(ctx, key, 0, -1); !errors.Is(err, base.ErrNotFound) {
			t.Errorf("get of %s: %v", key, err)
		}
		if err := s.Delete(ctx, key); err != nil {
			t.Errorf("delete of %s: %v", key, err)
		}
	}
	if _, err := s.Stat(ctx, "b/c/d"); err != nil {
		t.Error(err)
	}
}

// OF3
func TestLinksLeadNowhereElse(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := open(t, dir)
	for link, to := range map[string]string{"f": filepath.Join(outside, "secret"), "d": outside} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	for _, key := range []string{"f", "d/secret"} {
		if r, err := s.Get(ctx, key, 0, -1); err == nil {
			t.Errorf("read %s from outside", key)
			_ = r.Close()
		}
		if _, err := s.Stat(ctx, key); err == nil {
			t.Errorf("saw %s outside", key)
		}
	}
	if err := s.Put(ctx, "d/new", objectstore.Bytes(nil)); err == nil {
		t.Error("wrote outside")
	}
	if err := s.Delete(ctx, "d/secret"); err == nil {
		t.Error("a deletion outside was not refused")
	}
	for o, err := range s.List(ctx, "", "") {
		t.Errorf("listed %+v, %v", o, err)
	}
	if _, err := os.Stat(filepath.Join(outside, "secret")); err != nil {
		t.Error(err)
	}
}

// OS6, B56: what a crash left is removed when it is old, and only then.
func TestSweepRemovesOldUploads(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	ctx := context.Background()
	if n, err := s.Sweep(ctx, "", time.Now()); n != 0 || err != nil {
		t.Errorf("nothing to sweep: %d, %v", n, err)
	}
	if err := os.Mkdir(filepath.Join(dir, uploads), 0o750); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for name, age := range map[string]time.Duration{"old": 2 * time.Hour, "older": 3 * time.Hour, "young": time.Minute} {
		p := filepath.Join(dir, uploads, name)
		if err := errors.Join(os.WriteFile(p, []byte("part"), 0o600), os.Chtimes(p, time.Time{}, now.Add(-age))); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.Sweep(ctx, "", now.Add(-time.Hour)); n != 2 || err != nil {
		t.Errorf("swept %d, %v", n, err)
	}
	entries, err := os.ReadDir(filepath.Join(dir, uploads))
	if err != nil || len(entries) != 1 || entries[0].Name() != "young" {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// A full disk is told, with what to do, and leaves nothing behind.
func TestFullDiskIsTold(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("a small disk needs root: %v", err)
	}
	s := open(t, dir)
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	ctx := context.Background()
	err := s.Put(ctx, "large", objectstore.Bytes(objectstoretest.Pattern(2<<20)))
	var detail *base.Error
	if !errors.Is(err, base.ErrObjectStore) || !errors.Is(err, unix.ENOSPC) || !errors.As(err, &detail) || detail.Hint == "" {
		t.Errorf("put: %v", err)
	}
	if err := s.Put(ctx, "small", objectstore.Bytes(objectstoretest.Pattern(512<<10))); err != nil {
		t.Errorf("the space was not given back: %v", err)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(ctx, "other", objectstore.Bytes(nil)); !errors.Is(err, base.ErrObjectStore) || !errors.Is(err, unix.EROFS) {
		t.Errorf("put on a read-only disk: %v", err)
	}
	if _, err := s.Stat(ctx, "small"); err != nil {
		t.Error(err)
	}
}

// A store whose directory cannot be made yet fails, says why, and serves once it
// can.
func TestDirectoryThatComesLater(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "mount")
	if err := os.WriteFile(in, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := New(filepath.Join(in, "objects"))
	ctx := context.Background()
	if err := s.Put(ctx, "k", objectstore.Bytes([]byte("v"))); !errors.Is(err, base.ErrObjectStore) {
		t.Errorf("put: %v", err)
	}
	for _, err := range s.List(ctx, "", "") {
		if !errors.Is(err, base.ErrObjectStore) {
			t.Errorf("list: %v", err)
		}
	}
	if err := os.Remove(in); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(ctx, "k", objectstore.Bytes([]byte("v"))); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	never := New(filepath.Join(dir, "never"))
	if err := never.Close(); err != nil {
		t.Error(err)
	}
	if _, err := never.Stat(ctx, "k"); !errors.Is(err, base.ErrClosed) {
		t.Errorf("stat: %v", err)
	}
}
