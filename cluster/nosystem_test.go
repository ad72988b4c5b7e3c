package cluster_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// shardBeside finds a shard whose replicas leave at least want of the first
// voters (nodes 0 to voters-1) without one, and these nodes.
func (k *kit) shardBeside(voters, want int) (shard base.GroupID, hosts, beside []int) {
	k.t.Helper()
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, s := range top.Shards {
		holds := map[base.NodeID]bool{}
		for _, r := range s.Replicas {
			holds[r.Node] = true
		}
		hosts, beside = nil, nil
		for i := range top.Nodes {
			switch {
			case holds[testcluster.ID(i)]:
				hosts = append(hosts, i)
			case i < voters:
				beside = append(beside, i)
			}
		}
		if len(beside) >= want {
			return s.ID, hosts, beside
		}
	}
	k.t.Fatalf("every shard is on the nodes of the system group: %+v", top.Shards)
	return 0, nil, nil
}

// writeAt writes a value to a shard in the kit's session, at its leader.
func (k *kit) writeAt(shard base.GroupID, key, value string) {
	k.t.Helper()
	k.seq++
	req := k.request(k.seq, k.put(key, value))
	k.Eventually(fmt.Sprintf("%s takes a write", shard), func() error {
		for _, i := range k.Running() {
			if !k.Node(i).Leads(shard) {
				continue
			}
			route := k.route()
			route.Group = shard
			done := make(chan raftfsm.Result, 1)
			k.Node(i).Submit(k.ctx(), route, req, func(r raftfsm.Result) { done <- r })
			if res := <-done; res.Err != nil {
				return res.Err
			}
			return nil
		}
		return errors.New("nobody leads")
	})
}

// Design, section 9: a shard whose replicas are there is served, also when all of
// them were restarted while the system group has no quorum.
func TestRestartedShardServesWithoutASystemQuorum(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e, Nodes: 7, Shards: 7, Replication: 3})
		shard, hosts, beside := k.shardBeside(5, 3)
		key := k.keyIn(shard, "key")
		k.writeAt(shard, key, "before")
		for _, i := range hosts { // what they note is no older than the session
			k.Eventually("the metadata is noted", func() error {
				if rev := k.Node(i).NotedRevision(); rev < k.rev {
					return fmt.Errorf("revision %d of %d", rev, k.rev)
				}
				return nil
			})
		}
		for _, i := range beside {
			k.Stop(i)
		}
		for _, i := range hosts {
			k.Restart(i)
		}
		k.Leader(shard)
		k.checkValue(shard, key, "before")
		k.writeAt(shard, key, "after")
		for _, i := range k.Running() {
			if k.Node(i).Leads(base.SystemGroup) {
				t.Fatal("the system group has a leader: the test shows nothing")
			}
		}
		for _, i := range beside {
			k.Start(i)
		}
		k.WaitReady()
		k.checkValue(shard, key, "after")
	})
}

// A node that restarts alone knows the metadata that it had noted, with a
// snapshot of it or without, and never goes back behind it.
func TestNodeRestartedAloneKnowsTheMetadata(t *testing.T) {
	t.Parallel()
	for _, compact := range []bool{false, true} {
		t.Run(fmt.Sprintf("snapshot %v", compact), func(t *testing.T) {
			k := newKit(t, testcluster.Options{})
			k.mustWrite(k.put("k", "v"))
			var rev base.Revision
			for i := range 10 {
				if i == 5 && compact {
					if err := k.Node(2).CompactSystem(); err != nil {
						t.Fatal(err)
					}
				}
				var err error
				if _, _, rev, err = k.Node(0).Declare(k.ctx(), state.Declaration{Keyspace: "kit", Name: fmt.Sprint("x", i), Kind: state.KindValue,
					KeyType: keygroup.String, ValueType: keygroup.String}); err != nil {
					t.Fatal(err)
				}
				if err := k.Node(2).WaitMetadata(k.ctx(), rev); err != nil {
					t.Fatal(err)
				}
			}
			k.Eventually("the metadata is noted", func() error {
				if got := k.Node(2).NotedRevision(); got < rev {
					return fmt.Errorf("revision %d of %d", got, rev)
				}
				return nil
			})
			for i := range 3 {
				k.Stop(i)
			}
			k.Start(2)
			if got, _ := k.Node(2).SystemState(); got < rev {
				t.Fatalf("the node that restarted alone knows revision %d, want %d", got, rev)
			}
			k.Start(0)
			k.Start(1)
			k.WaitReady()
			if got := k.value("k"); got != "v" {
				t.Fatalf("the value is %q", got)
			}
			// The entries that raft hands over again change nothing.
			a, err := k.Node(0).MetadataSum(k.ctx())
			if err != nil {
				t.Fatal(err)
			}
			k.Eventually("all nodes have the same metadata", func() error {
				b, err := k.Node(2).MetadataSum(k.ctx())
				if err == nil && a != b {
					err = fmt.Errorf("%s and %s", a, b)
				}
				return err
			})
		})
	}
}

// R3: a system log that has lost entries which the node applied is not followed;
// the node's replica comes back under a new id.
func TestSystemLogThatLostAppliedEntriesIsRebuilt(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	f := (k.Leader(base.SystemGroup) + 1) % 3
	k.Eventually("the metadata is noted", func() error {
		if rev := k.Node(f).NotedRevision(); rev < k.rev {
			return fmt.Errorf("revision %d of %d", rev, k.rev)
		}
		return nil
	})
	k.Stop(f)
	l, err := raftlog.Open(filepath.Join(k.Dir(f), "raftlog"), raftlog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	g := l.Group(base.SystemGroup)
	last, err := g.LastIndex()
	if err == nil {
		err = errors.Join(g.DeleteRange(3, last), l.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	k.Start(f)
	k.WaitReady()
	if got := k.Node(f).Identity().SystemGeneration; got != 2 {
		t.Fatalf("the system replica is generation %d, want 2", got)
	}
	if rev, _ := k.Node(f).SystemState(); rev < k.rev {
		t.Fatalf("the rebuilt replica is at revision %d, want %d", rev, k.rev)
	}
}

// Every group of a node goes on, and says so, with a quorum or without; the
// probe that shows it neither deposes a leader nor makes one.
func TestGroupsHaveAPulseWithoutAQuorum(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	leader := k.Leader(1)
	term := k.Node(leader).Term(1)
	for i := range 3 {
		since := time.Now()
		k.Node(i).FeelPulses()
		k.Eventually("every group has answered", func() error { return k.Node(i).PulsesSince(since) })
	}
	if got := k.Node(leader).Term(1); got != term || !k.Node(leader).Leads(1) {
		t.Fatalf("probing took the leader from term %d to %d", term, got)
	}
	alone := (leader + 1) % 3
	k.Stop(leader)
	k.Stop((leader + 2) % 3)
	since := time.Now()
	k.Node(alone).FeelPulses()
	k.Eventually("the groups of a node alone have answered", func() error { return k.Node(alone).PulsesSince(since) })
	if err := k.Node(alone).Live(); err != nil {
		t.Fatalf("a node alone: %v", err)
	}
}
