// Package file keeps objects as files below a directory. A part of a key is a
// folder or, the last, a file; uploads that have not ended lie in ".uploads".
//
// It must not know what objects mean, and holds no format of its own.
//
// Concurrency: as package objectstore says; processes may share a directory.
//
// Invariants:
//
//	OF1  A file has its object's name only when it has all its bytes on disk: it
//	     is written and synced elsewhere, and linked, which fails if there is one.
//	OF2  Put returns when the names of the file and of its folders are on disk.
//	OF3  All paths are opened below the directory (os.Root): neither a key nor a
//	     symbolic link leads out of it.
package file
