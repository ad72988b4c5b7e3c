package cluster_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/raftfsm"
)

// installDriver opens no store that an installed snapshot makes while it holds: it
// says that it was asked to, and fails when it is let go, as a process that ends.
type installDriver struct {
	engine.Driver
	holding atomic.Bool
	asked   chan struct{}
	letGo   chan struct{}
}

func (d *installDriver) Open(dir string) (engine.Store, error) {
	name := filepath.Base(dir)
	if strings.HasPrefix(name, "store-") && name != "store-1" && d.holding.CompareAndSwap(true, false) {
		close(d.asked)
		<-d.letGo
		return nil, errors.New("the process ends")
	}
	return d.Driver.Open(dir)
}

// B19: a leader is cut off with writes that nobody else has, the others go on far
// beyond what their logs keep, and it is restarted in the middle of the installation
// that follows. It catches up with one more; the writes that were never acknowledged
// are gone.
func TestB19RestartDuringAnInstallationBesideADivergentTail(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, e string) {
		var drivers [3]*installDriver
		var regs [3]*prometheus.Registry
		k := newKit(t, testcluster.Options{Engine: e, Configure: func(i int, o *cluster.Options) {
			smallLog(i, o)
			d := &installDriver{Driver: o.Driver, asked: make(chan struct{}), letGo: make(chan struct{})}
			drivers[i], o.Driver = d, d
			regs[i] = prometheus.NewRegistry()
			o.Registerer = regs[i]
		}})
		k.mustWrite(k.add("s", 1))
		old := k.Leader(1)
		for i := range 3 {
			if i != old {
				k.Net.Partition(string(testcluster.ID(old)), string(testcluster.ID(i)))
			}
		}
		lost := make(chan raftfsm.Result, 5)
		for i := range 5 {
			req := &raftfsm.Request{Mutations: []raftfsm.Mutation{{Mutation: k.put(fmt.Sprint("lost-", i), "x")}}}
			k.Node(old).Submit(k.ctx(), k.route(), req, func(r raftfsm.Result) { lost <- r })
		}
		k.Eventually("the old leader steps down", func() error {
			if k.Node(old).Leads(1) {
				return errors.New("it leads")
			}
			return nil
		})
		fill(k, 300)
		d := drivers[old]
		d.holding.Store(true)
		k.Net.HealAll()
		select {
		case <-d.asked:
		case <-time.After(testcluster.Wait):
			t.Fatal("no snapshot was installed")
		}
		close(d.letGo)
		k.Stop(old)
		for range 5 {
			if r := <-lost; r.Err == nil {
				t.Error("a write is acknowledged that only the leader had which was cut off")
			}
		}
		k.Start(old)
		k.WaitReady()
		k.checkHashes()
		if got := k.generation(old); got != 1 {
			t.Errorf("the replica is of generation %d, want 1: it was not damaged", got)
		}
		if got := k.sum("s"); got != 301 {
			t.Errorf("sum %d, want 301", got)
		}
		for i := range 5 {
			if v := k.value(fmt.Sprint("lost-", i)); v != "" {
				t.Errorf("lost-%d is %q", i, v)
			}
		}
		fill(k, 20) // and goes on by the log alone
		k.checkHashes()
		if n := installed(t, regs[old]); n > 2 {
			t.Errorf("%v snapshots were installed after the restart", n)
		}
	})
}

