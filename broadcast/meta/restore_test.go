package meta

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

func checkpointToRestore() *FoundingRestore {
	return &FoundingRestore{Key: "old/checkpoints/0000000007/_metadata", SHA256: Sum{1}, Incarnation: 4}
}

// restoring returns a world with three members whose founding restores.
func restoring(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, broadcast.Options{})
	s := spec("n1", "n2", "n3")
	s.Restore = checkpointToRestore()
	txn, _, err := FoundTxn(w.view(), Founding{Spec: s, Self: "n1", Cluster: "c1", FormatVersion: 1})
	w.do(txn, err)
	for _, n := range s.Nodes {
		w.do(AdmitNodeTxn(w.view(), Node{ID: n.ID, DiskID: base.DiskID("disk-" + n.ID), RaftAddr: n.RaftAddr}))
	}
	return w
}

func TestFoundingWithACheckpointIsResumedByTheSameAndRefusedForAnother(t *testing.T) {
	w := restoring(t)
	if c := w.view().Cluster(); c.Incarnation != 4 {
		t.Errorf("the cluster is %+v", c)
	}
	ask := func(key string) error {
		s := spec("n1", "n2", "n3")
		if key != "" {
			s.Restore = &FoundingRestore{Key: key}
		}
		_, op, err := FoundTxn(w.view(), Founding{Spec: s, Self: "n1", Cluster: "c1", FormatVersion: 1})
		if err == nil && (op == nil || op.ID != 1) {
			t.Errorf("the operation is %+v", op)
		}
		return err
	}
	for _, same := range []string{"old/checkpoints/0000000007/_metadata", "old/latest"} {
		if err := ask(same); err != nil {
			t.Errorf("%s: %v", same, err)
		}
	}
	for _, other := range []string{"", "old/checkpoints/0000000008/_metadata", "older/latest", "ol/latest"} {
		wantField(t, other, ask(other), base.ErrAlreadyFounded, "restore")
	}
	claimed := spec("n1", "n2", "n3")
	claimed.Restore = &FoundingRestore{Key: "old/latest", Claim: true}
	_, _, err := FoundTxn(w.view(), Founding{Spec: claimed, Self: "n1", Cluster: "c1", FormatVersion: 1})
	wantField(t, "claimed", err, base.ErrAlreadyFounded, "restore")
	s := spec("n1")
	for name, r := range map[string]*FoundingRestore{
		"no hash":        {Key: "old/checkpoints/0000000007/_metadata", Incarnation: 1},
		"no incarnation": {Key: "old/checkpoints/0000000007/_metadata", SHA256: Sum{1}},
		"the latest":     {Key: "old/latest", SHA256: Sum{1}, Incarnation: 1},
	} {
		s.Restore = r
		_, _, err := FoundTxn(newWorld(t, broadcast.Options{}).view(), Founding{Spec: s, Self: "n1", Cluster: "c1", FormatVersion: 1})
		wantField(t, name, err, base.ErrInvalid, "restore")
	}
}

// States keep their numbers, dropped ones too, whatever many transactions that
// takes, and no number is given twice (ME1).
func TestRestoredStatesKeepTheirNumbers(t *testing.T) {
	w := restoring(t)
	want := RestoredStates{Keyspaces: []Keyspace{{Name: "k", KeyType: "string"}}}
	const states = 5000
	for i := range states {
		d := Declaration{ID: uint32(2*i + 3), Keyspace: "k", Name: fmt.Sprint("s", i), Kind: "value", KeyType: "string", ValueType: "int64"}
		if i%10 == 0 {
			d.DroppedMs = 5
		}
		want.States = append(want.States, d)
	}
	txns := 0
	for {
		txn, err := RestoreStatesTxn(w.quick(), want)
		if err != nil {
			t.Fatal(err)
		}
		if Empty(txn) {
			break
		}
		w.do(txn, nil)
		txns++
	}
	v := w.view()
	if len(v.States()) != states*9/10 || len(v.Dropped()) != states/10 || txns < 3 {
		t.Errorf("%d states, %d dropped, in %d transactions", len(v.States()), len(v.Dropped()), txns)
	}
	if d := v.State("k", "s7"); d == nil || d.ID != 17 {
		t.Errorf("s7 is %+v", d)
	}
	fresh := Declaration{Keyspace: "k", Name: "new", Kind: "value", KeyType: "string", ValueType: "int64"}
	if _, _, _, err := DeclareTxn(v, fresh, nil); !errors.Is(err, base.ErrNotReady) {
		t.Errorf("declaring while a checkpoint is restored: %v", err)
	}
	w.do(AdvanceOperationTxn(v, 1, foundingOperation, PhaseDone, ""))
	txn, d, _, err := DeclareTxn(w.view(), fresh, nil)
	if w.do(txn, err); d.ID != 2*states+2 {
		t.Errorf("the next state has number %d", d.ID)
	}
	if _, err := RestoreStatesTxn(w.view(), want); !errors.Is(err, base.ErrConflict) {
		t.Errorf("restoring into a cluster that is founded: %v", err)
	}
}

