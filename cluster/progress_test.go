package cluster_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/snapshot"
)

// gatedStore gives, while it is shut, the first bytes of files only.
type gatedStore struct {
	objectstore.Store
	gate *gate
}

type gate struct {
	mu   sync.Mutex
	open chan struct{}
	keys map[string]bool
}

// gateAt is how many bytes come through a gate that is shut.
const gateAt = 64

// shut lets, of the files of a checkpoint, no more than their beginning through.
func (g *gate) shut(k *checkpointKit, number uint64) {
	k.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open, g.keys = make(chan struct{}), map[string]bool{}
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	c, _, err := snapshot.ReadCheckpoint(k.ctx(), k.objects, snapshot.MetadataKey(top.Cluster, number), [32]byte{})
	if err != nil {
		k.t.Fatal(err)
	}
	for i := range c.Shards {
		m, err := c.ReadManifest(k.ctx(), k.objects, &c.Shards[i])
		if err != nil {
			k.t.Fatal(err)
		}
		for _, f := range m.Files {
			g.keys[f.Object] = true
		}
	}
}

func (g *gate) lift() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != nil {
		close(g.open)
		g.open = nil
	}
}

func (s gatedStore) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	rc, err := s.Store.Get(ctx, key, offset, length)
	s.gate.mu.Lock()
	open, shut := s.gate.open, s.gate.keys[key]
	s.gate.mu.Unlock()
	if err != nil || open == nil || !shut {
		return rc, err
	}
	return &gatedBody{ReadCloser: rc, open: open, closed: make(chan struct{})}, nil
}

type gatedBody struct {
	io.ReadCloser
	open, closed chan struct{}
	once         sync.Once
	n            int
}

func (b *gatedBody) Read(p []byte) (int, error) {
	if b.n >= gateAt {
		select {
		case <-b.open:
		case <-b.closed:
			return 0, io.ErrClosedPipe
		}
	} else {
		p = p[:min(len(p), gateAt-b.n)]
	}
	n, err := b.ReadCloser.Read(p)
	b.n += n
	return n, err
}

func (b *gatedBody) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.ReadCloser.Close()
}

// gated gives every node a gated store and a registry.
func gated(g *gate, regs []*prometheus.Registry) func(int, *cluster.Options) {
	return func(i int, o *cluster.Options) {
		regs[i] = prometheus.NewRegistry()
		o.Registerer, o.Objects = regs[i], gatedStore{o.Objects, g}
	}
}

// sum adds up a metric of a node, with that source if one is given.
func sum(t *testing.T, reg *prometheus.Registry, name, source string) (total float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if source == "" || l.GetName() == "source" && l.GetValue() == source {
					total += m.GetCounter().GetValue() + m.GetGauge().GetValue()
					break
				}
			}
		}
	}
	return total
}

// begun demands that three replicas of each shard have what comes through the gate,
// and small files, and that the rest is due.
func begun(fetches []cluster.ShardFetch, shards int, due func(base.GroupID) int64) error {
	if len(fetches) != shards {
		return fmt.Errorf("%+v", fetches)
	}
	for _, f := range fetches {
		if f.Here < 3*gateAt || f.Here > 3*(gateAt+1000) || f.Due < 1<<20 || due != nil && f.Due != due(f.Group) {
			return fmt.Errorf("%+v", f)
		}
	}
	return nil
}

// large gives the keys so much that no file of them shares an object.
func large(r *router, keys []string) {
	for _, key := range keys {
		r.update(r.put(key, strings.Repeat(key, 600_000/len(key))))
	}
}

func operationFetches(k *kit, node int, kind string) ([]cluster.ShardFetch, error) {
	all, err := k.Node(node).Operations(k.ctx())
	for _, o := range all {
		if o.Kind == kind && !o.Done {
			return o.Fetches, err
		}
	}
	return nil, err
}

