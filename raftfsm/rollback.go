package raftfsm

import (
	"errors"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// Fence stops the writes to a shard, before it is rolled back.
type Fence struct {
	// Operation is the cluster's operation that rolls back; their numbers grow.
	Operation uint64
	// Checkpoint is the one that the cluster goes back to.
	Checkpoint uint64
}

// Rollback gives a fenced shard the content that it had at a checkpoint.
type Rollback struct {
	Operation, Checkpoint uint64
	// Incarnation and Epoch are those of the shard from then on.
	Incarnation base.Incarnation
	Epoch       base.Epoch
}

// Reopen ends the fence of a shard that was rolled back.
type Reopen struct {
	Operation uint64
	// Revision is one of the system state at which the sessions of the former
	// incarnation had ended: no leader that does not know brings one back.
	Revision base.Revision
}

// rollback is what the core record says of rollbacks.
type rollback struct {
	// fence is the operation whose fence is up, target its checkpoint; 0: none.
	fence, target uint64
	// op is the newest operation that rolled the shard back, to its checkpoint and
	// index that of its entry; 0: none did.
	op, to, index uint64
}

// pending says that the shard was rolled back and others may not be yet.
func (r *rollback) pending() bool { return r.fence != 0 && r.fence == r.op }

// refusal is what a fenced shard answers.
func (c *core) fenced() *base.Error {
	return &base.Error{Cause: base.ErrNotReady, Ordinal: -1, Epoch: c.epoch,
		Hint: fmt.Sprintf("rolling back to checkpoint %d; retry", c.rollback.target)}
}

// rolledBack is what who still has another incarnation is answered.
func (c *core) otherIncarnation(asked base.Incarnation) *base.Error {
	hint := fmt.Sprintf("the shard's incarnation is %d", c.incarnation)
	if c.rollback.to != 0 && asked < c.incarnation {
		hint = fmt.Sprintf("rolled back to checkpoint %d", c.rollback.to)
	}
	return &base.Error{Cause: base.ErrIncarnation, Ordinal: -1, Epoch: c.epoch, Hint: hint}
}

func operationConflict(format string, args ...any) error {
	return &base.Error{Cause: base.ErrConflict, Field: "operation", Ordinal: -1, Hint: fmt.Sprintf(format, args...)}
}

// raise puts up the fence of an operation. It changes nothing if that is up.
func (c *core) raise(f *Fence) error {
	switch {
	case f.Operation <= c.rollback.op:
		return operationConflict("operation %d has rolled the shard back", c.rollback.op)
	case c.rollback.fence != 0 && c.rollback.fence != f.Operation:
		return operationConflict("the fence of operation %d is up", c.rollback.fence)
	}
	c.rollback.fence, c.rollback.target = f.Operation, f.Checkpoint
	return nil
}

// reopen takes the fence of an operation away. It changes nothing if it is gone.
func (c *core) reopen(o *Reopen) error {
	switch {
	case o.Operation != c.rollback.op:
		return operationConflict("operation %d has not rolled the shard back", o.Operation)
	case c.rollback.fence != 0 && c.rollback.fence != o.Operation:
		return operationConflict("the fence of operation %d is up", c.rollback.fence)
	}
	c.rollback.fence, c.rollback.target = 0, 0
	c.forgotten = max(c.forgotten, o.Revision)
	return nil
}

// mayRollBack refuses a rollback that is not the one that the fence is up for. One
// that was done is base.ErrConflict: the store is replaced once.
func (c *core) mayRollBack(r *Rollback) error {
	switch {
	case r.Operation == c.rollback.op:
		return operationConflict("operation %d has rolled the shard back", r.Operation)
	case c.rollback.fence == 0 || c.rollback.fence != r.Operation || c.rollback.target != r.Checkpoint:
		return operationConflict("the fence of operation %d for checkpoint %d is not up", r.Operation, r.Checkpoint)
	case r.Incarnation <= c.incarnation || r.Epoch <= c.epoch:
		return base.Invalid("incarnation", fmt.Sprintf("a rollback begins a newer incarnation than %d and epoch than %d", c.incarnation, c.epoch))
	}
	return nil
}

// CheckPrepared says whether a store, which holds the shard as a checkpoint had
// it, is one that header's shard can be rolled back to. base.ErrIdentity if it is
// that of another shard or range, base.ErrCorrupt if it is damaged, base.ErrNotReady
// if the replica has applied nothing yet, so that nothing can be said.
func CheckPrepared(store engine.Store, header *Header) error {
	if !header.core.initialised {
		return fmt.Errorf("the replica has nothing of the shard yet: %w", base.ErrNotReady)
	}
	_, err := loadPrepared(store, &header.core)
	return err
}

func loadPrepared(store engine.Store, now *core) (*loaded, error) {
	l, err := loadMeta(store)
	if err != nil {
		return nil, err
	}
	c := &l.core
	if !c.initialised || c.group != now.group || c.birth != now.birth || c.rng != now.rng || c.m != now.m {
		return nil, fmt.Errorf("the store is that of group %s birth %x range %s, the shard is group %s birth %x range %s: %w",
			c.group, uint64(c.birth), c.rng, now.group, uint64(now.birth), now.rng, base.ErrIdentity)
	}
	return l, nil
}

// rollBack replaces the store by the one that was prepared, in which the entry is
// the newest that is applied. What comes out is a function of the entry, of what
// the shard was before it, and of the checkpoint's files, so that all replicas
// hold the same (RF11). An error stops the machine.
func (m *Machine) rollBack(e *Entry, r Rollback, out *Outcome) error {
	if err := m.commit(); err != nil { // what is before it, in the store that goes
		return err
	}
	failpoint.Hit("raftfsm.rollback.begin")
	next := m.core
	next.appliedIndex, next.appliedTerm = e.Index, e.Term
	next.incarnation, next.epoch = r.Incarnation, r.Epoch
	next.rollback.op, next.rollback.to, next.rollback.index = r.Operation, r.Checkpoint, e.Index
	if m.opts.OnRollback == nil {
		return fmt.Errorf("rolling back to checkpoint %d: %w", r.Checkpoint, errNotPrepared)
	}
	store, released, err := m.opts.OnRollback(r, func(store engine.Store) error { return m.seal(store, next) })
	if err != nil {
		return fmt.Errorf("rolling back to checkpoint %d: %w", r.Checkpoint, err)
	}
	failpoint.Hit("raftfsm.rollback.before-adopt")
	if err := m.replace(store, released); err != nil {
		return errors.Join(fmt.Errorf("rolling back to checkpoint %d: %w", r.Checkpoint, err), store.Close())
	}
	failpoint.Hit("raftfsm.rollback.adopted")
	m.counts.entries++
	out.ClockMs, out.Sequence = m.core.clockMs, m.core.sequence
	return nil
}

// errNotPrepared: the shard goes on without this replica.
var errNotPrepared = fmt.Errorf("the replica was not prepared for the rollback: %w", base.ErrDamaged)

// seal makes a prepared store, which holds the shard as the checkpoint had it,
// the one that the shard has from now on, and makes that durable. The clock and
// the sequence never go back (RF5); what was dropped since stays dropped (RF9);
// sessions are those of another incarnation. Sealing again does no harm.
func (m *Machine) seal(store engine.Store, next core) error {
	l, err := loadPrepared(store, &m.core)
	if err != nil {
		return fmt.Errorf("sealing the prepared store: %w", err)
	}
	next.clockMs = max(next.clockMs, l.core.clockMs)
	next.sequence = max(next.sequence, l.core.sequence) + 1
	next.generation = max(next.generation, l.core.generation) + 1
	var b engine.Batch
	b.DeleteRange(engine.MetaFamily, []byte{metaSession}, []byte{metaSession + 1})
	b.Delete(engine.MetaFamily, configurationKey)
	if m.confIdx > 0 {
		b.Put(engine.MetaFamily, configurationKey, encodeConfiguration(m.confIdx, m.conf))
	}
	families := store.Families()
	for _, id := range sortedIDs(m.dropped) {
		if _, known := l.dropped[id]; known {
			continue
		}
		d := dropped{index: m.dropped[id].index, gone: true}
		if _, there := families[id]; there { // its family goes once this is durable
			d = dropped{index: next.appliedIndex}
		}
		delete(l.decls, id)
		b.Delete(engine.MetaFamily, declarationKey(id))
		b.Put(engine.MetaFamily, droppedKey(id), encodeDropped(d))
	}
	if _, err := openDeclarations(store, m.layout, l); err != nil {
		return fmt.Errorf("sealing the prepared store: %w", err)
	}
	b.Put(engine.MetaFamily, coreKey, next.appendTo(nil))
	if err := store.Write(&b); err != nil {
		return fmt.Errorf("sealing the prepared store: %w", err)
	}
	failpoint.Hit("raftfsm.rollback.sealed")
	if err := store.Flush(); err != nil {
		return fmt.Errorf("sealing the prepared store: %w", err)
	}
	return nil
}
