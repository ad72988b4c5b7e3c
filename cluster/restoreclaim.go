package cluster

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/snapshot"
)

// claim is what this node, while it leads the system group, does about a
// checkpoint that the cluster was founded with and has claimed: once a checkpoint
// of its own has completed, nothing needs the claimed one any more, and it is
// deleted. No record says how far that is: the claimed `_metadata` goes last, so
// whoever leads next goes on, or finds that nothing is left.
type claim struct {
	// settled: there is nothing to delete (any more).
	settled atomic.Bool
	working atomic.Bool
	// again is when the next attempt may begin; owned by who works.
	again time.Time
}

const (
	// claimTimeout bounds one attempt, claimPause is between two.
	claimTimeout = 10 * time.Minute
	claimPause   = 30 * time.Second
)

// deleteClaimed deletes a claimed checkpoint beside the caller, if it is time.
func (n *Node) deleteClaimed(v *meta.View) error {
	if n.claim.settled.Load() || founding(v) {
		return nil
	}
	_, spec, err := v.FoundingOperation()
	if err != nil {
		return err
	}
	if spec.Restore == nil || !spec.Restore.Claim {
		n.claim.settled.Store(true)
		return nil
	}
	// A savepoint does not count: the user may delete it.
	if v.LastCheckpoint() == nil || n.opts.Objects == nil || !n.claim.working.CompareAndSwap(false, true) {
		return nil
	}
	n.spawn(func() {
		defer n.claim.working.Store(false)
		if time.Now().Before(n.claim.again) {
			return
		}
		ctx, cancel := context.WithTimeout(n.ctx, claimTimeout)
		defer cancel()
		deleted, err := snapshot.DeleteClaimed(ctx, n.opts.Objects, spec.Restore.Key, spec.Restore.SHA256)
		if err != nil {
			n.claim.again = time.Now().Add(claimPause)
			n.warnStore("deleting the claimed checkpoint", err)
			return
		}
		n.claim.settled.Store(true)
		if deleted > 0 {
			n.logger.Info("deleted the checkpoint that the cluster began with", "checkpoint", spec.Restore.Key, "objects", deleted)
		}
	})
	return nil
}
