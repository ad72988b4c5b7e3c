// Package raftfsm is the deterministic state machine of one shard replica: it
// decodes the commands of the shard's Raft log, decides each request of a write
// by the entry and the store alone, and writes the effects, the sessions, the
// clock, the sequence and the applied index in one engine batch.
//
// It must not know the network, gRPC, membership, the object store, wall time or
// randomness. Only raftadapter.go knows hashicorp/raft.
//
// Concurrency: Open, ApplyBatch and Swap are called by one goroutine at a time,
// the apply goroutine (raft's FSM goroutine). Everything else may be called from
// any goroutine at any time. The package starts no goroutine.
//
// Invariants:
//
//	RF1  The applied index is written in the same engine batch as the effects of
//	     its entry, and no entry is parted over two batches (rule W3, W2).
//	RF2  An entry at or below the applied index changes nothing.
//	RF3  What a request does is a function of the entries up to its own: how
//	     entries are grouped into batches, restarts and snapshots make no
//	     difference to state, results, sessions, sequence, clock or hashes (W4).
//	RF4  A request is atomic: it writes everything or nothing, and what was
//	     refused has used no sequence number.
//	RF5  The shard sequence grows by one with every applied mutation and the
//	     shard clock never goes back (W5, W6).
//	RF6  A (session, number, ordinal) is executed at most once; while its record
//	     is kept, every retry gets the first result (W3).
//	RF7  Range, epoch, incarnation and declaration are checked at apply, whatever
//	     the leader checked before (W1).
//	RF8  After a failed engine write nothing is applied any more: every later
//	     entry is answered with outcome unknown (W2).
//	RF9  A family is dropped only when the entry that dropped the state is
//	     durable, and a dropped declaration id is never declared again (W7).
//	RF10 A ReadView's header and data are of one instant.
//	RF11 What a rollback leaves is a function of its entry, of the state before it
//	     and of the checkpoint's files; a crash at any point of it leads to the
//	     same state.
//	RF12 Replay ends with the shard that the log had there, or with an error.
package raftfsm
