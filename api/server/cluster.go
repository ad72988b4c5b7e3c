package server

import (
	"context"
	"math"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// clusterService serves topology, declarations and sessions.
type clusterService struct {
	keelstatepb.UnimplementedClusterServer
	s *Server
}

// GetTopology implements the Cluster service.
func (v *clusterService) GetTopology(ctx context.Context, r *keelstatepb.GetTopologyRequest) (*keelstatepb.Topology, error) {
	t, err := v.s.backend.Topology(ctx, base.Revision(r.GetMinRevision()))
	if err != nil {
		return nil, err
	}
	return topology(t), nil
}

// WatchTopology implements the Cluster service.
func (v *clusterService) WatchTopology(r *keelstatepb.GetTopologyRequest, stream grpc.ServerStreamingServer[keelstatepb.Topology]) error {
	ctx, cancel := v.s.drainContext(stream.Context())
	defer cancel()
	if r.GetMinRevision() > 0 {
		if _, err := v.s.backend.Topology(ctx, base.Revision(r.GetMinRevision())); err != nil {
			return err
		}
	}
	err := v.s.backend.WatchTopology(ctx, func(t *cluster.Topology) error { return stream.Send(topology(t)) })
	if err != nil && stream.Context().Err() == nil && ctx.Err() != nil {
		return context.Cause(ctx) // the drain ended it, not the client
	}
	return err
}

func topology(t *cluster.Topology) *keelstatepb.Topology {
	out := &keelstatepb.Topology{ClusterId: string(t.Cluster), Revision: uint64(t.Revision), Incarnation: uint64(t.Incarnation),
		KeyGroups: uint32(t.KeyGroups), Engine: t.Engine, AnsweredBy: string(t.AnsweredBy), SystemLeaderHint: string(t.SystemLeaderHint)}
	for i := range t.Nodes {
		out.Nodes = append(out.Nodes, nodeInfo(&t.Nodes[i]))
	}
	for i := range t.Shards {
		s := &t.Shards[i]
		w := &keelstatepb.Shard{Id: uint64(s.ID), Range: wireRange(s.Range), Epoch: uint64(s.Epoch), Birth: uint64(s.Birth), LeaderHint: string(s.LeaderHint)}
		for _, r := range s.Replicas {
			w.Replicas = append(w.Replicas, &keelstatepb.Replica{Node: string(r.Node), ReplicaId: string(r.Replica), Voter: r.Voter})
		}
		out.Shards = append(out.Shards, w)
	}
	return out
}

func nodeInfo(n *cluster.NodeInfo) *keelstatepb.Node {
	return &keelstatepb.Node{Id: string(n.ID), GrpcAddress: n.GRPCAddr, RaftAddress: n.RaftAddr, HttpAddress: n.HTTPAddr,
		Zone: n.Zone, State: n.State, Alive: n.Alive}
}

// DeclareState implements the Cluster service.
func (v *clusterService) DeclareState(ctx context.Context, r *keelstatepb.DeclareStateRequest) (*keelstatepb.DeclareStateResponse, error) {
	d, err := declaration(r.GetDeclaration())
	if err != nil {
		return nil, err
	}
	got, created, rev, err := v.s.backend.Declare(ctx, d)
	if err != nil {
		return nil, err
	}
	return &keelstatepb.DeclareStateResponse{Declaration: wireDeclaration(&got), Created: created, Revision: uint64(rev)}, nil
}

// declaration converts what is asked to be declared; the backend validates the
// rest.
func declaration(w *keelstatepb.Declaration) (state.Declaration, error) {
	var d state.Declaration
	refuse := func(cause error, field, hint string) (state.Declaration, error) {
		return d, &base.Error{Cause: cause, Field: "declaration." + field, Hint: hint, Ordinal: -1}
	}
	switch kind := w.GetKind(); {
	case w == nil:
		return d, base.Invalid("declaration", "say what to declare")
	case w.GetTtlMs() != 0:
		return refuse(base.ErrUnsupported, "ttl_ms", "not yet supported")
	case w.GetId() != 0:
		return refuse(base.ErrInvalid, "id", "the cluster gives the id; leave it out")
	case kind == keelstatepb.StateKind_STATE_KIND_UNSPECIFIED:
		return refuse(base.ErrInvalid, "kind", "use value, list, map, reducing or aggregating")
	case kind < 0 || kind > keelstatepb.StateKind_STATE_KIND_AGGREGATING:
		return d, badEnum("declaration.kind", int32(kind))
	case w.GetCodecVersion() > math.MaxUint16:
		return refuse(base.ErrUnsupported, "codec_version", "use 1")
	}
	d = state.Declaration{Keyspace: w.GetKeyspace(), Name: w.GetName(), Kind: state.Kind(w.GetKind()), Function: w.GetFunction(),
		CodecVersion: uint16(w.GetCodecVersion())}
	for _, t := range []struct {
		field, text string
		to          *keygroup.Type
	}{{"key_type", w.GetKeyType(), &d.KeyType}, {"user_key_type", w.GetUserKeyType(), &d.UserKeyType}, {"value_type", w.GetValueType(), &d.ValueType}} {
		if t.text == "" {
			continue // the backend says whether it is needed
		}
		var err error
		if *t.to, err = keygroup.ParseType(t.text); err != nil {
			return refuse(err, t.field, "")
		}
	}
	return d, nil
}

func wireDeclaration(d *state.Declaration) *keelstatepb.Declaration {
	w := &keelstatepb.Declaration{Id: uint32(d.ID), Keyspace: d.Keyspace, Name: d.Name, Kind: keelstatepb.StateKind(d.Kind),
		KeyType: d.KeyType.String(), ValueType: d.ValueType.String(), Function: d.Function, CodecVersion: uint32(d.CodecVersion)}
	if d.UserKeyType.IsValid() {
		w.UserKeyType = d.UserKeyType.String()
	}
	return w
}

// DropState implements the Cluster service.
func (v *clusterService) DropState(ctx context.Context, r *keelstatepb.DropStateRequest) (*keelstatepb.DropStateResponse, error) {
	rev, err := v.s.backend.Drop(ctx, r.GetKeyspace(), r.GetName())
	if err != nil {
		return nil, err
	}
	return &keelstatepb.DropStateResponse{Revision: uint64(rev)}, nil
}

// ListStates implements the Cluster service.
func (v *clusterService) ListStates(ctx context.Context, r *keelstatepb.ListStatesRequest) (*keelstatepb.ListStatesResponse, error) {
	states, rev, err := v.s.backend.States(ctx, r.GetKeyspace())
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.ListStatesResponse{Revision: uint64(rev)}
	for i := range states {
		out.Declarations = append(out.Declarations, wireDeclaration(&states[i]))
	}
	return out, nil
}

// OpenSession implements the Cluster service.
func (v *clusterService) OpenSession(ctx context.Context, r *keelstatepb.OpenSessionRequest) (*keelstatepb.Session, error) {
	id, rev, lease, err := v.s.backend.OpenSession(ctx, time.Duration(r.GetLeaseMs())*time.Millisecond)
	if err != nil {
		return nil, err
	}
	return &keelstatepb.Session{Id: uint64(id), LeaseMs: millis(lease), Revision: uint64(rev)}, nil
}

// KeepAliveSession implements the Cluster service.
func (v *clusterService) KeepAliveSession(ctx context.Context, r *keelstatepb.KeepAliveSessionRequest) (*keelstatepb.Session, error) {
	lease, err := v.s.backend.KeepAliveSession(ctx, base.SessionID(r.GetId()))
	if err != nil {
		return nil, err
	}
	return &keelstatepb.Session{Id: r.GetId(), LeaseMs: millis(lease)}, nil
}

// CloseSession implements the Cluster service.
func (v *clusterService) CloseSession(ctx context.Context, r *keelstatepb.CloseSessionRequest) (*keelstatepb.CloseSessionResponse, error) {
	if err := v.s.backend.CloseSession(ctx, base.SessionID(r.GetId())); err != nil {
		return nil, err
	}
	return &keelstatepb.CloseSessionResponse{}, nil
}

// millis rounds a lease down: a client that believes in less renews earlier.
func millis(d time.Duration) uint32 {
	return uint32(min(max(d.Milliseconds(), 0), math.MaxUint32))
}
