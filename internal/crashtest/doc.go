// Package crashtest drives real node processes from outside and breaks them:
// SIGKILL, SIGSTOP, removed directories, garbage on the ports. It holds tests only.
//
// It starts keelstate-node and keelctl, which it builds, and uses the public
// client and the protobuf API. It must not know: cluster, raftfsm, engine.
//
// Each test prints its seed. KEELSTATE_SEED repeats a schedule (processes and
// clocks still differ), KEELSTATE_LONG=1 or -long lengthens the runs.
//
// Concurrency: the schedule of faults runs in the goroutine of the test; every
// workload has goroutines of its own, ended before results are judged.
//
// Invariants:
//
//	CR1  Only processes that a test started are signalled, by id, and none
//	     outlives the test's process.
//	CR2  A call whose outcome is unknown counts as open for ever: it may have
//	     taken effect at any time after its start, or never.
//	CR3  Nothing is judged by how long it took, but for a generous limit within
//	     which a cluster with a quorum must take writes again.
//	CR4  A node that ends by itself fails the test, but for the failpoint that
//	     it was told to end at; one that gets SIGTERM ends with code 0.
package crashtest
