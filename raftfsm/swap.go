package raftfsm

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// Swap replaces the store by one that holds a newer state of the same shard: an
// installed snapshot. It runs in place of ApplyBatch. When the last view of the
// old store is closed, released is called with it and should close it and
// remove its directory. On an error nothing has changed.
//
// A store of another group or birth is base.ErrIdentity; one that is older than
// what was applied is base.ErrConflict.
func (m *Machine) Swap(store engine.Store, released func(old engine.Store)) error {
	if err := m.failed(); err != nil {
		return fmt.Errorf("swapping store: %w", err)
	}
	l, err := loadMeta(store)
	if err != nil {
		return fmt.Errorf("swapping store: %w", err)
	}
	if m.core.initialised && (l.core.group != m.core.group || l.core.birth != m.core.birth) {
		return fmt.Errorf("swapping group %s birth %x for group %s birth %x: %w",
			m.core.group, uint64(m.core.birth), l.core.group, uint64(l.core.birth), base.ErrIdentity)
	}
	if l.core.appliedIndex < m.core.appliedIndex {
		return fmt.Errorf("swapping index %d for older index %d: %w", m.core.appliedIndex, l.core.appliedIndex, base.ErrConflict)
	}
	failpoint.Hit("raftfsm.swap.begin")
	if err := m.replace(store, released); err != nil {
		return fmt.Errorf("swapping store: %w", err)
	}
	failpoint.Hit("raftfsm.swap.adopted")
	return nil
}

// replace adopts a store in place of the present one, which is handed to released
// when its last view is closed. Nothing changes on an error.
func (m *Machine) replace(store engine.Store, released func(old engine.Store)) error {
	m.mu.Lock()
	old := m.mu.ref
	m.mu.Unlock()
	if err := m.adopt(store, func(s engine.Store) { _ = s.Close() }); err != nil {
		return err
	}
	if released == nil {
		released = old.released
	}
	m.mu.Lock()
	old.released = released
	m.mu.Unlock()
	m.dropMarks()
	m.release(old)
	m.waits.wake(m.core.appliedIndex)
	return nil
}

func sortedIDs[K cmp.Ordered, V any, M ~map[K]V](m M) []K { return slices.Sorted(maps.Keys(m)) }

// setCore makes the exported fields those of c.
func (h *Header) setCore(c core) {
	h.core = c
	h.Group, h.Birth, h.Range, h.M = c.group, c.birth, c.rng, c.m
	h.Epoch, h.Incarnation = c.epoch, c.incarnation
	h.AppliedIndex, h.AppliedTerm = c.appliedIndex, c.appliedTerm
	h.ClockMs, h.Sequence, h.Barrier, h.Forgotten = c.clockMs, c.sequence, c.barrier, c.forgotten
	h.Fence, h.RolledBack, h.RollbackIndex = c.rollback.fence, c.rollback.op, c.rollback.index
}
