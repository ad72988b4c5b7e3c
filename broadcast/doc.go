// Package broadcast is the pure core of the replicated, versioned map that
// every node of a cluster holds in full: the state machine of the system Raft
// group. It carries the cluster's own metadata (package meta below it types
// that part) and, in other key spaces, broadcast and operator state.
//
// It must not know Raft, memberlist, who is alive, the network, files, wall
// clocks or randomness, and it starts no goroutine. An adapter elsewhere feeds
// it the committed entries of the log, in order; every value that a leader
// chose (ids, time stamps) rides in the entry (rule W4 of the design).
//
// # The map
//
// Keys are byte strings (Go strings, any bytes, 1 to MaxKeyBytes), ordered by
// bytes. An entry has a value (empty is not absent), the revision that created
// the key and the revision that wrote it last. A prefix of the key space is the
// unit of watching and of ranges; the part below meta.Prefix is reserved.
//
// # Concurrency
//
// Apply and Restore exclude each other and are meant for one goroutine. Every
// other method may be called from any goroutine at any time. Reads take no
// lock: they work on a Snapshot, an immutable copy-on-write view that is
// published once per applied command. Watchers and waiters take a short lock
// that never covers an apply, so no reader can hold up Apply.
//
// # Invariants
//
//	BC1  Determinism: equal logs give equal states; WriteSnapshot of two equal
//	     states gives equal bytes.
//	BC2  The revision grows by exactly one with each command that changed the
//	     map, and by nothing else. A tick, a compaction, a failed condition, a
//	     refused command, a delete of what is absent leave it. Putting the
//	     value that is already there is a change.
//	BC3  The system clock is the maximum of all stamps applied; it never goes
//	     back. The stamp of a transaction whose conditions fail counts too.
//	BC4  A refused command changes nothing but the applied index; a command at
//	     or below the applied index changes nothing at all.
//	BC5  A Snapshot never changes, whatever is applied after it was taken.
//	BC6  A transaction is atomic for everybody: readers see all of it or
//	     nothing, watchers get its events in one Batch.
//	BC7  A watcher sees every change of its prefix once, in revision order and
//	     never backwards, or gets base.ErrCompacted and must take a full copy.
//	     It never blocks Apply, and what it holds is bounded.
//	BC8  Restore is all or nothing: after an error the former state stands.
package broadcast
