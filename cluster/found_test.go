package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

func initCtx(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// B24: the same init again, at any node, shows the founding; another list is
// refused; nothing of the state is touched.
func TestInitAgainResumesAndAnotherListIsRefused(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "old"))
	for i := range 3 {
		reply, err := k.Node(i).Init(initCtx(t, testcluster.Wait), k.Spec())
		if err != nil || reply.Phase != "done" || !reply.Resumed {
			t.Fatalf("init again at node %d: %+v, %v", i, reply, err)
		}
	}
	other := k.Spec()
	other.Nodes = other.Nodes[:2]
	if _, err := k.Node(0).Init(initCtx(t, testcluster.Wait), other); !errors.Is(err, base.ErrAlreadyFounded) {
		t.Fatalf("init with another list: %v", err)
	}
	more := k.Spec()
	more.Shards = 7
	var e *base.Error
	if _, err := k.Node(1).Init(initCtx(t, testcluster.Wait), more); !errors.As(err, &e) || e.Field != "shards" {
		t.Fatalf("init with another number of shards: %v", err)
	}
	if got := k.value("k"); got != "old" {
		t.Fatalf("value %q after the inits", got)
	}
}

// An init that another node than the founder got is enough: the founder drops
// the connection that it came by when it begins, and goes on by itself.
func TestInitForwardedToTheFounderIsEnough(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	reply, err := k.Node(2).Init(initCtx(t, testcluster.Wait), k.Spec())
	if err != nil || reply.Phase != "done" {
		t.Fatalf("init at the last node: %+v, %v", reply, err)
	}
	k.WaitReady()
}

// Once init says done, no single disk holds the cluster: the founder may be lost
// at that very moment.
func TestFounderLostRightAfterInit(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{3, 9} {
		// One shard of one replica serves as soon as its node does.
		k := newKit(t, testcluster.Options{Unfounded: true, Nodes: nodes, Shards: 1, Replication: 1})
		if reply, err := k.Node(0).Init(initCtx(t, testcluster.Wait), k.Spec()); err != nil || reply.Phase != "done" {
			t.Fatalf("init: %+v, %v", reply, err)
		}
		if voters := k.Node(k.Leader(base.SystemGroup)).SystemVoters(); voters < 3 {
			t.Errorf("%d of %d nodes vote in the system group when init is done", voters, nodes)
		}
		k.Stop(0)
		k.Leader(base.SystemGroup)
	}
}

// The caller may be gone as soon as the founder has begun.
func TestFoundingGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = k.Node(0).Init(ctx, k.Spec()) // ends by cancel
	}()
	k.Eventually("the founder has begun", func() error {
		if k.Node(0).Identity().Cluster == "" {
			return errors.New("it has no cluster")
		}
		return nil
	})
	cancel()
	<-done
	k.WaitReady()
}

// B24: init called on every node at once founds one cluster.
func TestInitOnAllNodesAtOnceFoundsOneCluster(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	type answer struct {
		reply *cluster.FoundReply
		err   error
	}
	answers := make(chan answer, 6)
	for i := range 6 {
		go func() {
			r, err := k.Node(i%3).Init(initCtx(t, testcluster.Wait), k.Spec())
			answers <- answer{r, err}
		}()
	}
	ids := map[base.ClusterID]bool{}
	for range 6 {
		a := <-answers
		if a.err != nil {
			t.Fatalf("one of the inits failed: %v", a.err)
		}
		ids[a.reply.Cluster] = true
	}
	if len(ids) != 1 {
		t.Fatalf("%d clusters were founded: %v", len(ids), ids)
	}
	k.WaitReady()
	k.declare()
	k.mustWrite(k.put("k", "v"))
	k.checkHashes()
}

// B24: only a part of the nodes is up at the first init: it says which is
// missing, goes on by itself when that one comes, and the same init shows it.
func TestInitWaitsForAMissingNodeAndGoesOn(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	k.Stop(2)
	reply, err := k.Node(0).Init(initCtx(t, 2*time.Second), k.Spec())
	if err != nil || reply.Phase != "admit" {
		t.Fatalf("init with a missing node: %+v, %v", reply, err)
	}
	k.Eventually("the operation names the missing node", func() error {
		ops, err := k.Node(0).Operations(initCtx(t, testcluster.Wait))
		if err != nil {
			return err
		}
		if len(ops) != 1 || !strings.Contains(ops[0].Error, "n3") {
			return fmt.Errorf("operations %+v", ops)
		}
		return nil
	})
	// The founder itself restarts in between.
	k.Restart(0)
	k.Start(2)
	reply, err = k.Node(1).Init(initCtx(t, testcluster.Wait), k.Spec())
	if err != nil || reply.Phase != "done" {
		t.Fatalf("the same init again: %+v, %v", reply, err)
	}
	k.WaitReady()
}

