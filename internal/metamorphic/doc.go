// Package metamorphic drives raftfsm with random logs: it generates a log of
// commands (requests of every kind with preconditions and sessions, retries,
// duplicates, reorderings, parts of requests, declarations, drops, forgettings),
// predicts every result with a naive model, and runs the log under variants that
// must make no difference: engines, batch sizes, restarts with and without a
// flush, snapshots installed midway. Results, reads, scans, content hashes and
// op hashes must be equal.
//
// It is a harness: only tests import it. It must not know any engine
// implementation; tests pass drivers in. It shares with the product the pure
// parts that engine/state/statemodel shares, and nothing of sessions, batches or
// reads.
//
// Concurrency: everything runs on the caller's goroutine.
//
// Invariants:
//
//	MM1  A log is a function of the generator's draws, so that a seed repeats it
//	     and the property library can shrink it.
//	MM2  A variant differs from the reference only in what a replica may decide
//	     for itself.
package metamorphic
