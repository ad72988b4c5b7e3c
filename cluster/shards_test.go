package cluster_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/raftfsm"
)

const manyShards = 8

// leaders counts the shards that each node leads, 0 in total where one has none.
func (k *kit) leaders() map[int]int {
	n := map[int]int{}
	for s := base.GroupID(1); s <= manyShards; s++ {
		for _, i := range k.Running() {
			if k.Node(i).Leads(s) {
				n[i]++
				break
			}
		}
	}
	return n
}

// balanced says whether every shard is led, by at most limit per node.
func (k *kit) balanced(limit int) error {
	total, n := 0, k.leaders()
	for _, c := range n {
		total += c
		if c > limit {
			return fmt.Errorf("unbalanced: %v", n)
		}
	}
	if total != manyShards {
		return fmt.Errorf("%d of %d shards are led", total, manyShards)
	}
	return nil
}

// writeTo writes one key of a shard without a session until it is acknowledged.
func (k *kit) writeTo(shard base.GroupID, key, value string) {
	k.t.Helper()
	k.Eventually(fmt.Sprintf("%s takes a write", shard), func() error {
		for _, i := range k.Running() {
			if !k.Node(i).Leads(shard) {
				continue
			}
			req := &raftfsm.Request{Mutations: []raftfsm.Mutation{{Mutation: k.put(key, value)}}}
			route := k.route()
			route.Group = shard
			done := make(chan raftfsm.Result, 1)
			k.Node(i).Submit(k.ctx(), route, req, func(r raftfsm.Result) { done <- r })
			res := <-done
			return res.Failure()
		}
		return errors.New("nobody leads")
	})
}

// Many shards on one log per node: the founding spreads the leaders, the death
// of a node moves its share, its return brings them back.
func TestKillOneNodeOfManyShards(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Engine: "rocks", Shards: manyShards, Configure: func(_ int, o *cluster.Options) {
		o.BalanceDelay = 200 * time.Millisecond
		o.ElectionTimeout = 300 * time.Millisecond // eight groups on a small machine
	}})
	// 8 shards over 3 nodes: 3, 3, 2.
	k.Eventually("the preferred leaders lead", func() error { return k.balanced(3) })
	keys := map[base.GroupID]string{}
	for s := base.GroupID(1); s <= manyShards; s++ {
		keys[s] = k.keyIn(s, "key")
		k.writeTo(s, keys[s], "before")
	}
	dead := k.Leader(1)
	start := time.Now()
	k.Stop(dead)
	k.Eventually("all shards lead again", func() error { return k.balanced(manyShards) })
	t.Logf("all led again after %v", time.Since(start))
	for s := base.GroupID(1); s <= manyShards; s++ {
		k.checkValue(s, keys[s], "before")
		k.writeTo(s, keys[s], "without one")
	}
	k.Start(dead)
	k.WaitReady()
	k.Eventually("the leaders are balanced again", func() error { return k.balanced(3) })
	for s := base.GroupID(1); s <= manyShards; s++ {
		k.checkValue(s, keys[s], "without one")
	}
	for i := range 3 {
		k.Stop(i)
	}
	for i := range 3 {
		k.Start(i)
	}
	k.WaitReady()
	for s := base.GroupID(1); s <= manyShards; s++ {
		k.checkValue(s, keys[s], "without one")
	}
}

// checkValue reads one key of a shard linearizably.
func (k *kit) checkValue(shard base.GroupID, key, want string) {
	k.t.Helper()
	k.Eventually(fmt.Sprintf("%s serves a read", shard), func() error {
		for _, i := range k.Running() {
			if !k.Node(i).Leads(shard) {
				continue
			}
			route := k.route()
			route.Group = shard
			reply, err := k.Node(i).Read(k.ctx(), &cluster.ReadRequest{Route: route, Queries: []state.Query{{State: k.values, Kind: state.QueryGet, Key: []byte(key)}}})
			if err != nil {
				return err
			}
			if got := string(reply.Answers[0].Value); got != want || reply.Errs[0] != nil {
				k.t.Fatalf("%s: %q, %v, want %q", shard, got, reply.Errs[0], want)
			}
			return nil
		}
		return errors.New("nobody leads")
	})
}

// Who is asked for hashes as the leader and does not lead says so at once: the
// mark that it would wait for is proposed by nobody.
func TestHashIsProposedByTheLeaderOnly(t *testing.T) {
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "v"))
	err := k.Node(k.follower()).HashAsLeader(k.ctx(), 1, 77)
	if !errors.Is(err, base.ErrNotLeader) {
		t.Fatalf("a follower asked as the leader: %v", err)
	}
	if err := k.Node(k.Leader(1)).HashAsLeader(k.ctx(), 1, 77); err != nil {
		t.Fatal(err)
	}
}
