package cluster_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/raftfsm"
)

// rollingKit is a cluster of which every key is followed through rollbacks.
type rollingKit struct {
	*router
	keys []string
	// saved is what the keys held at each checkpoint.
	saved map[uint64][]string
	round int
}

func newRollingKit(t *testing.T, o testcluster.Options) *rollingKit {
	t.Helper()
	if o.Shards == 0 {
		o.Shards = 2
	}
	o.KeyGroups = 16
	configure := o.Configure
	o.Configure = func(i int, opts *cluster.Options) {
		calm(i, opts)
		if configure != nil {
			configure(i, opts)
		}
	}
	k := newCheckpointKit(t, o)
	return &rollingKit{router: newRouter(k), keys: restoreKeys(10), saved: map[uint64][]string{}}
}

// checkpoint takes one and notes what it holds.
func (k *rollingKit) checkpoint() uint64 {
	k.t.Helper()
	c := k.mustCreate()
	k.saved[c.Number] = k.contents(k.keys)
	return c.Number
}

func (k *rollingKit) more() {
	k.t.Helper()
	k.round++
	k.change(k.keys, k.round)
}

// back rolls the cluster back by way of a node and returns how it ended.
func (k *rollingKit) back(node int, number uint64, each func(*cluster.RollbackInfo)) (*cluster.RollbackInfo, error) {
	var last *cluster.RollbackInfo
	err := k.Node(node).Rollback(k.ctx(), cluster.RollbackRequest{Checkpoint: number, Timeout: time.Minute}, func(i *cluster.RollbackInfo) error {
		last = i
		if each != nil {
			each(i)
		}
		return nil
	})
	return last, err
}

// renew learns the topology after a rollback.
func (k *rollingKit) renew(than base.Incarnation) {
	k.t.Helper()
	k.Eventually("the new incarnation is known", func() error {
		k.router = newRouter(k.checkpointKit)
		if k.top.Incarnation <= than {
			return fmt.Errorf("incarnation %d", k.top.Incarnation)
		}
		return nil
	})
}

// mustBack rolls back and demands that all is as it was at the checkpoint.
func (k *rollingKit) mustBack(number uint64) {
	k.t.Helper()
	was := k.top.Incarnation
	info, err := k.back(k.Running()[0], number, nil)
	if err != nil || info.Phase != meta.PhaseDone {
		k.t.Fatalf("%v, %+v", err, info)
	}
	k.renew(was)
	k.holds(number)
}

func (k *rollingKit) holds(number uint64) {
	k.t.Helper()
	if got := k.contents(k.keys); !slices.Equal(got, k.saved[number]) {
		k.t.Fatalf("rolled back to checkpoint %d:\n%q\nwant\n%q", number, got, k.saved[number])
	}
	k.agree()
}

// left are the directories that rollbacks have on the disk of a node.
func (k *rollingKit) left(node int) []string {
	k.t.Helper()
	all, err := filepath.Glob(filepath.Join(k.Dir(node), "groups", "*", "*", "rollback-*"))
	if err != nil {
		k.t.Fatal(err)
	}
	return all
}

func (k *rollingKit) nothingLeft() {
	k.t.Helper()
	k.Eventually("nothing of the rollback is left", func() error {
		for _, i := range k.Running() {
			if left := k.left(i); len(left) > 0 {
				return fmt.Errorf("node %d has %q", i, left)
			}
		}
		return nil
	})
}

