// Package job is the flights job without the cluster: it reads flights from
// CSV, folds them by origin into keyed state of every kind, resumes where it
// stopped, and writes reports from what the store holds.
//
// It must not know the Keelstate client: Store and Source say what it needs of
// one, and the command binds them.
//
// Concurrency: Run starts its own goroutines and waits for them. One goroutine
// at a time works for an origin, many origins are on their way at once.
//
// Invariants:
//
//	FJ1  Rows of one origin are applied in the order of the input.
//	FJ2  A row is counted exactly once: an update moves the origin's position
//	     in the same atomic request as its state, and requires the position
//	     that it starts from. A repeated update fails that precondition.
//	FJ3  A run that was taken over is fenced: the position names its owner, a
//	     new run claims an origin before its first update, and from then on
//	     the old run's preconditions fail. It stops. Runs are ordered by the
//	     generation that each raises at its start, and none claims from a newer
//	     one: an old run that wakes up is the one that stops, never the new one.
//	FJ4  What is written absolutely (counts per destination) is read after the
//	     claim, so that nobody else can change it until we are fenced.
//	FJ5  Memory is bounded by the window of rows and the number of origins, not
//	     by the input.
//	FJ6  Reports hold what the store answered, never what the run remembers.
//
// With rollback (RunWithRollback) the source has one position, which checkpoints keep:
//
//	FJ7  A checkpoint is given the line up to which every row that was read is
//	     counted, and acknowledged by the store, and none behind it is on its way.
//	     An attempt begins with a state that holds the rows up to its position
//	     and nothing else; no row is recognised as counted by anything else.
//	FJ8  At most one attempt writes after a state has begun: it takes the turn of the
//	     incarnation before, and says that it has begun before its first row, both
//	     by conditional writes. Whoever finds that another has begun takes the
//	     cluster back to a checkpoint, which ends the other's session and begins
//	     another incarnation.
//	FJ9  There is a checkpoint with the position before the first row is written.
//	FJ10 A run that was replaced stops; it never takes the turn back.
package job