// An init that does not end in time answers before the caller's deadline, at the
// founder and at a node that passes it on, with what the founding waits for.
func TestInitThatMustWaitAnswersBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	k.Stop(2)
	for _, node := range []int{0, 1} {
		k.Eventually("the init says what it waits for", func() error {
			ctx := initCtx(t, 2*time.Second)
			reply, err := k.Node(node).Init(ctx, k.Spec())
			if ctx.Err() != nil {
				t.Fatal("the answer came after the deadline")
			}
			if err != nil { // the founder drops its connections when it begins
				return err
			}
			if reply.Phase != "admit" || !strings.Contains(reply.Problem, "n3") {
				return fmt.Errorf("%+v", reply)
			}
			return nil
		})
	}
	k.Start(2)
	reply, err := k.Node(1).Init(initCtx(t, testcluster.Wait), k.Spec())
	if err != nil || reply.Phase != "done" || reply.Problem != "" {
		t.Fatalf("with all nodes: %+v, %v", reply, err)
	}
}

// B24: every order of starting the nodes again elects leaders with all state.
func TestEveryStartOrderServesTheState(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "v"), k.add("s", 1))
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
		for i := range 3 {
			k.Stop(i)
		}
		for _, i := range order {
			k.Start(i)
		}
		k.WaitReady()
		if got := k.value("k"); got != "v" {
			t.Fatalf("order %v: value %q", order, got)
		}
	}
}

// B24: a node that comes back alone, cut off, with its old data, and is told to
// found again, neither leads nor accepts writes.
func TestNodeAloneWithOldDataDoesNotFoundAgain(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "good"))
	for i := range 3 {
		k.Stop(i)
	}
	k.Net.Isolate("n3", "n1", "n2")
	k.Start(2)
	spec := k.Spec()
	spec.Nodes = spec.Nodes[2:]
	if r, err := k.Node(2).Init(initCtx(t, time.Second), spec); err == nil {
		t.Fatalf("a lone node founded again: %+v", r)
	}
	if r, err := k.Node(2).Init(initCtx(t, time.Second), k.Spec()); err == nil && r.Phase == "done" {
		t.Fatalf("a lone node says the founding is done: %+v", r)
	}
	k.seq++
	if res := k.submit(2, k.request(k.seq, k.put("k", "bad"))); res.Err == nil {
		t.Fatal("a lone node accepted a write")
	}
	k.Net.HealAll()
	k.Start(0)
	k.Start(1)
	k.WaitReady()
	if got := k.value("k"); got != "good" {
		t.Fatalf("value %q", got)
	}
}

// B24: empty nodes that found a new cluster beside an old node do not touch it:
// the cluster ids differ, so no connection between them is made.
func TestOldNodeDoesNotMeetANewCluster(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "old"))
	for i := range 3 {
		k.Stop(i)
	}
	remove(t, k.Dir(0))
	remove(t, k.Dir(1))
	k.Start(0)
	k.Start(1)
	k.Start(2)
	spec := k.Spec()
	spec.Nodes = spec.Nodes[:2]
	reply, err := k.Node(0).Init(initCtx(t, testcluster.Wait), spec)
	if err != nil || reply.Phase != "done" {
		t.Fatalf("founding beside an old node: %+v, %v", reply, err)
	}
	old := k.Node(2).Identity().Cluster
	if old == reply.Cluster {
		t.Fatal("the old node was taken into the new cluster")
	}
	with := k.Spec()
	if _, err := k.Node(0).Init(initCtx(t, 2*time.Second), with); !errors.Is(err, base.ErrAlreadyFounded) {
		t.Fatalf("init with the old node: %v", err)
	}
	if k.Node(2).Leads(1) {
		t.Fatal("the old node leads its old shard alone")
	}
}

// A list with a wrong id, or that does not name the node called, is refused
// with what to do; an admitted node of another cluster is named.
func TestInitRefusesWrongLists(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	spec := k.Spec()
	spec.Nodes = spec.Nodes[1:]
	if _, err := k.Node(0).Init(initCtx(t, time.Second), spec); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "n1") {
		t.Fatalf("a list without the node called: %v", err)
	}
	spec = k.Spec()
	spec.Nodes[1].ID = "nobody"
	reply, err := k.Node(0).Init(initCtx(t, time.Second), spec)
	if err != nil || reply.Phase == "done" {
		t.Fatalf("a list with a wrong id: %+v, %v", reply, err)
	}
	k.Eventually("the operation says who is at that address", func() error {
		ops, err := k.Node(0).Operations(initCtx(t, testcluster.Wait))
		if err != nil {
			return err
		}
		if len(ops) != 1 || !strings.Contains(ops[0].Error, "this is n2") {
			return fmt.Errorf("operations %+v", ops)
		}
		return nil
	})
}

// Before the founding every call says what to do.
func TestUnfoundedNodeSaysHowToFound(t *testing.T) {
	k := newKit(t, testcluster.Options{Unfounded: true})
	if _, err := k.Node(0).Topology(initCtx(t, time.Second), 0); !errors.Is(err, base.ErrNotFounded) || !strings.Contains(err.Error(), "keelctl cluster init") {
		t.Fatalf("topology: %v", err)
	}
	if _, err := k.Node(0).Status(initCtx(t, time.Second)); !errors.Is(err, base.ErrNotFounded) || !strings.Contains(err.Error(), "keelctl cluster init") {
		t.Fatalf("status: %v", err)
	}
	if ok, why := k.Node(0).Ready(); ok || why == "" {
		t.Fatalf("ready %v, %q", ok, why)
	}
	if err := k.Node(0).Live(); err != nil {
		t.Fatalf("an unfounded node is alive: %v", err)
	}
}
