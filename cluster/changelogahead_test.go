package cluster_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/raftfsm"
)

func storingAhead(i int, o *cluster.Options) {
	inChangelogMode(i, o)
	o.ChangelogSegmentBytes, o.ChangelogSegmentAge = 4<<10, 50*time.Millisecond
}

// fill writes some segments to every shard.
func (k *rollingKit) fill() {
	k.t.Helper()
	k.more()
	for _, key := range k.keys {
		k.update(k.put(key, fmt.Sprint(k.round, strings.Repeat("x", 2<<10))))
	}
}

// ahead waits until the uploader of each shard has stored so many segments since the
// last checkpoint.
func (k *rollingKit) ahead(segments int) {
	k.t.Helper()
	k.Eventually("the log is stored between checkpoints", func() error {
		for _, s := range k.top.Shards {
			most := -1
			for _, i := range k.Running() {
				if n, _, ok := k.Node(i).ChangelogAhead(s.ID); ok {
					most = max(most, n)
				}
			}
			if most < segments {
				return fmt.Errorf("%d segments of shard %s", most, s.ID)
			}
		}
		return nil
	})
}

// fillAhead writes, and waits until the most of it is stored.
func (k *rollingKit) fillAhead() {
	k.t.Helper()
	k.fill()
	k.ahead(1)
}

// What comes together between checkpoints is stored before there is a barrier: the
// checkpoint finds it stored, registers it, and is what the cluster was. Savepoints
// beside it change nothing.
func TestTheLogIsStoredBetweenCheckpoints(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newRollingKit(t, testcluster.Options{Engine: engine, Configure: storingAhead})
		k.more()
		k.mustLog(0)
		var before, late atomic.Int64
		var announced atomic.Bool
		k.faults(func(op fault.Op, _ string) fault.Fault {
			if op == fault.OpPut && announced.Load() {
				late.Add(1)
			} else if op == fault.OpPut {
				before.Add(1)
			}
			return fault.Fault{}
		})
		k.fillAhead()
		k.save()
		k.fill()
		k.fill()
		k.ahead(3)
		k.Eventually("a small rest is left", func() error {
			for _, s := range k.top.Shards {
				for _, i := range k.Running() {
					if _, lag, ok := k.Node(i).ChangelogAhead(s.ID); ok && lag > 400 {
						return fmt.Errorf("%d bytes of shard %s", lag, s.ID)
					}
				}
			}
			return nil
		})
		announced.Store(true)
		number := k.mustLog(2)
		v, err := k.Node(0).Checkpoint(k.ctx(), number)
		if err != nil {
			t.Fatal(err)
		}
		if before.Load() < 6 || late.Load() > 5 {
			t.Errorf("%d objects were stored between the checkpoints and %d for the last one: at most a tail and a manifest of each shard, and _metadata", before.Load(), late.Load())
		}
		for _, s := range v.Shards {
			if s.Prior == 0 || s.PriorObjects < 3 || s.Report.Segments < s.PriorObjects || s.Report.NewBytes < 4<<10 {
				t.Errorf("%+v, %+v", s, s.Report)
			}
		}
		k.fillAhead()
		k.mustLog(2)
		k.fill()
		k.mustBack(number)
		k.fill()
		last := k.mustLog(0)
		k.fillAhead()
		k.mustLog(2)
		k.mustBack(last)
	})
}

