// Package lint holds the rules of the repository that a plain Go test can
// check, so that they hold where no linter is installed: the dependency graph,
// the purity of the deterministic packages, what tests must not do, and the
// list of dependencies. It has no product code and knows no product package; it
// reads source and `go list`.
//
// The rules, cited by the tests:
//
//	LI1  Adapters are imported only by composition roots (and by tests).
//	LI2  An external library is imported only where its adapter lives.
//	LI3  Dependencies between product packages point one way.
//	LI4  The pure packages use no clock, randomness, os, net or go statement.
//	LI5  No package is named util or common; every package has a doc comment.
//	LI6  Tests sleep and skip only where testdata/allowed-sleeps.txt and
//	     allowed-skips.txt say why. A sleep is never in place of a condition.
//	LI7  No file names the host of a package registry or mirror.
//	LI8  Every direct dependency is in docs/dependencies.md with its licence and
//	     reason; none has a licence that the product cannot carry.
//	LI9  A node's code turns a time into a number, or back, only where
//	     testdata/allowed-wallclock.txt says why: what is left has no monotonic
//	     reading, and a step of the wall clock misleads whoever compares it.
package lint
