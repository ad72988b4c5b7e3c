//go:build linux

package faultfs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// mounted mounts a file system for a test, and unmounts it however the test ends.
func mounted(t *testing.T, opts Options) *FS {
	t.Helper()
	if err := Supported(); err != nil {
		t.Skipf("SKIPPED, NOT TESTED HERE: %v", err)
	}
	dir := t.TempDir()
	if opts.Mountpoint == "" {
		opts.Mountpoint = filepath.Join(dir, "mnt")
	}
	if opts.Backing == "" {
		opts.Backing = filepath.Join(dir, "backing")
	}
	fs, err := Mount(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	return fs
}

func (fs *FS) file(name string) string { return filepath.Join(fs.Mountpoint(), name) }

// put writes a file without syncing anything, and leaves it open for the test.
func put(t *testing.T, path, content string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err == nil {
		_, err = f.WriteAt([]byte(content), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func syncDir(t *testing.T, dir string) {
	t.Helper()
	d, err := os.Open(dir)
	if err == nil {
		err = errors.Join(d.Sync(), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func crash(t *testing.T, fs *FS, mode CrashMode, seed uint64) CrashReport {
	t.Helper()
	r, err := fs.Crash(mode, seed)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// content is what is in a file, or "<none>".
func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return "<none>"
	}
	must(t, err)
	return string(b)
}
