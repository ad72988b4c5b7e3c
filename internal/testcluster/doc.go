// Package testcluster runs several nodes of package cluster in one process, for
// tests: over an in-memory network with faults (internal/memnet), on directories
// of the test, with either engine. Simulations (internal/sim) run on it too.
//
// It must not know: the client API, the command line, what a test checks.
//
// Concurrency: a Cluster may be used by any number of goroutines, but Start, Stop
// and Restart of one node exclude each other by the caller. Methods that end the
// test are for its own goroutine.
//
// Invariants:
//
//	TC1  Conditions are polled; nothing sleeps for a guess.
//	TC2  Stop takes the power from a process: nothing is handed over or flushed,
//	     and its host's connections are reset. Files stay as they are.
//	TC3  All nodes are stopped when the test ends, and if it failed the state of
//	     each is printed first.
package testcluster
