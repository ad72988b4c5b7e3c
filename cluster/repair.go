package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// maxSystemVoters bounds the voters of the system group; further nodes hold a
// full copy as learners.
const maxSystemVoters = 5

// damageReport tells the system leader that a replica must be rebuilt.
type damageReport struct {
	Group      base.GroupID `json:"group"`
	Node       base.NodeID  `json:"node"`
	Generation uint64       `json:"generation"`
}

// reportDamage asks for a new generation of every damaged replica of this node
// (R3): the record gets one, the leader exchanges the members, and this node
// starts the new replica empty. It waits while the others are no quorum by
// themselves: what this replica still holds may then be the last copy.
func (n *Node) reportDamage() {
	n.mu.Lock()
	var damaged []damageReport
	for id, r := range n.mu.replicas {
		if r.damage.Load() != nil {
			damaged = append(damaged, damageReport{Group: id, Node: n.opts.NodeID, Generation: r.generation})
		}
	}
	n.mu.Unlock()
	for _, d := range damaged {
		if err := n.replaceDamaged(n.ctx, d); err != nil && n.ctx.Err() == nil {
			n.logger.Warn("asking to rebuild a damaged replica", "group", d.Group.String(), "error", err)
		}
	}
}

// replaceDamaged makes the record give a replica its next generation, if the
// others are a quorum by themselves. What was found out about them holds when the
// change is applied: the others were asked after the record was read, and the
// change counts only on that very record. So of two replicas of a shard that
// judge each other healthy at the same time, one is replaced, and the other asks
// again and is told that the first one does not vote yet.
func (n *Node) replaceDamaged(ctx context.Context, d damageReport) error {
	ctx, cancel := context.WithTimeout(ctx, systemProposeTimeout)
	defer cancel()
	_, err := n.system.Load().update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		if err := n.othersAreQuorum(ctx, v, d); err != nil {
			return broadcast.Txn{}, err
		}
		return replaceReplica(v, d)
	})
	return err
}

// othersAreQuorum asks the other voters of the record whether they vote under
// their recorded ids. One that is being rebuilt itself is in the record and
// answers, but does not vote yet and may hold nothing: it does not count.
func (n *Node) othersAreQuorum(ctx context.Context, v *meta.View, d damageReport) error {
	rec := v.Shard(d.Group)
	if rec == nil {
		return nil
	}
	voters, healthy := 0, 0
	for _, r := range rec.Replicas {
		if r.Role != meta.RoleVoter {
			continue
		}
		voters++
		if r.Node != d.Node && n.votes(ctx, d.Group, r) {
			healthy++
		}
	}
	if healthy < voters/2+1 {
		return &base.Error{Cause: base.ErrNoQuorum, Group: &d.Group, Ordinal: -1,
			Hint: fmt.Sprintf("only %d of %d voters are healthy; the damaged replica is kept until the others are a quorum", healthy, voters)}
	}
	if n.judged != nil {
		n.judged()
	}
	return nil
}

// votes asks a node whether its replica of a group is undamaged and a voter.
func (n *Node) votes(ctx context.Context, g base.GroupID, r meta.Replica) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*n.opts.ElectionTimeout)
	defer cancel()
	raw, err := n.transport.Call(ctx, r.Node, methodStatus, nil)
	var st NodeStatus
	if err != nil || json.Unmarshal(raw, &st) != nil {
		return false
	}
	return slices.ContainsFunc(st.Groups, func(s GroupStatus) bool {
		return s.Group == g && s.Replica == r.ReplicaID && s.Voter && s.Damage == "" && s.State != "stopped"
	})
}

// replaceReplica gives a damaged replica the next generation, as a learner that
// becomes a voter again when it has caught up.
func replaceReplica(v *meta.View, d damageReport) (broadcast.Txn, error) {
	rec := v.Shard(d.Group)
	if rec == nil {
		return broadcast.Txn{}, nil
	}
	replicas := slices.Clone(rec.Replicas)
	for i := range replicas {
		r := &replicas[i]
		if r.Node == d.Node && r.Generation == d.Generation {
			// Generations are the shard's, not the node's: another node's replica
			// may have been replaced before, and taken the next number.
			r.Generation = rec.MaxGeneration + 1
			r.ReplicaID = base.MakeReplicaID(r.Node, r.Generation)
			return meta.UpdateReplicasTxn(v, d.Group, replicas, rec.PreferredLeader)
		}
	}
	return broadcast.Txn{}, nil
}

// wantedMembers are the members that the system group should have: every
// admitted node under its newest generation, the first maxSystemVoters of them
// (in the order of their ids) as voters.
func (s *system) wantedMembers(v *meta.View) []member {
	var out []member
	for _, rec := range v.Nodes() {
		if rec.DiskID == "" || rec.State == meta.NodeRemoved {
			continue
		}
		out = append(out, member{id: s.systemReplica(rec.ID), node: rec.ID, voter: len(out) < maxSystemVoters})
	}
	return out
}

// systemReplica is the newest known replica id of a node in the system group:
// what the configuration says, or what the node asked for by rejoining.
func (s *system) systemReplica(node base.NodeID) raft.ServerID {
	best := uint64(1)
	if f := s.raft.GetConfiguration(); f.Error() == nil {
		for _, srv := range f.Configuration().Servers {
			if n, gen, ok := base.ReplicaID(srv.ID).Split(); ok && n == node {
				best = max(best, gen)
			}
		}
	}
	s.node.mu.Lock()
	best = max(best, s.node.mu.rejoins[node])
	s.node.mu.Unlock()
	return raft.ServerID(base.MakeReplicaID(node, best))
}

