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
	// graceUntil is when a leader that came after an outage begins to end
	// sessions; nil or past: now.
	graceUntil atomic.Pointer[time.Time]
}

// startSystem starts the replica. bootstrap is set on the founding node only.
func (n *Node) startSystem(generation uint64, bootstrap bool) (*system, error) {
	id := base.MakeReplicaID(n.opts.NodeID, generation)
	s := &system{node: n, store: broadcast.New(broadcast.Options{})}
	s.mirror = meta.NewMirror(s.store)
	if err := n.initGroup(&s.group, base.SystemGroup, id, generation); err != nil {
		return nil, err
	}
	dir := filepath.Join(n.opts.DataDir, "system", fmt.Sprintf("%d", generation))
	snaps, err := raft.NewFileSnapshotStoreWithLogger(dir, 2, s.raftLogger())
	if err != nil {
		return nil, fmt.Errorf("opening the system group's snapshots: %w", err)
	}
	if err := s.checkRestart(snaps); err != nil {
		return nil, err
	}
	var first *raft.Configuration
	if bootstrap {
		first = &raft.Configuration{Servers: []raft.Server{{
			ID: raft.ServerID(id), Address: raft.ServerAddress(n.opts.NodeID), Suffrage: raft.Voter}}}
	}
	err = s.group.start(n.transport, groupHooks{
		fsm: &systemFSM{store: s.store, fatal: n.fatal}, snaps: snaps, restoreOnStart: true,
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

// checkRestart demands that the newest snapshot is whole and that the log goes
// on where it ends; else the replica is damaged (base.ErrDamaged, R3).
func (s *system) checkRestart(snaps raft.SnapshotStore) error {
	metas, err := snaps.List()
	if err != nil {
		return fmt.Errorf("listing the system group's snapshots: %w", err)
	}
	var end uint64
	if len(metas) > 0 {
		_, rc, err := snaps.Open(metas[0].ID) // checks the checksum
		if err != nil {
			return fmt.Errorf("opening the system group's snapshot %s: %w: %w", metas[0].ID, base.ErrDamaged, err)
		}
		if err := rc.Close(); err != nil {
			return err
		}
		end = metas[0].Index
	}
	first, err := s.log.FirstIndex()
	if err != nil {
		return err
	}
	last, err := s.log.LastIndex()
	if err != nil {
		return err
	}
	if last > 0 && last < end { // a crash within the installation of a snapshot
		return s.log.DeleteRange(first, last)
	}
	if first > end+1 {
		return fmt.Errorf("the system group's log starts at %d, its newest snapshot ends at %d: %w", first, end, base.ErrDamaged)
	}
	return nil
}

// takeOffice proposes the term's first command, a tick of the system clock.
func (s *system) takeOffice(ctx context.Context, r *raft.Raft, _ uint64) (uint64, error) {
	// Everything before is applied after a barrier: the clock is then the
	// newest that any leader gave.
	if err := s.await(r.Barrier(enqueueTimeout)); err != nil {
		return 0, classify(err)
	}
	before := s.store.Snapshot().Clock()
	if err := s.await(r.Apply(broadcast.EncodeTick(s.nowMs()), enqueueTimeout)); err != nil {
		return 0, classify(err)
	}
	now := s.store.Snapshot().Clock()
	// After an outage every lease is past by the clock before any client could
	// renew it: they get a grace.
	if before > 0 && now > before+uint64(outageGap.Milliseconds()) {
		until := time.Now().Add(sessionGrace)
		s.graceUntil.Store(&until)
	}
	return now, ctx.Err()
}

const (
	// outageGap is how far the system clock may have stood still before a new
	// leader counts as an outage; sessions are then not ended for sessionGrace.
	outageGap    = 5 * time.Second
	sessionGrace = 20 * time.Second
)

// nowMs is the stamp for a proposal of this leader: its wall clock, which the
// map never lets go back. The system clock decides leases only: a clock that
// jumps ahead ends sessions early, which clients see as refusals, never as lost
// or doubled writes.
func (s *system) nowMs() uint64 {
	ms := s.node.opts.WallClock().UnixMilli()
	return max(uint64(max(ms, 0)), s.store.Snapshot().Clock())
}

// wakeClock makes the system clock go on before a lease counts from it: it
// stands while no session lives, and then the first tick would end a lease that
// began where it stood. An empty change carries the leader's stamp.
func (s *system) wakeClock(ctx context.Context) error {
	v, err := s.sync(ctx)
	if err != nil || v.SessionCount() > 0 {
		return err
	}
	_, err = s.propose(ctx, broadcast.Txn{})
	return err
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
		r, err := s.proposeHere(txn)
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

// proposeHere proposes at this leader, with its own stamp.
func (s *system) proposeHere(txn broadcast.Txn) (broadcast.Result, error) {
	if _, err := s.leading(); err != nil {
		return broadcast.Result{}, err
	}
	txn.Stamp = s.nowMs()
	cmd, err := broadcast.EncodeTxn(txn)
	if err != nil {
		return broadcast.Result{}, err
	}
	f := s.raft.Apply(cmd, enqueueTimeout)
	if err := s.await(f); err != nil {
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
	t.Handle(methodSystemPropose, func(_ context.Context, _ base.NodeID, req []byte) ([]byte, error) {
		cmd, err := broadcast.DecodeCommand(req)
		if err != nil {
			return nil, err
		}
		if cmd.Kind != broadcast.CommandTxn {
			return nil, base.Invalid("command", "only transactions are forwarded")
		}
		res, err := s.proposeHere(broadcast.Txn{Conditions: cmd.Conditions, Then: cmd.Then})
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
