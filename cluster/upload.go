package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

const (
	// maxUploads bounds the shards that one node uploads at once; the others keep
	// their files meanwhile, which costs no room but what is compacted away.
	maxUploads = 2
	// tellPause is between two attempts to tell the system group something.
	tellPause = 200 * time.Millisecond
)

// uploads are the attempts that this node works on: from the moment of the
// barrier until the report is in the metadata or the checkpoint has ended.
type uploads struct {
	slots chan struct{}

	mu      sync.Mutex
	cancels map[uint64]context.CancelFunc // by attempt
	flushed map[uint64]struct{}           // attempts for which a flush was begun
}

func (u *uploads) init() {
	u.slots = make(chan struct{}, maxUploads)
	u.cancels, u.flushed = map[uint64]context.CancelFunc{}, map[uint64]struct{}{}
}

// begin notes an attempt; false if it is known already.
func (u *uploads) begin(attempt uint64, cancel context.CancelFunc) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.cancels[attempt] != nil {
		return false
	}
	u.cancels[attempt] = cancel
	return true
}

func (u *uploads) end(attempt uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.cancels, attempt)
}

func (u *uploads) has(attempt uint64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.cancels[attempt] != nil
}

// flushOnce says whether an attempt's flush is to be begun now.
func (u *uploads) flushOnce(attempt uint64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	_, begun := u.flushed[attempt]
	u.flushed[attempt] = struct{}{}
	return !begun
}

// keep gives up the attempts that are below oldest: their checkpoint has ended.
func (u *uploads) keep(oldest uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for attempt, cancel := range u.cancels {
		if attempt < oldest {
			cancel()
		}
	}
	for attempt := range u.flushed {
		if attempt < oldest {
			delete(u.flushed, attempt)
		}
	}
}

// flushForCheckpoint flushes ahead of the barrier, so that the flush at the
// barrier is short, and says so.
func (r *replica) flushForCheckpoint(c *meta.Checkpoint, s *meta.CheckpointShard) {
	if !r.node.uploads.flushOnce(s.Attempt) {
		return
	}
	r.spawn(func() {
		if r.planChangelog(c, s) {
			_ = r.node.tellCheckpoint(r.ctx, c.Number, func(v *meta.View) (broadcast.Txn, error) {
				return meta.ReportFlushedTxn(v, r.node.wallMs(), c.Number, r.id, s.Attempt)
			})
			return
		}
		if err := r.flush(); err != nil {
			r.node.failUpload(r.ctx, c.Number, r.id, s.Attempt, fmt.Sprintf("flushing: %v", err))
			return
		}
		failpoint.Hit("cluster.upload.flushed")
		_ = r.node.tellCheckpoint(r.ctx, c.Number, func(v *meta.View) (broadcast.Txn, error) {
			return meta.ReportFlushedTxn(v, r.node.wallMs(), c.Number, r.id, s.Attempt)
		})
	})
}

// flushForLinks flushes ahead of a barrier on a replica that keeps what it holds
// there, so that the flush at the barrier is short.
func (r *replica) flushForLinks(s *meta.CheckpointShard) {
	if !r.node.uploads.flushOnce(s.Attempt) {
		return
	}
	r.spawn(func() {
		if err := r.flush(); err != nil && r.ctx.Err() == nil {
			r.logger.Warn("flushing ahead of a barrier", "error", err)
		}
	})
}

// cut is a shard's part of a checkpoint on the uploader's disk.
type cut struct {
	barrier raftfsm.Barrier
	header  *raftfsm.Header
	dir     string
	finish  func() error
	// log is set if the log since an earlier checkpoint is stored, and no files;
	// digest is what the state machine has at the barrier.
	log    *lineage
	digest [32]byte
	// took is for how long the apply goroutine stood.
	took time.Duration
}

