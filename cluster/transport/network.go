package transport

import (
	"context"
	"fmt"
	"net"
	"time"
)

// Network is the seam under the transport: TCP in a product, an in-memory
// network with faults in tests, and the place where TLS wraps both.
type Network interface {
	// Listen opens a listener on addr ("host:port").
	Listen(addr string) (net.Listener, error)
	// Dial connects to addr. It gives up when ctx ends.
	Dial(ctx context.Context, addr string) (net.Conn, error)
}

// TCP is the Network of a product.
type TCP struct{}

// Listen implements Network.
func (TCP) Listen(addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listening for nodes: %w", err)
	}
	return l, nil
}

// Dial implements Network. Go sets TCP_NODELAY on every TCP connection, which
// is what is wanted: the writer goroutine coalesces frames itself.
func (TCP) Dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAlive: 15 * time.Second}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("dialing a node: %w", err)
	}
	return c, nil
}