// The cluster is what it was at the checkpoint, in a new incarnation, on all
// replicas, and goes on from there: writes, lists, restarts, checkpoints, further
// rollbacks, also to an older checkpoint and to one that was taken since.
func TestRollbackOfTheLiveCluster(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newRollingKit(t, testcluster.Options{Engine: engine, Configure: func(_ int, o *cluster.Options) { o.CheckpointRetain = 5 }})
		k.more()
		first := k.checkpoint()
		k.more()
		k.more()
		second := k.checkpoint()
		k.more()

		old, sequence := *k.router, k.update(k.put("key-0", "lost")).Token.Sequence
		k.mustBack(second)
		k.nothingLeft()
		if k.top.Incarnation != old.top.Incarnation+1 || k.shardOf("key-0").Epoch != old.shardOf("key-0").Epoch+1 {
			t.Errorf("incarnation %d epoch %d", k.top.Incarnation, k.shardOf("key-0").Epoch)
		}
		k.refusesTheOld(&old, second)
		if token := k.update(k.put("key-0", "new")).Token; token.Sequence <= sequence || token.Incarnation != k.top.Incarnation {
			t.Errorf("the token is %+v, the sequence was %d", token, sequence)
		}
		k.more()
		if l := k.content(k.keys[0]); !strings.Contains(l, `"e1" "f1" "e2" "f2" "e3" "f3" "e5" "f5"`) {
			t.Errorf("the list does not go on: %s", l)
		}
		third := k.checkpoint()
		k.more()
		k.mustBack(first)
		k.mustBack(third)
		for _, i := range k.Running() {
			k.Restart(i)
		}
		k.WaitReady()
		k.holds(third)
		k.more()
		k.agree()
	})
}

// refusesTheOld: what still has the incarnation before the rollback gets nothing.
func (k *rollingKit) refusesTheOld(old *router, number uint64) {
	k.t.Helper()
	want := fmt.Sprintf("rolled back to checkpoint %d", number)
	check := func(what string, err error) {
		k.t.Helper()
		var e *base.Error
		if !errors.Is(err, base.ErrIncarnation) || !errors.As(err, &e) || e.Hint != want {
			k.t.Errorf("%s of the old incarnation: %v", what, err)
		}
	}
	route := old.routeOf("key-0")
	leader := k.Node(k.Leader(route.Group))
	done := make(chan raftfsm.Result, 1)
	leader.Submit(k.ctx(), route, k.outsideOfSessions([]state.Mutation{k.put("key-0", "late")}), func(r raftfsm.Result) { done <- r })
	if res := <-done; res.Err == nil {
		k.t.Error("a write of the old incarnation was applied")
	} else {
		check("a write", res.Err)
	}
	_, err := leader.Read(k.ctx(), &cluster.ReadRequest{Route: route, Queries: []state.Query{{State: k.values, Kind: state.QueryGet, Key: []byte("key-0")}}})
	check("a read", err)
	leader.Submit(k.ctx(), route, k.request(1, k.put("key-0", "late")), func(r raftfsm.Result) { done <- r })
	res := <-done
	check("a write in a session", res.Failure())
	// The session has ended too: under the new incarnation it is not known.
	route = k.routeOf("key-0")
	req := k.request(2, k.put("key-0", "late"))
	leader.Submit(k.ctx(), route, req, func(r raftfsm.Result) { done <- r })
	if res := <-done; !errors.Is(res.Failure(), base.ErrSessionEnded) {
		k.t.Errorf("a write in an old session: %v", res.Failure())
	}
}

// What is acknowledged while a rollback comes is either of the old incarnation and
// gone or refused: nothing that a client was told survives in the new one.
func TestRollbackUnderWrites(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Engine: "mem"})
	k.more()
	n := k.checkpoint()
	// The writer has what it needs for itself: k learns a new topology beside it.
	stop, old, keys := make(chan struct{}), *k.router, k.keys
	var wg sync.WaitGroup
	var acknowledged, refused int
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			key := keys[i%len(keys)]
			route := old.routeOf(key)
			done := make(chan raftfsm.Result, 1)
			for _, node := range old.Running() {
				if old.Node(node).Leads(route.Group) {
					old.Node(node).Submit(t.Context(), route, old.outsideOfSessions([]state.Mutation{old.put(key, "during"), old.appendTo(key, "x")}), func(r raftfsm.Result) { done <- r })
					if res := <-done; res.Failure() == nil {
						acknowledged++
					} else {
						refused++
					}
					break
				}
			}
		}
	})
	k.Eventually("writes are acknowledged", func() error {
		if k.value0() != "during" {
			return errors.New("none")
		}
		return nil
	})
	info, err := k.back(0, n, nil)
	if err != nil || info.Phase != meta.PhaseDone {
		t.Fatalf("%v, %+v", err, info)
	}
	k.renew(old.top.Incarnation)
	k.holds(n)
	close(stop)
	wg.Wait()
	k.holds(n)
	if acknowledged == 0 || refused == 0 {
		t.Errorf("%d writes were acknowledged, %d refused", acknowledged, refused)
	}
}

