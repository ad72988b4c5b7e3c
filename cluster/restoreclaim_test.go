package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/snapshot"
)

// stored lists all keys of the store.
func (k *checkpointKit) stored() (keys []string) {
	k.t.Helper()
	for o, err := range k.objects.List(k.ctx(), "", "") {
		if err != nil {
			k.t.Fatal(err)
		}
		keys = append(keys, o.Key)
	}
	return keys
}

// whole demands that a checkpoint has all its objects, and returns how many.
func (k *checkpointKit) whole(key string) int {
	k.t.Helper()
	v, err := snapshot.VerifyCheckpoint(k.ctx(), k.objects, key, snapshot.VerifyOptions{Full: true})
	if err != nil {
		k.t.Fatalf("%s: %v", key, err)
	}
	return v.Objects
}

// twoCheckpoints of a cluster share objects; beside them lies a foreign one.
func twoCheckpoints(t *testing.T) (k *checkpointKit, first, second, foreign string) {
	t.Helper()
	k = newCheckpointKit(t, testcluster.Options{Nodes: 1, Engine: "rocks", Shards: 2, KeyGroups: 12, Configure: calm})
	r := newRouter(k)
	keys := restoreKeys(24)
	r.change(keys, 1)
	one := k.mustCreate()
	r.change(keys[:2], 2)
	two := k.mustCreate()
	cluster := r.top.Cluster
	foreign = string(cluster) + "/notes-of-the-operator"
	if err := k.objects.Put(k.ctx(), foreign, objectstore.Bytes([]byte("mine"))); err != nil {
		t.Fatal(err)
	}
	return k, snapshot.MetadataKey(cluster, one.Number), snapshot.MetadataKey(cluster, two.Number), foreign
}

// B49: what is deleted of a claimed checkpoint is what nothing else uses, however
// often it is interrupted; and nothing is deleted while not all can be read.
func TestDeletingAClaimedCheckpointLeavesTheOthersWhole(t *testing.T) {
	t.Parallel()
	k, first, second, foreign := twoCheckpoints(t)
	before := k.stored()
	_, sum, err := snapshot.ReadCheckpoint(k.ctx(), k.objects, second, [32]byte{})
	if err != nil {
		t.Fatal(err)
	}
	for name, hook := range map[string]fault.Hook{
		"the other cannot be read": func(op fault.Op, key string) fault.Fault {
			if key == first {
				return fault.Fault{Err: fault.Trouble("unreadable")}
			}
			return fault.Fault{}
		},
		"the list is cut": func(op fault.Op, _ string) fault.Fault {
			if op == fault.OpList {
				return fault.Fault{Items: 1}
			}
			return fault.Fault{}
		},
	} {
		if _, err := snapshot.DeleteClaimed(k.ctx(), fault.Wrap(k.objects, hook), second, sum); err == nil {
			t.Errorf("%s: no error", name)
		}
		if got := k.stored(); !slices.Equal(got, before) {
			t.Fatalf("%s: %q are left of %q", name, got, before)
		}
	}
	if _, err := snapshot.DeleteClaimed(k.ctx(), k.objects, second, [32]byte{1}); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("another _metadata: %v", err)
	}
	deletions := 0
	interrupted := fault.Wrap(k.objects, func(op fault.Op, _ string) fault.Fault {
		if op == fault.OpDelete {
			if deletions++; deletions < 6 {
				return fault.Fault{Items: 1}
			}
		}
		return fault.Fault{}
	})
	for range 20 {
		if _, err = snapshot.DeleteClaimed(k.ctx(), interrupted, second, sum); err == nil {
			break
		}
		k.whole(first)
	}
	if err != nil || deletions < 6 {
		t.Fatalf("after %d deletions: %v", deletions, err)
	}
	left := k.stored()
	if n := k.whole(first); len(left) != n+1 || !slices.Contains(left, foreign) || len(left) >= len(before) {
		t.Errorf("%q are left of %q, the first checkpoint has %d", left, before, n)
	}
	if n, err := snapshot.DeleteClaimed(k.ctx(), k.objects, second, sum); n != 0 || err != nil {
		t.Errorf("once more: %d, %v", n, err)
	}
}

// A claimed checkpoint goes when the new cluster has one of its own, not before;
// one that is not claimed stays.
func TestClaimedCheckpointGoesAfterTheFirstOwn(t *testing.T) {
	t.Parallel()
	for _, claim := range []bool{true, false} {
		t.Run(fmt.Sprint(claim), func(t *testing.T) {
			k, first, second, foreign := twoCheckpoints(t)
			next := k.sharing(testcluster.Options{Nodes: 3, Engine: "rocks", Shards: 3, KeyGroups: 12})
			spec := next.restoreSpec("file:///objects/" + second)
			spec.Claim = claim
			next.Eventually("the cluster is founded", func() error {
				reply, err := next.Node(0).Init(next.ctx(), spec)
				if err == nil && reply.Phase != meta.PhaseDone {
					err = fmt.Errorf("%+v", reply)
				}
				return err
			})
			other := spec
			other.Claim = !claim
			if _, err := next.Node(0).Init(next.ctx(), other); !errors.Is(err, base.ErrAlreadyFounded) {
				t.Errorf("the same with claim %v: %v", other.Claim, err)
			}
			next.WaitReady()
			k.whole(second)
			own := next.mustCreate()
			r := newRouter(next)
			if claim {
				next.Eventually("the claimed checkpoint is gone", func() error {
					if slices.Contains(k.stored(), second) {
						return errors.New("it is there")
					}
					return nil
				})
			} else {
				k.whole(second)
			}
			k.whole(first)
			k.whole(snapshot.MetadataKey(r.top.Cluster, own.Number))
			if !slices.Contains(k.stored(), foreign) {
				t.Error("a foreign object has gone")
			}
		})
	}
}
