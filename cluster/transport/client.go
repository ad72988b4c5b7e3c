package transport

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// peer is this node's side of the traffic to one other node: its lanes.
type peer struct {
	node    base.NodeID
	urgent  *clientLane
	appends []*clientLane
	call    *clientLane
}

func (p *peer) appendLane(g base.GroupID) *clientLane {
	return p.appends[uint64(g)%uint64(len(p.appends))]
}

func (p *peer) lanes() []*clientLane {
	return append([]*clientLane{p.urgent, p.call}, p.appends...)
}

func (t *Transport) newPeer(node base.NodeID) *peer {
	mk := func(l lane) *clientLane { return &clientLane{t: t, node: node, lane: l} }
	p := &peer{node: node, urgent: mk(laneUrgent), call: mk(laneCall)}
	for range t.opts.AppendConns {
		p.appends = append(p.appends, mk(laneAppend))
	}
	return p
}

// clientLane owns at most one connection and the pause after a failure. While
// the pause lasts requests fail at once; after it the next request dials.
type clientLane struct {
	t    *Transport
	node base.NodeID
	lane lane

	mu struct {
		sync.Mutex
		conn     *clientConn   // may be closed; then the next request replaces it
		dialing  chan struct{} // closed when the dial under way ends; nil if none
		failures int
		retryAt  time.Time
		err      error // why the last dial failed
	}
}

// get returns an open connection; it dials if there is none. It waits until
// ctx ends or the dial fails.
func (l *clientLane) get(ctx context.Context) (*clientConn, error) {
	for {
		l.mu.Lock()
		if c := l.mu.conn; c != nil && c.err() == nil {
			l.mu.Unlock()
			return c, nil
		}
		dialing := l.mu.dialing
		if dialing == nil {
			if err := l.mu.err; err != nil && time.Now().Before(l.mu.retryAt) {
				l.mu.Unlock()
				return nil, err
			}
			dialing = make(chan struct{})
			if !l.t.spawn(func() { l.dial(dialing) }) {
				l.mu.Unlock()
				return nil, fmt.Errorf("connecting to node %s: %w", l.node, base.ErrClosed)
			}
			l.mu.dialing = dialing
		}
		l.mu.Unlock()
		select {
		case <-dialing:
			l.mu.Lock()
			c, err := l.mu.conn, l.mu.err
			l.mu.Unlock()
			if err != nil {
				return nil, err
			}
			if c != nil && c.err() == nil {
				return c, nil
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to node %s: %w: %w", l.node, base.ErrUnavailable, ctx.Err())
		}
	}
}

// dial tries once and records the outcome. It belongs to the transport, not to
// the request that started it.
func (l *clientLane) dial(done chan struct{}) {
	ctx, cancel := context.WithTimeout(l.t.ctx, l.t.opts.DialTimeout)
	defer cancel()
	c, err := l.t.connect(ctx, l.node, l.lane)
	l.mu.Lock()
	defer l.mu.Unlock()
	defer close(done)
	l.mu.dialing = nil
	l.mu.err = err
	if err != nil {
		l.mu.failures++
		l.mu.retryAt = time.Now().Add(backoff(l.mu.failures, l.t.opts.BackoffMin, l.t.opts.BackoffMax))
		return
	}
	l.mu.failures = 0
	l.mu.conn = c
}

// backoff doubles from lo up to hi; half of the pause is random.
func backoff(failures int, lo, hi time.Duration) time.Duration {
	d := hi
	if failures < 20 {
		d = min(hi, lo<<(failures-1))
	}
	if d <= 1 {
		return d
	}
	return d/2 + rand.N(d/2)
}

// peerIsBack ends the pause of a lane: the peer has just connected to us.
func (l *clientLane) peerIsBack() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.failures = 0
	l.mu.retryAt = time.Time{}
}

func (l *clientLane) closeConn(err error) {
	l.mu.Lock()
	c := l.mu.conn
	l.mu.Unlock()
	if c != nil {
		c.close(err)
	}
}

// connect dials a node, runs the handshake and starts the connection's
// goroutines (except on the bulk lane, which its stream drives itself).
func (t *Transport) connect(ctx context.Context, node base.NodeID, l lane) (*clientConn, error) {
	w, err := t.connectWire(ctx, node, l)
	if err != nil {
		t.metrics.dials.WithLabelValues("failed").Inc()
		switch base.SentinelOf(err) {
		case base.ErrIdentity, base.ErrNotFounded:
			t.metrics.refused(err)
			t.refusalLog.warn(string(node), "node refused", "peer", node, "lane", l.String(), "err", err)
		}
		return nil, err
	}
	t.metrics.dials.WithLabelValues("ok").Inc()
	c := &clientConn{wireConn: w, t: t, pending: make(map[uint64]*pending)}
	if l == laneBulk {
		return c, nil
	}
	if err := t.adopt(w); err != nil {
		return nil, fmt.Errorf("connecting to node %s: %w", node, err)
	}
	started := t.spawn(c.writeLoop) && t.spawn(c.readLoop) && t.spawn(c.keepAlive)
	if !started {
		c.close(base.ErrClosed)
		return nil, fmt.Errorf("connecting to node %s: %w", node, base.ErrClosed)
	}
	return c, nil
}