func (k *rollingKit) value0() string {
	k.t.Helper()
	route := k.routeOf(k.keys[0])
	reply, err := k.Node(k.Leader(route.Group)).Read(k.ctx(), &cluster.ReadRequest{Route: route, Queries: []state.Query{{State: k.values, Kind: state.QueryGet, Key: []byte(k.keys[0])}}})
	if err != nil || len(reply.Answers) == 0 {
		return ""
	}
	return string(reply.Answers[0].Value)
}

// A follower that was away for the whole rollback is rebuilt and then holds the
// same; so is one that comes back in the midst of it.
func TestRollbackWithoutAFollower(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"away", "back-in-the-midst"} {
		t.Run(name, func(t *testing.T) {
			k := newRollingKit(t, testcluster.Options{Engine: "rocks"})
			k.more()
			n := k.checkpoint()
			k.more()
			k.Stop(2)
			was, started := k.top.Incarnation, false
			info, err := k.back(0, n, func(i *cluster.RollbackInfo) {
				if name == "back-in-the-midst" && i.Phase == meta.PhaseRollbackSwap && !started {
					started = true
					k.Start(2)
				}
			})
			if err != nil || info.Phase != meta.PhaseDone {
				t.Fatalf("%v, %+v", err, info)
			}
			k.renew(was)
			k.more()
			if !started {
				k.Start(2)
			}
			k.WaitReady()
			k.agree()
			k.mustBack(n) // by now with all three
		})
	}
}

// In whatever phase a leader goes, or a node restarts, the rollback goes on.
func TestRollbackGoesOnThroughChanges(t *testing.T) {
	t.Parallel()
	phases := []string{meta.PhaseRollbackPrepare, meta.PhaseRollbackFence, meta.PhaseRollbackSwap, meta.PhaseRollbackOpen}
	for _, what := range []string{"transfer", "restart"} {
		for _, phase := range phases {
			t.Run(what+"-in-"+phase, func(t *testing.T) {
				k := newRollingKit(t, testcluster.Options{Engine: "mem"})
				k.more()
				n := k.checkpoint()
				k.more()
				was := k.top.Incarnation
				node := k.Leader(k.top.Shards[0].ID)
				by := (node + 1) % 3
				did := false
				info, err := k.back(by, n, func(i *cluster.RollbackInfo) {
					if i.Phase != phase || did {
						return
					}
					did = true
					if what == "restart" {
						k.Restart(node)
						return
					}
					if _, err := k.Node(by).TransferLeader(k.ctx(), k.top.Shards[0].ID, testcluster.ID((node+2)%3)); err != nil {
						t.Logf("handing over: %v", err) // it may be too late for it
					}
				})
				if err != nil || info.Phase != meta.PhaseDone || !did {
					t.Fatalf("%v, %+v, %t", err, info, did)
				}
				k.WaitReady()
				k.renew(was)
				k.holds(n)
				k.more()
				k.agree()
				k.nothingLeft()
			})
		}
	}
}

