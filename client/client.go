package keel

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// Client is a connection to a cluster. Make one per process and close it.
type Client struct {
	opts      options
	endpoints []string
	ctx       context.Context // ends at Close
	cancel    context.CancelFunc
	wg        sync.WaitGroup // every goroutine of the client
	ready     chan struct{}  // closed with the first topology
	topo      atomic.Pointer[topology]
	// revision is the newest metadata revision, and barrier the newest
	// checkpoint barrier, that any answer has named.
	revision   atomic.Uint64
	barrier    atomic.Uint64
	refreshing atomic.Bool
	budget     *budget
	bytes      *semaphore.Weighted // of open writes

	mu struct {
		sync.Mutex
		closed  bool
		nodes   map[string]*node  // by address
		leaders map[uint64]string // shard -> node id, newest belief
		turn    map[uint64]int    // shard -> replica asked last, where no leader is known
		session *session          // nil before the first write and after an end
		over    *Error            // why the one session has ended (WithOneSession)
		opening chan struct{}     // closed when the session being opened is there or failed
		lastErr error             // why the topology could not be learned
	}
}

// Open makes a client of the cluster that any of the endpoints (host:port)
// belongs to. It does not wait for a connection: Ready does, and so does every
// call. An endpoint that is no address, or none at all, is ErrInvalid.
func Open(ctx context.Context, endpoints []string, opts ...Option) (*Client, error) {
	if len(endpoints) == 0 {
		return nil, invalid("endpoints", "give at least one host:port")
	}
	for i, e := range endpoints {
		if e == "" {
			return nil, invalid(fmt.Sprintf("endpoints[%d]", i), "it is empty")
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, deadlineError(err, OutcomeNotApplied)
	}
	c := &Client{opts: defaults(), endpoints: append([]string(nil), endpoints...), ready: make(chan struct{})}
	for _, o := range opts {
		o(&c.opts)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.budget = newBudget(c.opts.retryRatio, c.opts.retryFloor)
	c.bytes = semaphore.NewWeighted(c.opts.maxBytes)
	c.mu.nodes = make(map[string]*node)
	c.mu.leaders = make(map[uint64]string)
	c.mu.turn = make(map[uint64]int)
	c.wg.Add(1)
	go c.follow()
	return c, nil
}

// Ready waits until the client knows the cluster. If the context ends first the
// error says what kept it, for example ErrNotFounded.
func (c *Client) Ready(ctx context.Context) error {
	select {
	case <-c.ready:
		return nil
	case <-c.ctx.Done():
		return newError(ErrClosed, OutcomeNotApplied, "")
	case <-ctx.Done():
		c.mu.Lock()
		last := c.mu.lastErr
		c.mu.Unlock()
		if last != nil {
			e := *asError(last)
			e.Outcome = OutcomeNotApplied
			return &e
		}
		return deadlineError(ctx.Err(), OutcomeNotApplied)
	}
}

// farewell is the longest that Close tells the cluster goodbye: a session that it
// could not end runs out by its lease.
const farewell = 2 * time.Second

// Close ends the session and every goroutine of the client. Open calls end with
// an error that says what is known of them. The farewell to the cluster takes two
// seconds at most, and no longer than the context; if no node answers in that
// time, Close returns an error, and the session runs out by its lease. The client
// is closed in any case.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	s := c.mu.session
	c.mu.Unlock()
	var err error
	if s != nil {
		s.end(newError(ErrClosed, OutcomeNotApplied, ""))
		bye, cancel := context.WithTimeout(ctx, farewell)
		err = c.Call(bye, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			_, err := keelstatepb.NewClusterClient(conn).CloseSession(ctx, &keelstatepb.CloseSessionRequest{Id: s.id})
			return err
		})
		cancel()
	}
	c.mu.Lock()
	c.mu.closed = true
	nodes, late := c.mu.nodes, c.mu.session
	c.mu.nodes = make(map[string]*node)
	c.mu.Unlock()
	if late != nil { // opened meanwhile; its lease runs out
		late.end(newError(ErrClosed, OutcomeNotApplied, ""))
	}
	c.cancel()
	for _, n := range nodes {
		if e := n.conn.Close(); e != nil {
			err = errors.Join(err, fmt.Errorf("closing the connection to %s: %w", n.address, e))
		}
	}
	c.wg.Wait()
	return err
}

