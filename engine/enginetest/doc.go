// Package enginetest is the conformance suite of engine.Driver: every clause of
// the contract and the invariants EN1 to EN5 of package engine, as tests that
// any implementation runs with Run.
//
// It must not know any implementation. Where the contract leaves a choice (how
// much of what was not flushed survives, whether Close waits for open views),
// the suite accepts every choice that is safe.
//
// Concurrency: each test has its own driver and directory.
package enginetest
