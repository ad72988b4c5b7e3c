// Package meta types the reserved part of the system group's replicated map:
// the cluster's own metadata. It holds the records and their codec, a typed
// View of a snapshot, and pure functions that build the transaction for each
// change with the conditions that make it safe.
//
// Like package broadcast it knows no Raft, network, clock or randomness: ids
// and times that are chosen come in as parameters. It does not know which kinds,
// types and functions exist either; DeclareTxn takes a hook for that.
//
// # Use
//
// A builder reads a View and returns a transaction whose conditions name what
// it has relied on. The caller sets the stamp, proposes it, and when a condition
// fails (base.ErrPrecondition) builds it again from a newer View. A transaction
// without operations (Empty) needs no proposal. Join makes one atomic
// transaction of several.
//
// # Concurrency
//
// Records and Views are immutable and may be read from any goroutine. A Mirror
// may be used from any goroutine; its View is a pointer load as long as nothing
// was applied.
//
// # Invariants
//
//	ME1  Every id (shard, state, session, operation) is given once, by a counter
//	     that only grows; a dropped or ended one is never given again.
//	ME2  A session is alive exactly as long as its record exists. Its record is
//	     replaced by one in the list of the ended, in one transaction; the
//	     revision of that record is the revision at which it ended.
//	ME3  The list of the ended is bounded. What was cut from it ended at or below
//	     View.EndedFloor; whoever has not read that far compares with the set of
//	     the living instead.
//	ME4  A keyspace's key type and a state's kind, types, function and codec never
//	     change under one id.
//	ME5  A node's disk, once bound, never changes under its id; no two nodes have
//	     the same disk.
//	ME6  The ranges of the shards tile [0, M) from the moment they are placed.
//	ME7  At most one checkpoint runs. While one runs, nothing leaves the registry
//	     of objects: what it held when the checkpoint started stays until it ends.
//	ME8  A key of a delete plan is not in the registry, and never gets there again:
//	     its attempt has ended, no attempt is given twice (ME1), and what was
//	     registered is none of what may yet be (ME14).
//	ME9  Every object that a running or completed checkpoint uses is in the
//	     registry, and every object of the registry is used by some checkpoint.
//	ME10 At most one rollback runs, and no checkpoint beside it. Until it ends the
//	     checkpoint that it goes back to is retained. The incarnation and the epochs
//	     of all shards change with the end of the last session, in one transaction.
//	ME11 No shard passes the barrier of a checkpoint before every participant that
//	     was registered at its start has acknowledged, while all of these
//	     registrations last: one that ends before makes it fail.
//	ME12 For every registered participant the newest completed checkpoint that has
//	     its position, and is none that a rollback has left behind, is retained,
//	     whatever is retained beside it.
//	ME13 A savepoint uses no objects but those of its own attempts, which lie in its
//	     folder, and nothing else uses these. Retention neither counts nor retires
//	     it, and the objects in a folder with a `_metadata` that may be a completed
//	     savepoint's are in no plan but one that the user asked for.
//	ME14 The log that follows a completed checkpoint is stored under its attempts as
//	     long as it is open, and is registered by nobody but the next checkpoint that
//	     is no savepoint, under the same uploader (Prior). Until that has ended it is
//	     no orphan. Nothing is opened twice.
//	ME15 A rollback that is not forced begins only where every registered participant
//	     has its position in the checkpoint, or became known behind its barriers.
package meta
