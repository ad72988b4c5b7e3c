package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// Transport is one node's traffic with all other nodes, over one listener.
type Transport struct {
	opts       Options
	metrics    *metrics
	refusalLog *limitedLog

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the transport
	muted  atomic.Bool    // drops all Raft traffic (Mute)

	fileServe chan struct{} // one slot per served file stream
	fileFetch chan struct{} // one slot per opened file stream

	mu struct {
		sync.Mutex
		started  bool
		closed   bool
		identity Identity
		round    uint64 // counts DropPeers
		listener net.Listener
		peers    map[base.NodeID]*peer
		conns    map[*wireConn]struct{} // every open connection, both directions
		pending  map[net.Conn]struct{}  // accepted, handshake under way
		groups   map[base.GroupID]*Group
		calls    map[uint8]CallHandler
		poll     PollHandler
		files    FileHandler
	}
}

// New makes a transport. It does not listen before Start.
func New(o Options) (*Transport, error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, fmt.Errorf("registering the transport's metrics: %w", err)
	}
	t := &Transport{
		opts: o, metrics: m, refusalLog: newLimitedLog(o.Logger, time.Minute),
		fileServe: make(chan struct{}, o.MaxFileStreams), fileFetch: make(chan struct{}, o.MaxFileStreams),
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.mu.identity = o.Identity
	t.mu.peers = make(map[base.NodeID]*peer)
	t.mu.conns = make(map[*wireConn]struct{})
	t.mu.pending = make(map[net.Conn]struct{})
	t.mu.groups = make(map[base.GroupID]*Group)
	t.mu.calls = make(map[uint8]CallHandler)
	return t, nil
}

// Start opens the listener and serves until Close.
func (t *Transport) Start() error {
	l, err := t.opts.Network.Listen(t.opts.ListenAddr)
	if err != nil {
		return fmt.Errorf("starting the transport on %s: %w", t.opts.ListenAddr, err)
	}
	t.mu.Lock()
	if t.mu.closed || t.mu.started {
		t.mu.Unlock()
		return errors.Join(fmt.Errorf("starting the transport twice or after its end: %w", base.ErrClosed), l.Close())
	}
	t.mu.started = true
	t.mu.listener = l
	t.mu.Unlock()
	if !t.spawn(func() { t.acceptLoop(l) }) {
		return errors.Join(fmt.Errorf("starting the transport: %w", base.ErrClosed), l.Close())
	}
	return nil
}

// Addr returns the listener's address, or nil before Start.
func (t *Transport) Addr() net.Addr {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.listener == nil {
		return nil
	}
	return t.mu.listener.Addr()
}

// Identity returns this node's identity.
func (t *Transport) Identity() Identity {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.identity
}

// SetCluster binds the node to a cluster once it was founded or admitted. All
// connections are closed, so that both sides greet each other anew.
func (t *Transport) SetCluster(id base.ClusterID) error {
	t.mu.Lock()
	if cur := t.mu.identity.Cluster; cur != "" && cur != id {
		t.mu.Unlock()
		return fmt.Errorf("joining cluster %s: the node belongs to %s: %w", id, cur, base.ErrAlreadyFounded)
	}
	changed := t.mu.identity.Cluster != id
	t.mu.identity.Cluster = id
	t.mu.Unlock()
	if changed {
		t.DropPeers()
	}
	return nil
}

// DropPeers closes every connection. They are made anew on demand, with a new
// handshake; call it after the cluster's record of nodes lost one.
func (t *Transport) DropPeers() {
	t.mu.Lock()
	t.mu.round++ // those that are being greeted now are closed by adopt
	t.mu.Unlock()
	for _, c := range t.openConns() {
		c.close(fmt.Errorf("closing the connection with node %s to greet anew: %w", c.peer.Node, base.ErrUnavailable))
	}
	for _, p := range t.allPeers() {
		for _, l := range p.lanes() {
			l.peerIsBack()
		}
	}
}

