package checkpoint

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// Automatic checkpoints from their start to the deletion of the one before.
func TestAutomaticCheckpoints(t *testing.T) {
	k := newKit(t)
	k.none(time.Hour) // no interval
	k.cfg.Interval = 10 * time.Second
	k.c = New()
	k.none(0)
	k.none(9 * time.Second)
	if k.view().RunningCheckpoint() != nil {
		t.Fatal("started early")
	}
	for n := uint64(1); n <= 3; n++ {
		k.none(10 * time.Second)
		r := k.view().RunningCheckpoint()
		if r == nil || r.Number != n || !r.Automatic || r.TimeoutMs != 60_000 {
			t.Fatalf("running %+v, want number %d", r, n)
		}
		k.upload(n, 2)
		k.none(0)
		k.upload(n, 1)
		a := k.one(time.Second, StoreMetadata)
		if a.Checkpoint != n || k.view().Checkpoint(n).Phase != meta.CheckpointMetadata {
			t.Fatalf("%+v", a)
		}
		k.none(0) // not twice
		k.stored(a, nil)
		got := k.step(0)
		if k.view().LastCheckpoint().Number != n || len(k.view().Checkpoints()) != 1 {
			t.Fatalf("checkpoints %v", k.view().Checkpoints())
		}
		if n == 1 {
			continue
		}
		if len(got) != 1 || got[0].Kind != DeletePlanned || len(got[0].Plan.Keys) != 3 {
			t.Fatalf("actions %v, want the plan of the one before", got)
		}
		k.c.Deleted(k.now, got[0].Plan.ID, nil)
		k.none(0)
		if len(k.view().Plans()) != 0 {
			t.Fatal("the plan is left")
		}
	}
}

// A new leader goes on from when the last one was, whatever its wall clock says.
func TestIntervalOfANewLeader(t *testing.T) {
	for _, x := range []struct {
		what string
		wall int64 // seconds that the new leader's clock differs
		want time.Duration
	}{
		{"as it is", 0, 6 * time.Second}, {"ahead", 3, 3 * time.Second}, {"far ahead", 1000, 0}, {"behind", -4, 10 * time.Second}, {"far behind", -1000, 10 * time.Second},
	} {
		k := newKit(t)
		k.wallMs = 5_000_000
		k.cfg.Interval = 10 * time.Second
		k.none(0)
		k.complete()
		k.now, k.wallMs = k.now+4*time.Second, k.wallMs+4000
		k.c = New()
		k.now = time.Second // of another machine
		k.wallMs = uint64(int64(k.wallMs) + 1000*x.wall)
		k.none(0)
		if x.want > 0 {
			k.none(x.want - time.Millisecond)
			if k.view().RunningCheckpoint() != nil {
				t.Errorf("%s: started early", x.what)
			}
		}
		k.none(time.Millisecond)
		if k.view().RunningCheckpoint() == nil {
			t.Errorf("%s: not started", x.what)
		}
	}
}

// What makes a checkpoint fail, and what it says then.
func TestCheckpointFails(t *testing.T) {
	for _, x := range []struct {
		what, want string
		do         func(k *kit)
	}{
		{"time", "not done after 1m0s; 1 of 2 shards are missing, the first is shard S1, announced on node n2", func(k *kit) {
			k.upload(1, 2)
			k.none(time.Minute - time.Millisecond)
			k.step(time.Millisecond)
		}},
		{"uploader down", "shard S1: node n2, which uploads it, is down", func(k *kit) {
			k.dead["n2"] = true
			k.none(0)
			k.none(4 * time.Second)
			k.dead["n2"] = false // it was only slow
			k.none(0)
			k.dead["n2"] = true
			k.none(4 * time.Second)
			k.none(4 * time.Second)
			if k.view().RunningCheckpoint() == nil {
				k.t.Error("failed early")
			}
			k.step(time.Second)
		}},
		{"replica gone", "the shard map has changed: node n2, which uploads shard S1, has no replica of it any more", func(k *kit) {
			s := k.view().Shard(1)
			k.do(meta.UpdateReplicasTxn(k.view(), 1, []meta.Replica{s.Replicas[0], s.Replicas[2]}, "n1"))
			k.step(0)
		}},
		{"store refuses", "storing _metadata: other bytes: conflicts with what exists", func(k *kit) {
			k.upload(1, 1)
			k.upload(1, 2)
			k.stored(k.one(0, StoreMetadata), fmt.Errorf("other bytes: %w", base.ErrConflict))
			k.step(0)
		}},
		{"store down", "not done after 1m0s; storing _metadata: down: the object store did not do what it was asked", func(k *kit) {
			k.upload(1, 1)
			k.upload(1, 2)
			tries := 0
			for range 1000 {
				for _, a := range k.step(100 * time.Millisecond) {
					if a.Kind == StoreMetadata {
						tries++
						k.stored(a, fmt.Errorf("down: %w", base.ErrObjectStore))
					}
				}
			}
			if tries < 5 || tries > 8 {
				k.t.Errorf("%d tries in a minute", tries)
			}
		}},
		{"store hangs", "not done after 1m0s; _metadata is not stored", func(k *kit) {
			k.upload(1, 1)
			k.upload(1, 2)
			a := k.one(0, StoreMetadata)
			k.step(time.Minute)
			k.stored(a, nil) // too late
			k.step(0)
		}},
	} {
		k := newKit(t)
		k.start()
		k.none(0)
		x.do(k)
		t.Log(x.what)
		k.failed(1, x.want)
		// The next one has nothing to do with it.
		for _, p := range k.view().Plans() {
			k.c.Deleted(k.now, p.ID, nil)
		}
		k.dead = map[base.NodeID]bool{}
		k.step(time.Minute)
		k.complete()
	}
}

