package transport

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// maxGroupQueue bounds the requests that wait for one group, by count.
const maxGroupQueue = 1024

// GroupOptions configures one group's transport.
type GroupOptions struct {
	// Local is the server id of the replica on this node. Requests that mean
	// another id are refused (rule R3: a replica that came back under a new id
	// must not answer for the old one). Empty accepts every id.
	Local raft.ServerID
	// Muted registers the group muted.
	Muted bool
	// PrepareSnapshot is called before an InstallSnapshot reaches raft. It
	// fetches and verifies the files that the manifest names and takes as long
	// as it needs, but reports progress (ReportProgress; FetchFile does so by
	// itself), or the sender gives up after its StallTimeout. It never runs
	// twice at once for a group. Nil: the manifest goes to raft at once. Its
	// context ends when the group is closed or a newer leader sends other
	// content.
	PrepareSnapshot func(ctx context.Context, meta SnapshotMeta, manifest []byte, from base.NodeID) error
	// HasSnapshot says whether the replica holds what a snapshot covers, and
	// must keep what it has behind it: raft would put the state machine back and
	// cut the whole log, with entries that this replica has acknowledged. The
	// leader is then told success without raft. It is asked right before raft
	// would get the snapshot, when nothing else can reach raft in between; it
	// must not block long. Nil: never.
	HasSnapshot func(meta SnapshotMeta) (bool, error)
	// SnapshotOver returns the end of the replica's own newest snapshot if that
	// covers an entry which the log does not hold any more; else 0. It is asked for
	// the previous entry of every append and must be quick where the log holds it.
	// Nil: 0.
	SnapshotOver func(index uint64) (uint64, error)
	// SnapshotRefused is told why a replica elsewhere did not take the snapshot that
	// this one, a leader, had sent; it must not block. Nil: nobody is.
	SnapshotRefused func(err error)
}

// SnapshotMeta describes a snapshot that a leader sends.
type SnapshotMeta struct {
	Group              base.GroupID
	Term               uint64 // the leader's term
	LastIndex          uint64 // last log entry that the snapshot holds
	LastTerm           uint64
	Configuration      raft.Configuration
	ConfigurationIndex uint64
}

// Group is the raft.Transport of one group on this node. Server addresses are
// node ids (rule R4). It implements raft.WithPreVote and raft.WithClose.
type Group struct {
	t        *Transport
	id       base.GroupID
	opts     GroupOptions
	muted    atomic.Bool
	consumer chan raft.RPC // unbuffered; fed by pump only; never closed
	done     chan struct{} // closed by Close
	ctx      context.Context
	cancel   context.CancelFunc
	install  installer

	mu struct {
		sync.Mutex
		closed bool
		urgent []inbound // votes, heartbeats, TimeoutNow: before the appends
		bulk   []inbound // appends and installs, in order of arrival
		bytes  int       // of bulk
	}
	wake chan struct{} // one slot: something waits
}

var (
	_ raft.Transport   = (*Group)(nil)
	_ raft.WithPreVote = (*Group)(nil)
	_ raft.WithClose   = (*Group)(nil)
)

// inbound is a request on its way to raft's main loop. respond is called once,
// or never if the message is dropped because of a mute.
type inbound struct {
	cmd     any
	reader  io.Reader
	size    int
	respond func(any, error)
	// instead, if set, may answer in place of raft, right before raft would get
	// the request.
	instead func() (resp any, answered bool, err error)
}

