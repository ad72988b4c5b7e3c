package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// TestHandOverToASlowFollower holds CL7: however often a leader is told to hand
// over to a follower that does not answer, and whenever it is deposed meanwhile, it
// serves when it leads again. raft alone may refuse all proposals from then on: by
// chance, so there are some rounds.
func TestHandOverToASlowFollower(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Nodes: 3, Shards: 1})
	old := k.Leader(1)
	slow, near := (old+1)%3, (old+2)%3
	transfer := func(by, to int, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		_, err := k.Node(by).TransferLeader(ctx, 1, testcluster.ID(to))
		return err
	}
	name := func(i int) string { return string(testcluster.ID(i)) }
	for round := range 3 {
		k.Net.SetDelay(name(old), name(slow), time.Minute, 0)
		k.mustWrite(k.put(fmt.Sprint("slow lacks this ", round), "1"))
		if err := transfer(old, slow, time.Second); err == nil {
			t.Fatal("a follower that hears nothing took over")
		}
		k.Net.Partition(name(old), name(slow))
		k.Net.Partition(name(old), name(near))
		k.otherLeader(1, old)
		k.Net.SetDelay(name(old), name(slow), 0, 0)
		k.Net.HealAll()
		k.Eventually("the first leader leads again", func() error {
			if k.Node(old).Leads(1) {
				return nil
			}
			if err := transfer(k.Leader(1), old, 5*time.Second); err != nil {
				return err
			}
			return fmt.Errorf("%s has not taken office", testcluster.ID(old))
		})
		k.mustWrite(k.put(fmt.Sprint("again ", round), "1"))
	}
	k.checkHashes()
}

// TestSecondHandOverIsRefused: in one term, to one follower, unless raft refused
// the first.
func TestSecondHandOverIsRefused(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Nodes: 3, Shards: 1})
	old := k.Leader(1)
	far := testcluster.ID((old + 1) % 3)
	k.Net.Partition(string(testcluster.ID(old)), string(far))
	var err error
	for range 2 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = k.Node(old).TransferLeader(ctx, 1, far)
		cancel()
	}
	if !errors.Is(err, base.ErrNotReady) || !strings.Contains(err.Error(), "an earlier hand-over to node "+string(far)) {
		t.Errorf("the second hand-over to a follower that is cut off: %v", err)
	}
	k.mustWrite(k.put("it serves on", "1"))
}

// TestDrainPassesAFollowerThatDoesNotAnswer: a node that drains hands over to a
// voter that answers.
func TestDrainPassesAFollowerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Nodes: 3, Shards: 1})
	old := k.Leader(1)
	k.Net.Partition(string(testcluster.ID(old)), string(testcluster.ID((old+1)%3)))
	if err := k.Node(old).Drain(k.ctx()); err != nil {
		t.Fatal(err)
	}
	if k.Node(old).Leads(1) {
		t.Error("a node that has drained leads")
	}
	k.Net.HealAll()
	k.mustWrite(k.put("after", "1"))
}
