// Package failpoint gives names to places in product code at which a test can
// end, fail, delay or stop a node (docs/failpoints.md lists them).
//
// Without the build tag `failpoints` the calls are empty functions that the
// compiler removes, names included. With it a point does nothing until it is
// armed, by KEELSTATE_FAILPOINTS or, on a node with --fault-injection, over HTTP
// at /debug/failpoints. The package knows no other package of the product, so
// that every one of them may use it; effects (signals, time, HTTP) are behind it,
// which keeps the pure packages pure (LI4).
//
// Arming is a list of name=action, separated by semicolons:
//
//	crash             SIGKILL to this process: no deferred call runs
//	panic             panic on the goroutine that is there
//	error, error(EIO) the place fails with this errno; with other words, so named
//	delay(20ms)       wait
//	stall             wait until released or disarmed
//	value(4096)       of the points that are a number: this one in its place
//	off               disarm
//
// An action may be followed by @N (let N times pass first) and *M (act at most M
// times). "raftlog.append.before-sync=crash@3" ends the process when it gets
// there for the fourth time.
//
// Concurrency: everything may be called from any goroutine. A stalled goroutine
// holds what it held.
//
// Invariants:
//
//	FP1  Without the tag no name of a point is in a binary.
//	FP2  Every call names one registered point by a literal, of the right kind,
//	     and every registered point is called (failpoint_test.go).
//	FP3  A point that is not armed changes nothing.
//	FP4  A list with any mistake arms nothing.
package failpoint