// Group registers a group and returns its transport. It fails with
// base.ErrConflict if the group is registered already: close the old one first.
func (t *Transport) Group(id base.GroupID, o GroupOptions) (*Group, error) {
	g := &Group{t: t, id: id, opts: o, consumer: make(chan raft.RPC), done: make(chan struct{}), wake: make(chan struct{}, 1)}
	g.ctx, g.cancel = context.WithCancel(t.ctx)
	g.muted.Store(o.Muted)
	t.mu.Lock()
	taken := t.mu.groups[id] != nil
	if !taken && !t.mu.closed {
		t.mu.groups[id] = g
	}
	t.mu.Unlock()
	if taken {
		g.cancel()
		return nil, fmt.Errorf("registering group %s: %w", id, base.ErrConflict)
	}
	if !t.spawn(g.pump) {
		g.cancel()
		return nil, fmt.Errorf("registering group %s: %w", id, base.ErrClosed)
	}
	return g, nil
}

// Close unregisters the group. Requests that wait are answered with
// base.ErrNoSuchShard, and calls under way return. raft closes its transport
// only after its goroutines have ended, and these may wait AppendTimeout for a
// peer that is gone: call Shutdown, then Close, then wait for the future.
func (g *Group) Close() error {
	g.mu.Lock()
	if g.mu.closed {
		g.mu.Unlock()
		return nil
	}
	g.mu.closed = true
	waiting := append(g.mu.urgent, g.mu.bulk...)
	g.mu.urgent, g.mu.bulk = nil, nil
	g.mu.Unlock()
	g.t.mu.Lock()
	if g.t.mu.groups[g.id] == g {
		delete(g.t.mu.groups, g.id)
	}
	g.t.mu.Unlock()
	close(g.done)
	g.cancel()
	for _, in := range waiting {
		in.respond(nil, g.gone())
	}
	return nil
}

func (g *Group) gone() error { return fmt.Errorf("serving group %s: %w", g.id, base.ErrNoSuchShard) }

// Mute drops the Raft traffic and the term polls of the group in both directions
// (damaged replica, rule R3). It concerns this registration only: the replica that
// follows under the same group id is registered unmuted, unless its options say
// otherwise.
func (g *Group) Mute(on bool) { g.muted.Store(on) }

// quiet reports whether the group's messages are dropped now.
func (g *Group) quiet() bool {
	if g.muted.Load() || g.t.muted.Load() {
		g.t.metrics.muted.Inc()
		return true
	}
	return false
}

