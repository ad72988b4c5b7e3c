// Package keel is the Go client of Keelstate. It learns the cluster from any
// one endpoint, routes keys to shards, retries what may be retried, and gives
// typed handles for the five kinds of keyed state.
//
//	client, err := keel.Open(ctx, []string{"127.0.0.1:7401"})
//	...
//	defer client.Close(ctx)
//	flights := client.Keyspace("flights", keel.String.Type())
//	delay, err := keel.DeclareReducing(ctx, flights, "max-delay", "max", keel.Int64)
//	...
//	_, err = delay.Add(ctx, "ATL", 17)
//	worst, found, err := delay.Get(ctx, "ATL")
//
// It must not know: the servers' packages (cluster, raftfsm, engine).
//
// Concurrency: a Client and every handle may be used by any number of
// goroutines. A Batch, a ReadBatch and an iterator belong to one.
//
// Invariants:
//
//	KC1  A write is applied at most once, however often it is sent: every send
//	     of one call carries the same session number. A write without a session
//	     is never sent again once its outcome may be unknown.
//	KC2  Writes to one shard take effect in the order in which the calls were
//	     started: each names its predecessor, and after any failure the open
//	     ones are sent again in order before new ones.
//	KC3  An error says what is known: not applied, applied or unknown. A call
//	     that ends early (deadline, cancelled) leaves its request open in the
//	     session; the client goes on to resolve it in the background.
//	KC4  After a session has ended none of its requests is sent under another
//	     session if it may have been applied.
//	KC5  Every queue is bounded in count or bytes; a full one makes callers
//	     wait, never the network's goroutines.
//	KC6  A client belongs to the first cluster that it learns of, and names it in
//	     every call: one that takes its place at the same addresses refuses it.
package keel
