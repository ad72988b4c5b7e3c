package meta

import (
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// Limits of a cluster.
const (
	MaxKeyGroups = 32768
	MaxNodes     = 1024
	// MaxFoundingShards bounds the shards of a founding: they are placed by one
	// command, which has to hold their records even with the longest names.
	MaxFoundingShards = 2048
	// DefaultKeyGroups is M unless set or too small for the shards.
	DefaultKeyGroups = 128
	// DefaultReplication is the number of replicas where there are nodes enough.
	DefaultReplication = 3
)

// The founding operation. Its first phase lasts until every node is a member.
const (
	OperationFound    = "found"
	PhaseFoundAdmit   = "admit"
	PhaseFoundPlace   = "place"
	foundingOperation = 1
)

// FoundingNode is a node that the founding admits.
type FoundingNode struct {
	ID       base.NodeID `json:"id"`
	RaftAddr string      `json:"raft_addr"`
}

// FoundingSpec is what the operator asked for; numbers that are 0 mean the
// defaults.
type FoundingSpec struct {
	Nodes       []FoundingNode `json:"nodes"`
	KeyGroups   int            `json:"key_groups"`
	Shards      int            `json:"shards"`
	Replication int            `json:"replication"`
	Engine      string         `json:"engine"`
	// Restore, if not nil, is the checkpoint that the cluster begins with, whose
	// number of key groups KeyGroups is.
	Restore *FoundingRestore `json:"restore,omitempty"`
}

// Resolve returns the specification with its defaults filled in and its nodes
// in order, so that two are equal if they ask for the same; or what is wrong.
func (s FoundingSpec) Resolve() (FoundingSpec, error) {
	s.Nodes = slices.Clone(s.Nodes)
	slices.SortFunc(s.Nodes, func(a, b FoundingNode) int { return strings.Compare(string(a.ID), string(b.ID)) })
	if len(s.Nodes) == 0 || len(s.Nodes) > MaxNodes {
		return s, base.Invalid("nodes", fmt.Sprintf("1 to %d nodes", MaxNodes))
	}
	addrs := make(map[string]base.NodeID, len(s.Nodes))
	for i, n := range s.Nodes {
		field := fmt.Sprintf("nodes[%s]", n.ID)
		if err := checkName(field, string(n.ID)); err != nil {
			return s, err
		}
		if i > 0 && s.Nodes[i-1].ID == n.ID {
			return s, base.Invalid(field, "is named twice")
		}
		if n.RaftAddr == "" || checkText(field, n.RaftAddr) != nil {
			return s, base.Invalid(field, "needs an address")
		}
		if other, taken := addrs[n.RaftAddr]; taken {
			return s, base.Invalid(field, fmt.Sprintf("has the address of node %s", other))
		}
		addrs[n.RaftAddr] = n.ID
	}
	if s.Engine == "" || checkText("engine", s.Engine) != nil {
		return s, base.Invalid("engine", "must not be empty")
	}
	return s.resolveNumbers()
}

func (s FoundingSpec) resolveNumbers() (FoundingSpec, error) {
	n := len(s.Nodes)
	if s.Replication == 0 {
		s.Replication = min(DefaultReplication, n)
	}
	if s.Replication < 1 || s.Replication > n {
		return s, base.Invalid("replication", fmt.Sprintf("from 1 to the number of nodes, %d", n))
	}
	if s.Shards == 0 {
		s.Shards = (4*n + 2) / 3
		if s.KeyGroups > 0 {
			s.Shards = min(s.Shards, s.KeyGroups)
		}
	}
	if s.Shards < 1 || s.Shards > MaxFoundingShards {
		return s, base.Invalid("shards", fmt.Sprintf("from 1 to %d", MaxFoundingShards))
	}
	if s.KeyGroups == 0 {
		s.KeyGroups = max(DefaultKeyGroups, s.Shards)
	}
	if s.KeyGroups < s.Shards || s.KeyGroups > MaxKeyGroups {
		return s, base.Invalid("key_groups", fmt.Sprintf("from the number of shards, %d, to %d", s.Shards, MaxKeyGroups))
	}
	return s, nil
}

// Founding is what the node that was called brings to a founding.
type Founding struct {
	Spec FoundingSpec
	// Self is the node that was called; it must be listed.
	Self base.NodeID
	// Cluster is the id for the new cluster.
	Cluster base.ClusterID
	// FormatVersion is the newest format that may be written.
	FormatVersion int
	NowMs         uint64
}

// FoundTxn founds the cluster: its record, the nodes as joining, and the
// persisted operation. If the cluster was founded with the same specification,
// the operation is returned and the transaction is empty; with another one the
// error is base.ErrAlreadyFounded with the field.
func FoundTxn(v *View, f Founding) (broadcast.Txn, *Operation, error) {
	if c := v.Cluster(); c != nil && f.Spec.Restore != nil && f.Spec.KeyGroups == 0 {
		f.Spec.KeyGroups = c.KeyGroups // the checkpoint's, which only the founder had to know
	}
	spec, err := f.Spec.Resolve()
	if err != nil {
		return broadcast.Txn{}, nil, err
	}
	if !slices.ContainsFunc(spec.Nodes, func(n FoundingNode) bool { return n.ID == f.Self }) {
		return broadcast.Txn{}, nil, base.Invalid("nodes", fmt.Sprintf("does not list the node that was called, %s", f.Self))
	}
	if v.Cluster() != nil {
		op, err := sameFounding(v, spec)
		return broadcast.Txn{}, op, err
	}
	if f.Cluster == "" || f.FormatVersion < 1 {
		return broadcast.Txn{}, nil, base.Invalid("cluster", "a founding needs an id and a format version")
	}
	var incarnation base.Incarnation
	if spec.Restore != nil {
		if err := spec.Restore.check(); err != nil {
			return broadcast.Txn{}, nil, err
		}
		incarnation = spec.Restore.Incarnation
	}
	txn, op, err := StartOperationTxn(v, f.NowMs, OperationFound, PhaseFoundAdmit, spec)
	if err != nil {
		return broadcast.Txn{}, nil, err
	}
	if op.ID != foundingOperation {
		return broadcast.Txn{}, nil, conflict("operation", "the founding is the first operation")
	}
	var b builder
	b.replace(kindCluster, clusterKey, 0, Cluster{
		ID: f.Cluster, KeyGroups: spec.KeyGroups, Replication: spec.Replication, Engine: spec.Engine, Incarnation: incarnation,
		FormatVersion: f.FormatVersion, CreatedMs: f.NowMs,
	})
	for _, n := range spec.Nodes {
		b.replace(kindNode, nameKey(kindNode, string(n.ID)), 0, Node{ID: n.ID, RaftAddr: n.RaftAddr, State: NodeJoining})
	}
	founding, err := b.done()
	return Join(txn, founding), op, err
}

// FoundingOperation returns the founding's operation and its specification. It
// is nil before the founding; it is kept for ever.
func (v *View) FoundingOperation() (*Operation, FoundingSpec, error) {
	op := v.Operation(foundingOperation)
	if op == nil || op.Kind != OperationFound {
		return nil, FoundingSpec{}, nil
	}
	var spec FoundingSpec
	if err := strict(op.Spec, &spec); err != nil {
		return nil, FoundingSpec{}, fmt.Errorf("reading the specification of the founding: %v: %w", err, base.ErrCorrupt)
	}
	return op, spec, nil
}

// FoundingUnderWay says whether the founding has begun and not ended. It costs
// less than FoundingOperation, which decodes the specification.
func (v *View) FoundingUnderWay() bool {
	op := v.Operation(foundingOperation)
	return op != nil && op.Kind == OperationFound && !op.Finished()
}

func sameFounding(v *View, want FoundingSpec) (*Operation, error) {
	refuse := func(field, hint string) error {
		return &base.Error{Cause: base.ErrAlreadyFounded, Field: field, Hint: hint, Ordinal: -1}
	}
	op, have, err := v.FoundingOperation()
	if err != nil {
		return nil, err
	}
	if op == nil {
		return nil, refuse("nodes", "the record of the founding is missing")
	}
	if !slices.Equal(have.Nodes, want.Nodes) {
		return nil, refuse("nodes", "the cluster was founded with another list of nodes")
	}
	for _, n := range []struct {
		field      string
		have, want any
	}{
		{"key_groups", have.KeyGroups, want.KeyGroups}, {"shards", have.Shards, want.Shards},
		{"replication", have.Replication, want.Replication}, {"engine", have.Engine, want.Engine},
	} {
		if n.have != n.want {
			return nil, refuse(n.field, fmt.Sprintf("the cluster was founded with %v, not %v", n.have, n.want))
		}
	}
	if !have.Restore.meets(want.Restore) {
		return nil, refuse("restore", fmt.Sprintf("the cluster was founded from %s, not from %s", have.Restore, want.Restore))
	}
	return op, nil
}

// JoinNodeTxn admits a further node, as joining. An id that was ever used is
// base.ErrConflict, unless the record is that of the same joining node.
func JoinNodeTxn(v *View, id base.NodeID, raftAddr string) (broadcast.Txn, error) {
	if v.Cluster() == nil {
		return broadcast.Txn{}, base.ErrNotFounded
	}
	if err := checkName("node", string(id)); err != nil {
		return broadcast.Txn{}, err
	}
	if raftAddr == "" || checkText("raft_addr", raftAddr) != nil {
		return broadcast.Txn{}, base.Invalid("raft_addr", "must not be empty")
	}
	if n := v.Node(id); n != nil {
		if n.State == NodeJoining && n.RaftAddr == raftAddr {
			return broadcast.Txn{}, nil
		}
		return broadcast.Txn{}, conflict("node", fmt.Sprintf("node %s exists and is %s", id, n.State))
	}
	var b builder
	b.replace(kindNode, nameKey(kindNode, string(id)), 0, Node{ID: id, RaftAddr: raftAddr, State: NodeJoining})
	return b.done()
}

// AdmitNodeTxn makes a listed node a member, binds its id to its disk, or
// renews the addresses and zone of a member that has started again. A state in
// node is ignored: a draining node stays so. The error is base.ErrIdentity if
// the node is not listed or was removed, if its id is bound to another disk, or
// the disk to another id (ME5).
func AdmitNodeTxn(v *View, node Node) (broadcast.Txn, error) {
	refuse := func(field, hint string) error {
		return &base.Error{Cause: base.ErrIdentity, Field: field, Hint: hint, Ordinal: -1}
	}
	have := v.Node(node.ID)
	if have == nil || have.State == NodeRemoved {
		return broadcast.Txn{}, refuse("node", fmt.Sprintf("node %q is not a node of this cluster", node.ID))
	}
	if node.DiskID == "" || (have.DiskID != "" && have.DiskID != node.DiskID) {
		return broadcast.Txn{}, refuse("disk", fmt.Sprintf("node %s is bound to another disk", node.ID))
	}
	var b builder
	for _, other := range v.Nodes() {
		if other.ID == node.ID {
			continue
		}
		if other.DiskID == node.DiskID {
			return broadcast.Txn{}, refuse("disk", fmt.Sprintf("the disk is that of node %s", other.ID))
		}
		if have.DiskID == "" {
			// No other node may be bound to this disk meanwhile.
			b.expect(nameKey(kindNode, string(other.ID)), other.Revision)
		}
	}
	for _, f := range []field{{"disk", string(node.DiskID)}, {"raft_addr", node.RaftAddr}, {"grpc_addr", node.GRPCAddr}, {"http_addr", node.HTTPAddr}, {"zone", node.Zone}} {
		if err := checkText(f.name, f.value); err != nil {
			return broadcast.Txn{}, err
		}
	}
	if node.RaftAddr == "" {
		return broadcast.Txn{}, base.Invalid("raft_addr", "must not be empty")
	}
	node.State, node.Revision = have.State, have.Revision
	if node.State == NodeJoining {
		node.State = NodeMember
	}
	if node == *have {
		return broadcast.Txn{}, nil
	}
	b.replace(kindNode, nameKey(kindNode, string(node.ID)), have.Revision, node)
	return b.done()
}

// SetNodeStateTxn changes a node's state: member to draining and back, and any
// to removed, which is for ever and needs that no shard names the node.
func SetNodeStateTxn(v *View, id base.NodeID, state NodeState) (broadcast.Txn, error) {
	have := v.Node(id)
	if have == nil {
		return broadcast.Txn{}, notFound("node", fmt.Sprintf("no node %s", id))
	}
	if have.State == state {
		return broadcast.Txn{}, nil
	}
	var b builder
	switch {
	case have.State == NodeMember && state == NodeDraining, have.State == NodeDraining && state == NodeMember:
	case state == NodeRemoved:
		for _, s := range v.Shards() {
			if slices.ContainsFunc(s.Replicas, func(r Replica) bool { return r.Node == id }) {
				return broadcast.Txn{}, conflict("node", fmt.Sprintf("node %s holds a replica of shard %s", id, s.ID))
			}
			// No shard may be given to the node meanwhile.
			b.expect(idKey(kindShard, uint64(s.ID)), s.Revision)
		}
		b.expectCounter(v, counterShard)
	default:
		return broadcast.Txn{}, conflict("state", fmt.Sprintf("node %s is %s and cannot become %s", id, have.State, state))
	}
	next := *have
	next.State = state
	b.replace(kindNode, nameKey(kindNode, string(id)), have.Revision, next)
	return b.done()
}
