// Command keelstate-node is one node of a cluster: the composition root that
// reads the configuration, builds the storage engine, gossip and the node, and
// serves the client API and the operator's HTTP endpoints.
//
// It must hold no rules of its own about data, membership or consistency.
//
// Order. Start: configuration, listeners (so that a taken port is an error at
// once), HTTP, engine, object store (which may be down), node, gossip, gRPC. Stop: not ready, offices handed over,
// gRPC drained, gossip left, node, object store and
// engine closed, HTTP closed.
//
// Invariants:
//
//	CN1  A setting comes from exactly one place, by flag > environment > file >
//	     default, and `config explain` names it. An unknown key of the file is
//	     refused, and so is a value that does not parse; the error names the
//	     setting and where it came from.
//	CN2  Readiness turns false before the first office is handed over.
//	CN3  When the node cannot go on, the process ends at once with code 70 and
//	     the cause as its last log line; nothing is flushed by then. A disk that
//	     fails while the node starts or stops ends it with the same code.
//	CN4  Exit codes: 0 stopped by a signal, 1 failed, 2 usage, 70 see CN3.
//	CN5  What injects faults into a running node exists under --fault-injection
//	     only; without it its paths are not found.
package main
