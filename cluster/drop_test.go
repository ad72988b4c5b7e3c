package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
)

// A state that is dropped and declared again under its name is another one: the
// old data are never seen, before and after restarts, and their family goes from
// every replica once the drop is flushed.
func TestDroppedAndRedeclaredStateIsEmpty(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"same kind", "another kind"} {
		t.Run(kind, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, e string) {
				k := newKit(t, testcluster.Options{Engine: e})
				for i := range 50 {
					k.mustWrite(k.put(fmt.Sprintf("k%d", i), "old"), k.add("s", 1))
				}
				old := k.values
				if _, err := k.Node(0).Drop(k.ctx(), "kit", "values"); err != nil {
					t.Fatal(err)
				}
				d := state.Declaration{Keyspace: "kit", Name: "values", Kind: state.KindValue, KeyType: keygroup.String, ValueType: keygroup.String}
				if kind == "another kind" {
					d.Kind = state.KindList
				}
				again, created, rev, err := k.Node(1).Declare(k.ctx(), d)
				if err != nil || !created || again.ID == old {
					t.Fatalf("declaring again: %+v, created %v, %v", again, created, err)
				}
				k.values, k.rev = again.ID, rev
				empty := func(when string) {
					t.Helper()
					q := state.Query{State: again.ID, Kind: state.QueryGet, Key: []byte("k1")}
					if kind == "another kind" {
						q.Kind = state.QueryPage
					}
					if a := k.read(q); a.Found || len(a.Value) > 0 || len(a.Elements) > 0 {
						t.Fatalf("%s: the new state shows %+v", when, a)
					}
				}
				empty("at once")
				k.dropped(old)
				empty("after the drop")
				k.flushed(old)
				k.checkHashes()
				if got := k.sum("s"); got != 50 {
					t.Fatalf("the other state has %d, want 50", got)
				}
				for i := range 3 {
					k.Restart(i)
				}
				k.WaitReady()
				empty("after restarts")
				k.dropped(old)
				k.flushed(old)
				if kind == "same kind" {
					k.mustWrite(k.put("k1", "new"))
					if got := k.value("k1"); got != "new" {
						t.Fatalf("value %q", got)
					}
				}
				k.checkHashes()
			})
		})
	}
}

// dropped waits until no replica knows a state, and demands that it is refused.
func (k *kit) dropped(id engine.FamilyID) {
	k.t.Helper()
	for i := range 3 {
		k.Eventually("every replica drops the state", func() error {
			st, err := k.Node(i).NodeStatus(k.ctx())
			if err != nil {
				return err
			}
			for _, g := range st.Groups {
				if slices.Contains(g.States, uint32(id)) {
					return fmt.Errorf("node %d still declares %d", i, id)
				}
			}
			return nil
		})
	}
	leader := k.Leader(1)
	m := k.put("k1", "late")
	m.State = id
	if res := k.submit(leader, k.request(k.seq+1, m)); !errors.Is(res.Failure(), base.ErrUndeclared) && !base.SentinelOf(res.Failure()).Retryable {
		k.t.Fatalf("writing to the dropped state: %v", res.Err)
	}
	k.Eventually("a read of the dropped state is refused", func() error {
		_, err := k.readAt(k.Leader(1), testcluster.Wait, state.Query{State: id, Kind: state.QueryGet, Key: []byte("k1")})
		if errors.Is(err, base.ErrUndeclared) {
			return nil
		}
		if err == nil {
			k.t.Fatal("the dropped state was read")
		}
		return err
	})
}

// flushed waits until the family is gone everywhere, in a shard that is
// otherwise idle: it goes with the first entry that is applied after the drop
// was flushed (W7), and the leader sees to both.
func (k *kit) flushed(id engine.FamilyID) {
	k.t.Helper()
	k.Eventually("the family is gone", func() error {
		for i := range 3 {
			families, err := k.Node(i).StoreFamilies(1)
			if err != nil {
				return err
			}
			if slices.Contains(families, id) {
				return fmt.Errorf("node %d has families %v", i, families)
			}
		}
		return nil
	})
}
