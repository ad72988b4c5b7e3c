package cluster

import (
	"errors"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// reconcileLoop keeps the replicas on this node as the shard map says: it
// starts those that are new, and removes those that moved away or were replaced
// by a higher generation.
func (n *Node) reconcileLoop() {
	n.spawn(n.announceLeaders)
	for {
		changed := n.changes.wait()
		if v, err := n.metaView(); err == nil && v.Cluster() != nil {
			n.reconcile(v)
		}
		select {
		case <-n.ctx.Done():
			return
		case <-changed:
		case <-time.After(n.opts.CheckInterval):
		}
	}
}

func (n *Node) reconcile(v *meta.View) {
	peers := map[base.NodeID]string{}
	for _, rec := range v.Nodes() {
		if rec.ID != n.opts.NodeID && rec.RaftAddr != "" {
			peers[rec.ID] = rec.RaftAddr
		}
	}
	if err := n.addresses.learn(peers); err != nil {
		n.logger.Warn("keeping peer addresses", "error", err)
	}
	for _, rec := range v.Shards() {
		var self *meta.Replica
		for i := range rec.Replicas {
			if rec.Replicas[i].Node == n.opts.NodeID {
				self = &rec.Replicas[i]
			}
		}
		n.reconcileShard(rec, self)
	}
}

func (n *Node) reconcileShard(rec *meta.Shard, self *meta.Replica) {
	n.mu.Lock()
	have, closed := n.mu.replicas[rec.ID], n.mu.closed
	n.mu.Unlock()
	if closed || have == nil && self == nil {
		return
	}
	if have != nil && self != nil && have.generation == self.Generation {
		return
	}
	if have != nil {
		// A replica goes only when a committed record says so; being out of date
		// here can only delay that.
		if self != nil && self.Generation < have.generation {
			return
		}
		if err := have.destroy(); err != nil {
			n.logger.Error("removing a replica", "group", rec.ID.String(), "error", err)
			return
		}
		n.setReplica(rec.ID, nil)
	}
	if self == nil {
		return
	}
	r, err := n.openReplica(rec, *self)
	if err != nil {
		n.logger.Error("opening a replica", "group", rec.ID.String(), "error", err)
		return
	}
	n.setReplica(rec.ID, r)
	n.poke()
}

func (n *Node) setReplica(g base.GroupID, r *replica) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r == nil {
		delete(n.mu.replicas, g)
		return
	}
	n.mu.replicas[g] = r
}

// checkLoop does what has to be looked at from time to time.
func (n *Node) checkLoop() {
	timer := time.NewTimer(n.opts.CheckInterval)
	defer timer.Stop()
	for {
		changed := n.changes.wait()
		select {
		case <-n.ctx.Done():
			return
		case <-timer.C:
		case <-changed:
			// A founding goes on at every change, other duties have time.
			if v, err := n.metaView(); err != nil || !founding(v) {
				continue
			}
		}
		timer.Reset(n.opts.CheckInterval)
		v, err := n.metaView()
		if err != nil || v.Cluster() == nil {
			continue
		}
		s := n.system.Load()
		n.renewOwnRecord(s, v)
		if _, err := s.leading(); err == nil {
			n.leadSystem(s, v)
		}
		if err := s.snapshotIfLarge(); err != nil {
			n.logger.Warn("system snapshot", "error", err)
		}
		n.reportDamage(v)
		for _, r := range n.runningReplicas() {
			r.check(v)
		}
	}
}

// founding says whether the cluster's founding has not ended yet.
func founding(v *meta.View) bool {
	op, _, err := v.FoundingOperation()
	return err == nil && op != nil && !op.Finished()
}

// check looks after one running replica: its log's size, and, as the leader,
// the clock, ended sessions, declarations, membership and balance.
func (r *replica) check(v *meta.View) {
	if err := r.snapshotIfLarge(); err != nil {
		r.logger.Warn("taking a snapshot", "error", err)
	}
	if _, err := r.machine.DurableIndex(); err != nil {
		r.logger.Warn("reading the durable index", "error", err)
	}
	o, err := r.leading()
	if err != nil {
		r.balanceSince = time.Time{}
		return
	}
	r.steerClock(o)
	if err := r.forget(v); err != nil {
		r.logger.Debug("forgetting sessions", "error", err)
	}
	if err := r.declareAll(v); err != nil {
		r.logger.Debug("declaring states", "error", err)
	}
	if err := r.drop(v); err != nil {
		r.logger.Debug("dropping states", "error", err)
	}
	if rec := v.Shard(r.id); rec != nil {
		if err := r.reconcileMembers(membersOf(rec)); err != nil {
			r.logger.Warn("changing the members", "error", err)
		}
		r.balance(rec)
	}
}

// snapshotIfLarge cuts the log by bytes (W2): first a flush beside the apply
// goroutine, then a snapshot, keeping what followers that are a little behind
// need, and more, up to a bound, for one that is alive and further behind.
func (r *replica) snapshotIfLarge() error {
	if r.log.Bytes() < r.opts.LogMaxBytes || !r.snapping.CompareAndSwap(false, true) {
		return nil
	}
	r.wg.Add(1)
	go func() {
		defer r.wg.Done()
		defer r.snapping.Store(false)
		if _, err := r.takeSnapshot(r.opts.LogKeepBytes); err != nil && r.ctx.Err() == nil {
			r.logger.Warn("taking a snapshot", "error", err)
		}
	}()
	return nil
}

