package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// checkpointed is a cluster of one node with some content and a checkpoint of it.
func checkpointed(t *testing.T) (k *checkpointKit, keys, want []string, c *cluster.CheckpointInfo) {
	t.Helper()
	k = newCheckpointKit(t, testcluster.Options{Nodes: 1, Shards: 3, KeyGroups: 12, Configure: calm})
	old := newRouter(k)
	keys = restoreKeys(12)
	old.change(keys, 1)
	return k, keys, old.contents(keys), k.mustCreate()
}

// parts are `_metadata`, a manifest and an object with files of a checkpoint.
func (k *checkpointKit) parts(c *cluster.CheckpointInfo) (metadata, manifest, object string) {
	k.t.Helper()
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	metadata = snapshot.MetadataKey(top.Cluster, c.Number)
	m, _, err := snapshot.ReadCheckpoint(k.ctx(), k.objects, metadata, [32]byte{})
	if err != nil {
		k.t.Fatal(err)
	}
	man, err := m.ReadManifest(k.ctx(), k.objects, &m.Shards[1])
	if err != nil {
		k.t.Fatal(err)
	}
	i := slices.IndexFunc(man.Files, func(f snapshot.File) bool { return f.Object != "" })
	return metadata, m.Shards[1].ManifestKey, man.Files[i].Object
}

// replace changes an object, or removes it, and returns what brings it back.
func (k *checkpointKit) replace(key string, change func([]byte) []byte) (back func()) {
	k.t.Helper()
	raw, err := objectstore.ReadAll(k.ctx(), k.objects, key, 1<<30)
	if err != nil {
		k.t.Fatal(err)
	}
	put := func(b []byte) {
		if err := k.objects.Delete(k.ctx(), key); err != nil {
			k.t.Fatal(err)
		}
		if b == nil {
			return
		}
		if err := k.objects.Put(k.ctx(), key, objectstore.Bytes(b)); err != nil {
			k.t.Fatal(err)
		}
	}
	put(change(slices.Clone(raw)))
	return func() { put(raw) }
}

// notFounded demands that an init has left no trace.
func (k *checkpointKit) notFounded() {
	k.t.Helper()
	for _, i := range k.Running() {
		if id := k.Node(i).Identity(); id.Cluster != "" || id.Founding != nil {
			k.t.Errorf("node %d belongs to cluster %s", i, id.Cluster)
		}
	}
}

