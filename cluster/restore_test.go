package cluster_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
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

// router drives all shards of a cluster, by the key groups of the keys.
type router struct {
	*checkpointKit
	top *cluster.Topology
	// seen is the newest revision known when the topology was asked for.
	seen base.Revision
}

func newRouter(k *checkpointKit) *router {
	k.t.Helper()
	r := &router{checkpointKit: k}
	r.Eventually("the topology is known", func() error {
		top, err := k.Node(k.Running()[0]).Topology(k.ctx(), 0)
		if err == nil {
			r.top, r.seen = top, max(r.rev, top.Revision)
		}
		return err
	})
	return r
}

func (r *router) shardOf(key string) *cluster.ShardInfo {
	g := keyGroup(r.t, key, r.top.KeyGroups)
	for i := range r.top.Shards {
		if r.top.Shards[i].Range.Contains(g) {
			return &r.top.Shards[i]
		}
	}
	r.t.Fatalf("no shard has %s", key)
	return nil
}

func (r *router) routeOf(key string) cluster.Route {
	s := r.shardOf(key)
	return cluster.Route{Group: s.ID, Epoch: s.Epoch, Incarnation: r.top.Incarnation, MetadataRevision: r.seen}
}

// update writes mutations of one key, outside of any session.
func (r *router) update(ms ...state.Mutation) raftfsm.Result {
	r.t.Helper()
	route := r.routeOf(string(ms[0].Key))
	var res raftfsm.Result
	r.Eventually("a write is answered", func() error {
		done := make(chan raftfsm.Result, 1)
		r.Node(r.Leader(route.Group)).Submit(r.ctx(), route, r.outsideOfSessions(ms), func(got raftfsm.Result) { done <- got })
		if res = <-done; res.Err != nil && base.SentinelOf(res.Err).Retryable {
			return res.Err
		}
		return nil
	})
	if res.Err != nil {
		r.t.Fatalf("writing %s: %v", ms[0].Key, res.Err)
	}
	return res
}

func (r *router) outsideOfSessions(ms []state.Mutation) *raftfsm.Request {
	req := &raftfsm.Request{}
	for i, m := range ms {
		req.Mutations = append(req.Mutations, raftfsm.Mutation{Ordinal: uint32(i), Mutation: m})
	}
	return req
}

// content is all that a key has, in words.
func (r *router) content(key string) string {
	r.t.Helper()
	route, k := r.routeOf(key), []byte(key)
	var a []state.Answer
	r.Eventually("a read is served", func() error {
		reply, err := r.Node(r.Leader(route.Group)).Read(r.ctx(), &cluster.ReadRequest{Route: route, Queries: []state.Query{
			{State: r.values, Kind: state.QueryGet, Key: k}, {State: r.sums, Kind: state.QueryGet, Key: k},
			{State: r.lists, Kind: state.QueryPage, Key: k}, {State: r.maps, Kind: state.QueryPage, Key: k}}})
		if err != nil {
			return err
		}
		a = reply.Answers
		return errors.Join(reply.Errs...)
	})
	out := fmt.Sprintf("%s=%q", key, a[0].Value)
	if a[1].Found {
		out += fmt.Sprintf(" %d", int64(binary.BigEndian.Uint64(a[1].Value)^1<<63))
	}
	for _, e := range a[2].Elements {
		out += fmt.Sprintf(" %q", e)
	}
	for _, e := range a[3].Entries {
		out += fmt.Sprintf(" %q:%q", e.UserKey, e.Value)
	}
	return out
}

func (r *router) contents(keys []string) (out []string) {
	r.t.Helper()
	for _, k := range keys {
		out = append(out, r.content(k))
	}
	return out
}

// change writes to all kinds of states of some keys.
func (r *router) change(keys []string, round int) {
	r.t.Helper()
	for i, k := range keys {
		r.update(r.put(k, fmt.Sprintf("v%d.%d", round, i)), r.add(k, int64(i+round)),
			r.appendTo(k, fmt.Sprintf("e%d", round), fmt.Sprintf("f%d", round)), r.mapPut(k, fmt.Sprint("u", round%3), fmt.Sprint(round)))
	}
}

// agree demands that all replicas of all shards hold the same.
func (r *router) agree() {
	r.t.Helper()
	for _, s := range r.top.Shards {
		r.Eventually("the replicas hash equal", func() error {
			hashes, err := r.Node(r.Running()[0]).HashShard(r.ctx(), s.ID)
			if err != nil {
				return err
			}
			for _, h := range hashes {
				if h.Error != "" {
					return fmt.Errorf("node %s: %s", h.Node, h.Error)
				}
			}
			for _, h := range hashes[1:] {
				if h.Index != hashes[0].Index || !bytes.Equal(h.Content, hashes[0].Content) || !bytes.Equal(h.Ops, hashes[0].Ops) {
					r.t.Fatalf("replicas differ: %+v", hashes)
				}
			}
			return nil
		})
	}
}

