package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster/checkpoint"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/snapshot"
)

const (
	// maxSteps bounds the steps of the coordinator between two looks at what the
	// replicas of this node have to do.
	maxSteps = 16
	// storeTimeout bounds one piece of the coordinator's work at the object store.
	storeTimeout = 5 * time.Minute
	// maxManifestLooks bounds the manifests that are looked for at once.
	maxManifestLooks = 8
	// sweepInterval is the time between two searches for orphans.
	sweepInterval = time.Hour
)

// checkpointLoop does what the running checkpoint asks of this node's replicas,
// and leads the checkpoints while this node leads the system group.
func (n *Node) checkpointLoop() {
	lead := &checkpointLead{node: n, done: make(chan func()), start: time.Now()}
	timer := time.NewTimer(n.opts.CheckInterval)
	defer timer.Stop()
	for {
		changed := n.changes.wait()
		if v, err := n.metaView(); err == nil && v.Cluster() != nil {
			n.attendCheckpoints(v)
			n.attendRollbacks(v)
			lead.step()
		}
		timer.Reset(n.opts.CheckInterval)
		select {
		case <-n.ctx.Done():
			return
		case <-changed:
		case report := <-lead.done:
			report()
		case <-timer.C:
		}
	}
}

// attendCheckpoints gives up what belongs to checkpoints that have ended, and has
// the replicas do their part of the one that runs.
func (n *Node) attendCheckpoints(v *meta.View) {
	n.uploads.keep(v.OldestRunningAttempt())
	n.mu.Lock()
	replicas := slices.Collect(maps.Values(n.mu.replicas))
	n.mu.Unlock()
	for _, r := range replicas {
		if r.damage.Load() == nil && r.raft != nil {
			r.attendChangelog(v)
		}
	}
	c := v.RunningCheckpoint()
	if c == nil || c.Phase != meta.CheckpointAnnounced {
		return
	}
	for _, r := range replicas {
		s := v.CheckpointShard(c.Number, r.id)
		switch {
		case s == nil:
		case r.damage.Load() != nil:
			n.missFromCheckpoint(r, c, s)
		case r.raft != nil:
			r.attendCheckpoint(c, s)
		}
	}
}

// missFromCheckpoint fails a checkpoint for which a damaged replica was to upload.
func (n *Node) missFromCheckpoint(r *replica, c *meta.Checkpoint, s *meta.CheckpointShard) {
	if s.Uploader != n.opts.NodeID || s.State == meta.CheckpointShardUploaded || !r.telling.CompareAndSwap(false, true) {
		return
	}
	n.spawn(func() { // the replica may not be running
		defer r.telling.Store(false)
		n.failUpload(n.ctx, c.Number, r.id, s.Attempt, "the replica of the uploader is damaged; it is rebuilt from its peers")
	})
}

// checkpointLead is the coordinator of checkpoints on this node. It belongs to
// the checkpoint loop; what it has done at the object store comes back on done.
type checkpointLead struct {
	node        *Node
	start       time.Time
	coordinator *checkpoint.Coordinator // nil while this node does not lead
	term        uint64
	done        chan func()
}

func (l *checkpointLead) now() time.Duration { return time.Since(l.start) }

// checkpointConfig is how this node, as the leader, takes checkpoints.
func (n *Node) checkpointConfig() checkpoint.Config {
	c := checkpoint.Config{Interval: n.opts.CheckpointInterval, Retain: n.opts.CheckpointRetain, Timeout: n.opts.CheckpointTimeout,
		Changelog: n.opts.CheckpointChangelog, SweepInterval: sweepInterval}
	if n.opts.Objects == nil {
		c.Interval, c.SweepInterval = 0, 0
	}
	return c
}

func (n *Node) checkpointInput(v *meta.View, now time.Duration) checkpoint.Input {
	alive := n.alive()
	return checkpoint.Input{Config: n.checkpointConfig(), View: v, Now: now, WallMs: n.wallMs(),
		Alive: func(id base.NodeID) bool { return alive[id] }, Leader: n.leaderHint}
}

// checkpointSpec is what a checkpoint that is started now is to be like.
func (n *Node) checkpointSpec(v *meta.View, automatic bool) meta.CheckpointSpec {
	in := n.checkpointInput(v, 0)
	return checkpoint.Spec(&in, automatic)
}

// step does what the coordinator says until it has nothing more to say.
func (l *checkpointLead) step() {
	n := l.node
	for range maxSteps {
		s := n.system.Load()
		o, err := s.leading()
		if err != nil {
			l.coordinator = nil
			return
		}
		if l.coordinator == nil || l.term != o.term {
			l.coordinator, l.term = checkpoint.New(), o.term
		}
		v, err := s.view()
		if err != nil {
			return
		}
		proposed := false
		for _, a := range l.coordinator.Step(n.checkpointInput(v, l.now())) {
			switch a.Kind {
			case checkpoint.Propose:
			case checkpoint.Complain:
				n.logger.Warn("checkpoints: a step cannot be taken", "error", a.Why)
				continue
			default:
				l.work(v, a)
				continue
			}
			if !l.propose(s, a) {
				return // it is seen again, at the latest at the next look
			}
			proposed = true
		}
		if !proposed {
			return
		}
	}
}

