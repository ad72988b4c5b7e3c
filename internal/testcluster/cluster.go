package testcluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

// Options of a cluster; zero fields take the defaults named.
type Options struct {
	Nodes  int    // default 3
	Engine string // "mem" (default) or "rocks"
	Shards int    // default 1
	// KeyGroups is M; default 128.
	KeyGroups   int
	Replication int
	// Configure changes the options of a node before it is made; may be nil.
	Configure func(i int, o *cluster.Options)
	// Seed of the network's randomness.
	Seed uint64
	// Addr gives the Raft address of a node; default a host of the network in
	// memory.
	Addr func(i int) string
	// Unfounded leaves the cluster without init.
	Unfounded bool
}

// Cluster is a running cluster.
type Cluster struct {
	T    testing.TB
	Net  *memnet.Network
	opts Options
	dir  string
	log  *slog.Logger

	mu    sync.Mutex
	nodes []*cluster.Node // nil where stopped
	fatal []error
	drv   []engine.Driver
}

// Wait is how long conditions are waited for; far above what they take, elections on a
// machine that does much else included.
const Wait = time.Minute

// New starts the nodes and founds the cluster.
func New(t testing.TB, o Options) *Cluster {
	t.Helper()
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.Nodes, 3)
	def(&o.Shards, 1)
	def(&o.KeyGroups, 128)
	if o.Engine == "" {
		o.Engine = "mem"
	}
	if o.Addr == nil {
		o.Addr = Addr
	}
	c := &Cluster{T: t, Net: memnet.New(o.Seed), opts: o, dir: t.TempDir(), log: newLogger(t)}
	c.nodes = make([]*cluster.Node, o.Nodes)
	c.fatal = make([]error, o.Nodes)
	c.drv = make([]engine.Driver, o.Nodes)
	t.Cleanup(c.stop)
	for i := range c.nodes {
		c.Start(i)
	}
	if !o.Unfounded {
		c.Found()
	}
	return c
}

// ID is the id of node i.
func ID(i int) base.NodeID { return base.NodeID(fmt.Sprintf("n%d", i+1)) }

// Addr is the Raft address of node i on the network in memory.
func Addr(i int) string { return fmt.Sprintf("n%d:7000", i+1) }

// Dir is the data directory of node i.
func (c *Cluster) Dir(i int) string { return filepath.Join(c.dir, string(ID(i))) }

// Start starts node i on its directory.
func (c *Cluster) Start(i int) {
	c.T.Helper()
	if err := c.TryStart(i); err != nil {
		c.T.Fatalf("starting node %s: %v", ID(i), err)
	}
}

// TryStart is Start with an error.
func (c *Cluster) TryStart(i int) error {
	drv, err := newDriver(c.opts.Engine)
	if err != nil {
		return err
	}
	o := cluster.Options{
		NodeID: ID(i), DataDir: c.Dir(i), RaftAddr: c.opts.Addr(i), AdvertiseRaftAddr: c.opts.Addr(i), GRPCAddr: fmt.Sprintf("n%d:7001", i+1),
		Driver: drv, Network: c.Net.Host(string(ID(i))), Logger: c.log,
		OnFatal:         func(err error) { c.mu.Lock(); c.fatal[i] = err; c.mu.Unlock() },
		ElectionTimeout: 150 * time.Millisecond, CheckInterval: 50 * time.Millisecond, BalanceDelay: time.Hour,
	}
	if c.opts.Configure != nil {
		c.opts.Configure(i, &o)
	}
	n, err := cluster.New(o)
	if err != nil {
		return errors.Join(err, drv.Close())
	}
	if err := n.Start(); err != nil {
		return errors.Join(err, n.Close(), drv.Close())
	}
	c.mu.Lock()
	c.nodes[i], c.drv[i], c.fatal[i] = n, drv, nil
	c.mu.Unlock()
	return nil
}

func newDriver(name string) (engine.Driver, error) {
	if name == "rocks" {
		return rocks.NewDriver(rocks.Options{MemoryBytes: 64 << 20})
	}
	return mem.NewDriver(), nil
}

// Node returns node i, which must run.
func (c *Cluster) Node(i int) *cluster.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nodes[i] == nil {
		c.T.Fatalf("node %s is stopped", ID(i))
	}
	return c.nodes[i]
}

// Get returns node i, nil if it is stopped.
func (c *Cluster) Get(i int) *cluster.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[i]
}

// Running lists the nodes that run.
func (c *Cluster) Running() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []int
	for i, n := range c.nodes {
		if n != nil {
			out = append(out, i)
		}
	}
	return out
}

