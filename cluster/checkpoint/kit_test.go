package checkpoint

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// kit is a founded cluster of three nodes and two shards, its metadata, and a
// coordinator.
type kit struct {
	t      *testing.T
	store  *broadcast.Store
	mirror *meta.Mirror
	c      *Coordinator
	cfg    Config
	now    time.Duration
	wallMs uint64
	dead   map[base.NodeID]bool
	leader map[base.GroupID]base.NodeID
}

func newKit(t *testing.T) *kit {
	s := broadcast.New(broadcast.Options{})
	k := &kit{t: t, store: s, mirror: meta.NewMirror(s), c: New(), now: time.Hour, wallMs: 1_000_000,
		dead: map[base.NodeID]bool{}, leader: map[base.GroupID]base.NodeID{1: "n1", 2: "n2"},
		cfg: Config{Retain: 1, Timeout: time.Minute, Lost: 5 * time.Second}}
	nodes := []base.NodeID{"n1", "n2", "n3"}
	spec := meta.FoundingSpec{Engine: "mem", Shards: 2}
	for _, n := range nodes {
		spec.Nodes = append(spec.Nodes, meta.FoundingNode{ID: n, RaftAddr: string(n) + ":1"})
	}
	txn, _, err := meta.FoundTxn(k.view(), meta.Founding{Spec: spec, Self: "n1", Cluster: "c1", FormatVersion: 1})
	k.do(txn, err)
	var replicas []meta.Replica
	for _, n := range nodes {
		k.do(meta.AdmitNodeTxn(k.view(), meta.Node{ID: n, DiskID: base.DiskID("d" + n), RaftAddr: string(n) + ":1"}))
		replicas = append(replicas, meta.Replica{Node: n, Generation: 1, ReplicaID: base.MakeReplicaID(n, 1), Role: meta.RoleVoter})
	}
	k.do(meta.PlaceShardsTxn(k.view(), []meta.Shard{
		{ID: 1, Lo: 0, Hi: 64, Epoch: 1, Birth: 7, Replicas: replicas, PreferredLeader: "n1"},
		{ID: 2, Lo: 64, Hi: 128, Epoch: 1, Birth: 8, Replicas: replicas, PreferredLeader: "n2"},
	}))
	return k
}

func (k *kit) view() *meta.View {
	k.t.Helper()
	v, err := k.mirror.View()
	if err != nil {
		k.t.Fatal(err)
	}
	return v
}

func (k *kit) do(txn broadcast.Txn, err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
	if err := k.try(txn); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) try(txn broadcast.Txn) error {
	k.t.Helper()
	b, err := broadcast.EncodeTxn(txn)
	if err != nil {
		k.t.Fatal(err)
	}
	res, err := k.store.Apply(k.store.Snapshot().AppliedIndex()+1, b)
	if err != nil {
		k.t.Fatal(err)
	}
	return res.Err()
}

func (k *kit) input() Input {
	return Input{Config: k.cfg, View: k.view(), Now: k.now, WallMs: k.wallMs,
		Alive: func(n base.NodeID) bool { return !k.dead[n] }, Leader: func(g base.GroupID) base.NodeID { return k.leader[g] }}
}

// step lets time pass and takes a step; transactions are applied, the other
// actions are returned.
func (k *kit) step(d time.Duration) (out []Action) {
	k.t.Helper()
	k.now += d
	k.wallMs += uint64(d.Milliseconds())
	for range 100 {
		proposed := false
		for _, a := range k.c.Step(k.input()) {
			if a.Kind != Propose {
				out = append(out, a)
				continue
			}
			proposed = true
			if err := k.try(a.Txn); err != nil && !errors.Is(err, base.ErrPrecondition) {
				k.t.Fatal(err)
			}
		}
		if !proposed {
			return out
		}
	}
	k.t.Fatal("the coordinator never rests")
	return nil
}

// one is step, for a single action of a kind.
func (k *kit) one(d time.Duration, kind Kind) Action {
	k.t.Helper()
	got := k.step(d)
	if len(got) != 1 || got[0].Kind != kind {
		k.t.Fatalf("actions %v, want one to %s", got, kind)
	}
	return got[0]
}

func (k *kit) none(d time.Duration) {
	k.t.Helper()
	if got := k.step(d); len(got) != 0 {
		k.t.Fatalf("actions %v, want none", got)
	}
}

// start starts a checkpoint as a user does.
func (k *kit) start() *meta.Checkpoint {
	k.t.Helper()
	in := k.input()
	txn, c, err := meta.StartCheckpointTxn(in.View, k.wallMs, Spec(&in, false))
	k.do(txn, err)
	return k.view().Checkpoint(c.Number)
}

func (k *kit) upload(number uint64, group base.GroupID) {
	k.t.Helper()
	s := k.view().CheckpointShard(number, group)
	text := fmt.Sprintf("manifest %d %d", number, group)
	sum := sha256.Sum256([]byte(text))
	o := meta.Object{Key: fmt.Sprintf("c1/%x.%d", sum, s.Attempt), Size: int64(len(text))}
	k.do(meta.ReportUploadedTxn(k.view(), k.wallMs, number, group, s.Attempt, meta.ShardReport{Index: 5, Term: 1, Sequence: 4, ClockMs: 3,
		ManifestKey: o.Key, ManifestSHA256: sum, ManifestSize: o.Size, FullBytes: 10, NewBytes: 5}, []meta.Object{o}, nil))
}

// complete takes a checkpoint through all phases.
func (k *kit) complete() uint64 {
	k.t.Helper()
	n := k.start().Number
	k.none(0)
	k.upload(n, 1)
	k.upload(n, 2)
	k.stored(k.one(0, StoreMetadata), nil)
	for _, a := range k.step(0) {
		k.c.Deleted(k.now, a.Plan.ID, nil)
	}
	k.step(0)
	if k.view().LastCheckpoint().Number != n {
		k.t.Fatalf("checkpoint %d has not completed: %+v", n, k.view().Checkpoint(n))
	}
	return n
}

func (k *kit) stored(a Action, err error) {
	k.c.Stored(k.now, a.Checkpoint, sha256.Sum256([]byte("metadata")), 8, err)
}

func (k *kit) failed(number uint64, want string) {
	k.t.Helper()
	if c := k.view().Checkpoint(number); c.Phase != meta.CheckpointFailed || c.Error != want {
		k.t.Errorf("checkpoint %d is %s: %q, want it failed: %q", number, c.Phase, c.Error, want)
	}
}
