//go:build linux

package faultfs

import (
	"fmt"
	"os"
	"slices"
)

// CrashMode says what a crash leaves of that which was not synced.
type CrashMode string

// The modes of a crash.
const (
	// DropAll leaves nothing of it.
	DropAll CrashMode = "drop-all"
	// KeepPrefix leaves what came before one moment, and a torn write.
	KeepPrefix CrashMode = "keep-prefix"
	// KeepSubset leaves any part of it.
	KeepSubset CrashMode = "keep-subset"
)

// CrashReport counts what a crash took.
type CrashReport struct {
	Mode CrashMode `json:"mode"`
	Seed uint64    `json:"seed"`
	// NamesDropped and NamesKept count changes of directories, Files the files
	// that had un-synced changes, and the bytes are those of un-synced writes.
	NamesDropped int   `json:"namesDropped"`
	NamesKept    int   `json:"namesKept"`
	Files        int   `json:"files"`
	BytesDropped int64 `json:"bytesDropped"`
	BytesKept    int64 `json:"bytesKept"`
}

func (r CrashReport) String() string {
	return fmt.Sprintf("%s, seed %d: %d changes of names lost and %d kept, %d bytes in %d files lost and %d kept",
		r.Mode, r.Seed, r.NamesDropped, r.NamesKept, r.BytesDropped, r.Files, r.BytesKept)
}

// crash rolls back to what a power loss leaves (FF1, FF2), and calls forget while
// nobody else is at it.
func (d *disk) crash(mode CrashMode, seed uint64, forget func()) (CrashReport, error) {
	d.gate.Lock()
	defer d.gate.Unlock()
	forget()
	d.mu.Lock()
	defer d.mu.Unlock()
	report := CrashReport{Mode: mode, Seed: seed}
	files := d.files()
	var seqs []uint64
	for _, op := range d.mu.names {
		seqs = append(seqs, op.seq)
	}
	for _, n := range files {
		for _, op := range n.pending {
			seqs = append(seqs, op.seq)
		}
	}
	slices.Sort(seqs)
	c := newChooser(mode, seed, seqs)
	d.rollbackNames(c, &report)
	for _, n := range files {
		if err := n.rollback(c, &report); err != nil {
			return report, fmt.Errorf("rolling back object %d: %w", n.ino, err)
		}
	}
	d.renew(files)
	d.stats.crashes.Add(1)
	return report, nil
}

// rollbackNames undoes the pending changes of names and makes again those that
// the choice keeps.
func (d *disk) rollbackNames(c *chooser, report *CrashReport) {
	ops := d.mu.names
	for _, op := range slices.Backward(ops) {
		for _, p := range slices.Backward(op.parts) {
			p.set(p.old)
		}
	}
	lost := make(map[any]bool)
	for _, op := range ops {
		keep := c.name(op.seq)
		writes, reads := op.touches()
		for _, key := range append(reads, writes...) {
			keep = keep && !lost[key]
		}
		if !keep {
			report.NamesDropped++
			for _, key := range writes {
				lost[key] = true
			}
			continue
		}
		report.NamesKept++
		for _, p := range op.parts {
			p.set(p.new)
		}
	}
	d.mu.names = nil
}

// entryKey names a directory entry.
type entryKey struct {
	dir  *node
	name string
}

// touches lists what a change decides (entries, and the place of directories)
// and what it builds on (the place of the directories that it happens in).
func (op *nameOp) touches() (writes, reads []any) {
	for _, p := range op.parts {
		writes = append(writes, entryKey{p.dir, p.name})
		reads = append(reads, p.dir)
		for _, n := range []*node{p.old, p.new} {
			if n != nil && n.isDir {
				writes = append(writes, n)
			}
		}
	}
	return writes, reads
}

// renew drops what no name leads to and gives every node a new number (FF5).
func (d *disk) renew(files []*node) {
	reached := make(map[*node]bool)
	var walk func(*node)
	walk = func(n *node) {
		n.links, n.refs, n.opens, n.lookups = 0, 0, 0, 0
		reached[n] = true
		for name, child := range n.entries {
			if !reached[child] {
				walk(child)
			}
			child.links++
			child.parent, child.name = n, name
		}
	}
	walk(d.mu.root)
	d.mu.root.links = 1
	d.used.Store(0)
	d.unsynced.Store(0)
	clear(d.mu.nodes)
	for n := range reached {
		if n != d.mu.root {
			d.mu.lastID++
			n.id = d.mu.lastID
		}
		d.mu.nodes[n.id] = n
		d.used.Add(n.alloc.total())
	}
	for _, n := range files {
		if !reached[n] {
			_ = n.file.Close()
			_ = os.Remove(d.object(n))
			n.file = nil
		}
	}
}
