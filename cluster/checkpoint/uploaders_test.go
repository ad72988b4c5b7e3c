package checkpoint

import (
	"bytes"
	"errors"
	"testing"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

func (k *kit) chosen(want1, want2 base.NodeID) {
	k.t.Helper()
	in := k.input()
	if got := Uploaders(&in); got[1] != want1 || got[2] != want2 || len(got) != 2 {
		k.t.Errorf("uploaders %v, want %s and %s", got, want1, want2)
	}
}

// CK4 and the order of preference.
func TestUploaders(t *testing.T) {
	k := newKit(t)
	k.chosen("n2", "n1") // followers, spread
	k.leader[2] = "n1"
	k.chosen("n2", "n3")
	k.leader[1], k.leader[2] = "", ""
	k.chosen("n1", "n2")
	k.leader[1], k.leader[2] = "n1", "n1"
	k.dead["n2"] = true
	k.chosen("n3", "n3")
	k.dead["n3"] = true
	k.chosen("n1", "n1")
	k.dead["n1"] = true
	k.chosen("n2", "n3") // all seem down: somebody
	k.dead = map[base.NodeID]bool{}
	k.complete()
	k.leader[1], k.leader[2] = "n2", "n3" // a change of leader changes nothing
	k.chosen("n2", "n3")
	k.complete()
	k.dead["n2"] = true
	k.chosen("n1", "n3")
	k.dead = map[base.NodeID]bool{}
	s := k.view().Shard(1)
	k.do(meta.UpdateReplicasTxn(k.view(), 1, []meta.Replica{s.Replicas[0], s.Replicas[2]}, "n1"))
	k.chosen("n1", "n3")
}

// Voters are preferred.
func TestLearnersUploadLast(t *testing.T) {
	k := newKit(t)
	s := k.view().Shard(1)
	learner := s.Replicas[1]
	learner.Role = meta.RoleLearner
	k.do(meta.UpdateReplicasTxn(k.view(), 1, []meta.Replica{s.Replicas[0], learner}, "n1"))
	k.chosen("n1", "n3")
}

// An uploader that fails where others do not is replaced; one that fails with
// all others is not.
func TestFailingUploaderIsReplaced(t *testing.T) {
	k := newKit(t)
	k.complete()
	k.chosen("n2", "n1")
	fail := func(uploaded bool) {
		c := k.start()
		if uploaded {
			k.upload(c.Number, 2)
		}
		s := k.view().CheckpointShard(c.Number, 1)
		k.do(meta.ReportFailedTxn(k.view(), k.wallMs, c.Number, 1, s.Attempt, "sick"))
	}
	for range 5 {
		fail(false)
	}
	k.chosen("n2", "n1")
	fail(true)
	k.chosen("n2", "n1")
	fail(true)
	k.chosen("n3", "n1")
	k.step(0)
	k.complete()
	k.chosen("n3", "n1")
}

// CK3, as far as the records decide; and the phases.
func TestMetadataOfACheckpoint(t *testing.T) {
	k := newKit(t)
	txn, _, _, err := meta.DeclareTxn(k.view(), meta.Declaration{Keyspace: "ks", Name: "gone", Kind: "value", KeyType: "string", ValueType: "int64", CodecVersion: 1}, nil)
	k.do(txn, err)
	k.do(meta.DropTxn(k.view(), "ks", "gone"))
	txn, _, _, err = meta.DeclareTxn(k.view(), meta.Declaration{Keyspace: "ks", Name: "s", Kind: "map", KeyType: "string", UserKeyType: "bool", ValueType: "int64", Function: "max", FunctionParams: "p", CodecVersion: 1}, nil)
	k.do(txn, err)
	c := k.start()
	k.upload(1, 1)
	k.upload(1, 2)
	if _, err := Metadata(k.view(), 1); !errors.Is(err, base.ErrConflict) {
		t.Errorf("before its phase: %v", err)
	}
	if _, err := Metadata(k.view(), 2); !errors.Is(err, base.ErrConflict) {
		t.Errorf("of none: %v", err)
	}
	k.one(0, StoreMetadata)
	m, err := Metadata(k.view(), 1)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if m.ClusterID != "c1" || m.M != 128 || m.Engine != "mem" || m.CreatedMs != c.CreatedMs || len(m.Shards) != 2 || len(m.Keyspaces) != 1 || len(m.States) != 2 || m.Shards[1].Range.Lo != 64 || m.Shards[0].Birth != 7 {
		t.Errorf("%+v", m)
	}
	k.wallMs += 1e6
	k.do(meta.AdmitNodeTxn(k.view(), meta.Node{ID: "n1", DiskID: "dn1", RaftAddr: "n1:1", Zone: "z"}))
	again, err := Metadata(k.view(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := again.Encode(); err != nil || !bytes.Equal(raw, b) {
		t.Errorf("other bytes: %v", err)
	}
}
