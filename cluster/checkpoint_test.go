package cluster_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// checkpointKit is a cluster with an object store that a test can make fail.
type checkpointKit struct {
	*kit
	objects objectstore.Store // without faults
	hook    atomic.Pointer[fault.Hook]
	driver  engine.Driver
}

func newCheckpointKit(t *testing.T, o testcluster.Options) *checkpointKit {
	t.Helper()
	objects, err := file.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	k := &checkpointKit{objects: objects}
	faulty := fault.Wrap(objects, func(op fault.Op, key string) fault.Fault {
		if h := k.hook.Load(); h != nil {
			return (*h)(op, key)
		}
		return fault.Fault{}
	})
	configure := o.Configure
	o.Configure = func(i int, opts *cluster.Options) {
		opts.Objects, opts.ObjectsURI = faulty, "file:///objects"
		opts.CheckInterval = 50 * time.Millisecond
		if configure != nil {
			configure(i, opts)
		}
	}
	k.kit = newKit(t, o)
	// After the nodes, which end before: cleanups run last to first.
	t.Cleanup(func() {
		if err := objects.Close(); err != nil {
			t.Error(err)
		}
	})
	k.driver = mem.NewDriver()
	if o.Engine == "rocks" {
		d, err := rocks.NewDriver(rocks.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		k.driver = d
	}
	return k
}

func (k *checkpointKit) faults(h fault.Hook) { k.hook.Store(&h) }

// create asks a node for a checkpoint and follows it to its end.
func (k *checkpointKit) create(node int) (*cluster.CheckpointInfo, error) {
	var last *cluster.CheckpointInfo
	err := k.Node(node).CreateCheckpoint(k.ctx(), func(c *cluster.CheckpointInfo) error {
		last = c
		return nil
	})
	return last, err
}

func (k *checkpointKit) mustCreate() *cluster.CheckpointInfo {
	k.t.Helper()
	c, err := k.create(k.Running()[0])
	if err != nil || c.Phase != meta.CheckpointCompleted {
		k.t.Fatalf("%v, %+v", err, c)
	}
	return c
}

// cut opens what a checkpoint holds of a shard.
func (k *checkpointKit) cut(number uint64, shard base.GroupID) *raftfsm.ReadView {
	k.t.Helper()
	top, err := k.Node(k.Running()[0]).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	raw, err := objectstore.ReadAll(k.ctx(), k.objects, snapshot.MetadataKey(top.Cluster, number), snapshot.MaxCheckpointBytes)
	if err != nil {
		k.t.Fatal(err)
	}
	c, err := snapshot.DecodeCheckpoint(raw)
	if err != nil {
		k.t.Fatal(err)
	}
	i := slices.IndexFunc(c.Shards, func(s snapshot.Shard) bool { return s.Group == shard })
	raw, err = objectstore.ReadAll(k.ctx(), k.objects, c.Shards[i].ManifestKey, c.Shards[i].ManifestSize)
	if err != nil {
		k.t.Fatal(err)
	}
	m, err := snapshot.Decode(raw)
	if err != nil {
		k.t.Fatal(err)
	}
	dir := filepath.Join(k.t.TempDir(), "cut")
	if err := snapshot.Fetch(k.ctx(), snapshot.StoreSource(k.objects, m), m, dir, snapshot.FetchOptions{}); err != nil {
		k.t.Fatal(err)
	}
	store, err := k.driver.Open(dir)
	if err != nil {
		k.t.Fatal(err)
	}
	machine, err := raftfsm.Open(store, raftfsm.Options{})
	if err != nil {
		k.t.Fatal(err)
	}
	h := machine.Header()
	if s := c.Shards[i]; h.AppliedIndex != s.Index || h.Sequence != s.Sequence || h.Barrier != number {
		k.t.Errorf("shard %s is at index %d sequence %d barrier %d, _metadata says %+v", shard, h.AppliedIndex, h.Sequence, h.Barrier, s)
	}
	v, err := machine.ReadView(h.Epoch, h.Incarnation)
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() {
		v.Close()
		if err := machine.Close(); err != nil {
			k.t.Error(err)
		}
	})
	return v
}

