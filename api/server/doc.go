// Package server serves the client API over gRPC: it converts messages to the
// words of the cluster, refuses what cannot be converted, and hands the rest to
// a Backend, which decides everything else.
//
// It must not know hashicorp/raft or a storage engine, nor decide by itself
// where a key lives, who leads or what is declared.
//
// Concurrency: a Server serves any number of calls at once. A stream of writes
// or reads has one goroutine that receives and submits and one that sends (the
// handler's); nothing else calls Send or Recv. The goroutines of a stream end
// with it, and Stop waits for them.
//
// Invariants:
//
//	SV1  Every failure that leaves the server carries a detail with a reason and
//	     an outcome (package apierr); nothing is "not applied" here unless it
//	     was refused before it was submitted, or the Backend says so.
//	SV2  The requests of one write stream are submitted in the order received,
//	     and each is answered exactly once, by tag, unless the stream breaks.
//	SV3  What a stream holds, from receipt until its result is sent, is bounded
//	     in number and bytes, those that a read is expected to answer included;
//	     at the bound it stops receiving. So are the reads that run at once on
//	     the node, and the streams of a connection.
//	SV4  A stream that the client half-closes ends only after every result was
//	     sent.
//	SV5  No message over state.MaxMessageBytes is sent: what does not fit in an
//	     answer is refused by name, and whatever one write can store, one page
//	     can bring back.
//	SV6  A panic while serving a request answers base.ErrInternal (outcome
//	     unknown) to that request and ends nothing else.
//	SV7  A client that names another cluster than the node's (base.ClusterHeader)
//	     gets nothing but base.ErrIdentity: no request of it is looked at.
package server
