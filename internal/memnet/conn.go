package memnet

import (
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// stream is one direction of one connection. All fields are guarded by the
// network's mutex.
type stream struct {
	dir      pair
	peer     *stream    // the other direction
	cond     *sync.Cond // of the one who reads it and the one who writes it
	segments []segment
	size     int         // bytes in segments
	last     time.Time   // arrival time of the newest segment; arrival never goes back
	waker    *time.Timer // wakes the reader when the first segment arrives
	wakes    time.Time   // when it does
	ended    bool        // the writer closed: EOF after the segments
	cut      bool        // reset: both ends fail at once
}

type segment struct {
	data  []byte
	ready time.Time
}

// conn is one end of a connection.
type conn struct {
	net           *Network
	out, in       *stream
	local, remote memAddr
	closed        bool     // guarded by net.mu
	read, write   deadline // guarded by net.mu
}

// deadline wakes waiters through the network's condition when it passes.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

// setDeadlineLocked changes the deadline of the one who waits at a stream.
func (n *Network) setDeadlineLocked(s *stream, d *deadline, at time.Time) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.at = at
	if wait := time.Until(at); !at.IsZero() && wait > 0 {
		d.timer = n.wakeAfter(s, wait)
	}
	s.cond.Broadcast()
}

func (n *Network) wakeAfter(s *stream, wait time.Duration) *time.Timer {
	return time.AfterFunc(wait, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		s.cond.Broadcast()
	})
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		switch s := c.in; {
		case c.closed:
			return 0, net.ErrClosed
		case s.cut:
			return 0, ErrReset
		case c.read.passed():
			return 0, os.ErrDeadlineExceeded
		case len(p) == 0:
			return 0, nil
		case n.arrivedLocked(s):
			return n.takeLocked(s, p), nil
		case s.ended && len(s.segments) == 0 && !n.linkLocked(s.dir).blocked:
			return 0, io.EOF
		}
		c.in.cond.Wait()
	}
}

// arrivedLocked reports whether the first segment may be read; if it is only
// late, it arranges to wake the reader in time.
func (n *Network) arrivedLocked(s *stream) bool {
	if len(s.segments) == 0 || n.linkLocked(s.dir).blocked {
		return false
	}
	ready := s.segments[0].ready
	wait := time.Until(ready)
	if wait <= 0 {
		return true
	}
	if !s.wakes.Equal(ready) { // else it is set already
		if s.wakes = ready; s.waker == nil {
			s.waker = n.wakeAfter(s, wait)
		} else {
			s.waker.Reset(wait)
		}
	}
	return false
}

func (n *Network) takeLocked(s *stream, p []byte) int {
	now, total := time.Now(), 0
	for len(s.segments) > 0 && total < len(p) && !s.segments[0].ready.After(now) {
		k := copy(p[total:], s.segments[0].data)
		total += k
		if s.segments[0].data = s.segments[0].data[k:]; len(s.segments[0].data) == 0 {
			s.segments[0] = segment{}
			s.segments = s.segments[1:]
		}
	}
	s.size -= total
	s.cond.Broadcast()
	return total
}

// Write implements net.Conn. It blocks while the window is full (MN3).
func (c *conn) Write(p []byte) (int, error) {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	total := 0
	for {
		s := c.out
		switch {
		case c.closed:
			return total, net.ErrClosed
		case s.cut || s.peer.ended && c.remoteGoneLocked():
			return total, ErrReset
		case c.write.passed():
			return total, os.ErrDeadlineExceeded
		case total == len(p):
			return total, nil
		}
		free := n.window - s.size
		if free <= 0 {
			s.cond.Wait()
			continue
		}
		l := n.linkLocked(s.dir)
		if l.cutOneIn > 0 && n.rng.IntN(l.cutOneIn) == 0 {
			n.cutLocked(s)
			return total, ErrReset
		}
		k := min(free, len(p)-total)
		n.putLocked(s, l, p[total:total+k])
		total += k
	}
}

// remoteGoneLocked: the peer closed its end, so what we write goes nowhere. A
// real peer would answer with a reset, unless a partition keeps it from us.
func (c *conn) remoteGoneLocked() bool {
	return !c.net.linkLocked(c.in.dir).blocked && !c.net.linkLocked(c.out.dir).blocked
}

func (n *Network) putLocked(s *stream, l *link, p []byte) {
	ready := time.Now().Add(l.delay)
	if l.jitter > 0 {
		ready = ready.Add(time.Duration(n.rng.Int64N(int64(l.jitter))))
	}
	if ready.Before(s.last) {
		ready = s.last
	}
	s.last = ready
	s.segments = append(s.segments, segment{data: append([]byte(nil), p...), ready: ready})
	s.size += len(p)
	s.cond.Broadcast()
}

// Close implements net.Conn. What was written before still arrives.
func (c *conn) Close() error {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.closed = true
	c.out.ended = true
	n.setDeadlineLocked(c.in, &c.read, time.Time{})
	n.setDeadlineLocked(c.out, &c.write, time.Time{})
	if c.in.ended || c.out.cut { // both ends are closed
		delete(n.conns, c.out)
		delete(n.conns, c.in)
	}
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

func (c *conn) SetDeadline(t time.Time) error {
	return c.set(func() { c.net.setDeadlineLocked(c.in, &c.read, t); c.net.setDeadlineLocked(c.out, &c.write, t) })
}

func (c *conn) SetReadDeadline(t time.Time) error {
	return c.set(func() { c.net.setDeadlineLocked(c.in, &c.read, t) })
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	return c.set(func() { c.net.setDeadlineLocked(c.out, &c.write, t) })
}

func (c *conn) set(f func()) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	f()
	return nil
}
