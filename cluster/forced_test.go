package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/raftfsm"
)

// forcedWriter writes to one shard until the context ends.
func (k *checkpointKit) forcedWriter(ctx context.Context, shard base.GroupID, keys []string) (writes int, longest time.Duration) {
	value := []byte(strings.Repeat("v", 2000))
	for ctx.Err() == nil {
		m := state.Mutation{State: k.values, Op: state.OpValuePut, Key: []byte(keys[writes%len(keys)]), Value: value}
		start, answered := time.Now(), false
		for !answered && ctx.Err() == nil {
			for _, i := range k.Running() {
				if !k.Node(i).Leads(shard) {
					continue
				}
				done := make(chan raftfsm.Result, 1)
				k.Node(i).Submit(ctx, cluster.Route{Group: shard, Epoch: 1, MetadataRevision: k.rev},
					&raftfsm.Request{Mutations: []raftfsm.Mutation{{Mutation: m}}}, func(r raftfsm.Result) { done <- r })
				answered = (<-done).Err == nil
			}
		}
		if answered {
			writes, longest = writes+1, max(longest, time.Since(start))
		}
	}
	return writes, longest
}

// terms are those of all groups on a node.
func (k *checkpointKit) terms() map[base.GroupID]uint64 {
	k.t.Helper()
	out := map[base.GroupID]uint64{}
	for _, i := range k.Running() {
		st, err := k.Node(i).NodeStatus(k.ctx())
		if err != nil {
			k.t.Fatal(err)
		}
		for _, g := range st.Groups {
			out[g.Group] = max(out[g.Group], g.Term)
		}
	}
	return out
}

// B61: checkpoints, forced flushes and compactions of all shards at once, under
// writes, return in time, hold up no write for long, and cost no leader his office.
// A machine under load may lose one by itself: of three rounds one must be quiet.
func TestForcedFlushesAndCompactionsUnderWrites(t *testing.T) {
	t.Parallel()
	const shards, bound = 4, 20 * time.Second
	k := newCheckpointKit(t, testcluster.Options{Engine: "rocks", Shards: shards})
	top, err := k.Node(0).Topology(k.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	keys := map[base.GroupID][]string{}
	for i := range 400 {
		name := fmt.Sprint("k", i)
		for _, s := range top.Shards {
			if s.Range.Contains(keyGroup(t, name, top.KeyGroups)) {
				keys[s.ID] = append(keys[s.ID], name)
			}
		}
	}
	quiet := false
	for round := 0; round < 3 && !quiet; round++ {
		before := k.terms()
		writing, stop := context.WithCancel(context.Background())
		var writers, callers sync.WaitGroup
		for _, s := range top.Shards {
			writers.Go(func() {
				if n, longest := k.forcedWriter(writing, s.ID, keys[s.ID]); n == 0 || longest > bound {
					t.Errorf("shard %s took %d writes, the longest %s", s.ID, n, longest)
				}
			})
		}
		call := func(what string, do func(ctx context.Context) error) {
			callers.Go(func() {
				for range 3 {
					ctx, cancel := context.WithTimeout(t.Context(), bound)
					if err := do(ctx); err != nil {
						t.Errorf("%s: %v", what, err)
					}
					cancel()
				}
			})
		}
		for _, s := range top.Shards {
			call("compacting", func(ctx context.Context) error { _, _, err := k.Node(0).CompactShard(ctx, s.ID); return err })
			call("a snapshot", func(ctx context.Context) error { _, _, err := k.Node(1).SnapshotShard(ctx, s.ID); return err })
		}
		call("a checkpoint", func(ctx context.Context) error {
			var last *cluster.CheckpointInfo
			err := k.Node(2).CreateCheckpoint(ctx, func(c *cluster.CheckpointInfo) error { last = c; return nil })
			if err == nil && last.Phase != meta.CheckpointCompleted {
				return errors.New(last.Error)
			}
			return err
		})
		callers.Wait()
		stop()
		writers.Wait()
		after := k.terms()
		quiet = true
		for g, term := range before {
			if after[g] != term {
				t.Logf("round %d: group %s went from term %d to %d", round, g, term, after[g])
				quiet = false
			}
		}
	}
	if !quiet {
		t.Error("a leader changed in every round")
	}
}
