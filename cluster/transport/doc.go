// Package transport is the traffic between the nodes of a cluster: Raft for
// all groups, node-level calls, file streams and term polls, over one TCP port
// per node.
//
// It must not know the client API, the state machine, the storage engine or
// what a manifest says. It knows Raft's messages, node ids and group ids.
//
// Connections. Per peer a node keeps one connection for small urgent messages
// (votes, heartbeats, term polls), AppendConns for log appends, one for calls,
// and opens one for each file stream. Each begins with a handshake. The wire
// format is in docs/formats/node-transport.md.
//
// Concurrency. Every exported method may be called from any goroutine. Per
// outgoing connection there are a reader, a writer and a keep-alive goroutine;
// per incoming one a reader and a writer; per group one pump; per pipeline one.
// Readers never wait for a group, a handler or a writer. All goroutines belong
// to the Transport and Close waits for them.
//
// Invariants:
//
//	TR1  SetHeartbeatHandler does nothing (design rule R1): every Raft request
//	     of a group takes raft's main loop.
//	TR2  No message is delivered before the handshake compared cluster, node,
//	     disk and engine on both sides. With a node that has no cluster only
//	     MethodAdmission passes.
//	TR3  A Raft request is delivered only to the replica id that it means.
//	TR4  A muted group or node neither delivers nor sends, and an answer that
//	     was under way when the mute began is dropped as well. But an
//	     InstallSnapshot is refused: its sender would wait for StallTimeout,
//	     however short the mute, and an error is no contact to raft.
//	TR5  A slow group, handler, file or large append delays no other lane: every
//	     queue is bounded, and a full one refuses instead of blocking a reader.
//	TR6  The answer of a term poll serves only those who asked before the poll
//	     was sent. No request is ever sent twice by the transport.
//	TR7  At most one snapshot of a group is being prepared, and raft sees an
//	     InstallSnapshot only after its preparation succeeded.
//	TR8  A failed append is never handed to raft as an answer.
//	TR9  Sizes from the network are bounded before memory is allocated; bytes
//	     from the network never cause a panic, in raft's decoders included.
//	TR10 FetchFile ends in io.EOF only after exactly the file's bytes, each
//	     under a verified checksum.
package transport