// beginUpload fixes the present instant, which is the barrier's, and uploads it
// beside the apply goroutine, on which it is called.
func (r *replica) beginUpload(b raftfsm.Barrier) {
	ctx, cancel := context.WithCancel(r.ctx)
	if !r.node.uploads.begin(b.Attempt, cancel) {
		cancel()
		return
	}
	c := cut{barrier: b, header: r.machine.Header(), dir: filepath.Join(r.snaps.incoming(), fmt.Sprintf("tmp-checkpoint-%d", b.Attempt))}
	start := time.Now()
	err := r.takeCut(&c)
	c.took = time.Since(start)
	r.metrics.barrierSeconds.Observe(c.took.Seconds())
	r.spawn(func() {
		defer func() {
			r.node.uploads.end(b.Attempt)
			cancel()
			if err := r.node.remover.remove(c.dir); err != nil {
				r.logger.Warn("removing the files of an upload", "error", err)
			}
		}()
		if err == nil {
			err = r.upload(ctx, &c)
		}
		switch {
		case err == nil:
			r.metrics.upload("done")
		case r.ctx.Err() != nil: // the node says so when it starts again
		case ctx.Err() != nil:
			r.metrics.upload("abandoned")
			r.logger.Info("an upload was given up: its checkpoint has ended", "checkpoint", b.Number)
		default:
			_ = r.suspect(err)
			r.metrics.upload("failed")
			r.logger.Warn("uploading for a checkpoint", "checkpoint", b.Number, "error", err)
			r.node.failUpload(r.ctx, b.Number, r.id, b.Attempt, err.Error())
		}
	})
}

// takeCut fixes what the store holds, or where the log stands if that is stored.
func (r *replica) takeCut(c *cut) error {
	if c.log = r.cutChangelog(c.barrier, c.header); c.log != nil {
		c.digest = r.machine.Digest()
		return nil
	}
	store, release, err := r.machine.Store()
	if err != nil {
		return err
	}
	defer release()
	c.finish, err = store.BeginCheckpoint(c.dir)
	return err
}

