package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
)

const (
	// flushPatience is how long a leader waits for the uploader's flush before it
	// passes the barrier all the same.
	flushPatience = time.Second
	// maxBarrierLead is by how much a barrier that a client has seen may be ahead
	// of this node's metadata for the leader to pass it while the system group cannot
	// be asked. Whoever passes a number fails every checkpoint up to it.
	maxBarrierLead = 16
)

// seeBarrier lets the shard pass the barrier that a client has seen elsewhere,
// before what the client asks for now: a checkpoint that does not hold the cause
// does not hold the effect either. It returns when the barrier is in the log in
// front of everything that is proposed from now on.
func (r *replica) seeBarrier(ctx context.Context, seen uint64) error {
	if seen <= r.machine.Header().Barrier {
		return nil
	}
	select {
	case r.passing <- struct{}{}:
		defer func() { <-r.passing }()
	case <-ctx.Done():
		return fmt.Errorf("passing barrier %d in %s: %w: %w", seen, r.id, base.ErrNotReady, ctx.Err())
	}
	if seen <= r.machine.Header().Barrier {
		return nil
	}
	v, err := r.node.knowCheckpoint(ctx, seen)
	if err != nil || v == nil {
		return err
	}
	if err := r.pass(ctx, v, seen); err != nil {
		return fmt.Errorf("passing barrier %d in %s: %w: %w", seen, r.id, base.ErrNotReady, err)
	}
	return nil
}

// knowCheckpoint returns metadata by which a barrier that a client has seen is to
// be judged, nil if there never was such a checkpoint: the system group knows, and
// what it says counts. Where it does not answer within metadataWait, a number that
// is near is believed, so that writes go on; one that is far is base.ErrNotReady.
// A checkpoint that waits for participants has no barrier yet: no shard has passed
// it, and nobody can have seen it.
func (n *Node) knowCheckpoint(ctx context.Context, number uint64) (*meta.View, error) {
	v, err := n.metaView()
	if err != nil || v.PassedBarrier() >= number {
		return v, err
	}
	asking, cancel := context.WithTimeout(ctx, metadataWait)
	defer cancel()
	newest, err := n.system.Load().sync(asking)
	if err == nil {
		if newest.PassedBarrier() < number {
			return nil, nil
		}
		return newest, nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("looking for checkpoint %d: %w: %w", number, base.ErrNotReady, ctx.Err())
	}
	if v, verr := n.metaView(); verr == nil && number < v.NextCheckpoint()+maxBarrierLead {
		return v, nil
	}
	return nil, fmt.Errorf("looking for checkpoint %d: %w: %w", number, base.ErrNotReady, err)
}

// pass proposes the barrier of a checkpoint, unless the checkpoint has ended by
// the view: then nobody needs it. A number of which the view knows nothing is
// passed without taking part, and so is one that waits for participants by the
// view: the checkpoint fails, whether that is how it stands or the view is old
// (ME11 of package meta). Who calls it holds passing.
func (r *replica) pass(ctx context.Context, v *meta.View, number uint64) error {
	b := raftfsm.Barrier{Number: number, Epoch: r.machine.Header().Epoch}
	if number <= v.PassedBarrier() {
		c, s := v.Checkpoint(number), v.CheckpointShard(number, r.id)
		if c == nil || !c.Running() || s == nil {
			return nil
		}
		b.Epoch, b.Attempt, b.Uploader = s.Epoch, s.Attempt, s.Uploader
	}
	failpoint.Hit("cluster.barrier.before-propose")
	_, err := r.command(ctx, raftfsm.AppendBarrier(nil, b))
	switch {
	case errors.Is(err, base.ErrConflict):
		return nil // it was passed
	case errors.Is(err, base.ErrStaleEpoch):
		r.node.failUpload(r.ctx, number, r.id, b.Attempt, "the shard's range or place has changed")
		return nil
	}
	return err
}

// barrierPassed is called by the state machine, on the apply goroutine, with the
// store at exactly the barrier.
func (r *replica) barrierPassed(b raftfsm.Barrier) {
	defer r.passedBarrier.Store(b.Number)
	r.linkBarrier(b)
	switch {
	case b.Missed():
		r.logger.Warn("the shard passed the barrier of a checkpoint that this node had not heard of; the checkpoint fails", "checkpoint", b.Number)
		r.spawn(func() {
			_ = r.node.tellCheckpoint(r.ctx, b.Number, func(v *meta.View) (broadcast.Txn, error) {
				return meta.FailCheckpointTxn(v, r.node.wallMs(), b.Number, fmt.Sprintf("shard %s missed the barrier", r.id))
			})
		})
	case b.Uploader == r.node.opts.NodeID:
		r.beginUpload(b)
	}
}

// attendCheckpoint does what the running checkpoint, if one runs, asks of this
// replica: to flush, to pass the barrier, to say that its upload is lost.
func (r *replica) attendCheckpoint(c *meta.Checkpoint, s *meta.CheckpointShard) {
	passed := r.machine.Header().Barrier >= c.Number
	if r.node.opts.CheckpointLocalLinks && !c.Savepoint && !passed && s.Uploader != r.node.opts.NodeID {
		r.flushForLinks(s)
	}
	if s.Uploader == r.node.opts.NodeID {
		switch {
		case !passed && s.State == meta.CheckpointShardAnnounced:
			r.flushForCheckpoint(c, s)
		case r.passedBarrier.Load() >= c.Number && s.State != meta.CheckpointShardUploaded && !r.node.uploads.has(s.Attempt) && r.telling.CompareAndSwap(false, true):
			// Its files are gone, with the process that had them or behind a
			// snapshot that the replica has installed.
			// Told once at a time: it may take as long as the system group is away.
			r.spawn(func() {
				defer r.telling.Store(false)
				r.node.failUpload(r.ctx, c.Number, r.id, s.Attempt, "the uploader was restarted, or has passed the barrier within a snapshot")
			})
		}
	}
	if passed {
		return
	}
	if _, err := r.leading(); err != nil {
		return
	}
	if s.State == meta.CheckpointShardAnnounced && !r.waitedForFlush(s.Attempt) {
		return
	}
	select {
	case r.passing <- struct{}{}:
	default:
		return // it is being passed
	}
	r.spawn(func() {
		defer func() { <-r.passing }()
		ctx, cancel := context.WithTimeout(r.ctx, systemProposeTimeout)
		defer cancel()
		v, err := r.node.metaView()
		if err == nil {
			err = r.pass(ctx, v, c.Number)
		}
		if err != nil && r.ctx.Err() == nil {
			r.logger.Info("the shard has not passed the barrier of a checkpoint yet", "checkpoint", c.Number, "error", err)
		}
	})
}

// waitedForFlush says whether the uploader has had time enough to flush. Only
// the checkpoint loop calls it.
func (r *replica) waitedForFlush(attempt uint64) bool {
	if r.flushWait.attempt != attempt {
		r.flushWait.attempt, r.flushWait.since = attempt, time.Now()
	}
	return time.Since(r.flushWait.since) >= flushPatience
}