// propose brings a transaction of the coordinator into the metadata. One whose
// conditions fail is made again by the next step.
func (l *checkpointLead) propose(s *system, a checkpoint.Action) bool {
	failpoint.Hit("cluster.checkpoint.before-propose")
	_, err := s.propose(l.node.ctx, a.Txn)
	switch {
	case err == nil:
		l.node.logger.Info("checkpoints", "step", a.Why)
	case errors.Is(err, base.ErrPrecondition):
		l.node.logger.Debug("checkpoints", "step", a.Why, "error", err)
	default:
		l.node.logger.Warn("checkpoints", "step", a.Why, "error", err)
		return false
	}
	return true
}

// work does what the coordinator asks for at the object store, beside the loop,
// and reports to the coordinator that asked.
func (l *checkpointLead) work(v *meta.View, a checkpoint.Action) {
	n, c := l.node, l.coordinator
	n.spawn(func() {
		ctx, cancel := context.WithTimeout(n.ctx, storeTimeout)
		defer cancel()
		var report func()
		switch a.Kind {
		case checkpoint.StoreMetadata:
			sum, size, err := n.storeMetadata(ctx, v, a.Checkpoint)
			report = func() { c.Stored(l.now(), a.Checkpoint, sum, size, err) }
			n.warnStore("storing _metadata", err)
		case checkpoint.DeletePlanned:
			err := n.deletePlanned(ctx, v, a.Plan)
			report = func() { c.Deleted(l.now(), a.Plan.ID, err) }
			n.warnStore("deleting objects", err)
		case checkpoint.FindOrphans:
			keys, err := n.findOrphans(ctx, v)
			report = func() { c.Found(l.now(), sweepInterval, keys, err) }
			n.warnStore("looking for orphans", err)
		default:
			return
		}
		select {
		case l.done <- report:
		case <-n.ctx.Done():
		}
	})
}

func (n *Node) warnStore(what string, err error) {
	if err != nil && n.ctx.Err() == nil {
		n.logger.Warn("checkpoints: "+what, "error", err)
	}
}

// storeMetadata makes the `_metadata` of a checkpoint durable. Where a former
// leader has stored it already it is taken if it is of the same cut.
func (n *Node) storeMetadata(ctx context.Context, v *meta.View, number uint64) (sum [32]byte, size int64, err error) {
	if n.opts.Objects == nil {
		return sum, 0, errNoObjectStore()
	}
	m, err := checkpoint.Metadata(v, number)
	if err != nil {
		return sum, 0, err
	}
	if err := n.findManifests(ctx, m); err != nil {
		return sum, 0, err
	}
	failpoint.Hit("cluster.checkpoint.before-metadata")
	sum, size, err = snapshot.StoreMetadata(ctx, n.opts.Objects, m)
	failpoint.Hit("cluster.checkpoint.after-metadata")
	return sum, size, err
}

// findManifests looks for what the uploaders say they have stored. A node that has
// another store than they would complete a checkpoint that lies in no one place.
func (n *Node) findManifests(ctx context.Context, m *snapshot.Checkpoint) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxManifestLooks)
	for _, s := range m.Shards {
		g.Go(func() error {
			key := s.ManifestKey
			if m.Savepoint { // then it is a name within the folder
				key = snapshot.SavepointFolder(m.ClusterID, m.Number) + "/" + key
			}
			o, err := n.opts.Objects.Stat(ctx, key)
			switch {
			case errors.Is(err, base.ErrNotFound):
			case err != nil:
				return fmt.Errorf("looking for the manifest of shard %s: %w", s.Group, err)
			case o.Size == s.ManifestSize:
				return nil
			}
			return fmt.Errorf("node %s does not find the manifest that shard %s has stored (%s); start every node with the same --object-store: %w",
				n.opts.NodeID, s.Group, s.ManifestKey, base.ErrConflict)
		})
	}
	return g.Wait()
}

// deletePlanned deletes the keys of a plan that is committed.
func (n *Node) deletePlanned(ctx context.Context, v *meta.View, p *meta.DeletePlan) error {
	if n.opts.Objects == nil {
		return errNoObjectStore()
	}
	failpoint.Hit("cluster.checkpoint.before-delete")
	return snapshot.ExecutePlan(ctx, n.opts.Objects, v.Cluster().ID, p.Keys)
}

// findOrphans looks for objects of this cluster that nothing refers to, and
// removes what uploads left that never became objects.
func (n *Node) findOrphans(ctx context.Context, v *meta.View) ([]string, error) {
	if n.opts.Objects == nil {
		return nil, errNoObjectStore()
	}
	before := n.opts.WallClock().Add(-n.opts.OrphanGrace)
	left, err := n.opts.Objects.Sweep(ctx, string(v.Cluster().ID)+"/", before)
	if err != nil {
		return nil, fmt.Errorf("sweeping unfinished uploads: %w", err)
	}
	test := v.OrphanTest()
	found, err := snapshot.FindOrphans(ctx, n.opts.Objects, v.Cluster().ID, snapshot.OrphanOptions{Before: before,
		IsOrphan: func(key string) bool {
			orphan, _ := test(key)
			return orphan
		}})
	if err != nil {
		return nil, err
	}
	if left+len(found.Keys)+found.Foreign > 0 {
		n.logger.Info("checkpoints: swept the object store", "objects", found.Objects, "orphans", len(found.Keys), "young", found.Young,
			"foreign", found.Foreign, "unfinished", left)
	}
	return found.Keys, nil
}
