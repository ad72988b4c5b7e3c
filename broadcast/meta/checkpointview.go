package meta

import (
	"math"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// Checkpoints returns all checkpoints that are kept, failed ones and those that
// are being deleted too, in the order of their numbers.
func (v *View) Checkpoints() []*Checkpoint { return v.checkpoints.Values() }

// Checkpoint returns a checkpoint's record, or nil.
func (v *View) Checkpoint(number uint64) *Checkpoint { c, _ := v.checkpoints.Get(number); return c }

// RunningCheckpoint returns the checkpoint that runs, or nil (ME7). It does not
// allocate.
func (v *View) RunningCheckpoint() *Checkpoint {
	// Numbers grow, and none starts while another runs.
	_, newest, _ := v.checkpoints.Max()
	if newest != nil && newest.Running() {
		return newest
	}
	return nil
}

// LastCheckpoint returns the newest completed checkpoint that is no savepoint, or
// nil: the user may have deleted the files of a savepoint.
func (v *View) LastCheckpoint() *Checkpoint {
	var last *Checkpoint
	v.checkpoints.Reverse(func(_ uint64, c *Checkpoint) bool {
		if c.Phase == CheckpointCompleted && !c.Savepoint {
			last = c
		}
		return last == nil
	})
	return last
}

// openCheckpoint returns the checkpoint under whose attempts the log may be stored
// (Checkpoint.LogOpen), or nil.
func (v *View) openCheckpoint() *Checkpoint {
	if c := v.LastCheckpoint(); c != nil && c.LogOpen {
		return c
	}
	return nil
}

// LogAttempt is the attempt under which a node may store the log of a shard that
// follows the last checkpoint, before there is a next one (ME14): that of its own
// upload, as long as the shard is what it was then. It is 0 if the node may not.
func (v *View) LogAttempt(group base.GroupID, node base.NodeID) uint64 {
	open, now := v.openCheckpoint(), v.Shard(group)
	if open == nil || now == nil {
		return 0
	}
	then := v.CheckpointShard(open.Number, group)
	if then == nil || then.Uploader != node || then.Birth != now.Birth || then.Epoch != now.Epoch {
		return 0
	}
	return then.Attempt
}

// logAttempts are the attempts of which objects may yet get into the registry though
// their checkpoint has completed (ME14). An attempt that is none of them any more
// never is again.
func (v *View) logAttempts() map[uint64]struct{} {
	out := make(map[uint64]struct{})
	if c := v.openCheckpoint(); c != nil {
		for _, s := range v.CheckpointShards(c.Number) {
			out[s.Attempt] = struct{}{}
		}
	}
	if c := v.RunningCheckpoint(); c != nil {
		for _, s := range v.CheckpointShards(c.Number) {
			if s.Prior != 0 {
				out[s.Prior] = struct{}{}
			}
		}
	}
	return out
}

// NextCheckpoint is the number that the next checkpoint will have.
func (v *View) NextCheckpoint() uint64 { return v.next(counterCheckpoint) }

// NextAttempt is the smallest attempt that was never given.
func (v *View) NextAttempt() uint64 { return v.next(counterAttempt) }

// CheckpointShard returns the record of one shard within a checkpoint, or nil.
func (v *View) CheckpointShard(number uint64, group base.GroupID) *CheckpointShard {
	s, _ := v.shardsOf.Get(numbersKey(number, uint64(group)))
	return s
}

// CheckpointShards returns the shards of a checkpoint in the order of their ids;
// none of one that is not kept.
func (v *View) CheckpointShards(number uint64) []*CheckpointShard {
	var list []*CheckpointShard
	v.shardsOf.Ascend(numbersKey(number), func(_ string, s *CheckpointShard) bool {
		if s.Checkpoint != number {
			return false
		}
		list = append(list, s)
		return true
	})
	return list
}

// scanUses calls fn for each list of objects that a checkpoint uses.
func (v *View) scanUses(number uint64, fn func(*objectUse) bool) {
	v.usesOf.Ascend(numbersKey(number), func(_ string, u *objectUse) bool {
		return u.Checkpoint == number && fn(u)
	})
}

// CheckpointObjects returns the objects that a checkpoint uses, each once, in the
// order of their numbers. It has all of them while the checkpoint runs and once
// it is completed (ME9).
func (v *View) CheckpointObjects(number uint64) []*Object {
	var list []*Object
	for _, n := range v.usedNumbers(number) {
		if o := v.Object(n); o != nil {
			list = append(list, o)
		}
	}
	return list
}

// usedNumbers are the numbers of the objects that a checkpoint uses, each once,
// in order.
func (v *View) usedNumbers(number uint64) []uint64 {
	var all []uint64
	v.scanUses(number, func(u *objectUse) bool {
		all = append(all, u.Objects...)
		return true
	})
	slices.Sort(all)
	return slices.Compact(all)
}

// Object returns an object of the registry, or nil.
func (v *View) Object(number uint64) *Object { o, _ := v.objects.Get(number); return o }

// ObjectByKey returns the object of the registry that has this key, or nil.
func (v *View) ObjectByKey(key string) *Object { o, _ := v.byKey.Get(key); return o }

// ObjectCount is the number of objects in the registry.
func (v *View) ObjectCount() int { return v.objects.Len() }

// ScanObjects calls fn for each object of the registry, in the order of their
// numbers, until it returns false.
func (v *View) ScanObjects(fn func(*Object) bool) {
	v.objects.Scan(func(_ uint64, o *Object) bool { return fn(o) })
}

// FindContent says where content with this SHA-256 and size lies; of several
// objects it is the newest, for an older one may have been found damaged or lost.
// While a checkpoint runs nothing leaves the registry (ME7), so what is found in a
// view that shows it running stays until it ends.
func (v *View) FindContent(sum [32]byte, size int64) (Place, bool) {
	if size < 0 {
		return Place{}, false
	}
	prefix := contentKey(sum, size)
	var place Place
	found := false
	v.contents.Descend(contentKey(sum, size, math.MaxUint64, math.MaxUint64), func(key string, c content) bool {
		if found = strings.HasPrefix(key, prefix); found {
			place = Place{Object: c.object.Key, Offset: c.offset, Length: c.length}
		}
		return false
	})
	return place, found
}

// Plans returns the delete plans that are not known to be executed, oldest first.
func (v *View) Plans() []*DeletePlan { return v.plans.Values() }

// Plan returns a delete plan, or nil.
func (v *View) Plan(id uint64) *DeletePlan { p, _ := v.plans.Get(id); return p }

// DeletionsPending says that something is to be planned for deletion
// (PlanDeletionsTxn) as soon as no checkpoint runs.
func (v *View) DeletionsPending() bool {
	pending := false
	v.checkpoints.Scan(func(_ uint64, c *Checkpoint) bool {
		pending = c.doomed()
		return !pending
	})
	return pending
}

// OrphanTest returns a function that says of a key in the object store whether it
// is an orphan by this view: one of this cluster's own, of an attempt or of a
// checkpoint that has ended and under which no log may be stored (ME14), and neither
// in the registry nor in a plan. The
// `_metadata` of a savepoint is one only as long as it is known to have failed:
// otherwise the user may have put it there. foreign says that the key is not one of those that this cluster writes.
func (v *View) OrphanTest() func(key string) (orphan, foreign bool) {
	planned := make(map[string]struct{})
	for _, p := range v.Plans() {
		for _, key := range p.Keys {
			planned[key] = struct{}{}
		}
	}
	var cluster base.ClusterID
	if c := v.Cluster(); c != nil {
		cluster = c.ID
	}
	below, logs := v.OldestRunningAttempt(), v.logAttempts()
	return func(key string) (orphan, foreign bool) {
		attempt, number, saved, ok := ownKey(cluster, key)
		if !ok {
			return false, true
		}
		if _, twice := planned[key]; twice {
			return false, false
		}
		if saved && attempt == 0 {
			c := v.Checkpoint(number)
			return c != nil && c.Savepoint && !v.mayHaveMetadata(number), false
		}
		if number != 0 && attempt == 0 {
			return number < v.NextCheckpoint() && !v.mayHaveMetadata(number), false
		}
		if _, open := logs[attempt]; open {
			return false, false
		}
		return attempt < below && v.ObjectByKey(key) == nil, false
	}
}

// mayHaveMetadata says that the `_metadata` of a checkpoint may be in the store,
// and is no orphan.
func (v *View) mayHaveMetadata(number uint64) bool {
	c := v.Checkpoint(number)
	return c != nil && (c.Running() || c.Phase == CheckpointCompleted || !c.MetadataPlanned)
}

// OldestRunningAttempt is the smallest attempt of the running checkpoint, or the
// next that is given. Of smaller ones only the log that was stored after a checkpoint
// may yet get into the registry (LogAttempt).
func (v *View) OldestRunningAttempt() uint64 {
	oldest := v.NextAttempt()
	if c := v.RunningCheckpoint(); c != nil {
		for _, s := range v.CheckpointShards(c.Number) {
			oldest = min(oldest, s.Attempt)
		}
	}
	return oldest
}
