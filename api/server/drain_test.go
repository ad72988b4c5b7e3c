package server

import (
	"context"
	"errors"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
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
