package server

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

const (
	// batchItems and batchBytes bound one message of results; a single larger
	// result still goes, alone.
	batchItems = 1024
	batchBytes = 4 << 20
)

// result is one answer that waits to be sent.
type result[R any] struct {
	value R
	bytes int // of the answer on the wire, roughly and not less
	held  int // of the request, released when the answer is sent
}

// pipeline is the state of one stream of requests and results. The receiver
// takes room, submits and at the end calls end; whoever has an answer calls
// answer; the handler runs send. All fields of mu are small and held briefly.
type pipeline[R any] struct {
	ctx         context.Context
	maxRequests int
	maxBytes    int
	// wake and room have one slot each: a value says "look again". wake is for
	// the sender (results or an end), room for the receiver. Never closed.
	wake, room chan struct{}

	mu struct {
		sync.Mutex
		results  []result[R]
		requests int // received and not yet answered on the wire
		bytes    int // held by them, results included
		ended    bool
		closed   bool  // by a drain: take fails
		err      error // why receiving ended; nil after a half-close
	}
}

func newPipeline[R any](ctx context.Context, o *Options) *pipeline[R] {
	return &pipeline[R]{ctx: ctx, maxRequests: o.StreamRequests, maxBytes: o.StreamBytes,
		wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// take waits until a request of that size fits (SV3). A request that is larger
// than all the room goes alone.
func (p *pipeline[R]) take(bytes int) error {
	for {
		p.mu.Lock()
		if p.mu.closed {
			p.mu.Unlock()
			return base.ErrShuttingDown
		}
		if p.mu.requests == 0 || p.mu.requests < p.maxRequests && p.mu.bytes+bytes <= p.maxBytes {
			p.mu.requests++
			p.mu.bytes += bytes
			p.mu.Unlock()
			return nil
		}
		p.mu.Unlock()
		select {
		case <-p.room:
		case <-p.ctx.Done():
			return p.ctx.Err()
		}
	}
}

// answer hands over the result of a request that took held bytes. It does not
// block: take has bounded how many there can be.
func (p *pipeline[R]) answer(value R, bytes, held int) {
	p.mu.Lock()
	p.mu.results = append(p.mu.results, result[R]{value, bytes, held})
	p.mu.bytes += bytes
	p.mu.Unlock()
	poke(p.wake)
}

// release gives back room that was taken for an answer, before the answer takes
// what it needs.
func (p *pipeline[R]) release(bytes int) {
	p.mu.Lock()
	p.mu.bytes -= bytes
	p.mu.Unlock()
	poke(p.room)
}

// end says that nothing more is received.
func (p *pipeline[R]) end(err error) {
	p.mu.Lock()
	p.mu.ended, p.mu.err = true, err
	p.mu.Unlock()
	poke(p.wake)
}

// next takes what is ready, at most one message's worth, into batch. over says
// that nothing is outstanding, and ended that nothing more comes.
func (p *pipeline[R]) next(batch []result[R]) (_ []result[R], over, ended bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, bytes := 0, 0
	for n < len(p.mu.results) && n < batchItems && (n == 0 || bytes+p.mu.results[n].bytes <= batchBytes) {
		bytes += p.mu.results[n].bytes
		n++
	}
	batch = append(batch[:0], p.mu.results[:n]...)
	rest := copy(p.mu.results, p.mu.results[n:])
	clear(p.mu.results[rest:])
	p.mu.results = p.mu.results[:rest]
	return batch, p.mu.requests == 0, p.mu.ended, p.mu.err
}

// close ends the stream at a drain unless something is outstanding. Afterwards
// take fails: what was received but not counted yet is not submitted, so that a
// stream that ends as shutting down has answered all that it submitted.
func (p *pipeline[R]) close() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.closed = p.mu.closed || p.mu.requests == 0
	return p.mu.closed
}

// sent gives back the room of answers that are on their way.
func (p *pipeline[R]) sent(batch []result[R]) {
	p.mu.Lock()
	for i := range batch {
		p.mu.requests--
		p.mu.bytes -= batch[i].held + batch[i].bytes
	}
	p.mu.Unlock()
	poke(p.room)
}

// run sends results as they come, as many at once as are ready and without
// waiting for more, until the stream is over: after a half-close and the last
// result (SV4), at the end of the context, or at a drain when nothing is
// outstanding.
func (p *pipeline[R]) run(draining <-chan struct{}, send func([]result[R]) error) error {
	var batch []result[R]
	drained := false
	for {
		var over, ended bool
		var err error
		if batch, over, ended, err = p.next(batch); len(batch) > 0 {
			if err := send(batch); err != nil {
				return err
			}
			p.sent(batch)
			continue
		}
		switch {
		case ended && (over || err != nil):
			return err
		case drained && p.close():
			return base.ErrShuttingDown
		}
		select {
		case <-p.wake:
		case <-p.ctx.Done():
			return p.ctx.Err()
		case <-draining:
			drained, draining = true, nil
		}
	}
}

// receive starts the receiver of a stream. It ends with the stream: Recv fails
// once the handler has returned.
func receive[M, R any](s *Server, p *pipeline[R], recv func() (M, error), each func(M) error) {
	s.receivers.Add(1)
	go func() {
		defer s.receivers.Done()
		p.end(s.guard("State/stream", func() error {
			for {
				m, err := recv()
				if errors.Is(err, io.EOF) {
					return nil
				}
				if err != nil {
					return err
				}
				if err := each(m); err != nil {
					return err
				}
			}
		}))
	}()
}

// WriteStream implements the State service.
func (v *stateService) WriteStream(stream grpc.BidiStreamingServer[keelstatepb.WriteBatch, keelstatepb.WriteResults]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	p := newPipeline[*keelstatepb.WriteResult](ctx, &v.s.opts)
	receive(v.s, p, stream.Recv, func(b *keelstatepb.WriteBatch) error {
		for i, w := range b.Requests {
			b.Requests[i] = nil // the batch must not keep what is answered
			if err := v.submit(ctx, p, w); err != nil {
				return err
			}
		}
		return nil
	})
	return p.run(v.s.draining, func(batch []result[*keelstatepb.WriteResult]) error {
		out := &keelstatepb.WriteResults{Results: make([]*keelstatepb.WriteResult, len(batch))}
		for i := range batch {
			out.Results[i] = batch[i].value
		}
		return stream.Send(out)
	})
}

// submit converts and submits one write of a stream and arranges its answer. An
// error ends the stream; a bad request only answers itself.
func (v *stateService) submit(ctx context.Context, p *pipeline[*keelstatepb.WriteResult], w *keelstatepb.WriteRequest) error {
	start, tag := time.Now(), w.GetTag()
	route, req, size, err := writeRequest(w)
	if terr := p.take(size); terr != nil {
		return terr
	}
	var once sync.Once // a panic in Submit may come before or after done
	done := func(r raftfsm.Result) {
		once.Do(func() { v.written(ctx, p, tag, r, size, start) })
	}
	if err == nil {
		err = v.s.guard("State/WriteStream", func() error {
			v.s.backend.Submit(ctx, route, req, done)
			return nil
		})
	}
	if err != nil {
		done(raftfsm.Result{Err: asError(err)})
	}
	return nil
}

func (v *stateService) written(ctx context.Context, p *pipeline[*keelstatepb.WriteResult], tag uint64, r raftfsm.Result, size int, start time.Time) {
	out := &keelstatepb.WriteResult{Tag: tag}
	bytes := 64
	err := r.Failure()
	if err == nil {
		out.Token, out.Replayed = token(r.Token), r.Replayed
	} else {
		out.Error = v.s.detail(ctx, err)
		bytes = detailBytes(out.Error)
		if r.Token.Group != 0 {
			// The shard has looked at its state to refuse it: the client has seen
			// what is behind the barrier that the token names.
			out.Token = token(r.Token)
			bytes += 64
		}
	}
	v.s.metrics.write.answered(err, start)
	p.answer(out, bytes, size)
}

// asError gives err the form of a result's error.
func asError(err error) *base.Error {
	var e *base.Error
	if errors.As(err, &e) {
		return e
	}
	return &base.Error{Cause: err, Ordinal: -1}
}

// ReadStream implements the State service.
func (v *stateService) ReadStream(stream grpc.BidiStreamingServer[keelstatepb.ReadBatch, keelstatepb.ReadResults]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	p := newPipeline[*keelstatepb.ReadResult](ctx, &v.s.opts)
	slots := make(chan struct{}, v.s.opts.StreamReads)
	receive(v.s, p, stream.Recv, func(b *keelstatepb.ReadBatch) error {
		for i, r := range b.Requests {
			b.Requests[i] = nil
			held := 256 + 128*len(r.GetQueries())
			expected := expectedBytes(r)
			if err := p.take(held + expected); err != nil {
				return err
			}
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			v.s.receivers.Add(1) // the receiver counts itself, so this never races with a Wait
			go func() {
				defer v.s.receivers.Done()
				defer func() { <-slots }()
				v.answerRead(ctx, p, r, held, expected)
			}()
		}
		return nil
	})
	return p.run(v.s.draining, func(batch []result[*keelstatepb.ReadResult]) error {
		out := &keelstatepb.ReadResults{Results: make([]*keelstatepb.ReadResult, len(batch))}
		for i := range batch {
			out.Results[i] = batch[i].value
		}
		return stream.Send(out)
	})
}

func (v *stateService) answerRead(ctx context.Context, p *pipeline[*keelstatepb.ReadResult], r *keelstatepb.ReadRequest, held, expected int) {
	start := time.Now()
	var out *keelstatepb.ReadResult
	var bytes int
	err := v.s.guard("State/ReadStream", func() error {
		result, n, err := v.s.read(ctx, r)
		if err == nil {
			out, bytes = result, n+64
		}
		return err
	})
	if err != nil {
		out = &keelstatepb.ReadResult{Tag: r.GetTag(), Error: v.s.detail(ctx, err)}
		bytes = detailBytes(out.Error)
	}
	v.s.metrics.read.answered(err, start)
	p.release(expected)
	p.answer(out, bytes, held)
}
