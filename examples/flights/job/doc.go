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
package job
