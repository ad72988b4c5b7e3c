// Package check judges histories (package history): one checker for each
// workload, and verdicts on what a cluster must show after it has healed.
//
// It must not know: the product, files, the network, who made a history. Real
// runs and simulations use it alike.
//
// Concurrency: checkers are values without state and may be used by any number
// of goroutines; one Check uses up to Options.Parallel of them and returns when
// they have ended.
//
// Invariants:
//
//	CK1  No false alarm: a history that a correct cluster can produce never
//	     fails. Fail comes with the operations that prove it.
//	CK2  An operation with an unknown outcome may take effect at any time after
//	     its beginning, or never (case B81). One that failed takes no effect.
//	CK3  What could not be decided within Options.Limit, or proves nothing, is
//	     Unknown. Unknown is not a pass: Combine keeps it.
//	CK4  Time and memory are nearly linear in the history, but for the search
//	     of the linearizability checker, which is bounded by Limit and by
//	     maxPart.
//	CK5  Each read is judged by the level that it asked for. There is a
//	     rule for linearizable reads only; a history with others is Unknown
//	     until they have theirs (a read at a token: not older than the token;
//	     a stale read: some state of the past, never backwards in a session).
package check
