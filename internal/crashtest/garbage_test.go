package crashtest

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"
)

// TestCrashGarbageOnPorts sends random bytes, and what begins like a message, to
// every port of every node. Nobody ends, and the cluster serves.
func TestCrashGarbageOnPorts(t *testing.T) {
	r := seeded(t)
	c := newNodes(t, "rocks")
	c.found(2)
	s := declare(t, c.client())
	rounds := 150
	if *long {
		rounds = 3000
	}
	prefixes := c.handshakes(t)
	for round := range rounds {
		n := c.n[round%len(c.n)]
		for _, addr := range []string{n.raft, n.grpc, n.gossip, n.web} {
			throw(addr, garbage(r, prefixes))
		}
		throwPacket(n.gossip, garbage(r, prefixes))
	}
	for i := range c.n {
		if c.ended(i) {
			t.Errorf("%s has ended", c.n[i].id)
		}
		if c.logHas(i, "panic") {
			t.Errorf("%s panicked", c.n[i].id)
		}
	}
	c.healthy()
	count(t, s, 50)
	c.agree()
}

// handshakes records what a node that starts says first to the raft port of
// another: the best beginning for garbage.
func (c *nodes) handshakes(t *testing.T) [][]byte {
	t.Helper()
	out := [][]byte{nil, []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), []byte("GET /metrics HTTP/1.1\r\n")}
	c.kill(0)
	l, err := net.Listen("tcp", c.n[0].raft)
	if err != nil {
		t.Fatal(err)
	}
	// The others call; on a busy machine some say nothing for the moment that they have.
	for calls := 0; calls < 4 || calls < 40 && len(out) == 3; calls++ {
		if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		conn, err := l.Accept()
		if err != nil {
			t.Fatalf("nobody called: %v", err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		said, _ := io.ReadAll(io.LimitReader(conn, 4096)) // ends by the deadline
		_ = conn.Close()
		if len(said) > 0 {
			out = append(out, said)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	c.start(0)
	c.healthy()
	if len(out) == 3 {
		t.Fatal("nobody said anything")
	}
	return out
}

// garbage is a beginning, perhaps with flipped bits or cut off, and random bytes
// or a huge length after it.
func garbage(r *rand.Rand, prefixes [][]byte) []byte {
	b := append([]byte(nil), prefixes[r.IntN(len(prefixes))]...)
	if len(b) > 0 && r.IntN(3) == 0 {
		b = b[:r.IntN(len(b))]
	}
	for range r.IntN(3) {
		if len(b) > 0 {
			b[r.IntN(len(b))] ^= 1 << r.IntN(8)
		}
	}
	switch r.IntN(4) {
	case 0:
		b = binary.BigEndian.AppendUint32(b, 0xffffffff-uint32(r.IntN(16)))
	case 1:
		b = binary.LittleEndian.AppendUint64(b, 1<<62)
	}
	for range r.IntN(2000) {
		b = append(b, byte(r.Uint32()))
	}
	return b
}

// throw writes to a port and hears a little of the answer; every error is fine.
func throw(addr string, b []byte) {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Millisecond))
	_, _ = conn.Write(b)
	_, _ = io.CopyN(io.Discard, conn, 1<<16)
}

func throwPacket(addr string, b []byte) {
	conn, err := net.Dial("udp", addr)
	if err != nil {
		return
	}
	defer conn.Close()
	_, _ = conn.Write(b[:min(len(b), 60000)])
}
