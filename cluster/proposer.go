package cluster

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// Bounds of one shard's proposal queue. When it is full a write is refused with
// base.ErrOverloaded before it is proposed.
const (
	maxQueuedRequests = 16 << 10
	maxQueuedBytes    = 64 << 20
	// An entry takes what is waiting, up to these bounds; a single larger
	// request still goes, alone.
	maxEntryRequests = 1024
	maxEntryBytes    = 1 << 20
	// An entry stays far below what the decoder admits for one command: one
	// that could not be read would stop every replica.
	maxEntryMutations = raftfsm.MaxCommandMutations / 2
	maxEntryItems     = raftfsm.MaxCommandItems / 2
	// maxEntriesInFlight entries are proposed and not yet applied.
	maxEntriesInFlight = 4
	// With an entry in flight, the next goes when the queue is worth as much: it
	// holds as many requests as are in flight, or so many bytes.
	worthwhileBytes = 256 << 10
	// maxLinger bounds the wait for requests that are on their way (see pace).
	maxLinger = 500 * time.Microsecond
	// enqueueTimeout bounds the wait for raft's own queue.
	enqueueTimeout = 2 * time.Second
)

// pendingWrite is one request that waits to be proposed or applied.
type pendingWrite struct {
	encoded []byte // by raftfsm.AppendRequest
	// mutations counts mutations and preconditions; items their elements,
	// entries and sources.
	mutations, items int
	// revision is that of the metadata in which the session was seen alive; the
	// entry carries the lowest of its requests, so that a session which ended
	// meanwhile is not opened again by it (W3).
	revision base.Revision
	done     func(raftfsm.Result)
}

// proposer coalesces the writes of one shard into Raft entries, in the order
// of submit: requests of one session are never reordered here.
//
// Two goroutines belong to it: the batcher, which fills and proposes entries,
// and the completer, which waits for them in order and answers.
type proposer struct {
	// propose hands an encoded entry to Raft; it is a seam for tests.
	propose func(entry []byte, timeout time.Duration) raft.ApplyFuture
	// stamp returns the leader's stamp for an entry, or why this replica cannot
	// propose.
	stamp func() (stampMs uint64, err error)
	// await waits for a future of raft, which may never answer once raft is
	// shut down.
	await   func(raft.Future) error
	metrics *groupMetrics

	inFlight chan proposed // capacity maxEntriesInFlight; closed by the batcher

	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		// wake tells the batcher that pace, the queue or closed has changed enough.
		wake   *sync.Cond
		queue  []pendingWrite
		bytes  int
		pace   pace
		closed bool
		// wakeAt is how long the queue must be for the batcher to be woken.
		wakeAt int
	}
}

// proposed is an entry in Raft's hands with the requests that are in it.
type proposed struct {
	future raft.ApplyFuture
	writes []pendingWrite
	at     time.Time
}

func newProposer(propose func([]byte, time.Duration) raft.ApplyFuture,
	stamp func() (uint64, error), await func(raft.Future) error, m *groupMetrics) *proposer {
	p := &proposer{propose: propose, stamp: stamp, await: await, metrics: m,
		inFlight: make(chan proposed, maxEntriesInFlight)}
	p.mu.wake = sync.NewCond(&p.mu)
	p.wg.Add(2)
	go p.batch()
	go p.complete()
	return p
}

// submit queues a write. done is called exactly once, from another goroutine,
// unless submit returns an error.
func (p *proposer) submit(w pendingWrite) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.mu.closed:
		return base.ErrShuttingDown
	case len(p.mu.queue) >= maxQueuedRequests || p.mu.bytes+len(w.encoded) > maxQueuedBytes:
		p.metrics.refused(base.ErrOverloaded)
		return &base.Error{Cause: base.ErrOverloaded, Ordinal: -1, RetryAfter: 50 * time.Millisecond,
			Hint: "the shard's write queue is full; retry after a pause or send fewer writes at once"}
	}
	p.mu.queue = append(p.mu.queue, w)
	p.mu.bytes += len(w.encoded)
	if len(p.mu.queue) >= p.mu.wakeAt || p.mu.bytes >= worthwhileBytes {
		p.mu.wake.Signal()
	}
	return nil
}

