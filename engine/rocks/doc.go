// Package rocks is the engine on RocksDB: one database per shard replica, one
// column family per state, and a small C++ layer compiled with the package that
// does in one crossing what Go would do per key. The directory is described in
// docs/formats/engine-rocks.md, the reasons in DESIGN.md.
//
// It must not know Raft, the state layouts beyond the prefix of a key (group
// bytes and the escaped key with its terminator 0x00 0x01), or what values mean
// beyond the family's MergeKind.
//
// Concurrency: as engine says. Every read enters the gate of its family, every
// other call that of the store; Close shuts the gates, waits until all are out,
// and frees what is still open, so that a late call gets base.ErrClosed and
// never freed memory. Store.mu is a leaf lock.
//
// Invariants:
//
//	RO1  The write-ahead log is off and atomic_flush is on: whatever triggers a
//	     flush, all families reach the disk at one point of the write order,
//	     between two batches, in one edit of the manifest. Where RocksDB would
//	     choose the families beside a batch that is being written, the writer is
//	     excluded (ks_store in native_internal.h).
//	RO2  A family's options are part of its column family's name, so they are
//	     durable with it and cannot differ from it.
//	RO3  The prefix of a key is total: every key has one, if need be itself,
//	     and keys of one prefix are contiguous. A scan looks at one prefix alone
//	     only if it goes forward and both bounds have the same complete prefix.
//	RO4  The native merge operators give the bytes of engine.Fold, for every
//	     grouping of operands.
//	RO5  A batch with a malformed merge operand is refused whole: in the store
//	     it would stop every later flush.
//	RO6  Every native object is freed by its owner on every path; LiveObjects is
//	     0 when all drivers are closed.
//	RO7  No native function calls back into Go.
//	RO8  A full disk stops nothing for good: Write waits, and once there is space
//	     everything but reads fails with base.ErrReopen (EN6). RocksDB is never
//	     asked to go on after a background error, and no flush or checkpoint
//	     succeeds while one stands.
//	RO9  A forced flush, a checkpoint, a compaction and Close wait for a batch that
//	     is being written and for nothing that the writer does not wait for too;
//	     none waits for a compaction that finds no room.
//	RO10 Clip leaves neither a key outside the range, nor a range tombstone, nor a
//	     file of level 0. Absorb takes only such files, by hard links, and looks at
//	     all of them before it changes anything.
package rocks
