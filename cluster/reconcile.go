package cluster

import (
	"context"
	"errors"
	"runtime"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// reconcileLoop keeps the replicas on this node as the shard map says: it
// starts those that are new, removes those that moved away or were replaced
// by a higher generation, and opens those again whose store asks for it.
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
	if !founding(v) {
		n.restoring.Store(nil)
	}
	if !founding(v) && n.Identity().Founding != nil {
		if err := n.changeIdentity(func(id *Identity) { id.Founding = nil }); err != nil {
			n.fatal(err)
		}
	}
	for _, rec := range v.Shards() {
		if n.asks(rec, replicaOn(rec, n.opts.NodeID)) {
			n.reconcileBeside(rec.ID)
		}
	}
}

// replicaOn is the replica that a record gives to a node, nil if none.
func replicaOn(rec *meta.Shard, node base.NodeID) *meta.Replica {
	for i := range rec.Replicas {
		if rec.Replicas[i].Node == node {
			return &rec.Replicas[i]
		}
	}
	return nil
}

// maxOpening bounds the replicas that are opened or closed at once: it takes more
// waiting for the disk than computing.
func maxOpening() int { return max(4, runtime.GOMAXPROCS(0)) }

// reconcileBeside does what the record of a shard asks for on a goroutine of its
// own, so that a replica that is slow to open holds up no other. Per shard there
// is one at most; while it runs, newer records wait for the next look.
func (n *Node) reconcileBeside(id base.GroupID) {
	n.mu.Lock()
	busy := n.mu.reconciling[id]
	n.mu.reconciling[id] = true
	n.mu.Unlock()
	if busy {
		return
	}
	n.spawn(func() {
		changed := false
		select {
		case n.opening <- struct{}{}:
			// It may have waited for long: the newest record counts.
			if v, err := n.metaView(); err == nil && v.Shard(id) != nil {
				rec := v.Shard(id)
				changed = n.reconcileShard(rec, replicaOn(rec, n.opts.NodeID))
			}
			<-n.opening
		case <-n.ctx.Done():
		}
		n.mu.Lock()
		delete(n.mu.reconciling, id)
		n.mu.Unlock()
		if changed { // not after a failure: that waits for the next regular look
			n.poke()
		}
	})
}

// asks says whether a record asks this node, which is self in it, for anything:
// to begin a replica, to end one, or to replace one by a newer generation.
func (n *Node) asks(rec *meta.Shard, self *meta.Replica) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	have := n.mu.replicas[rec.ID]
	switch {
	case n.mu.closed:
		return false
	case have == nil:
		// A node that restarts may see records that are older than what it did:
		// they ask for nothing. A replica that it had once is never had again.
		return self != nil && self.Generation >= n.mu.identity.Replicas[rec.ID]
	default:
		// A replica goes only when a committed record says so; being out of date
		// here can only delay that.
		return self == nil || self.Generation > have.generation || have.stale.Load() != nil
	}
}

// reconcileShard does what a record asks for; it says whether a replica was begun
// or ended.
func (n *Node) reconcileShard(rec *meta.Shard, self *meta.Replica) (changed bool) {
	if !n.asks(rec, self) {
		return false
	}
	n.mu.Lock()
	have := n.mu.replicas[rec.ID]
	n.mu.Unlock()
	// What is done here can not be taken back: no restart may know less than the
	// record that asks for it.
	if err := n.system.Load().note(); err != nil {
		n.logger.Error("noting the metadata", "error", err)
		return false
	}
	if have != nil {
		end := have.retire
		if self != nil && self.Generation == have.generation {
			end = have.endStale
		}
		if err := end(); err != nil {
			n.logger.Error("removing a replica", "group", rec.ID.String(), "error", err)
			return false
		}
		n.setReplica(rec.ID, nil)
	}
	if self == nil {
		return have != nil
	}
	r, err := n.openReplica(rec, *self)
	if err != nil {
		n.logger.Error("opening a replica", "group", rec.ID.String(), "error", err)
		return have != nil
	}
	n.setReplica(rec.ID, r)
	if r.raft != nil {
		r.spawn(r.checkLoop)
		r.spawn(r.watchLag)
	}
	return true
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
		if s := n.system.Load(); s != nil {
			if err := s.note(); err != nil {
				n.logger.Warn("noting the metadata", "error", err)
			}
		}
		v, err := n.metaView()
		if err != nil || v.Cluster() == nil {
			n.resumeFounding()
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
		n.reportDamage()
	}
}