// enqueue hands a request to the pump. It never blocks.
func (g *Group) enqueue(in inbound, urgent bool) {
	if g.quiet() {
		return
	}
	g.mu.Lock()
	var err error
	switch {
	case g.mu.closed:
		err = g.gone()
	case urgent && len(g.mu.urgent) < maxGroupQueue:
		g.mu.urgent = append(g.mu.urgent, in)
	case !urgent && len(g.mu.bulk) < maxGroupQueue && (g.mu.bytes == 0 || g.mu.bytes+in.size <= g.t.opts.GroupQueueBytes):
		g.mu.bulk = append(g.mu.bulk, in)
		g.mu.bytes += in.size
	default:
		g.t.metrics.overloads.Inc()
		err = fmt.Errorf("queueing for group %s: %w", g.id, base.ErrOverloaded)
	}
	g.mu.Unlock()
	if err != nil {
		in.respond(nil, err)
		return
	}
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

func (g *Group) next() (in inbound, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	q := &g.mu.urgent
	if len(*q) == 0 {
		q = &g.mu.bulk
	}
	if len(*q) == 0 {
		return in, false
	}
	in = (*q)[0]
	(*q)[0] = inbound{}
	if *q = (*q)[1:]; len(*q) == 0 {
		*q = nil
	}
	if q == &g.mu.bulk {
		g.mu.bytes -= in.size
	}
	return in, true
}

// pump feeds raft's main loop one request at a time. raft answers each before
// it takes the next, so waiting for the answer costs no parallelism, and a
// vote or heartbeat overtakes the appends that wait here.
func (g *Group) pump() {
	answer := make(chan raft.RPCResponse, 1) // empty between two requests
	for {
		in, ok := g.next()
		if !ok {
			select {
			case <-g.wake:
				continue
			case <-g.done:
				return
			}
		}
		if g.quiet() {
			continue
		}
		if in.instead != nil {
			if resp, answered, err := in.instead(); answered || err != nil {
				if !g.quiet() {
					in.respond(resp, err)
				}
				continue
			}
		}
		if m, ok := in.cmd.(*raft.AppendEntriesRequest); ok {
			m, err := g.asRaftTakes(m)
			if err != nil {
				in.respond(nil, err)
				continue
			}
			in.cmd = m
		}
		select {
		case g.consumer <- raft.RPC{Command: in.cmd, Reader: in.reader, RespChan: answer}:
		case <-g.done:
			in.respond(nil, g.gone())
			return
		}
		select {
		case a := <-answer:
			if !g.quiet() {
				in.respond(a.Response, a.Error)
			}
		case <-g.done:
			in.respond(nil, g.gone())
			return
		}
	}
}

// checkTarget refuses a request for another replica than ours.
func (g *Group) checkTarget(target raft.ServerID) error {
	if g.opts.Local == "" || target == g.opts.Local {
		return nil
	}
	g.t.metrics.wrongReplica.Inc()
	return fmt.Errorf("serving group %s: the request means replica %.64q, this is %s: %w", g.id, target, g.opts.Local, base.ErrIdentity)
}

// Consumer implements raft.Transport.
func (g *Group) Consumer() <-chan raft.RPC { return g.consumer }

// LocalAddr implements raft.Transport: the address is the node id (rule R4).
func (g *Group) LocalAddr() raft.ServerAddress { return raft.ServerAddress(g.t.opts.Identity.Node) }

// EncodePeer implements raft.Transport.
func (g *Group) EncodePeer(_ raft.ServerID, addr raft.ServerAddress) []byte { return []byte(addr) }

// DecodePeer implements raft.Transport.
func (g *Group) DecodePeer(b []byte) raft.ServerAddress { return raft.ServerAddress(b) }

// SetHeartbeatHandler implements raft.Transport and does nothing, on purpose
// (rule R1). raft offers a fast path that runs appendEntries for heartbeats
// outside its main loop. Two writes of the term can then race across an fsync:
// a voter that granted a vote for term 3 ends with term 2 in memory and on
// disk, and accepts appends of the deposed leader. TestTermRace shows it with
// raft's own transport. Heartbeats take the main loop like everything else;
// what the fast path was for, heartbeats behind large appends, is solved by
// connections and a queue of their own.
func (g *Group) SetHeartbeatHandler(func(raft.RPC)) {}

// AppendEntries implements raft.Transport.
func (g *Group) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if isHeartbeat(args) {
		return g.small(target, typeAppend, putAppend(beginFrame(128), id, args), args, func(b []byte) error {
			return decodeAppendResponse(b, resp)
		}, resp)
	}
	for _, part := range splitAppend(args) {
		ctx, cancel := context.WithTimeout(g.ctx, g.t.opts.AppendTimeout)
		err := g.exchange(ctx, target, typeAppend, appendFrame(id, part), part, func(b []byte) error {
			return decodeAppendResponse(b, resp)
		}, resp, false)
		cancel()
		if err != nil || !resp.Success || resp.Term > args.Term {
			return err
		}
	}
	return nil
}

// isHeartbeat recognises what raft's heartbeat goroutine sends.
func isHeartbeat(m *raft.AppendEntriesRequest) bool {
	return len(m.Entries) == 0 && m.PrevLogEntry == 0 && m.PrevLogTerm == 0 && m.LeaderCommitIndex == 0
}

// appendSplit is the size from which an append is sent as several.
const appendSplit = 4 << 20

func appendSize(m *raft.AppendEntriesRequest) int {
	n := 256
	for _, e := range m.Entries {
		n += entryOverhead + len(e.Data) + len(e.Extensions)
	}
	return n
}

func appendFrame(id raft.ServerID, m *raft.AppendEntriesRequest) []byte {
	return putAppend(beginFrame(appendSize(m)), id, m)
}

