package cluster

import (
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// Route says which shard a request is meant for, under which version of the
// map, and how new the sender's view of the metadata is.
type Route struct {
	Group       base.GroupID
	Epoch       base.Epoch
	Incarnation base.Incarnation
	// MetadataRevision is the newest metadata revision that the client has
	// seen: before this node refuses a state or session that it does not know,
	// it waits until its copy is at least that new.
	MetadataRevision base.Revision
}

// ReadRequest is a list of queries to one shard, answered from one instant.
type ReadRequest struct {
	Route
	// Queries have their Group left empty; it is computed from the key.
	Queries []state.Query
	// Room, if set, is told between two parts of the read how many bytes its
	// answers have so far; an error ends the read with it.
	Room func(bytes int) error
}

// ReadReply answers a ReadRequest: Answers[i] or Errs[i] is for Queries[i].
type ReadReply struct {
	Answers []state.Answer
	Errs    []error
	Token   raftfsm.Token
}

// ScanRequest scans one state of one shard from one instant.
type ScanRequest struct {
	Route
	// Query.Range with Hi = 0 means the whole range of the shard.
	Query state.ScanQuery
	// Key, if not nil, is a QueryPage: the scan is of the elements or entries of
	// that key and namespace, and Query is not looked at. Its Group is left
	// empty; it is computed from the key.
	Key *state.Query
}

// NodeInfo is a node of the cluster.
type NodeInfo struct {
	ID       base.NodeID
	RaftAddr string
	GRPCAddr string
	HTTPAddr string
	Zone     string
	State    string // joining, member, draining, removed
	Alive    bool   // a hint of the answering node
}

// ReplicaInfo is one replica of a shard.
type ReplicaInfo struct {
	Node    base.NodeID
	Replica base.ReplicaID
	Voter   bool
}

// ShardInfo is a shard of the cluster.
type ShardInfo struct {
	ID         base.GroupID
	Range      keygroup.Range
	Epoch      base.Epoch
	Birth      base.Birth
	Replicas   []ReplicaInfo
	LeaderHint base.NodeID // may be stale; empty if unknown
}

// Topology is the cluster as one node knows it at one metadata revision.
type Topology struct {
	Cluster          base.ClusterID
	Revision         base.Revision
	Incarnation      base.Incarnation
	KeyGroups        int
	Engine           string
	Nodes            []NodeInfo
	Shards           []ShardInfo
	AnsweredBy       base.NodeID
	SystemLeaderHint base.NodeID
}

// FoundSpec is what `cluster init` asks for; zero numbers mean the defaults.
type FoundSpec struct {
	Nodes       []FoundNode `json:"nodes"`
	KeyGroups   int         `json:"keyGroups"`
	Shards      int         `json:"shards"`
	Replication int         `json:"replication"`
	// Restore names the checkpoint that the cluster begins with, in the object
	// store of the nodes: what CheckpointInfo.URI says, or CLUSTER/NUMBER, or
	// CLUSTER/latest. Empty: with nothing.
	Restore string `json:"restore,omitempty"`
	// Claim says that the checkpoint is the new cluster's to delete.
	Claim bool `json:"claim,omitempty"`
	// Checkpoint is what the founder found under that name; others leave it nil.
	Checkpoint *meta.FoundingRestore `json:"checkpoint,omitempty"`
	// DryRun wants the plan of a restore and nothing done.
	DryRun bool `json:"-"`
}

// FoundNode is one node of a founding.
type FoundNode struct {
	ID       base.NodeID `json:"id"`
	RaftAddr string      `json:"raftAddr"`
}

// FoundReply says how far a founding is. Phase is "done" when every shard has
// a leader; until then Problem says in words what it waits for, if it is known.
type FoundReply struct {
	Cluster   base.ClusterID `json:"cluster"`
	Operation string         `json:"operation"`
	Phase     string         `json:"phase"`
	Problem   string         `json:"problem,omitempty"`
	Resumed   bool           `json:"resumed"`
	// Fetches is how far the shards are with the files of the checkpoint that is
	// restored; empty once the founding has ended.
	Fetches []ShardFetch `json:"fetches,omitempty"`
	// Stuck is what is wrong with that checkpoint, so that the restore cannot end
	// before somebody has mended it. The nodes go on trying.
	Stuck []StuckRestore `json:"stuck,omitempty"`
	// Plan is set for a dry run, and nothing else.
	Plan *RestorePlan `json:"-"`
}

// StuckRestore is what holds a restore up until somebody mends it.
type StuckRestore struct {
	// Group is the shard that is to be made; the system group: `_metadata`.
	Group base.GroupID   `json:"group"`
	Node  base.NodeID    `json:"node"`
	Fault snapshot.Fault `json:"fault"`
	// Detail names the object.
	Detail string `json:"detail"`
	// Age is how long ago it was last found to be so.
	Age time.Duration `json:"ageNs"`
}

// RestorePlan says what founding a cluster with a checkpoint would do.
type RestorePlan struct {
	Checkpoint
	Shards []RestoredShard
	// FetchBytes is what all nodes would read from the object store together.
	FetchBytes int64
}

// Checkpoint is a checkpoint in the object store that a cluster can begin with.
type Checkpoint struct {
	// Key is that of its `_metadata`.
	Key       string
	Cluster   base.ClusterID
	Number    uint64
	CreatedMs uint64
	KeyGroups int
	Engine    string
	// Shards is how many shards it has, Objects and Bytes what they are made of.
	Shards, Objects int
	Bytes           int64
	// Incarnation is that of the cluster that begins with it.
	Incarnation base.Incarnation
}

// RestoredShard is a shard of the new cluster.
type RestoredShard struct {
	ID      base.GroupID
	Range   keygroup.Range
	Nodes   []base.NodeID
	Sources []RestoreSource
	// FetchBytes is what each of the nodes would read from the object store.
	FetchBytes int64
}

// RestoreSource is a shard of the checkpoint of which a new shard is made.
type RestoreSource struct {
	ID    base.GroupID
	Range keygroup.Range
	Bytes int64
	// How is "linked" if its files are taken as they are (but for those that were
	// just flushed, where there is another source), "clipped" if the rest of their
	// range is removed first, "copied" if its keys are written once more.
	How string
}

// GroupStatus is one replica on this node.
type GroupStatus struct {
	Group     base.GroupID   `json:"group"`
	Replica   base.ReplicaID `json:"replica"`
	State     string         `json:"state"` // leader, follower, candidate, learner, damaged, stopped
	Voter     bool           `json:"voter"`
	Leader    base.NodeID    `json:"leader"`
	Term      uint64         `json:"term"`
	Commit    uint64         `json:"commit"`
	Applied   uint64         `json:"applied"`
	Last      uint64         `json:"last"`
	LogBytes  uint64         `json:"logBytes"`
	DiskBytes uint64         `json:"diskBytes"`
	Keys      uint64         `json:"keys"`
	Epoch     base.Epoch     `json:"epoch"`
	Range     keygroup.Range `json:"range"`
	Sequence  uint64         `json:"sequence"`
	Damage    string         `json:"damage,omitempty"`
	Ready     bool           `json:"ready"`
	Scrubbing bool           `json:"scrubbing,omitempty"`
	// DamageFound: a scrub found damage, and the replica is rebuilt as soon as the
	// others are a quorum.
	DamageFound bool `json:"damageFound,omitempty"`
	// States are the ids of the states that the replica knows as declared.
	States []uint32 `json:"states,omitempty"`
}

// NodeStatus is what one node says about itself.
type NodeStatus struct {
	Node           NodeInfo       `json:"node"`
	Cluster        base.ClusterID `json:"cluster"`
	Version        string         `json:"version"`
	Engine         string         `json:"engine"`
	Ready          bool           `json:"ready"`
	NotReadyReason string         `json:"notReadyReason,omitempty"`
	Groups         []GroupStatus  `json:"groups"`
	Uptime         time.Duration  `json:"uptimeNs"`
	Revision       base.Revision  `json:"revision"`
}

// ClusterStatus is the status of every node; those that did not answer are
// named with the reason.
type ClusterStatus struct {
	Topology    *Topology
	Nodes       []NodeStatus
	Unreachable map[base.NodeID]string
	// Problems says in words what keeps the cluster from being healthy; empty
	// when it is.
	Problems []string
}

// ReplicaHash is one replica's hash at an index that all replicas share.
type ReplicaHash struct {
	Node    base.NodeID `json:"node"`
	Index   uint64      `json:"index"`
	ClockMs uint64      `json:"clockMs"`
	Content []byte      `json:"content"`
	Ops     []byte      `json:"ops"`
	Error   string      `json:"error,omitempty"`
}

// ReplicaScrub is what one replica found when it read all of its files.
type ReplicaScrub struct {
	Node    base.NodeID    `json:"node"`
	Replica base.ReplicaID `json:"replica"`
	Bytes   uint64         `json:"bytes"` // that were read
	Took    time.Duration  `json:"tookNs"`
	// Findings are what is damaged; empty if nothing is.
	Findings []ScrubFinding `json:"findings,omitempty"`
	// Error says why not everything was read; empty if it was.
	Error string `json:"error,omitempty"`
}

// ScrubFinding is damage in one part of a replica: its store, its snapshots or
// its part of the Raft log. Detail names files, and offsets where they are known.
type ScrubFinding struct {
	Part   string `json:"part"` // store, snapshot or raftlog
	Detail string `json:"detail"`
}

// OperationInfo is a persisted operation of the cluster.
type OperationInfo struct {
	ID, Kind, Phase, Error string
	Done                   bool
	StartedMs, UpdatedMs   uint64
	// Fetches are those of a restore or rollback that runs, by shard.
	Fetches []ShardFetch
	// Stuck is what a restore that runs waits for somebody to mend.
	Stuck []StuckRestore
}
