package keel

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

type (
	writePipe = pipe[*keelstatepb.WriteRequest, *keelstatepb.WriteResult]
	readPipe  = pipe[*keelstatepb.ReadRequest, *keelstatepb.ReadResult]
	writeX    = exchange[*keelstatepb.WriteRequest, *keelstatepb.WriteResult]
	readX     = exchange[*keelstatepb.ReadRequest, *keelstatepb.ReadResult]
)

// node is the connection to one address, with at most one pipe of each kind.
type node struct {
	client  *Client
	address string
	conn    *grpc.ClientConn

	mu struct {
		sync.Mutex
		writes *writePipe
		reads  *readPipe
	}
}

// node returns the connection to an address; it does not wait for it.
func (c *Client) node(address string) (*node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return nil, newError(ErrClosed, OutcomeNotApplied, "")
	}
	if n := c.mu.nodes[address]; n != nil {
		return n, nil
	}
	dial := []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
		// Without this a node that vanishes without a word keeps its streams open
		// until the kernel gives up, after minutes. 10 s is the least that gRPC
		// allows; servers allow it.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}
	if !c.opts.credentials {
		dial = append(dial, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	dial = append(dial, grpc.WithChainUnaryInterceptor(markUnsent, c.nameCluster), grpc.WithChainStreamInterceptor(c.nameClusterOnStream))
	conn, err := grpc.NewClient("passthrough:///"+address, append(dial, c.opts.dial...)...)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w: %w", address, ErrUnavailable, err)
	}
	n := &node{client: c, address: address, conn: conn}
	c.mu.nodes[address] = n
	return n, nil
}

// writes returns the pipe for writes, a new one if there is none or it broke.
func (n *node) writes() *writePipe {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.writes == nil || n.mu.writes.broken() {
		n.mu.writes = newPipe(n.client.ctx, &n.client.wg, n.client.start, n.openWrites,
			func(q *keelstatepb.WriteRequest, tag uint64) { q.Tag = tag }, (*keelstatepb.WriteResult).GetTag)
	}
	return n.mu.writes
}

func (n *node) openWrites(ctx context.Context) (*stream[*keelstatepb.WriteRequest, *keelstatepb.WriteResult], error) {
	s, err := keelstatepb.NewStateClient(n.conn).WriteStream(ctx)
	if err != nil {
		return nil, err
	}
	return &stream[*keelstatepb.WriteRequest, *keelstatepb.WriteResult]{
		send: func(q []*keelstatepb.WriteRequest) error { return s.Send(&keelstatepb.WriteBatch{Requests: q}) },
		recv: func() ([]*keelstatepb.WriteResult, error) {
			m, err := s.Recv()
			return m.GetResults(), err
		},
	}, nil
}

// reads returns the pipe for reads, a new one if there is none or it broke.
func (n *node) reads() *readPipe {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.reads == nil || n.mu.reads.broken() {
		n.mu.reads = newPipe(n.client.ctx, &n.client.wg, n.client.start, n.openReads,
			func(q *keelstatepb.ReadRequest, tag uint64) { q.Tag = tag }, (*keelstatepb.ReadResult).GetTag)
	}
	return n.mu.reads
}

func (n *node) openReads(ctx context.Context) (*stream[*keelstatepb.ReadRequest, *keelstatepb.ReadResult], error) {
	s, err := keelstatepb.NewStateClient(n.conn).ReadStream(ctx)
	if err != nil {
		return nil, err
	}
	return &stream[*keelstatepb.ReadRequest, *keelstatepb.ReadResult]{
		send: func(q []*keelstatepb.ReadRequest) error { return s.Send(&keelstatepb.ReadBatch{Requests: q}) },
		recv: func() ([]*keelstatepb.ReadResult, error) {
			m, err := s.Recv()
			return m.GetResults(), err
		},
	}, nil
}

// markUnsent gives a unary call that never reached a connection the outcome
// that it has: not applied.
func markUnsent(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var to peer.Peer
	err := invoke(ctx, method, req, reply, conn, append(opts, grpc.Peer(&to))...)
	if err == nil || to.Addr != nil || apierr.DetailOf(err) != nil {
		return err
	}
	st := status.Convert(err)
	switch st.Code() {
	case codes.Unavailable:
		return &unsentError{own: newError(ErrUnavailable, OutcomeNotApplied, st.Message()), status: st}
	case codes.DeadlineExceeded, codes.Canceled:
		return &unsentError{own: newError(ErrDeadline, OutcomeNotApplied, st.Message()), status: st}
	}
	return err
}

// nameCluster says with each call which cluster the client belongs to, once it
// knows: one that has taken its place at the same addresses may number shards and
// sessions alike, and refuses the call (KC6).
func (c *Client) nameCluster(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoke(c.withCluster(ctx), method, req, reply, conn, opts...)
}

func (c *Client) nameClusterOnStream(ctx context.Context, d *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return open(c.withCluster(ctx), d, conn, method, opts...)
}

func (c *Client) withCluster(ctx context.Context) context.Context {
	if t := c.topo.Load(); t != nil && t.cluster != "" {
		return metadata.AppendToOutgoingContext(ctx, base.ClusterHeader, t.cluster)
	}
	return ctx
}

// foreign are the nodes at whose addresses one request has met another cluster.
type foreign []string

// everywhere takes in an answer of a node. It says that another cluster was met at
// every replica of the shard: then asking again is of no use.
func (f *foreign) everywhere(c *Client, shard uint64, node string, e *Error) bool {
	if e.Code != codeIdentity {
		return false
	}
	if !slices.Contains(*f, node) {
		*f = append(*f, node)
	}
	return !slices.ContainsFunc(c.topo.Load().replicas[shard], func(r string) bool { return !slices.Contains(*f, r) })
}

// unsentError is an Error that gRPC still takes for its own.
type unsentError struct {
	own    *Error
	status *status.Status
}

func (e *unsentError) Error() string              { return e.own.Error() }
func (e *unsentError) Unwrap() error              { return e.own }
func (e *unsentError) GRPCStatus() *status.Status { return e.status }
