package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// What a replica keeps for a rollback, in a directory of its own beside the store
// (docs/formats/replica-directory.md): the files that the shard had at the
// checkpoint, and, once they are whole and were opened, their manifest. With that
// the replica is prepared, whatever happens to it, until it is rolled back.
const (
	rollbackPrefix   = "rollback-"
	preparedManifest = "MANIFEST"
	preparedFiles    = "files"
	// preparedBase has what was fetched of a checkpoint that is files and a log, of
	// which preparedFiles is made.
	preparedBase = "base"
	// maxPreparing bounds the replicas of a node that are prepared at once.
	maxPreparing = 2
	// prepareMin and prepareMax are the pauses after what failed.
	prepareMin = 500 * time.Millisecond
	prepareMax = 30 * time.Second
)

// rollbackWork is what a replica has under way for a rollback. Only the checkpoint
// loop looks at what is not atomic.
type rollbackWork struct {
	// left are the operations whose directories may be here; listed says that the
	// disk was looked at.
	left   []uint64
	listed bool
	// cancel ends the preparation for the operation of, which runs while preparing.
	cancel    context.CancelFunc
	of        uint64
	preparing atomic.Bool
	// prepared is the operation for which the replica said that it is prepared.
	prepared atomic.Uint64
	// leading says that a step of the leader's runs, removing that directories go.
	leading, removing atomic.Bool
	// cut is the index of the rollback that the log was cut behind.
	cut atomic.Uint64
	// members is held while the group's members change, and while the entry is
	// proposed that only a quorum which is prepared can follow.
	members sync.Mutex
}

func (r *replica) rollbackDir(operation uint64) string {
	return filepath.Join(r.dir, rollbackPrefix+strconv.FormatUint(operation, 10))
}

// attendRollbacks has the replicas do their part of the rollback that runs, and
// removes what others have left.
func (n *Node) attendRollbacks(v *meta.View) {
	n.mu.Lock()
	replicas := slices.Collect(maps.Values(n.mu.replicas))
	n.mu.Unlock()
	n.fetches.forgetEnded(v)
	op := v.RunningRollback()
	for _, r := range replicas {
		if r.raft == nil || r.damage.Load() != nil {
			continue
		}
		r.removeEndedRollbacks(v)
		r.removeEndedLinks(v)
		r.cutAfterRollback()
		if op == nil {
			continue
		}
		if s := v.RollbackShard(op.ID, r.id); s != nil {
			r.attendPreparation(v, op, s)
			r.leadRollback(v, op, s)
		}
	}
}

// removeEndedRollbacks removes what was prepared for operations that have ended:
// that were given up, or that the store has behind it. A replica that is behind
// keeps it: the log may still lead it there.
func (r *replica) removeEndedRollbacks(v *meta.View) {
	w := &r.rollback
	if !w.listed {
		names, err := dirNames(r.dir)
		if err != nil {
			r.logger.Warn("looking for what rollbacks left", "error", err)
			return
		}
		for _, name := range names {
			if id, err := strconv.ParseUint(strings.TrimPrefix(name, rollbackPrefix), 10, 64); err == nil && strings.HasPrefix(name, rollbackPrefix) {
				w.left = append(w.left, id)
			}
		}
		w.listed = true
	}
	if len(w.left) == 0 {
		return
	}
	h := r.machine.Header()
	failed := func(id uint64) bool {
		o := v.Operation(id)
		return o == nil && id < v.NextOperationID() || o != nil && o.Phase == meta.PhaseFailed
	}
	if w.cancel != nil && (failed(w.of) || h.RolledBack >= w.of) {
		w.cancel()
		w.cancel = nil
	}
	// As long as the log begins before the rollback a replica that has lost its
	// store comes there again.
	behind := w.cut.Load() >= h.RollbackIndex
	ended := func(id uint64) bool { return failed(id) || behind && h.RolledBack >= id }
	gone := slices.DeleteFunc(slices.Clone(w.left), func(id uint64) bool { return !ended(id) })
	if len(gone) == 0 || w.preparing.Load() || !w.removing.CompareAndSwap(false, true) {
		return
	}
	w.left = slices.DeleteFunc(w.left, ended)
	r.spawn(func() {
		defer w.removing.Store(false)
		for _, id := range gone {
			failpoint.Hit("cluster.rollback.before-remove")
			if err := r.node.remover.remove(r.rollbackDir(id)); err != nil {
				r.logger.Warn("removing what a rollback left", "operation", id, "error", err)
			}
		}
	})
}

