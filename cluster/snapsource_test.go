package cluster_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
)

// A replica that is rebuilt takes the leader's files from the object store where that
// has them and the node is told so, from the leader where the store does not do, and
// from the store where the leader's do not.
func TestRebuiltReplicaReadsFromTheStoreOrTheLeader(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fromStore, storeFails, leaderFails bool
		reads                              bool // of the object store
	}{
		"store":                              {fromStore: true, reads: true},
		"store, which fails":                 {fromStore: true, storeFails: true, reads: true},
		"leader":                             {},
		"leader, one of whose files is gone": {leaderFails: true, reads: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newCheckpointKit(t, testcluster.Options{Engine: "rocks", Shards: 1, Configure: func(i int, o *cluster.Options) {
				smallLog(i, o)
				o.RebuildFromStore = c.fromStore
			}})
			fill(k.kit, 200)
			victim := k.readyToRebuild()
			var reads atomic.Int64
			k.faults(func(op fault.Op, key string) fault.Fault {
				if op != fault.OpGet {
					return fault.Fault{}
				}
				reads.Add(1)
				if c.storeFails {
					return fault.Fault{Err: fault.Trouble("not today")}
				}
				return fault.Fault{}
			})
			k.Stop(victim)
			remove(t, filepath.Join(k.Dir(victim), "groups"))
			if c.leaderFails {
				// The live store has it under another name.
				if err := os.Remove(k.largestSnapshotFile(k.Leader(1))); err != nil {
					t.Fatal(err)
				}
			}
			k.Start(victim)
			k.Eventually("the replica is rebuilt", func() error {
				if ok, why := k.Node(victim).Ready(); !ok {
					return errors.New(why)
				}
				return k.votes(victim)
			})
			if got := reads.Load() > 0; got != c.reads {
				t.Errorf("%d reads of the object store", reads.Load())
			}
			k.checkHashes()
			if got := k.sum("s"); got != 200 {
				t.Errorf("sum %d, want 200", got)
			}
		})
	}
}

// readyToRebuild makes the node that uploads the shard its leader, whose log then
// begins behind a snapshot of the files that are in the store. It returns a follower.
func (k *checkpointKit) readyToRebuild() int {
	k.t.Helper()
	uploader := 0
	k.Eventually("the uploader leads, and its snapshot is of files of the store", func() error {
		c := k.mustCreate()
		uploader = k.index(c.Shards[0].Uploader)
		if _, err := k.Node(uploader).TransferLeader(k.ctx(), 1, testcluster.ID(uploader)); err != nil {
			return err
		}
		if k.Leader(1) != uploader {
			return errors.New("another node leads")
		}
		if _, _, err := k.Node(uploader).SnapshotShard(k.ctx(), 1); err != nil {
			return err
		}
		if k.isStored(k.largestSnapshotFile(uploader)) {
			return nil
		}
		k.mustWrite(k.put("k0", "again")) // a compaction came between
		return errors.New("the largest file of the snapshot is not in the store")
	})
	return (uploader + 1) % 3
}

// largestSnapshotFile is the path of the largest of the engine's files of the newest
// snapshot of a node's replica.
func (k *checkpointKit) largestSnapshotFile(node int) string {
	k.t.Helper()
	files, err := filepath.Glob(filepath.Join(k.Dir(node), "groups", "1", "*", "snapshots", "*", "files", "*.sst"))
	if err != nil || len(files) == 0 {
		k.t.Fatalf("%v, %v", files, err)
	}
	size := func(f string) int64 {
		st, err := os.Stat(f)
		if err != nil {
			k.t.Fatal(err)
		}
		return st.Size()
	}
	return slices.MaxFunc(files, func(a, b string) int { return cmp.Compare(size(a), size(b)) })
}

// isStored says whether an object is the content of a file, or has it among others.
func (k *checkpointKit) isStored(path string) bool {
	k.t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		k.t.Fatal(err)
	}
	return slices.ContainsFunc(k.stored(), func(key string) bool {
		raw, err := objectstore.ReadAll(k.ctx(), k.objects, key, 1<<30)
		return err == nil && bytes.Contains(raw, content)
	})
}

// A leader whose snapshot has lost a file, or in whose files a bit has flipped, and no
// object store that has it: nobody waits for the next scrub or the next write. Another
// leads, which the rebuilt replica takes its files from, and the damaged one is next.
func TestLeaderWhoseSnapshotIsDamagedHoldsNoRebuildUp(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, path string){
		"a file is gone": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
		"a bit has flipped": func(t *testing.T, path string) { flip(t, path, 20) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, testcluster.Options{Engine: "rocks", Shards: 1, Configure: smallLog})
			fill(k, 200)
			leader := k.Leader(1)
			if _, _, err := k.Node(leader).SnapshotShard(k.ctx(), 1); err != nil {
				t.Fatal(err)
			}
			victim := (leader + 1) % 3
			k.Stop(victim)
			remove(t, filepath.Join(k.Dir(victim), "groups"))
			path, _ := largest(t, k.Dir(leader), "groups/1/*/snapshots/*/files/*.sst")
			spoil(t, path)
			k.Start(victim)
			k.Eventually("the replica is rebuilt", func() error {
				if ok, why := k.Node(victim).Ready(); !ok {
					return errors.New(why)
				}
				return k.votes(victim)
			})
			k.Eventually("every replica is whole", func() error {
				for _, r := range k.scrub(victim) {
					if len(r.Findings) > 0 || r.Error != "" {
						return fmt.Errorf("%+v", r)
					}
				}
				return nil
			})
			k.checkHashes()
			if got := k.sum("s"); got != 200 {
				t.Errorf("sum %d, want 200", got)
			}
		})
	}
}