// installed is how many snapshots of shard 1 a node has installed since its start.
func installed(t *testing.T, reg *prometheus.Registry) (n float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if f.GetName() == "keelstate_snapshots_total" && labels["what"] == "installed" && strings.HasSuffix(labels["group"], "1") {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// B06: what a cluster was restored with, and what it has applied since, is applied
// once, over restarts of every node, from the log, from a snapshot and the log, and
// from the object store.
func TestB06RestoredClusterAppliesEveryCommandOnce(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, e string) {
		k := newCheckpointKit(t, testcluster.Options{Engine: e, Shards: 2, Configure: calm})
		old := newRouter(k)
		n := 0
		step := func(r *router, times int) {
			for range times {
				n++
				r.update(r.add("k", 1), r.appendTo("k", fmt.Sprint(n)), r.mapPut("k", fmt.Sprint(n), "1"))
			}
		}
		step(old, 40)
		c := k.mustCreate()
		next := k.sharing(testcluster.Options{Engine: e, Nodes: 3, Shards: 3, Configure: func(_ int, o *cluster.Options) {
			o.RebuildFromStore, o.ElectionTimeout = true, 300*time.Millisecond
		}})
		r := next.restored(c.URI)
		check := func(when string) {
			t.Helper()
			want := fmt.Sprintf("k=%q %d", "", n)
			for i := range n {
				want += fmt.Sprintf(" %q", fmt.Sprint(i+1))
			}
			got := r.content("k")
			if elements, _, _ := strings.Cut(got, ` "1":"1"`); elements != want {
				t.Fatalf("%s: %s, want %s", when, got, want)
			}
			if entries := strings.Count(got, `:"1"`); entries != n {
				t.Fatalf("%s: %d entries, want %d", when, entries, n)
			}
		}
		check("restored")
		for round := range 3 {
			step(r, 20)
			for _, i := range next.Running() {
				next.Restart(i)
			}
			next.WaitReady()
			check(fmt.Sprint("restarted, round ", round))
			if round == 1 {
				shard := r.shardOf("k").ID
				if _, _, err := next.Node(next.Leader(shard)).SnapshotShard(next.ctx(), shard); err != nil {
					t.Fatal(err)
				}
			}
		}
		next.mustCreate()
		next.Stop(1) // and comes back with nothing but its identity
		remove(t, filepath.Join(next.Dir(1), "groups"))
		step(r, 5)
		next.Start(1)
		next.Eventually("the replicas are rebuilt", func() error {
			if ok, why := next.Node(1).Ready(); !ok {
				return errors.New(why)
			}
			return nil
		})
		check("rebuilt")
		r.agree()
	})
}

// B54: with far more objects than fit on a page of a list, the newest checkpoint is
// found and restored; when the others are deleted, exactly its objects are left.
func TestB54NewestOfAThousandObjectsIsRestored(t *testing.T) {
	t.Parallel()
	const shards = 16
	k := newCheckpointKit(t, testcluster.Options{Nodes: 1, Shards: shards, Configure: func(_ int, o *cluster.Options) {
		o.CheckpointRetain, o.CheckInterval = 1000, 10*time.Millisecond
	}})
	r := newRouter(k)
	keys := restoreKeys(2 * shards)
	var last *cluster.CheckpointInfo
	for round := 0; len(k.stored()) <= 1000; round++ {
		for i, key := range keys {
			r.update(r.put(key, fmt.Sprint(round, " ", i)))
		}
		last = k.mustCreate()
	}
	want := r.contents(keys)
	r.update(r.put(keys[0], "later"))
	next := k.sharing(testcluster.Options{Nodes: 1, Shards: 2}).restored(string(r.top.Cluster) + "/latest")
	if got := next.contents(keys); !slices.Equal(got, want) {
		t.Errorf("restored\n%q\nwant\n%q", got, want)
	}
	for number := uint64(1); number < last.Number; number++ {
		k.Eventually("a checkpoint is deleted", func() error { return k.Node(0).DeleteCheckpoint(k.ctx(), number) })
	}
	v, err := k.Node(0).VerifyCheckpoint(k.ctx(), last.Number, false, nil)
	if err != nil || len(v.Bad) > 0 {
		t.Fatalf("the newest checkpoint: %v, %+v", err, v)
	}
	k.Eventually("the objects of the others are gone", func() error {
		if left := len(k.stored()); int64(left) != int64(v.Objects) {
			return fmt.Errorf("%d objects are left, the newest checkpoint has %d", left, v.Objects)
		}
		return nil
	})
}

// cramped is a node's disk that is full at a step of a checkpoint.
type cramped struct {
	engine.Driver
	step *atomic.Pointer[string]
}

func (d *cramped) Open(dir string) (engine.Store, error) {
	s, err := d.Driver.Open(dir)
	return &crampedStore{s, d}, err
}

type crampedStore struct {
	engine.Store
	disk *cramped
}

func (s *crampedStore) full(step string) error {
	if at := s.disk.step.Load(); at != nil && *at == step {
		return fmt.Errorf("writing a file: %w", syscall.ENOSPC)
	}
	return nil
}

// leave leaves of a checkpoint what a disk that was filled has of it.
func (s *crampedStore) leave(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "half"), []byte("a half"), 0o600)
}

func (s *crampedStore) BeginCheckpoint(dir string) (func() error, error) {
	if err := s.full("begin"); err != nil {
		return nil, errors.Join(err, s.leave(dir))
	}
	finish, err := s.Store.BeginCheckpoint(dir)
	if err != nil {
		return nil, err
	}
	return func() error {
		if err := s.full("finish"); err != nil {
			return errors.Join(err, s.leave(dir))
		}
		return finish()
	}, nil
}

