package cluster

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/server"
	"github.com/keelstate/keelstate/broadcast/meta"
	keel "github.com/keelstate/keelstate/client"
	node "github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
)

// Options of a cluster; zero fields take the defaults named.
type Options struct {
	Nodes  int    // default 3
	Shards int    // default 1
	Engine string // "mem" (default) or "rocks"
	// Unfounded leaves the cluster without init.
	Unfounded bool
	// Beside is a cluster whose object store this one uses too, so that it can be
	// founded with a checkpoint of it.
	Beside *Cluster
	// Restore names the checkpoint that the cluster is founded with, as cluster init
	// does.
	Restore string
}

// Cluster is a running cluster.
type Cluster struct {
	t         testing.TB
	nodes     *testcluster.Cluster
	addresses []string
	objects   objectstore.Store // for checkpoints
	uri       string

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
	c.openObjects(o.Beside)
	c.nodes = testcluster.New(t, testcluster.Options{Nodes: o.Nodes, Shards: o.Shards, Engine: o.Engine, Unfounded: o.Unfounded || o.Restore != "",
		Configure: func(i int, n *node.Options) { n.GRPCAddr, n.Objects, n.ObjectsURI = c.addresses[i], c.objects, c.uri }})
	t.Cleanup(func() {
		for i := range c.servers {
			c.stopServing(i)
		}
	})
	for i := range listeners {
		c.serve(i, listeners[i])
	}
	if o.Restore != "" {
		c.restore(o.Restore)
	}
	return c
}

// openObjects opens an object store, which outlives the nodes, or takes another
// cluster's.
func (c *Cluster) openObjects(beside *Cluster) {
	c.t.Helper()
	if beside != nil {
		c.objects, c.uri = beside.objects, beside.uri
		return
	}
	dir := c.t.TempDir()
	objects, err := file.Open(dir)
	if err != nil {
		c.t.Fatalf("opening an object store: %v", err)
	}
	c.objects, c.uri = objects, "file://"+filepath.ToSlash(dir)
	c.t.Cleanup(func() {
		if err := objects.Close(); err != nil {
			c.t.Errorf("closing the object store: %v", err)
		}
	})
}

// restore founds the cluster with a checkpoint and waits until it serves.
func (c *Cluster) restore(name string) {
	c.t.Helper()
	spec := c.nodes.Spec()
	spec.KeyGroups, spec.Restore = 0, name
	c.nodes.Eventually("the cluster is founded with "+name, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), testcluster.Wait)
		defer cancel()
		reply, err := c.nodes.Node(0).Init(ctx, spec)
		switch {
		case err != nil && !base.SentinelOf(err).Retryable:
			c.t.Fatalf("restoring %s: %v", name, err)
		case err == nil && reply.Phase != meta.PhaseDone:
			err = fmt.Errorf("phase %s: %s", reply.Phase, reply.Problem)
		}
		return err
	})
	c.nodes.WaitReady()
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
