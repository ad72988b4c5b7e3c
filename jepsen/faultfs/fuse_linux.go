package faultfs

import (
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// handle is an open file or directory.
type handle struct {
	n *node
	// listing is a directory's content at the time that it was read from the start.
	listing []fuse.DirEntry
}

// raw serves the kernel's calls from a disk. Calls that it does not have (links
// by name, extended attributes, copying inside the kernel) the kernel does
// without.
type raw struct {
	fuse.RawFileSystem
	d *disk
	r *rules

	mu struct {
		sync.Mutex
		last    uint64
		handles map[uint64]*handle
	}
}

func newRaw(d *disk, r *rules) *raw {
	f := &raw{RawFileSystem: fuse.NewDefaultRawFileSystem(), d: d, r: r}
	f.mu.handles = make(map[uint64]*handle)
	return f
}

// String implements fuse.RawFileSystem.
func (f *raw) String() string { return "faultfs" }

// status turns an error into what the kernel understands.
func status(err error) fuse.Status {
	var errno syscall.Errno
	switch {
	case err == nil:
		return fuse.OK
	case errors.As(err, &errno):
		return fuse.Status(errno)
	default:
		return fuse.EIO
	}
}

func (f *raw) open(n *node) uint64 {
	f.d.mu.Lock()
	n.opens++
	f.d.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.last++
	f.mu.handles[f.mu.last] = &handle{n: n}
	return f.mu.last
}

func (f *raw) handle(fh uint64) (*handle, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if h := f.mu.handles[fh]; h != nil {
		return h, nil
	}
	return nil, syscall.EIO // of before a crash
}

func (f *raw) close(fh uint64) {
	f.mu.Lock()
	h := f.mu.handles[fh]
	delete(f.mu.handles, fh)
	f.mu.Unlock()
	if h == nil {
		return
	}
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	h.n.opens--
	f.d.release(h.n)
}

// forgetHandles makes every handle of before invalid (FF5).
func (f *raw) forgetHandles() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.mu.handles)
}

// faulted asks the rules about a call on a node, and about a name in it.
func (f *raw) faulted(op Op, n *node, name string) effect {
	return f.r.apply(op, func() string {
		p := f.d.path(n)
		switch {
		case name == "":
			return p
		case p == "":
			return name
		}
		return p + "/" + name
	})
}

// at finds a node, asks the rules, and enters the gate. Without error the caller
// must leave the gate.
func (f *raw) at(op Op, id uint64, name string) (*node, error) {
	n, err := f.d.byID(id)
	if err != nil {
		return nil, err
	}
	if op != "" {
		if e := f.faulted(op, n, name); e.errno != 0 {
			return nil, e.errno
		}
	}
	f.d.gate.RLock()
	if _, err := f.d.byID(id); err != nil { // a crash while it was stalled
		f.d.gate.RUnlock()
		return nil, err
	}
	return n, nil
}

func (f *raw) attr(n *node, out *fuse.Attr) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	f.attrLocked(n, out)
}

func (f *raw) attrLocked(n *node, out *fuse.Attr) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	*out = fuse.Attr{Ino: n.ino, Size: uint64(n.size), Blocks: uint64(n.alloc.total() / 512), Mode: n.mode | syscall.S_IFREG,
		Nlink: uint32(n.links), Blksize: blockBytes}
	if n.isDir {
		out.Mode, out.Nlink = n.mode|syscall.S_IFDIR, 2
	}
	out.SetTimes(&n.mtime, &n.mtime, &n.mtime)
}

// entry answers with a node, which the kernel then knows once more. Nothing may
// be cached: a crash changes everything under the kernel's feet.
func (f *raw) entry(n *node, out *fuse.EntryOut) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	n.lookups++
	out.NodeId, out.Generation = n.id, 1
	f.attrLocked(n, &out.Attr)
}

// Lookup implements fuse.RawFileSystem.
func (f *raw) Lookup(_ <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	dir, err := f.at("", header.NodeId, "")
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	f.d.mu.Lock()
	n := dir.entries[name]
	f.d.mu.Unlock()
	if n == nil {
		return fuse.ENOENT
	}
	f.entry(n, out)
	return fuse.OK
}

// Forget implements fuse.RawFileSystem.
func (f *raw) Forget(id, lookups uint64) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	n := f.d.mu.nodes[id]
	if n == nil {
		return
	}
	n.lookups -= min(n.lookups, lookups)
	f.d.release(n)
}

