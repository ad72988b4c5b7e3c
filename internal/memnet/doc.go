// Package memnet is a network in memory with faults, for tests: listeners and
// stream connections between named hosts, with partitions of one direction,
// held bytes, cuts, refused dials, seeded delays and seeded random cuts.
//
// It must not know any product package. A Host has the shape of the network
// seam that the product declares (Listen and Dial).
//
// Concurrency: every method may be called from any goroutine. All state is
// guarded by one mutex per Network and waiting uses a condition variable and
// timers of package time only, so that a Network works inside a
// testing/synctest bubble. A Network starts no goroutine of its own.
//
// Invariants:
//
//	MN1  Bytes of one connection and direction arrive in order, none twice and
//	     none missing, until the connection is cut or closed.
//	MN2  Bytes written while their direction is blocked are held, as TCP's
//	     retransmission would, and arrive after the direction is opened again.
//	     This is how answers of a stalled peer get buffered.
//	MN3  A writer has at most Window bytes under way per connection and
//	     direction; then Write blocks, as a full TCP window does.
//	MN4  A dial through a blocked direction (either of the two) waits until its
//	     context ends; a dial to an address nobody listens on is refused at once.
package memnet