// What failed, or changed, after a shard has uploaded does not matter any more.
func TestUploadedShardsNeedNothing(t *testing.T) {
	k := newKit(t)
	k.start()
	k.none(0)
	k.upload(1, 1)
	k.upload(1, 2)
	k.dead["n2"], k.dead["n3"] = true, true
	s := k.view().Shard(1)
	k.do(meta.UpdateReplicasTxn(k.view(), 1, s.Replicas[:1], "n1"))
	k.one(time.Minute-1, StoreMetadata)
}

// The answer of a store that comes after the next leader has gone on, or for
// another checkpoint, does nothing (CK3).
func TestLateAnswersAreIgnored(t *testing.T) {
	k := newKit(t)
	k.start()
	k.none(0)
	k.c.Stored(k.now, 9, [32]byte{}, 0, nil)
	k.c.Stored(k.now, 0, [32]byte{}, 0, nil)
	k.c.Deleted(k.now, 7, nil)
	k.upload(1, 1)
	k.upload(1, 2)
	old, a := k.c, k.one(0, StoreMetadata)
	k.c = New()
	b := k.one(0, StoreMetadata)
	old.Stored(k.now, a.Checkpoint, [32]byte{1}, 8, nil)
	if k.view().RunningCheckpoint() == nil {
		t.Fatal("completed by nobody")
	}
	k.stored(b, nil)
	k.step(0)
	if k.view().LastCheckpoint() == nil {
		t.Fatal("not completed")
	}
	// The deposed one proposes what changes nothing.
	k.c = old
	k.none(0)
}

// Delete plans are executed one after the other, tried again, and by every new
// leader.
func TestPlansAreExecutedInOrder(t *testing.T) {
	k := newKit(t)
	k.cfg.Retain = 3
	for range 3 {
		k.complete()
	}
	for n := range uint64(2) {
		k.do(meta.DeleteCheckpointTxn(k.view(), 1, n+1))
	}
	a := k.one(0, DeletePlanned)
	if a.Plan.ID != k.view().Plans()[0].ID {
		t.Fatalf("plan %d", a.Plan.ID)
	}
	k.none(time.Hour) // under way
	for _, pause := range []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second} {
		k.c.Deleted(k.now, a.Plan.ID, base.ErrObjectStore)
		k.none(pause - time.Millisecond)
		a = k.one(time.Millisecond, DeletePlanned)
	}
	k.c = New()
	a = k.one(0, DeletePlanned)
	k.c.Deleted(k.now, a.Plan.ID, nil)
	a = k.one(0, DeletePlanned)
	k.c.Deleted(k.now, a.Plan.ID, nil)
	k.none(0)
	if v := k.view(); len(v.Plans()) != 0 || v.ObjectCount() != 2 {
		t.Errorf("%d plans, %d objects", len(v.Plans()), v.ObjectCount())
	}
}

