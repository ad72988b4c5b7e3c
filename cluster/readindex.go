package cluster

import (
	"context"
	"sync"
	"time"

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
		// full is closed when as many wait as are expected; nil while nobody
		// lingers for that.
		full chan struct{}
		// expected are the reads that the last round served and those that waited
		// when it ended.
		expected int
		took     time.Duration // moving average of a round's time
	}
}

// maxReadLinger bounds the wait of a round for reads that are on their way:
// readers that were answered together come back together.
const maxReadLinger = 250 * time.Microsecond

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
	if r.mu.full != nil && len(r.mu.waiting) >= r.mu.expected {
		close(r.mu.full)
		r.mu.full = nil
	}
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
		r.linger()
		r.mu.Lock()
		batch := r.mu.waiting
		r.mu.waiting, r.mu.full = nil, nil
		if len(batch) == 0 {
			r.mu.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		start := time.Now()
		p := r.round(r.ctx)
		took := time.Since(start)
		r.mu.Lock()
		r.mu.took += (took - r.mu.took) / 8
		r.mu.expected = len(batch) + len(r.mu.waiting)
		r.mu.Unlock()
		for _, ch := range batch {
			ch <- p
		}
	}
}

// linger waits, at most a part of a round's time, until all reads wait that are
// expected to come back. A lone reader waits for nobody.
func (r *readIndexer) linger() {
	r.mu.Lock()
	wait := min(r.mu.took/4, maxReadLinger)
	if len(r.mu.waiting) == 0 || len(r.mu.waiting) >= r.mu.expected || wait <= 0 {
		r.mu.Unlock()
		return
	}
	full := make(chan struct{})
	r.mu.full = full
	r.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-full:
	case <-timer.C:
	case <-r.ctx.Done():
	}
}

// close waits for the running round; the context given at construction must
// have ended.
func (r *readIndexer) close() { r.wg.Wait() }
