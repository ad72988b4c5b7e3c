//go:build linux

package faultfs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// rootID is the kernel's number of the root directory.
const rootID = 1

// node is a file or a directory.
type node struct {
	// ino is for life; id is what the kernel knows the node by, and is changed by
	// a crash (FF5).
	ino, id uint64
	isDir   bool

	// Guarded by disk.mu.
	mode    uint32
	entries map[string]*node
	// parent and name are one of the node's names.
	parent  *node
	name    string
	links   int // names now
	refs    int // mentions in pending changes of names
	opens   int
	lookups uint64

	// Of a file; guarded by mu, which is taken after disk.mu.
	mu         sync.RWMutex
	file       *os.File
	size       int64
	mtime      time.Time
	alloc      spans
	pending    []fileOp
	doomed     []extent
	doomedSize int64 // the size to return to, -1 for none
}

// namePart is one entry that a change of names touches.
type namePart struct {
	dir      *node
	name     string
	old, new *node
}

// nameOp is one change of names since its directories were last synced.
type nameOp struct {
	seq     uint64
	parts   []namePart
	settled bool
}

// disk is the storage behind a mount. It knows nothing of FUSE.
type disk struct {
	objects string
	limit   int64

	capacity, used, unsynced atomic.Int64
	seq                      atomic.Uint64
	stats                    struct{ syncs, lies, writebacks, crashes atomic.Int64 }

	// gate is held shared by every change and exclusively by a crash.
	gate sync.RWMutex

	mu struct {
		sync.Mutex
		root            *node
		nodes           map[uint64]*node // by id
		lastIno, lastID uint64
		names           []*nameOp // pending, in order
	}
}

func newDisk(objects string, capacity, limit int64) (*disk, error) {
	if err := os.MkdirAll(objects, 0o700); err != nil {
		return nil, err
	}
	d := &disk{objects: objects, limit: limit}
	d.capacity.Store(capacity)
	d.mu.nodes = make(map[uint64]*node)
	d.mu.root = d.newNode(true, 0o755)
	d.mu.root.links = 1
	return d, nil
}

// newNode makes a node without a name. The caller holds mu or is alone.
func (d *disk) newNode(isDir bool, mode uint32) *node {
	d.mu.lastIno++
	d.mu.lastID++
	n := &node{ino: d.mu.lastIno, id: d.mu.lastID, isDir: isDir, mode: mode & 0o7777, mtime: time.Now(), doomedSize: -1}
	if isDir {
		n.entries = make(map[string]*node)
	}
	d.mu.nodes[n.id] = n
	return n
}

func (d *disk) object(n *node) string { return filepath.Join(d.objects, strconv.FormatUint(n.ino, 10)) }

// byID finds a node that the kernel names.
func (d *disk) byID(id uint64) (*node, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.mu.nodes[id]; n != nil {
		return n, nil
	}
	return nil, syscall.ESTALE
}

// path is one name of a node, from the root, without a leading slash.
func (d *disk) path(n *node) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pathLocked(n)
}

func (d *disk) pathLocked(n *node) string {
	var parts []string
	for ; n != nil && n != d.mu.root; n = n.parent {
		parts = append(parts, n.name)
	}
	slices.Reverse(parts)
	return strings.Join(parts, "/")
}

// find follows a path from the root.
func (d *disk) find(path string) (*node, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.mu.root
	for _, part := range strings.Split(strings.Trim(filepath.ToSlash(filepath.Clean("/"+path)), "/"), "/") {
		if part == "" {
			continue
		}
		if !n.isDir {
			return nil, syscall.ENOTDIR
		}
		if n = n.entries[part]; n == nil {
			return nil, fmt.Errorf("%s: %w", path, syscall.ENOENT)
		}
	}
	return n, nil
}

// set changes one entry and nothing else.
func (p namePart) set(to *node) {
	from := p.dir.entries[p.name]
	if from == to {
		return
	}
	if from != nil {
		from.links--
	}
	if to == nil {
		delete(p.dir.entries, p.name)
		return
	}
	p.dir.entries[p.name] = to
	to.links++
	to.parent, to.name = p.dir, p.name
}

// change makes a change of names and notes it as pending.
func (d *disk) change(parts ...namePart) {
	op := &nameOp{seq: d.seq.Add(1), parts: parts}
	now := time.Now()
	for i := range parts {
		p := &parts[i]
		p.old = p.dir.entries[p.name]
		p.set(p.new)
		p.dir.mtime = now
		p.dir.refs++
		for _, n := range []*node{p.old, p.new} {
			if n != nil {
				n.refs++
			}
		}
	}
	d.mu.names = append(d.mu.names, op)
	for _, p := range parts {
		d.release(p.old)
	}
}

// settleName forgets how to undo a change.
func (d *disk) settleName(op *nameOp) {
	op.settled = true
	for _, p := range op.parts {
		for _, n := range []*node{p.dir, p.old, p.new} {
			if n != nil {
				n.refs--
				d.release(n)
			}
		}
	}
}

// syncDir makes the entries of a directory durable (FF1, FF3).
func (d *disk) syncDir(dir *node) {
	d.mu.Lock()
	defer d.mu.Unlock()
	reach := map[*node]bool{dir: true}
	for grown := true; grown; {
		grown = false
		for _, op := range d.mu.names {
			if !slices.ContainsFunc(op.parts, func(p namePart) bool { return reach[p.dir] }) {
				continue
			}
			for _, p := range op.parts {
				if !reach[p.dir] {
					reach[p.dir], grown = true, true
				}
			}
		}
	}
	d.settleNames(func(op *nameOp) bool { return reach[op.parts[0].dir] })
	// What happened in a directory that is gone for good matters no more.
	for again := true; again; {
		again = d.settleNames(func(op *nameOp) bool {
			return !slices.ContainsFunc(op.parts, func(p namePart) bool { return !d.dead(p.dir) })
		})
	}
}

