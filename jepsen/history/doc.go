// Package history is the record of what clients of a cluster did and saw: the
// operations with their times and outcomes, a recorder that writes them while
// they happen, and the reader of the saved file (docs/formats/jepsen-history.md).
//
// It must not know: the product, the workloads, the checkers.
//
// Concurrency: a Recorder may be used by any number of goroutines. Everything
// else is plain data.
//
// Invariants:
//
//	JH1  An operation's interval is never too small: Invoke is read before the
//	     operation is sent, Return after its answer is there.
//	JH2  An operation whose outcome is not known stays open: its Return is
//	     Never. It is neither dropped nor a failure (case B81).
//	JH3  Fail means that the operation was not applied and never will be.
//	JH4  An operation's first line is handed to the file before the operation
//	     is sent, so that any prefix of the file is a history that could have
//	     been recorded: what a read saw in it was begun in it.
//	JH5  A process has at most one operation open; after an unknown outcome it
//	     begins no other. A client goes on as a new process.
//	JH6  A reader bounds lines and counts before it allocates; a version that
//	     it does not know is base.ErrFormatVersion, all else that is wrong
//	     base.ErrCorrupt. A file that only ends early is a prefix.
package history
