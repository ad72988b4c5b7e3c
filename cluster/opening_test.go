package cluster_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// turnstile lets callers through once so many are inside at once, or when it is
// opened.
type turnstile struct {
	want   int
	full   chan struct{}
	filled sync.Once

	mu        sync.Mutex
	in, most  int
	open      chan struct{}
	isOpen    bool
	onlyShard string // the others go through; empty: all wait
}

func newTurnstile(want int) *turnstile {
	return &turnstile{want: want, full: make(chan struct{}), open: make(chan struct{})}
}

func (g *turnstile) pass(dir string) {
	g.mu.Lock()
	if g.isOpen || g.onlyShard != "" && !strings.Contains(dir, g.onlyShard) {
		g.mu.Unlock()
		return
	}
	g.in++
	g.most = max(g.most, g.in)
	if g.in >= g.want {
		g.filled.Do(func() { close(g.full) })
	}
	g.mu.Unlock()
	select {
	case <-g.full:
	case <-g.open:
	}
	g.mu.Lock()
	g.in--
	g.mu.Unlock()
}

func (g *turnstile) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.isOpen {
		g.isOpen = true
		close(g.open)
	}
}

// slowDriver opens and closes stores through turnstiles.
type slowDriver struct {
	engine.Driver
	opening, closing *atomic.Pointer[turnstile]
}

func (d slowDriver) Open(dir string) (engine.Store, error) {
	if g := d.opening.Load(); g != nil {
		g.pass(dir)
	}
	s, err := d.Driver.Open(dir)
	if err != nil {
		return nil, err
	}
	return slowStore{s, d.closing, dir}, nil
}

type slowStore struct {
	engine.Store
	closing *atomic.Pointer[turnstile]
	dir     string
}

func (s slowStore) Close() error {
	if g := s.closing.Load(); g != nil {
		g.pass(s.dir)
	}
	return s.Store.Close()
}

const slowShards = 6

func newSlowCluster(t *testing.T) (k *testcluster.Cluster, opening, closing *atomic.Pointer[turnstile]) {
	opening, closing = &atomic.Pointer[turnstile]{}, &atomic.Pointer[turnstile]{}
	k = testcluster.New(t, testcluster.Options{Nodes: 1, Shards: slowShards, Configure: func(_ int, o *cluster.Options) {
		o.Driver = slowDriver{o.Driver, opening, closing}
	}})
	t.Cleanup(func() { // before the cluster's own, which closes the node
		for _, p := range []*atomic.Pointer[turnstile]{opening, closing} {
			if g := p.Swap(nil); g != nil {
				g.release()
			}
		}
	})
	return k, opening, closing
}

// A restart opens several replicas at once, but never more than its bound: one
// after the other takes minutes with many shards on a busy disk.
func TestReplicasOpenBesideOneAnother(t *testing.T) {
	t.Parallel()
	k, opening, _ := newSlowCluster(t)
	k.Stop(0)
	limit := cluster.MaxOpening()
	g := newTurnstile(min(slowShards, limit))
	opening.Store(g)
	k.Start(0)
	select {
	case <-g.full:
	case <-time.After(testcluster.Wait):
		t.Fatalf("at most %d replicas were opened at once", g.most)
	}
	k.WaitReady()
	if g.most > limit {
		t.Fatalf("%d replicas were opened at once, the bound is %d", g.most, limit)
	}
}

// A replica whose store does not open (a sick disk, a long recovery) holds up no
// other replica of the node.
func TestReplicaThatIsSlowToOpenHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	k, opening, _ := newSlowCluster(t)
	k.Stop(0)
	g := newTurnstile(slowShards)
	g.onlyShard = fmt.Sprintf("/groups/%d/", 1)
	opening.Store(g)
	k.Start(0)
	for id := base.GroupID(2); id <= slowShards; id++ {
		k.Leader(id)
	}
	if ok, why := k.Node(0).Ready(); ok || !strings.Contains(why, "not started") {
		t.Fatalf("a node with a replica that is not open: ready %v, %q", ok, why)
	}
	g.release()
	k.WaitReady()
}

// Replicas are closed beside one another too: a stop has a time limit.
func TestReplicasCloseBesideOneAnother(t *testing.T) {
	t.Parallel()
	k, _, closing := newSlowCluster(t)
	limit := cluster.MaxOpening()
	g := newTurnstile(min(slowShards, limit))
	closing.Store(g)
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.Stop(0)
	}()
	select {
	case <-g.full:
	case <-time.After(testcluster.Wait):
		g.release()
		t.Errorf("at most %d replicas were closed at once", g.most)
	}
	<-done
	if g.most > limit {
		t.Errorf("%d replicas were closed at once, the bound is %d", g.most, limit)
	}
}
