// Package gossip tells which nodes are believed alive and at which addresses.
// It is the only importer of memberlist. What it says is a hint: nothing
// correct may depend on it.
//
// It must not know Raft, the shard map or who is a member of the cluster. It
// never carries anything whose size grows with shards or states: only the
// fixed fields of Meta, at most MaxMeta bytes (docs/formats/gossip-meta.md).
//
// Concurrency: every method may be called from any goroutine. memberlist's
// goroutines and one maintenance goroutine run from Start to Close.
//
// Invariants:
//
//	GO1  A node's entry is named by its id and its boot, so a node that comes
//	     back with another address is never a name conflict; Members shows the
//	     newest boot of each node id only.
//	GO2  Metadata over MaxMeta bytes is refused when it is set, with an error.
//	GO3  Members never shows a node of another cluster. A node without a cluster
//	     sees all, and all see it.
//	GO4  Seeds and addresses seen before are tried again as long as nobody alive
//	     has them, so that a healed partition joins again by itself.
//	GO5  Two live processes with one node id are reported (Duplicates, a warning
//	     in the log), but only after the old one had time to be found dead.
package gossip
