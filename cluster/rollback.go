package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// A rollback of the live cluster goes forward: a new incarnation begins with what
// the shards had at a checkpoint. The operation is in the metadata; its leader
// (package checkpoint) brings it from phase to phase, the replicas do their part by
// what the records say (rollbackreplica.go).

// rollbackTimeout bounds the preparation unless the caller says otherwise.
const rollbackTimeout = 30 * time.Minute

// RollbackShard is a shard within a rollback.
type RollbackShard struct {
	Group  base.GroupID
	Lo, Hi int
	// Bytes are those of the shard in the checkpoint.
	Bytes int64
	// Fetch is how far its replicas are with bringing them; empty in a plan.
	Fetch ShardFetch
	State meta.RollbackShardState
	// Replicas are the nodes that hold the shard, Leader the one that leads it as far
	// as is known, Prepared those that are prepared.
	Replicas, Prepared []base.NodeID
	Leader             base.NodeID
	// Problem is what a replica waits for.
	Problem string
}

// RollbackInfo is a rollback as the metadata show it; of a plan nothing is under
// way, and Operation and Phase are empty.
type RollbackInfo struct {
	Operation   uint64
	Checkpoint  uint64
	Phase       string
	Error       string
	Incarnation base.Incarnation
	// Shards are empty once it has ended.
	Shards []RollbackShard
	// Lacked, of a plan, are participants that would be given nothing back though the
	// checkpoint may hold their writes: such a rollback has to be forced.
	Lacked []meta.LackedPosition

	revision base.Revision
	here     int64 // bytes, of all shards
}

// Ended says that nothing of the rollback is to come; Failed that it was given up,
// and nothing has changed.
func (i *RollbackInfo) Ended() bool  { return i.Phase == meta.PhaseDone || i.Failed() }
func (i *RollbackInfo) Failed() bool { return i.Phase == meta.PhaseFailed }

// rollbackInfo is what the records say of a rollback, and the nodes as far as they
// were heard.
func (n *Node) rollbackInfo(v *meta.View, r *meta.Rollback, heard heardProgress) *RollbackInfo {
	info := &RollbackInfo{Operation: r.ID, Checkpoint: r.Checkpoint, Phase: r.Phase, Error: r.Error, Incarnation: r.Incarnation, revision: r.Revision}
	for _, s := range v.RollbackShards(r.ID) {
		if rec := v.Shard(s.Group); rec != nil {
			info.Shards = append(info.Shards, n.rollbackShard(rec, s))
		}
		info.revision = max(info.revision, s.Revision)
	}
	fetches := rollbackFetches(v, r, heard)
	for i := range info.Shards {
		s := &info.Shards[i]
		if k := slices.IndexFunc(fetches, func(f ShardFetch) bool { return f.Group == s.Group }); k >= 0 {
			s.Fetch = fetches[k]
			info.here += s.Fetch.Here
		}
	}
	return info
}

func (n *Node) rollbackShard(rec *meta.Shard, s *meta.RollbackShard) RollbackShard {
	out := RollbackShard{Group: rec.ID, Lo: rec.Lo, Hi: rec.Hi, Bytes: s.Bytes, State: s.State, Problem: s.Problem, Leader: n.leaderHint(rec.ID)}
	for _, rep := range rec.Replicas {
		out.Replicas = append(out.Replicas, rep.Node)
		for _, p := range s.Prepared {
			if p == rep.ReplicaID {
				out.Prepared = append(out.Prepared, rep.Node)
			}
		}
	}
	return out
}

// PlanRollback says what a rollback would do, or why it would be refused. It looks at
// the checkpoint's objects, but does not read those of the files: one that is missing
// or short is named.
func (n *Node) PlanRollback(ctx context.Context, number uint64) (*RollbackInfo, error) {
	s, err := n.objects()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	if err := meta.CheckRollback(v, number); err != nil {
		return nil, fmt.Errorf("planning a rollback: %w", err)
	}
	_, err = snapshot.VerifyCheckpoint(ctx, n.opts.Objects, checkpointKey(v, v.Checkpoint(number)), snapshot.VerifyOptions{})
	if err != nil {
		return nil, fmt.Errorf("planning a rollback: %w", err)
	}
	info := &RollbackInfo{Checkpoint: number, Incarnation: v.Cluster().Incarnation + 1, Lacked: v.LackedPositions(number)}
	for _, rec := range v.Shards() {
		bytes := v.CheckpointShard(number, rec.ID).Report.FullBytes
		info.Shards = append(info.Shards, n.rollbackShard(rec, &meta.RollbackShard{Bytes: bytes, State: meta.RollbackShardServing}))
	}
	return info, nil
}

// RollbackRequest is what a rollback is asked to do.
type RollbackRequest struct {
	// Checkpoint is the number of the one to go back to.
	Checkpoint uint64
	// Timeout is until when the shards have to be fenced; 0 is the default.
	Timeout time.Duration
	// Force goes back though participants that are registered have no position in it.
	Force bool
}

