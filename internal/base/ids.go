package base

import "strconv"

// NodeID names a node of the cluster. It is chosen by the operator, is bound to
// the node's disk and to the cluster id, and never contains '/'.
type NodeID string

// ClusterID is the random 128-bit identity of a cluster, as 32 hexadecimal
// digits. Empty means that the node does not belong to a cluster yet.
type ClusterID string

// ClusterHeader is the gRPC metadata in which a client names the cluster that it
// belongs to, once it knows: another cluster, that has taken its addresses, refuses
// everything.
const ClusterHeader = "keelstate-cluster"

// DiskID is the random identity of a node's data directory, as 32 hexadecimal
// digits, written once when the directory is first used.
type DiskID string

// GroupID names a Raft group. SystemGroup is the group that spans every node;
// any other value is the id of a shard.
type GroupID uint64

// SystemGroup is the Raft group that spans every node and holds the cluster's
// metadata and the broadcast state.
const SystemGroup GroupID = 0

func (g GroupID) String() string {
	if g == SystemGroup {
		return "system"
	}
	return "S" + strconv.FormatUint(uint64(g), 10)
}

// ReplicaID names one replica of one group on one node: "<node>/<generation>".
// It is the server id in Raft configurations. A replica that may have lost its
// log or its vote comes back under a higher generation (rule R3), so that an
// amnesiac can never act under the identity that made a promise.
type ReplicaID string

// MakeReplicaID builds the replica id of the given generation on a node.
func MakeReplicaID(node NodeID, generation uint64) ReplicaID {
	return ReplicaID(string(node) + "/" + strconv.FormatUint(generation, 10))
}

// Split returns the node and the generation of a replica id, and false if the
// id was not made by MakeReplicaID.
func (r ReplicaID) Split() (NodeID, uint64, bool) {
	for i := len(r) - 1; i >= 0; i-- {
		if r[i] == '/' {
			gen, err := strconv.ParseUint(string(r[i+1:]), 10, 64)
			if err != nil || i == 0 {
				return "", 0, false
			}
			return NodeID(r[:i]), gen, true
		}
	}
	return "", 0, false
}

// Epoch is the version of a shard's range and place. It grows with every split,
// merge and rollback.
type Epoch uint64

// Incarnation counts how often the cluster was rolled back or restored.
type Incarnation uint64

// Birth is the random identity that a group's founding gives to every replica
// of the group; the engine and the Raft log of one replica must agree on it.
type Birth uint64

// SessionID names a client session. Zero means "no session": the write is not
// deduplicated and must not be retried after an unknown outcome.
type SessionID uint64

// Revision is a version of the system group's replicated map: one per write.
type Revision uint64