// Fatal returns why node i asked to end its process, nil if it did not.
func (c *Cluster) Fatal(i int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fatal[i]
}

// Stop stops node i without handing anything over or flushing: what its stores
// had not flushed is gone, as after a crash of the process.
func (c *Cluster) Stop(i int) {
	c.T.Helper()
	c.mu.Lock()
	n, drv := c.nodes[i], c.drv[i]
	c.nodes[i], c.drv[i] = nil, nil
	c.mu.Unlock()
	if n == nil {
		return
	}
	c.Net.Crash(string(ID(i)))
	err := n.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil // the crash of its host closed the listener first
	}
	if err := errors.Join(err, drv.Close()); err != nil {
		c.T.Errorf("closing node %s: %v", ID(i), err)
	}
}

// Restart stops and starts node i.
func (c *Cluster) Restart(i int) {
	c.T.Helper()
	c.Stop(i)
	c.Start(i)
}

func (c *Cluster) stop() {
	if c.T.Failed() {
		c.Dump()
	}
	for i := range c.nodes {
		c.Stop(i)
	}
}

// Spec is the founding of all nodes.
func (c *Cluster) Spec() cluster.FoundSpec {
	s := cluster.FoundSpec{KeyGroups: c.opts.KeyGroups, Shards: c.opts.Shards, Replication: c.opts.Replication}
	for i := range c.nodes {
		s.Nodes = append(s.Nodes, cluster.FoundNode{ID: ID(i), RaftAddr: c.opts.Addr(i)})
	}
	return s
}

// Found founds the cluster and waits until every node is ready.
func (c *Cluster) Found() {
	c.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Wait)
	defer cancel()
	var phase string
	c.Eventually("init is answered", func() error {
		// With a long election timeout nobody leads in time: the same init goes on.
		reply, err := c.Node(0).Init(ctx, c.Spec())
		if err != nil && !base.SentinelOf(err).Retryable {
			c.T.Fatalf("founding: %v", err)
		}
		if err == nil {
			phase = reply.Phase
		}
		return err
	})
	if phase != "done" {
		c.T.Fatalf("founding ended in phase %q", phase)
	}
	c.WaitReady()
}

// WaitReady waits until every running node is ready and every shard has a
// leader that serves.
func (c *Cluster) WaitReady() {
	c.T.Helper()
	c.Eventually("every running node is ready", func() error {
		for _, i := range c.Running() {
			if ok, why := c.Node(i).Ready(); !ok {
				return fmt.Errorf("node %s: %s", ID(i), why)
			}
		}
		return nil
	})
	for s := 1; s <= c.opts.Shards; s++ {
		c.Leader(base.GroupID(s))
	}
}

// Leader waits until a running node leads the group and has taken office, and
// returns it.
func (c *Cluster) Leader(g base.GroupID) int {
	c.T.Helper()
	leader := -1
	c.Eventually(fmt.Sprintf("%s has a leader", g), func() error {
		for _, i := range c.Running() {
			if c.Node(i).Leads(g) {
				leader = i
				return nil
			}
		}
		return fmt.Errorf("no node leads %s", g)
	})
	return leader
}

// Eventually polls a condition until it holds.
func (c *Cluster) Eventually(what string, cond func() error) {
	c.T.Helper()
	deadline := time.Now().Add(Wait)
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.T.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond) // the pause of a poll, not a guess
	}
}

// Dump logs the state of every node.
func (c *Cluster) Dump() {
	for _, i := range c.Running() {
		st, err := c.Node(i).NodeStatus(context.Background())
		if err != nil {
			c.T.Logf("node %s: %v", ID(i), err)
			continue
		}
		c.T.Logf("node %s ready=%v %s revision=%d", ID(i), st.Ready, st.NotReadyReason, st.Revision)
		for _, g := range st.Groups {
			c.T.Logf("  %s %s %s term=%d commit=%d applied=%d last=%d leader=%s damage=%q",
				g.Group, g.Replica, g.State, g.Term, g.Commit, g.Applied, g.Last, g.Leader, g.Damage)
		}
	}
}

func newLogger(t testing.TB) *slog.Logger {
	level := slog.LevelWarn
	if os.Getenv("KEELSTATE_TEST_LOG") == "debug" {
		level = slog.LevelDebug
	}
	w := &testWriter{t: t}
	t.Cleanup(w.end)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
}

// testWriter logs through the test until it has ended.
type testWriter struct {
	mu    sync.Mutex
	t     testing.TB
	ended bool
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.t.Log(string(p[:max(0, len(p)-1)]))
	}
	return len(p), nil
}

func (w *testWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}