func keyGroup(t *testing.T, key string, m int) keygroup.Group {
	t.Helper()
	hash, err := keygroup.HashCode(keygroup.String, []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	return keygroup.GroupOf(hash, m)
}

func (k *checkpointKit) cutValue(v *raftfsm.ReadView, id engine.FamilyID, key string) []byte {
	k.t.Helper()
	if v.Declaration(id) == nil {
		return nil // the shard had never heard of the state
	}
	a, err := v.Read(&state.Query{State: id, Kind: state.QueryGet, Group: keyGroup(k.t, key, v.M), Key: []byte(key)})
	if err != nil {
		k.t.Fatal(err)
	}
	return a.Value
}

func TestCheckpointHoldsWhatWasAcknowledgedBeforeAndNothingAfter(t *testing.T) {
	eachEngine(t, func(t *testing.T, engine string) {
		k := newCheckpointKit(t, testcluster.Options{Engine: engine})
		// Sums that are added to all the while.
		var acked, sent atomic.Int64
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				sent.Add(1)
				if k.write(k.add("n", 1)).Err == nil {
					acked.Add(1)
				}
			}
		})
		var made []*cluster.CheckpointInfo
		var low, high []int64
		for range 3 {
			low = append(low, acked.Load())
			c := k.mustCreate()
			high = append(high, sent.Load())
			made = append(made, c)
		}
		close(stop)
		wg.Wait()
		for i, c := range made {
			v := k.cut(c.Number, 1)
			n := int64(0)
			if raw := k.cutValue(v, k.sums, "n"); raw != nil {
				n = int64(binary.BigEndian.Uint64(raw) ^ 1<<63)
			}
			if n < low[i] || n > high[i] {
				t.Errorf("checkpoint %d holds %d of the adds: %d were acknowledged before it, %d sent when it had completed", c.Number, n, low[i], high[i])
			}
			found, err := k.Node(0).VerifyCheckpoint(k.ctx(), c.Number, false, nil)
			if err != nil || len(found.Bad) > 0 || found.Objects == 0 {
				t.Errorf("verifying checkpoint %d: %v, %+v", c.Number, err, found)
			}
		}
	})
}

func TestSecondCheckpointUploadsOnlyWhatIsNew(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Engine: "rocks", Nodes: 3})
	big := strings.Repeat("x", 10_000)
	for i := range 100 {
		k.mustWrite(k.put(fmt.Sprintf("k%d", i), fmt.Sprintf("%d%s", i, big)))
	}
	first := k.mustCreate()
	k.mustWrite(k.put("one", "more"))
	second := k.mustCreate()
	if first.Totals.NewBytes != first.Totals.FullBytes || second.Totals.NewBytes > second.Totals.FullBytes/2 {
		t.Errorf("the first uploaded %d of %d bytes, the second %d of %d", first.Totals.NewBytes, first.Totals.FullBytes, second.Totals.NewBytes, second.Totals.FullBytes)
	}
	if a, b := first.Shards[0].Uploader, second.Shards[0].Uploader; a != b {
		t.Errorf("the uploader changed from %s to %s", a, b)
	}
}

