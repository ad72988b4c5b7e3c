package cluster

import (
	"context"
	"sync"

	"github.com/keelstate/keelstate/internal/base"
)

// readPoint is what a confirmed round gives to the reads that waited for it.
type readPoint struct {
	// index is the newest command at or below the commit index noted after the
	// read arrived; the state machine must have applied it.
	index uint64
	err   error
}

// readIndexer confirms the office of a leader for linearizable reads, in
// rounds: a round serves exactly the reads that arrived before it started
// (CL2). One round runs at a time; what arrives meanwhile shares the next.
type readIndexer struct {
	// round notes term and index, polls the voters, and says what it found.
	round func(context.Context) readPoint
	// ctx ends with the replica.
	ctx context.Context

	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		waiting []chan readPoint // each has capacity 1
		running bool
	}
}

func newReadIndexer(ctx context.Context, round func(context.Context) readPoint) *readIndexer {
	return &readIndexer{ctx: ctx, round: round}
}

// wait returns the index that a read which arrived now must see applied.
func (r *readIndexer) wait(ctx context.Context) (uint64, error) {
	ch := make(chan readPoint, 1)
	r.mu.Lock()
	if r.ctx.Err() != nil {
		r.mu.Unlock()
		return 0, base.ErrShuttingDown
	}
	r.mu.waiting = append(r.mu.waiting, ch)
	if !r.mu.running {
		r.mu.running = true
		r.wg.Add(1)
		go r.run()
	}
	r.mu.Unlock()
	select {
	case p := <-ch:
		return p.index, p.err
	case <-ctx.Done():
		return 0, notServed(ctx)
	}
}

// notServed is the error of a read whose context ended: a read has no effect,
// so it is never of unknown outcome, but it must be told from success.
func notServed(ctx context.Context) error {
	return &base.Error{Cause: base.ErrNoQuorum, Ordinal: -1, Hint: "the read was not confirmed in time: " + ctx.Err().Error()}
}

func (r *readIndexer) run() {
	defer r.wg.Done()
	for {
		r.mu.Lock()
		batch := r.mu.waiting
		r.mu.waiting = nil
		if len(batch) == 0 {
			r.mu.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		p := r.round(r.ctx)
		for _, ch := range batch {
			ch <- p
		}
	}
}

// close waits for the running round; the context given at construction must
// have ended.
func (r *readIndexer) close() { r.wg.Wait() }