// splitAppend cuts a large append into several that follow each other. Each is
// a correct AppendEntries by itself; raft limits appends by count only, and
// 64 large entries would hold the connection for long.
func splitAppend(m *raft.AppendEntriesRequest) []*raft.AppendEntriesRequest {
	if appendSize(m) <= appendSplit {
		return []*raft.AppendEntriesRequest{m}
	}
	var parts []*raft.AppendEntriesRequest
	prevIndex, prevTerm := m.PrevLogEntry, m.PrevLogTerm
	for rest := m.Entries; len(rest) > 0; {
		size, k := 0, 0
		for k < len(rest) {
			size += entryOverhead + len(rest[k].Data) + len(rest[k].Extensions)
			if k > 0 && size > appendSplit {
				break
			}
			k++
		}
		part := *m
		part.PrevLogEntry, part.PrevLogTerm, part.Entries = prevIndex, prevTerm, rest[:k:k]
		prevIndex, prevTerm = rest[k-1].Index, rest[k-1].Term
		parts = append(parts, &part)
		rest = rest[k:]
	}
	return parts
}

// RequestVote implements raft.Transport.
func (g *Group) RequestVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestVoteRequest, resp *raft.RequestVoteResponse) error {
	return g.small(target, typeVote, putVote(beginFrame(128), id, args), args, func(b []byte) error {
		return decodeVoteResponse(b, resp)
	}, resp)
}

// RequestPreVote implements raft.WithPreVote.
func (g *Group) RequestPreVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	return g.small(target, typePreVote, putPreVote(beginFrame(128), id, args), args, func(b []byte) error {
		return decodePreVoteResponse(b, resp)
	}, resp)
}

// TimeoutNow implements raft.Transport. With this node as the target it makes
// the local replica stand for election at once.
func (g *Group) TimeoutNow(id raft.ServerID, target raft.ServerAddress, args *raft.TimeoutNowRequest, resp *raft.TimeoutNowResponse) error {
	return g.small(target, typeTimeoutNow, putTimeoutNow(beginFrame(128), id, args), args, func(b []byte) error {
		return decodeTimeoutNowResponse(b, resp)
	}, resp)
}

func (g *Group) small(target raft.ServerAddress, t frameType, b []byte, args any, decode func([]byte) error, resp any) error {
	ctx, cancel := context.WithTimeout(g.ctx, g.t.opts.SmallTimeout)
	defer cancel()
	return g.exchange(ctx, target, t, b, args, decode, resp, true)
}

// exchange sends a request and decodes its answer; a target on this node is
// served without the network.
func (g *Group) exchange(ctx context.Context, target raft.ServerAddress, t frameType, b []byte, args any, decode func([]byte) error, resp any, urgent bool) error {
	if g.quiet() {
		return g.silenced()
	}
	node := base.NodeID(target)
	if node == g.t.opts.Identity.Node {
		return g.local(ctx, args, resp)
	}
	p := g.t.peer(node)
	l := p.urgent
	if !urgent {
		l = p.appendLane(g.id)
	}
	body, err := l.roundTrip(ctx, b, t, g.id, g.done)
	if err != nil {
		return fmt.Errorf("sending for group %s: %w", g.id, err)
	}
	if g.quiet() { // muted while the request was under way
		return g.silenced()
	}
	return decode(body)
}

// Probe waits until raft's main loop has answered a request that changes
// nothing: an append of term 0, which every replica that has a term refuses as
// older. The replica must have had a term; without one it would follow. A muted
// or closed group is not asked.
func (g *Group) Probe(ctx context.Context) error {
	if g.quiet() {
		return nil
	}
	node := []byte(g.t.opts.Identity.Node)
	got := make(chan error, 1)
	g.enqueue(inbound{cmd: &raft.AppendEntriesRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(g.opts.Local), Addr: node}},
		respond: func(_ any, err error) { got <- err }}, true)
	select {
	case err := <-got:
		return err
	case <-g.done:
		return g.gone()
	case <-ctx.Done():
		return fmt.Errorf("waiting for raft of group %s: %w: %w", g.id, base.ErrUnavailable, ctx.Err())
	}
}