// A store that refuses what is stored between checkpoints holds up no write, is not
// asked all the time, and the log is stored once it is back.
func TestAStoreThatRefusesTheLogHoldsUpNothing(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Nodes: 1, Engine: "mem", Configure: storingAhead})
	k.more()
	k.mustLog(0)
	var puts atomic.Int64
	k.faults(func(op fault.Op, _ string) fault.Fault {
		if op == fault.OpPut {
			puts.Add(1)
			return fault.Fault{Err: fault.Trouble("the store is away")}
		}
		return fault.Fault{}
	})
	k.fill()
	k.Eventually("the store is asked", func() error {
		if puts.Load() == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	was := puts.Load()
	start := time.Now()
	for range 4 {
		k.fill()
	}
	// One pause of at least half a second after each refusal, longer each time; the
	// put is repeated by no one here.
	if took, asked := time.Since(start), puts.Load()-was; asked > 2+int64(took/(500*time.Millisecond)) {
		t.Errorf("the store was asked %d times in %s", asked, took)
	}
	if n, lag, ok := k.Node(0).ChangelogAhead(k.top.Shards[0].ID); !ok || n != 0 || lag < 20<<10 {
		t.Errorf("%d segments are stored, %d bytes are not, %v", n, lag, ok)
	}
	k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
	k.ahead(3)
	k.fill()
	number := k.mustLog(2)
	k.fill()
	k.mustBack(number)
}

// aheadCase is what happens between two checkpoints of mode changelog, while the log is
// stored; logs says whether the next one goes on with it.
var aheadCases = []struct {
	name string
	do   func(k *rollingKit)
	logs bool
}{
	{"the leader changes", func(k *rollingKit) {
		for _, s := range k.top.Shards {
			old := k.Leader(s.ID)
			k.Eventually("another node leads", func() error {
				if _, err := k.Node(old).TransferLeader(k.ctx(), s.ID, testcluster.ID((old+1)%3)); err != nil {
					return err
				}
				if k.Leader(s.ID) == old {
					return errors.New("the old one does")
				}
				return nil
			})
		}
	}, true},
	{"the uploader restarts", func(k *rollingKit) {
		for _, i := range k.Running() {
			k.Restart(i)
		}
		k.WaitReady()
	}, false},
	{"a state is dropped", func(k *rollingKit) {
		d := state.Declaration{Keyspace: "kit", Name: "gone", Kind: state.KindValue, KeyType: keygroup.String, ValueType: keygroup.String}
		gone, _, rev, err := k.Node(0).Declare(k.ctx(), d)
		if err != nil {
			k.t.Fatal(err)
		}
		k.seen = max(k.seen, rev)
		for _, s := range k.top.Shards {
			m := k.put(k.keyOf(s.ID), "gone")
			m.State = gone.ID
			k.update(m)
		}
		if _, err := k.Node(0).Drop(k.ctx(), "kit", "gone"); err != nil {
			k.t.Fatal(err)
		}
		k.Eventually("every replica has dropped it", func() error {
			for _, s := range k.top.Shards {
				for _, i := range k.Running() {
					if k.Node(i).DroppedStates(s.ID) == 0 {
						return fmt.Errorf("shard %s on node %d has not", s.ID, i)
					}
				}
			}
			return nil
		})
	}, false},
	{"the log is cut behind what is stored", func(k *rollingKit) {
		for _, s := range k.top.Shards {
			for _, i := range k.Running() {
				written := time.Time{}
				k.Eventually("all is stored", func() error {
					if n, lag, ok := k.Node(i).ChangelogAhead(s.ID); ok && lag > 0 {
						if time.Since(written) > time.Second { // a small rest is left for the barrier
							k.update(k.put(k.keyOf(s.ID), strings.Repeat("y", 1<<10)))
							written = time.Now()
						}
						return fmt.Errorf("%d segments, %d bytes are left", n, lag)
					}
					return nil
				})
				if err := k.Node(i).CutShardLog(k.ctx(), s.ID); err != nil {
					k.t.Fatal(err)
				}
			}
		}
	}, true},
	{"the log is cut in front of what is stored", func(k *rollingKit) {
		k.faults(func(op fault.Op, _ string) fault.Fault {
			if op == fault.OpPut {
				return fault.Fault{Err: fault.Trouble("the store is away")}
			}
			return fault.Fault{}
		})
		k.fill()
		for _, s := range k.top.Shards {
			for _, i := range k.Running() {
				if err := k.Node(i).CutShardLog(k.ctx(), s.ID); err != nil {
					k.t.Fatal(err)
				}
			}
		}
		k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
	}, false},
}

// keyOf is a key of a shard.
func (k *rollingKit) keyOf(g base.GroupID) string {
	for _, key := range k.keys {
		if k.shardOf(key).ID == g {
			return key
		}
	}
	k.t.Fatalf("no key in shard %s", g)
	return ""
}

// Whatever happens between two checkpoints while the log is stored, and while writes
// come, the next one is what the cluster was at its barrier, and no segment of a
// base that was retired is missed: with one checkpoint retained, in a cluster of
// another number of shards.
func TestChangelogCheckpointsUnderChanges(t *testing.T) {
	t.Parallel()
	for _, c := range aheadCases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := newRollingKit(t, testcluster.Options{Engine: "mem", Configure: func(i int, o *cluster.Options) {
				storingAhead(i, o)
				o.CheckpointRetain = 1
			}})
			k.more()
			k.mustLog(0)
			k.fillAhead()
			k.mustLog(2)
			k.fillAhead()
			c.do(k)
			k.fill()
			counted := k.count("busy")
			info := k.mustCreate()
			k.saved[info.Number] = k.contents(k.keys)
			if got := logged(info); (got == 2) != c.logs || got == 1 {
				t.Fatalf("%d shards with a log: %+v", got, info)
			}
			low, high := counted()
			k.fillAhead()
			number := k.mustLog(2)
			k.whole(fmt.Sprintf("%s/checkpoints/%010d/_metadata", k.top.Cluster, number))
			if low >= high {
				t.Errorf("nothing was written beside the checkpoint: %d to %d", low, high)
			}
			next := k.sharing(testcluster.Options{Nodes: 1, Engine: "mem", Shards: 3})
			r := &rollingKit{router: next.restored(fmt.Sprintf("%s/%d", k.top.Cluster, number)), keys: k.keys, saved: k.saved}
			r.holds(number)
			k.fill()
			k.mustBack(number)
		})
	}
}

