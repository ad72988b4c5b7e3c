package cluster_test

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/objectstore/fault"
)

// logged is how many shards of a checkpoint are files and a log.
func logged(c *cluster.CheckpointInfo) (n int) {
	for _, s := range c.Shards {
		if s.Report != nil && s.Report.BaseIndex != 0 {
			n++
		}
	}
	return n
}

func inChangelogMode(_ int, o *cluster.Options) {
	o.CheckpointRetain, o.CheckpointChangelog = 2, true
}

// mustLog takes a checkpoint, notes what it holds, and demands that so many of its
// shards are files and a log.
func (k *rollingKit) mustLog(shards int) uint64 {
	k.t.Helper()
	c := k.mustCreate()
	k.saved[c.Number] = k.contents(k.keys)
	if got := logged(c); got != shards || !c.Changelog {
		k.t.Fatalf("checkpoint %d has %d shards with a log, want %d: %+v", c.Number, got, shards, c)
	}
	v, err := k.Node(k.Running()[0]).VerifyCheckpoint(k.ctx(), c.Number, false, func(int, int) {})
	if err != nil || len(v.Bad) > 0 {
		k.t.Fatalf("checkpoint %d: %v, %+v", c.Number, err, v)
	}
	return c.Number
}

// In mode changelog the first checkpoint stores files and the next ones the log since,
// whatever is retired meanwhile; each of them is what the cluster was at its
// barrier, also after a rollback, which begins with files again.
func TestChangelogCheckpointsAreRolledBackTo(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newRollingKit(t, testcluster.Options{Engine: engine, Configure: inChangelogMode})
		k.more()
		k.mustLog(0)
		k.more()
		k.mustLog(2)
		k.more()
		third := k.mustLog(2)
		k.more()
		k.mustLog(2) // the first two are gone, their objects are used
		k.more()
		k.mustBack(third)
		k.nothingLeft()
		k.more()
		last := k.mustLog(0)
		k.more()
		k.mustLog(2)
		k.mustBack(last)
	})
}

// A log that was cut, a state that was dropped, a log that has grown, an uploader
// that has restarted, a savepoint: files are stored again.
func TestChangelogCheckpointsStoreFilesWhereTheLogDoesNotLead(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Nodes: 1, Engine: "mem", Configure: func(i int, o *cluster.Options) {
		inChangelogMode(i, o)
		o.ChangelogMaterializeBytes = 64 << 10
	}})
	k.more()
	k.mustLog(0)
	k.more()
	k.mustLog(2)
	saved := k.save()
	if saved.Changelog || logged(saved) != 0 {
		t.Errorf("a savepoint: %+v", saved)
	}
	k.more()
	k.mustLog(2)

	var groups []base.GroupID
	for _, s := range k.top.Shards {
		groups = append(groups, s.ID)
	}
	k.more()
	for _, g := range groups {
		if err := k.Node(0).CutShardLog(k.ctx(), g); err != nil {
			t.Fatal(err)
		}
	}
	k.mustLog(0)
	k.more()
	k.mustLog(2)

	k.Restart(0)
	k.WaitReady()
	k.mustLog(0)

	for range 40 {
		k.more()
	}
	big := make([]byte, 8<<10)
	for i := range 20 {
		k.update(k.put(k.keys[i%len(k.keys)], string(big)))
	}
	k.Eventually("the log has grown", func() error {
		c := k.mustCreate()
		if n := logged(c); n == 2 {
			return fmt.Errorf("%d shards have a log", n)
		}
		return nil
	})
}

// A new cluster of another number of shards begins with a checkpoint that is files
// and a log.
func TestRestoreFromAChangelogCheckpoint(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		k := newRollingKit(t, testcluster.Options{Nodes: 1, Engine: engine, Shards: 3, Configure: inChangelogMode})
		k.more()
		k.mustLog(0)
		k.more()
		number := k.mustLog(3)
		k.more()
		next := k.sharing(testcluster.Options{Nodes: 1, Engine: engine, Shards: 2})
		r := next.restored(fmt.Sprintf("%s/%d", k.top.Cluster, number))
		if got := r.contents(k.keys); !slices.Equal(got, k.saved[number]) {
			t.Fatalf("restored:\n%q\nwant\n%q", got, k.saved[number])
		}
	})
}

// A checkpoint that fails while the log is stored leaves the others as they were, and
// the next one is whole: a shard that failed stores files. One that the failure of
// another has stopped, before it registered anything, goes on with its log.
func TestChangelogCheckpointThatFailsIsFollowedByFiles(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		stored   int64 // this many puts succeed
		waits    bool  // those behind the first failure wait until the checkpoint has failed
		min, max int   // shards with a log in the next checkpoint
	}{
		{name: "both", stored: 2, max: 1}, // the segments of both shards, or one and its manifest
		{name: "one, the other stopped", waits: true, min: 1, max: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			k := newRollingKit(t, testcluster.Options{Nodes: 1, Engine: "mem", Configure: func(i int, o *cluster.Options) {
				inChangelogMode(i, o)
				o.OrphanGrace = time.Nanosecond
			}})
			k.more()
			k.mustLog(0)
			k.more()
			second := k.mustLog(2)
			k.more()
			var puts atomic.Int64
			failed := make(chan struct{})
			k.faults(func(op fault.Op, _ string) fault.Fault {
				if op != fault.OpPut {
					return fault.Fault{}
				}
				n := puts.Add(1)
				if tc.waits && n > 1 {
					<-failed
				}
				if n > tc.stored {
					return fault.Fault{Err: fault.Trouble("no space")}
				}
				return fault.Fault{}
			})
			c, err := k.create(0)
			if err != nil || c.Phase != meta.CheckpointFailed {
				t.Fatalf("%v, %+v", err, c)
			}
			k.faults(func(fault.Op, string) fault.Fault { return fault.Fault{} })
			close(failed)
			k.more()
			next := k.mustCreate()
			k.saved[next.Number] = k.contents(k.keys)
			if n := logged(next); n < tc.min || n > tc.max {
				t.Fatalf("%d shards with a log, want %d to %d: %+v", n, tc.min, tc.max, next)
			}
			k.more()
			k.mustLog(2)
			k.mustBack(second + 2)
		})
	}
}
