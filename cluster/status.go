package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// What a node and its cluster say about themselves: status, readiness, liveness,
// and the problems that an operator should see.

// NodeStatus is what this node says about itself.
func (n *Node) NodeStatus(context.Context) (*NodeStatus, error) {
	id := n.Identity()
	st := &NodeStatus{Cluster: id.Cluster, Version: Version, Engine: id.Engine, Uptime: time.Since(n.started),
		Node: NodeInfo{ID: id.Node, RaftAddr: n.RaftAddr(), GRPCAddr: n.opts.GRPCAddr, HTTPAddr: n.opts.HTTPAddr, Zone: n.opts.Zone, Alive: true}}
	st.Ready, st.NotReadyReason = n.Ready()
	if v, err := n.metaView(); err == nil {
		st.Revision = v.Revision()
		if rec := v.Node(id.Node); rec != nil {
			st.Node.State = string(rec.State)
		}
	}
	if s := n.system.Load(); s != nil {
		gs := s.group.status()
		gs.Applied = s.store.Snapshot().AppliedIndex()
		gs.Ready = true
		st.Groups = append(st.Groups, gs)
	}
	n.mu.Lock()
	replicas := make([]*replica, 0, len(n.mu.replicas))
	for _, r := range n.mu.replicas {
		replicas = append(replicas, r)
	}
	n.mu.Unlock()
	for _, r := range replicas {
		st.Groups = append(st.Groups, r.status())
	}
	slices.SortFunc(st.Groups, func(a, b GroupStatus) int { return int(int64(a.Group) - int64(b.Group)) })
	return st, nil
}

// status of what every group has.
func (g *group) status() GroupStatus {
	st := GroupStatus{Group: g.id, Replica: g.replica, State: "stopped"}
	if g.raft == nil {
		return st
	}
	st.Term, st.Commit, st.Applied, st.Last = g.raft.CurrentTerm(), g.raft.CommitIndex(), g.raft.AppliedIndex(), g.raft.LastIndex()
	st.Leader, st.LogBytes = g.leaderNode(), g.log.Bytes()
	_, self, err := g.voters()
	st.Voter = err == nil && self
	switch g.raft.State() {
	case raft.Leader:
		st.State = "leader"
	case raft.Candidate:
		st.State = "candidate"
	case raft.Follower:
		st.State = "follower"
		if !st.Voter {
			st.State = "learner"
		}
	}
	return st
}

func (r *replica) status() GroupStatus {
	st := r.group.status()
	if why := r.damage.Load(); why != nil {
		st.State, st.Damage = "damaged", *why
	}
	st.Epoch, st.Range = 0, r.rng
	if r.machine == nil {
		return st
	}
	h := r.machine.Header()
	st.Applied, st.Epoch, st.Sequence = h.AppliedIndex, h.Epoch, h.Sequence
	for _, d := range h.Declarations() {
		st.States = append(st.States, uint32(d.ID))
	}
	if store, release, err := r.machine.Store(); err == nil {
		s := store.Stats()
		release()
		st.DiskBytes, st.Keys = s.DiskBytes, s.Keys
	}
	st.Ready = r.ready() == ""
	st.Scrubbing, st.DamageFound = r.scrubs.running.Load() > 0, r.scrubs.giving.Load()
	return st
}

// ready says why the replica is not ready to serve, empty if it is: it must be
// in the committed configuration, have caught up since it was started, and its lag
// be bounded (behind). Whether the group has a quorum is no matter of this node.
func (r *replica) ready() string {
	if why := r.damage.Load(); why != nil {
		return fmt.Sprintf("replica of %s is damaged and being rebuilt", r.id)
	}
	if r.raft == nil {
		return fmt.Sprintf("replica of %s is not started", r.id)
	}
	if r.raft.State() == raft.Shutdown {
		return fmt.Sprintf("replica of %s was stopped by its log", r.id)
	}
	if !r.member() {
		return fmt.Sprintf("replica of %s is not a member yet", r.id)
	}
	return r.behind()
}

// Ready says whether this node can serve what it hosts, and why not. A node that
// was ready stays so whatever becomes of others; one that restarts is ready when it
// has caught up with the shards that have a leader.
func (n *Node) Ready() (bool, string) {
	n.mu.Lock()
	draining, closed := n.mu.draining, n.mu.closed
	n.mu.Unlock()
	if draining || closed {
		return false, "the node is draining"
	}
	if why := n.disk.sick(); why != "" {
		return false, why
	}
	v, err := n.metaView()
	if err != nil {
		return false, "the node does not belong to a cluster yet"
	}
	if v.Cluster() == nil {
		return false, n.whyNoMetadata()
	}
	if founding(v) && len(v.Shards()) == 0 {
		return false, "the cluster is being founded"
	}
	for _, rec := range v.Shards() {
		for _, rep := range rec.Replicas {
			if rep.Node != n.opts.NodeID {
				continue
			}
			n.mu.Lock()
			r := n.mu.replicas[rec.ID]
			n.mu.Unlock()
			if r == nil {
				return false, fmt.Sprintf("replica of %s is not started yet", rec.ID)
			}
			if r.generation < rep.Generation {
				return false, fmt.Sprintf("replica of %s is being replaced", rec.ID)
			}
			if why := r.ready(); why != "" {
				return false, why
			}
		}
	}
	return true, ""
}