// count writes ascending numbers to a key until the function that it returns is called,
// which gives the last one that was acknowledged before that, and the last of all.
func (k *rollingKit) count(key string) func() (low, high int) {
	k.t.Helper()
	var acked atomic.Int64
	stop, ended := make(chan struct{}), make(chan struct{})
	route := k.routeOf(key)
	go func() {
		defer close(ended)
		for n := int64(1); ; {
			select {
			case <-stop:
				return
			default:
			}
			for _, i := range k.Running() {
				if !k.Node(i).Leads(route.Group) {
					continue
				}
				done := make(chan raftfsm.Result, 1)
				k.Node(i).Submit(k.ctx(), route, k.outsideOfSessions([]state.Mutation{k.put(key, strconv.FormatInt(n, 10))}), func(r raftfsm.Result) { done <- r })
				if res := <-done; res.Err == nil {
					acked.Store(n)
					n++
				}
			}
		}
	}()
	low := int(acked.Load())
	return func() (int, int) {
		close(stop)
		<-ended
		return low, int(acked.Load())
	}
}

// rumour is a gossip that takes all nodes but one for living, and one for a process
// without a cluster.
type rumour struct {
	dead, unbound atomic.Pointer[base.NodeID]
	nodes         int
}

func (g *rumour) Members() (out []cluster.GossipMember) {
	for i := range g.nodes {
		if dead := g.dead.Load(); dead == nil || *dead != testcluster.ID(i) {
			unbound := g.unbound.Load()
			out = append(out, cluster.GossipMember{Node: testcluster.ID(i), Unbound: unbound != nil && *unbound == testcluster.ID(i)})
		}
	}
	return out
}

// An uploader that is lost between two checkpoints takes its lineage with it: another
// one stores files, and goes on from these.
func TestAnotherUploaderStoresFiles(t *testing.T) {
	t.Parallel()
	g := &rumour{nodes: 3}
	k := newRollingKit(t, testcluster.Options{Shards: 1, Engine: "mem", Configure: func(i int, o *cluster.Options) {
		storingAhead(i, o)
		o.CheckpointTimeout, o.Gossip = 5*time.Second, g
	}})
	k.more()
	k.mustLog(0)
	k.fillAhead()
	second := k.mustLog(1)
	k.fillAhead()
	v, err := k.Node(0).Checkpoint(k.ctx(), second)
	if err != nil {
		t.Fatal(err)
	}
	old := k.index(v.Shards[0].Uploader)
	k.Stop(old)
	dead := testcluster.ID(old)
	g.dead.Store(&dead)
	k.fill()
	var info *cluster.CheckpointInfo
	k.Eventually("a checkpoint without the uploader completes", func() error {
		c, err := k.create(k.Running()[0])
		if err != nil {
			return err
		}
		if c.Phase != meta.CheckpointCompleted {
			return fmt.Errorf("it is %s: %s", c.Phase, c.Error)
		}
		info = c
		return nil
	})
	k.saved[info.Number] = k.contents(k.keys)
	if s := info.Shards[0]; logged(info) != 0 || s.Uploader == testcluster.ID(old) || s.Prior != 0 {
		t.Fatalf("%+v", s)
	}
	k.fillAhead()
	k.Start(old)
	g.dead.Store(nil)
	k.WaitReady()
	number := k.mustLog(1)
	k.fill()
	k.mustBack(number)
	k.mustBack(info.Number)
}
