package cluster

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// lag is how a replica stands to its leader. raft tells a follower no commit index
// beyond its own log, so that one that has yet to get a million entries looks
// level: the leader is asked.
type lag struct {
	// level: since it was started the replica has led, or has applied all that its
	// leader's log held when it was first asked.
	level atomic.Bool
	// leaderLast is the end of the leader's log when it was last asked.
	leaderLast atomic.Uint64
	// heard is when a leader was last known; at first, when the replica was started.
	heard moment
	// first is what the leader held when it was first asked, 0 before; owned by
	// watchLag.
	first uint64
}

// levelLooks is how many check intervals pass between two looks of a replica that
// is level.
const levelLooks = 5

// leaderPatience is for how many election timeouts a shard may be without a leader
// until a restarted replica counts as ready all the same.
const leaderPatience = 20

// watchLag compares the replica with its leader: often until it is level, and from
// time to time after that.
func (r *replica) watchLag() {
	r.lag.heard.set(time.Now())
	for {
		changed := r.node.changes.wait()
		r.compare()
		pause := levelLooks * r.opts.CheckInterval
		if !r.lag.level.Load() {
			pause = r.opts.CheckInterval / levelLooks
		} else {
			changed = nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-r.ctx.Done():
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
		if r.ctx.Err() != nil {
			return
		}
	}
}

// compare asks the leader for the end of its log.
func (r *replica) compare() {
	if _, err := r.leading(); err == nil {
		r.lag.heard.set(time.Now())
		r.lag.leaderLast.Store(0)
		r.lag.level.Store(true)
		return
	}
	leader := r.leaderNode()
	if leader == "" || leader == r.opts.NodeID {
		return
	}
	r.lag.heard.set(time.Now())
	ctx, cancel := context.WithTimeout(r.ctx, r.opts.ElectionTimeout)
	defer cancel()
	a, err := r.poll.Poll(ctx, leader, r.id)
	if err != nil || !a.Known {
		return
	}
	r.lag.leaderLast.Store(a.LastIndex)
	if r.lag.first == 0 {
		r.lag.first = a.LastIndex
	}
	// What a leader had not committed may have gone with it.
	if has, all := r.progress(); all && has >= min(r.lag.first, a.LastIndex) {
		r.lag.level.Store(true)
	}
}

// progress is the last index up to which the replica has applied everything; level
// says that this is all that raft gave to its state machine.
func (r *replica) progress() (index uint64, level bool) {
	given := r.raft.AppliedIndex()
	has, _ := r.machine.Applied()
	if has >= r.log.NewestCommandAtOrBelow(given) { // the rest never reaches it
		return max(has, given), true
	}
	return has, false
}

// behind says by how much the replica is too far behind its leader, or that it does
// not know yet; empty if it is near enough.
//
// A restarted replica whose shard has no leader cannot know. It counts as near
// enough after a while if other groups of its node have leaders: then it is the
// shard that is lost, not this node that is cut off, and neither waiting here nor
// restarting other nodes later makes it better or worse. Whether a shard has a
// quorum is told by the cluster's status, not by a node's readiness.
func (r *replica) behind() string {
	if r.lag.level.Load() {
		has, _ := r.progress()
		if newest := max(r.lag.leaderLast.Load(), r.raft.CommitIndex()); newest > has+r.opts.AppliedLagBound {
			return fmt.Sprintf("replica of %s is %d entries behind", r.id, newest-has)
		}
		return ""
	}
	if _, err := r.leading(); err == nil {
		return ""
	}
	if r.leaderNode() != "" {
		return fmt.Sprintf("replica of %s is catching up with its leader", r.id)
	}
	age, started := r.lag.heard.age(time.Now())
	if !started || age < leaderPatience*r.opts.ElectionTimeout {
		return fmt.Sprintf("replica of %s has not heard of a leader yet", r.id)
	}
	if !r.node.connected() {
		return fmt.Sprintf("replica of %s has heard of no leader, nor has any other group of this node", r.id)
	}
	return ""
}

// connected says whether a group of this node hears of its leader.
func (n *Node) connected() bool {
	for _, g := range n.groups() {
		if g.leaderNode() != "" {
			return true
		}
	}
	return false
}

// member says whether the replica is in its shard's configuration: in the committed
// one, or, before it has heard of any, in the newest that it has.
func (r *replica) member() bool {
	var servers []raft.Server
	if index, conf := r.machine.Configuration(); index > 0 {
		servers = raft.DecodeConfiguration(conf).Servers
	} else if f := r.raft.GetConfiguration(); f.Error() == nil {
		servers = f.Configuration().Servers
	}
	return slices.ContainsFunc(servers, func(s raft.Server) bool { return s.ID == raft.ServerID(r.replica) })
}
