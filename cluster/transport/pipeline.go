package transport

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// pipeline is a raft.AppendPipeline over one connection. Answers are handed
// out in the order of the requests.
//
// A failed append ends the pipeline and is NOT handed to Consumer: raft 1.8
// ignores a future's error there and notes a contact with the peer for the
// leader's lease before it looks at Success, so a timed-out append would count
// as contact. The next AppendEntries fails instead; raft sends one at least
// every CommitTimeout, gives the pipeline up and falls back to single appends.
type pipeline struct {
	g      *Group
	id     raft.ServerID
	target raft.ServerAddress
	conn   *clientConn

	slots    chan struct{}          // one per append under way
	inflight chan *appendFuture     // in order; as many slots as slots
	ready    chan raft.AppendFuture // Consumer; as many slots as slots
	done     chan struct{}          // closed when the pipeline ends
	once     sync.Once
	cause    atomic.Pointer[error] // why it ended
}

// appendFuture implements raft.AppendFuture. answer holds one result per part.
type appendFuture struct {
	start  time.Time
	args   *raft.AppendEntriesRequest
	resp   *raft.AppendEntriesResponse
	parts  int
	answer chan partAnswer // as many slots as parts
	err    error           // set before done is closed
	done   chan struct{}
}

type partAnswer struct {
	body []byte
	err  error
}

func (f *appendFuture) Error() error                          { <-f.done; return f.err }
func (f *appendFuture) Start() time.Time                      { return f.start }
func (f *appendFuture) Request() *raft.AppendEntriesRequest   { return f.args }
func (f *appendFuture) Response() *raft.AppendEntriesResponse { return f.resp }

// AppendEntriesPipeline implements raft.Transport.
func (g *Group) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	if g.quiet() {
		return nil, g.silenced()
	}
	node := base.NodeID(target)
	if node == g.t.opts.Identity.Node {
		return nil, raft.ErrPipelineReplicationNotSupported
	}
	ctx, cancel := context.WithTimeout(g.ctx, g.t.opts.AppendTimeout)
	defer cancel()
	conn, err := g.t.peer(node).appendLane(g.id).get(ctx)
	if err != nil {
		return nil, err
	}
	if conn.limited {
		return nil, fmt.Errorf("sending to node %s: %w", node, base.ErrNotFounded)
	}
	n := g.t.opts.MaxInflight
	p := &pipeline{
		g: g, id: id, target: target, conn: conn,
		slots: make(chan struct{}, n), inflight: make(chan *appendFuture, n),
		ready: make(chan raft.AppendFuture, n), done: make(chan struct{}),
	}
	if !g.t.spawn(p.run) {
		return nil, fmt.Errorf("opening a pipeline of group %s: %w", g.id, base.ErrClosed)
	}
	return p, nil
}

// AppendEntries implements raft.AppendPipeline. It blocks while MaxInflight
// appends are under way or the connection's queue is full.
func (p *pipeline) AppendEntries(args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	if p.g.quiet() {
		p.end(p.g.silenced())
	}
	select {
	case <-p.done:
		return nil, p.why()
	default:
	}
	select {
	case p.slots <- struct{}{}:
	case <-p.done:
		return nil, p.why()
	}
	parts := splitAppend(args)
	f := &appendFuture{
		start: time.Now(), args: args, resp: resp, parts: len(parts),
		answer: make(chan partAnswer, len(parts)), done: make(chan struct{}),
	}
	until := f.start.Add(p.g.t.opts.AppendTimeout)
	for _, part := range parts {
		_, err := p.conn.start(appendFrame(p.id, part), typeAppend, p.g.id, &pending{
			done: func(body []byte, err error) { f.answer <- partAnswer{body, err} },
		}, p.done, until)
		if err != nil {
			p.end(fmt.Errorf("sending for group %s: %w", p.g.id, err))
			return nil, p.why()
		}
	}
	p.inflight <- f // never blocks: it has a slot
	return f, nil
}

// Consumer implements raft.AppendPipeline.
func (p *pipeline) Consumer() <-chan raft.AppendFuture { return p.ready }

// Close implements raft.AppendPipeline.
func (p *pipeline) Close() error {
	p.end(raft.ErrPipelineShutdown)
	return nil
}

func (p *pipeline) end(err error) {
	p.once.Do(func() {
		p.cause.Store(&err)
		close(p.done)
	})
}

func (p *pipeline) why() error { return *p.cause.Load() }

// run completes the futures in order until the pipeline ends.
func (p *pipeline) run() {
	defer p.failRest()
	timer := time.NewTimer(p.g.t.opts.AppendTimeout) // of the append that complete waits for
	defer timer.Stop()
	for {
		select {
		case f := <-p.inflight:
			timer.Reset(time.Until(f.start.Add(p.g.t.opts.AppendTimeout)))
			if err := p.complete(f, timer.C); err != nil {
				p.end(err)
				f.err = err
				close(f.done)
				return
			}
			timer.Stop()
			close(f.done)
			select {
			case p.ready <- f:
			case <-p.done:
				return
			}
			<-p.slots
		case <-p.done:
			return
		case <-p.g.done:
			p.end(p.g.gone())
			return
		}
	}
}

func (p *pipeline) failRest() {
	for {
		select {
		case f := <-p.inflight:
			f.err = p.why()
			close(f.done)
		default:
			return
		}
	}
}

// complete waits for the parts of one append until timeout. The last answer
// decides; after a refusal the answers of later parts are refusals too and say
// less.
func (p *pipeline) complete(f *appendFuture, timeout <-chan time.Time) error {
	var resp raft.AppendEntriesResponse
	for i := range f.parts {
		var a partAnswer
		select {
		case a = <-f.answer:
		case <-timeout:
			return fmt.Errorf("waiting for an append of group %s to %s: %w: %w", p.g.id, p.target, base.ErrUnavailable, context.DeadlineExceeded)
		case <-p.done:
			return p.why()
		case <-p.g.done:
			return p.g.gone()
		}
		if a.err != nil {
			return fmt.Errorf("appending to group %s at %s: %w", p.g.id, p.target, a.err)
		}
		if i > 0 && (!resp.Success || resp.Term > f.args.Term) {
			continue
		}
		if err := decodeAppendResponse(a.body, &resp); err != nil {
			return err
		}
	}
	if p.g.quiet() {
		return p.g.silenced()
	}
	*f.resp = resp
	return nil
}