// rejoinRequest asks the system leader to exchange this node's replica.
type rejoinRequest struct {
	Node       base.NodeID `json:"node"`
	Disk       base.DiskID `json:"disk"`
	Generation uint64      `json:"generation"`
}

// rejoin asks any node that can be reached, until the system leader has made
// the new generation of this node's system replica a member.
func (n *Node) rejoin() {
	for {
		id := n.Identity()
		if n.isSystemMember() {
			if err := n.changeIdentity(func(id *Identity) { id.Rejoin = false }); err != nil {
				n.fatal(err)
			}
			return
		}
		msg, err := json.Marshal(rejoinRequest{Node: id.Node, Disk: id.Disk, Generation: id.SystemGeneration})
		if err != nil {
			n.fatal(err)
			return
		}
		for _, peer := range slices.Sorted(maps.Keys(n.addresses.all())) {
			ctx, cancel := context.WithTimeout(n.ctx, 5*time.Second)
			_, err = n.transport.Call(ctx, peer, methodRejoin, msg)
			cancel()
			if err == nil {
				break
			}
			n.logger.Warn("asking to rejoin the system group", "peer", string(peer), "error", err)
		}
		select {
		case <-n.ctx.Done():
			return
		case <-time.After(n.opts.CheckInterval):
		}
	}
}

func (n *Node) isSystemMember() bool {
	s := n.system.Load()
	if s == nil {
		return false
	}
	f := s.raft.GetConfiguration()
	if f.Error() != nil {
		return false
	}
	return slices.ContainsFunc(f.Configuration().Servers, func(srv raft.Server) bool { return srv.ID == raft.ServerID(s.replica) })
}

// serveRejoin notes the new generation at the system leader, which exchanges the
// member in its next look; elsewhere it passes the request on.
func (n *Node) serveRejoin(ctx context.Context, from base.NodeID, req []byte) ([]byte, error) {
	var r rejoinRequest
	if err := json.Unmarshal(req, &r); err != nil {
		return nil, base.Invalid("rejoin", err.Error())
	}
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	if _, err := s.leading(); err != nil {
		leader := s.leaderNode()
		if leader == "" || leader == n.opts.NodeID || leader == from {
			return nil, s.notLeader()
		}
		return n.transport.Call(ctx, leader, methodRejoin, req)
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	if rec := v.Node(r.Node); rec == nil || rec.DiskID != r.Disk {
		return nil, fmt.Errorf("node %s with disk %s is not a node of this cluster: %w", r.Node, r.Disk, base.ErrIdentity)
	}
	n.mu.Lock()
	n.mu.rejoins[r.Node] = max(n.mu.rejoins[r.Node], r.Generation)
	n.mu.Unlock()
	return nil, nil
}

// renewOwnRecord keeps this node's addresses in the metadata true, when it was
// started with others.
func (n *Node) renewOwnRecord(s *system, v *meta.View) {
	rec := v.Node(n.opts.NodeID)
	if rec == nil || rec.DiskID == "" {
		return
	}
	want := meta.Node{ID: rec.ID, DiskID: n.Identity().Disk, RaftAddr: n.RaftAddr(), GRPCAddr: n.opts.GRPCAddr,
		HTTPAddr: n.opts.HTTPAddr, Zone: n.opts.Zone}
	if rec.RaftAddr == want.RaftAddr && rec.GRPCAddr == want.GRPCAddr && rec.HTTPAddr == want.HTTPAddr && rec.Zone == want.Zone {
		return
	}
	ctx, cancel := context.WithTimeout(n.ctx, systemProposeTimeout)
	defer cancel()
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return meta.AdmitNodeTxn(v, want) })
	if err != nil && n.ctx.Err() == nil {
		n.logger.Warn("renewing this node's addresses", "error", err)
	}
}

// purgeDropped forgets dropped states once every shard's leader has dropped
// them.
func (n *Node) purgeDropped(ctx context.Context, s *system, v *meta.View) error {
	dropped := v.Dropped()
	// A checkpoint that runs tells a restore which states were dropped behind its
	// barriers; and a founding that restores has no shards yet that could tell.
	if len(dropped) == 0 || v.RunningCheckpoint() != nil || founding(v) {
		return nil
	}
	// A state may be forgotten only when no shard can still hold it: every
	// shard must say so, through its leader.
	status, err := n.Status(ctx)
	if err != nil {
		return err
	}
	left := map[uint32]bool{}
	seen := map[base.GroupID]bool{}
	for _, ns := range status.Nodes {
		for _, g := range ns.Groups {
			if g.State == "leader" {
				seen[g.Group] = true
				for _, id := range g.States {
					left[id] = true
				}
			}
		}
	}
	for _, rec := range v.Shards() {
		if !seen[rec.ID] {
			return nil
		}
	}
	var ids []uint32
	for _, d := range dropped {
		if !left[d.ID] {
			ids = append(ids, d.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return meta.PurgeDroppedTxn(v, ids), nil })
	return err
}
