package transport

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testCluster = base.ClusterID("0123456789abcdef0123456789abcdef")

// logBuffer is a log for tests to look into.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.b.Bytes(), []byte(s))
}

type testNode struct {
	*Transport
	log *logBuffer
}

// startNode starts a transport on host id of an in-memory network. Its address
// is "<id>:1", which every resolver of these tests knows.
func startNode(t testing.TB, n *memnet.Network, id base.NodeID, change ...func(*Options)) *testNode {
	t.Helper()
	log := new(logBuffer)
	o := Options{
		Network:    n.Host(string(id)),
		ListenAddr: string(id) + ":1",
		Identity:   Identity{Cluster: testCluster, Node: id, Disk: base.DiskID("disk-" + id), Engine: "mem"},
		Resolver:   func(id base.NodeID) (string, bool) { return string(id) + ":1", id != "nowhere" },
		Logger:     slog.New(slog.NewTextHandler(log, nil)),
	}
	for _, f := range change {
		f(&o)
	}
	tr, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Errorf("closing %s: %v", id, err)
		}
	})
	return &testNode{tr, log}
}

func (n *testNode) group(t testing.TB, id base.GroupID, o GroupOptions) *Group {
	t.Helper()
	g, err := n.Group(id, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// serve answers a group's requests with f until the group is closed.
func serve(t testing.TB, g *Group, f func(raft.RPC)) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case rpc := <-g.Consumer():
				f(rpc)
			case <-g.done:
				return
			}
		}
	}()
	t.Cleanup(func() { g.Close(); <-done })
}

func header(id string) raft.RPCHeader {
	return raft.RPCHeader{ProtocolVersion: 3, ID: []byte(id + "/1"), Addr: []byte(id)}
}

// eventually waits for a condition; it fails the test after ten seconds.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !cond(); {
		if time.Now().After(end) {
			t.Fatalf("waited too long for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func wantIs(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got %v, want %v", err, target)
	}
}

func ctxFor(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}
