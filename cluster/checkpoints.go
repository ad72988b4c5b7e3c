package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// CheckpointInfo is a checkpoint as the metadata show it.
type CheckpointInfo struct {
	meta.Checkpoint
	// URI is where it lies, once it has completed.
	URI string
	// Shards and Positions are empty in lists.
	Shards    []*meta.CheckpointShard
	Positions []*meta.Position
}

// Ended says that nothing of the checkpoint is to come.
func (c *CheckpointInfo) Ended() bool { return !c.Running() }

// CheckpointList is what the cluster keeps.
type CheckpointList struct {
	Checkpoints []CheckpointInfo
	// PendingDeletions are objects that are being deleted.
	PendingDeletions int
	// Objects and ObjectBytes are those that checkpoints use.
	Objects     int
	ObjectBytes int64
}

// CheckpointVerification is what a look at all objects of a checkpoint found.
type CheckpointVerification = snapshot.Verification

// objects returns the object store, or why there is none.
func (n *Node) objects() (*system, error) {
	s, err := n.founded()
	if err == nil && n.opts.Objects == nil {
		err = errNoObjectStore()
	}
	return s, err
}

func (n *Node) checkpointInfo(v *meta.View, c *meta.Checkpoint, shards bool) CheckpointInfo {
	info := CheckpointInfo{Checkpoint: *c}
	if c.Phase == meta.CheckpointCompleted && n.opts.ObjectsURI != "" {
		key := checkpointKey(v, c)
		info.URI = strings.TrimSuffix(n.opts.ObjectsURI, "/") + "/" + key[:strings.LastIndexByte(key, '/')]
	}
	if shards {
		info.Shards, info.Positions = v.CheckpointShards(c.Number), v.Positions(c.Number)
	}
	return info
}

// checkpointKey is that of the `_metadata` of a checkpoint or savepoint.
func checkpointKey(v *meta.View, c *meta.Checkpoint) string {
	if c.Savepoint {
		return snapshot.SavepointKey(v.Cluster().ID, c.Number)
	}
	return snapshot.MetadataKey(v.Cluster().ID, c.Number)
}

// CreateCheckpoint starts a checkpoint, once none runs, and calls fn at once and
// whenever it has changed, the last time when it has ended. It holds every write
// that was acknowledged before the call. It goes on if ctx ends or fn fails.
func (n *Node) CreateCheckpoint(ctx context.Context, fn func(*CheckpointInfo) error) error {
	return n.createCheckpoint(ctx, false, fn)
}

// CreateSavepoint is CreateCheckpoint for a checkpoint that is the user's: it has
// all its objects in a folder of its own and is kept until DeleteSavepoint.
func (n *Node) CreateSavepoint(ctx context.Context, fn func(*CheckpointInfo) error) error {
	return n.createCheckpoint(ctx, true, fn)
}

func (n *Node) createCheckpoint(ctx context.Context, savepoint bool, fn func(*CheckpointInfo) error) error {
	s, err := n.objects()
	if err != nil {
		return err
	}
	number, err := n.startCheckpoint(ctx, s, savepoint)
	if err != nil {
		return err
	}
	var last base.Revision
	for {
		changed := n.changes.wait()
		v, err := n.metaView()
		if err != nil {
			return err
		}
		c := v.Checkpoint(number)
		if c == nil {
			return fmt.Errorf("checkpoint %d: %w", number, base.ErrNotFound)
		}
		info := n.checkpointInfo(v, c, true)
		if newest := info.revision(); newest != last {
			last = newest
			if err := fn(&info); err != nil {
				return err
			}
		}
		if info.Ended() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("following checkpoint %d, which goes on: %w: %w", number, base.ErrDeadline, ctx.Err())
		case <-n.ctx.Done():
			return base.ErrShuttingDown
		}
	}
}

// revision is that of the newest change.
func (c *CheckpointInfo) revision() base.Revision {
	newest := c.Revision
	for _, s := range c.Shards {
		newest = max(newest, s.Revision)
	}
	return newest
}

