package meta

import (
	"encoding/json"

	"github.com/keelstate/keelstate/internal/base"
)

// Cluster is the record of the cluster itself.
type Cluster struct {
	ID base.ClusterID `json:"id"`
	// KeyGroups is M; it never changes.
	KeyGroups int `json:"key_groups"`
	// Replication is the wanted number of replicas of a shard.
	Replication int `json:"replication"`
	// Engine is the storage engine of every node: "rocks" or "mem".
	Engine      string           `json:"engine"`
	Incarnation base.Incarnation `json:"incarnation"`
	// FormatVersion is the newest format that nodes may write; it only grows.
	FormatVersion int    `json:"format_version"`
	CreatedMs     uint64 `json:"created_ms"`

	Revision base.Revision `json:"-"`
}

// NodeState is where a node stands in its membership.
type NodeState string

// The states of a node.
const (
	// NodeJoining: admitted by the operator, not yet a member of the system
	// group.
	NodeJoining NodeState = "joining"
	// NodeMember: a full member; shards may be placed on it.
	NodeMember NodeState = "member"
	// NodeDraining: still a member, gives its shards away.
	NodeDraining NodeState = "draining"
	// NodeRemoved: no member any more. The record keeps the id and its disk from
	// being used again.
	NodeRemoved NodeState = "removed"
)

// Node is the record of one node.
type Node struct {
	ID base.NodeID `json:"id"`
	// DiskID is empty until the node was first admitted with its disk.
	DiskID   base.DiskID `json:"disk_id,omitempty"`
	RaftAddr string      `json:"raft_addr"`
	GRPCAddr string      `json:"grpc_addr,omitempty"`
	HTTPAddr string      `json:"http_addr,omitempty"`
	Zone     string      `json:"zone,omitempty"`
	State    NodeState   `json:"state"`

	Revision base.Revision `json:"-"`
}

// Role is what a replica may do in its group.
type Role string

// The roles of a replica.
const (
	RoleVoter   Role = "voter"
	RoleLearner Role = "learner"
)

// Replica is one node's copy of a shard.
type Replica struct {
	Node       base.NodeID `json:"node"`
	Generation uint64      `json:"generation"`
	// ReplicaID is base.MakeReplicaID(Node, Generation).
	ReplicaID base.ReplicaID `json:"replica_id"`
	Role      Role           `json:"role"`
}

// Shard is the record of one shard: the key groups [Lo, Hi) and who holds them.
type Shard struct {
	ID    base.GroupID `json:"id"`
	Lo    int          `json:"lo"`
	Hi    int          `json:"hi"`
	Epoch base.Epoch   `json:"epoch"`
	// Birth is written as a string: readers of JSON that use floating point
	// would round it.
	Birth           base.Birth  `json:"birth,string"`
	Replicas        []Replica   `json:"replicas"`
	PreferredLeader base.NodeID `json:"preferred_leader"`
	// MaxGeneration is the highest generation that any replica of the shard
	// ever had. A replica that is added has a higher one (rule R3), so that no
	// replica id is ever used twice.
	MaxGeneration uint64 `json:"max_generation"`
	// Seed is set if the shard was made of a checkpoint.
	Seed *ShardSeed `json:"seed,omitempty"`

	Revision base.Revision `json:"-"`
}

// Keyspace is a named set of states that share a key type.
type Keyspace struct {
	Name    string `json:"name"`
	KeyType string `json:"key_type"`

	Revision base.Revision `json:"-"`
}

// Declaration is a declared state. Types are in the text form of package
// keygroup; this package compares them only.
type Declaration struct {
	// ID is unique for ever (ME1); it is never 0.
	ID       uint32 `json:"id"`
	Keyspace string `json:"keyspace"`
	Name     string `json:"name"`
	// Kind is "value", "list", "map", "reducing" or "aggregating".
	Kind        string `json:"kind"`
	KeyType     string `json:"key_type"`
	UserKeyType string `json:"user_key_type,omitempty"`
	ValueType   string `json:"value_type,omitempty"`
	Function    string `json:"function,omitempty"`
	// FunctionParams is in whatever canonical text the caller chose.
	FunctionParams string `json:"function_params,omitempty"`
	CodecVersion   int    `json:"codec_version"`
	// DroppedMs is the system time of the drop; 0 while the state is declared.
	DroppedMs uint64 `json:"dropped_ms,omitempty"`

	// Revision is that of the declaration, or of the drop.
	Revision base.Revision `json:"-"`
}

// Session is a living client session.
type Session struct {
	ID      base.SessionID `json:"id,string"`
	LeaseMs uint64         `json:"lease_ms"`
	// ExpiresMs is the system time from which the session may be ended.
	ExpiresMs uint64 `json:"expires_ms"`

	Revision base.Revision `json:"-"`
}

// EndedSession is a session that was closed or has expired.
type EndedSession struct {
	ID      base.SessionID `json:"id,string"`
	EndedMs uint64         `json:"ended_ms"`
	Expired bool           `json:"expired"`

	// Revision is the revision at which the session ended (ME2).
	Revision base.Revision `json:"-"`
}

// Operation is a long-running change of the cluster, persisted so that any
// leader can resume it.
type Operation struct {
	ID   uint64 `json:"id"`
	Kind string `json:"kind"`
	// Phase is the kind's own; PhaseDone and PhaseFailed end an operation.
	Phase string          `json:"phase"`
	Spec  json.RawMessage `json:"spec"`
	// Error says why the operation failed, or what it waits for.
	Error     string `json:"error,omitempty"`
	CreatedMs uint64 `json:"created_ms"`
	UpdatedMs uint64 `json:"updated_ms"`

	Revision base.Revision `json:"-"`
}

// The phases that end an operation of any kind.
const (
	PhaseDone   = "done"
	PhaseFailed = "failed"
)

// Finished says that the operation has ended.
func (o *Operation) Finished() bool { return o.Phase == PhaseDone || o.Phase == PhaseFailed }

// counter is the record of the next id of a kind.
type counter struct {
	Next uint64 `json:"next,string"`
}

// endedFloor is the record of how far the list of the ended was cut (ME3).
type endedFloor struct {
	Revision base.Revision `json:"revision"`
}
