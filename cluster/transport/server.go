package transport

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// serverConn is an accepted connection: it reads requests and never blocks on
// what handles them, so that one group or call cannot delay another.
type serverConn struct {
	*wireConn
	t      *Transport
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	slots  chan struct{} // one per running call, poll or install

	cmu     sync.Mutex
	cancels map[uint64]context.CancelFunc // running calls, guarded by cmu
}

func (t *Transport) acceptLoop(l net.Listener) {
	pause := 5 * time.Millisecond
	for {
		nc, err := l.Accept()
		if err == nil {
			pause = 5 * time.Millisecond
			if !t.admit(nc) {
				_ = nc.Close()
			}
			continue
		}
		if t.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		// Out of descriptors or the like: say so and try again.
		t.refusalLog.warn("accept", "accepting a node's connection failed", "err", err)
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-t.ctx.Done():
			return
		}
	}
}

// admit starts to serve a fresh connection, if there is room for one.
func (t *Transport) admit(nc net.Conn) bool {
	t.mu.Lock()
	full := len(t.mu.pending)+len(t.mu.conns) >= t.opts.MaxServerConns
	if !full && !t.mu.closed {
		t.mu.pending[nc] = struct{}{}
	}
	t.mu.Unlock()
	if full {
		t.refusalLog.warn("full", "node connection refused: too many connections", "limit", t.opts.MaxServerConns)
		return false
	}
	return t.spawn(func() { t.serveConn(nc) })
}

func (t *Transport) serveConn(nc net.Conn) {
	round := t.round() // before the peer is judged
	h, limited, err := t.welcome(nc)
	t.mu.Lock()
	delete(t.mu.pending, nc)
	t.mu.Unlock()
	if err != nil {
		_ = nc.Close()
		if t.ctx.Err() == nil {
			key := string(h.id.Node)
			if key == "" {
				key, _, _ = net.SplitHostPort(nc.RemoteAddr().String())
			}
			t.metrics.refused(err)
			t.refusalLog.warn(key, "node connection refused", "peer", h.id.Node, "remote", nc.RemoteAddr().String(), "err", err)
		}
		return
	}
	c := &serverConn{
		wireConn: newWireConn(nc, h.lane, h.id, limited, round, t), t: t,
		slots: make(chan struct{}, t.opts.MaxCalls), cancels: make(map[uint64]context.CancelFunc),
	}
	if t.adopt(c.wireConn) != nil {
		return
	}
	if !limited {
		t.noteBack(h.id.Node)
	}
	c.ctx, c.cancel = context.WithCancel(t.ctx)
	defer c.cancel()
	if h.lane == laneBulk {
		c.serveFile()
		return
	}
	if t.spawn(c.writeLoop) {
		c.readLoop()
	}
	c.close(fmt.Errorf("serving node %s: %w", c.peer.Node, base.ErrClosed))
}

// noteBack ends the pauses towards a node that can evidently be reached.
func (t *Transport) noteBack(node base.NodeID) {
	t.mu.Lock()
	p := t.mu.peers[node]
	t.mu.Unlock()
	if p != nil {
		for _, l := range p.lanes() {
			l.peerIsBack()
		}
	}
}

// readLoop ends when the connection fails, or brings nothing for so long that
// the other side, which pings, must be gone.
func (c *serverConn) readLoop() {
	r := bufio.NewReaderSize(c.nc, ioBuffer)
	idle := 10 * c.t.opts.PingInterval
	var armed time.Time
	for {
		// The deadline may lag by a tenth, which saves a call per frame.
		if now := time.Now(); now.Sub(armed) > idle/10 {
			armed = now
			if err := c.nc.SetReadDeadline(now.Add(idle)); err != nil {
				return
			}
		}
		f, err := readFrame(r)
		if err != nil {
			switch base.SentinelOf(err) {
			case base.ErrCorrupt, base.ErrFormatVersion:
				c.t.refusalLog.warn("frame/"+string(c.peer.Node), "closing a node's connection", "peer", c.peer.Node, "err", err)
			}
			return
		}
		c.received(f)
		c.dispatch(f)
	}
}

func (c *serverConn) dispatch(f frame) {
	if c.limited && (f.typ != typeCall && f.typ != typePing && f.typ != typeCancel) {
		c.replyError(f, fmt.Errorf("serving node %s: %w", c.peer.Node, base.ErrNotFounded))
		return
	}
	switch f.typ {
	case typePing:
		c.reply(frame{typ: typePong, id: f.id}, beginFrame(0))
	case typeAppend, typeVote, typePreVote, typeTimeoutNow:
		c.serveRaft(f)
	case typeInstall:
		c.run(f, c.serveInstall)
	case typePoll:
		c.run(f, c.servePoll)
	case typeCall:
		c.run(f, c.serveCall)
	case typeCancel:
		c.cmu.Lock()
		cancel := c.cancels[f.id]
		c.cmu.Unlock()
		if cancel != nil {
			cancel()
		}
	default:
		c.replyError(f, fmt.Errorf("serving a frame of type %d: %w", f.typ, base.ErrUnsupported))
	}
}

// run handles f in a goroutine of its own; it refuses f if too many run.
func (c *serverConn) run(f frame, handle func(frame)) {
	select {
	case c.slots <- struct{}{}:
	default:
		c.t.metrics.overloads.Inc()
		c.replyError(f, fmt.Errorf("serving node %s: too many calls at once: %w", c.peer.Node, base.ErrOverloaded))
		return
	}
	if !c.t.spawn(func() {
		defer func() { <-c.slots }()
		handle(f)
	}) {
		<-c.slots
	}
}

// reply queues an answer. It must not block the caller: a peer that does not
// read its answers loses the connection.
func (c *serverConn) reply(f frame, b []byte) {
	err := sealFrame(b, f)
	if err == nil {
		err = c.trySend(b)
	}
	if err != nil {
		c.close(fmt.Errorf("answering node %s: %w", c.peer.Node, err))
	}
}

func (c *serverConn) replyError(f frame, err error) {
	c.reply(frame{typ: f.typ, flags: flagResponse | flagError, group: f.group, id: f.id}, putError(beginFrame(256), err))
}

func (c *serverConn) replyOK(f frame, b []byte) {
	c.reply(frame{typ: f.typ, flags: flagResponse, group: f.group, id: f.id}, b)
}