// GetAttr implements fuse.RawFileSystem.
func (f *raw) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	n, err := f.at("", in.NodeId, "")
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	f.attr(n, &out.Attr)
	return fuse.OK
}

// SetAttr implements fuse.RawFileSystem.
func (f *raw) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	op := Op("")
	size, resized := in.GetSize()
	if resized {
		op = OpWrite
	}
	n, err := f.at(op, in.NodeId, "")
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	if mode, ok := in.GetMode(); ok {
		f.d.mu.Lock()
		n.mode = mode & 0o7777
		f.d.mu.Unlock()
	}
	if resized {
		if n.isDir {
			return fuse.Status(syscall.EISDIR)
		}
		if err := f.d.truncate(n, int64(size)); err != nil {
			return status(err)
		}
	}
	if mtime, ok := in.GetMTime(); ok {
		n.mu.Lock()
		n.mtime = mtime
		n.mu.Unlock()
	}
	f.attr(n, &out.Attr)
	return fuse.OK
}

// Mkdir implements fuse.RawFileSystem.
func (f *raw) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	dir, err := f.at(OpCreate, in.NodeId, name)
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	n, err := f.d.create(dir, name, true, in.Mode)
	if err != nil {
		return status(err)
	}
	f.entry(n, out)
	return fuse.OK
}

// Create implements fuse.RawFileSystem.
func (f *raw) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	dir, err := f.at(OpCreate, in.NodeId, name)
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	n, err := f.d.create(dir, name, false, in.Mode)
	if errors.Is(err, syscall.EEXIST) && in.Flags&syscall.O_EXCL == 0 {
		f.d.mu.Lock()
		n = dir.entries[name]
		f.d.mu.Unlock()
		err = nil
		if n == nil || n.isDir {
			err = syscall.EISDIR
		}
	}
	if err != nil {
		return status(err)
	}
	f.entry(n, &out.EntryOut)
	out.Fh, out.OpenFlags = f.open(n), openFlags
	return fuse.OK
}

// openFlags: every read and write comes here, so that a fault hits at once, not
// when the page cache sees fit.
const openFlags = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES

// Open implements fuse.RawFileSystem.
func (f *raw) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	n, err := f.at(OpOpen, in.NodeId, "")
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	if in.Flags&syscall.O_TRUNC != 0 {
		if err := f.d.truncate(n, 0); err != nil {
			return status(err)
		}
	}
	out.Fh, out.OpenFlags = f.open(n), openFlags
	return fuse.OK
}

// Release implements fuse.RawFileSystem.
func (f *raw) Release(_ <-chan struct{}, in *fuse.ReleaseIn) { f.close(in.Fh) }

// ReleaseDir implements fuse.RawFileSystem.
func (f *raw) ReleaseDir(in *fuse.ReleaseIn) { f.close(in.Fh) }

// onFile runs a call on an open file between the rules and a crash.
func (f *raw) onFile(op Op, fh uint64, call func(*node, effect) error) fuse.Status {
	h, err := f.handle(fh)
	if err != nil {
		return status(err)
	}
	e := f.faulted(op, h.n, "")
	f.d.gate.RLock()
	defer f.d.gate.RUnlock()
	if _, err := f.handle(fh); err != nil { // a crash while it was stalled
		return status(err)
	}
	if e.errno != 0 && op != OpSync {
		return fuse.Status(e.errno)
	}
	return status(call(h.n, e))
}

// Read implements fuse.RawFileSystem.
func (f *raw) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	got := 0
	st := f.onFile(OpRead, in.Fh, func(n *node, e effect) error {
		n.mu.RLock()
		defer n.mu.RUnlock()
		var err error
		if got, err = n.file.ReadAt(buf, int64(in.Offset)); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		for _, flip := range e.flips {
			if at := flip.Offset - int64(in.Offset); at >= 0 && at < int64(got) {
				buf[at] ^= 1 << flip.Bit
			}
		}
		return nil
	})
	return fuse.ReadResultData(buf[:got]), st
}

// Write implements fuse.RawFileSystem.
func (f *raw) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	st := f.onFile(OpWrite, in.Fh, func(n *node, _ effect) error { return f.d.write(n, data, int64(in.Offset)) })
	if st != fuse.OK {
		return 0, st
	}
	return uint32(len(data)), fuse.OK
}

