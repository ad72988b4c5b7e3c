// Package cluster runs the Raft groups of one node: the system group, which
// holds the cluster's metadata on every node, and one group per shard replica.
// It founds clusters, places shards, proposes writes, serves linearizable
// reads, rebuilds damaged replicas, and routes by the shard map.
//
// It must not know the client's protocol buffers, RocksDB or minio-go. The
// adapters (an engine.Driver, a gossip implementation) are handed to it by the
// composition root.
//
// Concurrency: Node is safe for use by many goroutines. docs/threads.md lists
// the goroutines and what may block them. No callback runs under a lock.
//
// Invariants:
//
//	CL1  A write is acknowledged only after its entry is applied on the leader,
//	     which Raft allows only after a quorum has fsynced it (W2).
//	CL2  A linearizable read is served only after a quorum of the newest
//	     configuration's voters answered, after the read arrived, that it knows
//	     no term above the leader's, and after the newest command at or below
//	     the commit index noted before was applied (design, section 3).
//	CL3  No read is served in a term before the state machine has applied that
//	     term's TermStart command.
//	CL4  Every failed write says not applied, applied or unknown (W8); what is
//	     not listed in classify is unknown.
//	CL5  A replica whose log, vote or store may have been lost never acts again
//	     under its replica id: it is muted, removed by a committed configuration
//	     change and added again under a higher generation (R3).
//	CL6  Gossip is a hint: nothing that must be correct depends on it.
//	CL7  In one term a leader asks raft at most once to hand its office to a
//	     follower, unless raft refused: a second time may hang raft for ever.
package cluster
