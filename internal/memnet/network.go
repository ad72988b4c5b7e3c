package memnet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// DefaultWindow is the number of bytes under way that one direction of a
// connection holds before Write blocks.
const DefaultWindow = 1 << 20

// acceptBacklog bounds the connections that wait for Accept; more are refused.
const acceptBacklog = 128

// ErrRefused is what a dial gets where nobody listens.
var ErrRefused = fmt.Errorf("memnet: %w", syscall.ECONNREFUSED)

// ErrReset is what both ends of a cut connection get.
var ErrReset = fmt.Errorf("memnet: %w", syscall.ECONNRESET)

// Network is a set of hosts and the state of the links between them.
type Network struct {
	mu        sync.Mutex
	cond      *sync.Cond // of dials and accepts; those of a connection wait on its streams
	rng       *rand.Rand // guarded by mu
	window    int
	listeners map[string]*listener
	links     map[pair]*link
	conns     map[*stream]struct{}
	nextPort  int
	nextConn  int
}

// pair is one direction between two hosts.
type pair struct{ from, to string }

// link is the state of one direction between two hosts.
type link struct {
	blocked  bool
	delay    time.Duration // fixed part
	jitter   time.Duration // upper bound of the random part, exclusive
	cutOneIn int           // one write in so many cuts the connection; 0 = never
}

// New returns a network without hosts or faults. The seed drives every random
// choice (jitter and random cuts).
func New(seed uint64) *Network {
	n := &Network{
		rng:       rand.New(rand.NewPCG(seed, seed^0x9e3779b97f4a7c15)),
		window:    DefaultWindow,
		listeners: make(map[string]*listener),
		links:     make(map[pair]*link),
		conns:     make(map[*stream]struct{}),
		nextPort:  40000,
	}
	n.cond = sync.NewCond(&n.mu)
	return n
}

// wakeAllLocked wakes everybody who waits, after a change that may concern all.
func (n *Network) wakeAllLocked() {
	n.cond.Broadcast()
	for s := range n.conns {
		s.cond.Broadcast()
	}
}

// SetWindow changes the bytes under way per connection and direction (MN3).
// It must be at least 1.
func (n *Network) SetWindow(bytes int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.window = max(bytes, 1)
	n.wakeAllLocked()
}

// Block makes the direction from -> to a black hole that holds its bytes (MN2).
func (n *Network) Block(from, to string) { n.change(from, to, func(l *link) { l.blocked = true }) }

// Unblock opens the direction from -> to again; held bytes then arrive.
func (n *Network) Unblock(from, to string) { n.change(from, to, func(l *link) { l.blocked = false }) }

// Partition blocks both directions between a and b.
func (n *Network) Partition(a, b string) { n.Block(a, b); n.Block(b, a) }

// Heal opens both directions between a and b.
func (n *Network) Heal(a, b string) { n.Unblock(a, b); n.Unblock(b, a) }

// Isolate blocks both directions between a host and every other known host.
func (n *Network) Isolate(host string, others ...string) {
	for _, o := range others {
		if o != host {
			n.Partition(host, o)
		}
	}
}

// HealAll opens every direction and removes delays and random cuts.
func (n *Network) HealAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.links = make(map[pair]*link)
	n.wakeAllLocked()
}

// SetDelay delays bytes from -> to by delay plus a random part in [0, jitter).
// Order is kept.
func (n *Network) SetDelay(from, to string, delay, jitter time.Duration) {
	n.change(from, to, func(l *link) { l.delay, l.jitter = delay, jitter })
}

// SetCutOneIn cuts a connection at one write in n from -> to, at random; 0
// stops that.
func (n *Network) SetCutOneIn(from, to string, writes int) {
	n.change(from, to, func(l *link) { l.cutOneIn = writes })
}

// Cut resets every connection between a and b. Bytes under way are lost.
func (n *Network) Cut(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for s := range n.conns {
		if (s.dir == pair{a, b}) || (s.dir == pair{b, a}) {
			n.cutLocked(s)
		}
	}
}

// Crash closes the host's listeners and resets all of its connections.
func (n *Network) Crash(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.listeners {
		if l.host == host {
			n.closeListenerLocked(l)
		}
	}
	for s := range n.conns {
		if s.dir.from == host || s.dir.to == host {
			n.cutLocked(s)
		}
	}
	n.cond.Broadcast()
}

