package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// router finds the shard of a key.
type router struct {
	table *keygroup.Table
	raw   *keelstatepb.Topology
}

func newRouter(t *keelstatepb.Topology) (*router, error) {
	var entries []keygroup.Entry
	for _, s := range t.GetShards() {
		entries = append(entries, keygroup.Entry{Shard: base.GroupID(s.GetId()), Epoch: base.Epoch(s.GetEpoch()),
			Range: keygroup.Range{Lo: keygroup.Group(s.GetRange().GetLo()), Hi: keygroup.Group(s.GetRange().GetHi())}})
	}
	table, err := keygroup.NewTable(int(t.GetKeyGroups()), base.Revision(t.GetRevision()), entries)
	if err != nil {
		return nil, fmt.Errorf("reading the topology: %w", err)
	}
	return &router{table: table, raw: t}, nil
}

func (r *router) entry(key string) (keygroup.Entry, error) {
	b, err := keel.String.Encode(key)
	if err != nil {
		return keygroup.Entry{}, err
	}
	g, err := keygroup.GroupOfKey(keel.String.Type(), b, r.table.M())
	if err != nil {
		return keygroup.Entry{}, err
	}
	e, _ := r.table.Find(g)
	return e, nil
}

func (r *router) shardOf(key string) (uint64, error) {
	e, err := r.entry(key)
	return uint64(e.Shard), err
}

func (r *router) shards() []uint64 {
	var out []uint64
	for _, s := range r.raw.GetShards() {
		out = append(out, s.GetId())
	}
	return out
}

// clientTarget is the public client with its session: exactly once, pipelined.
type clientTarget struct {
	*router
	client *keel.Client
	state  *keel.Value[[]byte]
	value  []byte
}

func newClientTarget(ctx context.Context, c *common, valueBytes int) (*clientTarget, error) {
	client, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	t := &clientTarget{client: client, value: make([]byte, valueBytes)}
	if t.state, err = values(ctx, client); err == nil {
		var topology *keelstatepb.Topology
		if topology, err = client.Topology(ctx); err == nil {
			t.router, err = newRouter(topology)
		}
	}
	if err != nil {
		return nil, errors.Join(err, closeClient(client))
	}
	return t, nil
}

func (t *clientTarget) close() error { return closeClient(t.client) }

func (t *clientTarget) write(ctx context.Context, key string) error {
	_, err := t.state.Set(ctx, key, t.value)
	return err
}

func (t *clientTarget) fillBatch(keys []string) *keel.Batch {
	b := t.client.Batch()
	for _, k := range keys {
		b.Add(t.state.SetOp(k, t.value))
	}
	return b
}

func (t *clientTarget) batch(ctx context.Context, keys []string) error {
	_, err := t.fillBatch(keys).Commit(ctx)
	return err
}

func (t *clientTarget) atomic(ctx context.Context, keys []string) error {
	_, err := t.fillBatch(keys).Atomic().Commit(ctx)
	return err
}

func (t *clientTarget) read(ctx context.Context, key string) error {
	v, found, err := t.state.Get(ctx, key)
	if err == nil && (!found || len(v) != len(t.value)) {
		return errMissing
	}
	return err
}

func (t *clientTarget) multiget(ctx context.Context, keys []string) error {
	b := t.client.ReadBatch()
	futures := make([]*keel.Future[[]byte], len(keys))
	for i, k := range keys {
		futures[i] = t.state.Queue(b, k)
	}
	if err := b.Do(ctx); err != nil {
		return err
	}
	for _, f := range futures {
		if it, err := f.Get(); err != nil || !it.Found {
			return errors.Join(err, errMissing)
		}
	}
	return nil
}

// unaryTarget makes one unary gRPC call for each request, without a session: as
// a client in another language without our library would.
type unaryTarget struct {
	client  *keel.Client // for the topology only
	state   uint32
	value   []byte
	current atomic.Pointer[router]
	mu      sync.Mutex                  // guards conns
	conns   map[string]*grpc.ClientConn // by address; one to each node
}

