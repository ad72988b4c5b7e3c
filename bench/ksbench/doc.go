// Command ksbench measures a running cluster from outside, over the public
// client and over plain unary gRPC calls. scripts/bench.sh starts the clusters
// that it measures, but for those of checkpoints; docs/benchmarks.md has the tables.
//
//	ksbench load         operations per second and latencies
//	ksbench fill         writes a given amount of state
//	ksbench resume       kills a leader and times until its shards take writes again
//	ksbench restart      times until a node that was started again serves
//	ksbench checkpoints  checkpoints, rollback, restore and rebuilt replicas, on
//	                     clusters and an S3 service that it starts and removes
//	ksbench report       prints results as Markdown tables
//
// A client is a goroutine with one call outstanding. All clients of a
// measurement share the connections: one to each node.
//
// It must not know: anything but the client API, of a node's files the place of
// the mark of a damaged replica, and how a checkpoint's files are fetched.
//
// Concurrency: each client of a load has a histogram and random numbers of its
// own, merged when all have ended; what they share is atomic.
//
// Invariants:
//
//	KB1  Only calls that begin after the warm-up and end before the end of the
//	     measurement count.
//	KB2  A call that failed is counted as an error, never as an operation, and
//	     its latency is not recorded. A read of what is missing has failed.
//	KB3  Every measurement is bounded in time and in number of calls.
//	KB4  Calls at a constant rate are timed from when they were due, not from when
//	     the ones before made room for them.
//	KB5  What was restored or rolled back is compared with what was written.
//	KB6  Processes and files of a measurement are gone when it ends, however it does.
package main