// whyNoMetadata says in words what a node waits for that has no copy of the
// metadata.
func (n *Node) whyNoMetadata() string {
	why := "the node has no copy of the cluster's metadata yet"
	if n.Identity().Rejoin {
		why += "; its raft log was lost and it asks its peers to be taken in again"
	}
	if s := n.system.Load(); s != nil && s.leaderNode() == "" {
		why += "; it knows no leader of the system group"
	}
	return why
}

// liveLimit is how old the oldest fsync in flight may be before the node counts
// as hung.
const liveLimit = 30 * time.Second

// Live says whether the process and its disk answer, and whether every group of
// the node goes on; it never fails for lack of a quorum.
func (n *Node) Live() error {
	if err := n.log.Err(); err != nil {
		return err
	}
	if age := n.log.OldestPendingSync(); age > liveLimit {
		return fmt.Errorf("an fsync of the raft log has not returned for %s: %w", age.Round(time.Second), base.ErrDiskFailed)
	}
	if n.disk.hung.Load() {
		return nil // raft waits for the disk, which is judged above
	}
	return n.groupsLive(time.Now())
}

// Status asks every node of the cluster; those that do not answer are named.
func (n *Node) Status(ctx context.Context) (*ClusterStatus, error) {
	t, err := n.topology()
	if err != nil {
		return nil, err
	}
	out := &ClusterStatus{Topology: t, Unreachable: map[base.NodeID]string{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, node := range t.Nodes {
		if node.State == string(meta.NodeRemoved) {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			var st NodeStatus
			raw, err := n.transport.Call(ctx, node.ID, methodStatus, nil)
			if err == nil {
				err = json.Unmarshal(raw, &st)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Unreachable[node.ID] = err.Error()
				return
			}
			out.Nodes = append(out.Nodes, st)
		}()
	}
	wg.Wait()
	slices.SortFunc(out.Nodes, func(a, b NodeStatus) int { return strings.Compare(string(a.Node.ID), string(b.Node.ID)) })
	out.Problems = append(problemsOf(out), n.rollbackProblems()...)
	return out, nil
}

// rollbackProblems says that the cluster is being rolled back, and what holds that
// up: writes may be refused meanwhile.
func (n *Node) rollbackProblems() []string {
	v, err := n.metaView()
	if err != nil {
		return nil
	}
	r := v.RunningRollback()
	if r == nil {
		return nil
	}
	out := []string{fmt.Sprintf("operation %d is rolling the cluster back to checkpoint %d, in the phase %s", r.ID, r.Checkpoint, r.Phase)}
	for _, s := range v.RollbackShards(r.ID) {
		if s.Problem != "" {
			out = append(out, fmt.Sprintf("shard %s waits with the rollback: %s", s.Group, s.Problem))
		}
	}
	return out
}

func problemsOf(s *ClusterStatus) []string {
	var out []string
	for _, node := range s.Topology.Nodes {
		if why, gone := s.Unreachable[node.ID]; gone {
			out = append(out, fmt.Sprintf("node %s cannot be reached: %s", node.ID, why))
		}
	}
	leaders := map[base.GroupID]bool{}
	for _, ns := range s.Nodes {
		if !ns.Ready {
			out = append(out, fmt.Sprintf("node %s is not ready: %s", ns.Node.ID, ns.NotReadyReason))
		}
		for _, g := range ns.Groups {
			leaders[g.Group] = leaders[g.Group] || g.State == "leader"
			if g.Damage != "" {
				out = append(out, fmt.Sprintf("replica %s of %s is damaged: %s", g.Replica, g.Group, g.Damage))
			} else if g.DamageFound {
				out = append(out, fmt.Sprintf("replica %s of %s: a scrub found damage, the log of the node says which; it is rebuilt as soon as the other replicas are a quorum", g.Replica, g.Group))
			}
		}
	}
	for _, sh := range s.Topology.Shards {
		if !leaders[sh.ID] {
			out = append(out, fmt.Sprintf("shard %s has no leader that can be reached", sh.ID))
		}
	}
	return append(out, missingVoters(s)...)
}

// missingVoters names the replicas that should vote and do not yet: while one is
// rebuilt, its group survives no further loss, so the cluster is not healthy.
func missingVoters(s *ClusterStatus) []string {
	shouldVote := map[base.ReplicaID]map[base.GroupID]bool{}
	for _, sh := range s.Topology.Shards {
		for _, r := range sh.Replicas {
			if shouldVote[r.Replica] == nil {
				shouldVote[r.Replica] = map[base.GroupID]bool{}
			}
			shouldVote[r.Replica][sh.ID] = r.Voter
		}
	}
	var out []string
	systemVoters := 0
	for _, ns := range s.Nodes {
		for _, g := range ns.Groups {
			switch {
			case g.Group == base.SystemGroup && g.Voter:
				systemVoters++
			case !g.Voter && g.Damage == "" && shouldVote[g.Replica][g.Group]:
				out = append(out, fmt.Sprintf("replica %s of %s is no voter yet: it is being rebuilt", g.Replica, g.Group))
			}
		}
	}
	members := 0
	for _, node := range s.Topology.Nodes {
		if node.State == string(meta.NodeMember) {
			members++
		}
	}
	if want := min(members-len(s.Unreachable), maxSystemVoters); systemVoters < want {
		out = append(out, fmt.Sprintf("the system group has %d voters that can be reached, not %d: one is being rebuilt", systemVoters, want))
	}
	return out
}
