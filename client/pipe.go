package keel

import (
	"context"
	"sync"
)

// exchange is one request on a pipe and what becomes of its answer.
type exchange[Q, A any] struct {
	req  Q
	size int
	// done is called once, from a goroutine of the pipe or, if the pipe is
	// broken already, from the one that enqueued. err is the failure of the pipe;
	// sent says that the request may have left before it.
	done func(answer A, err error, sent bool)

	// Guarded by the pipe.
	sentAs  uint64 // tag, 0 before the request is taken to be sent
	dropped bool
}

// stream is one gRPC stream of batches, with its messages taken apart.
type stream[Q, A any] struct {
	send func([]Q) error
	recv func() ([]A, error)
}

// pipe pipelines requests over one stream to one node, and lives as long as
// the stream. What waits while a send is in progress goes out together in the
// next one. Its queue is bounded by those who enqueue (KC5).
//
// Two goroutines belong to it: the sender, which opens the stream, and the
// receiver. The pipe ends by itself when the stream breaks or ctx ends.
type pipe[Q, A any] struct {
	ctx    context.Context
	cancel context.CancelFunc
	open   func(context.Context) (*stream[Q, A], error)
	setTag func(Q, uint64)
	tag    func(A) uint64
	wg     *sync.WaitGroup // of the client

	mu struct {
		sync.Mutex
		wake    *sync.Cond
		queue   []*exchange[Q, A]
		pending map[uint64]*exchange[Q, A] // sent, by tag
		lastTag uint64
		err     error // set once; the pipe takes nothing more
	}
}

// newPipe starts a pipe. start reserves a goroutine in wg, or is false when the
// client is closing: the pipe is broken from the start then.
func newPipe[Q, A any](ctx context.Context, wg *sync.WaitGroup, start func() bool, open func(context.Context) (*stream[Q, A], error),
	setTag func(Q, uint64), tag func(A) uint64) *pipe[Q, A] {
	p := &pipe[Q, A]{open: open, setTag: setTag, tag: tag, wg: wg}
	p.ctx, p.cancel = context.WithCancel(ctx)
	p.mu.wake = sync.NewCond(&p.mu)
	p.mu.pending = make(map[uint64]*exchange[Q, A])
	if !start() {
		p.mu.err = newError(ErrClosed, OutcomeNotApplied, "")
		p.cancel()
		return p
	}
	go p.sender()
	context.AfterFunc(p.ctx, func() { p.fail(p.ctx.Err()) })
	return p
}

// broken says that the pipe takes nothing more.
func (p *pipe[Q, A]) broken() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.err != nil
}

// enqueue adds a request. It never blocks and never calls done itself: a broken
// pipe returns its error instead.
func (p *pipe[Q, A]) enqueue(x *exchange[Q, A]) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.err != nil {
		return p.mu.err
	}
	p.mu.queue = append(p.mu.queue, x)
	p.mu.wake.Signal()
	return nil
}

// drop forgets a request whose answer nobody waits for any more, so that a node
// that is silent or slow does not gather them. unsent says that the request will
// never leave and that done is not called; else done may still be called, by an
// answer or a failure that is just being delivered.
func (p *pipe[Q, A]) drop(x *exchange[Q, A]) (unsent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.mu.err != nil: // done has been called or is about to be
		return false
	case x.sentAs != 0:
		delete(p.mu.pending, x.sentAs)
		return false
	}
	var none Q
	x.dropped, x.req, x.size, x.done = true, none, 0, nil
	return true
}

// take waits for requests and moves one message's worth to pending. A batch may
// be empty; nil is the end.
func (p *pipe[Q, A]) take() []Q {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.mu.queue) == 0 && p.mu.err == nil {
		p.mu.wake.Wait()
	}
	if p.mu.err != nil {
		return nil
	}
	n, bytes := 0, 0
	for n < len(p.mu.queue) && (n == 0 || bytes+p.mu.queue[n].size <= maxBatchBytes) {
		bytes += p.mu.queue[n].size
		n++
	}
	out := make([]Q, 0, n)
	for _, x := range p.mu.queue[:n] {
		if x.dropped {
			continue
		}
		p.mu.lastTag++
		x.sentAs = p.mu.lastTag
		p.setTag(x.req, x.sentAs)
		p.mu.pending[x.sentAs] = x
		out = append(out, x.req)
	}
	rest := copy(p.mu.queue, p.mu.queue[n:])
	clear(p.mu.queue[rest:])
	p.mu.queue = p.mu.queue[:rest]
	return out
}

func (p *pipe[Q, A]) sender() {
	defer p.wg.Done()
	defer p.cancel()
	s, err := p.open(p.ctx)
	if err != nil {
		p.fail(err)
		return
	}
	p.wg.Add(1)
	go p.receiver(s)
	for {
		batch := p.take()
		if batch == nil {
			return
		}
		if len(batch) == 0 {
			continue
		}
		if err := s.send(batch); err != nil {
			// The stream's own error comes from recv, and breaks the pipe there.
			<-p.ctx.Done()
			return
		}
	}
}

func (p *pipe[Q, A]) receiver(s *stream[Q, A]) {
	defer p.wg.Done()
	for {
		answers, err := s.recv()
		if err != nil {
			p.fail(err)
			return
		}
		for _, a := range answers {
			p.mu.Lock()
			x := p.mu.pending[p.tag(a)]
			delete(p.mu.pending, p.tag(a))
			p.mu.Unlock()
			if x != nil { // a second answer to one tag has no one to go to
				x.done(a, nil, true)
			}
		}
	}
}

// fail breaks the pipe and answers everything on it. Later calls do nothing.
func (p *pipe[Q, A]) fail(err error) {
	p.mu.Lock()
	if p.mu.err != nil {
		p.mu.Unlock()
		return
	}
	p.mu.err = err
	queue, pending := p.mu.queue, p.mu.pending
	p.mu.queue, p.mu.pending = nil, nil
	p.mu.wake.Broadcast()
	p.mu.Unlock()
	p.cancel()
	var none A
	for _, x := range pending {
		x.done(none, err, true)
	}
	for _, x := range queue {
		if !x.dropped {
			x.done(none, err, false)
		}
	}
}
