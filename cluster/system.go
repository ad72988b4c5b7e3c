package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// systemProposeTimeout bounds one proposal to the system group, forwarding
// included, where the caller's context does not.
const systemProposeTimeout = 10 * time.Second

// system is this node's replica of the system group: the replicated map with
// the cluster's metadata, a full copy on every node.
type system struct {
	group
	node   *Node
	store  *broadcast.Store
	mirror *meta.Mirror
	// clock gives this leader's stamps; of its last term if it does not lead now.
	clock atomic.Pointer[leaseClock]
	// graceUntil is when a new leader begins to end sessions; nil or past: now.
	graceUntil atomic.Pointer[time.Time]
	// noting holds one token for who owns noted, the revision that the log
	// remembers as applied: a lock that is held while the disk works.
	noting chan struct{}
	noted  base.Revision
}

// appliedKey is where the system group's part of the Raft log keeps the index of
// a command that this node has applied, and so knows to be committed.
const appliedKey = "Applied"

// startSystem starts the replica. bootstrap is set on the founding node only.
func (n *Node) startSystem(generation uint64, bootstrap bool) (*system, error) {
	id := base.MakeReplicaID(n.opts.NodeID, generation)
	s := &system{node: n, noting: make(chan struct{}, 1), store: broadcast.New(broadcast.Options{})}
	s.mirror = meta.NewMirror(s.store)
	if err := n.initGroup(&s.group, base.SystemGroup, id, generation); err != nil {
		return nil, err
	}
	dir := filepath.Join(n.opts.DataDir, "system", fmt.Sprintf("%d", generation))
	snaps, err := openSystemSnapshots(n.opts.DataDir, dir, s.raftLogger())
	if err != nil {
		return nil, fmt.Errorf("opening the system group's snapshots: %w", err)
	}
	end, err := s.checkRestart(snaps)
	if err != nil {
		return nil, err
	}
	if err := s.restore(snaps, end); err != nil {
		return nil, fmt.Errorf("restoring the metadata: %w", err)
	}
	var first *raft.Configuration
	if bootstrap {
		first = &raft.Configuration{Servers: []raft.Server{{
			ID: raft.ServerID(id), Address: raft.ServerAddress(n.opts.NodeID), Suffrage: raft.Voter}}}
	}
	err = s.group.start(n.transport, groupHooks{
		fsm: &systemFSM{store: s.store, fatal: n.fatal}, snaps: snaps,
		takeOffice: s.takeOffice, changed: n.poke,
		applied: func() uint64 { return s.store.Snapshot().AppliedIndex() },
		// A log that does not fit its promises is looked at by checkSystem at the
		// next start.
		stopped: n.fatal,
	}, first)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// checkRestart demands that the log goes on where the newest snapshot ends, and
// returns that index; else the replica is damaged (base.ErrDamaged, R3).
func (s *system) checkRestart(snaps raft.SnapshotStore) (end uint64, err error) {
	metas, err := snaps.List()
	if err != nil {
		return 0, fmt.Errorf("listing the system group's snapshots: %w", err)
	}
	if len(metas) > 0 {
		end = metas[0].Index
	}
	first, err := s.log.FirstIndex()
	if err != nil {
		return 0, err
	}
	last, err := s.log.LastIndex()
	if err != nil {
		return 0, err
	}
	if last > 0 && last < end { // a crash within the installation of a snapshot
		return end, s.log.DeleteRange(first, last)
	}
	if first > end+1 {
		return 0, fmt.Errorf("the system group's log starts at %d, its newest snapshot ends at %d: %w", first, end, base.ErrDamaged)
	}
	return end, nil
}

// restore builds the map as this node had it: from its newest snapshot, which
// ends at end, and the entries behind it that the node had applied. So a node
// that restarts knows its shards, and serves them, while the system group has no
// quorum to say what is committed. Raft hands the same entries over again; the
// map skips them.
func (s *system) restore(snaps raft.SnapshotStore, end uint64) error {
	failpoint.Hit("cluster.metadata.restore")
	metas, err := snaps.List()
	if err != nil {
		return err
	}
	if len(metas) > 0 {
		if err := s.restoreSnapshot(snaps, metas[0].ID); err != nil {
			return err
		}
	}
	applied, err := s.log.GetUint64([]byte(appliedKey))
	if err != nil && err.Error() != base.ErrNotFound.Error() {
		return fmt.Errorf("reading what was applied: %w", err)
	}
	last, err := s.log.LastIndex()
	if err != nil {
		return err
	}
	if held := max(last, end, s.store.Snapshot().AppliedIndex()); applied > held {
		return fmt.Errorf("entry %d was applied, log and snapshots end at %d: %w", applied, held, base.ErrDamaged)
	}
	for i := end + 1; i <= min(applied, last); i++ {
		var e raft.Log
		if err := s.log.GetLog(i, &e); err != nil {
			return fmt.Errorf("reading entry %d: %w", i, err)
		}
		if e.Type != raft.LogCommand {
			continue
		}
		// What the map refuses it refused the first time too.
		if _, err := s.store.Apply(i, e.Data); err != nil && isFormatVersion(err) {
			return fmt.Errorf("entry %d is of a newer version; upgrade this node: %w", i, err)
		}
	}
	s.noted = s.store.Snapshot().Revision()
	return nil
}

func (s *system) restoreSnapshot(snaps raft.SnapshotStore, id string) error {
	_, rc, err := snaps.Open(id) // checks the checksum
	if err != nil {
		return fmt.Errorf("opening snapshot %s: %w: %w", id, base.ErrDamaged, err)
	}
	err = s.store.Restore(rc)
	if errors.Is(err, base.ErrCorrupt) {
		err = fmt.Errorf("snapshot %s: %w: %w", id, base.ErrDamaged, err)
	}
	return errors.Join(err, rc.Close())
}

// note makes durable how far this node's copy of the metadata is, if it has
// changed: a restart does not know less (restore).
func (s *system) note() error {
	select {
	case s.noting <- struct{}{}:
	case <-s.ctx.Done():
		return fmt.Errorf("noting the metadata: %w", base.ErrClosed)
	}
	defer func() { <-s.noting }()
	snap := s.store.Snapshot()
	if snap.Revision() <= s.noted {
		return nil
	}
	failpoint.Hit("cluster.metadata.before-note")
	if err := s.log.SetUint64([]byte(appliedKey), snap.AppliedIndex()); err != nil {
		return fmt.Errorf("noting metadata revision %d: %w", snap.Revision(), err)
	}
	s.noted = snap.Revision()
	return nil
}

// takeOffice proposes the term's first command, a tick of the system clock.
func (s *system) takeOffice(ctx context.Context, r *raft.Raft, _ uint64) (uint64, error) {
	// Everything before is applied after a barrier: the clock is then the
	// newest that any leader gave.
	if err := s.awaitIn(ctx, r.Barrier(enqueueTimeout)); err != nil {
		return 0, classify(err)
	}
	start := time.Now()
	committed := s.store.Snapshot().Clock()
	clock := newLeaseClock(func() time.Duration { return time.Since(start) }, leaseStep(s.opts.CheckInterval), committed)
	if err := s.awaitIn(ctx, r.Apply(broadcast.EncodeTick(clock.stampMs(committed)), enqueueTimeout)); err != nil {
		return 0, classify(err)
	}
	s.clock.Store(clock)
	v, err := s.view()
	if err != nil {
		return 0, err
	}
	// The clock stood while nobody led, but clients have yet to find this leader.
	s.graceUntil.Store(nil)
	if v.SessionCount() > 0 {
		until := time.Now().Add(sessionGrace)
		s.graceUntil.Store(&until)
	}
	return committed, ctx.Err()
}

// sessionGrace is for how long a new leader ends no sessions.
const sessionGrace = 20 * time.Second

// stampMs is the stamp for a proposal of this leader (leaseClock).
func (s *system) stampMs() (uint64, error) {
	c := s.clock.Load()
	if c == nil {
		return 0, s.notLeader()
	}
	return c.stampMs(s.store.Snapshot().Clock()), nil
}

// wallMs is this node's wall clock, for what is shown to people; nothing is
// decided by it.
func (n *Node) wallMs() uint64 { return uint64(max(n.opts.WallClock().UnixMilli(), 0)) }

// leaseFromMs is from when a lease counts that is given by the view. The leader
// may be ahead of it by one step, so that the lease may be so much longer, and is
// never shorter.
func (s *system) leaseFromMs(v *meta.View) uint64 {
	return v.Clock() + uint64(leaseStep(s.opts.CheckInterval).Milliseconds())
}

// view is the newest metadata that this node knows.
func (s *system) view() (*meta.View, error) { return s.mirror.View() }

// sync makes this node's copy at least as new as every change that was
// acknowledged anywhere before the call: a linearizable read of the metadata.
func (s *system) sync(ctx context.Context) (*meta.View, error) {
	ctx, cancel := context.WithTimeout(ctx, systemProposeTimeout)
	defer cancel()
	index, err := s.leaderIndex(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.store.WaitForIndex(ctx, index); err != nil {
		return nil, fmt.Errorf("waiting for the metadata: %w: %w", base.ErrNoQuorum, err)
	}
	return s.view()
}

// leaderIndex asks the leader for a confirmed index; it retries while an
// election is under way.
func (s *system) leaderIndex(ctx context.Context) (uint64, error) {
	var index uint64
	err := s.withLeader(ctx, func() error {
		i, err := s.readIndex(ctx)
		index = i
		return err
	}, func(leader base.NodeID) error {
		reply, err := s.node.transport.Call(ctx, leader, methodSystemIndex, nil)
		if err != nil { // a read has no effect: asking again is always safe
			return fmt.Errorf("%w: %w", base.ErrNoQuorum, err)
		}
		return json.Unmarshal(reply, &index)
	})
	return index, err
}

// withLeader runs local if this replica leads, else remote with the leader's
// node. What was not applied is tried again until the context ends.
func (s *system) withLeader(ctx context.Context, local func() error, remote func(base.NodeID) error) error {
	for {
		var err error
		leader := s.leaderNode()
		switch {
		case s.raft.State() == raft.Leader:
			err = local()
		case leader == "" || leader == s.node.opts.NodeID:
			err = s.notLeader()
		default:
			err = remote(leader)
		}
		sentinel := base.SentinelOf(err)
		if err == nil || sentinel.Outcome != base.OutcomeNotApplied || !sentinel.Retryable {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("reaching the system group's leader: %w: %w", base.ErrNoQuorum, err)
		case <-s.ctx.Done():
			return base.ErrShuttingDown
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// propose brings a transaction into the system group's log, here or at the
// leader, and waits until this node's copy has it.
func (s *system) propose(ctx context.Context, txn broadcast.Txn) (broadcast.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, systemProposeTimeout)
	defer cancel()
	var res broadcast.Result
	err := s.withLeader(ctx, func() error {
		r, err := s.proposeHere(ctx, txn)
		res = r
		return err
	}, func(leader base.NodeID) error {
		cmd, err := broadcast.EncodeTxn(txn)
		if err != nil {
			return err
		}
		reply, err := s.node.transport.Call(ctx, leader, methodSystemPropose, cmd)
		if err != nil {
			return err
		}
		return json.Unmarshal(reply, &res)
	})
	if err != nil {
		return res, err
	}
	// The index covers transactions that changed nothing as well.
	if err := s.store.WaitForIndex(ctx, res.Index); err != nil {
		return res, fmt.Errorf("waiting for revision %d: %w", res.Revision, base.ErrDeadline)
	}
	return res, res.Err()
}

// proposeHere proposes at this leader, with its own stamp, and waits no longer than ctx.
func (s *system) proposeHere(ctx context.Context, txn broadcast.Txn) (broadcast.Result, error) {
	if _, err := s.leading(); err != nil {
		return broadcast.Result{}, err
	}
	stamp, err := s.stampMs()
	if err != nil {
		return broadcast.Result{}, err
	}
	txn.Stamp = stamp
	cmd, err := broadcast.EncodeTxn(txn)
	if err != nil {
		return broadcast.Result{}, err
	}
	failpoint.Hit("cluster.metadata.before-propose")
	f := s.raft.Apply(cmd, enqueueTimeout)
	if err := s.awaitIn(ctx, f); err != nil {
		return broadcast.Result{}, classify(err)
	}
	r, ok := f.Response().(systemResult)
	if !ok {
		return broadcast.Result{}, base.ErrInternal
	}
	return r.result, r.err
}

// maxRebuilds bounds how often update builds its transaction again.
const maxRebuilds = 20

// update builds a transaction from a view that is linearizable at the call and
// proposes it, again from a newer view when a condition failed. build returns an
// empty transaction when there is nothing to do.
func (s *system) update(ctx context.Context, build func(*meta.View) (broadcast.Txn, error)) (base.Revision, error) {
	v, err := s.sync(ctx)
	if err != nil {
		return 0, err
	}
	for range maxRebuilds {
		txn, err := build(v)
		if err != nil {
			return v.Revision(), err
		}
		if meta.Empty(txn) {
			return v.Revision(), nil
		}
		res, err := s.propose(ctx, txn)
		if err == nil {
			return res.Revision, nil
		}
		if !errors.Is(err, base.ErrPrecondition) && base.OutcomeOf(err) != base.OutcomeUnknown {
			return v.Revision(), err
		}
		// After an unknown outcome too: the conditions of the rebuilt
		// transaction see whether the first one was applied.
		if v, err = s.sync(ctx); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("changing the metadata: too many conflicting changes: %w", base.ErrOverloaded)
}

// serveSystem registers what other nodes may ask of the system leader.
func (s *system) serveSystem() {
	t := s.node.transport
	t.Handle(methodSystemPropose, func(ctx context.Context, _ base.NodeID, req []byte) ([]byte, error) {
		cmd, err := broadcast.DecodeCommand(req)
		if err != nil {
			return nil, err
		}
		if cmd.Kind != broadcast.CommandTxn {
			return nil, base.Invalid("command", "only transactions are forwarded")
		}
		res, err := s.proposeHere(ctx, broadcast.Txn{Conditions: cmd.Conditions, Then: cmd.Then})
		if err != nil {
			return nil, err
		}
		return json.Marshal(res)
	})
	t.Handle(methodSystemIndex, func(ctx context.Context, _ base.NodeID, _ []byte) ([]byte, error) {
		index, err := s.readIndex(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(index)
	})
}

// snapshotIfLarge cuts the system group's log by bytes.
func (s *system) snapshotIfLarge() error {
	if s.log.Bytes() < s.node.opts.LogMaxBytes/4 {
		return nil
	}
	if err := s.raft.ReloadConfig(s.reloadable(s.log, s.node.opts.LogKeepBytes/4)); err != nil {
		return err
	}
	if err := s.raft.Snapshot().Error(); err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) {
		return fmt.Errorf("taking a snapshot of the system group: %w", err)
	}
	return nil
}

// reloadable is the raft setting that keeps about keep bytes of log behind a
// snapshot.
func (g *group) reloadable(log *raftlog.GroupLog, keep uint64) raft.ReloadableConfig {
	rc := g.raft.ReloadableConfig()
	last, err := log.LastIndex()
	if cut := log.IndexForBytes(keep); err == nil && last >= cut {
		rc.TrailingLogs = last - cut
	}
	return rc
}