// Held returns the bytes that were written from -> to and not yet read.
func (n *Network) Held(from, to string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	total := 0
	for s := range n.conns {
		if (s.dir == pair{from, to}) {
			total += s.size
		}
	}
	return total
}

// Conns returns the number of open connections between a and b.
func (n *Network) Conns(a, b string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	total := 0
	for s := range n.conns {
		if (s.dir == pair{a, b}) {
			total++
		}
	}
	return total
}

func (n *Network) change(from, to string, f func(*link)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(n.linkLocked(pair{from, to}))
	n.wakeAllLocked()
}

func (n *Network) linkLocked(p pair) *link {
	l := n.links[p]
	if l == nil {
		l = new(link)
		n.links[p] = l
	}
	return l
}

// Host is one host's view of the network.
type Host struct {
	net  *Network
	name string
}

// Host returns the host of that name, making it if need be.
func (n *Network) Host(name string) *Host { return &Host{net: n, name: name} }

// Listen opens addr on this host. An empty address, or one that ends in ":0",
// gets a free one.
func (h *Host) Listen(addr string) (net.Listener, error) {
	n := h.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if host, port, err := net.SplitHostPort(addr); addr == "" || (err == nil && port == "0") {
		if host == "" {
			host = h.name
		}
		n.nextPort++
		addr = net.JoinHostPort(host, strconv.Itoa(n.nextPort))
	}
	if _, taken := n.listeners[addr]; taken {
		return nil, fmt.Errorf("memnet: listening on %s: %w", addr, syscall.EADDRINUSE)
	}
	l := &listener{net: n, host: h.name, addr: memAddr(addr)}
	n.listeners[addr] = l
	return l, nil
}

// Dial connects to addr. It waits while either direction is blocked (MN4).
func (h *Host) Dial(ctx context.Context, addr string) (net.Conn, error) {
	n := h.net
	stop := context.AfterFunc(ctx, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.cond.Broadcast()
	})
	defer stop()
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("memnet: dialing %s: %w", addr, err)
		}
		l := n.listeners[addr]
		if l == nil {
			return nil, fmt.Errorf("memnet: dialing %s: %w", addr, ErrRefused)
		}
		there, back := pair{h.name, l.host}, pair{l.host, h.name}
		if n.linkLocked(there).blocked || n.linkLocked(back).blocked {
			n.cond.Wait()
			continue
		}
		if len(l.queue) >= acceptBacklog {
			return nil, fmt.Errorf("memnet: dialing %s: accept queue is full: %w", addr, ErrRefused)
		}
		return n.connectLocked(l, there, back), nil
	}
}

func (n *Network) connectLocked(l *listener, there, back pair) *conn {
	n.nextConn++
	local := memAddr(there.from + "#" + strconv.Itoa(n.nextConn))
	out, in := &stream{dir: there, cond: sync.NewCond(&n.mu)}, &stream{dir: back, cond: sync.NewCond(&n.mu)}
	out.peer, in.peer = in, out
	n.conns[out], n.conns[in] = struct{}{}, struct{}{}
	client := &conn{net: n, out: out, in: in, local: local, remote: l.addr}
	server := &conn{net: n, out: in, in: out, local: l.addr, remote: local}
	l.queue = append(l.queue, server)
	n.cond.Broadcast()
	return client
}

func (n *Network) cutLocked(s *stream) {
	for _, e := range []*stream{s, s.peer} {
		e.cut, e.segments, e.size = true, nil, 0
		delete(n.conns, e)
		e.cond.Broadcast()
	}
}

type memAddr string

func (a memAddr) Network() string { return "mem" }
func (a memAddr) String() string  { return string(a) }

type listener struct {
	net    *Network
	host   string
	addr   memAddr
	queue  []*conn // guarded by net.mu
	closed bool    // guarded by net.mu
}

func (l *listener) Accept() (net.Conn, error) {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	for len(l.queue) == 0 {
		if l.closed {
			return nil, net.ErrClosed
		}
		l.net.cond.Wait()
	}
	c := l.queue[0]
	l.queue = l.queue[1:]
	return c, nil
}

func (l *listener) Close() error {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.net.closeListenerLocked(l)
	l.net.cond.Broadcast()
	return nil
}

func (l *listener) Addr() net.Addr { return l.addr }

func (n *Network) closeListenerLocked(l *listener) {
	l.closed = true
	delete(n.listeners, string(l.addr))
	for _, c := range l.queue { // never accepted: the dialer sees a reset
		n.cutLocked(c.out)
	}
	l.queue = nil
}
