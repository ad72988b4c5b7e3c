package server_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/api/server"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// live is a client of a real cluster of one node.
type live struct {
	t       *testing.T
	ctx     context.Context
	state   keelstatepb.StateClient
	cluster keelstatepb.ClusterClient
	admin   keelstatepb.AdminClient
	route   *keelstatepb.Shard
	rev     uint64
}

func newLive(t *testing.T) *live {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	s, err := server.New(server.Node(c.Node(0)), server.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := bufconn.Listen(1 << 20)
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		if err := s.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("serving: %v", err)
		}
	}()
	conn, err := grpc.NewClient("passthrough:buf", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(state.MaxMessageBytes), grpc.MaxCallSendMsgSize(4*state.MaxMessageBytes)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), testcluster.Wait)
	t.Cleanup(func() {
		cancel()
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		s.Stop()
		wg.Wait()
	})
	v := &live{t: t, ctx: ctx, state: keelstatepb.NewStateClient(conn), cluster: keelstatepb.NewClusterClient(conn), admin: keelstatepb.NewAdminClient(conn)}
	topo, err := v.cluster.GetTopology(ctx, &keelstatepb.GetTopologyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(topo.Shards) != 1 || len(topo.Nodes) != 1 || topo.KeyGroups != 128 || topo.ClusterId == "" {
		t.Fatalf("topology %v", topo)
	}
	v.route = topo.Shards[0]
	return v
}

func (v *live) declare(name string, kind keelstatepb.StateKind, userKey string) uint32 {
	v.t.Helper()
	r, err := v.cluster.DeclareState(v.ctx, &keelstatepb.DeclareStateRequest{Declaration: &keelstatepb.Declaration{
		Keyspace: "ks", Name: name, Kind: kind, KeyType: "string", UserKeyType: userKey, ValueType: "bytes"}})
	if err != nil {
		v.t.Fatalf("declaring %s: %v", name, err)
	}
	v.rev = max(v.rev, r.Revision)
	return r.Declaration.Id
}

func (v *live) write(ms ...*keelstatepb.Mutation) error {
	for i, m := range ms {
		m.Ordinal = uint32(i)
	}
	_, err := v.state.Write(v.ctx, &keelstatepb.WriteRequest{Shard: v.route.Id, Epoch: v.route.Epoch, MetadataRevision: v.rev, Mutations: ms})
	return apierr.FromError(err)
}

func (v *live) read(qs ...*keelstatepb.Query) []*keelstatepb.Answer {
	v.t.Helper()
	r, err := v.state.Read(v.ctx, &keelstatepb.ReadRequest{Shard: v.route.Id, Epoch: v.route.Epoch, MetadataRevision: v.rev, Queries: qs})
	if err != nil {
		v.t.Fatalf("reading: %v", err)
	}
	return r.Answers
}

// noise is bytes that do not compress, different for each seed.
func noise(n int, seed byte) []byte {
	b := make([]byte, 0, n+sha256.Size)
	for sum := sha256.Sum256([]byte{seed}); len(b) < n; sum = sha256.Sum256(sum[:]) {
		b = append(b, sum[:]...)
	}
	return b[:n]
}

