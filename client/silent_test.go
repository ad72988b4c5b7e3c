package keel

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// mute is a connection whose other side can vanish: nothing comes any more and
// what is written is lost.
type mute struct {
	net.Conn
	gone   *atomic.Bool
	closed chan struct{}
	once   atomic.Bool
}

func (m *mute) Read(b []byte) (int, error) {
	n, err := m.Conn.Read(b)
	if m.gone.Load() {
		<-m.closed
		return 0, net.ErrClosed
	}
	return n, err
}

func (m *mute) Write(b []byte) (int, error) {
	if m.gone.Load() {
		return len(b), nil
	}
	return m.Conn.Write(b)
}

func (m *mute) Close() error {
	if m.once.CompareAndSwap(false, true) {
		close(m.closed)
	}
	return m.Conn.Close()
}

// A node that vanishes without closing its connection is noticed, although the
// client has nothing to ask it.
func TestVanishedNodeIsNoticed(t *testing.T) {
	t.Parallel() // it takes the least time that gRPC allows
	f := newFake(t, 1)
	var gone atomic.Bool
	var dials atomic.Int32
	c := f.client(WithDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := f.nodes[0].listener.DialContext(ctx)
		if err != nil {
			return nil, err
		}
		if dials.Add(1) > 1 {
			return conn, nil
		}
		return &mute{Conn: conn, gone: &gone, closed: make(chan struct{})}, nil
	}))
	if err := c.Ready(testContext(t)); err != nil {
		t.Fatal(err)
	}
	gone.Store(true)
	waitLonger(t, 40*time.Second, func() bool { return dials.Load() > 1 })
}
