package server

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/raftfsm"
)

// BenchmarkWriteRequest is the conversion of one decoded write.
func BenchmarkWriteRequest(b *testing.B) {
	for _, n := range []int{1, 100} {
		w := &keelstatepb.WriteRequest{Shard: 1, Epoch: 1}
		for i := range n {
			m := put(fmt.Sprint("key", i), "0123456789012345678901234567890123456789")
			m.Ordinal = uint32(i)
			w.Mutations = append(w.Mutations, m)
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(proto.Size(w)))
			for b.Loop() {
				if _, _, _, err := writeRequest(w); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkWriteStream is a stream over an in-memory connection to a backend
// that answers at once: the cost of the server and of gRPC per write.
func BenchmarkWriteStream(b *testing.B) {
	f := &fake{submit: func(_ context.Context, _ cluster.Route, _ *raftfsm.Request, done func(raftfsm.Result)) {
		done(raftfsm.Result{})
	}}
	k := newKit(b, f, Options{})
	s, err := k.state.WriteStream(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	const perBatch = 32
	batch := &keelstatepb.WriteBatch{}
	for i := range perBatch {
		batch.Requests = append(batch.Requests, &keelstatepb.WriteRequest{Tag: uint64(i), Shard: 1, Mutations: []*keelstatepb.Mutation{put("key", "0123456789012345678901234567890123456789")}})
	}
	b.ReportAllocs()
	sent := make(chan error, 1)
	n := 0
	go func() {
		for i := 0; i < b.N; i += perBatch {
			if err := s.Send(batch); err != nil {
				sent <- err
				return
			}
		}
		sent <- s.CloseSend()
	}()
	for n < b.N {
		m, err := s.Recv()
		if err != nil {
			b.Fatal(err)
		}
		n += len(m.Results)
	}
	if err := <-sent; err != nil {
		b.Fatal(err)
	}
}
