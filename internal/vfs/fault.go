package vfs

import (
	"io"
	"os"
	"time"
)

// OpKind names a call of FS or File, for predicates.
type OpKind string

// The kinds of calls that a predicate sees.
const (
	OpCreate   OpKind = "create"
	OpOpen     OpKind = "open"
	OpOpenRW   OpKind = "openrw"
	OpRemove   OpKind = "remove"
	OpRename   OpKind = "rename"
	OpLink     OpKind = "link"
	OpList     OpKind = "list"
	OpMkdir    OpKind = "mkdir"
	OpSyncDir  OpKind = "syncdir"
	OpStat     OpKind = "stat"
	OpLock     OpKind = "lock"
	OpRead     OpKind = "read"
	OpWrite    OpKind = "write"
	OpSync     OpKind = "sync"
	OpTruncate OpKind = "truncate"
)

// Op is one call about to be made.
type Op struct {
	Kind OpKind
	// Path of the file; for Rename and Link the old name.
	Path string
	// Offset and Bytes of a read or write.
	Offset int64
	Bytes  int
}

// Fault is what happens to a call. The zero value lets it pass.
type Fault struct {
	// Delay passes before the call, or before its error.
	Delay time.Duration
	// Wait, if not nil, is received from before the call: a hung disk, until
	// the test closes the channel.
	Wait <-chan struct{}
	// Err is returned instead of making the call.
	Err error
	// Partial bytes of a write are made before Err is returned.
	Partial int
}

// Predicate decides the fault of each call. It is called by many goroutines.
type Predicate func(Op) Fault

// Faulty returns a file system that asks the predicate before each call.
func Faulty(inner FS, p Predicate) FS { return &faultFS{inner: inner, p: p} }

type faultFS struct {
	inner FS
	p     Predicate
}

func (f *faultFS) ask(op Op) Fault {
	fault := f.p(op)
	if fault.Delay > 0 {
		time.Sleep(fault.Delay)
	}
	if fault.Wait != nil {
		<-fault.Wait
	}
	return fault
}

func (f *faultFS) file(kind OpKind, name string, open func(string) (File, error)) (File, error) {
	if fault := f.ask(Op{Kind: kind, Path: name}); fault.Err != nil {
		return nil, fault.Err
	}
	file, err := open(name)
	if err != nil {
		return nil, err
	}
	return &faultFile{File: file, fs: f}, nil
}

func (f *faultFS) Create(name string) (File, error) { return f.file(OpCreate, name, f.inner.Create) }
func (f *faultFS) Open(name string) (File, error)   { return f.file(OpOpen, name, f.inner.Open) }
func (f *faultFS) OpenReadWrite(name string) (File, error) {
	return f.file(OpOpenRW, name, f.inner.OpenReadWrite)
}

func (f *faultFS) Remove(name string) error {
	if fault := f.ask(Op{Kind: OpRemove, Path: name}); fault.Err != nil {
		return fault.Err
	}
	return f.inner.Remove(name)
}

func (f *faultFS) Rename(oldName, newName string) error {
	if fault := f.ask(Op{Kind: OpRename, Path: oldName}); fault.Err != nil {
		return fault.Err
	}
	return f.inner.Rename(oldName, newName)
}

func (f *faultFS) Link(oldName, newName string) error {
	if fault := f.ask(Op{Kind: OpLink, Path: oldName}); fault.Err != nil {
		return fault.Err
	}
	return f.inner.Link(oldName, newName)
}

func (f *faultFS) List(dir string) ([]string, error) {
	if fault := f.ask(Op{Kind: OpList, Path: dir}); fault.Err != nil {
		return nil, fault.Err
	}
	return f.inner.List(dir)
}

func (f *faultFS) MkdirAll(dir string, perm os.FileMode) error {
	if fault := f.ask(Op{Kind: OpMkdir, Path: dir}); fault.Err != nil {
		return fault.Err
	}
	return f.inner.MkdirAll(dir, perm)
}

func (f *faultFS) SyncDir(dir string) error {
	if fault := f.ask(Op{Kind: OpSyncDir, Path: dir}); fault.Err != nil {
		return fault.Err
	}
	return f.inner.SyncDir(dir)
}

func (f *faultFS) Stat(name string) (FileInfo, error) {
	if fault := f.ask(Op{Kind: OpStat, Path: name}); fault.Err != nil {
		return FileInfo{}, fault.Err
	}
	return f.inner.Stat(name)
}

func (f *faultFS) Lock(name string) (io.Closer, error) {
	if fault := f.ask(Op{Kind: OpLock, Path: name}); fault.Err != nil {
		return nil, fault.Err
	}
	return f.inner.Lock(name)
}

type faultFile struct {
	File
	fs *faultFS
}

func (f *faultFile) ReadAt(p []byte, off int64) (int, error) {
	if fault := f.fs.ask(Op{Kind: OpRead, Path: f.Name(), Offset: off, Bytes: len(p)}); fault.Err != nil {
		return 0, fault.Err
	}
	return f.File.ReadAt(p, off)
}

func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	fault := f.fs.ask(Op{Kind: OpWrite, Path: f.Name(), Offset: off, Bytes: len(p)})
	if fault.Err == nil {
		return f.File.WriteAt(p, off)
	}
	n := min(fault.Partial, len(p))
	if n > 0 {
		if _, err := f.File.WriteAt(p[:n], off); err != nil {
			return 0, err
		}
	}
	return n, fault.Err
}

func (f *faultFile) Sync() error {
	if fault := f.fs.ask(Op{Kind: OpSync, Path: f.Name()}); fault.Err != nil {
		return fault.Err
	}
	return f.File.Sync()
}

func (f *faultFile) SyncData() error {
	if fault := f.fs.ask(Op{Kind: OpSync, Path: f.Name()}); fault.Err != nil {
		return fault.Err
	}
	return f.File.SyncData()
}

func (f *faultFile) Truncate(size int64) error {
	if fault := f.fs.ask(Op{Kind: OpTruncate, Path: f.Name()}); fault.Err != nil {
		return fault.Err
	}
	return f.File.Truncate(size)
}
