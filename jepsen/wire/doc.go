// Package wire is a client that speaks the cluster's protocol as it is, and says in
// each request what its caller tells it to: any incarnation, epoch and session, and
// not which cluster it means. So it sends what a client of another language, or one
// of an older incarnation, could send, and the public Go client never does.
//
// It must not know: how nodes run, faults, workloads, the checkers.
//
// Concurrency: a Client may be used by any number of goroutines.
//
// Invariants:
//
//	WI1  A request says what the caller gave, and nothing more: no header names
//	     the cluster.
//	WI2  An error is a verdict of the cluster about the request: what only says
//	     that another node, or a later time, is to be asked is asked again until
//	     the context ends, and its end is an error of its own (ErrNoVerdict).
package wire