// Rollback takes the cluster back to a checkpoint, and calls fn at once and
// whenever something of it has changed, the last time when it has ended. If a
// rollback to that checkpoint runs, it is followed; unless shards may have opened, for
// what was written there since is to go as well: then its end is waited for, and
// another one begins. It goes on if ctx ends or fn fails. base.ErrPrecondition says
// that a participant has no position in the checkpoint that may hold its writes.
func (n *Node) Rollback(ctx context.Context, req RollbackRequest, fn func(*RollbackInfo) error) error {
	s, err := n.objects()
	if err != nil {
		return err
	}
	if req.Timeout <= 0 {
		req.Timeout = rollbackTimeout
	}
	id, err := n.startRollback(ctx, s, meta.RollbackStart{Checkpoint: req.Checkpoint, TimeoutMs: uint64(req.Timeout.Milliseconds()), Force: req.Force})
	if err != nil {
		return fmt.Errorf("starting a rollback: %w", err)
	}
	return n.followRollback(ctx, id, fn)
}

// startRollback starts a rollback, or finds the one that the request is one with.
func (n *Node) startRollback(ctx context.Context, s *system, start meta.RollbackStart) (id uint64, err error) {
	for {
		changed := n.changes.wait()
		opening := uint64(0)
		_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
			opening = 0
			if r := v.RunningRollback(); r != nil && r.Checkpoint == start.Checkpoint {
				if id = r.ID; !r.Opening() {
					return broadcast.Txn{}, nil
				}
				opening = r.ID
			}
			txn, op, err := meta.StartRollbackTxn(v, n.wallMs(), start)
			if err == nil {
				id = op.ID
			}
			return txn, err
		})
		if err == nil || opening == 0 || !errors.Is(err, base.ErrConflict) {
			return id, err
		}
		v, err := n.metaView()
		if err != nil {
			return 0, err
		}
		if r := v.Rollback(opening); r == nil || r.Finished() {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, fmt.Errorf("waiting for the end of rollback %d: %w: %w", opening, base.ErrDeadline, ctx.Err())
		case <-n.ctx.Done():
			return 0, base.ErrShuttingDown
		}
	}
}

// progressPause is between two looks at how far the replicas are with what they
// fetch, for who follows.
const progressPause = time.Second

func (n *Node) followRollback(ctx context.Context, id uint64, fn func(*RollbackInfo) error) error {
	var last base.Revision
	var here int64
	var heard heardProgress
	tick := time.NewTicker(progressPause)
	defer tick.Stop()
	for {
		changed := n.changes.wait()
		v, err := n.metaView()
		if err != nil {
			return err
		}
		r := v.Rollback(id)
		if r == nil && v.NextOperationID() > id {
			return fmt.Errorf("rollback %d: %w", id, base.ErrNotFound)
		}
		if r != nil {
			info := n.rollbackInfo(v, r, heard)
			if info.revision != last || info.here > here {
				last, here = info.revision, info.here
				if err := fn(info); err != nil {
					return err
				}
			}
			if info.Ended() {
				return nil
			}
		}
		select {
		case <-changed:
		case <-tick.C:
			if r != nil {
				heard = n.askProgress(ctx, v, id)
			}
		case <-ctx.Done():
			return fmt.Errorf("following rollback %d, which goes on: %w: %w", id, base.ErrDeadline, ctx.Err())
		case <-n.ctx.Done():
			return base.ErrShuttingDown
		}
	}
}

// RollbackStatus shows a rollback that is kept, or with 0 the one that runs;
// base.ErrNotFound if there is none.
func (n *Node) RollbackStatus(ctx context.Context, operation uint64) (*RollbackInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	r := v.RunningRollback()
	if operation != 0 {
		r = v.Rollback(operation)
	}
	if r == nil {
		return nil, noRollback()
	}
	var heard heardProgress
	if !r.Finished() {
		heard = n.askProgress(ctx, v, r.ID)
	}
	return n.rollbackInfo(v, r, heard), nil
}

func noRollback() error {
	return &base.Error{Cause: base.ErrNotFound, Field: "operation", Ordinal: -1, Hint: "no such rollback is running or kept"}
}

// AbortRollback gives up the rollback that runs, as long as no shard can have been
// fenced; later it is refused with base.ErrConflict. base.ErrNotFound if none runs.
func (n *Node) AbortRollback(ctx context.Context) (*RollbackInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	var id uint64
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		if r := v.RunningRollback(); r != nil {
			id = r.ID
		} else if id == 0 {
			return broadcast.Txn{}, noRollback()
		}
		return meta.AbortRollbackTxn(v, n.wallMs(), id, "given up by an operator")
	})
	if err != nil {
		return nil, fmt.Errorf("giving up a rollback: %w", err)
	}
	return n.RollbackStatus(ctx, id)
}
