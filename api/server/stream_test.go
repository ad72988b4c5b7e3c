package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

type writeStream = grpc.BidiStreamingClient[keelstatepb.WriteBatch, keelstatepb.WriteResults]

// collect receives results until the stream ends and checks that each tag is
// answered once.
func collect(t *testing.T, s writeStream) (map[uint64]*keelstatepb.WriteResult, error) {
	t.Helper()
	got := map[uint64]*keelstatepb.WriteResult{}
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return got, nil
		}
		if err != nil {
			return got, err
		}
		for _, r := range m.Results {
			if got[r.Tag] != nil {
				t.Fatalf("tag %d was answered twice", r.Tag)
			}
			got[r.Tag] = r
		}
	}
}

// TestWriteStream is SV2 and SV4: in order, each once, and all before the end.
func TestWriteStream(t *testing.T) {
	const n = 5000
	var mu sync.Mutex
	var order []uint64
	var late sync.WaitGroup
	f := &fake{submit: func(_ context.Context, route cluster.Route, req *raftfsm.Request, done func(raftfsm.Result)) {
		mu.Lock()
		order = append(order, req.Seq)
		mu.Unlock()
		r := raftfsm.Result{Token: raftfsm.Token{Group: route.Group, Sequence: req.Seq}, Replayed: req.Seq%7 == 0}
		if req.Seq%5 == 0 {
			r.Err = &base.Error{Cause: base.ErrPrecondition, Ordinal: 3}
		}
		if rand.IntN(2) == 0 {
			done(r)
			return
		}
		late.Add(1)
		go func() { defer late.Done(); done(r) }()
	}}
	k := newKit(t, f, Options{StreamRequests: 64})
	s, err := k.state.WriteStream(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		sent <- func() error {
			for i := uint64(1); i <= n; {
				b := &keelstatepb.WriteBatch{}
				for j := rand.IntN(20); j >= 0 && i <= n; j-- {
					b.Requests = append(b.Requests, &keelstatepb.WriteRequest{Tag: i + 1000, Shard: 4, Session: 1, Sequence: i, Mutations: []*keelstatepb.Mutation{put("k", "v")}})
					i++
				}
				if err := s.Send(b); err != nil {
					return err
				}
			}
			return s.CloseSend()
		}()
	}()
	got, err := collect(t, s)
	if err = errors.Join(err, <-sent); err != nil {
		t.Fatal(err)
	}
	late.Wait()
	if len(got) != n || len(order) != n {
		t.Fatalf("%d answers and %d submits of %d", len(got), len(order), n)
	}
	for i, seq := range order {
		if seq != uint64(i+1) {
			t.Fatalf("submit %d was of request %d", i+1, seq)
		}
	}
	for i := uint64(1); i <= n; i++ {
		r := got[i+1000]
		if r == nil {
			t.Fatalf("request %d was not answered", i)
		}
		if i%5 == 0 {
			if err := apierr.FromDetail(r.Error); !errors.Is(err, base.ErrPrecondition) || r.Error.Ordinal != 3 || !r.Error.HasOrdinal {
				t.Fatalf("request %d: %v", i, r.Error)
			}
			if r.Token.GetSequence() != i {
				t.Fatalf("request %d: the refusal has the token %v", i, r.Token)
			}
		} else if r.Error != nil || r.Token.GetSequence() != i || r.Token.GetShard() != 4 || r.Replayed != (i%7 == 0) {
			t.Fatalf("request %d: %v", i, r)
		}
	}
}

// TestStreamBounds is SV3.
func TestStreamBounds(t *testing.T) {
	for _, c := range []struct {
		name       string
		opts       Options
		valueBytes int
		atMost     int
	}{
		{"requests", Options{StreamRequests: 8}, 10, 8},
		{"bytes", Options{StreamBytes: 1 << 20}, 300 << 10, 3},
		{"one larger than all", Options{StreamBytes: 1 << 20}, 2 << 20, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			const n = 40
			held := make(chan func(raftfsm.Result), n)
			var outstanding, most atomic.Int64
			f := &fake{submit: func(_ context.Context, _ cluster.Route, _ *raftfsm.Request, done func(raftfsm.Result)) {
				now := outstanding.Add(1)
				if now > most.Load() {
					most.Store(now)
				}
				held <- done
			}}
			k := newKit(t, f, c.opts)
			s, err := k.state.WriteStream(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			sent := make(chan error, 1)
			go func() {
				sent <- func() error {
					value := string(make([]byte, c.valueBytes))
					for i := range uint64(n) {
						if err := s.Send(&keelstatepb.WriteBatch{Requests: []*keelstatepb.WriteRequest{{Tag: i + 1, Mutations: []*keelstatepb.Mutation{put("k", value)}}}}); err != nil {
							return err
						}
					}
					return s.CloseSend()
				}()
			}()
			eventually(t, "the bound is reached", func() bool { return len(held) == c.atMost })
			go func() {
				for range n {
					done := <-held
					outstanding.Add(-1)
					done(raftfsm.Result{})
				}
			}()
			got, err := collect(t, s)
			if err = errors.Join(err, <-sent); err != nil || len(got) != n {
				t.Fatalf("%d answers, %v", len(got), err)
			}
			if most.Load() > int64(c.atMost) {
				t.Errorf("%d requests were held at once, the bound is %d", most.Load(), c.atMost)
			}
		})
	}
}