// attendPreparation prepares this replica for the rollback that runs, once.
func (r *replica) attendPreparation(v *meta.View, op *meta.Rollback, s *meta.RollbackShard) {
	w := &r.rollback
	done := s.State == meta.RollbackShardSwapped || s.State == meta.RollbackShardOpen || r.machine.Header().RolledBack >= op.ID
	if done || slices.Contains(s.Prepared, r.replica) || w.prepared.Load() == op.ID || !w.preparing.CompareAndSwap(false, true) {
		return
	}
	if !slices.Contains(w.left, op.ID) {
		w.left = append(w.left, op.ID)
	}
	ctx, cancel := context.WithCancel(r.ctx)
	w.cancel, w.of = cancel, op.ID
	cluster, cut := v.Cluster().ID, v.CheckpointShard(op.Checkpoint, r.id)
	r.spawn(func() {
		defer w.preparing.Store(false)
		defer cancel()
		select {
		case r.node.preparing <- struct{}{}:
			defer func() { <-r.node.preparing }()
		case <-ctx.Done():
			return
		}
		r.prepareAndReport(ctx, cluster, op, cut)
	})
}

// prepareAndReport prepares, again after what may be better later, and tells the
// system group.
func (r *replica) prepareAndReport(ctx context.Context, cluster base.ClusterID, op *meta.Rollback, cut *meta.CheckpointShard) {
	start := time.Now()
	for pause := prepareMin; ; pause = min(2*pause, prepareMax) {
		err := r.prepareRollback(ctx, cluster, op, cut)
		if ctx.Err() != nil {
			return
		}
		report := func(v *meta.View) (broadcast.Txn, error) {
			return meta.ReportPreparedTxn(v, r.node.wallMs(), op.ID, r.id, r.replica)
		}
		hopeless := errors.Is(err, base.ErrCorrupt) || errors.Is(err, base.ErrNotFound) || errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrIdentity)
		if err != nil {
			r.logger.Warn("preparing a rollback", "checkpoint", op.Checkpoint, "error", err)
			why := fmt.Sprintf("node %s: %v", r.opts.NodeID, err)
			report = func(v *meta.View) (broadcast.Txn, error) {
				return meta.ReportUnpreparedTxn(v, r.node.wallMs(), op.ID, r.id, why, hopeless)
			}
		}
		if terr := r.node.tellCheckpoint(ctx, op.Checkpoint, report); terr != nil {
			return // it has ended
		}
		if err == nil {
			r.rollback.prepared.Store(op.ID)
			r.logger.Info("prepared for a rollback", "checkpoint", op.Checkpoint, "took", time.Since(start))
			return
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// prepareRollback brings what the shard had at the checkpoint beside the store, and
// looks whether it can be opened. When it returns nil the replica can be rolled
// back without the object store.
func (r *replica) prepareRollback(ctx context.Context, cluster base.ClusterID, op *meta.Rollback, cut *meta.CheckpointShard) error {
	dir := r.rollbackDir(op.ID)
	if _, err := readPrepared(dir); err == nil {
		return nil // before a restart
	}
	failpoint.Hit("cluster.rollback.begin")
	if err := makeDirs(r.node.opts.DataDir, dir); err != nil {
		return err
	}
	if cut != nil && cut.Report != nil {
		m, err := r.prepareFromLinks(ctx, op, cut.Report)
		if err == nil && m != nil {
			err = r.markPrepared(dir, m)
		}
		if err == nil && m != nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			r.logger.Warn("what a checkpoint kept here cannot be used; fetching it", "checkpoint", op.Checkpoint, "error", err)
		}
	}
	if r.node.opts.Objects == nil {
		return errNoObjectStore()
	}
	m, err := r.checkpointManifest(ctx, cluster, op)
	if err != nil {
		return err
	}
	files := filepath.Join(dir, preparedFiles)
	all, to := m.FetchManifest(), files
	progress := r.node.fetches.begin(fetchKey{r.id, op.ID}, all.Bytes(), r.metrics)
	o := snapshot.FetchOptions{Parallel: storeFetches / maxPreparing, Hashes: r.snaps.hashes, Progress: progress.note}
	if name, err := r.currentStore(); err == nil {
		o.ReuseDirs = []string{filepath.Join(r.dir, name)}
	}
	// What a checkpoint kept here may be whole but for a file.
	o.ReuseDirs = append(o.ReuseDirs, filepath.Join(r.linkedDir(op.Checkpoint), preparedFiles))
	if m.Changelog != nil {
		to = filepath.Join(dir, preparedBase)
	}
	if err := snapshot.Fetch(ctx, r.storeSource(all), all, to, o); err != nil {
		return fmt.Errorf("fetching shard %s of checkpoint %d: %w", r.id, op.Checkpoint, err)
	}
	failpoint.Hit("cluster.rollback.fetched")
	if m.Changelog != nil {
		if m, err = r.materialise(ctx, dir, files, m); err != nil {
			return fmt.Errorf("making shard %s of checkpoint %d: %w", r.id, op.Checkpoint, err)
		}
	}
	return r.markPrepared(dir, m)
}

// markPrepared writes the mark that the replica is prepared, once what it has can
// be opened.
func (r *replica) markPrepared(dir string, m *snapshot.Manifest) error {
	if err := r.tryPrepared(dir, m); err != nil {
		return err
	}
	raw, err := m.Encode()
	if err != nil {
		return err
	}
	failpoint.Hit("cluster.rollback.before-prepared")
	return writeFileDurably(filepath.Join(dir, preparedManifest), raw)
}

// checkpointManifest reads from the object store what the shard had.
func (r *replica) checkpointManifest(ctx context.Context, cluster base.ClusterID, op *meta.Rollback) (*snapshot.Manifest, error) {
	key := snapshot.MetadataKey(cluster, op.Checkpoint)
	if op.Savepoint {
		key = snapshot.SavepointKey(cluster, op.Checkpoint)
	}
	c, _, err := snapshot.ReadCheckpoint(ctx, r.node.opts.Objects, key, op.MetadataSHA256)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(c.Shards, func(s snapshot.Shard) bool { return s.Group == r.id })
	if i < 0 {
		return nil, fmt.Errorf("checkpoint %d has no shard %s: %w", op.Checkpoint, r.id, base.ErrIdentity)
	}
	m, err := c.ReadManifest(ctx, r.node.opts.Objects, &c.Shards[i])
	if err != nil {
		return nil, err
	}
	if m.Birth != r.birth || m.Range != r.rng || m.Engine != r.node.opts.Driver.Name() {
		return nil, fmt.Errorf("checkpoint %d has shard %s with birth %x, range %s and engine %s: %w", op.Checkpoint, r.id, uint64(m.Birth), m.Range, m.Engine, base.ErrIdentity)
	}
	return m, nil
}

// tryPrepared opens a copy of what was fetched: what cannot be opened now could not
// be when there is no way back.
func (r *replica) tryPrepared(dir string, m *snapshot.Manifest) error {
	try := filepath.Join(dir, "try")
	if err := os.RemoveAll(try); err != nil {
		return err
	}
	store, err := r.openLinked(try, filepath.Join(dir, preparedFiles), m)
	if err != nil {
		return err
	}
	return errors.Join(raftfsm.CheckPrepared(store, r.machine.Header()), store.Close(), os.RemoveAll(try))
}

// openLinked opens a copy, in dir, of the store of a manifest's files.
func (r *replica) openLinked(dir, files string, m *snapshot.Manifest) (engine.Store, error) {
	if err := snapshot.Link(dir, files, m); err != nil {
		return nil, err
	}
	store, err := r.node.opts.Driver.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening what the shard had: %w", err)
	}
	if err := holds(store, m); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return store, nil
}

