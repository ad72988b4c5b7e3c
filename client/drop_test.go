package keel

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

type testRequest struct{ tag uint64 }

type testPipe = pipe[*testRequest, uint64]

// newTestPipe is a pipe whose sends wait for the gate; what was sent comes out
// of the channel and what is put into answers comes back.
func newTestPipe(t *testing.T, gate chan struct{}, sent chan []*testRequest, answers chan uint64) *testPipe {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	open := func(ctx context.Context) (*stream[*testRequest, uint64], error) {
		return &stream[*testRequest, uint64]{
			send: func(q []*testRequest) error {
				sent <- q
				select {
				case <-gate:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			},
			recv: func() ([]uint64, error) {
				select {
				case a := <-answers:
					return []uint64{a}, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			},
		}, nil
	}
	start := func() bool { wg.Add(1); return true }
	return newPipe(ctx, &wg, start, open, func(q *testRequest, tag uint64) { q.tag = tag }, func(a uint64) uint64 { return a })
}

// What was dropped before it left never leaves, and what was dropped after it
// is not kept; neither is answered.
func TestPipeDrops(t *testing.T) {
	gate, sent, answers := make(chan struct{}), make(chan []*testRequest, 10), make(chan uint64)
	p := newTestPipe(t, gate, sent, answers)
	done := make(chan int, 10)
	add := func(n int) *exchange[*testRequest, uint64] {
		x := &exchange[*testRequest, uint64]{req: &testRequest{}, size: 1, done: func(uint64, error, bool) { done <- n }}
		if err := p.enqueue(x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	first := add(1)
	tag := (<-sent)[0].tag // the send is in progress
	second := add(2)
	third := add(3)
	if p.drop(first) || !p.drop(second) {
		t.Fatal("the first request had left and the second had not")
	}
	p.mu.Lock()
	pending := len(p.mu.pending)
	p.mu.Unlock()
	if pending != 0 || second.req != nil {
		t.Fatalf("%d requests are kept, and %v", pending, second.req)
	}
	gate <- struct{}{}
	if got := <-sent; len(got) != 1 || got[0] != third.req {
		t.Fatalf("%d requests left", len(got))
	}
	fourth := add(4)
	p.drop(fourth) // a batch with nothing in it is not sent
	gate <- struct{}{}
	answers <- tag // late, nobody waits
	answers <- third.req.tag
	if n := <-done; n != 3 {
		t.Fatalf("request %d is answered", n)
	}
	fifth := add(5)
	<-sent
	p.fail(errors.New("broken by the test"))
	if n := <-done; n != 5 || p.drop(fifth) {
		t.Fatalf("request %d is answered at the end, or a broken pipe drops", n)
	}
	if len(sent) != 0 || len(done) != 0 {
		t.Fatalf("%d more messages, %d more answers", len(sent), len(done))
	}
}

// A node that is silent does not gather what was taken back from it.
func TestSilentNodeGathersNothing(t *testing.T) {
	f := newFake(t, 2)
	c := f.client(WithAttemptTimeout(20 * time.Millisecond))
	v := f.value(c)
	f.setScript(func(node int, _ *keelstatepb.WriteRequest) deed {
		if node == 0 {
			return deed{hang: true}
		}
		return normal
	})
	p := c.Batch().Add(v.SetOp("a", "x")).Start(testContext(t))
	if p.err != nil {
		t.Fatal(p.err)
	}
	waitFor(t, func() bool { _, n := f.seen(); return n >= 4 }) // some attempts
	f.change(false, func() { f.leader = 1 })
	if _, err := p.Wait(testContext(t)); err != nil {
		t.Fatal(err)
	}
	wantApplied(t, f, "x")
	n, err := c.node(fakeAddress(0))
	if err != nil {
		t.Fatal(err)
	}
	w := n.writes()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.mu.pending)+len(w.mu.queue) != 0 {
		t.Fatalf("%d sent and %d unsent requests are kept", len(w.mu.pending), len(w.mu.queue))
	}
}

// All attempts of a write name the incarnation of the first.
func TestIncarnationIsPinned(t *testing.T) {
	f := newFake(t, 1)
	f.incarnation = 3
	v := f.value(f.client())
	f.setScript(func(int, *keelstatepb.WriteRequest) deed {
		if _, n := f.seen(); n > 1 {
			return normal
		}
		f.change(false, func() { f.incarnation = 4 })
		waitFor(t, func() bool { return v.client.topo.Load().incarnation == 4 })
		return deed{apply: true, cut: true}
	})
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	if len(f.writes) != 2 || f.writes[0].Incarnation != 3 || f.writes[1].Incarnation != 3 {
		t.Fatalf("the attempts are %v", f.writes)
	}
	if _, err := v.Set(testContext(t), "a", "y"); err != nil || f.writes[2].Incarnation != 4 {
		t.Fatalf("%v; the next write is %v", err, f.writes[2])
	}
}

// A refresh asks on where a node knows nothing newer.
func TestRefreshGoesOn(t *testing.T) {
	f := newFake(t, 3)
	c := f.client()
	if err := c.Ready(testContext(t)); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.knows = map[int]uint64{0: 1, 1: 1} // these two stay at the first revision
	f.mu.Unlock()
	f.change(true, func() { f.epoch = 2 })
	c.refresh()
	waitFor(t, func() bool { return c.topo.Load().revision == 2 })
}

// A null is no element of a list; the empty one is.
func TestListRefusesNull(t *testing.T) {
	f := newFake(t, 1)
	l, err := DeclareList(testContext(t), f.client().Keyspace("k", String.Type()), "l", Bytes)
	if err != nil {
		t.Fatal(err)
	}
	var e *Error
	if _, err := l.AddAll(testContext(t), "a", []byte{1}, nil); !errors.As(err, &e) || !errors.Is(err, ErrInvalid) || e.Field != "elements[1]" {
		t.Fatalf("got %v", err)
	}
	if _, err := l.Add(testContext(t), "a", []byte{}); err != nil {
		t.Fatal(err)
	}
}
