package checkpoint

import (
	"fmt"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// rollBack brings a running rollback on as soon as every shard is so far, or gives
// it up at its timeout while it can be (CK5). Nothing else is decided here: what
// the replicas do they do by the records.
func (c *Coordinator) rollBack(in *Input, r *meta.Rollback, propose proposeFunc) {
	if r.ID != c.rolling {
		c.rolling, c.rollingSince = r.ID, in.Now
	}
	leader := func(g base.GroupID) base.NodeID {
		if in.Leader == nil {
			return ""
		}
		return in.Leader(g)
	}
	if in.View.RollbackReady(r, leader) {
		txn, err := meta.RollbackPhaseTxn(in.View, in.WallMs, r.ID, leader)
		propose(fmt.Sprintf("rollback %d to checkpoint %d: every shard has done its part of %s", r.ID, r.Checkpoint, r.Phase), txn, err)
		return
	}
	timeout := time.Duration(r.TimeoutMs) * time.Millisecond
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