// start reserves a goroutine of the client; false after Close has begun.
func (c *Client) start() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return false
	}
	c.wg.Add(1)
	return true
}

// note keeps why the topology could not be learned, for Ready.
func (c *Client) note(err error) {
	if err == nil || c.ctx.Err() != nil {
		return
	}
	e := fromStatus(err)
	c.opts.log.Debug("watching the topology ended", "error", e)
	c.mu.Lock()
	c.mu.lastErr = e
	c.mu.Unlock()
}

func (c *Client) sawRevision(r uint64) {
	for old := c.revision.Load(); r > old && !c.revision.CompareAndSwap(old, r); old = c.revision.Load() {
	}
}

func (c *Client) sawBarrier(b uint64) {
	for old := c.barrier.Load(); b > old && !c.barrier.CompareAndSwap(old, b); old = c.barrier.Load() {
	}
}

// bounded gives a context without a deadline the client's call timeout.
func (c *Client) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || c.opts.callTimeout <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.opts.callTimeout)
}

// CallOption changes how Call makes its attempts.
type CallOption func(*callOptions)

type callOptions struct {
	attempt time.Duration // 0: the call's context bounds the attempts
	free    bool          // retries are not counted in the budget
}

// AttemptTimeout bounds each attempt of one Call in place of the client's
// attempt timeout, for requests that take a node long by their nature. Zero
// leaves the bound to the context of the call.
func AttemptTimeout(d time.Duration) CallOption {
	return func(o *callOptions) { o.attempt = max(d, 0) }
}

func withoutBudget(o *callOptions) { o.free = true }

// Call runs f, which must be idempotent, on a connection to any node that can
// be reached: the endpoints in order, then the nodes learned. f returns the
// error of a generated gRPC client, and Call gives it the form of this package.
// An attempt that exceeds the client's attempt timeout, or that of the options,
// is given up. While no node answers Call tries again until the context ends.
func (c *Client) Call(ctx context.Context, f func(context.Context, grpc.ClientConnInterface) error, opts ...CallOption) error {
	o := callOptions{attempt: c.opts.attemptTimeout}
	for _, opt := range opts {
		opt(&o)
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	c.budget.called()
	var last, why *Error         // why is the newest that says more than that time ran out
	outcome := OutcomeNotApplied // of all attempts so far
	again := false               // an attempt of the round calls for another
	for round := 0; ; round++ {
		again = false
		for _, address := range c.candidates() {
			n, err := c.node(address)
			if err != nil {
				return err
			}
			attempt, done := o.limit(ctx)
			err = f(attempt, n.conn)
			timedOut := attempt.Err() != nil
			done()
			if err == nil {
				return nil
			}
			if last = fromStatus(err); last.Outcome != OutcomeNotApplied {
				outcome = OutcomeUnknown
			}
			last.Outcome = outcome
			if !errors.Is(last, ErrDeadline) {
				why = last
			}
			if last.Code == codeIdentity && ctx.Err() == nil {
				continue // the address is another cluster's by now; others may still be ours
			}
			// f is idempotent, so an unknown outcome is no obstacle.
			// The server may say that the attempt's time is over just before our
			// own clock does.
			again = timedOut || last.Retryable && last.Code != codeCheckpoint || last.Code == codeOutcomeUnknown || errors.Is(last, ErrDeadline)
			if ctx.Err() != nil || !again {
				break
			}
		}
		switch {
		case ctx.Err() != nil:
			e := deadlineError(fmt.Errorf("%w: %w", ctx.Err(), last), outcome)
			if e.Hint == "" && why != nil {
				e.Hint = "before, " + strings.TrimPrefix(why.Error(), "keel: ")
			}
			return e
		case c.ctx.Err() != nil:
			return newError(ErrClosed, outcome, "")
		case !again:
			return last
		}
		wait := max(c.opts.backoff(round), last.RetryAfter)
		if !o.free {
			wait = max(wait, c.budget.take())
		}
		if !pause(ctx, wait) {
			return last
		}
	}
}

// limit is the context of one attempt.
func (o *callOptions) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if o.attempt == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, o.attempt)
}

// Topology returns the cluster as the client knows it, after Ready.
func (c *Client) Topology(ctx context.Context) (*keelstatepb.Topology, error) {
	if err := c.Ready(ctx); err != nil {
		return nil, err
	}
	return c.topo.Load().raw, nil
}
