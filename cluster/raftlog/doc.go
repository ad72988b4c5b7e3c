// Package raftlog is the one log of a node for all its Raft groups. Every group
// sees its own hashicorp/raft LogStore and StableStore; underneath, all of them
// share one append-only log and one committer, so that one fsync serves the
// writes of many groups.
//
// It must not know what entries mean, who leads, or which groups the node ought
// to have: it stores what it is given, and says what it lost.
//
// Concurrency: all methods of Log and GroupLog may be called by any goroutine.
// Two goroutines own work: the committer, which alone writes to the active
// segment and alone changes what groups hold, and the compactor, which alone
// removes segments. Lock order: GroupLog.mu before Log.mu. No file is touched
// and no callback is called under either lock.
//
// Invariants:
//
//	RL1  A call that changes anything returns nil only after an fsync that
//	     covers it. Terms and votes are such changes.
//	RL2  One batch is one write and one fsync. The next batch is not written
//	     before the fsync of the one before has returned; so a valid record of
//	     a later batch proves that all before it was once durable.
//	RL3  A torn tail is cut only in the last segment and only where RL2 does
//	     not prove that the bytes were durable. Anything else that is invalid
//	     is base.ErrCorrupt with file and offset; nothing is dropped silently.
//	RL4  After a failed write or fsync the log is dead: every later call
//	     returns base.ErrDiskFailed, and no fsync is tried again. RL11 is the
//	     one exception.
//	RL5  What recovery accepts it makes durable before Open returns, by writing
//	     the last batch once more: its pages may be clean in the cache and
//	     absent on disk after an fsync that failed.
//	RL6  A segment is removed only when no entry in it is live and a later
//	     segment begins, durably, with the state of every group.
//	RL7  Bytes on disk stay below twice the live bytes plus a constant: live
//	     remains in the oldest segment are rewritten forward.
//	RL8  The entries of a group are dense: no gaps, no overlaps. Deletes take
//	     a prefix, a suffix, or all.
//	RL9  A tombstone stays for ever; the group comes back only under a higher
//	     generation, and empty.
//	RL10 A TermGuard never lets a term go back.
//	RL11 A write that a full disk refuses (ENOSPC, at the write and not at its
//	     fsync) waits and is tried again at the same place: nothing of it was
//	     promised. Meanwhile OldestPendingSync grows. Open does not wait.
package raftlog
