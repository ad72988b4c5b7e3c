// Package engine is the ordered key-value contract under one shard replica, and
// what is common to its implementations: packed write batches and a
// transaction overlay that lets one apply batch read its own writes.
//
// It must not know Raft, the manifest format, or any implementation. The
// implementations are engine/rocks (RocksDB) and engine/mem (copy-on-write
// trees in memory); engine/fault wraps either with injected errors. The layouts
// of Flink's state types on top of it are in engine/state.
//
// Concurrency: one goroutine writes a Store (Write, EnsureFamily, DropFamily, and
// Clip and Absorb of an Absorber); any number read it (Get, NewView) at the same
// time. Flush, Checkpoint and Compact may run beside the writer.
//
// Invariants:
//
//	EN1  A Batch is atomic over all families: after a crash either all of its
//	     operations are there or none. There is no write-ahead log: what was not
//	     flushed is lost, always as a suffix of whole batches.
//	EN2  Flush makes everything that was written before the call durable, in all
//	     families at one point.
//	EN3  A View does not change after its creation, whatever is written later.
//	EN4  Keys of one family are ordered by unsigned bytes.
//	EN5  Merge folds operands strictly in write order with the family's
//	     MergeKind; reads return the folded value, never an operand.
//	EN6  A store whose background work met a full disk waits with writes until
//	     there is room, and then answers base.ErrReopen to everything but reads:
//	     what it has in memory is not written any more. Close it and open it again.
package engine
