package server

import (
	"context"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// Backend is what the server needs of a node. Wrap a *cluster.Node with Node.
type Backend interface {
	// ClusterID is empty before the node belongs to a cluster.
	ClusterID() base.ClusterID
	// Submit queues a write. Requests of one caller are proposed in the order of
	// the calls. done is called exactly once, maybe before Submit returns, and
	// must not block. Key groups are left for the backend to compute. The
	// backend may keep the request and its bytes until done is called.
	Submit(ctx context.Context, route cluster.Route, req *raftfsm.Request, done func(raftfsm.Result))
	// Read answers queries to one shard from one instant.
	Read(ctx context.Context, req *cluster.ReadRequest) (*cluster.ReadReply, error)
	// OpenScan opens an iterator over pages from one instant.
	OpenScan(ctx context.Context, req *cluster.ScanRequest) (Scan, error)

	// Topology waits for the metadata revision min; base.ErrNotFounded before
	// the node belongs to a cluster.
	Topology(ctx context.Context, min base.Revision) (*cluster.Topology, error)
	// WatchTopology calls fn at once and after every change, leader hints
	// included, until fn fails or the context ends.
	WatchTopology(ctx context.Context, fn func(*cluster.Topology) error) error
	Declare(ctx context.Context, d state.Declaration) (got state.Declaration, created bool, rev base.Revision, err error)
	Drop(ctx context.Context, keyspace, name string) (base.Revision, error)
	States(ctx context.Context, keyspace string) ([]state.Declaration, base.Revision, error)
	OpenSession(ctx context.Context, lease time.Duration) (base.SessionID, base.Revision, time.Duration, error)
	KeepAliveSession(ctx context.Context, id base.SessionID) (time.Duration, error)
	CloseSession(ctx context.Context, id base.SessionID) error

	Init(ctx context.Context, spec cluster.FoundSpec) (*cluster.FoundReply, error)
	Status(ctx context.Context) (*cluster.ClusterStatus, error)
	NodeStatus(ctx context.Context) (*cluster.NodeStatus, error)
	TransferLeader(ctx context.Context, shard base.GroupID, to base.NodeID) (base.NodeID, error)
	HashShard(ctx context.Context, shard base.GroupID) ([]cluster.ReplicaHash, error)
	SnapshotShard(ctx context.Context, shard base.GroupID) (index, bytes uint64, err error)
	CompactShard(ctx context.Context, shard base.GroupID) (before, after uint64, err error)
	ScrubShard(ctx context.Context, shard base.GroupID) ([]cluster.ReplicaScrub, error)
	Operations(ctx context.Context) ([]cluster.OperationInfo, error)

	// CreateCheckpoint starts a checkpoint and calls fn at once and whenever it has
	// changed, the last time when it has ended.
	CreateCheckpoint(ctx context.Context, fn func(*cluster.CheckpointInfo) error) error
	// CreateSavepoint is CreateCheckpoint for one that is the user's.
	CreateSavepoint(ctx context.Context, fn func(*cluster.CheckpointInfo) error) error
	Checkpoints(ctx context.Context) (*cluster.CheckpointList, error)
	Checkpoint(ctx context.Context, number uint64) (*cluster.CheckpointInfo, error)
	// VerifyCheckpoint reports bad objects in the verification, not as an error.
	VerifyCheckpoint(ctx context.Context, number uint64, quick bool, progress func(done, total int)) (*cluster.CheckpointVerification, error)
	// DeleteCheckpoint refuses savepoints, DeleteSavepoint all others.
	DeleteCheckpoint(ctx context.Context, number uint64) error
	DeleteSavepoint(ctx context.Context, number uint64) error
	// Rollback starts or joins one and calls fn at once and whenever it has changed.
	Rollback(ctx context.Context, req cluster.RollbackRequest, fn func(*cluster.RollbackInfo) error) error
	PlanRollback(ctx context.Context, number uint64) (*cluster.RollbackInfo, error)
	// RollbackStatus shows an operation, or with 0 the one that runs.
	RollbackStatus(ctx context.Context, operation uint64) (*cluster.RollbackInfo, error)
	AbortRollback(ctx context.Context) (*cluster.RollbackInfo, error)

	RegisterParticipant(ctx context.Context, id string, session base.SessionID) (*cluster.ParticipantInfo, error)
	UnregisterParticipant(ctx context.Context, id string, session base.SessionID) error
	ForgetParticipant(ctx context.Context, id string) error
	Participant(ctx context.Context, id string) (*cluster.ParticipantInfo, error)
	Participants(ctx context.Context) ([]*cluster.ParticipantInfo, error)
	// WaitCheckpoint returns 0 if no checkpoint waits for the participant yet.
	WaitCheckpoint(ctx context.Context, id string, session base.SessionID, after uint64) (uint64, error)
	// AcknowledgeCheckpoint returns false if not all participants have acknowledged yet.
	AcknowledgeCheckpoint(ctx context.Context, id string, session base.SessionID, number uint64, position []byte) (bool, error)
	// AwaitCheckpoint returns it as it is if it does not end soon.
	AwaitCheckpoint(ctx context.Context, number uint64) (*cluster.CheckpointInfo, error)
}

// Scan is an open scan: pages in order, all from one instant.
type Scan interface {
	// Next returns the next page and the cursor after it; more is false at the
	// end.
	Next(ctx context.Context) (items []state.ScanItem, cursor []byte, more bool, err error)
	// Token is the position that the scan shows.
	Token() raftfsm.Token
	// Close releases the instant.
	Close()
}

// Node makes a Backend of a node.
func Node(n *cluster.Node) Backend { return node{n} }

type node struct{ *cluster.Node }

// ClusterID implements Backend.
func (n node) ClusterID() base.ClusterID { return n.Identity().Cluster }

// OpenScan implements Backend; only the type of the result differs.
func (n node) OpenScan(ctx context.Context, req *cluster.ScanRequest) (Scan, error) {
	s, err := n.Node.OpenScan(ctx, req)
	if err != nil {
		return nil, err
	}
	return s, nil
}