// take waits until the next entry is worth its cost and removes it from the
// queue; nil when the proposer is closed and the queue is empty.
func (p *proposer) take() []pendingWrite {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.mu.closed && !p.mu.pace.ready(len(p.mu.queue), p.mu.bytes) {
		p.mu.wakeAt = p.mu.pace.enough()
		p.mu.wake.Wait()
	}
	p.lingerLocked()
	for p.mu.pace.full() {
		p.mu.wake.Wait() // closed, and its entries are still in flight
	}
	if len(p.mu.queue) == 0 {
		return nil
	}
	n, bytes, mutations, items := 0, 0, 0, 0
	for n < len(p.mu.queue) && n < maxEntryRequests {
		w := &p.mu.queue[n]
		if n > 0 && (bytes+len(w.encoded) > maxEntryBytes || mutations+w.mutations > maxEntryMutations || items+w.items > maxEntryItems) {
			break
		}
		bytes += len(w.encoded)
		mutations += w.mutations
		items += w.items
		n++
	}
	taken := append([]pendingWrite(nil), p.mu.queue[:n]...)
	rest := copy(p.mu.queue, p.mu.queue[n:])
	clear(p.mu.queue[rest:])
	p.mu.queue = p.mu.queue[:rest]
	p.mu.bytes -= bytes
	p.mu.pace.depart(n)
	return taken
}

// lingerLocked waits for requests that are on their way, at most as long as
// pace says.
func (p *proposer) lingerLocked() {
	wait := p.mu.pace.linger(len(p.mu.queue))
	if wait <= 0 {
		return
	}
	over := false
	timer := time.AfterFunc(wait, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		over = true
		p.mu.wake.Broadcast()
	})
	defer timer.Stop()
	for !over && !p.mu.closed && len(p.mu.queue) < p.mu.pace.expected && p.mu.bytes < worthwhileBytes {
		p.mu.wakeAt = p.mu.pace.expected
		p.mu.wake.Wait()
	}
}

// landed says that an entry is no longer in flight.
func (p *proposer) landed(requests int, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.pace.land(requests, len(p.mu.queue), took)
	p.mu.wake.Signal()
}

func (p *proposer) batch() {
	defer p.wg.Done()
	defer close(p.inFlight)
	var requests [][]byte
	for {
		writes := p.take()
		if writes == nil {
			return
		}
		stamp, err := p.stamp()
		if err != nil {
			p.landed(len(writes), 0)
			answerAll(writes, err)
			continue
		}
		requests = requests[:0]
		revision := writes[0].revision
		for i := range writes {
			requests = append(requests, writes[i].encoded)
			revision = min(revision, writes[i].revision)
		}
		entry := raftfsm.AppendWrite(nil, stamp, revision, requests...)
		p.metrics.entry(len(writes), len(entry))
		p.inFlight <- proposed{future: p.propose(entry, enqueueTimeout), writes: writes, at: time.Now()}
	}
}

func (p *proposer) complete() {
	defer p.wg.Done()
	for e := range p.inFlight {
		err := p.await(e.future)
		p.landed(len(e.writes), time.Since(e.at))
		if err != nil {
			answerAll(e.writes, classify(err))
			continue
		}
		out, ok := e.future.Response().(*raftfsm.Outcome)
		switch {
		case !ok:
			answerAll(e.writes, base.ErrInternal)
		case out.Err != nil:
			answerAll(e.writes, out.Err)
		case len(out.Results) != len(e.writes):
			answerAll(e.writes, base.ErrOutcomeUnknown)
		default:
			p.metrics.applied(len(e.writes), time.Since(e.at))
			for i := range e.writes {
				e.writes[i].done(out.Results[i])
			}
		}
	}
}

func answerAll(writes []pendingWrite, err error) {
	r := raftfsm.Result{Err: asError(err)}
	for i := range writes {
		writes[i].done(r)
	}
}

// asError gives err the details of a base.Error, keeping those it has.
func asError(err error) *base.Error {
	if e, ok := err.(*base.Error); ok {
		return e
	}
	return &base.Error{Cause: err, Ordinal: -1}
}

// close refuses new writes, lets the queue drain through Raft, which must be
// shut down before so that await answers, and waits for the goroutines.
func (p *proposer) close() {
	p.mu.Lock()
	p.mu.closed = true
	p.mu.wake.Broadcast()
	p.mu.Unlock()
	p.wg.Wait()
}

// queued is the number of writes that wait.
func (p *proposer) queued() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.mu.queue)
}