// Who asks is told how many bytes have come, by whichever node, while nothing of it
// is written to the metadata.
func TestRollbackTellsHowFarItIs(t *testing.T) {
	t.Parallel()
	g, regs := &gate{}, make([]*prometheus.Registry, 3)
	k := newRollingKit(t, testcluster.Options{Engine: "mem", Configure: gated(g, regs)})
	k.more()
	large(k.router, k.keys)
	n := k.checkpoint()
	k.more()
	was := k.top.Incarnation
	g.shut(k.checkpointKit, n)
	defer g.lift()
	ended := make(chan error, 1)
	heard := make(chan *cluster.RollbackInfo, 1000)
	go func() {
		defer close(heard)
		info, err := k.back(0, n, func(i *cluster.RollbackInfo) { heard <- i })
		if err == nil && info.Phase != meta.PhaseDone {
			err = fmt.Errorf("%+v", info)
		}
		ended <- err
	}()
	due := map[base.GroupID]int64{}
	k.Eventually("a part of the files is here", func() error {
		info, err := k.Node(1).RollbackStatus(k.ctx(), 0)
		if err != nil {
			return err
		}
		var fetches []cluster.ShardFetch
		for _, s := range info.Shards {
			fetches = append(fetches, s.Fetch)
			due[s.Group] = s.Fetch.Due
			if s.Fetch.Due < 3*s.Bytes/2 {
				return fmt.Errorf("%+v", s)
			}
		}
		return begun(fetches, 2, nil)
	})
	revision := k.revision()
	fetches, err := operationFetches(k.kit, 2, meta.OperationRollback)
	if err == nil {
		err = begun(fetches, 2, func(g base.GroupID) int64 { return due[g] })
	}
	if err != nil {
		t.Error(err)
	}
	told := false
	for i := range heard {
		if told = i.Shards[0].Fetch.Here > 0 && i.Phase == meta.PhaseRollbackPrepare; told {
			break // by a message for nothing else
		}
	}
	if now := k.revision(); !told || now != revision {
		t.Errorf("told: %t; the metadata went from revision %d to %d", told, revision, now)
	}
	if sum(t, regs[0], "keelstate_fetch_due_bytes", "") <= 0 || sum(t, regs[0], "keelstate_fetched_bytes_total", "store") < 2*gateAt {
		t.Errorf("%v bytes are due, %v came", sum(t, regs[0], "keelstate_fetch_due_bytes", ""), sum(t, regs[0], "keelstate_fetched_bytes_total", "store"))
	}
	g.lift()
	all := false
	for i := range heard {
		whole := len(i.Shards) > 0
		for _, s := range i.Shards {
			whole = whole && s.Fetch.Due > 0 && s.Fetch.Here == s.Fetch.Due
		}
		all = all || whole
	}
	if err := <-ended; err != nil || !all {
		t.Fatalf("%v; all bytes were told of: %t", err, all)
	}
	k.renew(was)
	k.holds(n)
	var want float64
	for _, d := range due {
		want += float64(d) / 3
	}
	for i, reg := range regs {
		if got := sum(t, reg, "keelstate_fetched_bytes_total", "store"); got != want {
			t.Errorf("node %d has fetched %v bytes of %v", i, got, want)
		}
		k.Eventually("nothing is due", func() error {
			if d := sum(t, reg, "keelstate_fetch_due_bytes", ""); d != 0 {
				return fmt.Errorf("%v bytes", d)
			}
			return nil
		})
	}
}

// revision is that of the metadata.
func (k *rollingKit) revision() base.Revision {
	k.t.Helper()
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	return top.Revision
}

func TestRestoreTellsHowFarItIs(t *testing.T) {
	t.Parallel()
	k, keys, _, _ := checkpointed(t)
	large(newRouter(k), keys)
	c := k.mustCreate()
	g, regs := &gate{}, make([]*prometheus.Registry, 3)
	next := k.sharing(testcluster.Options{Nodes: 3, Shards: 3, KeyGroups: 12, Configure: gated(g, regs)})
	g.shut(k, c.Number)
	defer g.lift()
	next.Eventually("a part of the files is here", func() error {
		for node := range 2 { // the founder, and one that passes it on
			reply, err := next.Node(node).Init(initCtx(t, 2*time.Second), next.restoreSpec(c.URI))
			if err != nil {
				return err
			}
			if err := begun(reply.Fetches, 3, nil); err != nil {
				return err
			}
		}
		fetches, err := operationFetches(next.kit, 1, meta.OperationFound)
		if err != nil {
			return err
		}
		return begun(fetches, 3, func(g base.GroupID) int64 { return 3 * c.Shards[g-1].Report.FullBytes })
	})
	g.lift()
	next.restored(c.URI)
	reply, err := next.Node(0).Init(next.ctx(), next.restoreSpec(c.URI))
	if err != nil || len(reply.Fetches) != 0 {
		t.Errorf("%v, %+v", err, reply)
	}
	if fetched, due := sum(t, regs[0], "keelstate_fetched_bytes_total", "store"), sum(t, regs[0], "keelstate_fetch_due_bytes", ""); fetched == 0 || due != 0 {
		t.Errorf("%v bytes came, %v are due", fetched, due)
	}
}
