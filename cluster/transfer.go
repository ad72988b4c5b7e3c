package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// transfers are the hand-overs of this leader's term that raft may not be done
// with.
//
// raft asks the replication to a follower to hurry through a channel that has room
// for one, and waits for the answer no longer than an election timeout. When a
// follower that is slow or cut off has not answered, the question stays in the
// channel. A second transfer to that follower then waits for room, and if the
// leader is deposed meanwhile it waits for ever, because the replication that
// would make room has ended. raft then takes itself for a leader in transfer for
// the rest of its life: it refuses all proposals of whatever term it leads, and
// heartbeats all the same. So after a transfer of which raft did not say how it
// ended, no second one goes to the same follower in the same term (CL7).
type transfers struct {
	sync.Mutex
	term uint64
	open map[raft.ServerID]bool
}

// begin notes a transfer; false if one to this follower may be open.
func (t *transfers) begin(term uint64, to raft.ServerID) bool {
	t.Lock()
	defer t.Unlock()
	if t.term != term {
		t.term, t.open = term, map[raft.ServerID]bool{}
	}
	if t.open[to] {
		return false
	}
	t.open[to] = true
	return true
}

// end takes a transfer's result: only a refusal says that raft has left nothing.
// term is the term by now.
func (t *transfers) end(term uint64, to raft.ServerID, err error) {
	if errors.Is(err, raft.ErrLeadershipTransferInProgress) || errors.Is(err, raft.ErrNotLeader) {
		t.Lock()
		delete(t.open, to)
		t.Unlock()
		return
	}
	t.begin(term, to) // if the term changed before raft took it
}

// transfer hands the office to a voter. All transfers go through it.
func (g *group) transfer(ctx context.Context, s raft.Server) error {
	if !g.transfers.begin(g.raft.CurrentTerm(), s.ID) {
		id := g.id
		return &base.Error{Cause: base.ErrNotReady, Group: &id, Ordinal: -1,
			Hint: fmt.Sprintf("an earlier hand-over to node %s has not ended; hand over to another node, or stop this one", s.Address)}
	}
	failpoint.Hit("cluster.transfer.begin")
	err := g.awaitIn(ctx, g.raft.LeadershipTransferToServer(s.ID, s.Address))
	g.transfers.end(g.raft.CurrentTerm(), s.ID, err)
	if err != nil {
		return fmt.Errorf("handing %s over to %s: %w: %v", g.id, s.Address, base.ErrNotReady, err)
	}
	failpoint.Hit("cluster.transfer.end")
	return nil
}

// transferTo hands the office to the replica on a node.
func (g *group) transferTo(ctx context.Context, node base.NodeID) error {
	voters, _, err := g.voters()
	if err != nil {
		return err
	}
	for _, s := range voters {
		if base.NodeID(s.Address) == node {
			if s.ID == raft.ServerID(g.replica) {
				return nil
			}
			return g.transfer(ctx, s)
		}
	}
	return &base.Error{Cause: base.ErrInvalid, Field: "to", Ordinal: -1, Hint: fmt.Sprintf("node %s has no voting replica of %s", node, g.id)}
}

// transferAway hands the office to any other voter: to the one that has most of
// the log among those that answer, or else to the next.
func (g *group) transferAway(ctx context.Context) error {
	voters, _, err := g.voters()
	if err != nil {
		return err
	}
	seen := g.pollMembers()
	voters = slices.DeleteFunc(slices.Clone(voters), func(s raft.Server) bool {
		_, answers := seen[s.ID]
		return !answers || s.ID == raft.ServerID(g.replica)
	})
	slices.SortFunc(voters, func(a, b raft.Server) int { return cmp.Compare(seen[b.ID].LastIndex, seen[a.ID].LastIndex) })
	id := g.id
	err = &base.Error{Cause: base.ErrNotReady, Group: &id, Ordinal: -1, Hint: "no other voter answers"}
	for _, s := range voters {
		if err = g.transfer(ctx, s); err == nil || ctx.Err() != nil || g.raft.State() != raft.Leader {
			return err
		}
	}
	return err
}
