package cluster

import (
	"context"
	"errors"
	"io"
	"runtime"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// hungFuture answers only when it is released, like raft's while an fsync hangs.
type hungFuture struct {
	ShutdownCh chan struct{}
	release    chan error
}

func (f *hungFuture) Error() error {
	select {
	case err := <-f.release:
		return err
	case <-f.ShutdownCh:
		return raft.ErrRaftShutdown
	}
}

// A caller waits for a proposal no longer than its context; what became of the
// proposal is then unknown (W8).
func TestAwaitEndsWithItsContext(t *testing.T) {
	g := &group{id: 7}
	g.ended, g.end = context.WithCancel(context.Background())
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err := classify(g.awaitIn(ctx, &hungFuture{}))
	if !errors.Is(err, base.ErrOutcomeUnknown) {
		t.Fatalf("a hung proposal: %v", err)
	}
	for _, want := range []error{nil, raft.ErrNotLeader} {
		f := &hungFuture{release: make(chan error, 1)}
		f.release <- want
		if err := g.awaitIn(context.Background(), f); !errors.Is(err, want) {
			t.Fatalf("%v, want %v", err, want)
		}
	}
	g.end()
	if err := g.await(&hungFuture{}); !errors.Is(err, raft.ErrRaftShutdown) {
		t.Fatalf("after a shutdown: %v", err)
	}
}

// Every kind of future that await is given can be ended: a new version of raft
// may have others.
func TestFuturesOfRaftCanBeEnded(t *testing.T) {
	conf := raft.DefaultConfig()
	conf.LocalID, conf.LogOutput = "n1", io.Discard
	store := raft.NewInmemStore()
	_, trans := raft.NewInmemTransport("n1")
	r, err := raft.NewRaft(conf, &systemFSM{}, store, store, raft.NewInmemSnapshotStore(), trans)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Shutdown().Error() }() // nothing is kept
	for name, ask := range map[string]func() raft.Future{
		"apply":       func() raft.Future { return r.Apply([]byte("x"), time.Second) },
		"barrier":     func() raft.Future { return r.Barrier(time.Second) },
		"add":         func() raft.Future { return r.AddVoter("n2", "n2", 0, time.Second) },
		"learner":     func() raft.Future { return r.AddNonvoter("n2", "n2", 0, time.Second) },
		"remove":      func() raft.Future { return r.RemoveServer("n2", 0, time.Second) },
		"snapshot":    func() raft.Future { return r.Snapshot() },
		"transfer":    r.LeadershipTransfer,
		"transfer to": func() raft.Future { return r.LeadershipTransferToServer("n2", "n2") },
	} {
		over := make(chan struct{})
		f := ask()
		// Raft holds one transfer; a second one is refused until it has looked at the first.
		for deadline := time.Now().Add(10 * time.Second); !endBy(f, over); f = ask() {
			if err := f.Error(); !errors.Is(err, raft.ErrEnqueueTimeout) || time.Now().After(deadline) {
				t.Fatalf("%s: %T has no channel that ends a wait: %v", name, f, err)
			}
			runtime.Gosched()
		}
		close(over)
		if f.Error() == nil {
			t.Errorf("%s: a node without a configuration did it", name)
		}
	}
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

// Who notes the metadata while another waits for a hung disk with that goes on
// when the node closes.
func TestNotingEndsWithItsGroup(t *testing.T) {
	s := &system{noting: make(chan struct{}, 1)}
	var end context.CancelFunc
	s.ctx, end = context.WithCancel(context.Background())
	s.noting <- struct{}{} // somebody whose disk hangs
	said := make(chan error, 1)
	go func() { said <- s.note() }()
	end()
	select {
	case err := <-said:
		if !errors.Is(err, base.ErrClosed) {
			t.Fatalf("noting while another does, at the end: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("noting waits for ever for another that waits for the disk")
	}
}
