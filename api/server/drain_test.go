package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// A stream that a drain has ended as shutting down, and so as not applied,
// submits nothing afterwards: a message that was received before may come late.
func TestDrainedPipelineTakesNothing(t *testing.T) {
	o := Options{}
	o.EnsureDefaults()
	p := newPipeline[int](context.Background(), &o)
	draining := make(chan struct{})
	close(draining)
	if err := p.take(10); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	sent := 0
	go func() {
		ended <- p.run(draining, func(batch []result[int]) error { sent += len(batch); return nil })
	}()
	p.answer(1, 1, 10) // it was outstanding, so the stream sends it first
	if err := <-ended; !errors.Is(err, base.ErrShuttingDown) || sent != 1 {
		t.Fatalf("%d results sent, then %v", sent, err)
	}
	if err := p.take(10); !errors.Is(err, base.ErrShuttingDown) {
		t.Fatalf("a request was taken after the end: %v", err)
	}
}

// A receiver that hangs in the backend, past the end of its stream, holds up
// neither a drain beyond its time nor a stop for ever.
func TestDrainDoesNotWaitForAHungSubmit(t *testing.T) {
	hung, entered := make(chan struct{}), make(chan struct{})
	f := &fake{submit: func(_ context.Context, _ cluster.Route, _ *raftfsm.Request, done func(raftfsm.Result)) {
		close(entered)
		<-hung
		done(raftfsm.Result{})
	}}
	k := newKit(t, f, Options{})
	defer close(hung)
	s, err := k.state.WriteStream(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&keelstatepb.WriteBatch{Requests: []*keelstatepb.WriteRequest{{Tag: 1}}}); err != nil {
		t.Fatal(err)
	}
	<-entered
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	if err := k.server.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("draining: %v", err)
	}
	if took := time.Since(start); took > 2*stopPatience {
		t.Fatalf("the drain took %v", took)
	}
}