// upload brings the cut into the object store and into the registry.
func (r *replica) upload(ctx context.Context, c *cut) error {
	start := time.Now()
	if r.node.opts.Objects == nil {
		return errNoObjectStore()
	}
	if c.log == nil {
		if err := c.finish(); err != nil {
			return fmt.Errorf("taking a checkpoint of %s: %w", r.id, err)
		}
	}
	failpoint.Hit("cluster.upload.begin")
	select {
	case r.node.uploads.slots <- struct{}{}:
		defer func() { <-r.node.uploads.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	// A view that shows the checkpoint running: what the registry holds in it
	// stays until the checkpoint has ended.
	v, err := r.node.runningCheckpoint(ctx, c.barrier.Number)
	if err != nil {
		return err
	}
	if c.log != nil {
		return r.uploadChangelog(ctx, c, v, start)
	}
	m := manifestOf(c.header, r.node.opts.Driver.Name())
	if m.Files, err = snapshot.HashFiles(ctx, c.dir, r.snaps.hashes); err != nil {
		return fmt.Errorf("hashing the files of %s: %w", r.id, err)
	}
	o := snapshot.UploadOptions{Store: r.node.opts.Objects, Prefix: string(v.Cluster().ID), Attempt: c.barrier.Attempt}
	if v.Checkpoint(c.barrier.Number).Savepoint {
		o.Savepoint = c.barrier.Number
	} else {
		// The registry says what was stored, not what this node's store holds by
		// now: it may be another one, or have lost objects.
		o.CheckReused = true
		o.Known = func(sum [32]byte, size int64) (snapshot.Place, bool) {
			p, ok := v.FindContent(sum, size)
			return snapshot.Place{Object: p.Object, Offset: p.Offset, Length: p.Length}, ok
		}
	}
	up, err := snapshot.Upload(ctx, c.dir, m, o)
	if err != nil {
		return err
	}
	if err := failpoint.Err("cluster.upload.stored"); err != nil {
		return err
	}
	if err := r.report(ctx, c, m, up, time.Since(start)); err != nil {
		return err
	}
	r.beginChangelog(v.Checkpoint(c.barrier.Number), c.barrier.Attempt, m, c.header)
	return nil
}

// report registers what an upload has stored, and says that the shard is done.
func (r *replica) report(ctx context.Context, c *cut, m *snapshot.Manifest, up *snapshot.Uploaded, took time.Duration) error {
	b := c.barrier
	objects := registered(up.New)
	batches := meta.CutObjects(objects)
	for _, batch := range batches[:max(len(batches)-1, 0)] {
		err := r.node.tellCheckpoint(ctx, b.Number, func(v *meta.View) (broadcast.Txn, error) {
			return meta.RegisterObjectsTxn(v, r.node.wallMs(), b.Number, r.id, b.Attempt, batch)
		})
		if err != nil {
			return fmt.Errorf("registering objects: %w", err)
		}
	}
	var last []meta.Object
	if len(batches) > 0 {
		last = batches[len(batches)-1]
	}
	h := c.header
	rep := meta.ShardReport{
		Index: h.AppliedIndex, Term: h.AppliedTerm, Sequence: h.Sequence, ClockMs: h.ClockMs,
		ManifestKey: up.ManifestKey, ManifestSHA256: up.ManifestSHA256, ManifestSize: up.ManifestSize,
		FullBytes: up.FullBytes, NewBytes: up.NewBytes, Files: up.Files, NewFiles: up.NewFiles, Requests: up.Requests,
		SyncMs: uint64(c.took.Milliseconds()), AsyncMs: uint64(took.Milliseconds()),
	}
	if m.Changelog != nil {
		rep.BaseIndex, rep.LogBytes, rep.Segments = m.Changelog.Base.Index, m.Changelog.Bytes(), len(m.Changelog.Segments)
	}
	err := r.node.tellCheckpoint(ctx, b.Number, func(v *meta.View) (broadcast.Txn, error) {
		return meta.ReportUploadedTxn(v, r.node.wallMs(), b.Number, r.id, b.Attempt, rep, last, up.Reused)
	})
	if err != nil {
		return fmt.Errorf("reporting an upload: %w", err)
	}
	r.logger.Info("uploaded a shard for a checkpoint", "checkpoint", b.Number, "bytes", up.FullBytes, "new", up.NewBytes, "took", took)
	return nil
}

// registered converts what an upload stored for the registry.
func registered(objects []snapshot.Object) []meta.Object {
	out := make([]meta.Object, len(objects))
	for i, o := range objects {
		out[i] = meta.Object{Key: o.Key, Size: o.Size}
		for _, p := range o.Parts {
			out[i].Parts = append(out[i].Parts, meta.ObjectPart{SHA256: p.SHA256, Offset: p.Offset, Length: p.Length})
		}
	}
	return out
}

// runningCheckpoint waits until this node's metadata show the checkpoint, and
// fails with base.ErrConflict if it does not run then.
func (n *Node) runningCheckpoint(ctx context.Context, number uint64) (*meta.View, error) {
	for {
		changed := n.changes.wait()
		v, err := n.metaView()
		if err == nil && v.NextCheckpoint() > number {
			if c := v.Checkpoint(number); c == nil || !c.Running() {
				return nil, fmt.Errorf("checkpoint %d has ended: %w", number, base.ErrConflict)
			}
			return v, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// failUpload tells the system group that a shard cannot be uploaded.
func (n *Node) failUpload(ctx context.Context, number uint64, g base.GroupID, attempt uint64, why string) {
	err := n.tellCheckpoint(ctx, number, func(v *meta.View) (broadcast.Txn, error) {
		return meta.ReportFailedTxn(v, n.wallMs(), number, g, attempt, why)
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, base.ErrConflict) {
		n.logger.Warn("failing a checkpoint", "checkpoint", number, "error", err)
	}
}

// tellCheckpoint brings a report into the metadata, however long the system
// group is without a leader. It fails with base.ErrConflict once the checkpoint
// has ended or never was, and for what will not be better later.
func (n *Node) tellCheckpoint(ctx context.Context, number uint64, build func(*meta.View) (broadcast.Txn, error)) error {
	for {
		s, err := n.founded()
		if err == nil {
			_, err = s.update(ctx, build)
		}
		sentinel := base.SentinelOf(err)
		if err == nil || ctx.Err() != nil || !sentinel.Retryable && sentinel.Outcome != base.OutcomeUnknown {
			return err
		}
		n.logger.Debug("telling the system group about a checkpoint", "checkpoint", number, "error", err)
		select {
		case <-time.After(tellPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func errNoObjectStore() error {
	return &base.Error{Cause: base.ErrUnsupported, Field: "object-store", Ordinal: -1,
		Hint: "the node has no object store; start every node with the same --object-store"}
}
