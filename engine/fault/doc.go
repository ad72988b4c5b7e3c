// Package fault wraps an engine.Driver so that tests of the layers above can
// make chosen operations fail or take long: by operation, by count, by store.
//
// It must not know any implementation, and keeps no state of its own: an
// operation that fails by Error has not reached the store below, one that fails
// by After has been done there and only its answer is replaced.
//
// Concurrency: Plan may be changed while stores are in use; everything else is
// as safe as the store below.
//
// Invariants:
//
//	FA1  Without rules, a wrapped store behaves as the one below (it passes the
//	     conformance suite).
//	FA2  A rule fires on the operations it names, from number Skip+1 on, Times
//	     times, counted over all stores that it applies to, and on nothing else.
package fault
