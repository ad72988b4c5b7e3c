// Command keelctl is the command line of Keelstate: it founds, inspects and
// operates a cluster, and reads and writes its keyed state.
//
// It must not know: the servers' packages. It is a caller of package keel and
// of the Admin service.
//
// Concurrency: one command runs at a time; nothing here is shared.
//
// Invariants:
//
//	KX1  Data goes to stdout, everything else to stderr.
//	KX2  Every command that prints data obeys -o and --columns, and every error
//	     obeys -o: under json, yaml and jsonl it is one object on stderr.
//	KX3  The exit code depends on what happened, never on the output format.
//	KX4  A status is never "healthy" beside a member that did not answer.
//	KX5  A command that had its effect never reports "not applied": --columns is
//	     checked before anything is sent, and an error of printing afterwards has
//	     the outcome applied.
package main