func (g *Group) silenced() error {
	return fmt.Errorf("sending for group %s: the replica is muted: %w", g.id, base.ErrNotReady)
}

// local runs a request against the replica on this node.
func (g *Group) local(ctx context.Context, args, resp any) error {
	type answer struct {
		resp any
		err  error
	}
	got := make(chan answer, 1)
	g.enqueue(inbound{cmd: args, respond: func(r any, err error) { got <- answer{r, err} }}, true)
	select {
	case a := <-got:
		if a.err != nil {
			return a.err
		}
		return assign(resp, a.resp)
	case <-ctx.Done():
		return fmt.Errorf("serving group %s locally: %w: %w", g.id, base.ErrUnavailable, ctx.Err())
	}
}

func assign(dst, src any) error {
	switch d := dst.(type) {
	case *raft.AppendEntriesResponse:
		if s, ok := src.(*raft.AppendEntriesResponse); ok {
			*d = *s
			return nil
		}
	case *raft.RequestVoteResponse:
		if s, ok := src.(*raft.RequestVoteResponse); ok {
			*d = *s
			return nil
		}
	case *raft.RequestPreVoteResponse:
		if s, ok := src.(*raft.RequestPreVoteResponse); ok {
			*d = *s
			return nil
		}
	case *raft.TimeoutNowResponse:
		if s, ok := src.(*raft.TimeoutNowResponse); ok {
			*d = *s
			return nil
		}
	}
	return fmt.Errorf("taking a local answer of type %T: %w", src, base.ErrInternal)
}

// serveRaft decodes a raft request and queues it for its group.
func (c *serverConn) serveRaft(f frame) {
	g := c.t.group(f.group)
	if g == nil {
		c.replyError(f, fmt.Errorf("serving group %s: %w", f.group, base.ErrNoSuchShard))
		return
	}
	var target raft.ServerID
	var cmd any
	var err error
	urgent := true
	switch f.typ {
	case typeAppend:
		var m *raft.AppendEntriesRequest
		target, m, err = decodeAppend(f.body)
		urgent = err == nil && isHeartbeat(m)
		cmd = m
	case typeVote:
		target, cmd, err = decodeAs(decodeVote(f.body))
	case typePreVote:
		target, cmd, err = decodeAs(decodePreVote(f.body))
	case typeTimeoutNow:
		target, cmd, err = decodeAs(decodeTimeoutNow(f.body))
	}
	if err == nil {
		err = g.checkTarget(target)
	}
	if err != nil {
		c.replyError(f, err)
		return
	}
	g.enqueue(inbound{cmd: cmd, size: len(f.body), respond: func(r any, err error) { c.replyRaft(f, r, err) }}, urgent)
}

func decodeAs[M any](target raft.ServerID, m *M, err error) (raft.ServerID, any, error) {
	return target, m, err
}

func (c *serverConn) replyRaft(f frame, resp any, err error) {
	if err != nil {
		c.replyError(f, err)
		return
	}
	b := beginFrame(96)
	switch m := resp.(type) {
	case *raft.AppendEntriesResponse:
		b = putAppendResponse(b, m)
	case *raft.RequestVoteResponse:
		b = putVoteResponse(b, m)
	case *raft.RequestPreVoteResponse:
		b = putPreVoteResponse(b, m)
	case *raft.TimeoutNowResponse:
		b = putRPCHeader(b, m.RPCHeader)
	case *raft.InstallSnapshotResponse:
		b = putInstallResponse(b, m)
	default:
		c.replyError(f, fmt.Errorf("answering for group %s with a %T: %w", f.group, resp, base.ErrInternal))
		return
	}
	c.replyOK(f, b)
}
