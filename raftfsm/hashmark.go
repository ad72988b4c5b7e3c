package raftfsm

import (
	"context"
	"fmt"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// hashMark is the view of a HashMark's index. refs is under Machine.mu: one for
// the machine while the mark is among the newest, one per HashAt.
type hashMark struct {
	id     uint64
	view   *ReadView
	hashes []OpHash
	refs   int
}

// HashReport is what a replica holds at a hash mark. Reports of the same mark
// are equal on all replicas that hold the same.
type HashReport struct {
	Mark        uint64
	Index       uint64
	Epoch       base.Epoch
	Incarnation base.Incarnation
	ClockMs     uint64
	Sequence    uint64
	Range       keygroup.Range
	// Content and Op have one hash per key group of Range, in order.
	Content []state.Hash128
	Op      []OpHash
}

// Diff returns the key groups in which two reports of one mark differ, or an
// error if they are not of the same place in the log.
func (h *HashReport) Diff(o *HashReport) ([]keygroup.Group, error) {
	if h.Mark != o.Mark || h.Index != o.Index || h.Range != o.Range || h.Epoch != o.Epoch || h.Incarnation != o.Incarnation {
		return nil, fmt.Errorf("comparing hashes of mark %d index %d range %s with mark %d index %d range %s: %w",
			h.Mark, h.Index, h.Range, o.Mark, o.Index, o.Range, base.ErrConflict)
	}
	if h.ClockMs != o.ClockMs || h.Sequence != o.Sequence {
		return nil, fmt.Errorf("replicas differ at index %d in clock (%d, %d) or sequence (%d, %d): %w",
			h.Index, h.ClockMs, o.ClockMs, h.Sequence, o.Sequence, base.ErrConflict)
	}
	var out []keygroup.Group
	for i := range h.Content {
		if h.Content[i] != o.Content[i] || h.Op[i] != o.Op[i] {
			out = append(out, h.Range.Lo+keygroup.Group(i))
		}
	}
	return out, nil
}

// takeMark keeps the view of this instant, and lets the oldest go.
func (m *Machine) takeMark(id uint64) error {
	view, err := m.viewOf(m.header.Load())
	if err != nil {
		return fmt.Errorf("taking hash mark %d: %w", id, err)
	}
	mark := &hashMark{id: id, view: view, hashes: m.hashes.copy(), refs: 1}
	m.mu.Lock()
	all := append(m.mu.marks[:len(m.mu.marks):len(m.mu.marks)], mark)
	var old []*hashMark
	if n := len(all) - m.opts.HashMarks; n > 0 {
		old, all = all[:n], all[n:]
	}
	m.mu.marks = all
	m.mu.Unlock()
	m.wakeMarks()
	for _, o := range old {
		m.releaseMark(o)
	}
	return nil
}

// wakeMarks lets those who wait for a mark look again: one was added, or the
// machine has stopped.
func (m *Machine) wakeMarks() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.marked != nil {
		close(m.mu.marked)
		m.mu.marked = nil
	}
}

// WaitMark waits until the view of a hash mark is kept here, the machine stops,
// or the context ends. A mark is kept a moment after its entry counts as applied.
func (m *Machine) WaitMark(ctx context.Context, id uint64) error {
	for {
		m.mu.Lock()
		for _, h := range m.mu.marks {
			if h.id == id {
				m.mu.Unlock()
				return nil
			}
		}
		if m.mu.marked == nil {
			m.mu.marked = make(chan struct{})
		}
		added := m.mu.marked
		m.mu.Unlock()
		if err := m.failed(); err != nil {
			return fmt.Errorf("waiting for mark %d: %w: %w", id, base.ErrDamaged, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for mark %d: %w", id, ctx.Err())
		case <-added:
		}
	}
}

func (m *Machine) releaseMark(h *hashMark) {
	m.mu.Lock()
	h.refs--
	last := h.refs == 0
	m.mu.Unlock()
	if last {
		h.view.Close()
	}
}

func (m *Machine) dropMarks() {
	m.mu.Lock()
	old := m.mu.marks
	m.mu.marks = nil
	m.mu.Unlock()
	for _, o := range old {
		m.releaseMark(o)
	}
}

// HashAt computes the hashes at a mark that was applied. It reads the whole
// shard, on the caller's goroutine. A mark that was not applied here, or whose
// view is not kept any more, is base.ErrNotFound.
func (m *Machine) HashAt(ctx context.Context, id uint64) (*HashReport, error) {
	mark := m.findMark(id)
	if mark == nil {
		return nil, fmt.Errorf("hashing at mark %d: no view of it is kept: %w", id, base.ErrNotFound)
	}
	defer m.releaseMark(mark)
	v := mark.view
	r := &HashReport{
		Mark: id, Index: v.AppliedIndex, Epoch: v.Epoch, Incarnation: v.Incarnation,
		ClockMs: v.ClockMs, Sequence: v.Sequence, Range: v.Range, Op: mark.hashes,
	}
	var err error
	if r.Content, err = v.HashAll(ctx); err != nil {
		return nil, fmt.Errorf("hashing at mark %d: %w", id, err)
	}
	return r, nil
}

// findMark returns the newest mark of the id with a reference, nil if none.
func (m *Machine) findMark(id uint64) *hashMark {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := len(m.mu.marks) - 1; i >= 0; i-- {
		if h := m.mu.marks[i]; h.id == id {
			h.refs++
			return h
		}
	}
	return nil
}
