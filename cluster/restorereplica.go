package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

func rangeOf(rec *meta.Shard) keygroup.Range {
	return keygroup.Range{Lo: keygroup.Group(rec.Lo), Hi: keygroup.Group(rec.Hi)}
}

// sourcesOf are the shards of a checkpoint that have a part of a range. The one
// that has most of it comes first: it is the one whose files are taken.
func sourcesOf(c *snapshot.Checkpoint, rng keygroup.Range) []*snapshot.Shard {
	common := func(s *snapshot.Shard) int { return int(min(s.Range.Hi, rng.Hi)) - int(max(s.Range.Lo, rng.Lo)) }
	var out []*snapshot.Shard
	for i := range c.Shards {
		if s := &c.Shards[i]; common(s) > 0 {
			out = append(out, s)
		}
	}
	slices.SortStableFunc(out, func(a, b *snapshot.Shard) int { return cmp.Compare(common(b), common(a)) })
	return out
}

// seedOf is the seed of a new shard: nothing but a function of its sources, so
// that every replica begins at the same place.
func seedOf(c *snapshot.Checkpoint, rec *meta.Shard, spec meta.FoundingSpec) *meta.ShardSeed {
	var index, term uint64
	for _, s := range sourcesOf(c, rangeOf(rec)) {
		index, term = max(index, s.Index), max(term, s.Term)
	}
	return meta.NewShardSeed(index, term, spec, rec.Replicas)
}

// restoredFrom is the `_metadata` of the checkpoint that the cluster is founded
// with; it is kept until the founding has ended.
func (n *Node) restoredFrom(ctx context.Context, r *meta.FoundingRestore) (*snapshot.Checkpoint, error) {
	if c := n.restoring.Load(); c != nil {
		return c, nil
	}
	if n.opts.Objects == nil {
		return nil, errNoObjectStore()
	}
	c, _, err := snapshot.ReadCheckpoint(ctx, n.opts.Objects, r.Key, r.SHA256)
	if err != nil {
		return nil, err
	}
	n.restoring.Store(c)
	return c, nil
}

// restoredStates is what a checkpoint gives to the metadata of the new cluster.
func restoredStates(c *snapshot.Checkpoint) meta.RestoredStates {
	var want meta.RestoredStates
	for _, k := range c.Keyspaces {
		want.Keyspaces = append(want.Keyspaces, meta.Keyspace{Name: k.Name, KeyType: k.KeyType})
	}
	for i := range c.States {
		d := &c.States[i]
		want.States = append(want.States, meta.Declaration{
			ID: d.ID, Keyspace: d.Keyspace, Name: d.Name, Kind: d.Kind, KeyType: d.KeyType, UserKeyType: d.UserKeyType, ValueType: d.ValueType,
			Function: d.Function, FunctionParams: d.FunctionParams, CodecVersion: int(d.CodecVersion), DroppedMs: d.DroppedMs,
		})
	}
	for _, p := range c.Participants {
		want.Positions = append(want.Positions, meta.RestoredPosition{Participant: p.ID, Cluster: c.ClusterID, Checkpoint: c.Number, Bytes: p.Bytes})
	}
	return want
}

// restoreStates declares what the checkpoint declares, before shards are placed.
func (n *Node) restoreStates(ctx context.Context, s *system, c *snapshot.Checkpoint) error {
	want := restoredStates(c)
	for more := true; more; {
		_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
			txn, err := meta.RestoreStatesTxn(v, want)
			more = !meta.Empty(txn)
			return txn, err
		})
		if err != nil {
			return fmt.Errorf("declaring the states of the checkpoint: %w", err)
		}
	}
	failpoint.Hit("cluster.restore.declared")
	return nil
}

// notSeeded says that a replica could not be made of the checkpoint yet. It is
// tried again; nothing that it wraps says that the replica is damaged.
type notSeeded struct{ text string }

func (e *notSeeded) Error() string { return e.text }

// storeFetches bounds the files that a node fetches from the object store at once:
// while some wait for the store or for the disk, others come.
const storeFetches = 8

// seedPause is at least between two attempts to make a replica of a checkpoint:
// each reads again what was fetched before.
const seedPause = 3 * time.Second

