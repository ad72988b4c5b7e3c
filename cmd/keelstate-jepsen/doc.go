// Command keelstate-jepsen is the chaos harness: it runs real nodes under faults,
// judges what clients saw, and reports (docs/jepsen.md).
//
// It is the composition root of jepsen/runner and jepsen/report, and knows no
// rules of theirs.
//
// Concurrency: one command runs; an interrupt cancels its context.
//
// Invariants:
//
//	KJ1  Data goes to stdout, everything else to stderr.
//	KJ2  Errors obey --output.
//	KJ3  The exit code is the same in every format: 0 pass, 1 the harness could
//	     not do it, 2 usage, 3 there is no such run, 6 a verdict of fail, 8 a
//	     verdict of unknown, 130 interrupted. Unknown is never 0.
package main