// startCheckpoint announces a checkpoint; one that runs is waited for, because it
// may lack what was acknowledged since.
func (n *Node) startCheckpoint(ctx context.Context, s *system, savepoint bool) (number uint64, err error) {
	for {
		changed, running := n.changes.wait(), false
		_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
			running = v.RunningCheckpoint() != nil
			if v.Cluster() == nil || len(v.Shards()) == 0 {
				return broadcast.Txn{}, base.ErrNotReady
			}
			spec := n.checkpointSpec(v, false)
			spec.Savepoint = savepoint
			txn, c, err := meta.StartCheckpointTxn(v, n.wallMs(), spec)
			if err == nil {
				number = c.Number
			}
			return txn, err
		})
		if err == nil {
			return number, nil
		}
		v, verr := n.metaView()
		if verr == nil && v.RunningRollback() != nil {
			return 0, fmt.Errorf("starting a checkpoint: %w", err)
		}
		if !errors.Is(err, base.ErrConflict) || verr != nil || v.RunningCheckpoint() == nil {
			if errors.Is(err, base.ErrConflict) && running && verr == nil {
				continue // the one that ran has ended meanwhile
			}
			return 0, fmt.Errorf("starting a checkpoint: %w", err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, fmt.Errorf("waiting for the end of checkpoint %d: %w: %w", v.RunningCheckpoint().Number, base.ErrNotReady, ctx.Err())
		case <-n.ctx.Done():
			return 0, base.ErrShuttingDown
		}
	}
}

// Checkpoints lists the checkpoints that are kept.
func (n *Node) Checkpoints(ctx context.Context) (*CheckpointList, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	list := &CheckpointList{Objects: v.ObjectCount()}
	for _, c := range v.Checkpoints() {
		list.Checkpoints = append(list.Checkpoints, n.checkpointInfo(v, c, false))
	}
	for _, p := range v.Plans() {
		list.PendingDeletions += len(p.Keys)
	}
	v.ScanObjects(func(o *meta.Object) bool {
		list.ObjectBytes += o.Size
		return true
	})
	return list, nil
}

// Checkpoint shows one; base.ErrNotFound if it is not kept.
func (n *Node) Checkpoint(ctx context.Context, number uint64) (*CheckpointInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	c := v.Checkpoint(number)
	if c == nil {
		return nil, noCheckpoint(number)
	}
	info := n.checkpointInfo(v, c, true)
	return &info, nil
}

func noCheckpoint(number uint64) error {
	return &base.Error{Cause: base.ErrNotFound, Field: "number", Ordinal: -1,
		Hint: fmt.Sprintf("no checkpoint %d is kept; see keelctl checkpoint list", number)}
}

// VerifyCheckpoint looks at every object of a completed checkpoint; quick trusts
// the bytes of those that have the right size. What is wrong is in the
// verification, not in the error.
func (n *Node) VerifyCheckpoint(ctx context.Context, number uint64, quick bool, progress func(done, total int)) (*CheckpointVerification, error) {
	s, err := n.objects()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	c := v.Checkpoint(number)
	switch {
	case c == nil:
		return nil, noCheckpoint(number)
	case c.Phase != meta.CheckpointCompleted:
		return nil, &base.Error{Cause: base.ErrConflict, Field: "number", Ordinal: -1,
			Hint: fmt.Sprintf("checkpoint %d is %s; only completed ones can be verified", number, c.Phase)}
	}
	found, err := snapshot.VerifyCheckpoint(ctx, n.opts.Objects, checkpointKey(v, c),
		snapshot.VerifyOptions{Full: !quick, Progress: progress})
	if found != nil && len(found.Bad) > 0 && errors.Is(err, base.ErrCorrupt) {
		return found, nil
	}
	return found, err
}

// DeleteCheckpoint no longer retains a checkpoint. Its objects go when the
// coordinator comes to it. A savepoint is refused.
func (n *Node) DeleteCheckpoint(ctx context.Context, number uint64) error {
	return n.deleteCheckpoint(ctx, number, meta.DeleteCheckpointTxn)
}

// DeleteSavepoint is DeleteCheckpoint for a savepoint, and for nothing else. It does
// not matter whether its objects are there.
func (n *Node) DeleteSavepoint(ctx context.Context, number uint64) error {
	return n.deleteCheckpoint(ctx, number, meta.DeleteSavepointTxn)
}

func (n *Node) deleteCheckpoint(ctx context.Context, number uint64, txn func(v *meta.View, nowMs, number uint64) (broadcast.Txn, error)) error {
	s, err := n.founded()
	if err != nil {
		return err
	}
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return txn(v, n.wallMs(), number) })
	if err != nil {
		return fmt.Errorf("deleting checkpoint %d: %w", number, err)
	}
	return nil
}