// dead says whether a directory has no name and no pending change that could
// give it one. Mentions of it as the place of changes do not count.
func (d *disk) dead(dir *node) bool {
	if dir.links > 0 {
		return false
	}
	for _, op := range d.mu.names {
		for _, p := range op.parts {
			if p.old == dir || p.new == dir {
				return false
			}
		}
	}
	return true
}

func (d *disk) settleNames(which func(*nameOp) bool) bool {
	var chosen []*nameOp
	for _, op := range d.mu.names {
		if which(op) {
			chosen = append(chosen, op)
		}
	}
	for _, op := range chosen {
		d.settleName(op)
	}
	if len(chosen) > 0 {
		d.mu.names = slices.DeleteFunc(d.mu.names, func(op *nameOp) bool { return op.settled })
	}
	return len(chosen) > 0
}

// release frees what a node without name, mention and handle takes.
func (d *disk) release(n *node) {
	if n == nil || n.links > 0 || n.opens > 0 || n == d.mu.root {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	// Space is free when the last name and handle are gone, as on a real disk,
	// even if the object must stay because a crash would bring it back.
	d.used.Add(-n.alloc.cut(0, 1<<62))
	if n.refs > 0 {
		return
	}
	if n.file != nil {
		for _, op := range n.pending {
			d.unsynced.Add(-op.bytes())
		}
		n.pending, n.doomed = nil, nil
		// Its contents are of no more use to anybody.
		_ = n.file.Close()
		_ = os.Remove(d.object(n))
		n.file = nil
	}
	if n.lookups == 0 {
		delete(d.mu.nodes, n.id)
	}
}

// create makes a file or directory under a name that does not exist.
func (d *disk) create(dir *node, name string, isDir bool, mode uint32) (*node, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.vacant(dir, name); err != nil {
		return nil, err
	}
	n := d.newNode(isDir, mode)
	if !isDir {
		file, err := openObject(d.object(n), true)
		if err != nil {
			delete(d.mu.nodes, n.id)
			return nil, err
		}
		n.file = file
	}
	d.change(namePart{dir: dir, name: name, new: n})
	return n, nil
}

func (d *disk) vacant(dir *node, name string) error {
	switch {
	case !dir.isDir:
		return syscall.ENOTDIR
	case dir.links == 0:
		return syscall.ENOENT
	case len(name) > 255:
		return syscall.ENAMETOOLONG
	case dir.entries[name] != nil:
		return syscall.EEXIST
	}
	return nil
}

func (d *disk) link(n, dir *node, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n.isDir {
		return syscall.EPERM
	}
	if n.links == 0 {
		return syscall.ENOENT
	}
	if err := d.vacant(dir, name); err != nil {
		return err
	}
	d.change(namePart{dir: dir, name: name, new: n})
	return nil
}

// remove is unlink or rmdir.
func (d *disk) remove(dir *node, name string, isDir bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := dir.entries[name]
	switch {
	case n == nil:
		return syscall.ENOENT
	case isDir && !n.isDir:
		return syscall.ENOTDIR
	case !isDir && n.isDir:
		return syscall.EISDIR
	case len(n.entries) > 0:
		return syscall.ENOTEMPTY
	}
	d.change(namePart{dir: dir, name: name})
	return nil
}

// rename moves a name; noReplace is RENAME_NOREPLACE.
func (d *disk) rename(from *node, oldName string, to *node, newName string, noReplace bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := from.entries[oldName]
	if n == nil || !to.isDir || to.links == 0 {
		return syscall.ENOENT
	}
	if len(newName) > 255 {
		return syscall.ENAMETOOLONG
	}
	for p := to; n.isDir && p != nil; p = p.parent {
		if p == n {
			return syscall.EINVAL
		}
	}
	if there := to.entries[newName]; there != nil {
		switch {
		case noReplace:
			return syscall.EEXIST
		case there == n:
			return nil
		case there.isDir && !n.isDir:
			return syscall.EISDIR
		case !there.isDir && n.isDir:
			return syscall.ENOTDIR
		case len(there.entries) > 0:
			return syscall.ENOTEMPTY
		}
	}
	d.change(namePart{dir: from, name: oldName}, namePart{dir: to, name: newName, new: n})
	return nil
}

// syncFile makes a file's contents durable.
func (d *disk) syncFile(n *node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	d.settle(n)
	d.stats.syncs.Add(1)
}

// syncAll makes everything durable, as sync(2) does.
func (d *disk) syncAll() {
	d.gate.RLock()
	defer d.gate.RUnlock()
	d.mu.Lock()
	nodes := d.files()
	d.settleNames(func(*nameOp) bool { return true })
	d.mu.Unlock()
	for _, n := range nodes {
		d.syncFile(n)
	}
}

// files lists the files that have a name, an open handle or a pending change,
// by inode number.
func (d *disk) files() []*node {
	var found []*node
	for _, n := range d.mu.nodes {
		if n.file != nil {
			found = append(found, n)
		}
	}
	slices.SortFunc(found, func(a, b *node) int { return int(int64(a.ino) - int64(b.ino)) })
	return found
}
