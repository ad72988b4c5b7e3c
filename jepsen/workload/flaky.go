package workload

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"

	keel "github.com/keelstate/keelstate/client"
)

// errLost is what a connection that was broken on purpose returns.
var errLost = fmt.Errorf("losing a connection on purpose: %w", keel.ErrUnavailable)

// Flaky is a dialer (keel.WithDialer) whose connections break after a random
// number of reads, mean on average, with what had just come in: the client does
// not know what became of its requests and must send them again.
func Flaky(seed uint64, mean int) func(ctx context.Context, address string) (net.Conn, error) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 2))
	return func(ctx context.Context, address string) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		// The handshake of a connection takes some reads.
		return &flakyConn{Conn: c, left: 4 + rng.IntN(2*max(mean, 1))}, nil
	}
}

// flakyConn has one reader at a time, as its protocol has it.
type flakyConn struct {
	net.Conn
	left int
}

func (c *flakyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if c.left--; c.left < 0 {
		c.Conn.Close()
		return 0, errLost
	}
	return n, nil
}