// A deletion that a running checkpoint holds up is planned by and by.
func TestDeletionsAreResumed(t *testing.T) {
	k := newKit(t)
	k.cfg.Retain = 3
	k.complete()
	k.complete()
	k.start()
	k.do(meta.DeleteCheckpointTxn(k.view(), 1, 1))
	k.none(0)
	if len(k.view().Plans()) != 0 {
		t.Fatal("planned while one runs")
	}
	k.one(time.Minute, DeletePlanned) // it fails at its timeout
	if k.view().Checkpoint(1) != nil {
		t.Error("checkpoint 1 is there")
	}
}

// Who gives up at the first proposal that fails has begun everything else.
func TestProposalsComeLast(t *testing.T) {
	k := newKit(t)
	k.complete()
	k.do(meta.DeleteCheckpointTxn(k.view(), 1, 1))
	k.start()
	k.cfg.Timeout, k.cfg.SweepInterval = time.Second, 8
	k.c = New()
	k.c.Step(k.input())
	k.c.Deleted(k.now, 1, base.ErrObjectStore)
	k.now += time.Minute
	var kinds []Kind
	for _, a := range k.c.Step(k.input()) {
		kinds = append(kinds, a.Kind)
	}
	if !slices.Equal(kinds, []Kind{DeletePlanned, FindOrphans, Propose}) {
		t.Errorf("%v", kinds)
	}
}

// Orphans are looked for at an interval and planned.
func TestSweeps(t *testing.T) {
	k := newKit(t)
	k.complete()
	k.none(time.Hour)
	k.cfg.SweepInterval = time.Minute
	k.c = New()
	k.none(0)
	k.none(time.Minute/8 - 1)
	k.one(1, FindOrphans)
	k.none(time.Hour)
	k.c.Found(k.now, k.cfg.SweepInterval, nil, base.ErrObjectStore)
	k.none(499 * time.Millisecond)
	k.one(time.Millisecond, FindOrphans)
	var keys []string
	for i := range meta.MaxPlannedPerTxn + 1 {
		keys = append(keys, fmt.Sprintf("c1/%064x.1", i))
	}
	keys = append(keys, k.view().CheckpointObjects(1)[0].Key, "c2/x")
	k.c.Found(k.now, k.cfg.SweepInterval, keys, nil)
	var planned int
	for {
		got := k.step(0)
		if len(got) == 0 {
			break
		}
		planned += len(got[0].Plan.Keys)
		k.c.Deleted(k.now, got[0].Plan.ID, nil)
	}
	if planned != meta.MaxPlannedPerTxn+1 || len(k.view().Plans()) != 0 || k.view().ObjectCount() != 2 {
		t.Errorf("%d planned, %d plans left, %d objects", planned, len(k.view().Plans()), k.view().ObjectCount())
	}
	k.none(59 * time.Second)
	k.one(time.Second, FindOrphans)
}

// What cannot be started is said, once in an interval.
func TestComplaints(t *testing.T) {
	k := newKit(t)
	k.cfg.Interval = time.Second
	k.none(0)
	// A shard that nobody holds is not in any cluster: the start is refused.
	v := k.view()
	s := *v.Shard(1)
	s.Replicas = nil
	raw, err := json.Marshal(map[string]any{"v": 1, "kind": "shard", "data": s})
	k.do(broadcast.Txn{Then: []broadcast.Op{broadcast.Put("meta/shard/0000000000000001", raw)}}, err)
	k.one(time.Second, Complain)
	k.none(999 * time.Millisecond)
	k.one(time.Millisecond, Complain)
}

// Before the founding, and before there are shards, nothing is done.
func TestNothingBeforeTheFounding(t *testing.T) {
	if got := New().Step(Input{}); len(got) != 0 {
		t.Error(got)
	}
}

// Equal inputs give equal actions (CK1).
func TestStepIsAFunction(t *testing.T) {
	k := newKit(t)
	k.cfg.Interval = time.Second
	k.c.Step(k.input())
	other := *k.c
	k.now += time.Second
	a, b := k.c.Step(k.input()), other.Step(k.input())
	if fmt.Sprintf("%+v", a) != fmt.Sprintf("%+v", b) || len(a) != 1 {
		t.Errorf("%+v and %+v", a, b)
	}
}

func TestKindsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for k := Propose; k <= Complain+1; k++ {
		if seen[k.String()] || k.String() == "" {
			t.Errorf("%q twice", k)
		}
		seen[k.String()] = true
	}
}