// Mute drops all Raft traffic and term polls of the node, in both directions,
// until it is unmuted (hung disk). Node-level calls and files still pass.
func (t *Transport) Mute(on bool) { t.muted.Store(on) }

// Close stops everything and waits for it. Groups are closed too.
func (t *Transport) Close() error {
	t.mu.Lock()
	already := t.mu.closed
	t.mu.closed = true
	l := t.mu.listener
	groups := make([]*Group, 0, len(t.mu.groups))
	for _, g := range t.mu.groups {
		groups = append(groups, g)
	}
	for nc := range t.mu.pending {
		_ = nc.Close() // wakes its handshake
	}
	t.mu.Unlock()
	t.cancel()
	var err error
	if l != nil && !already {
		err = l.Close()
	}
	for _, g := range groups {
		_ = g.Close() // always nil
	}
	for _, c := range t.openConns() {
		c.close(fmt.Errorf("closing the transport: %w", base.ErrClosed))
	}
	t.wg.Wait()
	if err != nil {
		return fmt.Errorf("closing the transport: %w", err)
	}
	return nil
}

// spawn runs f in a goroutine that Close waits for; false after Close.
func (t *Transport) spawn(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return false
	}
	t.wg.Add(1)
	go func() {
		defer t.wg.Done()
		f()
	}()
	return true
}

// round is the number of times that all peers had to greet anew.
func (t *Transport) round() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.round
}

// adopt registers an open connection so that Close and DropPeers find it. It
// closes the connection and fails after Close, and with base.ErrUnavailable if
// DropPeers came after the peer was judged: what that judged by, the node's own
// cluster or who belongs to it, may have changed, and nobody would look again.
func (t *Transport) adopt(c *wireConn) error {
	t.mu.Lock()
	var err error
	switch {
	case t.mu.closed:
		err = base.ErrClosed
	case c.round != t.mu.round:
		err = fmt.Errorf("greeting node %s anew: %w", c.peer.Node, base.ErrUnavailable)
	default:
		t.mu.conns[c] = struct{}{}
	}
	t.mu.Unlock()
	if err != nil {
		c.close(err)
		return err
	}
	if c.err() != nil { // closed before it was registered
		t.disown(c)
	}
	return nil
}

func (t *Transport) disown(c *wireConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.conns, c)
}

func (t *Transport) openConns() []*wireConn {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*wireConn, 0, len(t.mu.conns))
	for c := range t.mu.conns {
		out = append(out, c)
	}
	return out
}

func (t *Transport) allPeers() []*peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*peer, 0, len(t.mu.peers))
	for _, p := range t.mu.peers {
		out = append(out, p)
	}
	return out
}

func (t *Transport) peer(node base.NodeID) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.mu.peers[node]
	if p == nil {
		p = t.newPeer(node)
		t.mu.peers[node] = p
	}
	return p
}

func (t *Transport) group(id base.GroupID) *Group {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.groups[id]
}

// limitedLog logs one message per key and interval. The keys come from the
// network, so their number is bounded: when it is full the map starts afresh.
type limitedLog struct {
	log      *slog.Logger
	interval time.Duration
	mu       sync.Mutex
	last     map[string]time.Time // guarded by mu
}

const maxLogKeys = 1024

func newLimitedLog(l *slog.Logger, interval time.Duration) *limitedLog {
	return &limitedLog{log: l, interval: interval, last: make(map[string]time.Time)}
}

func (l *limitedLog) warn(key, msg string, args ...any) {
	l.mu.Lock()
	now := time.Now()
	last, seen := l.last[key]
	quiet := seen && now.Sub(last) < l.interval
	if !quiet {
		if len(l.last) >= maxLogKeys {
			clear(l.last)
		}
		l.last[key] = now
	}
	l.mu.Unlock()
	if !quiet {
		l.log.Warn(msg, args...)
	}
}