// readPrepared returns the manifest of what was prepared in a directory;
// fs.ErrNotExist if nothing was.
func readPrepared(dir string) (*snapshot.Manifest, error) {
	raw, err := os.ReadFile(filepath.Join(dir, preparedManifest))
	if err != nil {
		return nil, err
	}
	return snapshot.Decode(raw)
}

// rollBack is called by the state machine, on the apply goroutine, with everything
// before the rollback's entry applied. Like installStore it makes a store beside the
// live one, and that the live one by one rename; what was prepared stays until a
// restart would open the new one.
//
// A disk that is full does not end the node: the replica is opened again, and comes
// here by its log, until there is room (B17).
func (r *replica) rollBack(rb raftfsm.Rollback, seal func(engine.Store) error) (engine.Store, func(engine.Store), error) {
	store, released, err := r.putBack(rb, seal)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = fmt.Errorf("%w: %w", base.ErrReopen, err)
	}
	return store, released, err
}

func (r *replica) putBack(rb raftfsm.Rollback, seal func(engine.Store) error) (engine.Store, func(engine.Store), error) {
	prepared := r.rollbackDir(rb.Operation)
	m, err := readPrepared(prepared)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("the replica was not prepared for the rollback to checkpoint %d: %w", rb.Checkpoint, base.ErrDamaged)
	}
	if err != nil {
		return nil, nil, err
	}
	live, err := r.currentStore()
	if err != nil {
		return nil, nil, err
	}
	name, err := r.nextStore()
	if err != nil {
		return nil, nil, err
	}
	dir := filepath.Join(r.dir, name)
	store, err := r.openLinked(dir, filepath.Join(prepared, preparedFiles), m)
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	failpoint.Hit("cluster.rollback.opened")
	if err = seal(store); err == nil {
		failpoint.Hit("cluster.rollback.before-current")
		err = writeFileDurably(filepath.Join(r.dir, currentFile), []byte(name+"\n"))
	}
	if err != nil {
		return nil, nil, errors.Join(err, store.Close())
	}
	failpoint.Hit("cluster.rollback.after-current")
	r.logger.Info("rolled back", "checkpoint", rb.Checkpoint, "incarnation", uint64(rb.Incarnation))
	old := filepath.Join(r.dir, live)
	return store, func(s engine.Store) {
		if err := errors.Join(s.Close(), r.node.remover.remove(old)); err != nil {
			r.logger.Warn("removing the replaced store", "error", err)
		}
	}, nil
}

