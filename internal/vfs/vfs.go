package vfs

import (
	"io"
	"os"
	"time"
)

// FileInfo describes a file or directory.
type FileInfo struct {
	// Size in bytes; 0 for a directory.
	Size int64
	// Dir is true for a directory.
	Dir bool
	// ModTime is the time of the last change; the zero time where the file
	// system keeps none.
	ModTime time.Time
}

// File is an open file.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer

	// Sync makes the contents and the size durable. After an error the state
	// on disk is unknown and the caller must not call Sync again in the hope
	// of a better answer.
	Sync() error
	// SyncData is Sync without metadata that reading does not need (times).
	// A changed size is made durable.
	SyncData() error
	// Truncate changes the size in bytes.
	Truncate(size int64) error
	// Size returns the current size in bytes.
	Size() (int64, error)
	// Name returns the path that the file was opened by.
	Name() string
}

// FS is a file system. Paths are as of package path/filepath. Errors satisfy
// errors.Is with fs.ErrNotExist and fs.ErrExist where that is the cause.
type FS interface {
	// Create makes an empty file for reading and writing; an existing file is
	// emptied. The name is durable only after SyncDir of its directory.
	Create(name string) (File, error)
	// Open opens a file for reading.
	Open(name string) (File, error)
	// OpenReadWrite opens an existing file for reading and writing.
	OpenReadWrite(name string) (File, error)
	// Remove removes a file or an empty directory.
	Remove(name string) error
	// Rename moves a file and replaces what is at newName. It is atomic, and
	// durable only after SyncDir of both directories.
	Rename(oldName, newName string) error
	// Link makes newName a hard link to oldName; newName must not exist.
	Link(oldName, newName string) error
	// List returns the names in a directory, without path, sorted.
	List(dir string) ([]string, error)
	// MkdirAll makes a directory and its missing parents.
	MkdirAll(dir string, perm os.FileMode) error
	// SyncDir makes the entries of a directory durable.
	SyncDir(dir string) error
	// Stat describes a file or directory.
	Stat(name string) (FileInfo, error)
	// Lock takes the exclusive lock that the named file stands for, making the
	// file if it is missing. It never waits: if another holder exists, in this
	// process or another, it fails. Closing releases the lock.
	Lock(name string) (io.Closer, error)
}
