//go:build linux

package faultfs

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SectorBytes is the unit in which a write tears at a crash.
const SectorBytes = 512

// blockBytes is the unit in which space is taken.
const blockBytes = 4096

// fileOp is one change of a file since its last sync, with what undoes it.
type fileOp struct {
	seq uint64
	// data was written at off; nil for a change of the size alone.
	off  int64
	data []byte
	// old is what was at off before, as far as the file went.
	old              []byte
	oldSize, newSize int64
}

func (o fileOp) bytes() int64 { return int64(len(o.data) + len(o.old) + 96) }

// readOld reads what would be at [off, off+n) after a crash of now, if all of
// the pending changes were kept: the contents with the doomed pages undone.
func (n *node) readOld(off, length int64) ([]byte, error) {
	length = min(length, n.size-off)
	if length <= 0 {
		return nil, nil
	}
	p := make([]byte, length)
	if _, err := n.file.ReadAt(p, off); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	overlay(p, off, n.doomed)
	return p, nil
}

// take reserves the blocks of [lo, hi) that the file does not have.
func (d *disk) take(n *node, lo, hi int64) error {
	lo, hi = lo/blockBytes*blockBytes, (hi+blockBytes-1)/blockBytes*blockBytes
	need := n.alloc.missing(lo, hi)
	if need == 0 {
		return nil
	}
	if used := d.used.Add(need); used > d.capacity.Load() {
		d.used.Add(-need)
		return syscall.ENOSPC
	}
	n.alloc.add(lo, hi)
	return nil
}

// give frees the whole blocks of [lo, hi).
func (d *disk) give(n *node, lo, hi int64) {
	d.used.Add(-n.alloc.cut((lo+blockBytes-1)/blockBytes*blockBytes, hi/blockBytes*blockBytes))
}

// write is a pwrite. The caller holds the gate.
func (d *disk) write(n *node, p []byte, off int64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := d.take(n, off, off+int64(len(p))); err != nil {
		return err
	}
	return d.put(n, append([]byte(nil), p...), off)
}

// put writes data, which it keeps, and notes how to undo it.
func (d *disk) put(n *node, data []byte, off int64) error {
	old, err := n.readOld(off, int64(len(data)))
	if err != nil {
		return err
	}
	if _, err := n.file.WriteAt(data, off); err != nil {
		return err
	}
	end := off + int64(len(data))
	n.doomed = subtract(n.doomed, off, end)
	d.note(n, fileOp{off: off, data: data, old: old, oldSize: n.size, newSize: max(n.size, end)})
	return nil
}

// note records a change that was made, and writes back when too much piles up.
func (d *disk) note(n *node, op fileOp) {
	op.seq = d.seq.Add(1)
	n.size, n.mtime = op.newSize, time.Now()
	n.pending = append(n.pending, op)
	if d.unsynced.Add(op.bytes()) > d.limit {
		d.stats.writebacks.Add(1)
		d.settle(n)
	}
}

// settle makes a file's contents durable. The caller holds n.mu.
func (d *disk) settle(n *node) {
	for _, op := range n.pending {
		d.unsynced.Add(-op.bytes())
	}
	n.pending, n.doomedSize = nil, -1
}

// doom is what a failed fsync does (FF4). The caller holds n.mu.
func (d *disk) doom(n *node) {
	if len(n.pending) == 0 {
		return
	}
	if n.doomedSize < 0 {
		n.doomedSize = n.pending[0].oldSize
	}
	for i := len(n.pending) - 1; i >= 0; i-- {
		op := n.pending[i]
		d.unsynced.Add(-op.bytes())
		old := make([]byte, max(len(op.data), len(op.old)))
		copy(old, op.old)
		n.doomed = append(subtract(n.doomed, op.off, op.off+int64(len(old))), extent{op.off, old})
	}
	n.pending = nil
}

// truncate sets the size of a file. The caller holds the gate.
func (d *disk) truncate(n *node, size int64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return d.resize(n, size)
}

func (d *disk) resize(n *node, size int64) error {
	if size == n.size {
		n.mtime = time.Now()
		return nil
	}
	tail, err := n.readOld(size, n.size-size)
	if err != nil {
		return err
	}
	if err := n.file.Truncate(size); err != nil {
		return err
	}
	n.doomed = subtract(n.doomed, size, max(size, n.size))
	if size < n.size {
		d.used.Add(-n.alloc.cut((size+blockBytes-1)/blockBytes*blockBytes, 1<<62))
	}
	d.note(n, fileOp{off: size, old: tail, oldSize: n.size, newSize: size})
	return nil
}

// allocate is fallocate(2). The caller holds the gate.
func (d *disk) allocate(n *node, off, length int64, mode uint32) error {
	const known = unix.FALLOC_FL_KEEP_SIZE | unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_ZERO_RANGE
	if mode&^known != 0 {
		return syscall.EOPNOTSUPP
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	end := off + length
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) != 0 {
		if zeros := min(end, n.size) - off; zeros > 0 {
			if err := d.put(n, make([]byte, zeros), off); err != nil {
				return err
			}
		}
	}
	if mode&unix.FALLOC_FL_PUNCH_HOLE != 0 {
		d.give(n, off, end)
		return nil
	}
	if err := d.take(n, off, end); err != nil {
		return err
	}
	if mode&unix.FALLOC_FL_KEEP_SIZE == 0 && end > n.size {
		return d.resize(n, end)
	}
	return nil
}

