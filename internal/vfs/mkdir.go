package vfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// MkdirAllDurable makes a directory and its missing parents and syncs the
// directory above each one that it made, and the one above dir in any case: an
// earlier call may have died between the two. Without that a power cut can take
// the directory with all that was synced in it.
func MkdirAllDurable(fsys FS, dir string, perm os.FileMode) error {
	above := []string{filepath.Dir(dir)}
	for d := filepath.Dir(dir); ; d = filepath.Dir(d) {
		_, err := fsys.Stat(d)
		if err == nil || d == filepath.Dir(d) {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		above = append(above, filepath.Dir(d))
	}
	if err := fsys.MkdirAll(dir, perm); err != nil {
		return err
	}
	for _, d := range above {
		if err := fsys.SyncDir(d); err != nil {
			return err
		}
	}
	return nil
}
