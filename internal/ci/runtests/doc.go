// Command runtests runs the product's tests in stages and counts them. It is
// what `make test` calls.
//
// A stage is either a list of checks (go vet, gofmt), each of which counts as
// one test, or `go test -json` runs whose events are counted. Counted are leaf
// tests: a test or subtest that started no subtest, and a parent that failed
// although none of its subtests did. A package that fails outside its tests
// (it does not build, it panics, TestMain exits) counts as one failed test, and
// so does a test that was running when its package ended. A test that two
// stages run counts twice.
//
// Tests that crash or kill what they test are named TestCrash... or TestKill...
// and run in the stage "crash"; the other stages leave them out.
//
// Every skipped test is listed with its reason and every failed one with its
// output. The last line is always "N passed, N failed, N skipped"; the exit
// code is 1 if anything failed, 2 if the command line is wrong.
//
// It must not know any product package. Its goroutines end before run returns.
package main
