package checkpoint

import (
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// rollBack brings a running rollback on as soon as every shard is so far, or gives
// it up at its timeout while it can be (CK5). Nothing else is decided here: what
// the replicas do they do by the records.
func (c *Coordinator) rollBack(in *Input, r *meta.Rollback, propose proposeFunc) {
	if r.ID != c.rolling {
		c.rolling, c.rollingSince, c.rollingReady = r.ID, in.Now, 0
	}
	leader := func(g base.GroupID) base.NodeID {
		if in.Leader == nil {
			return ""
		}
		return in.Leader(g)
	}
	timeout := time.Duration(r.TimeoutMs) * time.Millisecond
	if in.View.RollbackReady(r, leader) {
		if c.awaitsPreparation(in, r, timeout) {
			return
		}
		txn, err := meta.RollbackPhaseTxn(in.View, in.WallMs, r.ID, leader)
		propose(fmt.Sprintf("rollback %d to checkpoint %d: every shard has done its part of %s", r.ID, r.Checkpoint, r.Phase), txn, err)
		return
	}
	if r.Phase != meta.PhaseRollbackPrepare || timeout <= 0 || in.Now-c.rollingSince < timeout {
		return
	}
	reason := fmt.Sprintf("not prepared after %s", timeout)
	for _, s := range in.View.RollbackShards(r.ID) {
		if rec := in.View.Shard(s.Group); rec == nil || !s.PreparedQuorum(rec, leader(s.Group)) {
			reason += fmt.Sprintf("; shard %s has %d replicas that are", s.Group, len(s.Prepared))
			if s.Problem != "" {
				reason += ": " + s.Problem
			}
			break
		}
	}
	txn, err := meta.AbortRollbackTxn(in.View, in.WallMs, r.ID, reason)
	propose(fmt.Sprintf("giving up rollback %d: %s", r.ID, reason), txn, err)
}

// The bounds of the time for which a rollback that could go on waits for those who
// prepare still.
const (
	minPreparationWait = 500 * time.Millisecond
	maxPreparationWait = 30 * time.Second
)

// awaitsPreparation says whether a quorum of each shard is prepared, but not all
// replicas that live: what they fetch would hold up the fenced shards, and those that
// come too late would have to be rebuilt. They get as long again as it took so far.
func (c *Coordinator) awaitsPreparation(in *Input, r *meta.Rollback, timeout time.Duration) bool {
	if r.Phase != meta.PhaseRollbackPrepare {
		return false
	}
	if c.rollingReady == 0 {
		c.rollingReady = min(max(in.Now-c.rollingSince, minPreparationWait), maxPreparationWait) + in.Now
	}
	if in.Now >= c.rollingReady || timeout > 0 && in.Now-c.rollingSince >= timeout {
		return false
	}
	for _, s := range in.View.RollbackShards(r.ID) {
		rec := in.View.Shard(s.Group)
		if rec == nil {
			continue
		}
		for _, rep := range rec.Replicas {
			if in.alive(rep.Node) && !slices.Contains(s.Prepared, rep.ReplicaID) {
				return true
			}
		}
	}
	return false
}
