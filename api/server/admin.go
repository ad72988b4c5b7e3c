package server

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
)

// maxFoundingNodes bounds the list of a founding.
const maxFoundingNodes = 1024

// maxRestoreBytes bounds the name of a checkpoint.
const maxRestoreBytes = 4096

// adminService founds, inspects and operates a cluster.
type adminService struct {
	keelstatepb.UnimplementedAdminServer
	s *Server
}

// InitCluster implements the Admin service.
func (v *adminService) InitCluster(ctx context.Context, r *keelstatepb.InitClusterRequest) (*keelstatepb.InitClusterResponse, error) {
	if len(r.Nodes) > maxFoundingNodes {
		return nil, &base.Error{Cause: base.ErrTooLarge, Field: "nodes", Ordinal: -1, Hint: fmt.Sprintf("list at most %d nodes", maxFoundingNodes)}
	}
	spec := cluster.FoundSpec{KeyGroups: clampInt(r.GetKeyGroups()), Shards: clampInt(r.GetShards()), Replication: clampInt(r.GetReplication()),
		Restore: r.GetRestore(), Claim: r.GetClaim(), DryRun: r.GetDryRun()}
	if len(spec.Restore) > maxRestoreBytes {
		return nil, &base.Error{Cause: base.ErrTooLarge, Field: "restore", Ordinal: -1, Hint: fmt.Sprintf("at most %d bytes", maxRestoreBytes)}
	}
	for _, n := range r.Nodes {
		spec.Nodes = append(spec.Nodes, cluster.FoundNode{ID: base.NodeID(n.GetId()), RaftAddr: n.GetRaftAddress()})
	}
	reply, err := v.s.backend.Init(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &keelstatepb.InitClusterResponse{ClusterId: string(reply.Cluster), OperationId: reply.Operation, Phase: reply.Phase,
		Problem: reply.Problem, Resumed: reply.Resumed, Plan: restorePlan(reply.Plan), Fetches: shardFetches(reply.Fetches),
		Stuck: stuckRestores(reply.Stuck)}, nil
}

func stuckRestores(all []cluster.StuckRestore) []*keelstatepb.StuckRestore {
	var out []*keelstatepb.StuckRestore
	for _, s := range all {
		out = append(out, &keelstatepb.StuckRestore{Shard: uint64(s.Group), Node: string(s.Node), Fault: string(s.Fault), Detail: s.Detail, AgeMs: uint64(s.Age.Milliseconds())})
	}
	return out
}

func shardFetches(all []cluster.ShardFetch) []*keelstatepb.ShardFetch {
	var out []*keelstatepb.ShardFetch
	for _, f := range all {
		out = append(out, &keelstatepb.ShardFetch{Shard: uint64(f.Group), DueBytes: uint64(f.Due), HereBytes: uint64(f.Here)})
	}
	return out
}

func restorePlan(p *cluster.RestorePlan) *keelstatepb.RestorePlan {
	if p == nil {
		return nil
	}
	out := &keelstatepb.RestorePlan{Checkpoint: p.Key, ClusterId: string(p.Cluster), Number: p.Number, CreatedMs: p.CreatedMs, KeyGroups: uint32(p.KeyGroups),
		Engine: p.Engine, Incarnation: uint64(p.Incarnation), Objects: uint64(p.Objects), Bytes: uint64(p.Bytes), FetchBytes: uint64(p.FetchBytes)}
	for i := range p.Shards {
		s := &p.Shards[i]
		sh := &keelstatepb.RestoredShard{Shard: uint64(s.ID), Range: wireRange(s.Range), FetchBytes: uint64(s.FetchBytes)}
		for _, n := range s.Nodes {
			sh.Nodes = append(sh.Nodes, string(n))
		}
		for _, f := range s.Sources {
			sh.Sources = append(sh.Sources, &keelstatepb.RestoreSource{Shard: uint64(f.ID), Range: wireRange(f.Range), Bytes: uint64(f.Bytes), How: f.How})
		}
		out.Shards = append(out.Shards, sh)
	}
	return out
}

// Status implements the Admin service.
func (v *adminService) Status(ctx context.Context, _ *keelstatepb.StatusRequest) (*keelstatepb.StatusResponse, error) {
	st, err := v.s.backend.Status(ctx)
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.StatusResponse{Healthy: len(st.Problems) == 0 && len(st.Unreachable) == 0, Problems: st.Problems}
	if st.Topology != nil {
		out.ClusterId, out.Topology = string(st.Topology.Cluster), topology(st.Topology)
	}
	for i := range st.Nodes {
		out.Nodes = append(out.Nodes, nodeStatus(&st.Nodes[i]))
	}
	for id, why := range st.Unreachable {
		out.Unreachable = append(out.Unreachable, &keelstatepb.UnreachableNode{Id: string(id), Error: why})
	}
	slices.SortFunc(out.Unreachable, func(a, b *keelstatepb.UnreachableNode) int { return strings.Compare(a.Id, b.Id) })
	return out, nil
}

// NodeStatus implements the Admin service.
func (v *adminService) NodeStatus(ctx context.Context, _ *keelstatepb.NodeStatusRequest) (*keelstatepb.NodeStatusResponse, error) {
	st, err := v.s.backend.NodeStatus(ctx)
	if err != nil {
		return nil, err
	}
	return nodeStatus(st), nil
}

func nodeStatus(st *cluster.NodeStatus) *keelstatepb.NodeStatusResponse {
	out := &keelstatepb.NodeStatusResponse{Node: nodeInfo(&st.Node), ClusterId: string(st.Cluster), Version: st.Version, Engine: st.Engine,
		Ready: st.Ready, NotReadyReason: st.NotReadyReason, UptimeMs: uint64(max(st.Uptime.Milliseconds(), 0)), MetadataRevision: uint64(st.Revision)}
	for i := range st.Groups {
		g := &st.Groups[i]
		out.Groups = append(out.Groups, &keelstatepb.GroupStatus{
			Group: uint64(g.Group), State: g.State, Leader: string(g.Leader), Term: g.Term, CommitIndex: g.Commit, AppliedIndex: g.Applied,
			LastIndex: g.Last, LogBytes: g.LogBytes, DiskBytes: g.DiskBytes, Keys: g.Keys, Epoch: uint64(g.Epoch), Range: wireRange(g.Range),
			ReplicaId: string(g.Replica), Voter: g.Voter, Damage: g.Damage, Sequence: g.Sequence, Ready: g.Ready,
		})
	}
	return out
}

// TransferLeader implements the Admin service.
func (v *adminService) TransferLeader(ctx context.Context, r *keelstatepb.TransferLeaderRequest) (*keelstatepb.TransferLeaderResponse, error) {
	leader, err := v.s.backend.TransferLeader(ctx, base.GroupID(r.GetShard()), base.NodeID(r.GetTo()))
	if err != nil {
		return nil, err
	}
	return &keelstatepb.TransferLeaderResponse{Leader: string(leader)}, nil
}

// HashShard implements the Admin service.
func (v *adminService) HashShard(ctx context.Context, r *keelstatepb.HashShardRequest) (*keelstatepb.HashShardResponse, error) {
	hashes, err := v.s.backend.HashShard(ctx, base.GroupID(r.GetShard()))
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.HashShardResponse{Shard: r.GetShard(), Agree: agree(hashes)}
	for i := range hashes {
		h := &hashes[i]
		out.Replicas = append(out.Replicas, &keelstatepb.ReplicaHash{Node: string(h.Node), Index: h.Index, ClockMs: h.ClockMs,
			ContentHash: h.Content, OpHash: h.Ops, Error: h.Error})
	}
	return out, nil
}

// agree says that every replica computed the same hashes at the same index; a
// replica that could not answer does not agree.
func agree(hashes []cluster.ReplicaHash) bool {
	for i := range hashes {
		h, first := &hashes[i], &hashes[0]
		if h.Error != "" || h.Index != first.Index || !bytes.Equal(h.Content, first.Content) || !bytes.Equal(h.Ops, first.Ops) {
			return false
		}
	}
	return len(hashes) > 0
}

// SnapshotShard implements the Admin service.
func (v *adminService) SnapshotShard(ctx context.Context, r *keelstatepb.SnapshotShardRequest) (*keelstatepb.SnapshotShardResponse, error) {
	index, size, err := v.s.backend.SnapshotShard(ctx, base.GroupID(r.GetShard()))
	if err != nil {
		return nil, err
	}
	return &keelstatepb.SnapshotShardResponse{Index: index, Bytes: size}, nil
}

// CompactShard implements the Admin service.
func (v *adminService) CompactShard(ctx context.Context, r *keelstatepb.CompactShardRequest) (*keelstatepb.CompactShardResponse, error) {
	before, after, err := v.s.backend.CompactShard(ctx, base.GroupID(r.GetShard()))
	if err != nil {
		return nil, err
	}
	return &keelstatepb.CompactShardResponse{BytesBefore: before, BytesAfter: after}, nil
}

// ScrubShard implements the Admin service.
func (v *adminService) ScrubShard(ctx context.Context, r *keelstatepb.ScrubShardRequest) (*keelstatepb.ScrubShardResponse, error) {
	scrubs, err := v.s.backend.ScrubShard(ctx, base.GroupID(r.GetShard()))
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.ScrubShardResponse{Shard: r.GetShard(), Clean: len(scrubs) > 0}
	for i := range scrubs {
		s := &scrubs[i]
		p := &keelstatepb.ReplicaScrub{Node: string(s.Node), Replica: string(s.Replica), Bytes: s.Bytes, Micros: uint64(s.Took.Microseconds()), Error: s.Error}
		for _, f := range s.Findings {
			p.Findings = append(p.Findings, &keelstatepb.ScrubFinding{Part: f.Part, Detail: f.Detail})
		}
		out.Replicas = append(out.Replicas, p)
		out.Clean = out.Clean && s.Error == "" && len(s.Findings) == 0
	}
	return out, nil
}

// ListOperations implements the Admin service.
func (v *adminService) ListOperations(ctx context.Context, _ *keelstatepb.ListOperationsRequest) (*keelstatepb.ListOperationsResponse, error) {
	ops, err := v.s.backend.Operations(ctx)
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.ListOperationsResponse{}
	for _, o := range ops {
		out.Operations = append(out.Operations, &keelstatepb.Operation{Id: o.ID, Kind: o.Kind, Phase: o.Phase, Error: o.Error, Done: o.Done,
			StartedMs: o.StartedMs, UpdatedMs: o.UpdatedMs, Fetches: shardFetches(o.Fetches), Stuck: stuckRestores(o.Stuck)})
	}
	return out, nil
}
