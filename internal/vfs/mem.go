package vfs

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"sync"

	"github.com/keelstate/keelstate/internal/base"
)

// Mem is a file system in memory that can crash. It is strict: nothing that was
// not synced may be relied on after CrashClone. The zero value is not usable;
// call NewMem.
type Mem struct {
	mu struct {
		sync.Mutex
		root  *memNode
		locks map[string]bool
	}
}

// memNode is a file or a directory. Its fields are guarded by Mem.mu.
type memNode struct {
	isDir bool

	// Of a file: the contents now, the contents at the last sync, and what has
	// been done since, in order.
	data    []byte
	synced  []byte
	pending []memWrite

	// Of a directory: the entries now, at the last SyncDir, and the changes
	// since, in order.
	entries       map[string]*memNode
	syncedEntries map[string]*memNode
	pendingOps    []memDirOp
}

// memWrite is one change of a file: bytes at an offset, or a truncation.
type memWrite struct {
	off      int64
	data     []byte
	truncate bool // off is the new size
}

// memDirOp is one change of a directory: del goes, add comes, as one step.
type memDirOp struct {
	del  string
	add  string
	node *memNode
}

func newMemDir() *memNode {
	return &memNode{isDir: true, entries: map[string]*memNode{}, syncedEntries: map[string]*memNode{}}
}

// NewMem returns an empty memory file system.
func NewMem() *Mem {
	m := &Mem{}
	m.mu.root = newMemDir()
	m.mu.locks = map[string]bool{}
	return m
}

func pathError(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: name, Err: err}
}

// splitPath cuts a cleaned path into its parts; the root has none.
func splitPath(name string) []string {
	name = filepath.ToSlash(filepath.Clean("/" + name))
	var parts []string
	for start := 1; start < len(name); {
		end := start
		for end < len(name) && name[end] != '/' {
			end++
		}
		parts = append(parts, name[start:end])
		start = end + 1
	}
	return parts
}

// lookupLocked finds a node, or nil.
func (m *Mem) lookupLocked(name string) *memNode {
	n := m.mu.root
	for _, p := range splitPath(name) {
		if n == nil || !n.isDir {
			return nil
		}
		n = n.entries[p]
	}
	return n
}

// parentLocked finds the directory of a path and the last part of the path.
func (m *Mem) parentLocked(op, name string) (*memNode, string, error) {
	parts := splitPath(name)
	if len(parts) == 0 {
		return nil, "", pathError(op, name, fs.ErrInvalid)
	}
	dir := m.lookupLocked(filepath.Dir(filepath.Clean("/" + name)))
	if dir == nil || !dir.isDir {
		return nil, "", pathError(op, name, fs.ErrNotExist)
	}
	return dir, parts[len(parts)-1], nil
}

// changeLocked applies one change to a directory and keeps it as pending.
func (n *memNode) changeLocked(op memDirOp) {
	op.apply(n.entries)
	n.pendingOps = append(n.pendingOps, op)
}

func (op memDirOp) apply(entries map[string]*memNode) {
	if op.del != "" {
		delete(entries, op.del)
	}
	if op.add != "" {
		entries[op.add] = op.node
	}
}

// Create implements FS.
func (m *Mem) Create(name string) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	dir, last, err := m.parentLocked("create", name)
	if err != nil {
		return nil, err
	}
	n := dir.entries[last]
	switch {
	case n == nil:
		n = &memNode{}
		dir.changeLocked(memDirOp{add: last, node: n})
	case n.isDir:
		return nil, pathError("create", name, fs.ErrExist)
	default:
		n.writeLocked(memWrite{truncate: true})
	}
	return &memFile{fs: m, node: n, name: name, writable: true}, nil
}

func (m *Mem) open(name string, writable bool) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.lookupLocked(name)
	if n == nil {
		return nil, pathError("open", name, fs.ErrNotExist)
	}
	if n.isDir {
		return nil, pathError("open", name, fs.ErrInvalid)
	}
	return &memFile{fs: m, node: n, name: name, writable: writable}, nil
}

// Open implements FS.
func (m *Mem) Open(name string) (File, error) { return m.open(name, false) }

// OpenReadWrite implements FS.
func (m *Mem) OpenReadWrite(name string) (File, error) { return m.open(name, true) }