// What is no longer retained goes from the store, and nothing else.
func TestRetiredCheckpointsGiveTheirObjectsBack(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Engine: "mem", Configure: func(_ int, o *cluster.Options) { o.CheckpointRetain = 2 }})
	for i := range 5 {
		k.mustWrite(k.put("a", fmt.Sprint(i)))
		k.mustCreate()
	}
	k.Eventually("the objects of retired checkpoints are deleted", func() error {
		list, err := k.Node(0).Checkpoints(k.ctx())
		if err != nil {
			return err
		}
		stored := 0
		for _, err := range k.objects.List(k.ctx(), "", "") {
			if err != nil {
				return err
			}
			stored++
		}
		// Each kept one has its `_metadata` as well.
		if len(list.Checkpoints) != 2 || list.PendingDeletions != 0 || stored != list.Objects+2 {
			return fmt.Errorf("%d checkpoints, %d objects registered, %d stored, %d deletions pending", len(list.Checkpoints), list.Objects, stored, list.PendingDeletions)
		}
		return nil
	})
	for _, n := range []uint64{4, 5} {
		if got := string(k.cutValue(k.cut(n, 1), k.values, "a")); got != fmt.Sprint(n-1) {
			t.Errorf("checkpoint %d holds %q", n, got)
		}
	}
	if err := k.Node(1).DeleteCheckpoint(k.ctx(), 5); err != nil {
		t.Fatal(err)
	}
	if err := k.Node(1).DeleteCheckpoint(k.ctx(), 77); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("deleting what never was: %v", err)
	}
	if found, err := k.Node(0).VerifyCheckpoint(k.ctx(), 4, false, nil); err != nil || len(found.Bad) > 0 {
		t.Errorf("%v %+v", err, found)
	}
}

// A write whose client has seen the barrier of a checkpoint is not in it,
// whichever shard it goes to and however late that shard is.
func TestWritesBehindASeenBarrierAreNotInTheCheckpoint(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Shards: 2})
	key := map[base.GroupID]string{}
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; len(key) < 2; i++ {
		name := fmt.Sprint("k", i)
		for _, s := range top.Shards {
			if s.Range.Contains(keyGroup(t, name, top.KeyGroups)) {
				key[s.ID] = name
			}
		}
	}
	for round := range 5 {
		var wg sync.WaitGroup
		announced := make(chan uint64, 1)
		wg.Go(func() {
			err := k.Node(0).CreateCheckpoint(k.ctx(), func(c *cluster.CheckpointInfo) error {
				select {
				case announced <- c.Number:
				default:
				}
				if c.Ended() && c.Phase != meta.CheckpointCompleted {
					return fmt.Errorf("%s: %s", c.Phase, c.Error)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
		number := <-announced
		after := fmt.Sprint("after", round)
		for shard, name := range key {
			req := &raftfsm.Request{BarrierSeen: number, Mutations: []raftfsm.Mutation{{Mutation: k.put(name, after)}}}
			var res raftfsm.Result
			k.Eventually("the write is answered", func() error {
				for _, i := range k.Running() {
					if k.Node(i).Leads(shard) {
						done := make(chan raftfsm.Result, 1)
						k.Node(i).Submit(k.ctx(), cluster.Route{Group: shard, Epoch: 1, MetadataRevision: k.rev}, req, func(r raftfsm.Result) { done <- r })
						res = <-done
						return res.Failure()
					}
				}
				return errors.New("nobody leads")
			})
			if res.Token.Barrier < number {
				t.Errorf("the write behind barrier %d was executed before it: %+v", number, res.Token)
			}
		}
		wg.Wait()
		for shard, name := range key {
			if got := string(k.cutValue(k.cut(number, shard), k.values, name)); got == after {
				t.Errorf("checkpoint %d holds %q of shard %s, which was written behind its barrier", number, got, shard)
			}
		}
	}
}

// A barrier that no checkpoint has is not believed, near or far: no client can fail
// a checkpoint.
func TestBarriersThatNeverWere(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{})
	for _, seen := range []uint64{1, 2, 1 << 60} {
		res := k.submit(k.Leader(1), &raftfsm.Request{BarrierSeen: seen, Mutations: []raftfsm.Mutation{{Mutation: k.put("a", fmt.Sprint(seen))}}})
		if res.Err != nil || res.Token.Barrier != 0 {
			t.Errorf("barrier %d: %v, and the shard is at %d", seen, res.Err, res.Token.Barrier)
		}
	}
	if c := k.mustCreate(); c.Number != 1 {
		t.Errorf("checkpoint %d", c.Number)
	}
}

// B51, B56: a store that refuses fails the checkpoint with one clear cause; writes
// go on, and what was kept is whole.
func TestStoreInTroubleFailsTheCheckpointAlone(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) { o.CheckpointTimeout = 3 * time.Second }})
	k.mustWrite(k.put("a", "1"))
	kept := k.mustCreate()
	for _, c := range []struct {
		name string
		hook fault.Hook
	}{
		{"down", func(fault.Op, string) fault.Fault { return fault.Fault{Err: fault.Trouble("connection refused")} }},
		{"files refused", func(op fault.Op, key string) fault.Fault {
			if op == fault.OpPut && !strings.Contains(key, "_metadata") {
				return fault.Fault{Err: fault.Trouble("no space")}
			}
			return fault.Fault{}
		}},
		{"metadata refused", func(op fault.Op, key string) fault.Fault {
			if op == fault.OpPut && strings.Contains(key, "_metadata") {
				return fault.Fault{Err: fault.Trouble("read-only")}
			}
			return fault.Fault{}
		}},
	} {
		k.faults(c.hook)
		k.mustWrite(k.put("a", c.name))
		got, err := k.create(1)
		if err != nil || got.Phase != meta.CheckpointFailed || got.Error == "" {
			t.Errorf("%s: %v %+v", c.name, err, got)
		} else {
			t.Logf("%s: %s", c.name, got.Error)
		}
		if k.value("a") != c.name {
			t.Errorf("%s: the write is not there", c.name)
		}
		k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
	}
	if found, err := k.Node(0).VerifyCheckpoint(k.ctx(), kept.Number, false, nil); err != nil || len(found.Bad) > 0 {
		t.Errorf("what was kept: %v %+v", err, found)
	}
	k.mustCreate()
}

