package keel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// deed is what a fake node does with one write.
type deed struct {
	refuse error // answer this and apply nothing
	apply  bool  // apply, whatever the answer
	reply  bool  // answer
	twice  bool  // answer twice
	hang   bool  // neither apply nor answer, and keep the stream
	cut    bool  // break the stream afterwards
	status error // with this status; nil is unavailable
	delay  chan struct{}
}

var normal = deed{apply: true, reply: true}

// fake is a cluster of fake nodes that share one replicated shard, which keeps
// sessions by rule W3 in the most naive way. Tests script what nodes do.
type fake struct {
	t     *testing.T
	nodes []*fakeNode

	mu       sync.Mutex
	leader   int
	epoch    uint64
	revision uint64
	founding bool // there are no shards yet
	// incarnation is the cluster's; knows has the nodes whose answers to a
	// single question for the topology stay at an older revision.
	incarnation uint64
	knows       map[int]uint64
	sessions    map[uint64]*fakeSession
	lastID      uint64
	applied     []string // the values of the mutations, in the order applied
	sequence    uint64
	barrier     uint64                      // the newest that the shard has passed
	writes      []*keelstatepb.WriteRequest // every request that arrived
	reached     []int                       // the node that each of them reached
	// script decides about a write at a node; nil is the normal deed.
	script  func(node int, q *keelstatepb.WriteRequest) deed
	changed chan struct{} // closed at a change of the topology
	hushed  bool          // the last change is not for watchers, those that begin later included
	// read answers a read at the leader in place of the last value applied; an
	// error ends the stream.
	read func(q *keelstatepb.ReadRequest) ([]*keelstatepb.Answer, error)
	scan func(node int, q *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error
}

type fakeSession struct {
	last, floor uint64
	records     map[uint64]*keelstatepb.WriteResult
	ended       bool
}

type fakeNode struct {
	keelstatepb.UnimplementedStateServer
	keelstatepb.UnimplementedClusterServer
	fake     *fake
	index    int
	listener *bufconn.Listener
	server   *grpc.Server
}

// newFake starts a fake cluster; admin, if given, is the Admin service of every node.
func newFake(t *testing.T, nodes int, admin ...keelstatepb.AdminServer) *fake {
	f := &fake{t: t, epoch: 1, revision: 1, sessions: make(map[uint64]*fakeSession), changed: make(chan struct{})}
	for i := range nodes {
		n := &fakeNode{fake: f, index: i, listener: bufconn.Listen(1 << 20), server: grpc.NewServer()}
		keelstatepb.RegisterStateServer(n.server, n)
		keelstatepb.RegisterClusterServer(n.server, n)
		for _, a := range admin {
			keelstatepb.RegisterAdminServer(n.server, a)
		}
		f.nodes = append(f.nodes, n)
		go func() { _ = n.server.Serve(n.listener) }() // ends at Stop
		t.Cleanup(n.server.Stop)
	}
	return f
}

// client opens a client of the fake cluster with short pauses.
func (f *fake) client(opts ...Option) *Client {
	f.t.Helper()
	opts = append([]Option{WithBackoff(time.Millisecond, 10*time.Millisecond), WithRetryBudget(1, 1000), WithAttemptTimeout(2 * time.Second),
		WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
			for i, n := range f.nodes {
				if address == fakeAddress(i) {
					return n.listener.DialContext(ctx)
				}
			}
			return nil, fmt.Errorf("no node at %s", address)
		})}, opts...)
	c, err := Open(context.Background(), []string{fakeAddress(0)}, opts...)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { f.close(c) })
	return c
}

func (f *fake) close(c *Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		f.t.Errorf("closing: %v", err)
	}
}

// end closes a client and stops the nodes before the test ends.
func (f *fake) end(c *Client) {
	f.close(c)
	for _, n := range f.nodes {
		n.server.Stop()
	}
}

func fakeAddress(i int) string { return fmt.Sprintf("node%d:1", i) }
func fakeID(i int) string      { return fmt.Sprintf("node%d", i) }

func (f *fake) topologyLocked() *keelstatepb.Topology {
	t := &keelstatepb.Topology{ClusterId: "fake", Revision: f.revision, Incarnation: f.incarnation, KeyGroups: 128}
	s := &keelstatepb.Shard{Id: 1, Range: &keelstatepb.Range{Hi: 128}, Epoch: f.epoch, LeaderHint: fakeID(f.leader)}
	for i := range f.nodes {
		t.Nodes = append(t.Nodes, &keelstatepb.Node{Id: fakeID(i), GrpcAddress: fakeAddress(i), State: "member"})
		s.Replicas = append(s.Replicas, &keelstatepb.Replica{Node: fakeID(i), Voter: true})
	}
	if !f.founding {
		t.Shards = []*keelstatepb.Shard{s}
	}
	return t
}

