// Package sim runs the real cluster in simulated time: the nodes of package
// cluster with hashicorp/raft unmodified, engine/mem, an in-memory network
// (internal/memnet) and a Raft log on a disk in memory that crashes
// (internal/vfs), all inside a bubble of testing/synctest. The workloads of
// jepsen/workload drive them at package cluster's API and the checkers of
// jepsen/check judge what they saw, so that simulations and real runs are judged
// alike. Runs with rollbacks have an object store too, of files behind calls that
// fail.
//
// It must not know: gRPC, the command line, real networks, RocksDB.
//
// A seed decides what a run is made of and every fault of its plan. It does not
// decide which of two goroutines goes first: a run is NOT fully replayed by its
// seed. Its trace and history are the evidence, and are kept when it fails; the
// same seed some times more often finds the same again.
//
// Within a bubble, time passes only when every goroutine waits for something
// that time or another goroutine of the bubble gives. A goroutine that waits for
// a sync.Mutex does not count: code that holds a mutex while it waits for a
// disk, the network or a timer makes the run stand still. A watchdog outside ends
// it with all stacks, for that is a fault of the code (house style: no I/O under
// a lock).
//
// Concurrency: one goroutine, the bubble's main one, owns the hosts: it alone
// starts and kills processes. Clients have goroutines of their own.
//
// Invariants:
//
//	SM1  What a process answers after its death reaches nobody: a client of a
//	     host whose life has changed sees a broken connection.
//	SM2  A process that dies keeps of its Raft log what it had synced and a part
//	     of the rest; no call that it makes after its death has an effect. The
//	     files of the engine and of snapshots are the operating system's and
//	     lose nothing: for these there are jepsen and the crash tests.
//	SM3  What a client did not see the outcome of is open in its history; only
//	     what an error says was not applied is recorded as failed.
//	SM4  A run passes only if every checker decided and passed, every healing was
//	     followed within 30 s by a leader, a write, a read and equal hashes for
//	     every shard, all nodes are ready in the end, no process ended itself
//	     without a fault of its disk, and no goroutine is left.
//	SM5  No replica's term falls, not even over a crash, and no term of a group has
//	     two leaders, as far as looks show it: one before each crash, one after each
//	     start, and one every Config.Look.
//	SM6  When the disk of a shard's leader hangs and nothing else is wrong, the
//	     shard takes a write within Config.serviceLimit.
//	SM7  A session never forgets a request that its client has not resolved.
//	SM8  A rollback, beside faults and load, leaves what the checkpoint holds: of the
//	     incarnation in which it was made, all that was acknowledged before it was
//	     asked for and nothing that was sent after it completed; of earlier ones what
//	     they held then; of later ones nothing. What an ended incarnation left stays.
//	     (Config.Rollbacks; each incarnation is also judged by itself.)
//	SM9  After a rollback no request of the old incarnation is taken, and replicas
//	     agree. A checkpoint that is retained in the end can be read, whole.
package sim
