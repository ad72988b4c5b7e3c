// Package nemesis hurts a fleet: a catalogue of faults, and a scheduler that
// draws and composes them by a seed and keeps a timeline.
//
// It knows hosts, their disks and their network (jepsen/host), and the product's
// command line. It must not know workloads or checkers.
//
// The rule of damage. Faults that lose data by design (a lying fsync with a power
// loss, a flipped bit, an unreadable file) only ever hit the victims of a run: a
// minority that the seed chooses once, so that a majority of disks is honest and
// whole from the first fault to the last, whatever else happens. A lying fsync
// needs more: of a write that was acknowledged by the victim and one other node,
// the other then has the only copy, and no protocol with 2f+1 replicas can stand a
// second mishap. Such a fault is therefore alone in its time, and its victim stays
// down until the others have proved, by a committed entry in every shard and in
// the system group, that a majority without it holds everything. A power loss with honest fsync may hit any
// nodes, all at once too. After a failed fsync a node's page cache is not what its
// disk has, so its heal is a reboot: the node is killed and what was not synced is
// dropped before it starts again; that loses nothing that could be acknowledged,
// and is no damage.
//
// Places for what other parts of the product bring: faults of membership, and of
// shards that split, merge and move get kinds of their own here; faults of clocks are
// behind Clock.
//
// Concurrency: an Env and a Scheduler may be used by many goroutines; Run of one
// Scheduler is called once.
//
// Invariants:
//
//	NE1  Everything that was injected is healed when Run returns, whatever failed.
//	     A heal may be repeated.
//	NE2  What is injected when is a function of the seed, the catalogue and the
//	     options, except whom it hits where a leader is meant, and what was skipped
//	     because it was not possible.
//	NE3  Each injection is recorded with begin, end, targets and description; one
//	     that nothing met is idle and does not count.
//	NE4  A node that several faults want down is started when the last one ends.
//	NE5  What the machine cannot inject is named with the reason.
//	NE6  The rule of damage holds.
package nemesis
