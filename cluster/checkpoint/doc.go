// Package checkpoint decides what is to be done about the checkpoints of a
// cluster: it is the coordinator, which runs on the leader of the system group,
// as a step function. It starts checkpoints at an interval, chooses who uploads,
// leads a running one through its phases or fails it, has delete plans executed
// and orphans looked for.
//
// It must not know clocks, I/O, goroutines or Raft: time comes in with each step,
// and what is to be done goes out as actions. The caller proposes transactions,
// talks to the object store, and says what came of it.
//
// All that matters is in the records of the system group (package meta). What a
// Coordinator remembers are timers and what it has under way; a new leader begins
// with a new one and goes on, and one that was deposed and does not know it does no
// harm, since every transaction has its conditions and no key is ever used again.
//
// # Concurrency
//
// A Coordinator belongs to one goroutine at a time.
//
// # Invariants
//
//	CK1  An action depends on the view, the times that came in, and what was
//	     reported before, on nothing else.
//	CK2  A running checkpoint ends: it completes, or fails at its timeout under
//	     whoever then leads.
//	CK3  `_metadata` is the same bytes whoever makes it, as far as the records
//	     decide; a checkpoint completes only after it is known to be durable.
//	CK4  The uploader of a shard stays as long as its node lives and holds a
//	     replica, so that what it has uploaded is used again.
//	CK6  Participants acknowledge before a shard passes the barrier (ME11); one that
//	     is lost before that, or too late, fails the checkpoint by its name.
//	CK5  A rollback goes on from phase to phase under whoever leads; it ends at its
//	     timeout only while no shard can have been fenced.
package checkpoint
