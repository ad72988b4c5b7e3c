// Package cluster starts a real Keelstate cluster in the process of a test:
// real nodes with an in-memory network between them, and each with the gRPC
// server on a loopback port, so that a real client can be pointed at it.
//
// It must not know: what the tests do with it. It is a composition root.
//
// Concurrency: Start, Stop and Restart of different nodes may run at once;
// those of one node may not.
//
// Invariants:
//
//	KTC1  A node keeps its address over restarts.
//	KTC2  Everything is stopped when the test ends.
package cluster