// B17: a disk that is full when an uploader makes its checkpoint makes that fail, with
// its cause; writes go on, what was made of it is removed, and the next checkpoint
// succeeds once there is room.
func TestB17CheckpointOnAFullDisk(t *testing.T) {
	t.Parallel()
	var full atomic.Pointer[string]
	k := newCheckpointKit(t, testcluster.Options{Engine: "rocks", Configure: func(_ int, o *cluster.Options) {
		o.Driver = &cramped{o.Driver, &full}
	}})
	k.mustWrite(k.add("s", 1))
	first := k.mustCreate()
	for i, step := range []string{"begin", "finish"} {
		full.Store(&step)
		k.mustWrite(k.add("s", 1))
		c, err := k.create(0)
		if err != nil || c.Phase != meta.CheckpointFailed || !strings.Contains(c.Error, "no space left on device") {
			t.Errorf("full at %s: %v, phase %s, error %q", step, err, c.Phase, c.Error)
		}
		k.mustWrite(k.add("s", 1))
		full.Store(nil)
		k.Eventually("what was made is removed", func() error { return k.nothingHalf() })
		if found, err := k.Node(0).VerifyCheckpoint(k.ctx(), first.Number, false, nil); err != nil || len(found.Bad) > 0 {
			t.Errorf("the retained checkpoint: %v %+v", err, found)
		}
		first = k.mustCreate()
		if got, want := k.sum("s"), int64(3+2*i); got != want {
			t.Errorf("sum %d, want %d", got, want)
		}
	}
	k.checkHashes()
}

// nothingHalf says where a node has a half made checkpoint.
func (k *checkpointKit) nothingHalf() (found error) {
	for i := range 3 {
		err := filepath.WalkDir(k.Dir(i), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && d.Name() == "half" {
				err = fmt.Errorf("%s is left", path)
			}
			return err
		})
		found = errors.Join(found, err)
	}
	return found
}

// B09: beside the flushes that checkpoints of a cluster make, nodes end at any moment.
// What is on their disks then, before any replay, is of one request in all states; so
// is what each checkpoint holds.
func TestB09CheckpointsOfTheClusterPartNoBatch(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Engine: "rocks", Configure: func(_ int, o *cluster.Options) { o.CheckpointLocalLinks = true }})
	n, seen := 0, 0
	write := func() {
		n++
		v := fmt.Sprint(n)
		update := state.Mutation{State: k.lists, Op: state.OpListUpdate, Key: []byte("k"), Elements: [][]byte{[]byte(v)}}
		k.mustWrite(k.put("k", v), k.mapPut("k", "u", v), update, k.add("k", 1))
	}
	write()
	for round := range 8 {
		made := make(chan *cluster.CheckpointInfo, 1)
		by := k.Running()[round%3]
		go func() {
			c, _ := k.create(by) // the node may end
			made <- c
		}()
		for range 3 + 5*round%11 {
			write()
		}
		victim := (round + round/3) % 3
		k.Stop(victim)
		seen += k.oneRequest(victim)
		k.Start(victim)
		k.WaitReady()
		if c := <-made; c != nil && c.Phase == meta.CheckpointCompleted {
			v := k.cut(c.Number, 1)
			k.sameEverywhere(fmt.Sprintf("checkpoint %d", c.Number), func(q state.Query) state.Answer {
				q.Group = keyGroup(t, "k", v.M)
				a, err := v.Read(&q)
				if err != nil {
					t.Fatal(err)
				}
				return a
			})
		}
	}
	k.checkHashes()
	if seen == 0 {
		t.Error("no disk held anything when its node ended")
	}
	if got := k.sum("k"); got != int64(n) {
		t.Errorf("sum %d, want %d", got, n)
	}
}

