package cluster

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// hungFuture answers only when it is released, like raft's while an fsync hangs.
type hungFuture struct{ release chan error }

func (f hungFuture) Error() error { return <-f.release }

// A caller waits for a proposal no longer than its context; what became of the
// proposal is then unknown (W8).
func TestAwaitEndsWithItsContext(t *testing.T) {
	g := &group{id: 7, ended: make(chan struct{})}
	f := hungFuture{make(chan error, 1)}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err := classify(g.awaitIn(ctx, f))
	if !errors.Is(err, base.ErrOutcomeUnknown) {
		t.Fatalf("a hung proposal: %v", err)
	}
	f.release <- nil // the goroutine that waits ends
	for _, want := range []error{nil, raft.ErrNotLeader} {
		f.release <- want
		if err := g.awaitIn(context.Background(), f); !errors.Is(err, want) {
			t.Fatalf("%v, want %v", err, want)
		}
	}
	close(g.ended)
	if err := g.awaitIn(context.Background(), f); !errors.Is(err, raft.ErrRaftShutdown) {
		t.Fatalf("after a shutdown: %v", err)
	}
	f.release <- nil
}

// Whoever waits for another's declarations waits no longer than its context
// either, and its write is then not applied.
func TestDeclaringEndsWithItsContext(t *testing.T) {
	r := &replica{declaring: make(chan struct{}, 1)}
	r.declaring <- struct{}{} // another waits for raft
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err := r.declareAll(ctx, nil)
	if !errors.Is(err, base.ErrNotReady) || base.OutcomeOf(err) != base.OutcomeNotApplied {
		t.Fatalf("declaring behind a hung proposal: %v", err)
	}
}
