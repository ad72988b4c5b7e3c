package durable

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

func writing(s string) func(io.Writer) error {
	return func(w io.Writer) error { _, err := io.WriteString(w, s); return err }
}

func wantContent(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Fatalf("%q, %v; want %q", b, err, want)
	}
}

func TestWriteFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, s := range []string{"old content", "new"} {
		if n, err := WriteFile(path, writing(s)); err != nil || n != int64(len(s)) {
			t.Fatal(n, err)
		}
		wantContent(t, path, s)
	}
	// A writer that fails half-way leaves the old content and no other file.
	own := errors.New("own")
	_, err := WriteFile(path, func(w io.Writer) error {
		_, err := w.Write(make([]byte, 1<<20))
		return errors.Join(err, own)
	})
	if !errors.Is(err, own) || errors.Is(err, base.ErrDiskFailed) {
		t.Fatal(err)
	}
	wantContent(t, path, "new")
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Fatalf("files left: %v", entries)
	}
}

func TestFailures(t *testing.T) {
	dir := t.TempDir()
	var unsynced *DirError
	if _, err := WriteFile(filepath.Join(dir, "absent", "f"), writing("x")); !errors.Is(err, base.ErrDiskFailed) || errors.As(err, &unsynced) {
		t.Fatalf("creating in an absent directory: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "d", "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := WriteFile(filepath.Join(dir, "d"), writing("x")); !errors.Is(err, base.ErrDiskFailed) || errors.As(err, &unsynced) {
		t.Fatalf("renaming onto a directory: %v", err)
	}
	if err := SyncDir(filepath.Join(dir, "absent")); !errors.As(err, &unsynced) || !errors.Is(err, base.ErrDiskFailed) || !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("syncing an absent directory: %v", err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if _, err := (&diskWriter{f: full}).Write([]byte("x")); !errors.Is(err, base.ErrDiskFailed) {
		t.Fatalf("writing to a full device: %v", err)
	}
}

func TestMkdir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b", "c")
	for range 2 {
		if err := Mkdir(dir); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Mkdir(filepath.Join(file, "d")); !errors.Is(err, base.ErrDiskFailed) {
		t.Fatalf("under a file: %v", err)
	}
}
