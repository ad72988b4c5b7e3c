package cluster_test

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/snapshot"
)

func (k *checkpointKit) save() *cluster.CheckpointInfo {
	k.t.Helper()
	var last *cluster.CheckpointInfo
	err := k.Node(k.Running()[0]).CreateSavepoint(k.ctx(), func(c *cluster.CheckpointInfo) error {
		last = c
		return nil
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return last
}

// below are the keys of the store in a folder.
func (k *checkpointKit) below(folder string) []string {
	k.t.Helper()
	return slices.DeleteFunc(k.stored(), func(key string) bool { return !strings.HasPrefix(key, folder+"/") })
}

// A savepoint outlives every checkpoint of its cluster and the cluster itself: what
// was copied to another place of another store is restored, and equals the model.
// Retention does not count it, and only the user deletes it (B49, B52).
func TestSavepointIsRestoredFromACopyOfItsFolder(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newCheckpointKit(t, testcluster.Options{Nodes: 1, Engine: engine, Shards: 2, KeyGroups: 12, Configure: func(i int, o *cluster.Options) {
			calm(i, o)
			o.CheckpointRetain, o.OrphanGrace = 1, time.Nanosecond
		}})
		r := newRouter(k)
		keys := restoreKeys(12)
		r.change(keys, 1)
		k.mustCreate()
		s := k.save()
		if s.Phase != meta.CheckpointCompleted || !s.Savepoint || s.Totals.NewBytes != s.Totals.FullBytes {
			t.Fatalf("%+v", s)
		}
		want := r.contents(keys)
		r.change(keys, 2)
		k.mustCreate()
		last := k.mustCreate()
		k.Eventually("retention counts no savepoints", func() error {
			list, err := k.Node(0).Checkpoints(k.ctx())
			if err == nil && (len(list.Checkpoints) != 2 || list.Checkpoints[0].Number != s.Number || list.PendingDeletions != 0) {
				err = fmt.Errorf("%+v", list)
			}
			return err
		})
		if err := k.Node(0).DeleteCheckpoint(k.ctx(), s.Number); !errors.Is(err, base.ErrConflict) {
			t.Errorf("deleting a savepoint: %v", err)
		}
		if err := k.Node(0).DeleteCheckpoint(k.ctx(), last.Number); err != nil {
			t.Fatal(err)
		}
		folder := snapshot.SavepointFolder(r.top.Cluster, s.Number)
		k.Eventually("nothing but the savepoint is left", func() error {
			if all := k.stored(); len(all) != len(k.below(folder)) {
				return fmt.Errorf("%q", all)
			}
			return nil
		})
		if v, err := k.Node(0).VerifyCheckpoint(k.ctx(), s.Number, false, nil); err != nil || len(v.Bad) > 0 {
			t.Errorf("%v %+v", err, v)
		}
		other := newCheckpointKit(t, testcluster.Options{Nodes: 1, Engine: engine, Unfounded: true, Shards: 3, KeyGroups: 12, Configure: calm})
		for _, key := range k.below(folder) {
			raw, err := objectstore.ReadAll(k.ctx(), k.objects, key, 1<<30)
			if err != nil {
				t.Fatal(err)
			}
			if err := other.objects.Put(k.ctx(), "my/own/"+path.Base(key), objectstore.Bytes(raw)); err != nil {
				t.Fatal(err)
			}
		}
		other.values, other.sums, other.lists, other.maps = k.values, k.sums, k.lists, k.maps
		if err := k.Node(0).DeleteSavepoint(k.ctx(), s.Number); err != nil {
			t.Fatal(err)
		}
		k.Eventually("nothing is left", func() error {
			if all := k.stored(); len(all) > 0 {
				return fmt.Errorf("%q", all)
			}
			return nil
		})
		claim := other.restoreSpec("file:///objects/my/own")
		claim.Claim = true
		if _, err := other.Node(0).Init(k.ctx(), claim); !errors.Is(err, base.ErrConflict) {
			t.Errorf("claiming a savepoint: %v", err)
		}
		other.notFounded()
		if got := other.restored("file:///objects/my/own").contents(keys); !slices.Equal(got, want) {
			t.Fatalf("restored\n%q\nwant\n%q", got, want)
		}
	})
}

// What a savepoint that failed has stored goes, registered or not; one whose files
// the user has deleted bothers nobody.
func TestFailedSavepointIsSwept(t *testing.T) {
	t.Parallel()
	k := newCheckpointKit(t, testcluster.Options{Nodes: 1, Shards: 2, KeyGroups: 12, Configure: func(i int, o *cluster.Options) {
		calm(i, o)
		o.OrphanGrace, o.CheckpointTimeout = time.Nanosecond, 2*time.Second
	}})
	r := newRouter(k)
	r.change(restoreKeys(12), 1)
	s := k.save()
	folder := snapshot.SavepointFolder(r.top.Cluster, s.Number)
	if err := k.objects.Delete(k.ctx(), k.below(folder)...); err != nil {
		t.Fatal(err)
	}
	k.faults(func(op fault.Op, key string) fault.Fault {
		if op == fault.OpPut && strings.HasSuffix(key, "/_metadata") {
			return fault.Fault{Err: fault.Trouble("no metadata")}
		}
		return fault.Fault{}
	})
	if f := k.save(); f.Phase != meta.CheckpointFailed {
		t.Fatalf("%+v", f)
	}
	k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
	k.Eventually("nothing is left", func() error {
		if all := k.stored(); len(all) > 0 {
			return fmt.Errorf("%q", all)
		}
		return nil
	})
	k.mustCreate()
	if err := k.Node(0).DeleteSavepoint(k.ctx(), s.Number); err != nil {
		t.Errorf("deleting a savepoint without files: %v", err)
	}
}