func TestRestoredStatesThatDoNotFitAreRefused(t *testing.T) {
	w := restoring(t)
	good := RestoredStates{Keyspaces: []Keyspace{{Name: "k", KeyType: "string"}},
		States: []Declaration{{ID: 1, Keyspace: "k", Name: "s", Kind: "value", KeyType: "string", ValueType: "int64"}}}
	w.do(RestoreStatesTxn(w.view(), good))
	other := good
	other.States = []Declaration{good.States[0]}
	other.States[0].Name = "t"
	if _, err := RestoreStatesTxn(w.view(), other); !errors.Is(err, base.ErrConflict) {
		t.Errorf("another state under a number: %v", err)
	}
	other.States[0] = good.States[0]
	other.States[0].Keyspace = strings.Repeat("x", MaxNameBytes+1)
	if _, err := RestoreStatesTxn(w.view(), other); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a long name: %v", err)
	}
	if _, err := RestoreStatesTxn(founded(t).view(), good); !errors.Is(err, base.ErrConflict) {
		t.Errorf("into a cluster that restores nothing: %v", err)
	}
}

// The first configuration of a shard from a checkpoint stays what it was, whoever
// holds the shard later.
func TestSeedsNameTheFirstVoters(t *testing.T) {
	w := restoring(t)
	_, spec, err := w.view().FoundingOperation()
	if err != nil {
		t.Fatal(err)
	}
	shards := tiling(2, 128)
	for i := range shards {
		shards[i].Seed = NewShardSeed(10, 3, spec, shards[i].Replicas)
	}
	for name, bad := range map[string]*ShardSeed{
		"no index":     NewShardSeed(0, 3, spec, shards[0].Replicas),
		"no term":      NewShardSeed(10, 0, spec, shards[0].Replicas),
		"too few":      {Index: 10, Term: 3, Nodes: []int{0, 1}},
		"others":       {Index: 10, Term: 3, Nodes: []int{1, 0, 2}},
		"out of range": {Index: 10, Term: 3, Nodes: []int{0, 1, 3}},
	} {
		wrong := tiling(2, 128)
		wrong[0].Seed = bad
		_, err := PlaceShardsTxn(w.view(), wrong)
		wantField(t, name, err, base.ErrInvalid, "seed")
	}
	w.do(PlaceShardsTxn(w.view(), shards))
	w.do(UpdateReplicasTxn(w.view(), 1, append(replicas(4, "n1"), replicas(1, "n2", "n3")...), "n2"))
	got, err := w.view().Shard(1).Seed.Voters(spec)
	if err != nil || fmt.Sprint(got) != "[n1 n2 n3]" {
		t.Errorf("%v, %v", got, err)
	}
	plain := founded(t)
	if _, err := PlaceShardsTxn(plain.view(), shards); err == nil {
		t.Error("shards from a checkpoint in a cluster without one")
	}
}

// What a founding could not take over is refused before anything is durable: the
// `_metadata` may be anybody's.
func TestRestoredStatesAreChecked(t *testing.T) {
	whole := func() *RestoredStates {
		return &RestoredStates{
			Keyspaces: []Keyspace{{Name: "k", KeyType: "string"}, {Name: "l", KeyType: "int64"}},
			States: []Declaration{{ID: 1, Keyspace: "k", Name: "a", Kind: "value", KeyType: "string"},
				{ID: 2, Keyspace: "k", Name: "a", Kind: "value", KeyType: "string", DroppedMs: 5}, {ID: 3, Keyspace: "l", Name: "a", Kind: "list", KeyType: "int64"}},
			Positions: []RestoredPosition{{Participant: "p", Bytes: make([]byte, MaxPositionBytes)}, {Participant: "q"}},
		}
	}
	if err := whole().Check(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*RestoredStates){
		"a keyspace without a name":   func(r *RestoredStates) { r.Keyspaces[0].Name = "" },
		"a keyspace twice":            func(r *RestoredStates) { r.Keyspaces[1].Name = "k" },
		"a name with a slash":         func(r *RestoredStates) { r.States[0].Name = "a/b" },
		"a number twice":              func(r *RestoredStates) { r.States[2].ID = 1 },
		"the number of a dropped one": func(r *RestoredStates) { r.States[2].ID = 2 },
		"no number":                   func(r *RestoredStates) { r.States[0].ID = 0 },
		"a state twice":               func(r *RestoredStates) { r.States[1].DroppedMs = 0 },
		"a state of no kind":          func(r *RestoredStates) { r.States[0].Kind = "" },
		"a participant twice":         func(r *RestoredStates) { r.Positions[1].Participant = "p" },
		"a participant of no name":    func(r *RestoredStates) { r.Positions[1].Participant = "" },
		"a position that is too long": func(r *RestoredStates) { r.Positions[0].Bytes = make([]byte, MaxPositionBytes+1) },
	} {
		r := whole()
		spoil(r)
		if err := r.Check(); !errors.Is(err, base.ErrInvalid) && !errors.Is(err, base.ErrTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