// takeSnapshot takes a Raft snapshot and cuts the log behind it, keeping about
// keep bytes. It returns the engine index that is safe on disk.
func (r *replica) takeSnapshot(keep uint64) (uint64, error) {
	if err := r.flush(); err != nil {
		return 0, err
	}
	rc := r.reloadable(r.log, keep)
	if slow, ok := r.slowest(); ok && r.log.BytesFrom(slow+1) <= r.opts.LogHardBytes {
		if last, err := r.log.LastIndex(); err == nil && last > slow {
			rc.TrailingLogs = max(rc.TrailingLogs, last-slow)
		}
	}
	if err := r.raft.ReloadConfig(rc); err != nil {
		return 0, err
	}
	if err := r.raft.Snapshot().Error(); err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) {
		return 0, err
	}
	return r.machine.DurableIndex()
}

func (r *replica) flush() error {
	store, release, err := r.machine.Store()
	if err != nil {
		return err
	}
	defer release()
	return store.Flush()
}

// slowest is the lowest last index of the voters and learners that answer now;
// only a leader knows.
func (r *replica) slowest() (uint64, bool) {
	if _, err := r.leading(); err != nil {
		return 0, false
	}
	low, any := uint64(0), false
	for _, a := range r.pollMembers() {
		if !any || a.LastIndex < low {
			low, any = a.LastIndex, true
		}
	}
	return low, any
}

// steerClock polls a quorum's clocks for the shard clock (W5).
func (r *replica) steerClock(o *office) {
	voters, self, err := r.voters()
	if err != nil {
		return
	}
	var readings []int64
	if self {
		readings = append(readings, r.node.opts.WallClock().UnixMilli())
	}
	answers := r.pollMembers()
	for _, s := range voters {
		if a, ok := answers[s.ID]; ok {
			readings = append(readings, a.WallClock/int64(time.Millisecond))
		}
	}
	if target, ok := agreedClock(readings, len(voters)/2+1); ok {
		o.clock.Steer(target)
	}
}

// forget tells the shard's log which sessions have ended since the last time.
func (r *replica) forget(v *meta.View) error {
	h := r.machine.Header()
	after := h.Forgotten
	if h.Sessions == 0 {
		return nil // nothing to forget
	}
	ended, complete := v.Ended(after, 4096)
	if !complete {
		return r.forgetAllBut(v)
	}
	if len(ended) == 0 {
		return nil
	}
	ids := make([]base.SessionID, len(ended))
	for i, e := range ended {
		ids[i] = e.ID
	}
	_, err := r.command(raftfsm.AppendForget(nil, ended[len(ended)-1].Revision, ids))
	return err
}

// forgetAllBut is for a shard that has missed so much that the list of ended
// sessions was cut: it compares what it remembers with what lives.
func (r *replica) forgetAllBut(v *meta.View) error {
	view, err := r.machine.View()
	if err != nil {
		return err
	}
	defer view.Close()
	known, err := view.SessionIDs()
	if err != nil {
		return err
	}
	var gone []base.SessionID
	for _, id := range known {
		if !v.SessionAlive(id) {
			gone = append(gone, id)
		}
	}
	_, err = r.command(raftfsm.AppendForget(nil, max(v.EndedFloor(), r.machine.Header().Forgotten), gone))
	return err
}

// drop removes the states that were dropped.
func (r *replica) drop(v *meta.View) error {
	h := r.machine.Header()
	var ids []engine.FamilyID
	for _, d := range v.Dropped() {
		if h.Declaration(engine.FamilyID(d.ID)) != nil {
			ids = append(ids, engine.FamilyID(d.ID))
		}
	}
	if len(ids) == 0 {
		return nil
	}
	_, err := r.command(raftfsm.AppendDrop(nil, ids))
	return err
}

// balance hands the office to the preferred leader once that one has been
// healthy and level for a while.
func (r *replica) balance(rec *meta.Shard) {
	if rec.PreferredLeader == "" || rec.PreferredLeader == r.opts.NodeID {
		r.balanceSince = time.Time{}
		return
	}
	var to *meta.Replica
	for i := range rec.Replicas {
		if rec.Replicas[i].Node == rec.PreferredLeader && rec.Replicas[i].Role == meta.RoleVoter {
			to = &rec.Replicas[i]
		}
	}
	last, err := r.log.LastIndex()
	if to == nil || err != nil {
		return
	}
	a, ok := r.pollMembers()[raft.ServerID(to.ReplicaID)]
	if !ok || a.LastIndex+1000 < last {
		r.balanceSince = time.Time{}
		return
	}
	switch {
	case r.balanceSince.IsZero():
		r.balanceSince = time.Now()
	case time.Since(r.balanceSince) >= r.opts.BalanceDelay:
		r.balanceSince = time.Time{}
		r.logger.Info("handing over to the preferred leader", "to", string(to.Node))
		if err := r.transferTo(to.Node); err != nil {
			r.logger.Warn("handing over", "error", err)
		}
	}
}
