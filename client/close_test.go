package keel

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// Close ends open calls, saying what is known.
func TestCloseEndsCalls(t *testing.T) {
	f := newFake(t, 1)
	c := f.client()
	v := f.value(c)
	f.setScript(func(int, *keelstatepb.WriteRequest) deed { return deed{hang: true} })
	p := c.Batch().Add(v.SetOp("a", "x")).Start(testContext(t))
	if p.err != nil {
		t.Fatal(p.err)
	}
	if err := c.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	_, err := p.Wait(testContext(t))
	var e *Error
	if !errors.As(err, &e) || !errors.Is(err, ErrClosed) || e.Outcome != OutcomeUnknown {
		t.Fatalf("got %v, want closed with an unknown outcome", err)
	}
	if _, err := v.Set(testContext(t), "a", "y"); !errors.Is(err, ErrClosed) {
		t.Fatalf("after Close: %v", err)
	}
}

// With no node to say goodbye to, Close ends by itself and closes all the same.
func TestCloseWithoutNodesEnds(t *testing.T) {
	t.Parallel() // it takes as long as a farewell
	f := newFake(t, 1)
	c := f.client()
	v := f.value(c)
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	f.nodes[0].server.Stop()
	closed := make(chan error, 1)
	go func() { closed <- c.Close(context.Background()) }()
	select {
	case err := <-closed:
		var e *Error
		if !errors.As(err, &e) {
			t.Fatalf("the farewell that nobody heard: %v", err)
		}
	case <-time.After(farewell + 10*time.Second):
		t.Fatal("Close does not end")
	}
	if _, err := v.Set(testContext(t), "a", "y"); !errors.Is(err, ErrClosed) {
		t.Fatalf("after Close: %v", err)
	}
}