// leadRollback does, as the shard's leader, what the phase of the rollback asks
// for, and says when the shard has done its part.
func (r *replica) leadRollback(v *meta.View, op *meta.Rollback, s *meta.RollbackShard) {
	step := r.rollbackStep(v, op, s)
	if step == nil {
		return
	}
	if _, err := r.leading(); err != nil || !r.rollback.leading.CompareAndSwap(false, true) {
		return
	}
	r.spawn(func() {
		defer r.rollback.leading.Store(false)
		ctx, cancel := context.WithTimeout(r.ctx, systemProposeTimeout)
		defer cancel()
		state, err := step(ctx)
		if err == nil && state != "" {
			err = r.node.tellCheckpoint(ctx, op.Checkpoint, func(v *meta.View) (broadcast.Txn, error) {
				return meta.ReportRollbackStateTxn(v, r.node.wallMs(), op.ID, r.id, state)
			})
		}
		if err != nil && r.ctx.Err() == nil {
			r.logger.Info("a shard has not done its part of a rollback yet", "phase", op.Phase, "error", err)
		}
	})
}

// rollbackStep returns what the leader of the shard is to do now, nil if nothing.
// It returns how far the shard is then.
func (r *replica) rollbackStep(v *meta.View, op *meta.Rollback, s *meta.RollbackShard) func(context.Context) (meta.RollbackShardState, error) {
	h := r.machine.Header()
	command := func(state meta.RollbackShardState, cmd []byte) func(context.Context) (meta.RollbackShardState, error) {
		return func(ctx context.Context) (meta.RollbackShardState, error) {
			return state, r.rollbackCommand(ctx, cmd)
		}
	}
	switch {
	case op.Phase == meta.PhaseRollbackFence && s.State == meta.RollbackShardServing:
		return command(meta.RollbackShardFenced, raftfsm.AppendFence(nil, raftfsm.Fence{Operation: op.ID, Checkpoint: op.Checkpoint}))
	case op.Phase == meta.PhaseRollbackSwap && s.State == meta.RollbackShardFenced:
		return func(ctx context.Context) (meta.RollbackShardState, error) {
			if h.RolledBack < op.ID {
				if err := r.proposeRollback(ctx, op, s); err != nil {
					return "", err
				}
			}
			// Who still needs what is before the rollback gets a snapshot: the log
			// leads nobody through it who is not prepared.
			return meta.RollbackShardSwapped, r.cutLog(ctx)
		}
	case op.Phase == meta.PhaseRollbackOpen && s.State == meta.RollbackShardSwapped:
		return command(meta.RollbackShardOpen, raftfsm.AppendReopen(nil, raftfsm.Reopen{Operation: op.ID, Revision: v.Revision()}))
	}
	return nil
}