// TestBadRequestsAnswerThemselves: what cannot be converted or panics does not
// end the stream (SV6).
func TestBadRequestsAnswerThemselves(t *testing.T) {
	f := &fake{submit: func(_ context.Context, _ cluster.Route, req *raftfsm.Request, done func(raftfsm.Result)) {
		if string(req.Mutations[0].Key) == "late panic" {
			done(raftfsm.Result{})
		}
		if string(req.Mutations[0].Key) != "good" {
			panic("boom")
		}
		done(raftfsm.Result{})
	}}
	k := newKit(t, f, Options{})
	s, err := k.state.WriteStream(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	bad := put("good", "")
	bad.Op = 99
	err = s.Send(&keelstatepb.WriteBatch{Requests: []*keelstatepb.WriteRequest{
		{Tag: 1, Mutations: []*keelstatepb.Mutation{bad}},
		{Tag: 2, Mutations: []*keelstatepb.Mutation{put("panic", "")}},
		{Tag: 3, Mutations: []*keelstatepb.Mutation{put("late panic", "")}},
		nil, // a message of no bytes: tag 0
		{Tag: 5, Mutations: []*keelstatepb.Mutation{put("good", "")}},
	}})
	if err = errors.Join(err, s.CloseSend()); err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, s)
	if err != nil || len(got) != 5 {
		t.Fatalf("%d answers, %v", len(got), err)
	}
	for tag, want := range map[uint64]*base.Sentinel{1: base.ErrInvalid, 2: base.ErrInternal, 0: base.ErrInternal} {
		if err := apierr.FromDetail(got[tag].Error); base.SentinelOf(err) != want {
			t.Errorf("tag %d: %v", tag, err)
		}
	}
	if got[3].Error != nil || got[5].Error != nil {
		t.Errorf("good requests failed: %v %v", got[3], got[5])
	}
}

// TestReadStream: concurrent, bounded, each answered once by tag.
func TestReadStream(t *testing.T) {
	const n, slots = 300, 4
	var running, most atomic.Int64
	f := &fake{read: func(_ context.Context, req *cluster.ReadRequest) (*cluster.ReadReply, error) {
		if now := running.Add(1); now > most.Load() {
			most.Store(now)
		}
		defer running.Add(-1)
		switch req.Queries[0].UserKey[0] % 10 {
		case 0:
			return nil, base.ErrNotLeader
		case 1:
			panic("boom")
		}
		return &cluster.ReadReply{Answers: []state.Answer{{Found: true, Value: req.Queries[0].Key}}, Errs: make([]error, 1)}, nil
	}}
	k := newKit(t, f, Options{StreamReads: slots, StreamRequests: 16})
	s, err := k.state.ReadStream(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		sent <- func() error {
			for i := range n {
				if err := s.Send(&keelstatepb.ReadBatch{Requests: []*keelstatepb.ReadRequest{{Tag: uint64(i), Queries: []*keelstatepb.Query{
					{Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: fmt.Append(nil, i), UserKey: []byte{byte(i % 100)}}}}}}); err != nil {
					return err
				}
			}
			return s.CloseSend()
		}()
	}()
	got := map[uint64]bool{}
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range m.Results {
			if got[r.Tag] {
				t.Fatalf("tag %d twice", r.Tag)
			}
			got[r.Tag] = true
			switch err := apierr.FromDetail(r.Error); r.Tag % 100 % 10 {
			case 0:
				if !errors.Is(err, base.ErrNotLeader) {
					t.Fatalf("tag %d: %v", r.Tag, err)
				}
			case 1:
				if !errors.Is(err, base.ErrInternal) {
					t.Fatalf("tag %d: %v", r.Tag, err)
				}
			default:
				if err != nil || string(r.Answers[0].Value) != fmt.Sprint(r.Tag) {
					t.Fatalf("tag %d: %v %v", r.Tag, err, r.Answers)
				}
			}
		}
	}
	if err := <-sent; err != nil || len(got) != n {
		t.Fatalf("%d answers, %v", len(got), err)
	}
	if most.Load() > slots {
		t.Errorf("%d reads at once, the bound is %d", most.Load(), slots)
	}
}