// A checkpoint that is not whole is refused, its object by name, before anything
// is done: the nodes can be founded otherwise, or with it once it is whole.
func TestRestoreRefusesACheckpointThatIsNotWhole(t *testing.T) {
	t.Parallel()
	k, keys, want, c := checkpointed(t)
	second := k.mustCreate()
	metadata, manifest, object := k.parts(c)
	other, _, _ := k.parts(second)
	foreign, err := objectstore.ReadAll(k.ctx(), k.objects, other, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	next := k.sharing(testcluster.Options{Nodes: 1, Shards: 2, KeyGroups: 12})
	missing := func([]byte) []byte { return nil }
	short := func(b []byte) []byte { return b[:len(b)-1] }
	damaged := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	for _, bad := range []struct {
		name, key string
		change    func([]byte) []byte
		want      error
	}{
		{"no metadata", metadata, missing, base.ErrNotFound},
		{"short metadata", metadata, short, base.ErrConflict},
		{"damaged metadata", metadata, damaged, base.ErrConflict},
		{"metadata of another", metadata, func([]byte) []byte { return foreign }, base.ErrConflict},
		{"no manifest", manifest, missing, base.ErrConflict},
		{"short manifest", manifest, short, base.ErrConflict},
		{"damaged manifest", manifest, damaged, base.ErrConflict},
		{"no object", object, missing, base.ErrConflict},
		{"short object", object, short, base.ErrConflict},
	} {
		back := k.replace(bad.key, bad.change)
		for _, dry := range []bool{true, false} {
			spec := next.restoreSpec(c.URI)
			spec.DryRun = dry
			if _, err := next.Node(0).Init(next.ctx(), spec); !errors.Is(err, bad.want) || !strings.Contains(fmt.Sprint(err), bad.key) {
				t.Errorf("%s, dry %v: %v", bad.name, dry, err)
			}
		}
		next.notFounded()
		back()
	}
	if got := next.restored(c.URI).contents(keys); !slices.Equal(got, want) {
		t.Errorf("restored\n%q\nwant\n%q", got, want)
	}
}

func TestRestoreRefusesWhatDoesNotFitAndChangesNothing(t *testing.T) {
	t.Parallel()
	k, _, _, c := checkpointed(t)
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	odd, _, err := snapshot.ReadCheckpoint(k.ctx(), k.objects, snapshot.MetadataKey(top.Cluster, c.Number), [32]byte{})
	if err != nil {
		t.Fatal(err)
	}
	odd.Number, odd.Participants = 8, []snapshot.Participant{{ID: "a/b"}}
	if _, _, err := snapshot.StoreMetadata(k.ctx(), k.objects, odd); err != nil {
		t.Fatal(err)
	}
	next := k.sharing(testcluster.Options{Nodes: 3, Shards: 2, KeyGroups: 12})
	for _, bad := range []struct {
		name   string
		change func(*cluster.FoundSpec)
		want   error
		field  string
	}{
		{"another M", func(s *cluster.FoundSpec) { s.KeyGroups = 128 }, base.ErrConflict, "key_groups"},
		{"more shards than key groups", func(s *cluster.FoundSpec) { s.Shards = 13 }, base.ErrConflict, "shards"},
		{"another bucket", func(s *cluster.FoundSpec) { s.Restore = "s3://other/" + string(top.Cluster) + "/1" }, base.ErrInvalid, "restore"},
		{"out of the store", func(s *cluster.FoundSpec) { s.Restore = "../1" }, base.ErrInvalid, "restore"},
		{"no number", func(s *cluster.FoundSpec) { s.Restore = string(top.Cluster) + "/+1" }, base.ErrInvalid, "restore"},
		{"an object", func(s *cluster.FoundSpec) { s.Restore = c.Shards[0].Report.ManifestKey }, base.ErrNotFound, "restore"},
		{"no such checkpoint", func(s *cluster.FoundSpec) { s.Restore = string(top.Cluster) + "/9" }, base.ErrNotFound, "restore"},
		{"a name that nobody can have", func(s *cluster.FoundSpec) { s.Restore = string(top.Cluster) + "/8" }, base.ErrConflict, "restore"},
		{"no such cluster", func(s *cluster.FoundSpec) { s.Restore = "nobody/latest" }, base.ErrNotFound, "restore"},
	} {
		for _, node := range []int{0, 1} { // the founder, and one that passes it on
			spec := next.restoreSpec(c.URI)
			bad.change(&spec)
			_, err := next.Node(node).Init(next.ctx(), spec)
			var e *base.Error
			if !errors.Is(err, bad.want) || !errors.As(err, &e) || e.Field != bad.field && node == 0 {
				t.Errorf("%s: %v", bad.name, err)
			}
		}
	}
	next.notFounded()
	next.Found() // with nothing
}

// An init that is repeated, by whichever node and however it names the checkpoint,
// is the same; another is refused.
func TestRestoreAgainIsResumedAndAnotherIsRefused(t *testing.T) {
	t.Parallel()
	k, keys, want, c := checkpointed(t)
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	next := k.sharing(testcluster.Options{Nodes: 3, Shards: 2, KeyGroups: 12})
	r := next.restored(string(top.Cluster) + "/latest")
	if got := r.contents(keys); !slices.Equal(got, want) {
		t.Errorf("restored\n%q\nwant\n%q", got, want)
	}
	k.mustCreate()
	for _, name := range []string{c.URI, c.URI + "/_metadata", fmt.Sprint(top.Cluster, "/", c.Number), string(top.Cluster) + "/latest"} {
		for node := range 3 {
			reply, err := next.Node(node).Init(next.ctx(), next.restoreSpec(name))
			if err != nil || !reply.Resumed || reply.Phase != meta.PhaseDone || reply.Cluster != r.top.Cluster {
				t.Errorf("%s: %+v, %v", name, reply, err)
			}
		}
	}
	plain := next.Spec()
	for name, spec := range map[string]cluster.FoundSpec{"another": next.restoreSpec(fmt.Sprint(top.Cluster, "/2")), "nothing": plain} {
		if _, err := next.Node(0).Init(next.ctx(), spec); !errors.Is(err, base.ErrAlreadyFounded) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A plan says what would be done, of any node, and does nothing.
func TestRestorePlanSaysWhatWouldBeDone(t *testing.T) {
	t.Parallel()
	k, _, _, c := checkpointed(t)
	next := k.sharing(testcluster.Options{Nodes: 2, Shards: 2, KeyGroups: 12})
	spec := next.restoreSpec(c.URI)
	spec.DryRun = true
	for _, n := range []*cluster.Node{next.Node(1), k.Node(0)} { // k's node is not listed: its id is n1 as well
		if n == k.Node(0) {
			spec.Nodes = []cluster.FoundNode{{ID: "m1", RaftAddr: "m1:1"}, {ID: "m2", RaftAddr: "m2:1"}}
		}
		reply, err := n.Init(k.ctx(), spec)
		if err != nil || reply.Plan == nil {
			t.Fatalf("%+v, %v", reply, err)
		}
		p := reply.Plan
		if p.Number != c.Number || p.KeyGroups != 12 || p.Incarnation != 1 || len(p.Shards) != 2 || p.FetchBytes <= p.Bytes || p.Objects == 0 {
			t.Errorf("the plan is %+v", p)
		}
		hows := ""
		for _, s := range p.Shards {
			for _, f := range s.Sources {
				hows += f.How + " "
			}
			hows += "of " + s.Range.String() + " on " + fmt.Sprint(len(s.Nodes)) + ", "
		}
		// Three shards of 4 key groups, two of 6.
		if hows != "linked copied of [0,6) on 2, linked copied of [6,12) on 2, " {
			t.Errorf("the plan is %s", hows)
		}
	}
	next.notFounded()
	spec.Restore = ""
	if _, err := next.Node(0).Init(k.ctx(), spec); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a plan of nothing: %v", err)
	}
}

// While the store cannot be read the founding says so, and goes on afterwards; so
// it does when an object turns out to be damaged and is mended.
func TestRestoreWaitsForTheObjectStore(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"the store is down", "an object is damaged"} {
		t.Run(what, func(t *testing.T) {
			k, keys, want, c := checkpointed(t)
			_, _, object := k.parts(c)
			next := k.sharing(testcluster.Options{Nodes: 1, Shards: 2, KeyGroups: 12})
			says, back := "injected", func() {}
			if what == "an object is damaged" {
				back = k.replace(object, func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
				says = "wrong content"
			} else {
				next.faults(func(op fault.Op, key string) fault.Fault {
					if op == fault.OpGet && key == object {
						return fault.Fault{Err: fault.Trouble("down")}
					}
					return fault.Fault{}
				})
			}
			ctx, cancel := context.WithCancel(next.ctx())
			defer cancel()
			next.Eventually("the founding says what is wrong", func() error {
				reply, err := next.Node(0).Init(initCtx(t, 2*time.Second), next.restoreSpec(c.URI))
				if err != nil {
					return err
				}
				if reply.Phase != meta.PhaseFoundPlace || !strings.Contains(reply.Problem, says) || !strings.Contains(reply.Problem, object) || !strings.Contains(reply.Problem, "on node n1") {
					return fmt.Errorf("%+v", reply)
				}
				return ctx.Err()
			})
			// Nobody declares anything in between.
			if _, _, _, err := next.Node(0).Declare(next.ctx(), state.Declaration{Keyspace: "kit", Name: "new", KeyType: keygroup.String, Kind: state.KindValue, ValueType: keygroup.String}); !errors.Is(err, base.ErrNotReady) {
				t.Errorf("declaring meanwhile: %v", err)
			}
			back()
			next.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
			if got := next.restored(c.URI).contents(keys); !slices.Equal(got, want) {
				t.Errorf("restored\n%q\nwant\n%q", got, want)
			}
		})
	}
}

// A replica that could not be restored until the cluster served is rebuilt from
// its peers: the checkpoint may be gone by then.
func TestReplicaThatMissedTheRestoreIsRebuiltFromItsPeers(t *testing.T) {
	t.Parallel()
	k, keys, want, c := checkpointed(t)
	var blind atomic.Bool
	blind.Store(true)
	next := k.sharing(testcluster.Options{Nodes: 3, Shards: 1, KeyGroups: 12, Configure: func(i int, o *cluster.Options) {
		if i != 2 {
			return
		}
		o.Objects = fault.Wrap(k.objects, func(op fault.Op, key string) fault.Fault {
			if blind.Load() {
				return fault.Fault{Err: fault.Trouble("blind")}
			}
			return fault.Fault{}
		})
	}})
	next.Eventually("the cluster is founded", func() error {
		reply, err := next.Node(0).Init(next.ctx(), next.restoreSpec(c.URI))
		if err == nil && reply.Phase != meta.PhaseDone {
			err = fmt.Errorf("%+v", reply)
		}
		return err
	})
	blind.Store(false)
	for o, err := range k.objects.List(k.ctx(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		if err := k.objects.Delete(k.ctx(), o.Key); err != nil {
			t.Fatal(err)
		}
	}
	next.Eventually("the third node is rebuilt", func() error {
		if g := next.generation(2); g < 2 {
			return fmt.Errorf("generation %d", g)
		}
		if ok, why := next.Node(2).Ready(); !ok {
			return errors.New(why)
		}
		return nil
	})
	r := newRouter(next)
	if got := r.contents(keys); !slices.Equal(got, want) {
		t.Errorf("restored\n%q\nwant\n%q", got, want)
	}
	r.agree()
	own := next.mustCreate() // and nothing of the old one is needed
	if v, err := next.Node(0).VerifyCheckpoint(next.ctx(), own.Number, false, nil); err != nil || len(v.Bad) > 0 {
		t.Errorf("%+v, %v", v, err)
	}
}

// What belongs to the cluster that was checkpointed is refused by the one that
// was restored from it.
func TestRestoredClusterRefusesTheOldIncarnation(t *testing.T) {
	t.Parallel()
	k, keys, _, c := checkpointed(t)
	session := k.session
	r := k.sharing(testcluster.Options{Nodes: 1, Shards: 3, KeyGroups: 12}).restored(c.URI)
	route := r.routeOf(keys[0])
	leader := r.Node(r.Leader(route.Group))
	submit := func(route cluster.Route, req *raftfsm.Request) error {
		done := make(chan raftfsm.Result, 1)
		leader.Submit(r.ctx(), route, req, func(got raftfsm.Result) { done <- got })
		return (<-done).Err
	}
	old := route
	old.Incarnation--
	if err := submit(old, r.outsideOfSessions([]state.Mutation{r.put(keys[0], "x")})); !errors.Is(err, base.ErrIncarnation) {
		t.Errorf("a write: %v", err)
	}
	if _, err := leader.Read(r.ctx(), &cluster.ReadRequest{Route: old, Queries: []state.Query{{State: r.values, Kind: state.QueryGet, Key: []byte(keys[0])}}}); !errors.Is(err, base.ErrIncarnation) {
		t.Errorf("a read: %v", err)
	}
	req := r.outsideOfSessions([]state.Mutation{r.put(keys[0], "x")})
	req.Session, req.Seq, req.Floor = session, 1, 1
	if err := submit(route, req); !errors.Is(err, base.ErrSessionEnded) {
		t.Errorf("a session: %v", err)
	}
}

// Numbers of states are not given twice over a restore, though the checkpoint says
// nothing of those that were dropped and forgotten.
func TestRestoredStatesMeetNothingOfDroppedOnes(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Nodes: 1, Shards: 2, KeyGroups: 12, Configure: calm})
	old := newRouter(k)
	keys := restoreKeys(12)
	declare := func(k *kit, name string) state.Declaration {
		d := state.Declaration{Keyspace: "kit", Name: name, KeyType: keygroup.String, Kind: state.KindValue, ValueType: keygroup.String}
		got, _, rev, err := k.Node(0).Declare(k.ctx(), d)
		if err != nil {
			t.Fatal(err)
		}
		k.rev = max(k.rev, rev)
		return got
	}
	gone := declare(k.kit, "gone")
	for _, key := range keys {
		old.update(state.Mutation{State: gone.ID, Op: state.OpValuePut, Key: []byte(key), Value: []byte("old")})
	}
	if _, err := k.Node(0).Drop(k.ctx(), "kit", "gone"); err != nil {
		t.Fatal(err)
	}
	k.Eventually("the dropped state is forgotten", func() error {
		c, err := k.create(0)
		if err != nil {
			return err
		}
		metadata, _, _ := k.parts(c)
		m, _, err := snapshot.ReadCheckpoint(k.ctx(), k.objects, metadata, [32]byte{})
		if err == nil && slices.ContainsFunc(m.States, func(s snapshot.State) bool { return s.Name == "gone" }) {
			err = errors.New("the checkpoint knows it")
		}
		return err
	})
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	next := k.sharing(testcluster.Options{Nodes: 1, Shards: 3, KeyGroups: 12})
	r := next.restored(string(top.Cluster) + "/latest")
	fresh := declare(next.kit, "fresh")
	for _, key := range keys {
		r.update(state.Mutation{State: fresh.ID, Op: state.OpValuePut, Key: []byte(key), Value: []byte("new")})
	}
	if fresh.ID > gone.ID {
		t.Logf("the number %d was not given again", gone.ID)
	}
}