// TestSizes is the whole kind of field failure B77: what can be written can be
// read back, and what is too large is refused with a reason, not by the
// transport, and is not applied.
func TestSizes(t *testing.T) {
	v := newLive(t)
	id := v.declare("v", keelstatepb.StateKind_STATE_KIND_VALUE, "")
	list := v.declare("l", keelstatepb.StateKind_STATE_KIND_LIST, "")
	put := func(key string, value []byte) *keelstatepb.Mutation {
		return &keelstatepb.Mutation{State: id, Op: keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, Key: []byte(key), Value: value}
	}
	get := func(key string) *keelstatepb.Answer {
		return v.read(&keelstatepb.Query{State: id, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte(key)})[0]
	}

	t.Run("values", func(t *testing.T) {
		for i, c := range []struct {
			size int
			ok   bool
		}{{0, true}, {4<<20 - 1<<10, true}, {4 << 20, true}, {4<<20 + 1, false}, {15 << 20, false}} {
			key, value := string(rune('a'+i)), noise(c.size, byte(i))
			err := v.write(put(key, value))
			a := get(key)
			if c.ok && (err != nil || !a.Found || !bytes.Equal(a.Value, value)) {
				t.Errorf("%d bytes: %v, found %v with %d bytes", c.size, err, a.Found, len(a.Value))
			}
			if !c.ok && (!errors.Is(err, base.ErrTooLarge) || base.OutcomeOf(err) != base.OutcomeNotApplied || a.Found) {
				t.Errorf("%d bytes: %v, found %v", c.size, err, a.Found)
			}
		}
	})
	t.Run("over the message limit", func(t *testing.T) {
		err := v.write(put("m", noise(16<<20, 9)))
		// The transport refuses it without telling which side's limit it was.
		if !errors.Is(err, base.ErrTooLarge) || get("m").Found {
			t.Errorf("got %v", err)
		}
		if err := v.write(put("m", nil)); err != nil { // and the connection lives on
			t.Error(err)
		}
	})
	t.Run("a batch of 6 MiB", func(t *testing.T) {
		var ms []*keelstatepb.Mutation
		for i := range 6 {
			ms = append(ms, put("batch"+string(rune('a'+i)), noise(1<<20, byte(40+i))))
		}
		if err := v.write(ms...); err != nil {
			t.Fatal(err)
		}
		for i, m := range ms {
			if a := get(string(m.Key)); !bytes.Equal(a.Value, m.Value) {
				t.Errorf("value %d differs", i)
			}
		}
	})
	t.Run("a batch over the request limit", func(t *testing.T) {
		err := v.write(put("x", noise(4<<20, 1)), put("y", noise(4<<20, 2)), put("z", noise(4<<20, 3)))
		if !errors.Is(err, base.ErrTooLarge) || base.OutcomeOf(err) != base.OutcomeNotApplied || get("x").Found {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a list of 10 MiB", func(t *testing.T) {
		var want [][]byte
		for i := range 10 {
			e := noise(1<<20, byte(100+i))
			want = append(want, e)
			if err := v.write(&keelstatepb.Mutation{State: list, Op: keelstatepb.MutationOp_MUTATION_OP_LIST_ADD, Key: []byte("k"), Elements: [][]byte{e}}); err != nil {
				t.Fatal(err)
			}
		}
		v.checkPages(t, list, want)
		v.checkScan(t, list, want, &keelstatepb.ScanRequest{})
		v.checkScan(t, list, want, &keelstatepb.ScanRequest{FilterKey: true, Key: []byte("k"), FilterNamespace: true, PageBytes: 3 << 20})
	})
}

func (v *live) checkPages(t *testing.T, list uint32, want [][]byte) {
	t.Helper()
	var got [][]byte
	pages := 0
	for q := (&keelstatepb.Query{State: list, Kind: keelstatepb.QueryKind_QUERY_KIND_PAGE, Key: []byte("k"), PageBytes: 4 << 20}); ; pages++ {
		a := v.read(q)[0]
		if a.Error != nil {
			t.Fatal(apierr.FromDetail(a.Error))
		}
		got = append(got, a.Elements...)
		if len(a.Next) == 0 {
			break
		}
		q.Cursor = a.Next
	}
	if pages < 2 || !equal(got, want) {
		t.Errorf("%d elements in %d pages", len(got), pages+1)
	}
}

func (v *live) checkScan(t *testing.T, list uint32, want [][]byte, r *keelstatepb.ScanRequest) {
	t.Helper()
	r.Shard, r.Epoch, r.State = v.route.Id, v.route.Epoch, list
	s, err := v.state.Scan(v.ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	var got [][]byte
	for {
		p, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, it := range p.Items {
			got = append(got, it.Entry.Value)
		}
	}
	if !equal(got, want) {
		t.Errorf("the scan brought %d elements", len(got))
	}
}

func equal(a, b [][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !bytes.Equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

// TestRealNode goes through the services once on a real node: nulls, sessions,
// wrong routes, administration.
func TestRealNode(t *testing.T) {
	v := newLive(t)
	list := v.declare("l", keelstatepb.StateKind_STATE_KIND_LIST, "")
	table := v.declare("m", keelstatepb.StateKind_STATE_KIND_MAP, "string")

	err := v.write(&keelstatepb.Mutation{State: list, Op: keelstatepb.MutationOp_MUTATION_OP_LIST_ADD, Key: []byte("k"), Elements: [][]byte{{1}, {}}, NullElements: []uint32{1}})
	var be *base.Error
	if !errors.As(err, &be) || !errors.Is(err, base.ErrInvalid) || be.Field != "mutations[0].elements[1]" {
		t.Errorf("a null element: %v", err)
	}
	if err := v.write(&keelstatepb.Mutation{State: list, Op: keelstatepb.MutationOp_MUTATION_OP_LIST_ADD, Key: []byte("k"), Elements: [][]byte{{1}, {}}}); err != nil {
		t.Errorf("an empty element: %v", err)
	}
	if err := v.write(&keelstatepb.Mutation{State: table, Op: keelstatepb.MutationOp_MUTATION_OP_MAP_PUT, Key: []byte("k"),
		Entries: []*keelstatepb.MapEntry{{UserKey: []byte("a"), Null: true}, {UserKey: []byte("b")}}}); err != nil {
		t.Errorf("map put: %v", err)
	}
	get := func(user string) *keelstatepb.Query {
		return &keelstatepb.Query{State: table, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte("k"), UserKey: []byte(user)}
	}
	as := v.read(get("a"), get("b"), get("c"), &keelstatepb.Query{State: list, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte("k")},
		&keelstatepb.Query{State: 999, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte("k")})
	if !as[0].Found || !as[0].Null || !as[1].Found || as[1].Null || as[2].Found {
		t.Errorf("map answers %v", as[:3])
	}
	if !errors.Is(apierr.FromDetail(as[3].Error), base.ErrWrongKind) || !errors.Is(apierr.FromDetail(as[4].Error), base.ErrUndeclared) {
		t.Errorf("refused answers %v", as[3:])
	}

	stale := &keelstatepb.WriteRequest{Shard: v.route.Id, Epoch: v.route.Epoch + 1, Mutations: []*keelstatepb.Mutation{{State: list, Op: keelstatepb.MutationOp_MUTATION_OP_CLEAR, Key: []byte("k")}}}
	if _, err := v.state.Write(v.ctx, stale); !errors.Is(apierr.FromError(err), base.ErrStaleEpoch) {
		t.Errorf("another epoch: %v", err)
	}
	stale.Shard = 77
	if _, err := v.state.Write(v.ctx, stale); !errors.Is(apierr.FromError(err), base.ErrNoSuchShard) {
		t.Errorf("another shard: %v", err)
	}
	v.checkSession(t, list)
	v.checkAdmin(t)
}

func (v *live) checkSession(t *testing.T, list uint32) {
	t.Helper()
	s, err := v.cluster.OpenSession(v.ctx, &keelstatepb.OpenSessionRequest{})
	if err != nil || s.LeaseMs != 60_000 {
		t.Fatalf("opening a session: %v %v", s, err)
	}
	w := &keelstatepb.WriteRequest{Shard: v.route.Id, Epoch: v.route.Epoch, Session: s.Id, Sequence: 1, Floor: 1, MetadataRevision: s.Revision,
		Mutations: []*keelstatepb.Mutation{{State: list, Op: keelstatepb.MutationOp_MUTATION_OP_LIST_ADD, Key: []byte("s"), Elements: [][]byte{{7}}}}}
	first, err := v.state.Write(v.ctx, w)
	if err != nil {
		t.Fatal(err)
	}
	again, err := v.state.Write(v.ctx, w)
	if err != nil || !again.Replayed || first.Replayed || again.Token.Sequence != first.Token.Sequence {
		t.Errorf("the same number again: %v, %v, %v", first, again, err)
	}
	if k, err := v.cluster.KeepAliveSession(v.ctx, &keelstatepb.KeepAliveSessionRequest{Id: s.Id}); err != nil || k.LeaseMs != 60_000 {
		t.Errorf("keeping alive: %v %v", k, err)
	}
	if _, err := v.cluster.CloseSession(v.ctx, &keelstatepb.CloseSessionRequest{Id: s.Id}); err != nil {
		t.Error(err)
	}
	if _, err := v.cluster.KeepAliveSession(v.ctx, &keelstatepb.KeepAliveSessionRequest{Id: s.Id}); !errors.Is(apierr.FromError(err), base.ErrSessionEnded) {
		t.Errorf("keeping alive what has ended: %v", err)
	}
}

func (v *live) checkAdmin(t *testing.T) {
	t.Helper()
	st, err := v.admin.Status(v.ctx, &keelstatepb.StatusRequest{})
	if err != nil || !st.Healthy || len(st.Nodes) != 1 || len(st.Nodes[0].Groups) != 2 {
		t.Errorf("status: %v %v", st, err)
	}
	if n, err := v.admin.NodeStatus(v.ctx, &keelstatepb.NodeStatusRequest{}); err != nil || !n.Ready || n.Node.Id != "n1" {
		t.Errorf("node status: %v %v", n, err)
	}
	if h, err := v.admin.HashShard(v.ctx, &keelstatepb.HashShardRequest{Shard: v.route.Id}); err != nil || !h.Agree || len(h.Replicas) != 1 {
		t.Errorf("hash: %v %v", h, err)
	}
	if _, err := v.admin.HashShard(v.ctx, &keelstatepb.HashShardRequest{Shard: 99}); !errors.Is(apierr.FromError(err), base.ErrNotFound) {
		t.Errorf("hash of no shard: %v", err)
	}
	if s, err := v.admin.SnapshotShard(v.ctx, &keelstatepb.SnapshotShardRequest{Shard: v.route.Id}); err != nil || s.Index == 0 {
		t.Errorf("snapshot: %v %v", s, err)
	}
	if s, err := v.admin.ScrubShard(v.ctx, &keelstatepb.ScrubShardRequest{Shard: v.route.Id}); err != nil || !s.Clean || len(s.Replicas) != 1 || s.Replicas[0].Bytes == 0 {
		t.Errorf("scrub: %v %v", s, err)
	}
	if _, err := v.admin.ScrubShard(v.ctx, &keelstatepb.ScrubShardRequest{Shard: 99}); !errors.Is(apierr.FromError(err), base.ErrNotFound) {
		t.Errorf("scrub of no shard: %v", err)
	}
	if _, err := v.admin.CompactShard(v.ctx, &keelstatepb.CompactShardRequest{Shard: v.route.Id}); err != nil {
		t.Errorf("compact: %v", err)
	}
	if o, err := v.admin.ListOperations(v.ctx, &keelstatepb.ListOperationsRequest{}); err != nil || len(o.Operations) == 0 || !o.Operations[0].Done {
		t.Errorf("operations: %v %v", o, err)
	}
	if l, err := v.cluster.ListStates(v.ctx, &keelstatepb.ListStatesRequest{Keyspace: "ks"}); err != nil || len(l.Declarations) != 2 {
		t.Errorf("states: %v %v", l, err)
	}
	if _, err := v.cluster.DropState(v.ctx, &keelstatepb.DropStateRequest{Keyspace: "ks", Name: "m"}); err != nil {
		t.Errorf("drop: %v", err)
	}
	if _, err := v.cluster.DropState(v.ctx, &keelstatepb.DropStateRequest{Keyspace: "ks", Name: "m"}); !errors.Is(apierr.FromError(err), base.ErrNotFound) &&
		!errors.Is(apierr.FromError(err), base.ErrUndeclared) {
		t.Errorf("drop of nothing: %v", err)
	}
}
