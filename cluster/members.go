package cluster

import (
	"context"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// member is a replica that a group should have.
type member struct {
	id    raft.ServerID
	node  base.NodeID
	voter bool
}

func membersOf(rec *meta.Shard) []member {
	out := make([]member, len(rec.Replicas))
	for i, r := range rec.Replicas {
		out[i] = member{id: raft.ServerID(r.ReplicaID), node: r.Node, voter: r.Role == meta.RoleVoter}
	}
	return out
}

// configTimeout bounds one change of a Raft configuration.
const configTimeout = 10 * time.Second

// reconcileMembers moves the group's configuration one step towards what is
// wanted: first out with replicas that are not wanted (a replaced generation
// never answers again), then in with new ones as learners, then learners that
// have caught up become voters. It runs on the leader; one change at a time.
func (g *group) reconcileMembers(want []member, polled map[raft.ServerID]transport.TermAnswer) error {
	f := g.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return err
	}
	have := map[raft.ServerID]raft.Server{}
	for _, s := range f.Configuration().Servers {
		have[s.ID] = s
	}
	wanted := map[raft.ServerID]bool{}
	for _, m := range want {
		wanted[m.id] = true
	}
	ctx, cancel := context.WithTimeout(g.ctx, configTimeout)
	defer cancel()
	if !wanted[raft.ServerID(g.replica)] {
		if len(have) < 2 {
			return nil // nobody else is there yet
		}
		// Somebody else must remove us: hand over first.
		return g.transferAway(ctx)
	}
	for id, s := range have {
		if !wanted[id] {
			g.logger.Info("removing a member", "member", string(id), "suffrage", s.Suffrage.String())
			failpoint.Hit("cluster.members.before-remove")
			err := g.awaitIn(ctx, g.raft.RemoveServer(id, 0, configTimeout))
			failpoint.Hit("cluster.members.removed")
			return err
		}
	}
	for _, m := range want {
		if _, ok := have[m.id]; !ok {
			g.logger.Info("adding a learner", "member", string(m.id))
			err := g.awaitIn(ctx, g.raft.AddNonvoter(m.id, raft.ServerAddress(m.node), 0, configTimeout))
			failpoint.Hit("cluster.members.learner-added")
			return err
		}
	}
	return g.promote(ctx, want, have, polled)
}

// promote makes a voter of a learner that holds all that was committed when this
// leader first looked at it (R3); the newest commit would be a moving target.
func (g *group) promote(ctx context.Context, want []member, have map[raft.ServerID]raft.Server, polled map[raft.ServerID]transport.TermAnswer) error {
	commit := g.raft.CommitIndex()
	for _, m := range want {
		if !m.voter || have[m.id].Suffrage == raft.Voter {
			continue
		}
		need := g.promoteAt(m.id, commit)
		if polled == nil {
			polled = g.pollMembers()
		}
		if a, ok := polled[m.id]; ok && a.LastIndex >= need {
			g.logger.Info("promoting a learner that has caught up", "member", string(m.id), "index", a.LastIndex)
			failpoint.Hit("cluster.members.before-promote")
			err := g.awaitIn(ctx, g.raft.AddVoter(m.id, raft.ServerAddress(m.node), 0, configTimeout))
			failpoint.Hit("cluster.members.promoted")
			return err
		}
	}
	return nil
}

// promoteAt is the commit index when this leader first looked at a learner.
func (g *group) promoteAt(id raft.ServerID, commit uint64) uint64 {
	g.life.Lock()
	defer g.life.Unlock()
	if g.learners == nil {
		g.learners = map[raft.ServerID]uint64{}
	}
	if at, ok := g.learners[id]; ok {
		return at
	}
	g.learners[id] = commit
	return commit
}

// pollMembers asks all other members of the newest configuration for their
// term, last index and clock; those that do not answer in time are missing.
func (g *group) pollMembers() map[raft.ServerID]transport.TermAnswer {
	f := g.raft.GetConfiguration()
	if f.Error() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(g.ctx, g.opts.ElectionTimeout)
	defer cancel()
	type reply struct {
		id raft.ServerID
		a  transport.TermAnswer
		ok bool
	}
	servers := f.Configuration().Servers
	replies := make(chan reply, len(servers))
	asked := 0
	for _, s := range servers {
		if s.ID == raft.ServerID(g.replica) {
			continue
		}
		asked++
		go func() {
			a, err := g.poll.Poll(ctx, base.NodeID(s.Address), g.id)
			replies <- reply{id: s.ID, a: a, ok: err == nil && a.Known && a.Replica == base.ReplicaID(s.ID)}
		}()
	}
	out := map[raft.ServerID]transport.TermAnswer{}
	for range asked {
		if r := <-replies; r.ok {
			out[r.id] = r.a
		}
	}
	return out
}

// answerPoll answers the term polls of other nodes from memory.
func (n *Node) answerPoll(groups []base.GroupID) []transport.TermAnswer {
	clock := n.opts.WallClock().UnixNano()
	out := make([]transport.TermAnswer, len(groups))
	for i, id := range groups {
		out[i].WallClock = clock
		g := n.groupForPoll(id)
		if g == nil {
			continue
		}
		last, err := g.log.LastIndex()
		if err != nil {
			continue
		}
		// A replica that holds only a snapshot has an empty log.
		last = max(last, g.raft.LastIndex())
		out[i].Known, out[i].Replica, out[i].Term, out[i].LastIndex = true, g.replica, g.guard.HighestTerm(), last
	}
	return out
}

// groupForPoll is the running, undamaged group of an id, or nil.
func (n *Node) groupForPoll(id base.GroupID) *group {
	if id == base.SystemGroup {
		if s := n.system.Load(); s != nil {
			return &s.group
		}
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if r := n.mu.replicas[id]; r != nil && r.raft != nil && r.damage.Load() == nil {
		return &r.group
	}
	return nil
}