// While the object store is away the preparation waits, and says for what; it can
// be given up, which leaves nothing, or goes on.
func TestRollbackWaitsForTheObjectStore(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Engine: "mem"})
	k.more()
	n := k.checkpoint()
	k.more()
	now := k.contents(k.keys)
	for _, abort := range []bool{true, false} {
		k.faults(func(op fault.Op, _ string) fault.Fault {
			return fault.Fault{Err: fmt.Errorf("the store is away: %w", base.ErrObjectStore)}
		})
		was, waited := k.top.Incarnation, false
		info, err := k.back(0, n, func(i *cluster.RollbackInfo) {
			if waited || len(i.Shards) == 0 || !strings.Contains(i.Shards[0].Problem, "the store is away") {
				return
			}
			waited = true
			if i.Phase != meta.PhaseRollbackPrepare {
				t.Errorf("in the phase %s", i.Phase)
			}
			if err := k.Node(1).DeleteCheckpoint(k.ctx(), n); !errors.Is(err, base.ErrConflict) {
				t.Errorf("deleting the checkpoint: %v", err)
			}
			if _, err := k.create(1); !errors.Is(err, base.ErrConflict) {
				t.Errorf("a checkpoint beside it: %v", err)
			}
			if st, err := k.Node(1).Status(k.ctx()); err != nil || !strings.Contains(fmt.Sprint(st.Problems), "rolling the cluster back to checkpoint") || !strings.Contains(fmt.Sprint(st.Problems), "the store is away") {
				t.Errorf("the status is %v, %+v", err, st.Problems)
			}
			if !abort {
				k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
				return
			}
			if got, err := k.Node(1).AbortRollback(k.ctx()); err != nil || !got.Failed() {
				t.Errorf("giving it up: %v, %+v", err, got)
			}
		})
		if err != nil || !waited {
			t.Fatalf("%v, waited: %t", err, waited)
		}
		if abort {
			if !info.Failed() || !strings.Contains(info.Error, "given up") {
				t.Errorf("%+v", info)
			}
			if got := k.contents(k.keys); !slices.Equal(got, now) {
				t.Errorf("after it was given up\n%q\nwant\n%q", got, now)
			}
			k.nothingLeft()
			if _, err := k.Node(0).AbortRollback(k.ctx()); !errors.Is(err, base.ErrNotFound) {
				t.Errorf("giving up nothing: %v", err)
			}
			continue
		}
		if info.Phase != meta.PhaseDone {
			t.Fatalf("%+v", info)
		}
		k.renew(was)
		k.holds(n)
	}
}

// A checkpoint that is damaged is refused by the name of the object, before
// anything has changed.
func TestRollbackToADamagedCheckpoint(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Engine: "mem"})
	k.more()
	n := k.checkpoint()
	k.more()
	now := k.contents(k.keys)
	var key string
	for o, err := range k.objects.List(t.Context(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(o.Key, "checkpoints/") && o.Size > 100 {
			key = o.Key
		}
	}
	for _, name := range []string{"damaged", "missing"} {
		k.faults(func(op fault.Op, of string) fault.Fault {
			if of != key || op != fault.OpGet {
				return fault.Fault{}
			}
			if name == "missing" {
				return fault.Fault{Err: fmt.Errorf("object %s: %w", key, base.ErrNotFound)}
			}
			return fault.Fault{Body: fault.Body{Kind: fault.BodyFlip, At: 30}}
		})
		info, err := k.back(0, n, nil)
		if err != nil || !info.Failed() || !strings.Contains(info.Error, "shard") {
			t.Fatalf("%s: %v, %+v", name, err, info)
		}
		t.Log(info.Error)
		k.nothingLeft()
		if got := k.contents(k.keys); !slices.Equal(got, now) {
			t.Errorf("%s: after it failed\n%q\nwant\n%q", name, got, now)
		}
	}
	k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
	k.mustBack(n)
}

func TestRollbackIsPlannedAndRefused(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Engine: "mem"})
	k.more()
	n := k.checkpoint()
	plan, err := k.Node(1).PlanRollback(k.ctx(), n)
	if err != nil || plan.Checkpoint != n || plan.Incarnation != k.top.Incarnation+1 || len(plan.Shards) != 2 || plan.Shards[0].Bytes <= 0 ||
		len(plan.Shards[0].Replicas) != 3 || plan.Shards[0].Leader == "" {
		t.Errorf("%v, %+v", err, plan)
	}
	if _, err := k.Node(0).PlanRollback(k.ctx(), 99); !errors.Is(err, base.ErrNotFound) {
		t.Error(err)
	}
	if _, err := k.back(0, 99, nil); !errors.Is(err, base.ErrNotFound) {
		t.Error(err)
	}
	info, err := k.Node(0).Checkpoint(k.ctx(), n)
	if err != nil {
		t.Fatal(err)
	}
	metadata, manifest, object := k.parts(info)
	for _, key := range []string{metadata, manifest, object} {
		back := k.replace(key, func([]byte) []byte { return nil })
		if _, err := k.Node(0).PlanRollback(k.ctx(), n); !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), key) {
			t.Errorf("without %s: %v", key, err)
		}
		back()
	}
	if left := k.left(0); len(left) > 0 {
		t.Errorf("a plan left %q", left)
	}
	if _, err := os.Stat(k.Dir(0)); err != nil {
		t.Fatal(err)
	}
}