// What the registry knows and the store has not is stored again: the bucket was
// emptied, or the nodes were given another one.
func TestObjectsThatTheStoreHasLostAreStoredAgain(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{})
	k.mustWrite(k.put("a", "1"))
	k.mustCreate()
	var keys []string
	for o, err := range k.objects.List(k.ctx(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, o.Key)
	}
	if err := k.objects.Delete(k.ctx(), keys...); err != nil || len(keys) == 0 {
		t.Fatal(err, len(keys))
	}
	c := k.mustCreate()
	if found, err := k.Node(0).VerifyCheckpoint(k.ctx(), c.Number, false, nil); err != nil || len(found.Bad) > 0 {
		t.Errorf("%v %+v", err, found)
	}
}

// The coordinator's node has another store than the uploaders: no checkpoint
// completes that lies in two places.
func TestNodesWithDifferentStoresCompleteNothing(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{})
	k.mustWrite(k.put("a", "1"))
	k.faults(func(op fault.Op, _ string) fault.Fault {
		if op == fault.OpStat {
			return fault.Fault{Err: base.ErrNotFound}
		}
		return fault.Fault{}
	})
	c, err := k.create(0)
	if err != nil || c.Phase != meta.CheckpointFailed || !strings.Contains(c.Error, "--object-store") {
		t.Fatalf("%v %+v", err, c)
	}
	k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
	k.mustCreate()
}

