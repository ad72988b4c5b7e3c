package cluster_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// A node that restarts is ready only when it holds what its leaders held; a node
// that was ready stays so when the others go.
func TestRestartedNodeIsReadyWhenItHasCaughtUp(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		f := k.follower()
		k.Stop(f)
		for i := range 300 {
			k.mustWrite(k.put(fmt.Sprint("k", i), "v"))
		}
		leader := k.Leader(1)
		want, err := k.Node(leader).AppliedCommand(1)
		if err != nil {
			t.Fatal(err)
		}
		k.Start(f)
		k.Eventually("the node is ready", func() error {
			if ok, why := k.Node(f).Ready(); !ok {
				return errors.New(why)
			}
			return nil
		})
		if got, err := k.Node(f).AppliedCommand(1); err != nil || got < want {
			t.Fatalf("ready at entry %d of %d, %v", got, want, err)
		}
		for i := range 3 {
			if i != f {
				k.Stop(i)
			}
		}
		if ok, why := k.Node(f).Ready(); !ok {
			t.Errorf("a node that was ready, after the others are gone: %s", why)
		}
	})
}

// A node that restarts and hears of nobody is not ready: it may be the one that is
// cut off, and a rolling restart must not go on to the next node.
func TestRestartedNodeThatIsAloneIsNotReady(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) { o.ElectionTimeout = 50 * time.Millisecond }})
	k.mustWrite(k.add("s", 1))
	for i := range 3 {
		k.Stop(i)
	}
	k.Start(0)
	k.Eventually("the node says that it is alone", func() error {
		ok, why := k.Node(0).Ready()
		if ok {
			t.Fatal("a node that is alone is ready")
		}
		if !strings.Contains(why, "nor has any other group") {
			return errors.New(why)
		}
		return nil
	})
	k.Start(1)
	k.Start(2)
	k.WaitReady()
	if got := k.sum("s"); got != 1 {
		t.Errorf("sum %d", got)
	}
}

// A shard that has lost its quorum for good keeps no restarted node from being
// ready; the status names the shard.
func TestLostShardKeepsNoNodeUnready(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Nodes: 5, Shards: 5, Replication: 3, Configure: func(_ int, o *cluster.Options) {
		o.ElectionTimeout = 50 * time.Millisecond
	}})
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	var hosts []int
	for _, r := range top.Shards[0].Replicas {
		for i := range 5 {
			if testcluster.ID(i) == r.Node {
				hosts = append(hosts, i)
			}
		}
	}
	lost, back := hosts[:2], hosts[2]
	for _, i := range lost {
		k.Stop(i)
	}
	k.Restart(back)
	shard := top.Shards[0].ID
	k.Eventually("the restarted node is ready without the lost shard", func() error {
		if ok, why := k.Node(back).Ready(); !ok {
			return errors.New(why)
		}
		return nil
	})
	for _, i := range k.Running() {
		if k.Node(i).Leads(shard) {
			t.Fatal("the shard has a leader: the test shows nothing")
		}
	}
	st, err := k.Node(back).Status(k.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(st.Problems, "\n"); !strings.Contains(all, fmt.Sprintf("shard %s has no leader", shard)) {
		t.Errorf("the status does not name the lost shard:\n%s", all)
	}
	for _, i := range lost {
		k.Start(i)
	}
	k.WaitReady()
	k.Leader(base.GroupID(shard))
}