// calm keeps leaders in office on a machine that is busy with other tests.
func calm(_ int, o *cluster.Options) { o.ElectionTimeout = time.Second }

// sharing makes a cluster that is not founded, on the object store of k.
func (k *checkpointKit) sharing(o testcluster.Options) *checkpointKit {
	k.t.Helper()
	next := &checkpointKit{objects: k.objects, driver: k.driver}
	configure := o.Configure
	o.Unfounded = true
	o.Configure = func(i int, opts *cluster.Options) {
		opts.Objects, opts.ObjectsURI = fault.Wrap(k.objects, func(op fault.Op, key string) fault.Fault {
			if h := next.hook.Load(); h != nil {
				return (*h)(op, key)
			}
			return fault.Fault{}
		}), "file:///objects"
		calm(i, opts)
		if configure != nil {
			configure(i, opts)
		}
	}
	next.kit = newKit(k.t, o)
	next.values, next.sums, next.lists, next.maps = k.values, k.sums, k.lists, k.maps
	return next
}

func (k *checkpointKit) restoreSpec(name string) cluster.FoundSpec {
	s := k.Spec()
	s.KeyGroups, s.Restore = 0, name
	return s
}

// restored founds the cluster with a checkpoint and waits until it serves.
func (k *checkpointKit) restored(name string) *router {
	k.t.Helper()
	k.Eventually("the cluster is founded", func() error {
		reply, err := k.Node(0).Init(k.ctx(), k.restoreSpec(name))
		if err != nil {
			if !base.SentinelOf(err).Retryable {
				k.t.Fatalf("restoring: %v", err)
			}
			return err
		}
		if reply.Phase != meta.PhaseDone {
			return fmt.Errorf("phase %s: %s", reply.Phase, reply.Problem)
		}
		return nil
	})
	k.WaitReady()
	return newRouter(k)
}

var restoreSizes = []struct{ nodes, shards int }{{3, 4}, {5, 8}, {3, 3}, {1, 1}}

// restoreKeys are spread over all key groups.
func restoreKeys(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint("key-", i))
	}
	return keys
}

// What a checkpoint holds is there in a new cluster, of whatever size, and all
// goes on from there: writes, lists, restarts, and checkpoints of its own, from
// which it can be restored again (B47).
func TestRestoreIntoANewClusterOfAnySize(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newCheckpointKit(t, testcluster.Options{Engine: engine, Shards: 4, KeyGroups: 16, Configure: calm})
		old := newRouter(k)
		keys := restoreKeys(24)
		old.change(keys, 1)
		old.change(keys[:12], 2)
		want := old.contents(keys)
		c := k.mustCreate()
		old.change(keys, 3) // not in it
		for _, size := range restoreSizes {
			t.Run(fmt.Sprintf("%d-nodes-%d-shards", size.nodes, size.shards), func(t *testing.T) {
				next := k.sharing(testcluster.Options{Engine: engine, Nodes: size.nodes, Shards: size.shards, KeyGroups: 16})
				r := next.restored(c.URI)
				if got := r.contents(keys); !slices.Equal(got, want) {
					t.Fatalf("restored\n%q\nwant\n%q", got, want)
				}
				r.agree()
				if r.top.Incarnation != old.top.Incarnation+1 || r.top.KeyGroups != 16 || len(r.top.Shards) != size.shards {
					t.Errorf("the cluster is %+v", r.top)
				}
				r.change(keys[:10], 4)
				changed := r.contents(keys)
				if l := r.content(keys[0]); !strings.Contains(l, `"e1" "f1" "e2" "f2" "e4" "f4"`) {
					t.Errorf("the list does not go on: %s", l)
				}
				for _, i := range next.Running() {
					next.Restart(i)
				}
				next.WaitReady()
				if got := r.contents(keys); !slices.Equal(got, changed) {
					t.Fatalf("restarted\n%q\nwant\n%q", got, changed)
				}
				own := next.mustCreate()
				again := k.sharing(testcluster.Options{Engine: engine, Nodes: 1, Shards: 2, KeyGroups: 16}).restored(own.URI)
				if got := again.contents(keys); !slices.Equal(got, changed) || again.top.Incarnation != old.top.Incarnation+2 {
					t.Fatalf("restored again, incarnation %d\n%q\nwant\n%q", again.top.Incarnation, got, changed)
				}
			})
		}
	})
}