// A node that cannot reach the object store is not prepared: the others do it, also
// if it leads when the shards are to go back, and it is rebuilt from them.
func TestRollbackIsLeftToWhoIsPrepared(t *testing.T) {
	t.Parallel()
	var away atomic.Bool
	k := newRollingKit(t, testcluster.Options{Engine: "mem", Configure: func(i int, o *cluster.Options) {
		if i == 2 {
			o.Objects = fault.Wrap(o.Objects, func(fault.Op, string) fault.Fault {
				if away.Load() {
					return fault.Fault{Err: fault.Trouble("away")}
				}
				return fault.Fault{}
			})
		}
	}})
	k.more()
	n := k.checkpoint()
	k.more()
	away.Store(true)
	was, handed := k.top.Incarnation, 0
	info, err := k.back(0, n, func(i *cluster.RollbackInfo) {
		if i.Phase != meta.PhaseRollbackFence || handed > 0 {
			return
		}
		for _, s := range k.top.Shards {
			if _, err := k.Node(0).TransferLeader(k.ctx(), s.ID, testcluster.ID(2)); err == nil {
				handed++
			} else {
				t.Log(err)
			}
		}
	})
	if err != nil || info.Phase != meta.PhaseDone {
		t.Fatalf("%v, %+v", err, info)
	}
	if handed == 0 {
		t.Error("nobody was handed the office")
	}
	k.renew(was)
	k.WaitReady()
	k.holds(n)
	k.more()
	k.agree()
	k.Eventually("the third node is rebuilt", func() error {
		if k.generation(2) < 2 {
			return fmt.Errorf("generation %d", k.generation(2))
		}
		return nil
	})
}

// With local links a rollback needs no object store: every replica has kept what it
// held. What is kept goes with the checkpoint, and a replica that has nothing fetches.
func TestRollbackFromLocalLinks(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newRollingKit(t, testcluster.Options{Engine: engine, Configure: func(_ int, o *cluster.Options) {
			o.CheckpointLocalLinks, o.CheckpointRetain = true, 2
		}})
		k.more()
		k.checkpoint()
		k.more()
		n := k.checkpoint()
		k.more()
		k.kept(n-1, n)
		k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{Err: fault.Trouble("away")} })
		k.mustBack(n)
		k.nothingLeft()
		for _, i := range k.Running() {
			k.Restart(i)
		}
		k.WaitReady()
		k.more()
		k.mustBack(n - 1) // from what was kept before the rollback
		k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
		k.more()
		next := k.checkpoint()
		k.kept(n, next)
		for i := range 3 {
			for _, dir := range k.linked(i) {
				if i == 2 && strings.HasSuffix(dir, fmt.Sprint("linked-", next)) {
					if err := os.RemoveAll(dir); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		k.more()
		k.mustBack(next)
	})
}

// linked are the directories in which a node keeps what checkpoints hold.
func (k *rollingKit) linked(node int) []string {
	k.t.Helper()
	all, err := filepath.Glob(filepath.Join(k.Dir(node), "groups", "*", "*", "linked-*"))
	if err != nil {
		k.t.Fatal(err)
	}
	return all
}

// kept demands that every replica keeps these checkpoints, whole, and no others.
func (k *rollingKit) kept(numbers ...uint64) {
	k.t.Helper()
	k.Eventually("the checkpoints are kept here", func() error {
		for _, i := range k.Running() {
			all := k.linked(i)
			for _, dir := range all {
				if _, err := os.Stat(filepath.Join(dir, "MANIFEST")); err != nil {
					return err
				}
				if !slices.ContainsFunc(numbers, func(n uint64) bool { return strings.HasSuffix(dir, fmt.Sprint("linked-", n)) }) {
					return fmt.Errorf("node %d has %s", i, dir)
				}
			}
			if len(all) != len(numbers)*len(k.top.Shards) {
				return fmt.Errorf("node %d has %q", i, all)
			}
		}
		return nil
	})
}