// Whoever is restarted while a checkpoint runs, it ends, and the next one is whole.
func TestCheckpointsSurviveRestarts(t *testing.T) {
	t.Parallel()
	for _, who := range []string{"uploader", "coordinator", "leader"} {
		t.Run(who, func(t *testing.T) {
			k := newCheckpointKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) { o.CheckpointTimeout = 10 * time.Second }})
			k.mustWrite(k.put("a", "1"))
			var once sync.Once
			entered, release := make(chan struct{}), make(chan struct{})
			k.faults(func(op fault.Op, key string) fault.Fault {
				stop := op == fault.OpPut && strings.Contains(key, "_metadata") == (who == "coordinator")
				if stop {
					once.Do(func() {
						close(entered)
						<-release
					})
				}
				return fault.Fault{}
			})
			asked := k.Leader(1)
			announced := make(chan *cluster.CheckpointInfo, 1)
			ended := make(chan error, 1)
			go func() {
				ended <- k.Node(asked).CreateCheckpoint(context.Background(), func(c *cluster.CheckpointInfo) error {
					select {
					case announced <- c:
					default:
					}
					return nil
				})
			}()
			c := <-announced
			<-entered
			victim := asked
			switch who {
			case "uploader":
				victim = k.index(c.Shards[0].Uploader)
			case "coordinator":
				victim = k.Leader(base.SystemGroup)
			}
			// The store hangs until the node is ending.
			go func() {
				time.AfterFunc(50*time.Millisecond, func() { close(release) })
			}()
			k.Restart(victim)
			<-ended
			k.Eventually("the checkpoint has ended", func() error {
				got, err := k.Node(k.Running()[0]).Checkpoint(k.ctx(), c.Number)
				if err == nil && !got.Ended() {
					err = fmt.Errorf("it is %s", got.Phase)
				}
				return err
			})
			k.Eventually("the next checkpoint completes", func() error {
				c, err := k.create(k.Running()[0])
				if err == nil && c.Phase != meta.CheckpointCompleted {
					err = errors.New(c.Error)
				}
				return err
			})
			last, err := k.Node(k.Running()[0]).Checkpoints(k.ctx())
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range last.Checkpoints {
				if c.Phase != meta.CheckpointCompleted {
					continue
				}
				found, err := k.Node(k.Running()[0]).VerifyCheckpoint(k.ctx(), c.Number, false, nil)
				if err != nil || len(found.Bad) > 0 {
					t.Errorf("checkpoint %d: %v %+v", c.Number, err, found)
				}
			}
		})
	}
}

func (k *checkpointKit) index(id base.NodeID) int {
	for i := range 5 {
		if testcluster.ID(i) == id {
			return i
		}
	}
	k.t.Fatalf("no node %s", id)
	return 0
}

func TestAutomaticCheckpoints(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) {
		o.CheckpointInterval, o.CheckpointRetain = 100*time.Millisecond, 2
	}})
	k.mustWrite(k.put("a", "1"))
	k.Eventually("three checkpoints were made and two are kept", func() error {
		list, err := k.Node(0).Checkpoints(k.ctx())
		if err != nil {
			return err
		}
		completed := 0
		for _, c := range list.Checkpoints {
			if c.Phase == meta.CheckpointCompleted && c.Automatic {
				completed++
			}
		}
		if n := len(list.Checkpoints); n == 0 || list.Checkpoints[n-1].Number < 4 || completed != 2 {
			return fmt.Errorf("%d checkpoints, %d completed", n, completed)
		}
		return nil
	})
}

func TestCheckpointsWithoutAStoreAreRefused(t *testing.T) {
	k := newKit(t, testcluster.Options{Nodes: 1})
	err := k.Node(0).CreateCheckpoint(k.ctx(), func(*cluster.CheckpointInfo) error { return nil })
	if !errors.Is(err, base.ErrUnsupported) || !strings.Contains(err.Error(), "--object-store") {
		t.Errorf("%v", err)
	}
}

// A process that has lost its data directory, and so belongs to no cluster, is not
// the node of its name: nobody waits for it to upload a shard.
func TestNodeWithoutItsDirectoryUploadsNothing(t *testing.T) {
	t.Parallel()
	g := &rumour{nodes: 3}
	k := newCheckpointKit(t, testcluster.Options{Shards: 1, Engine: "mem", Configure: func(_ int, o *cluster.Options) { o.Gossip = g }})
	k.mustWrite(k.put("k", "v"))
	lost := k.mustCreate().Shards[0].Uploader
	k.Stop(k.index(lost))
	g.unbound.Store(&lost)
	top, err := k.Node(k.Running()[0]).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range top.Nodes {
		if n.Alive == (n.ID == lost) {
			t.Errorf("node %s is alive: %v", n.ID, n.Alive)
		}
	}
	k.Eventually("another node uploads", func() error { // it may have led
		c, err := k.create(k.Running()[0])
		if err == nil && (c.Phase != meta.CheckpointCompleted || c.Shards[0].Uploader == lost) {
			t.Fatalf("%+v", c)
		}
		return err
	})
}
