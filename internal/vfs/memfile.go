package vfs

import (
	"io"
	"io/fs"
	"math/rand"
)

// memFile is an open file of Mem. Its node is guarded by Mem.mu.
type memFile struct {
	fs       *Mem
	node     *memNode
	name     string
	writable bool
	closed   bool // guarded by Mem.mu
}

// writeLocked applies one change to the contents and keeps it as pending.
func (n *memNode) writeLocked(w memWrite) {
	n.data = w.apply(n.data)
	n.pending = append(n.pending, w)
}

// apply returns data after the change, in place where that is possible.
func (w memWrite) apply(data []byte) []byte {
	end := w.off + int64(len(w.data))
	if w.truncate && w.off <= int64(len(data)) {
		return data[:w.off:w.off]
	}
	if grow := end - int64(len(data)); grow > 0 {
		data = append(data, make([]byte, grow)...)
	}
	copy(data[w.off:], w.data)
	return data
}

func (f *memFile) checkLocked(op string, write bool) error {
	if f.closed {
		return pathError(op, f.name, fs.ErrClosed)
	}
	if write && !f.writable {
		return pathError(op, f.name, fs.ErrPermission)
	}
	return nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("read", false); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, pathError("read", f.name, fs.ErrInvalid)
	}
	if off >= int64(len(f.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.node.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("write", true); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, pathError("write", f.name, fs.ErrInvalid)
	}
	f.node.writeLocked(memWrite{off: off, data: append([]byte(nil), p...)})
	return len(p), nil
}

func (f *memFile) Truncate(size int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("truncate", true); err != nil {
		return err
	}
	if size < 0 {
		return pathError("truncate", f.name, fs.ErrInvalid)
	}
	f.node.writeLocked(memWrite{off: size, truncate: true})
	return nil
}

func (f *memFile) Sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("sync", false); err != nil {
		return err
	}
	n := f.node
	// Replaying the pending changes keeps a sync of an append cheap: the cost
	// is that of the change, not that of the file.
	for _, w := range n.pending {
		n.synced = w.apply(n.synced)
	}
	n.pending = nil
	return nil
}

func (f *memFile) SyncData() error { return f.Sync() }

func (f *memFile) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("size", false); err != nil {
		return 0, err
	}
	return int64(len(f.node.data)), nil
}

func (f *memFile) Name() string { return f.name }

func (f *memFile) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("close", false); err != nil {
		return err
	}
	f.closed = true
	return nil
}

// CrashClone returns what the disk may hold after a power cut now: all that was
// synced, and a part of the rest that the seed chooses (VF1, VF2). The origin is
// not changed and may be used on, so one run can yield many crash states.
func (m *Mem) CrashClone(seed int64) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := crasher{rng: rand.New(rand.NewSource(seed)), done: map[*memNode]*memNode{}}
	out := NewMem()
	out.mu.root = c.clone(m.mu.root)
	return out
}

// keepRule is how much of the pending changes of one node survives.
type keepRule uint8

const (
	keepNone keepRule = iota
	keepAll
	keepPrefix
	keepSubset
	keepRules
)

type crasher struct {
	rng  *rand.Rand
	done map[*memNode]*memNode // hard links stay links
}

func (c *crasher) clone(n *memNode) *memNode {
	if d := c.done[n]; d != nil {
		return d
	}
	out := &memNode{isDir: n.isDir}
	c.done[n] = out
	if n.isDir {
		c.cloneDir(n, out)
	} else {
		c.cloneFile(n, out)
	}
	return out
}

// kept says which of count pending changes survive.
func (c *crasher) kept(count int) []bool {
	keep := make([]bool, count)
	rule := keepRule(c.rng.Intn(int(keepRules)))
	prefix := count
	if rule == keepPrefix {
		prefix = c.rng.Intn(count + 1)
	}
	for i := range keep {
		switch rule {
		case keepNone:
		case keepAll:
			keep[i] = true
		case keepPrefix:
			keep[i] = i < prefix
		case keepSubset:
			keep[i] = c.rng.Intn(2) == 0
		}
	}
	return keep
}

func (c *crasher) cloneDir(n, out *memNode) {
	entries := make(map[string]*memNode, len(n.syncedEntries))
	for name, e := range n.syncedEntries {
		entries[name] = e
	}
	for i, keep := range c.kept(len(n.pendingOps)) {
		if keep {
			n.pendingOps[i].apply(entries)
		}
	}
	out.entries = make(map[string]*memNode, len(entries))
	out.syncedEntries = make(map[string]*memNode, len(entries))
	for _, name := range sortedNames(entries) { // sorted: the seed alone decides
		e := c.clone(entries[name])
		out.entries[name], out.syncedEntries[name] = e, e
	}
}

func (c *crasher) cloneFile(n, out *memNode) {
	data := append([]byte(nil), n.synced...)
	keep := c.kept(len(n.pending))
	for i, w := range n.pending {
		switch {
		case keep[i]:
			data = w.apply(data)
		case len(w.data) > 0 && c.rng.Intn(2) == 0:
			data = c.tear(data, w)
		}
	}
	out.data = data
	out.synced = append([]byte(nil), data...)
}

// tear applies parts of a write: a prefix, or single sectors of it. What was
// not written in the middle reads as zeros or as what was there before.
func (c *crasher) tear(data []byte, w memWrite) []byte {
	const sector = 512
	if c.rng.Intn(2) == 0 {
		cut := c.rng.Intn(len(w.data))
		return memWrite{off: w.off, data: w.data[:cut]}.apply(data)
	}
	// The size may already cover the whole write though its bytes do not.
	if end := w.off + int64(len(w.data)); c.rng.Intn(2) == 0 && end > int64(len(data)) {
		data = append(data, make([]byte, end-int64(len(data)))...)
	}
	for start := int64(0); start < int64(len(w.data)); {
		end := min((w.off+start)/sector*sector+sector-w.off, int64(len(w.data)))
		if c.rng.Intn(2) == 0 {
			data = memWrite{off: w.off + start, data: w.data[start:end]}.apply(data)
		}
		start = end
	}
	return data
}
