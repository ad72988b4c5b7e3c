// Command ksbench measures a running cluster from outside, over the public
// client and over plain unary gRPC calls. scripts/bench.sh starts the clusters
// that it measures; docs/benchmarks.md has the tables.
//
//	ksbench load     operations per second and latencies
//	ksbench fill     writes a given amount of state
//	ksbench resume   kills a leader and times until its shards take writes again
//	ksbench restart  times until a node that was started again serves
//	ksbench report   prints results as Markdown tables
//
// A client is a goroutine with one call outstanding. All clients of a
// measurement share the connections: one to each node.
//
// It must not know: anything but the client API.
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
package main
