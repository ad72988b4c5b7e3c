package wire

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// ErrNoVerdict says that the context ended before any node came to a verdict.
var ErrNoVerdict = errors.New("nobody came to a verdict about the request")

// How a request is tried.
const (
	attemptLimit = 2 * time.Second
	pause        = 50 * time.Millisecond
)

// Client asks the nodes of one cluster.
type Client struct {
	conns []*grpc.ClientConn
	next  atomic.Uint64
}

// Dial makes a client; nobody is asked yet.
func Dial(endpoints []string) (*Client, error) {
	c := &Client{}
	for _, e := range endpoints {
		conn, err := grpc.NewClient("passthrough:///"+e, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("making a connection to %s: %w", e, err), c.Close())
		}
		c.conns = append(c.conns, conn)
	}
	if len(c.conns) == 0 {
		return nil, errors.New("a client needs an endpoint")
	}
	return c, nil
}

// Close ends the connections.
func (c *Client) Close() (err error) {
	for _, conn := range c.conns {
		err = errors.Join(err, conn.Close())
	}
	return err
}

// try asks one node after the other until one comes to a verdict (WI2).
func (c *Client) try(ctx context.Context, f func(ctx context.Context, conn *grpc.ClientConn) error) error {
	var last error
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, attemptLimit)
		err := f(attempt, c.conns[c.next.Load()%uint64(len(c.conns))])
		cancel()
		if err == nil {
			return nil
		}
		err = apierr.FromError(err)
		if verdict(base.SentinelOf(err)) {
			return err
		}
		if last == nil || ctx.Err() == nil { // else the end of the time cut it off, which says less
			last = err
		}
		c.next.Add(1)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return fmt.Errorf("%w: %w", ErrNoVerdict, errors.Join(ctx.Err(), last))
}

// verdict says that an error is about the request, whoever is asked and when.
func verdict(s *base.Sentinel) bool {
	switch s {
	case base.ErrStaleEpoch, base.ErrWrongRange: // the caller gave epoch and key
		return true
	}
	return !s.Retryable && s.Outcome == base.OutcomeNotApplied
}

// Shard is one of a topology: it has the key groups from Lo up to but not Hi.
type Shard struct {
	ID, Epoch uint64
	Lo, Hi    uint32
}

// Topology is what clients route by.
type Topology struct {
	Cluster     string
	Incarnation uint64
	KeyGroups   int
	Shards      []Shard
}

// Topology asks for it.
func (c *Client) Topology(ctx context.Context) (*Topology, error) {
	var t *keelstatepb.Topology
	err := c.try(ctx, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		t, err = keelstatepb.NewClusterClient(conn).GetTopology(ctx, &keelstatepb.GetTopologyRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("asking for the topology: %w", err)
	}
	out := &Topology{Cluster: t.GetClusterId(), Incarnation: t.GetIncarnation(), KeyGroups: int(t.GetKeyGroups())}
	for _, s := range t.GetShards() {
		out.Shards = append(out.Shards, Shard{ID: s.GetId(), Epoch: s.GetEpoch(), Lo: s.GetRange().GetLo(), Hi: s.GetRange().GetHi()})
	}
	return out, nil
}

// KeyOf is a key of a shard, made of a prefix; the same for the same arguments.
func (t *Topology) KeyOf(s Shard, prefix string) ([]byte, error) {
	for n := range 1 << 20 {
		key := fmt.Appendf(nil, "%s-%d", prefix, n)
		g, err := keygroup.GroupOfKey(keygroup.String, key, t.KeyGroups)
		if err != nil {
			return nil, fmt.Errorf("finding the group of %q: %w", key, err)
		}
		if uint32(g) >= s.Lo && uint32(g) < s.Hi {
			return key, nil
		}
	}
	return nil, fmt.Errorf("no key belongs to shard %d, with the key groups from %d to %d", s.ID, s.Lo, s.Hi)
}

// Declare declares a value of strings with int64, and returns its number.
func (c *Client) Declare(ctx context.Context, keyspace, name string) (state uint32, err error) {
	err = c.try(ctx, func(ctx context.Context, conn *grpc.ClientConn) error {
		r, err := keelstatepb.NewClusterClient(conn).DeclareState(ctx, &keelstatepb.DeclareStateRequest{Declaration: &keelstatepb.Declaration{
			Keyspace: keyspace, Name: name, Kind: keelstatepb.StateKind_STATE_KIND_VALUE,
			KeyType: keygroup.String.String(), ValueType: keygroup.Int64.String()}})
		state = r.GetDeclaration().GetId()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("declaring %s/%s: %w", keyspace, name, err)
	}
	return state, nil
}

// OpenSession opens one, with the default lease, and returns the revision of the
// metadata from which on it is known. It may open another one that nobody hears of.
func (c *Client) OpenSession(ctx context.Context) (id, revision uint64, err error) {
	err = c.try(ctx, func(ctx context.Context, conn *grpc.ClientConn) error {
		s, err := keelstatepb.NewClusterClient(conn).OpenSession(ctx, &keelstatepb.OpenSessionRequest{})
		id, revision = s.GetId(), s.GetRevision()
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("opening a session: %w", err)
	}
	return id, revision, nil
}

// Route is what a request says of where it belongs. Without a Session it is not
// numbered.
type Route struct {
	Shard, Epoch, Incarnation uint64
	Session, Sequence         uint64
	// Revision of the metadata is what a node is to know before it refuses a session.
	Revision uint64
}

// Write sets a value. It returns the incarnation of the token that answers it.
func (c *Client) Write(ctx context.Context, to Route, state uint32, key []byte, value int64) (incarnation uint64, err error) {
	raw, err := keygroup.Encode(keygroup.Int64, value)
	if err != nil {
		return 0, fmt.Errorf("encoding %d: %w", value, err)
	}
	req := &keelstatepb.WriteRequest{Shard: to.Shard, Epoch: to.Epoch, Incarnation: to.Incarnation, Session: to.Session, Sequence: to.Sequence, Floor: to.Sequence, MetadataRevision: to.Revision,
		Mutations: []*keelstatepb.Mutation{{State: state, Op: keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, Key: key, Value: raw}}}
	err = c.try(ctx, func(ctx context.Context, conn *grpc.ClientConn) error {
		r, err := keelstatepb.NewStateClient(conn).Write(ctx, req)
		incarnation = r.GetToken().GetIncarnation()
		return err
	})
	return incarnation, err
}

// Read reads a value. It returns the incarnation of the token that answers it.
func (c *Client) Read(ctx context.Context, to Route, state uint32, key []byte) (incarnation uint64, err error) {
	req := &keelstatepb.ReadRequest{Shard: to.Shard, Epoch: to.Epoch, Incarnation: to.Incarnation,
		Queries: []*keelstatepb.Query{{State: state, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: key}}}
	err = c.try(ctx, func(ctx context.Context, conn *grpc.ClientConn) error {
		r, err := keelstatepb.NewStateClient(conn).Read(ctx, req)
		incarnation = r.GetToken().GetIncarnation()
		if err == nil && len(r.GetAnswers()) == 1 {
			err = apierr.FromDetail(r.GetAnswers()[0].GetError())
		}
		return err
	})
	return incarnation, err
}
