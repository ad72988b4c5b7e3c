package cluster

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/server"
	keel "github.com/keelstate/keelstate/client"
	node "github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore/file"
)

// Options of a cluster; zero fields take the defaults named.
type Options struct {
	Nodes  int    // default 3
	Shards int    // default 1
	Engine string // "mem" (default) or "rocks"
	// Unfounded leaves the cluster without init.
	Unfounded bool
}

// Cluster is a running cluster.
type Cluster struct {
	t         testing.TB
	nodes     *testcluster.Cluster
	addresses []string

	mu      sync.Mutex
	servers []*serving // nil where stopped
}

// serving is a gRPC server and the goroutine that serves.
type serving struct {
	server *server.Server
	done   chan struct{} // closed when Serve has returned
}

// New starts a cluster that is stopped with the test.
func New(t testing.TB, o Options) *Cluster {
	t.Helper()
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	c := &Cluster{t: t, servers: make([]*serving, o.Nodes)}
	listeners := make([]net.Listener, o.Nodes)
	for i := range listeners { // held until served, so that nobody takes the port
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatalf("listening: %v", err)
		}
		listeners[i] = l
		c.addresses = append(c.addresses, l.Addr().String())
	}
	dir := t.TempDir()
	objects, err := file.Open(dir) // for checkpoints; it outlives the nodes
	if err != nil {
		t.Fatalf("opening an object store: %v", err)
	}
	t.Cleanup(func() {
		if err := objects.Close(); err != nil {
			t.Errorf("closing the object store: %v", err)
		}
	})
	c.nodes = testcluster.New(t, testcluster.Options{Nodes: o.Nodes, Shards: o.Shards, Engine: o.Engine, Unfounded: o.Unfounded,
		Configure: func(i int, n *node.Options) {
			n.GRPCAddr, n.Objects, n.ObjectsURI = c.addresses[i], objects, "file://"+filepath.ToSlash(dir)
		}})
	t.Cleanup(func() {
		for i := range c.servers {
			c.stopServing(i)
		}
	})
	for i := range listeners {
		c.serve(i, listeners[i])
	}
	return c
}

// serve starts the gRPC server of a running node.
func (c *Cluster) serve(i int, l net.Listener) {
	c.t.Helper()
	s, err := server.New(server.Node(c.nodes.Node(i)), server.Options{})
	if err != nil {
		c.t.Fatalf("making the server of node %d: %v", i, err)
	}
	v := &serving{server: s, done: make(chan struct{})}
	go func() {
		defer close(v.done)
		_ = s.Serve(l) // ends with the server
	}()
	c.mu.Lock()
	c.servers[i] = v
	c.mu.Unlock()
}

func (c *Cluster) stopServing(i int) {
	c.mu.Lock()
	v := c.servers[i]
	c.servers[i] = nil
	c.mu.Unlock()
	if v != nil {
		v.server.Stop()
		<-v.done
	}
}

// Endpoints are the gRPC addresses of all nodes.
func (c *Cluster) Endpoints() []string { return append([]string(nil), c.addresses...) }

// Nodes is the cluster below, for its faults and conditions.
func (c *Cluster) Nodes() *testcluster.Cluster { return c.nodes }

// Stop stops a node as a crash of its process would: connections break, and
// what was not flushed is gone.
func (c *Cluster) Stop(i int) {
	c.t.Helper()
	// The node first: its clients learn of the crash by the broken connection.
	c.nodes.Stop(i)
	c.stopServing(i)
}

// Start starts a stopped node at its old address.
func (c *Cluster) Start(i int) {
	c.t.Helper()
	c.nodes.Start(i)
	var l net.Listener
	c.nodes.Eventually("the old port is free", func() (err error) {
		l, err = net.Listen("tcp", c.addresses[i])
		return err
	})
	c.serve(i, l)
}

// Restart stops and starts a node.
func (c *Cluster) Restart(i int) {
	c.t.Helper()
	c.Stop(i)
	c.Start(i)
}

// Client opens a client that is closed with the test, before the cluster.
func (c *Cluster) Client(opts ...keel.Option) *keel.Client {
	c.t.Helper()
	k, err := keel.Open(context.Background(), c.addresses, opts...)
	if err != nil {
		c.t.Fatalf("opening a client: %v", err)
	}
	c.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := k.Close(ctx); err != nil {
			c.t.Logf("closing a client: %v", err) // the cluster may be down by then
		}
	})
	return k
}
