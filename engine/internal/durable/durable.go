// Package durable writes small sets of files so that a crash leaves either the
// old or the new content, and reports every failure as base.ErrDiskFailed. It
// knows no format.
//
// Concurrency: calls for different paths may run at the same time; calls for
// one path may not.
package durable

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/keelstate/keelstate/internal/base"
)

// TempSuffix ends the name of a file that is not complete. A crash may leave
// such files; they carry no state and may be removed.
const TempSuffix = ".tmp"

func failed(doing string, err error) error {
	return fmt.Errorf("%s: %w: %w", doing, base.ErrDiskFailed, err)
}

// WriteFile replaces path by what write produces: temporary file, fsync,
// rename, fsync of the directory. When it returns nil the new content survives
// a crash; when it fails the old content is still there. An error of write
// itself is returned as it is. It returns the number of bytes written.
func WriteFile(path string, write func(io.Writer) error) (int64, error) {
	temp := path + TempSuffix
	n, err := writeTemp(temp, write)
	if err != nil {
		_ = os.Remove(temp) // best effort: Open ignores and removes it
		return 0, err
	}
	if err := os.Rename(temp, path); err != nil {
		return 0, failed("renaming "+temp, err)
	}
	return n, SyncDir(filepath.Dir(path))
}

func writeTemp(temp string, write func(io.Writer) error) (n int64, err error) {
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return 0, failed("creating "+temp, err)
	}
	defer func() {
		if cerr := f.Close(); cerr != nil && err == nil {
			err = failed("closing "+temp, cerr)
		}
	}()
	disk := &diskWriter{f: f}
	w := bufio.NewWriterSize(disk, 256<<10)
	if err := write(w); err != nil {
		return 0, err
	}
	if err := w.Flush(); err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, failed("syncing "+temp, err)
	}
	return disk.n, nil
}

// diskWriter marks the errors of the file as the disk's.
type diskWriter struct {
	f *os.File
	n int64
}

func (d *diskWriter) Write(p []byte) (int, error) {
	n, err := d.f.Write(p)
	d.n += int64(n)
	if err != nil {
		return n, failed("writing "+d.f.Name(), err)
	}
	return n, nil
}

// DirError is a failed fsync of a directory: whether the creations and renames
// in it survive a crash is not known, and a later fsync that succeeds does not
// tell. The owner of the directory must not go on writing in it.
type DirError struct {
	Dir string
	Err error
}

func (e *DirError) Error() string { return "syncing directory " + e.Dir + ": " + e.Err.Error() }

// Unwrap returns base.ErrDiskFailed and the cause.
func (e *DirError) Unwrap() []error { return []error{base.ErrDiskFailed, e.Err} }

// SyncDir makes creations, renames and removals in dir durable.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return &DirError{Dir: dir, Err: err}
	}
	err = f.Sync()
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return &DirError{Dir: dir, Err: err}
	}
	return nil
}

// Mkdir creates dir, and its parents where they are missing, durably. An
// existing directory is no error.
func Mkdir(dir string) error {
	if s, err := os.Stat(dir); err == nil && s.IsDir() {
		return nil
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := Mkdir(parent); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return failed("creating directory "+dir, err)
	}
	return SyncDir(parent)
}