// Fallocate implements fuse.RawFileSystem.
func (f *raw) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	return f.onFile(OpWrite, in.Fh, func(n *node, _ effect) error {
		return f.d.allocate(n, int64(in.Offset), int64(in.Length), in.Mode)
	})
}

// Flush implements fuse.RawFileSystem: closing a file syncs nothing.
func (f *raw) Flush(<-chan struct{}, *fuse.FlushIn) fuse.Status { return fuse.OK }

// Fsync implements fuse.RawFileSystem.
func (f *raw) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return f.onFile(OpSync, in.Fh, func(n *node, e effect) error {
		switch {
		case e.errno != 0:
			n.mu.Lock()
			f.d.doom(n)
			n.mu.Unlock()
			return e.errno
		case e.lie:
			f.d.stats.lies.Add(1)
		default:
			f.d.syncFile(n)
		}
		return nil
	})
}

// FsyncDir implements fuse.RawFileSystem.
func (f *raw) FsyncDir(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return f.onFile(OpSyncDir, in.Fh, func(n *node, e effect) error {
		if e.lie {
			f.d.stats.lies.Add(1)
			return nil
		}
		f.d.syncDir(n)
		f.d.stats.syncs.Add(1)
		return nil
	})
}

// Unlink implements fuse.RawFileSystem.
func (f *raw) Unlink(_ <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	return f.remove(header, name, false)
}

// Rmdir implements fuse.RawFileSystem.
func (f *raw) Rmdir(_ <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	return f.remove(header, name, true)
}

func (f *raw) remove(header *fuse.InHeader, name string, isDir bool) fuse.Status {
	dir, err := f.at(OpRemove, header.NodeId, name)
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	return status(f.d.remove(dir, name, isDir))
}

// Rename implements fuse.RawFileSystem.
func (f *raw) Rename(_ <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	if in.Flags&^unix.RENAME_NOREPLACE != 0 {
		return fuse.EINVAL
	}
	from, err := f.at(OpRename, in.NodeId, oldName)
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	to, err := f.d.byID(in.Newdir)
	if err != nil {
		return status(err)
	}
	return status(f.d.rename(from, oldName, to, newName, in.Flags&unix.RENAME_NOREPLACE != 0))
}

// Link implements fuse.RawFileSystem.
func (f *raw) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	dir, err := f.at(OpRename, in.NodeId, name)
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	n, err := f.d.byID(in.Oldnodeid)
	if err == nil {
		err = f.d.link(n, dir, name)
	}
	if err != nil {
		return status(err)
	}
	f.entry(n, out)
	return fuse.OK
}

// OpenDir implements fuse.RawFileSystem.
func (f *raw) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	n, err := f.at("", in.NodeId, "")
	if err != nil {
		return status(err)
	}
	defer f.d.gate.RUnlock()
	if !n.isDir {
		return fuse.ENOTDIR
	}
	out.Fh = f.open(n)
	return fuse.OK
}

// ReadDir implements fuse.RawFileSystem.
func (f *raw) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	h, err := f.handle(in.Fh)
	if err != nil {
		return status(err)
	}
	f.d.gate.RLock()
	defer f.d.gate.RUnlock()
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if in.Offset == 0 {
		h.listing = []fuse.DirEntry{{Name: ".", Mode: syscall.S_IFDIR, Ino: h.n.ino}, {Name: "..", Mode: syscall.S_IFDIR}}
		for name, n := range h.n.entries {
			mode := uint32(syscall.S_IFREG)
			if n.isDir {
				mode = syscall.S_IFDIR
			}
			h.listing = append(h.listing, fuse.DirEntry{Name: name, Mode: mode, Ino: n.ino})
		}
		slices.SortFunc(h.listing, func(a, b fuse.DirEntry) int { return strings.Compare(a.Name, b.Name) })
	}
	for i := min(in.Offset, uint64(len(h.listing))); i < uint64(len(h.listing)); i++ {
		e := h.listing[i]
		e.Off = i + 1
		if !out.AddDirEntry(e) {
			break
		}
	}
	return fuse.OK
}

// StatFs implements fuse.RawFileSystem.
func (f *raw) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	total := f.d.capacity.Load()
	free := max(0, total-f.d.used.Load()) / blockBytes
	*out = fuse.StatfsOut{Blocks: uint64(total / blockBytes), Bfree: uint64(free), Bavail: uint64(free), Files: 1 << 20, Ffree: 1 << 19,
		Bsize: blockBytes, Frsize: blockBytes, NameLen: 255}
	return fuse.OK
}
