// Package workload drives a cluster through its public Go client and records
// what the clients did and saw (package history): registers, counters, lists,
// maps, banks and sessions, each judged by the checker of its name.
//
// It must not know: the cluster's packages, how nodes run, faults, the checkers.
//
// Concurrency: a Workload's Run may be called by any number of goroutines, each
// with a worker number of its own, after Setup and before Final. Drive does all
// of it.
//
// Invariants:
//
//	JW1  What is recorded as failed was not applied: only an error that says so
//	     makes a failure, anything else is unknown. A read without an answer is
//	     a failure, for it has no effect.
//	JW2  A client whose operation ended unknown goes on as another process.
//	JW3  Values are written once in a run, so that a read says whose write it
//	     saw; keys get a bounded number of operations each, so that checking
//	     stays cheap.
//	JW4  An operation has a time limit and is not cut short by the end of the
//	     run. The rate is bounded, whatever the errors.
//	JW5  Final reads every key that was used, until it succeeds.
//	JW6  Operations that are sent together are recorded apart, as open at once,
//	     and each is judged by its own answer. A worker sends none together
//	     after a call that did not succeed.
package workload
