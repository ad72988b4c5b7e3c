// Package state lays Flink's state types out over engine's ordered keys:
// Value, List, Map, Reducing and Aggregating state with namespaces, their
// built-in functions, preconditions, reads and scans, and the content hash.
//
// It must not know Raft, sessions, or any engine implementation. It is
// deterministic: given the store and the arguments, it does the same on every
// replica (rule W4): no clock, randomness, map order or goroutines.
//
// Concurrency: Apply and Check run on the one apply goroutine of a replica;
// reads run on any goroutine over an engine.View.
//
// Invariants:
//
//	ST1  Two different (key, namespace, user key) triples of a state never have
//	     the same engine key, and neither is a prefix of the other.
//	ST2  All entries of one (key, namespace) are contiguous, and of one key
//	     group too; entries of a map are in byte order of the encoded user key,
//	     elements of a list in append order.
//	ST3  Every stored value starts with a header that carries the shard
//	     sequence of its last write.
//	ST4  A mutation that is refused has written nothing.
//	ST5  Nothing can be written that cannot be read back within the limits of
//	     Limits.
package state