// checkLoop looks after one running replica, beside the others: a peer that
// does not answer holds up only what waits for it.
func (r *replica) checkLoop() {
	tick := time.NewTicker(r.opts.CheckInterval)
	defer tick.Stop()
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-tick.C:
		}
		if v, err := r.node.metaView(); err == nil && v.Cluster() != nil {
			r.check(v)
		}
	}
}

// founding says whether the cluster's founding has not ended yet.
func founding(v *meta.View) bool { return v.FoundingUnderWay() }

// check looks after one running replica: its log's size, and, as the leader,
// the clock, ended sessions, declarations, membership and balance.
func (r *replica) check(v *meta.View) {
	r.findStale()
	if err := r.snapshotIfLarge(); err != nil {
		r.logger.Warn("taking a snapshot", "error", err)
	}
	if r.machine.Header().Undropped > 0 {
		// The space of dropped states is given back once their drop is durable.
		r.purging = purgeRounds
		if err := r.flush(); err != nil {
			r.logger.Warn("flushing for dropped states", "error", err)
		}
	}
	if _, err := r.machine.DurableIndex(); err != nil {
		r.logger.Warn("reading the durable index", "error", err)
	}
	if age, marked := r.hashedAt.age(time.Now()); marked && age > markKept {
		r.hashedAt.clear()
		r.machine.ReleaseMarks()
	}
	if !r.alone && r.lag.level.Load() && r.ready() == "" {
		r.alone = r.removeReplaced()
	}
	o, err := r.leading()
	if err != nil {
		r.balanceSince = time.Time{}
		return
	}
	polled := r.pollMembers()
	r.steerClock(o, polled)
	if err := r.forget(v); err != nil {
		r.logger.Debug("forgetting sessions", "error", err)
	}
	if err := r.declareAll(r.ctx, v); err != nil {
		r.logger.Debug("declaring states", "error", err)
	}
	if err := r.drop(v); err != nil {
		r.logger.Debug("dropping states", "error", err)
	}
	if r.purging > 0 {
		// An idle shard needs an entry for it, on every replica.
		r.purging--
		if _, err := r.command(r.ctx, raftfsm.AppendTick(nil, o.clock.NowMs())); err != nil {
			r.logger.Debug("purging dropped states", "error", err)
		}
	}
	if rec := v.Shard(r.id); rec != nil {
		if err := r.changeMembers(rec, polled); err != nil {
			r.logger.Warn("changing the members", "error", err)
		}
		if r.machine.Header().Fence == 0 { // who leads then leads for a reason
			r.balance(rec, polled)
		}
	}
}

// changeMembers brings the group a step nearer to its record, but not while it is
// being rolled back: who is prepared then is to stay. It does not wait for a rollback
// that is being proposed, which needs a quorum: the next look comes.
func (r *replica) changeMembers(rec *meta.Shard, polled map[raft.ServerID]transport.TermAnswer) error {
	if !r.rollback.members.TryLock() {
		return nil
	}
	defer r.rollback.members.Unlock()
	if r.machine.Header().Fence != 0 {
		return nil
	}
	return r.reconcileMembers(membersOf(rec), polled)
}

// purgeRounds is for how many looks the leader goes on with ticks after its own
// dropped families are gone: the others may be a little later.
const purgeRounds = 5

// snapshotIfLarge cuts the log by bytes (W2): first a flush beside the apply
// goroutine, then a snapshot, keeping what followers that are a little behind
// need, and more, up to a bound, for one that is alive and further behind.
func (r *replica) snapshotIfLarge() error {
	// What is kept for a slow follower must not call for a snapshot again and
	// again: only growth does.
	grown := r.log.Bytes() >= r.keptBytes.Load()+r.opts.LogMaxBytes-r.opts.LogKeepBytes
	if r.log.Bytes() < r.opts.LogMaxBytes || !grown || !r.snapping.CompareAndSwap(false, true) {
		return nil
	}
	r.spawn(func() {
		defer r.snapping.Store(false)
		if _, err := r.takeSnapshot(r.ctx, r.opts.LogKeepBytes); err != nil && r.ctx.Err() == nil {
			r.logger.Warn("taking a snapshot", "error", err)
		}
		r.keptBytes.Store(r.log.Bytes())
	})
	return nil
}

