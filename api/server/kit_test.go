package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// fake is a Backend whose answers a test chooses. What is not set panics, as a
// nil interface would: SV6 then shows up in the test.
type fake struct {
	Backend
	submit  func(ctx context.Context, route cluster.Route, req *raftfsm.Request, done func(raftfsm.Result))
	read    func(ctx context.Context, req *cluster.ReadRequest) (*cluster.ReadReply, error)
	scan    func(ctx context.Context, req *cluster.ScanRequest) (Scan, error)
	declare func(d state.Declaration) (state.Declaration, bool, base.Revision, error)
	topo    *cluster.Topology
}

func (f *fake) Submit(ctx context.Context, route cluster.Route, req *raftfsm.Request, done func(raftfsm.Result)) {
	f.submit(ctx, route, req, done)
}

func (f *fake) Read(ctx context.Context, req *cluster.ReadRequest) (*cluster.ReadReply, error) {
	return f.read(ctx, req)
}

func (f *fake) OpenScan(ctx context.Context, req *cluster.ScanRequest) (Scan, error) {
	return f.scan(ctx, req)
}

func (f *fake) Declare(_ context.Context, d state.Declaration) (state.Declaration, bool, base.Revision, error) {
	return f.declare(d)
}

func (f *fake) Topology(context.Context, base.Revision) (*cluster.Topology, error) {
	if f.topo == nil {
		return nil, base.ErrNotFounded
	}
	return f.topo, nil
}

func (f *fake) WatchTopology(ctx context.Context, fn func(*cluster.Topology) error) error {
	if err := fn(f.topo); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// kit is a server with a client connection to it.
type kit struct {
	t       testing.TB
	server  *Server
	conn    *grpc.ClientConn
	state   keelstatepb.StateClient
	cluster keelstatepb.ClusterClient
	admin   keelstatepb.AdminClient
}

func newKit(t testing.TB, b Backend, o Options) *kit {
	t.Helper()
	s, err := New(b, o)
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
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(state.MaxMessageBytes), grpc.MaxCallSendMsgSize(2*state.MaxMessageBytes)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		s.Stop()
		wg.Wait()
	})
	return &kit{t: t, server: s, conn: conn, state: keelstatepb.NewStateClient(conn),
		cluster: keelstatepb.NewClusterClient(conn), admin: keelstatepb.NewAdminClient(conn)}
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting until %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func put(key, value string) *keelstatepb.Mutation {
	return &keelstatepb.Mutation{State: 1, Op: keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, Key: []byte(key), Value: []byte(value)}
}