// seed makes the first replica of a shard that comes from a checkpoint: it ends
// with a snapshot in the snapshot store, of which the restart rules make the store
// (checkRestart). Until that is there, and it comes by one rename, the replica has
// promised nothing: whatever a crash leaves is built again.
func (r *replica) seed(rec *meta.Shard, self meta.Replica) error {
	if rec.Seed == nil || self.Generation != 1 {
		return nil
	}
	own, err := r.snaps.List()
	if err != nil {
		return err
	}
	last, err := r.log.LastIndex()
	if err != nil {
		return err
	}
	if applied, _ := r.machine.Applied(); len(own) > 0 || last > 0 || applied > 0 {
		r.removeLeftOfSeed()
		return nil // it has begun: the restart rules say whether all is there
	}
	v, err := r.node.metaView()
	if err != nil {
		return err
	}
	op, spec, err := v.FoundingOperation()
	if err != nil {
		return err
	}
	switch {
	case r.guard.HighestTerm() > rec.Seed.Term:
		return fmt.Errorf("term %d is known, the snapshot with which the replica began is gone: %w", r.guard.HighestTerm(), base.ErrDamaged)
	case !founding(v) || spec.Restore == nil:
		// The checkpoint belongs to somebody else, who may have deleted it by now.
		return fmt.Errorf("the replica was not restored before the cluster was founded: %w", base.ErrDamaged)
	}
	start, failed := time.Now(), &r.node.restores
	failed.Lock()
	before, tried := failed.failed[r.id]
	failed.Unlock()
	if tried && start.Sub(before.at) < seedPause {
		return &before.notSeeded
	}
	problem := fmt.Sprintf("shard %s on node %s: ", r.id, r.opts.NodeID)
	if err := r.buildSeed(r.ctx, op.ID, rec, spec); err != nil {
		why := failed.note(r.id, err, fmt.Sprintf("restoring from checkpoint %s: %v", spec.Restore.Key, err))
		r.node.noteRestore(problem, err.Error())
		return why
	}
	failed.note(r.id, nil, "")
	r.node.noteRestore(problem, "")
	r.logger.Info("restored from a checkpoint", "checkpoint", spec.Restore.Key, "index", rec.Seed.Index, "took", time.Since(start))
	return nil
}

// noteRestore tells the operator, through the founding, what a replica waits for;
// without a text that it does not wait any more.
func (n *Node) noteRestore(who, text string) {
	s := n.system.Load()
	v, err := s.view()
	if err != nil || n.ctx.Err() != nil {
		return
	}
	op, _, err := v.FoundingOperation()
	if err != nil || op == nil || op.Finished() || text == "" && !strings.HasPrefix(op.Error, who) {
		return
	}
	if text != "" {
		text = who + text
	}
	ctx, cancel := context.WithTimeout(n.ctx, systemProposeTimeout)
	defer cancel()
	if err := n.advance(ctx, s, op, op.Phase, text); err != nil && n.ctx.Err() == nil {
		n.logger.Debug("noting what a restore waits for", "error", err)
	}
}

// seedDir is where a replica is made of a checkpoint.
func (r *replica) seedDir() string { return filepath.Join(r.dir, "restore") }

func (r *replica) removeLeftOfSeed() {
	if err := r.node.remover.remove(r.seedDir()); err != nil {
		r.logger.Warn("removing what a restore left", "error", err)
	}
}

// buildSeed fetches the sources, makes a store of them, and makes that the
// replica's first snapshot.
func (r *replica) buildSeed(ctx context.Context, operation uint64, rec *meta.Shard, spec meta.FoundingSpec) error {
	failpoint.Hit("cluster.restore.begin")
	voters, err := rec.Seed.Voters(spec)
	if err != nil {
		return err
	}
	c, err := r.node.restoredFrom(ctx, spec.Restore)
	if err != nil {
		return err
	}
	if err := makeDirs(r.node.opts.DataDir, r.seedDir()); err != nil {
		return err
	}
	fetched, err := r.fetchSources(ctx, operation, c, sourcesOf(c, r.rng))
	if err != nil {
		return err
	}
	failpoint.Hit("cluster.restore.fetched")
	stores, err := r.openSources(ctx, fetched)
	if err == nil {
		err = raftfsm.Assemble(ctx, stores[0], stores[1:], raftfsm.Seed{Group: r.id, Birth: rec.Birth, Range: r.rng, Epoch: rec.Epoch,
			Incarnation: spec.Restore.Incarnation, Index: rec.Seed.Index, Term: rec.Seed.Term, States: statesOf(c)})
	}
	for _, s := range stores[min(1, len(stores)):] {
		err = errors.Join(err, s.Close())
	}
	if len(stores) == 0 {
		return err
	}
	if err != nil {
		return errors.Join(err, stores[0].Close())
	}
	failpoint.Hit("cluster.restore.assembled")
	return r.publishSeed(ctx, stores[0], rec.Seed, seedConfiguration(voters))
}

// statesOf are the numbers of the states that a checkpoint knows.
func statesOf(c *snapshot.Checkpoint) map[engine.FamilyID]bool {
	out := make(map[engine.FamilyID]bool, len(c.States))
	for i := range c.States {
		out[engine.FamilyID(c.States[i].ID)] = true
	}
	return out
}

