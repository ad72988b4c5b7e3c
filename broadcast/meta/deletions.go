package meta

import (
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// Limits of delete plans.
const (
	// MaxPlanKeys bounds the keys of one plan.
	MaxPlanKeys = 4096
	// MaxPlannedPerTxn bounds the keys that one transaction plans.
	MaxPlannedPerTxn = 8192
)

// planning builds a transaction that changes checkpoints and moves objects that
// nothing uses any more from the registry to delete plans. All such transactions
// exclude each other by the counter of the plans, and the start of a checkpoint by
// the counter of the checkpoints: what one relies on no other takes away.
type planning struct {
	builder
	v     *View
	nowMs uint64
	// heads are the checkpoints as they will be, in the order of their numbers;
	// changed are the numbers of those that differ from the view.
	heads   []*Checkpoint
	changed map[uint64]bool
	gone    map[uint64]bool
	// taken are the numbers of objects that this transaction takes out.
	taken map[uint64]bool
	left  int
	plans []DeletePlan
	// later is a checkpoint whose objects are not planned yet: what the view shows
	// of them may not be all.
	later uint64
}

func newPlanning(v *View, nowMs uint64) *planning {
	return &planning{v: v, nowMs: nowMs, heads: slices.Clone(v.Checkpoints()), left: MaxPlannedPerTxn,
		changed: make(map[uint64]bool), gone: make(map[uint64]bool), taken: make(map[uint64]bool)}
}

// change makes next the record of its checkpoint.
func (p *planning) change(next *Checkpoint) {
	i := slices.IndexFunc(p.heads, func(c *Checkpoint) bool { return c.Number == next.Number })
	p.heads[i], p.changed[next.Number] = next, true
}

// drop removes the record of a checkpoint, and those of its shards.
func (p *planning) drop(c *Checkpoint) { p.gone[c.Number], p.changed[c.Number] = true, true }

// done plans what can be planned and returns the transaction.
func (p *planning) done() (broadcast.Txn, error) {
	if !slices.ContainsFunc(p.heads, (*Checkpoint).Running) {
		p.planDoomed()
	}
	p.cutFailed()
	if len(p.changed) == 0 && len(p.plans) == 0 {
		return broadcast.Txn{}, nil
	}
	p.expectCounter(p.v, counterCheckpoint)
	for _, c := range p.heads {
		if !p.changed[c.Number] {
			continue
		}
		key := idKey(kindCheckpoint, c.Number)
		if p.gone[c.Number] {
			p.expect(key, c.Revision)
			p.delete(key)
			p.deleteOf(kindCheckpointShard, c.Number)
			p.deleteOf(kindCheckpointUses, c.Number)
			p.deleteOf(kindPosition, c.Number)
			continue
		}
		p.replaceCheckpoint(c)
	}
	p.writePlans()
	return p.builder.done()
}

// deleteOf deletes all records of a kind that belong to a checkpoint.
func (b *builder) deleteOf(kind string, number uint64) {
	b.txn.Then = append(b.txn.Then, broadcast.DeletePrefix(idsKey(kind, number)+"/"))
}

// writePlans gives the plans their numbers. The counter moves even without any,
// so that no two such transactions are built from the same view (see planning).
func (p *planning) writePlans() {
	id := p.v.next(counterPlan)
	p.advance(p.v, counterPlan, id+uint64(len(p.plans)))
	for i := range p.plans {
		p.plans[i].ID = id + uint64(i)
		p.replace(kindDeletePlan, idKey(kindDeletePlan, p.plans[i].ID), 0, p.plans[i])
	}
}

// planDoomed goes through the checkpoints whose objects are to go, oldest first,
// as far as one transaction can hold it.
func (p *planning) planDoomed() {
	for _, c := range slices.Clone(p.heads) {
		if c.doomed() && c.Number != p.later && p.left > 0 {
			p.planOne(c)
		}
	}
}

func (p *planning) planOne(c *Checkpoint) {
	next := *c
	var keys []string
	if !c.MetadataPlanned {
		// In front of the objects: what is named there goes later.
		keys = append(keys, c.metadataKey(p.v.Cluster().ID))
		next.MetadataPlanned = true
		p.left--
	}
	free, all := p.unused(c)
	for _, o := range free {
		p.taken[o.Number] = true
		p.delete(idKey(kindObject, o.Number))
		keys = append(keys, o.Key)
	}
	p.left -= len(free)
	p.plan(keys, fmt.Sprintf("checkpoint %d", c.Number))
	if all && c.Phase == CheckpointDeleting {
		p.drop(c)
		return
	}
	if all {
		next.Garbage = false
		p.deleteOf(kindCheckpointUses, c.Number)
	}
	p.change(&next)
}

// unused returns objects that c uses and no running or retained checkpoint does,
// at most as many as there is room for; all says that these are the last.
func (p *planning) unused(c *Checkpoint) (free []*Object, all bool) {
	var mine []*Object
	for _, n := range p.v.usedNumbers(c.Number) {
		if o := p.v.Object(n); o != nil && !p.taken[n] {
			mine = append(mine, o)
		}
	}
	used := make([]bool, len(mine))
	for _, other := range p.heads {
		if !other.Running() && other.Phase != CheckpointCompleted {
			continue
		}
		p.v.scanUses(other.Number, func(u *objectUse) bool {
			for _, n := range u.Objects {
				if i, ok := slices.BinarySearchFunc(mine, n, func(o *Object, n uint64) int { return compare(o.Number, n) }); ok {
					used[i] = true
				}
			}
			return true
		})
	}
	for i, o := range mine {
		if used[i] {
			continue
		}
		if len(free) >= p.left {
			return free, false
		}
		free = append(free, o)
	}
	return free, true
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// plan adds delete plans for keys.
func (p *planning) plan(keys []string, why string) {
	for part := range slices.Chunk(keys, MaxPlanKeys) {
		p.plans = append(p.plans, DeletePlan{Keys: part, CreatedMs: p.nowMs, Why: why})
	}
}

// cutFailed forgets the oldest failed checkpoints of which nothing is left.
func (p *planning) cutFailed() {
	var failed []*Checkpoint
	for _, c := range p.heads {
		if c.Phase == CheckpointFailed && !c.Garbage && !p.gone[c.Number] {
			failed = append(failed, c)
		}
	}
	for len(failed) > MaxFailedCheckpoints {
		p.drop(failed[0])
		failed = failed[1:]
	}
}

// DeleteCheckpointTxn no longer retains a completed checkpoint, or forgets a failed
// one. What only it used is planned for deletion as soon as no checkpoint runs. It
// is empty if that was done; base.ErrConflict if the checkpoint runs or is a
// savepoint, and base.ErrNotFound if there is none.
func DeleteCheckpointTxn(v *View, nowMs, number uint64) (broadcast.Txn, error) {
	return deleteTxn(v, nowMs, number, false)
}

// DeleteSavepointTxn is DeleteCheckpointTxn for savepoints, and refuses any other
// checkpoint with base.ErrConflict. It is no matter whether the user has deleted the
// objects.
func DeleteSavepointTxn(v *View, nowMs, number uint64) (broadcast.Txn, error) {
	return deleteTxn(v, nowMs, number, true)
}

func deleteTxn(v *View, nowMs, number uint64, savepoint bool) (broadcast.Txn, error) {
	c := v.Checkpoint(number)
	switch {
	case c == nil:
		return broadcast.Txn{}, notFound("checkpoint", fmt.Sprintf("no checkpoint %d", number))
	case c.Running():
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d is running", number))
	case savepoint && !c.Savepoint:
		return broadcast.Txn{}, conflict("savepoint", fmt.Sprintf("checkpoint %d is no savepoint", number))
	case c.Savepoint && !savepoint && c.Phase == CheckpointCompleted:
		return broadcast.Txn{}, conflict("savepoint", fmt.Sprintf("checkpoint %d is a savepoint, which is deleted only as one: keelctl checkpoint delete %d --savepoint", number, number))
	case c.Phase == CheckpointDeleting:
		return broadcast.Txn{}, nil
	}
	if r := v.RunningRollback(); r != nil && r.Checkpoint == number {
		return broadcast.Txn{}, refuseDuringRollback(v)
	}
	p := newPlanning(v, nowMs)
	next := *c
	next.Phase, next.UpdatedMs = CheckpointDeleting, max(nowMs, c.UpdatedMs)
	p.change(&next)
	return p.done()
}

// PlanDeletionsTxn goes on planning what CompleteTxn, FailCheckpointTxn and
// DeleteCheckpointTxn left. It is empty if there is nothing to plan, or while a
// checkpoint runs (ME7).
func PlanDeletionsTxn(v *View, nowMs uint64) (broadcast.Txn, error) {
	return newPlanning(v, nowMs).done()
}

// PlanOrphansTxn plans to delete keys that were found in the object store and are
// orphans by this view (View.OrphanTest); the others are left out, for what was
// found may be old. rest are the keys beyond what one transaction can hold. It may
// be planned while a checkpoint runs: no key of an attempt that has ended gets into
// the registry, and those of attempts that run or come are no orphans.
func PlanOrphansTxn(v *View, nowMs uint64, keys []string) (txn broadcast.Txn, rest []string, err error) {
	if v.Cluster() == nil {
		return broadcast.Txn{}, nil, base.ErrNotFounded
	}
	test := v.OrphanTest()
	var orphans []string
	seen := make(map[string]bool)
	for _, key := range keys {
		if orphan, _ := test(key); !orphan || seen[key] {
			continue
		}
		seen[key] = true
		if len(orphans) == MaxPlannedPerTxn {
			rest = append(rest, key)
			continue
		}
		orphans = append(orphans, key)
	}
	if len(orphans) == 0 {
		return broadcast.Txn{}, nil, nil
	}
	p := planning{v: v, nowMs: nowMs}
	p.plan(orphans, "orphans")
	p.writePlans()
	txn, err = p.builder.done()
	return txn, rest, err
}

// FinishPlanTxn forgets a delete plan whose keys are deleted. It is empty if it is
// not there any more.
func FinishPlanTxn(v *View, id uint64) (broadcast.Txn, error) {
	plan := v.Plan(id)
	if plan == nil {
		return broadcast.Txn{}, nil
	}
	var b builder
	key := idKey(kindDeletePlan, id)
	b.expect(key, plan.Revision)
	b.delete(key)
	return b.done()
}