func (r *replica) rollbackCommand(ctx context.Context, cmd []byte) error {
	failpoint.Hit("cluster.rollback.before-propose")
	_, err := r.command(ctx, cmd)
	return err
}

// proposeRollback proposes the rollback if a quorum of those who vote by now is
// prepared, this replica among them. No member comes or goes meanwhile.
func (r *replica) proposeRollback(ctx context.Context, op *meta.Rollback, s *meta.RollbackShard) error {
	if !r.rollback.members.TryLock() {
		return fmt.Errorf("the members are being changed: %w", base.ErrNotReady)
	}
	defer r.rollback.members.Unlock()
	voters, _, err := r.voters()
	if err != nil {
		return err
	}
	if _, err := readPrepared(r.rollbackDir(op.ID)); err != nil {
		return r.leaveToPrepared(ctx, voters, s)
	}
	ready := 0
	for _, server := range voters {
		if slices.Contains(s.Prepared, base.ReplicaID(server.ID)) || server.ID == raft.ServerID(r.replica) {
			ready++
		}
	}
	if ready < len(voters)/2+1 {
		return fmt.Errorf("%d of %d voters are prepared: %w", ready, len(voters), base.ErrNotReady)
	}
	err = r.rollbackCommand(ctx, raftfsm.AppendRollback(nil, raftfsm.Rollback{Operation: op.ID, Checkpoint: op.Checkpoint, Incarnation: op.Incarnation, Epoch: s.Epoch}))
	if errors.Is(err, base.ErrConflict) && r.machine.Header().RolledBack >= op.ID {
		return nil
	}
	return err
}

// leaveToPrepared hands the office to a voter that is prepared: this one is not,
// and may not be for as long as the object store is away.
func (r *replica) leaveToPrepared(ctx context.Context, voters []raft.Server, s *meta.RollbackShard) error {
	for _, server := range voters {
		if server.ID != raft.ServerID(r.replica) && slices.Contains(s.Prepared, base.ReplicaID(server.ID)) {
			if err := r.transferTo(ctx, base.NodeID(server.Address)); err == nil {
				break
			}
		}
	}
	return fmt.Errorf("node %s is not prepared and does not roll the shard back: %w", r.opts.NodeID, base.ErrNotReady)
}

// cutAfterRollback cuts the log of a replica that was rolled back.
func (r *replica) cutAfterRollback() {
	at := r.machine.Header().RollbackIndex
	if at == 0 || r.rollback.cut.Load() >= at {
		return
	}
	if first, err := r.log.FirstIndex(); err == nil && (first == 0 || first > at) {
		r.rollback.cut.Store(at)
		return
	}
	if !r.snapping.CompareAndSwap(false, true) {
		return
	}
	r.spawn(func() {
		defer r.snapping.Store(false)
		if err := r.cutLogOnce(r.ctx); err != nil && r.ctx.Err() == nil {
			r.logger.Info("the log is not cut behind a rollback yet", "error", err)
		}
	})
}

// cutLog waits until the log of this replica begins behind its rollback.
func (r *replica) cutLog(ctx context.Context) error {
	for r.rollback.cut.Load() < r.machine.Header().RollbackIndex {
		if r.snapping.CompareAndSwap(false, true) {
			err := r.cutLogOnce(ctx)
			r.snapping.Store(false)
			if err != nil {
				return err
			}
		}
		if r.rollback.cut.Load() >= r.machine.Header().RollbackIndex {
			return nil
		}
		// There was a snapshot already, which has kept some of the log.
		if _, err := r.command(ctx, raftfsm.AppendTick(nil, 0)); err != nil {
			return err
		}
	}
	return nil
}

// cutLogOnce takes a snapshot and keeps nothing of the log before it, unless there
// is nothing new to take one of.
func (r *replica) cutLogOnce(ctx context.Context) error {
	at := r.machine.Header().RollbackIndex
	if err := r.flush(); err != nil {
		return err
	}
	rc := r.raft.ReloadableConfig()
	rc.TrailingLogs = 0
	if err := r.raft.ReloadConfig(rc); err != nil {
		return err
	}
	if err := r.awaitIn(ctx, r.raft.Snapshot()); err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) {
		return err
	}
	if first, err := r.log.FirstIndex(); err != nil || first != 0 && first <= at {
		return err
	}
	r.rollback.cut.Store(at)
	r.keptBytes.Store(r.log.Bytes())
	failpoint.Hit("cluster.rollback.cut")
	return nil
}