// takeSnapshot takes a Raft snapshot and cuts the log behind it, keeping about
// keep bytes. It returns the engine index that is safe on disk.
func (r *replica) takeSnapshot(ctx context.Context, keep uint64) (uint64, error) {
	if err := r.flush(); err != nil {
		return 0, err
	}
	rc := r.reloadable(r.log, keep)
	if slow, ok := r.slowest(); ok && r.log.BytesFrom(slow+1) <= r.opts.LogHardBytes {
		if last, err := r.log.LastIndex(); err == nil && last > slow {
			// raft counts from the last entry at the time of the cut: leave room
			// for what is written until then, as far as the bound allows.
			most := r.reloadable(r.log, r.opts.LogHardBytes).TrailingLogs
			rc.TrailingLogs = max(rc.TrailingLogs, min(2*(last-slow), most))
		}
	}
	if err := r.raft.ReloadConfig(rc); err != nil {
		return 0, err
	}
	if err := r.awaitIn(ctx, r.raft.Snapshot()); err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) {
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
func (r *replica) steerClock(o *office, answers map[raft.ServerID]transport.TermAnswer) {
	voters, self, err := r.voters()
	if err != nil {
		return
	}
	var readings []int64
	if self {
		readings = append(readings, r.node.opts.WallClock().UnixMilli())
	}
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
	// All of them: many sessions may have ended at one revision, and the entry
	// says that all up to its revision are forgotten.
	ended, complete := v.Ended(after, 0)
	if !complete {
		return r.forgetDead()
	}
	if len(ended) == 0 {
		return nil
	}
	ids := make([]base.SessionID, len(ended))
	for i, e := range ended {
		ids[i] = e.ID
	}
	_, err := r.command(r.ctx, raftfsm.AppendForget(nil, ended[len(ended)-1].Revision, ids))
	return err
}

// forgetDead is for a shard that has missed so much that the list of ended
// sessions was cut: it compares what it remembers with what lives. The view is
// taken after the sessions were read: one that is not in it then has ended.
func (r *replica) forgetDead() error {
	view, err := r.machine.View()
	if err != nil {
		return err
	}
	known, err := view.SessionIDs()
	view.Close()
	if err != nil {
		return err
	}
	v, err := r.node.metaView()
	if err != nil {
		return err
	}
	var gone []base.SessionID
	for _, id := range known {
		// A session that this copy of the metadata has not heard of yet lives.
		if id < v.NextSessionID() && !v.SessionAlive(id) {
			gone = append(gone, id)
		}
	}
	_, err = r.command(r.ctx, raftfsm.AppendForget(nil, v.Revision(), gone))
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
	_, err := r.command(r.ctx, raftfsm.AppendDrop(nil, ids))
	return err
}

// balance hands the office to the preferred leader once that one has been
// healthy and level for a while.
func (r *replica) balance(rec *meta.Shard, polled map[raft.ServerID]transport.TermAnswer) {
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
	a, ok := polled[raft.ServerID(to.ReplicaID)]
	if !ok || a.LastIndex+1000 < last {
		r.balanceSince = time.Time{}
		return
	}
	switch {
	case r.balanceSince.IsZero():
		r.balanceSince = time.Now()
	case time.Since(r.balanceSince) >= r.opts.BalanceDelay:
		r.balanceSince = time.Time{}
		ctx, cancel := context.WithTimeout(r.ctx, r.opts.ElectionTimeout)
		_, err := r.node.transport.Call(ctx, to.Node, methodHello, nil)
		cancel()
		if err != nil { // it drains, or cannot be reached: not now
			return
		}
		if st, err := r.node.groupStatusOf(to.Node, r.id); err != nil || st.DamageFound {
			return
		}
		r.logger.Info("handing over to the preferred leader", "to", string(to.Node))
		ctx, cancel = context.WithTimeout(r.ctx, configTimeout)
		defer cancel()
		if err := r.transferTo(ctx, to.Node); err != nil {
			r.logger.Warn("handing over", "error", err)
		}
	}
}