func newUnaryTarget(ctx context.Context, c *common, valueBytes int) (*unaryTarget, error) {
	client, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	t := &unaryTarget{client: client, value: make([]byte, valueBytes), conns: make(map[string]*grpc.ClientConn)}
	v, err := values(ctx, client)
	if err == nil {
		t.state = v.Declaration().ID
		err = t.refresh(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// refresh learns who leads, from the nodes themselves.
func (t *unaryTarget) refresh(ctx context.Context) error {
	topology, err := t.client.Topology(ctx)
	if err != nil {
		return err
	}
	r, err := newRouter(topology)
	if err != nil {
		return err
	}
	t.current.Store(r)
	return nil
}

func (t *unaryTarget) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var err error
	for _, c := range t.conns {
		err = errors.Join(err, c.Close())
	}
	return errors.Join(err, closeClient(t.client))
}

func (t *unaryTarget) shardOf(key string) (uint64, error) { return t.current.Load().shardOf(key) }
func (t *unaryTarget) shards() []uint64                   { return t.current.Load().shards() }

// leader returns a stub for the node that leads a shard.
func (t *unaryTarget) leader(r *router, shard uint64) (keelstatepb.StateClient, error) {
	address := ""
	for _, s := range r.raw.GetShards() {
		if s.GetId() == shard {
			address = grpcAddress(r.raw, s.GetLeaderHint())
		}
	}
	if address == "" {
		return nil, fmt.Errorf("nobody is known to lead shard %d", shard)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	conn := t.conns[address]
	if conn == nil {
		var err error
		if conn, err = grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return nil, err
		}
		t.conns[address] = conn
	}
	return keelstatepb.NewStateClient(conn), nil
}

func grpcAddress(t *keelstatepb.Topology, node string) string {
	for _, n := range t.GetNodes() {
		if n.GetId() == node {
			return n.GetGrpcAddress()
		}
	}
	return ""
}

// each cuts keys by shard and calls f for each part, all at once.
func (t *unaryTarget) each(ctx context.Context, keys []string, f func(keelstatepb.StateClient, *router, keygroup.Entry, []string) error) error {
	r := t.current.Load()
	parts := make(map[keygroup.Entry][]string)
	for _, k := range keys {
		e, err := r.entry(k)
		if err != nil {
			return err
		}
		parts[e] = append(parts[e], k)
	}
	errs := make(chan error, len(parts))
	one := func(e keygroup.Entry, keys []string) error {
		stub, err := t.leader(r, uint64(e.Shard))
		if err != nil {
			return err
		}
		return f(stub, r, e, keys)
	}
	for e, part := range parts {
		if len(parts) == 1 {
			errs <- one(e, part)
			break
		}
		go func() { errs <- one(e, part) }()
	}
	var first error
	for range parts {
		if err := <-errs; first == nil {
			first = err
		}
	}
	if first != nil {
		return errors.Join(first, t.refresh(ctx))
	}
	return nil
}

func (t *unaryTarget) put(ctx context.Context, atomic bool, keys ...string) error {
	return t.each(ctx, keys, func(stub keelstatepb.StateClient, r *router, e keygroup.Entry, keys []string) error {
		w := &keelstatepb.WriteRequest{Shard: uint64(e.Shard), Epoch: uint64(e.Epoch), Incarnation: r.raw.GetIncarnation(),
			MetadataRevision: r.raw.GetRevision(), Atomic: atomic}
		for i, k := range keys {
			w.Mutations = append(w.Mutations, &keelstatepb.Mutation{Ordinal: uint32(i), State: t.state,
				Op: keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, Key: []byte(k), Value: t.value})
		}
		_, err := stub.Write(ctx, w)
		return err
	})
}

func (t *unaryTarget) write(ctx context.Context, key string) error { return t.put(ctx, false, key) }
func (t *unaryTarget) batch(ctx context.Context, keys []string) error {
	return t.put(ctx, false, keys...)
}
func (t *unaryTarget) atomic(ctx context.Context, keys []string) error {
	return t.put(ctx, true, keys...)
}
func (t *unaryTarget) read(ctx context.Context, key string) error {
	return t.multiget(ctx, []string{key})
}

func (t *unaryTarget) multiget(ctx context.Context, keys []string) error {
	return t.each(ctx, keys, func(stub keelstatepb.StateClient, r *router, e keygroup.Entry, keys []string) error {
		q := &keelstatepb.ReadRequest{Shard: uint64(e.Shard), Epoch: uint64(e.Epoch), Incarnation: r.raw.GetIncarnation(),
			MetadataRevision: r.raw.GetRevision()}
		for _, k := range keys {
			q.Queries = append(q.Queries, &keelstatepb.Query{State: t.state, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte(k)})
		}
		res, err := stub.Read(ctx, q)
		if err != nil {
			return err
		}
		for _, a := range res.GetAnswers() {
			if !a.GetFound() {
				return errMissing
			}
		}
		return nil
	})
}