func (t *Transport) connectWire(ctx context.Context, node base.NodeID, l lane) (*wireConn, error) {
	addr, ok := t.opts.Resolver(node)
	if !ok {
		return nil, fmt.Errorf("resolving node %s: no address is known: %w", node, base.ErrUnavailable)
	}
	nc, err := t.opts.Network.Dial(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("connecting to node %s: %w: %w", node, base.ErrUnavailable, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	round := t.round() // before the peer is judged
	id, limited, err := t.greet(nc, node, l)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = nc.Close()
		if base.SentinelOf(err) == base.ErrInternal {
			err = fmt.Errorf("%w: %w", base.ErrUnavailable, err)
		}
		return nil, err
	}
	return newWireConn(nc, l, id, limited, round, t), nil
}

// pending is a request that waits for its answer.
type pending struct {
	// done is called exactly once, with the answer's body or an error, from the
	// connection's reader or from whoever closed the connection. It must not
	// block.
	done func(body []byte, err error)
	// progress, if set, is called with the receiver's progress counter.
	progress func(uint64)
}

// clientConn sends requests and matches answers. Ids are never used twice on
// a connection, so a late answer of a request that was given up finds nobody.
type clientConn struct {
	*wireConn
	t *Transport

	pmu     sync.Mutex // guards the two below
	nextID  uint64
	pending map[uint64]*pending
	failed  bool // guarded by pmu: the pending requests have been failed
}

// start registers a request and queues its frame. b comes from beginFrame.
// It waits for room as send does. After an error p.done is not called.
func (c *clientConn) start(b []byte, t frameType, g base.GroupID, p *pending, stop <-chan struct{}, until time.Time) (uint64, error) {
	c.pmu.Lock()
	if c.failed {
		c.pmu.Unlock()
		return 0, c.err()
	}
	c.nextID++
	id := c.nextID
	c.pending[id] = p
	c.pmu.Unlock()
	err := sealFrame(b, frame{typ: t, group: g, id: id})
	if err == nil {
		err = c.send(b, stop, until)
	}
	if err != nil {
		if c.forget(id) == nil {
			return id, nil // the connection failed meanwhile and p.done knows
		}
		return 0, err
	}
	return id, nil
}

// forget drops a request and returns it; nil if it was answered or failed.
func (c *clientConn) forget(id uint64) *pending {
	c.pmu.Lock()
	defer c.pmu.Unlock()
	p := c.pending[id]
	delete(c.pending, id)
	return p
}

func (c *clientConn) readLoop() {
	r := bufio.NewReaderSize(c.nc, ioBuffer)
	for {
		f, err := readFrame(r)
		if err != nil {
			c.failAll(fmt.Errorf("reading from node %s: %w: %w", c.peer.Node, base.ErrUnavailable, err))
			return
		}
		c.received(f)
		c.dispatch(f)
	}
}

func (c *clientConn) dispatch(f frame) {
	if f.typ == typeInstallProgress {
		c.pmu.Lock()
		p := c.pending[f.id]
		c.pmu.Unlock()
		r := wireReader{b: f.body}
		if n := r.u64(); p != nil && p.progress != nil && r.finish("progress") == nil {
			p.progress(n)
		}
		return
	}
	if f.flags&flagResponse == 0 {
		return
	}
	p := c.forget(f.id)
	if p == nil {
		return
	}
	if f.flags&flagError != 0 {
		p.done(nil, decodeError(f.body, c.peer.Node))
		return
	}
	p.done(f.body, nil)
}

// failAll closes the connection and fails what waits.
func (c *clientConn) failAll(err error) {
	c.close(err)
	c.pmu.Lock()
	c.failed = true
	waiting := c.pending
	c.pending = nil
	c.pmu.Unlock()
	for _, p := range waiting {
		p.done(nil, c.err())
	}
}

// keepAlive pings a silent connection and closes it if nothing comes back, so
// that a dead peer behind a black hole is noticed and dialed anew.
func (c *clientConn) keepAlive() {
	interval := c.t.opts.PingInterval
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-tick.C:
		}
		silence := c.silence()
		if silence > 3*interval {
			c.close(fmt.Errorf("reading from node %s: nothing came for %v: %w", c.peer.Node, silence, base.ErrUnavailable))
			return
		}
		if silence >= interval {
			b := beginFrame(0)
			if sealFrame(b, frame{typ: typePing}) == nil {
				_ = c.trySend(b) // a full queue is traffic enough
			}
		}
	}
}

// roundTrip sends one request on a lane and waits for the answer.
func (l *clientLane) roundTrip(ctx context.Context, b []byte, t frameType, g base.GroupID, stop <-chan struct{}) ([]byte, error) {
	c, err := l.get(ctx)
	if err != nil {
		return nil, err
	}
	if c.limited {
		return nil, fmt.Errorf("sending to node %s: %w", l.node, base.ErrNotFounded)
	}
	type answer struct {
		body []byte
		err  error
	}
	got := make(chan answer, 1)
	p := &pending{done: func(body []byte, err error) { got <- answer{body, err} }}
	id, err := c.start(b, t, g, p, ctx.Done(), time.Time{})
	if err != nil {
		return nil, err
	}
	select {
	case a := <-got:
		return a.body, a.err
	case <-ctx.Done():
		c.forget(id)
		return nil, fmt.Errorf("waiting for node %s: %w: %w", l.node, base.ErrUnavailable, ctx.Err())
	case <-stop:
		c.forget(id)
		return nil, fmt.Errorf("waiting for node %s: %w", l.node, base.ErrClosed)
	}
}
