// Package runner runs the chaos harness: it starts a cluster of real processes,
// drives workloads while a seeded schedule of faults hurts it, heals it, waits
// until it serves again, reads what is left, and has everything judged.
//
// A run is a row of episodes on one cluster. An episode has clients, keys and a
// history of its own; its schedule follows from the run's seed and the episode's
// number alone, so that one episode can be run again. Its style is single faults,
// a mix, or cascades, in which faults hit a cluster that still recovers.
//
// It knows hosts, faults, workloads, checkers and the report, and the product by
// its client, its command line and its wire. It must not know how any of them works.
//
// Concurrency: one Run at a time uses a folder. All goroutines and processes
// have ended when it returns.
//
// Invariants:
//
//	RU1  Whatever happens, a failure and an interrupt too, no process, mount,
//	     namespace or control group is left when Run returns.
//	RU2  A verdict is never better than what was seen: what could not be looked
//	     at is unknown, an interrupted run is unknown, an episode that was
//	     interrupted is not counted.
//	RU3  A run ends at the first failure and keeps everything; otherwise the
//	     nodes' data is removed and the histories are packed.
//	RU4  Healing is judged apart from safety: within check.HealLimit every shard
//	     leads, writes, reads, and has equal hashes on all replicas.
//	RU5  Faults that are not possible here are named in the report, once.
//	RU6  What is said of the object store or of a checkpoint counts only if the
//	     store was sound, or the checkpoint retained, all the time. Nodes that are
//	     paused for a restore go on, whatever comes of it.
//	RU7  After a rollback every key reads as it did before the savepoint, and what
//	     was written since is gone. Savepoints go with their episode.
//	RU8  A cluster that was restored from a checkpoint takes no request of the
//	     incarnation that made it, from whoever names no cluster (package wire).
package runner
