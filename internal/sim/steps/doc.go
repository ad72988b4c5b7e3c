// Package steps simulates the parts of the product that are step functions,
// under one event loop: the metadata (broadcast and broadcast/meta), the session
// windows of a shard (raftfsm) and the placement of shards (keygroup); and, in a
// world of its own (RunCheckpoints), the coordinator of checkpoints
// (cluster/checkpoint) with the registry of objects (broadcast/meta) and the
// collection of garbage (snapshot), in both modes, with the log stored between
// checkpoints. In RunRollbacks the shards of that world hold
// something (raftfsm), are written to, and are rolled back. Messages are late, lost and doubled, replicas
// apply the same log at different times and restart, clients give up, coordinators
// are deposed and do not notice, uploaders die, are slow, go on after the end and
// report twice, the object store fails before and after it did what it was asked;
// every choice follows from the seed.
//
// It must not know: package cluster itself, Raft, goroutines, the clock of the machine.
//
// Concurrency: none. One goroutine runs one Loop.
//
// Invariants:
//
//	SS1  A run is a function of its seed: the same seed has the same trace, and
//	     so the same Sum.
//	SS2  The copies of a log that have applied the same entries are equal, byte
//	     for byte, whenever they applied them and however often they restarted.
//	SS3  A numbered request that was acknowledged was applied exactly once, any
//	     other at most once; those of a session in the order of their numbers.
//	SS4  Ids of sessions and states are never used twice; a session that has
//	     ended never lives again; revision and clock never go back.
//	SS5  A placement depends on the set of its inputs, not on their order, and
//	     is balanced.
//	SS6  What the registry holds is in the object store, and so is everything that
//	     a completed checkpoint names, with its bytes; that is also in the registry.
//	SS7  Numbers of checkpoints grow, attempts are given once; a planned key never
//	     gets into the registry; nothing leaves the registry while a checkpoint
//	     runs, and nothing is in it that no checkpoint uses.
//	SS8  Objects that are not the cluster's own stay as they are.
//	SS10 What a participant has given to a completed checkpoint is exactly what the
//	     cuts of the shards hold of it.
//	SS11 A shard that was rolled back holds exactly what it held at the barrier of the
//	     checkpoint, on every replica, wherever a process died meanwhile; its clock
//	     and sequence never go back.
//	SS12 A request that was made before a rollback is not applied after it, and nothing
//	     is read by who does not know of it; no session lives on. In the phase swap
//	     nothing is acknowledged.
//	SS13 A majority of a shard's replicas is never damaged by a rollback.
//	SS14 At most one rollback runs, no checkpoint beside it, and its target is kept;
//	     it is given up in its first phase only, and opens when every shard is rolled
//	     back, with a new incarnation, new epochs and no session left, at once.
//	SS15 Nobody but its user deletes a savepoint, and none is counted: a checkpoint is
//	     retired only when as many newer ones as are retained are no savepoints.
//	SS16 The segments of a checkpoint of mode changelog lead from the files of an
//	     earlier one to the cut of the shard, without a gap.
//	SS9  At rest, the store holds what is retained, what is foreign, and the log that
//	     was stored after the last checkpoint, nothing else.
package steps