// change changes the cluster under the lock; quiet keeps watchers uninformed.
func (f *fake) change(quiet bool, do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
	f.revision++
	f.hushed = quiet
	if !quiet {
		close(f.changed)
		f.changed = make(chan struct{})
	}
}

func (n *fakeNode) GetTopology(context.Context, *keelstatepb.GetTopologyRequest) (*keelstatepb.Topology, error) {
	n.fake.mu.Lock()
	defer n.fake.mu.Unlock()
	t := n.fake.topologyLocked()
	if old := n.fake.knows[n.index]; old > 0 {
		t.Revision = old
	}
	return t, nil
}

func (n *fakeNode) WatchTopology(_ *keelstatepb.GetTopologyRequest, s grpc.ServerStreamingServer[keelstatepb.Topology]) error {
	for {
		n.fake.mu.Lock()
		t, changed, hushed := n.fake.topologyLocked(), n.fake.changed, n.fake.hushed
		n.fake.mu.Unlock()
		if !hushed {
			if err := s.Send(t); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

func (n *fakeNode) DeclareState(_ context.Context, q *keelstatepb.DeclareStateRequest) (*keelstatepb.DeclareStateResponse, error) {
	q.Declaration.Id = 7
	return &keelstatepb.DeclareStateResponse{Declaration: q.Declaration, Created: true, Revision: 2}, nil
}

func (n *fakeNode) OpenSession(_ context.Context, q *keelstatepb.OpenSessionRequest) (*keelstatepb.Session, error) {
	n.fake.mu.Lock()
	defer n.fake.mu.Unlock()
	n.fake.lastID++
	n.fake.sessions[n.fake.lastID] = &fakeSession{records: make(map[uint64]*keelstatepb.WriteResult)}
	return &keelstatepb.Session{Id: n.fake.lastID, LeaseMs: q.GetLeaseMs(), Revision: n.fake.revision}, nil
}

func (n *fakeNode) KeepAliveSession(_ context.Context, q *keelstatepb.KeepAliveSessionRequest) (*keelstatepb.Session, error) {
	n.fake.mu.Lock()
	defer n.fake.mu.Unlock()
	if s := n.fake.sessions[q.GetId()]; s == nil || s.ended {
		return nil, apierr.ToStatus(base.ErrSessionEnded).Err()
	}
	return &keelstatepb.Session{Id: q.GetId()}, nil
}

func (n *fakeNode) CloseSession(_ context.Context, q *keelstatepb.CloseSessionRequest) (*keelstatepb.CloseSessionResponse, error) {
	n.fake.mu.Lock()
	defer n.fake.mu.Unlock()
	if s := n.fake.sessions[q.GetId()]; s != nil {
		s.ended = true
	}
	return &keelstatepb.CloseSessionResponse{}, nil
}

func (n *fakeNode) WriteStream(s grpc.BidiStreamingServer[keelstatepb.WriteBatch, keelstatepb.WriteResults]) error {
	for {
		batch, err := s.Recv()
		if err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		for _, q := range batch.GetRequests() {
			d := n.decide(q)
			if d.delay != nil {
				select {
				case <-d.delay:
				case <-s.Context().Done():
					return s.Context().Err()
				}
			}
			if d.hang {
				continue
			}
			res := n.fake.carryOut(q, d)
			if d.reply || d.refuse != nil {
				answers := []*keelstatepb.WriteResult{res}
				if d.twice {
					answers = append(answers, res)
				}
				if err := s.Send(&keelstatepb.WriteResults{Results: answers}); err != nil {
					return err
				}
			}
			if d.cut && d.status != nil {
				return apierr.ToStatus(d.status).Err()
			}
			if d.cut {
				return status.Error(codes.Unavailable, "cut by the test")
			}
		}
	}
}

func (n *fakeNode) decide(q *keelstatepb.WriteRequest) deed {
	f := n.fake
	f.mu.Lock()
	script := f.script
	f.writes = append(f.writes, q)
	f.reached = append(f.reached, n.index)
	leads, hint, epoch := f.leader == n.index, fakeID(f.leader), f.epoch
	f.mu.Unlock()
	d := normal
	if script != nil {
		d = script(n.index, q)
	}
	switch {
	case d.refuse != nil || d.hang:
	case !leads:
		d.refuse = &base.Error{Cause: base.ErrNotLeader, Ordinal: -1, LeaderHint: base.NodeID(hint)}
	case q.GetEpoch() != epoch:
		d.refuse = &base.Error{Cause: base.ErrStaleEpoch, Ordinal: -1, Epoch: base.Epoch(epoch)}
	}
	return d
}

// carryOut is apply: rule W3, naively.
func (f *fake) carryOut(q *keelstatepb.WriteRequest, d deed) *keelstatepb.WriteResult {
	f.mu.Lock()
	defer f.mu.Unlock()
	refuse := func(err error) *keelstatepb.WriteResult {
		r := &keelstatepb.WriteResult{Tag: q.GetTag(), Error: apierr.ToDetail(err)}
		if errors.Is(err, base.ErrPrecondition) { // the state machine refuses, with a position
			r.Token = &keelstatepb.Token{Shard: 1, Sequence: f.sequence, Barrier: f.barrier}
		}
		return r
	}
	if d.refuse != nil {
		return refuse(d.refuse)
	}
	if !d.apply {
		return refuse(base.ErrOutcomeUnknown)
	}
	if q.GetSession() == 0 {
		return f.executeLocked(q)
	}
	s := f.sessions[q.GetSession()]
	switch {
	case s == nil || s.ended:
		return refuse(base.ErrSessionEnded)
	case s.records[q.GetSequence()] != nil:
		r := s.records[q.GetSequence()]
		return &keelstatepb.WriteResult{Tag: q.GetTag(), Error: r.GetError(), Token: r.GetToken(), Replayed: true}
	}
	if s.floor = max(s.floor, q.GetFloor()); q.GetFloor() > q.GetSequence() {
		f.t.Errorf("request %d has the floor %d", q.GetSequence(), q.GetFloor())
	}
	for number := range s.records {
		if number < s.floor {
			delete(s.records, number)
		}
	}
	switch {
	case q.GetSequence() <= s.last || q.GetSequence() < s.floor:
		return refuse(base.ErrSessionForgot)
	case q.GetPrevious() > s.last:
		return refuse(base.ErrSessionOrder)
	}
	r := f.executeLocked(q)
	s.last = q.GetSequence()
	s.records[q.GetSequence()] = r
	return r
}

func (f *fake) executeLocked(q *keelstatepb.WriteRequest) *keelstatepb.WriteResult {
	for _, m := range q.GetMutations() {
		f.sequence++
		f.applied = append(f.applied, string(m.GetValue()))
	}
	return &keelstatepb.WriteResult{Tag: q.GetTag(), Token: &keelstatepb.Token{Shard: 1, Sequence: f.sequence, Barrier: f.barrier}}
}

func (n *fakeNode) ReadStream(s grpc.BidiStreamingServer[keelstatepb.ReadBatch, keelstatepb.ReadResults]) error {
	for {
		batch, err := s.Recv()
		if err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		out := &keelstatepb.ReadResults{}
		n.fake.mu.Lock()
		for _, q := range batch.GetRequests() {
			r := &keelstatepb.ReadResult{Tag: q.GetTag()}
			if n.fake.leader != n.index {
				r.Error = apierr.ToDetail(&base.Error{Cause: base.ErrNotLeader, Ordinal: -1, LeaderHint: base.NodeID(fakeID(n.fake.leader))})
			} else if n.fake.read != nil {
				var err error
				if r.Answers, err = n.fake.read(q); err != nil {
					n.fake.mu.Unlock()
					return err
				}
			} else {
				for range q.GetQueries() {
					a := &keelstatepb.Answer{Found: len(n.fake.applied) > 0}
					if a.Found {
						a.Value = []byte(n.fake.applied[len(n.fake.applied)-1])
					}
					r.Answers = append(r.Answers, a)
				}
			}
			out.Results = append([]*keelstatepb.ReadResult{r}, out.Results...) // in the wrong order
		}
		n.fake.mu.Unlock()
		if err := s.Send(out); err != nil {
			return err
		}
	}
}

func (n *fakeNode) Scan(q *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
	n.fake.mu.Lock()
	scan := n.fake.scan
	n.fake.mu.Unlock()
	return scan(n.index, q, s)
}

func (f *fake) setScript(s func(node int, q *keelstatepb.WriteRequest) deed) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.script = s
}

// seen returns what was applied and how many requests arrived.
func (f *fake) seen() (applied []string, requests int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.applied...), len(f.writes)
}

// value declares the state that the tests write to.
func (f *fake) value(c *Client) *Value[string] {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	v, err := DeclareValue(ctx, c.Keyspace("k", String.Type()), "v", String)
	if err != nil {
		f.t.Fatal(err)
	}
	return v
}

func (f *fake) dialNone(context.Context, string) (net.Conn, error) {
	return nil, fmt.Errorf("no node answers here")
}
