// Package mutants plants bugs in the product, to see whether the chaos harness
// finds them. Each NN-name.patch is one bug: a head of "Key: value" lines and a
// unified diff against the tree. A mutant is built with `go build -overlay` from
// patched copies; product code never holds any of them.
//
// Keys of the head:
//
//	Rule    the rules of the design or invariants of a package that it breaks
//	Breaks  what it does
//	Sees    what the harness should see of it
//	Unit    package and -run pattern of tests that hold the rule
//	By      steps, sim, jepsen: which harnesses can see it at all
//	Faults  the --faults of a real-process run that it needs; all if missing
//	Flags   more flags that such a run needs
//	Kind    the -sim.kind that it needs
//
// `make mutants` runs them (command run below). A mutant counts as found when a
// simulation (steps: that of the step functions, TestCheckpoints
// and TestRollbacks of internal/sim/steps, which a seed repeats exactly; sim: that of the whole cluster) or
// a real-process run finds it; a unit test alone is noted as such.
//
// The package must not know: the product, but as text.
//
// Concurrency: none; one mutant after the other.
//
// Invariants:
//
//	MU1  A hunk applies only where its old lines are, exactly; line numbers are
//	     a hint where they are more than once. A patch that does not apply is an
//	     error, never a mutant that does less.
//	MU2  A mutant is found only if a detector ran to its verdict and said so; one
//	     that could not be built, or ran out of time, is not.
//	MU3  Without a mutant every detector passes (the control): else nothing that
//	     they say counts.
package mutants