// oneRequest opens the store of shard 1 that a stopped node has, and looks whether all
// states are of one request. It returns how many stores hold one.
func (k *checkpointKit) oneRequest(node int) (seen int) {
	k.t.Helper()
	current, err := filepath.Glob(filepath.Join(k.Dir(node), "groups", "1", "*", "store-*"))
	if err != nil || len(current) == 0 {
		k.t.Fatal(current, err)
	}
	for _, dir := range current {
		store, err := k.driver.Open(dir)
		if err != nil {
			k.t.Fatal(err)
		}
		machine, err := raftfsm.Open(store, raftfsm.Options{})
		if err != nil {
			k.t.Fatal(err)
		}
		h := machine.Header()
		v, err := machine.ReadView(h.Epoch, h.Incarnation)
		if err != nil && !errors.Is(err, base.ErrNotReady) {
			k.t.Fatal(err)
		}
		if err == nil {
			if h.Declaration(k.maps) != nil && k.sameEverywhere(dir, func(q state.Query) state.Answer {
				q.Group = keyGroup(k.t, "k", v.M)
				a, err := v.Read(&q)
				if err != nil {
					k.t.Fatal(err)
				}
				return a
			}) {
				seen++
			}
			v.Close() // else the store stays locked
		}
		if err := machine.Close(); err != nil {
			k.t.Fatal(err)
		}
	}
	return seen
}

// sameEverywhere compares what the states hold of key k, read by read. It says whether
// they hold anything.
func (k *checkpointKit) sameEverywhere(where string, read func(state.Query) state.Answer) bool {
	k.t.Helper()
	key := []byte("k")
	value := string(read(state.Query{State: k.values, Kind: state.QueryGet, Key: key}).Value)
	entry := string(read(state.Query{State: k.maps, Kind: state.QueryGet, Key: key, UserKey: []byte("u")}).Value)
	list, sum := "", ""
	if a := read(state.Query{State: k.lists, Kind: state.QueryPage, Key: key}); len(a.Elements) == 1 {
		list = string(a.Elements[0])
	} else if len(a.Elements) > 1 {
		list = fmt.Sprintf("%q", a.Elements)
	}
	if a := read(state.Query{State: k.sums, Kind: state.QueryGet, Key: key}); a.Found {
		for n := range 10000 {
			if string(int64Bytes(k.t, int64(n))) == string(a.Value) {
				sum = fmt.Sprint(n)
			}
		}
	}
	if value != entry || value != list || value != sum {
		k.t.Errorf("%s: value %q, map %q, list %q, sum %q", where, value, entry, list, sum)
	}
	return value != ""
}

// B51: an object that is damaged in place, to the same size, is referenced by the
// checkpoints that follow, for nothing but reading it shows the damage. `verify` of each
// names it, and no restore serves it. Once it is deleted in the store under that name,
// the next checkpoint stores it again, and a restore from that has everything.
func TestB51DamagedObjectIsNamedAndStoredAgainOnceDeleted(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Engine: "rocks", Shards: 2, Configure: calm})
	old := newRouter(k)
	keys := restoreKeys(12)
	old.change(keys, 1)
	first := k.mustCreate()
	_, _, object := k.parts(first)
	k.replace(object, func(b []byte) []byte {
		b[len(b)/2] ^= 1
		return b
	})
	named := func(c *cluster.CheckpointInfo) {
		t.Helper()
		v, err := k.Node(0).VerifyCheckpoint(k.ctx(), c.Number, false, nil)
		if err != nil || len(v.Bad) == 0 || !strings.Contains(fmt.Sprintf("%+v", v.Bad), object) {
			t.Errorf("verifying checkpoint %d names %+v, %v, not %s", c.Number, v, err, object)
		}
	}
	named(first)
	old.change(keys[:3], 2)
	second := k.mustCreate()
	named(second)
	next := k.sharing(testcluster.Options{Engine: "rocks", Nodes: 1, Shards: 1})
	next.Eventually("the restore meets the damage", func() error {
		reply, err := next.Node(0).Init(next.ctx(), next.restoreSpec(second.URI))
		switch {
		case err == nil && reply.Phase == meta.PhaseDone:
			t.Fatal("a cluster was founded with a damaged object")
		case err == nil && !strings.Contains(reply.Problem, object):
			return fmt.Errorf("phase %s: %s", reply.Phase, reply.Problem)
		}
		return err
	})
	if err := k.objects.Delete(k.ctx(), object); err != nil {
		t.Fatal(err)
	}
	third := k.mustCreate()
	if v, err := k.Node(0).VerifyCheckpoint(k.ctx(), third.Number, false, nil); err != nil || len(v.Bad) > 0 {
		t.Errorf("the checkpoint after the deletion: %v %+v", err, v)
	}
	r := k.sharing(testcluster.Options{Engine: "rocks", Nodes: 1, Shards: 3}).restored(third.URI)
	if got, want := r.contents(keys), old.contents(keys); !slices.Equal(got, want) {
		t.Errorf("restored\n%q\nwant\n%q", got, want)
	}
}
