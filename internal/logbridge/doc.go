// Package logbridge lets libraries that log through hclog (raft) or the
// standard library's log package (memberlist) write to a log/slog logger.
//
// It must not know any product package.
//
// Concurrency: the loggers may be used from any goroutine; the level is atomic
// and shared by all loggers derived from one.
//
// Invariants:
//
//	LB1  A message never has more than MaxMessage bytes, whatever a library
//	     puts into it: some print what they got from the network.
//	LB2  The slog handler decides about enabled levels as well as the bridge's
//	     own level; a message must pass both.
package logbridge