// fetchedSource is a shard of a checkpoint on this disk.
type fetchedSource struct {
	manifest *snapshot.Manifest
	dir      string
}

// fetchSources brings the files of the sources here; what an earlier attempt has
// brought is taken.
func (r *replica) fetchSources(ctx context.Context, operation uint64, c *snapshot.Checkpoint, sources []*snapshot.Shard) ([]fetchedSource, error) {
	out := make([]fetchedSource, len(sources))
	keep := map[string]bool{}
	for i, s := range sources {
		m, err := c.ReadManifest(ctx, r.node.opts.Objects, s)
		if err != nil {
			return nil, err
		}
		name := fmt.Sprintf("%x", s.ManifestSHA256)
		keep[name] = true
		out[i] = fetchedSource{manifest: m, dir: filepath.Join(r.seedDir(), name)}
	}
	if err := removeExcept(r.seedDir(), r.node.remover.remove, func(name string) bool { return keep[name] }); err != nil {
		return nil, fmt.Errorf("removing what an earlier restore left: %w", err)
	}
	var due int64
	for _, f := range out {
		due += f.manifest.FetchManifest().Bytes()
	}
	progress := r.node.fetches.begin(fetchKey{r.id, operation}, due, r.metrics)
	for _, f := range out {
		all := f.manifest.FetchManifest()
		err := snapshot.Fetch(ctx, r.storeSource(all), all, f.dir,
			snapshot.FetchOptions{Parallel: storeFetches, Hashes: r.snaps.hashes, Progress: progress.note})
		if err != nil {
			return nil, fmt.Errorf("fetching shard %s of the checkpoint: %w", f.manifest.Group, err)
		}
	}
	return out, nil
}

// openSources opens copies of the sources, each as the shard was at the barrier. If
// it fails the stores that it returns
// are open as well.
func (r *replica) openSources(ctx context.Context, sources []fetchedSource) ([]engine.Store, error) {
	var stores []engine.Store
	for i, f := range sources {
		dir := filepath.Join(r.seedDir(), fmt.Sprintf("source-%d", i))
		if err := snapshot.Link(dir, f.dir, f.manifest); err != nil {
			return stores, err
		}
		s, err := r.node.opts.Driver.Open(dir)
		if err != nil {
			return stores, fmt.Errorf("opening shard %s of the checkpoint: %w", f.manifest.Group, err)
		}
		stores = append(stores, s)
		if err := replayChangelog(ctx, s, f.manifest, f.dir); err != nil {
			return stores, fmt.Errorf("opening shard %s of the checkpoint: %w", f.manifest.Group, err)
		}
	}
	return stores, nil
}

// publishSeed makes an assembled store, which it closes, the replica's first
// snapshot. The term is durable before: a log that goes on behind a snapshot never
// has a lower term than the snapshot.
func (r *replica) publishSeed(ctx context.Context, store engine.Store, seed *meta.ShardSeed, voters raft.Configuration) error {
	machine, err := raftfsm.Open(store, raftfsm.Options{OnFatal: func(error) {}})
	if err != nil {
		return errors.Join(err, store.Close())
	}
	header, cut := machine.Header(), filepath.Join(r.seedDir(), "cut")
	if err := errors.Join(store.Checkpoint(cut), machine.Close()); err != nil {
		return fmt.Errorf("taking a checkpoint of the restored shard: %w", err)
	}
	raw, err := r.snaps.stage(ctx, cut, manifestOf(header, r.node.opts.Driver.Name()))
	if err != nil {
		return err
	}
	if err := r.guard.SetTerm(seed.Term); err != nil {
		return fmt.Errorf("storing the term of the restored shard: %w", err)
	}
	failpoint.Hit("cluster.restore.before-publish")
	sink, err := r.snaps.Create(raft.SnapshotVersionMax, seed.Index, seed.Term, voters, seed.Index, nil)
	if err != nil {
		return err
	}
	if _, err := sink.Write(raw); err != nil {
		return errors.Join(err, sink.Cancel())
	}
	if err := sink.Close(); err != nil {
		return err
	}
	failpoint.Hit("cluster.restore.published")
	r.removeLeftOfSeed()
	return nil
}

// seedConfiguration is the configuration that a shard from a checkpoint begins
// with, on whichever replica and whenever that begins.
func seedConfiguration(voters []base.NodeID) raft.Configuration {
	var c raft.Configuration
	for _, node := range voters {
		c.Servers = append(c.Servers, raft.Server{ID: raft.ServerID(base.MakeReplicaID(node, 1)), Address: raft.ServerAddress(node), Suffrage: raft.Voter})
	}
	return c
}
