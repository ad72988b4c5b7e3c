package transport

import (
	"bufio"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

const ioBuffer = 64 << 10

// wireConn is a connection after its handshake: a bounded queue of sealed
// frames and the goroutine that writes them. The goroutine takes all that
// waits at once and flushes when nothing waits any more, so that many small
// frames become one write to the socket.
type wireConn struct {
	nc       net.Conn
	lane     lane
	peer     Identity
	limited  bool   // only admission calls may pass
	round    uint64 // of greetings in which the peer was judged
	maxQueue int    // bytes
	traffic  traffic
	onClose  func(*wireConn) // called once, after the connection is closed

	mu struct {
		sync.Mutex
		queue [][]byte
		bytes int
		err   error         // why the connection is closed; nil while it is open
		space chan struct{} // closed and replaced when the writer takes the queue
	}
	wake     chan struct{} // one slot: the queue is not empty; never closed
	done     chan struct{} // closed when the connection is closed
	born     time.Time     // lastRead counts from here, by the monotonic clock
	lastRead atomic.Int64  // time.Duration since born of the last received frame
}

func newWireConn(nc net.Conn, l lane, peer Identity, limited bool, round uint64, t *Transport) *wireConn {
	c := &wireConn{
		nc: nc, lane: l, peer: peer, limited: limited, round: round, maxQueue: t.opts.SendQueueBytes, traffic: t.metrics.traffic(l), onClose: t.disown,
		wake: make(chan struct{}, 1), done: make(chan struct{}), born: time.Now(),
	}
	c.mu.space = make(chan struct{})
	return c
}

// trySend queues a sealed frame and does not block.
func (c *wireConn) trySend(b []byte) error {
	_, err := c.put(b)
	return err
}

// send queues a sealed frame; it waits for room until stop is closed or the
// time is over (zero: never).
func (c *wireConn) send(b []byte, stop <-chan struct{}, until time.Time) error {
	var timeout <-chan time.Time // made when it has to wait, which is seldom
	for {
		space, err := c.put(b)
		if err == nil || space == nil {
			return err
		}
		if timeout == nil && !until.IsZero() {
			timer := time.NewTimer(time.Until(until))
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-space:
		case <-c.done:
		case <-stop:
			return err
		case <-timeout:
			return err
		}
	}
}

// put queues b. If there is no room it returns a channel that is closed when
// there may be, with base.ErrOverloaded.
func (c *wireConn) put(b []byte) (space <-chan struct{}, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return nil, c.mu.err
	}
	if c.mu.bytes > 0 && c.mu.bytes+len(b) > c.maxQueue {
		return c.mu.space, fmt.Errorf("queueing %d bytes for node %s: %w", len(b), c.peer.Node, base.ErrOverloaded)
	}
	c.mu.queue = append(c.mu.queue, b)
	c.mu.bytes += len(b)
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil, nil
}

// take empties the queue. The bytes stay counted until the next call, so that
// what the writer holds is bounded as well.
func (c *wireConn) take(spare [][]byte, written int) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := c.mu.queue
	c.mu.queue = spare[:0]
	c.mu.bytes -= written
	if written > 0 {
		close(c.mu.space)
		c.mu.space = make(chan struct{})
	}
	return q
}

// writeLoop runs until the connection is closed.
func (c *wireConn) writeLoop() {
	w := bufio.NewWriterSize(c.nc, ioBuffer)
	var spare [][]byte
	written := 0
	for {
		batch := c.take(spare, written)
		// The two slices take turns: what take returned is the next spare, also
		// when it is empty, or a queue would share its array with a batch.
		spare, written = batch, 0
		if len(batch) == 0 {
			if err := w.Flush(); err != nil {
				c.close(fmt.Errorf("writing to node %s: %w: %w", c.peer.Node, base.ErrUnavailable, err))
				return
			}
			select {
			case <-c.wake:
				continue
			case <-c.done:
				return
			}
		}
		for i, b := range batch {
			if _, err := w.Write(b); err != nil {
				c.close(fmt.Errorf("writing to node %s: %w: %w", c.peer.Node, base.ErrUnavailable, err))
				return
			}
			written += len(b)
			batch[i] = nil
		}
		c.traffic.sent(len(batch), written)
	}
}

// close closes the connection once; err is what later sends get.
func (c *wireConn) close(err error) {
	c.mu.Lock()
	first := c.mu.err == nil
	if first {
		c.mu.err = err
		c.mu.queue = nil
	}
	c.mu.Unlock()
	if first {
		close(c.done)
		_ = c.nc.Close() // nothing can be done about a failing close
		c.onClose(c)
	}
}

// err returns why the connection is closed, or nil.
func (c *wireConn) err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.err
}

// received notes a frame for liveness and metrics.
func (c *wireConn) received(f frame) {
	c.lastRead.Store(int64(time.Since(c.born)))
	c.traffic.received(headerSize + len(f.body))
}

// silence is how long nothing was received.
func (c *wireConn) silence() time.Duration {
	return time.Since(c.born) - time.Duration(c.lastRead.Load())
}