// flipStored inverts one bit of what is stored, now and after a crash: also in
// what a crash would bring back or keep there.
func (n *node) flipStored(off int64, bit uint8) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if off < 0 || off >= n.size || bit > 7 {
		return syscall.EINVAL
	}
	var p [1]byte
	if _, err := n.file.ReadAt(p[:], off); err != nil {
		return err
	}
	p[0] ^= 1 << bit
	if _, err := n.file.WriteAt(p[:], off); err != nil {
		return err
	}
	for _, op := range n.pending {
		flipIn(op.data, off-op.off, bit)
		flipIn(op.old, off-op.off, bit)
	}
	for _, e := range n.doomed {
		flipIn(e.data, off-e.off, bit)
	}
	return nil
}

func flipIn(p []byte, at int64, bit uint8) {
	if at >= 0 && at < int64(len(p)) {
		p[at] ^= 1 << bit
	}
}

// rollback undoes what is pending and makes again what the choice keeps.
// Nobody else uses the node.
func (n *node) rollback(c *chooser, report *CrashReport) error {
	for i := len(n.pending) - 1; i >= 0; i-- {
		op := n.pending[i]
		if err := n.file.Truncate(op.oldSize); err != nil {
			return err
		}
		if _, err := n.file.WriteAt(op.old, op.off); err != nil {
			return err
		}
		n.size = op.oldSize
	}
	if n.doomedSize >= 0 {
		n.size = n.doomedSize
		if err := n.file.Truncate(n.size); err != nil {
			return err
		}
	}
	for _, e := range n.doomed {
		if e.off >= n.size {
			continue
		}
		e.data = e.data[:min(int64(len(e.data)), n.size-e.off)]
		if _, err := n.file.WriteAt(e.data, e.off); err != nil {
			return err
		}
		report.BytesDropped += int64(len(e.data))
	}
	for _, op := range n.pending {
		kept, err := n.redo(op, c)
		if err != nil {
			return err
		}
		report.BytesDropped += int64(len(op.data)) - kept
		report.BytesKept += kept
	}
	if len(n.pending) > 0 || len(n.doomed) > 0 {
		report.Files++
	}
	n.pending, n.doomed, n.doomedSize = nil, nil, -1
	n.alloc = nil
	n.alloc.add(0, (n.size+blockBytes-1)/blockBytes*blockBytes)
	return nil
}

// redo makes a pending change again, as far as the choice keeps it, and returns
// how many bytes of it were written.
func (n *node) redo(op fileOp, c *chooser) (int64, error) {
	fate := c.file(op.seq)
	if fate == fateDrop {
		return 0, nil
	}
	if op.data == nil {
		n.size = op.newSize
		return 0, n.file.Truncate(op.newSize)
	}
	var kept int64
	for lo := int64(0); lo < int64(len(op.data)); {
		hi := min(int64(len(op.data)), (op.off+lo)/SectorBytes*SectorBytes+SectorBytes-op.off)
		if fate == fateKeep || c.rnd.IntN(2) == 0 {
			if _, err := n.file.WriteAt(op.data[lo:hi], op.off+lo); err != nil {
				return kept, err
			}
			kept += hi - lo
			n.size = max(n.size, op.off+hi)
		}
		lo = hi
	}
	return kept, nil
}

// fate is what happens at a crash to a change that was not synced.
type fate int

const (
	fateDrop fate = iota
	fateKeep
	fateTear
)

// chooser decides the fates; what it decides is a function of the seed and of
// the order in which it is asked.
type chooser struct {
	mode CrashMode
	rnd  *rand.Rand
	// cut is the first sequence number after the prefix that is kept.
	cut uint64
	// chance that a change is kept, of this crash, in percent.
	chance int
}

func newChooser(mode CrashMode, seed uint64, seqs []uint64) *chooser {
	c := &chooser{mode: mode, rnd: rand.New(rand.NewPCG(seed, 0x6661756c74667331))}
	if len(seqs) > 0 {
		c.cut = seqs[c.rnd.IntN(len(seqs))]
	}
	c.chance = []int{10, 50, 90}[c.rnd.IntN(3)]
	return c
}

func (c *chooser) file(seq uint64) fate {
	switch c.mode {
	case KeepPrefix:
		switch {
		case seq < c.cut:
			return fateKeep
		case seq == c.cut:
			return fateTear
		}
	case KeepSubset:
		if c.rnd.IntN(100) < c.chance {
			return []fate{fateKeep, fateTear}[c.rnd.IntN(2)]
		}
	}
	return fateDrop
}

func (c *chooser) name(seq uint64) bool {
	switch c.mode {
	case KeepPrefix:
		return seq < c.cut
	case KeepSubset:
		return c.rnd.IntN(100) < c.chance
	}
	return false
}

// openObject opens the object behind a file.
func openObject(path string, create bool) (*os.File, error) {
	flags := os.O_RDWR
	if create {
		flags |= os.O_CREATE | os.O_EXCL
	}
	return os.OpenFile(path, flags, 0o600)
}