// Remove implements FS.
func (m *Mem) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	dir, last, err := m.parentLocked("remove", name)
	if err != nil {
		return err
	}
	n := dir.entries[last]
	if n == nil {
		return pathError("remove", name, fs.ErrNotExist)
	}
	if n.isDir && len(n.entries) > 0 {
		return pathError("remove", name, fmt.Errorf("directory not empty"))
	}
	dir.changeLocked(memDirOp{del: last})
	return nil
}

// Rename implements FS. Within one directory it stays one step in a crash; over
// two directories the two halves may part, which is what POSIX allows.
func (m *Mem) Rename(oldName, newName string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	from, fromLast, err := m.parentLocked("rename", oldName)
	if err != nil {
		return err
	}
	to, toLast, err := m.parentLocked("rename", newName)
	if err != nil {
		return err
	}
	n := from.entries[fromLast]
	if n == nil {
		return pathError("rename", oldName, fs.ErrNotExist)
	}
	if from == to {
		if fromLast != toLast {
			from.changeLocked(memDirOp{del: fromLast, add: toLast, node: n})
		}
		return nil
	}
	to.changeLocked(memDirOp{add: toLast, node: n})
	from.changeLocked(memDirOp{del: fromLast})
	return nil
}

// Link implements FS.
func (m *Mem) Link(oldName, newName string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.lookupLocked(oldName)
	if n == nil || n.isDir {
		return pathError("link", oldName, fs.ErrNotExist)
	}
	dir, last, err := m.parentLocked("link", newName)
	if err != nil {
		return err
	}
	if dir.entries[last] != nil {
		return pathError("link", newName, fs.ErrExist)
	}
	dir.changeLocked(memDirOp{add: last, node: n})
	return nil
}

// List implements FS.
func (m *Mem) List(dir string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.lookupLocked(dir)
	if n == nil || !n.isDir {
		return nil, pathError("list", dir, fs.ErrNotExist)
	}
	return sortedNames(n.entries), nil
}

func sortedNames(entries map[string]*memNode) []string {
	names := make([]string, 0, len(entries))
	for name := range entries {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// MkdirAll implements FS.
func (m *Mem) MkdirAll(dir string, _ os.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.mu.root
	for _, p := range splitPath(dir) {
		next := n.entries[p]
		if next == nil {
			next = newMemDir()
			n.changeLocked(memDirOp{add: p, node: next})
		}
		if !next.isDir {
			return pathError("mkdir", dir, fs.ErrExist)
		}
		n = next
	}
	return nil
}

// SyncDir implements FS.
func (m *Mem) SyncDir(dir string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.lookupLocked(dir)
	if n == nil || !n.isDir {
		return pathError("syncdir", dir, fs.ErrNotExist)
	}
	n.syncedEntries = make(map[string]*memNode, len(n.entries))
	for name, e := range n.entries {
		n.syncedEntries[name] = e
	}
	n.pendingOps = nil
	return nil
}

// Stat implements FS.
func (m *Mem) Stat(name string) (FileInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.lookupLocked(name)
	if n == nil {
		return FileInfo{}, pathError("stat", name, fs.ErrNotExist)
	}
	return FileInfo{Size: int64(len(n.data)), Dir: n.isDir}, nil
}

// Lock implements FS. A crash clone starts without locks.
func (m *Mem) Lock(name string) (io.Closer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	dir, last, err := m.parentLocked("lock", name)
	if err != nil {
		return nil, err
	}
	key := filepath.Clean("/" + name)
	if m.mu.locks[key] {
		return nil, fmt.Errorf("locking %s: held already: %w", name, base.ErrConflict)
	}
	if dir.entries[last] == nil {
		dir.changeLocked(memDirOp{add: last, node: &memNode{}})
	}
	m.mu.locks[key] = true
	return &memLock{fs: m, key: key}, nil
}

type memLock struct {
	fs   *Mem
	key  string
	once sync.Once
}

func (l *memLock) Close() error {
	l.once.Do(func() {
		l.fs.mu.Lock()
		defer l.fs.mu.Unlock()
		delete(l.fs.mu.locks, l.key)
	})
	return nil
}