// TestClientGoesAway: a stream whose client is gone ends although a write is
// outstanding; its late answer is dropped.
func TestClientGoesAway(t *testing.T) {
	held := make(chan func(raftfsm.Result), 1)
	f := &fake{submit: func(_ context.Context, _ cluster.Route, _ *raftfsm.Request, done func(raftfsm.Result)) { held <- done }}
	k := newKit(t, f, Options{})
	ctx, cancel := context.WithCancel(testContext(t))
	s, err := k.state.WriteStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&keelstatepb.WriteBatch{Requests: []*keelstatepb.WriteRequest{{Tag: 1, Mutations: []*keelstatepb.Mutation{put("k", "v")}}}}); err != nil {
		t.Fatal(err)
	}
	done := <-held
	cancel()
	eventually(t, "the stream has ended", func() bool {
		return gaugeValue(t, k.server.metrics.open.WithLabelValues("State/WriteStream")) == 0
	})
	done(raftfsm.Result{})
	if err := k.server.Drain(testContext(t)); err != nil {
		t.Error(err)
	}
}

// TestDrain: outstanding writes are answered, idle streams and watches end, and
// the error says that the client should go elsewhere.
func TestDrain(t *testing.T) {
	held := make(chan func(raftfsm.Result), 1)
	f := &fake{topo: &cluster.Topology{Cluster: "c"},
		submit: func(_ context.Context, _ cluster.Route, _ *raftfsm.Request, done func(raftfsm.Result)) { held <- done }}
	k := newKit(t, f, Options{})
	ctx := testContext(t)
	watch, err := k.cluster.WatchTopology(ctx, &keelstatepb.GetTopologyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if top, err := watch.Recv(); err != nil || top.ClusterId != "c" {
		t.Fatalf("%v %v", top, err)
	}
	idle, err := k.state.WriteStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	busy, err := k.state.WriteStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := busy.Send(&keelstatepb.WriteBatch{Requests: []*keelstatepb.WriteRequest{{Tag: 9, Mutations: []*keelstatepb.Mutation{put("k", "v")}}}}); err != nil {
		t.Fatal(err)
	}
	done := <-held
	drained := make(chan error, 1)
	go func() { drained <- k.server.Drain(ctx) }()
	if _, err := watch.Recv(); !errors.Is(apierr.FromError(err), base.ErrShuttingDown) {
		t.Errorf("the watch ended with %v", err)
	}
	if _, err := idle.Recv(); !errors.Is(apierr.FromError(err), base.ErrShuttingDown) {
		t.Errorf("the idle stream ended with %v", err)
	}
	select {
	case err := <-drained:
		t.Fatalf("drained with a write outstanding: %v", err)
	default:
	}
	done(raftfsm.Result{Token: raftfsm.Token{Sequence: 77}})
	m, err := busy.Recv()
	if err != nil || m.Results[0].Tag != 9 || m.Results[0].Token.Sequence != 77 {
		t.Fatalf("%v %v", m, err)
	}
	if _, err := busy.Recv(); !errors.Is(apierr.FromError(err), base.ErrShuttingDown) {
		t.Errorf("the busy stream ended with %v", err)
	}
	if err := <-drained; err != nil {
		t.Errorf("draining: %v", err)
	}
}

// TestDrainIsBounded: a call that hangs is cut off when the time is over.
func TestDrainIsBounded(t *testing.T) {
	started := make(chan struct{})
	f := &fake{read: func(ctx context.Context, _ *cluster.ReadRequest) (*cluster.ReadReply, error) {
		close(started)
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	k := newKit(t, f, Options{})
	failed := make(chan error, 1)
	go func() {
		_, err := k.state.Read(testContext(t), &keelstatepb.ReadRequest{Queries: []*keelstatepb.Query{{Kind: keelstatepb.QueryKind_QUERY_KIND_GET}}})
		failed <- err
	}()
	<-started
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := k.server.Drain(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("drain: %v", err)
	}
	if err := apierr.FromError(<-failed); base.OutcomeOf(err) != base.OutcomeUnknown {
		t.Errorf("the call failed with %v, outcome %v", err, base.OutcomeOf(err))
	}
}
