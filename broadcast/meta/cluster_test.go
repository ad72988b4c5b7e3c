package meta

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

func TestFoundingDefaults(t *testing.T) {
	for _, c := range []struct {
		nodes                         int
		set                           FoundingSpec
		shards, keyGroups, replicaton int
	}{
		{1, FoundingSpec{}, 2, 128, 1},
		{2, FoundingSpec{}, 3, 128, 2},
		{3, FoundingSpec{}, 4, 128, 3},
		{5, FoundingSpec{}, 7, 128, 3},
		{3, FoundingSpec{Shards: 500}, 500, 500, 3},
		{3, FoundingSpec{KeyGroups: 2}, 2, 2, 3},
		{3, FoundingSpec{KeyGroups: 32768, Shards: 9, Replication: 1}, 9, 32768, 1},
	} {
		s := c.set
		s.Engine = "mem"
		for i := range c.nodes {
			s.Nodes = append(s.Nodes, FoundingNode{ID: base.NodeID(fmt.Sprint("n", i)), RaftAddr: fmt.Sprint("a", i)})
		}
		got, err := s.Resolve()
		if err != nil || got.Shards != c.shards || got.KeyGroups != c.keyGroups || got.Replication != c.replicaton {
			t.Errorf("%d nodes, %+v: %+v, %v", c.nodes, c.set, got, err)
		}
	}
	for field, change := range map[string]func(*FoundingSpec){
		"nodes":       func(s *FoundingSpec) { s.Nodes = nil },
		"nodes[n1]":   func(s *FoundingSpec) { s.Nodes[1].ID = "n1" },
		"nodes[n2]":   func(s *FoundingSpec) { s.Nodes[1].RaftAddr = s.Nodes[0].RaftAddr },
		"engine":      func(s *FoundingSpec) { s.Engine = "" },
		"replication": func(s *FoundingSpec) { s.Replication = 3 },
		"shards":      func(s *FoundingSpec) { s.Shards = MaxFoundingShards + 1 },
		"key_groups":  func(s *FoundingSpec) { s.KeyGroups, s.Shards = 3, 4 },
	} {
		s := spec("n1", "n2")
		change(&s)
		_, err := s.Resolve()
		wantField(t, field, err, base.ErrInvalid, field)
	}
	s := spec("n1", "n2")
	s.KeyGroups = MaxKeyGroups + 1
	_, err := s.Resolve()
	wantField(t, "too many key groups", err, base.ErrInvalid, "key_groups")
}

func TestFoundingIsResumedByTheSameAndRefusedForAnother(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	call := func(change func(*Founding)) (broadcast.Txn, *Operation, error) {
		f := Founding{Spec: spec("n2", "n1"), Self: "n1", Cluster: "c1", FormatVersion: 1, NowMs: 1000}
		change(&f)
		return FoundTxn(w.view(), f)
	}
	same := func(*Founding) {}
	_, _, err := call(func(f *Founding) { f.Self = "n3" })
	wantField(t, "called on a node that is not listed", err, base.ErrInvalid, "nodes")
	txn, op, err := call(same)
	w.do(txn, err)
	if op.ID != 1 || op.Phase != PhaseFoundAdmit || w.view().Cluster().ID != "c1" || w.view().Cluster().KeyGroups != 128 || len(w.view().Nodes()) != 2 {
		t.Fatalf("founded: %+v\n%s", op, dumpView(w.view()))
	}
	if err := w.try(txn); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("the same transaction twice: %v", err)
	}
	txn, again, err := call(func(f *Founding) { f.Cluster, f.Self, f.Spec = "c2", "n2", spec("n1", "n2") })
	if err != nil || !Empty(txn) || again.ID != op.ID {
		t.Errorf("the same init again: %+v, %+v, %v", txn, again, err)
	}
	for field, change := range map[string]func(*Founding){
		"nodes":       func(f *Founding) { f.Spec = spec("n1", "n2", "n3") },
		"shards":      func(f *Founding) { f.Spec.Shards = 2 },
		"key_groups":  func(f *Founding) { f.Spec.KeyGroups = 64 },
		"replication": func(f *Founding) { f.Spec.Replication = 1 },
		"engine":      func(f *Founding) { f.Spec.Engine = "mem" },
	} {
		_, _, err := call(change)
		wantField(t, field, err, base.ErrAlreadyFounded, field)
	}
	if !w.view().FoundingUnderWay() {
		t.Error("the founding is not under way after its begin")
	}
	// The founding stays known, however many operations follow it.
	w.do(AdvanceOperationTxn(w.view(), 1001, 1, PhaseDone, ""))
	for range MaxFinishedOperations + 5 {
		txn, op, err := StartOperationTxn(w.quick(), 1002, "test", "first", nil)
		w.do(txn, err)
		w.do(AdvanceOperationTxn(w.quick(), 1003, op.ID, PhaseFailed, "because"))
	}
	if n := len(w.view().Operations()); n > MaxFinishedOperations+2 {
		t.Errorf("%d operations are kept", n)
	}
	if txn, again, err := call(same); err != nil || !Empty(txn) || !again.Finished() {
		t.Errorf("the same init much later: %+v, %v", again, err)
	}
	if w.view().FoundingUnderWay() {
		t.Error("the founding goes on after its end")
	}
	if _, s, err := w.view().FoundingOperation(); err != nil || s.Shards != 3 {
		t.Errorf("the founding's specification: %+v, %v", s, err)
	}
}

func TestNodeIdentity(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	if _, err := JoinNodeTxn(w.view(), "n1", "a"); !errors.Is(err, base.ErrNotFounded) {
		t.Errorf("joining nothing: %v", err)
	}
	w = founded(t)
	n1 := *w.view().Node("n1")
	for name, change := range map[string]func(*Node){
		"not listed":         func(n *Node) { n.ID = "n9" },
		"a wiped disk":       func(n *Node) { n.DiskID = "other" },
		"no disk":            func(n *Node) { n.DiskID = "" },
		"another's disk":     func(n *Node) { n.DiskID = "disk-n2" },
		"its disk elsewhere": func(n *Node) { n.ID, n.DiskID = "n2", "disk-n1" },
	} {
		n := n1
		change(&n)
		_, err := AdmitNodeTxn(w.view(), n)
		wantField(t, name, err, base.ErrIdentity, "")
	}
	if txn, err := AdmitNodeTxn(w.view(), n1); err != nil || !Empty(txn) {
		t.Errorf("admitted again: %+v, %v", txn, err)
	}
	moved := n1
	moved.RaftAddr = "elsewhere:1"
	w.do(AdmitNodeTxn(w.view(), moved))
	if n := w.view().Node("n1"); n.RaftAddr != "elsewhere:1" || n.State != NodeMember || n.DiskID != "disk-n1" {
		t.Errorf("moved: %+v", n)
	}
	w.do(JoinNodeTxn(w.view(), "n4", "n4:1"))
	w.do(JoinNodeTxn(w.view(), "n5", "n5:1"))
	if txn, err := JoinNodeTxn(w.view(), "n4", "n4:1"); err != nil || !Empty(txn) {
		t.Errorf("joining again: %v", err)
	}
	_, err := JoinNodeTxn(w.view(), "n1", "n1:7411")
	wantField(t, "joining under a used id", err, base.ErrConflict, "node")
	// ME5: one disk under two ids, from one view: only one of them can win.
	four, err := AdmitNodeTxn(w.view(), Node{ID: "n4", DiskID: "d", RaftAddr: "n4:1"})
	if err != nil {
		t.Fatal(err)
	}
	five, err := AdmitNodeTxn(w.view(), Node{ID: "n5", DiskID: "d", RaftAddr: "n5:1"})
	w.do(four, nil)
	if err != nil || !errors.Is(w.try(five), base.ErrPrecondition) {
		t.Errorf("a disk under a second id: %v", err)
	}
}

func TestNodeStates(t *testing.T) {
	w := founded(t)
	w.do(SetNodeStateTxn(w.view(), "n1", NodeDraining))
	n := *w.view().Node("n1")
	n.Zone = "z"
	w.do(AdmitNodeTxn(w.view(), n))
	if w.view().Node("n1").State != NodeDraining {
		t.Error("a restart ended the draining")
	}
	_, err := SetNodeStateTxn(w.view(), "n1", NodeJoining)
	wantField(t, "back to joining", err, base.ErrConflict, "state")
	_, err = SetNodeStateTxn(w.view(), "n1", NodeRemoved)
	wantField(t, "removed with replicas", err, base.ErrConflict, "node")
	_, err = SetNodeStateTxn(w.view(), "n9", NodeRemoved)
	wantField(t, "unknown", err, base.ErrNotFound, "node")
	for _, s := range w.view().Shards() {
		w.do(UpdateReplicasTxn(w.view(), s.ID, replicas(1, "n2", "n3"), "n3"))
	}
	remove, err := SetNodeStateTxn(w.view(), "n1", NodeRemoved)
	if err != nil {
		t.Fatal(err)
	}
	// A replica that is placed on the node meanwhile keeps it from being removed.
	w.do(UpdateReplicasTxn(w.view(), 2, append(replicas(1, "n2", "n3"), replicas(2, "n1")...), "n3"))
	if err := w.try(remove); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("removal beside a placement: %v", err)
	}
	place, err := UpdateReplicasTxn(w.view(), 3, append(replicas(1, "n2", "n3"), replicas(2, "n1")...), "n3")
	if err != nil {
		t.Fatal(err)
	}
	w.do(UpdateReplicasTxn(w.view(), 2, replicas(1, "n2", "n3"), "n3"))
	w.do(SetNodeStateTxn(w.view(), "n1", NodeRemoved))
	if err := w.try(place); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("a placement beside the removal: %v", err)
	}
	_, err = AdmitNodeTxn(w.view(), n)
	wantField(t, "a removed node comes back", err, base.ErrIdentity, "node")
	_, err = SetNodeStateTxn(w.view(), "n1", NodeMember)
	wantField(t, "a removed node", err, base.ErrConflict, "state")
}

func TestPlacingShards(t *testing.T) {
	if _, err := PlaceShardsTxn(newWorld(t, broadcast.Options{}).view(), nil); !errors.Is(err, base.ErrNotFounded) {
		t.Errorf("before the founding: %v", err)
	}
	w := founded(t)
	if v := w.view(); len(v.Shards()) != 4 || v.NextShardID() != 5 || v.Shard(4).Birth != 1<<63+3 || v.Shard(4).MaxGeneration != 1 {
		t.Fatalf("placed: %s", dumpView(v))
	}
	_, err := PlaceShardsTxn(w.view(), tiling(4, 128))
	wantField(t, "placing twice", err, base.ErrConflict, "shards")

	w = newWorld(t, broadcast.Options{})
	txn, _, err := FoundTxn(w.view(), Founding{Spec: spec("n1", "n2", "n3", "n4"), Self: "n1", Cluster: "c1", FormatVersion: 1})
	w.do(txn, err)
	for _, n := range []base.NodeID{"n1", "n2", "n3"} {
		w.do(AdmitNodeTxn(w.view(), Node{ID: n, DiskID: base.DiskID(n), RaftAddr: string(n)}))
	}
	for name, c := range map[string]struct {
		sentinel *base.Sentinel
		change   func([]Shard) []Shard
	}{
		"none":                  {base.ErrInvalid, func([]Shard) []Shard { return nil }},
		"a gap":                 {base.ErrInvalid, func(s []Shard) []Shard { s[1].Lo++; return s }},
		"an overlap":            {base.ErrInvalid, func(s []Shard) []Shard { s[1].Lo--; return s }},
		"an empty range":        {base.ErrInvalid, func(s []Shard) []Shard { s[0].Hi = 0; return s }},
		"the end is missing":    {base.ErrInvalid, func(s []Shard) []Shard { return s[:3] }},
		"beyond the end":        {base.ErrInvalid, func(s []Shard) []Shard { s[3].Hi++; return s }},
		"an id twice":           {base.ErrConflict, func(s []Shard) []Shard { s[0].ID = s[1].ID; return s }},
		"the system group's id": {base.ErrConflict, func(s []Shard) []Shard { s[0].ID = 0; return s }},
		"no epoch":              {base.ErrInvalid, func(s []Shard) []Shard { s[0].Epoch = 0; return s }},
		"no birth":              {base.ErrInvalid, func(s []Shard) []Shard { s[0].Birth = 0; return s }},
		"no replica":            {base.ErrInvalid, func(s []Shard) []Shard { s[0].Replicas = nil; return s }},
		"no voter": {base.ErrInvalid, func(s []Shard) []Shard {
			s[0].Replicas = s[0].Replicas[:1]
			s[0].Replicas[0].Role = RoleLearner
			return s
		}},
		"an unknown role":           {base.ErrInvalid, func(s []Shard) []Shard { s[0].Replicas[0].Role = "x"; return s }},
		"a joining node":            {base.ErrInvalid, func(s []Shard) []Shard { s[0].Replicas = replicas(1, "n4"); return s }},
		"an unknown node":           {base.ErrInvalid, func(s []Shard) []Shard { s[0].Replicas = replicas(1, "n9"); return s }},
		"a node twice":              {base.ErrInvalid, func(s []Shard) []Shard { s[0].Replicas = replicas(1, "n1", "n1"); return s }},
		"another replica id":        {base.ErrInvalid, func(s []Shard) []Shard { s[0].Replicas[0].ReplicaID = "n1/2"; return s }},
		"a leader that is no voter": {base.ErrInvalid, func(s []Shard) []Shard { s[0].PreferredLeader = "n4"; return s }},
	} {
		txn, err := PlaceShardsTxn(w.view(), c.change(tiling(4, 128)))
		wantField(t, name, err, c.sentinel, "")
		if !Empty(txn) {
			t.Errorf("%s: a refused placement has a transaction", name)
		}
	}
	backwards := tiling(4, 128)
	slices.Reverse(backwards)
	place, err := PlaceShardsTxn(w.view(), backwards)
	if err != nil {
		t.Fatal(err)
	}
	next, err := AdvanceOperationTxn(w.view(), 5, 1, PhaseDone, "")
	w.do(Join(place, next), err)
	if err := w.try(place); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("placing twice from one view: %v", err)
	}
	if v := w.view(); len(v.Shards()) != 4 || !v.Operation(1).Finished() {
		t.Errorf("placed with its operation: %s", dumpView(v))
	}
}

// The longest names still fit into one command.
func TestLargestFoundingFitsIntoOneCommand(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	s := FoundingSpec{Engine: "rocks", Shards: MaxFoundingShards, Restore: checkpointToRestore()}
	var ids []base.NodeID
	for i := range 5 {
		id := strings.Repeat(fmt.Sprint(i), MaxNameBytes)
		s.Nodes = append(s.Nodes, FoundingNode{ID: base.NodeID(id), RaftAddr: id})
		ids = append(ids, base.NodeID(id))
	}
	txn, _, err := FoundTxn(w.view(), Founding{Spec: s, Self: ids[0], Cluster: "c", FormatVersion: 1})
	w.do(txn, err)
	for _, id := range ids {
		w.do(AdmitNodeTxn(w.view(), Node{ID: id, DiskID: base.DiskID(id), RaftAddr: string(id)}))
	}
	shards := tiling(MaxFoundingShards, MaxFoundingShards)
	for i := range shards {
		shards[i].Replicas, shards[i].PreferredLeader = replicas(1, ids...), ids[0]
		shards[i].Seed = NewShardSeed(math.MaxUint64, math.MaxUint64, s, shards[i].Replicas)
	}
	w.do(PlaceShardsTxn(w.view(), shards))
}

func TestUpdatingReplicas(t *testing.T) {
	w := founded(t)
	old := w.view()
	if txn, err := UpdateReplicasTxn(old, 1, replicas(1, "n1", "n2", "n3"), "n2"); err != nil || !Empty(txn) {
		t.Errorf("no change: %+v, %v", txn, err)
	}
	_, err := UpdateReplicasTxn(old, 9, replicas(1, "n1"), "n1")
	wantField(t, "unknown shard", err, base.ErrNotFound, "shard")
	_, err = UpdateReplicasTxn(old, 1, nil, "")
	wantField(t, "no replica", err, base.ErrInvalid, "")
	// n1 is rebuilt under a new replica id, then leaves; it comes back only
	// above everything the shard has seen (rule R3).
	w.do(UpdateReplicasTxn(w.view(), 1, append(replicas(4, "n1"), replicas(1, "n2", "n3")...), "n2"))
	late, err := UpdateReplicasTxn(old, 1, replicas(1, "n1", "n2"), "n2")
	if err != nil || !errors.Is(w.try(late), base.ErrPrecondition) {
		t.Errorf("from an old view: %v", err)
	}
	w.do(UpdateReplicasTxn(w.view(), 1, replicas(1, "n2", "n3"), "n2"))
	for _, generation := range []uint64{1, 4} {
		_, err := UpdateReplicasTxn(w.view(), 1, append(replicas(generation, "n1"), replicas(1, "n2", "n3")...), "n2")
		wantField(t, "a used generation", err, base.ErrConflict, "replicas")
	}
	w.do(UpdateReplicasTxn(w.view(), 1, append(replicas(5, "n1"), replicas(1, "n2", "n3")...), "n1"))
	if s := w.view().Shard(1); s.MaxGeneration != 5 || s.PreferredLeader != "n1" || s.Epoch != 1 || s.Hi != 32 {
		t.Errorf("updated: %+v", s)
	}
}

func TestOperations(t *testing.T) {
	w := founded(t)
	txn, op, err := StartOperationTxn(w.view(), 2000, "move", "copy", map[string]int{"shard": 1})
	w.do(txn, err)
	if got := w.view().Operation(op.ID); got.ID != 2 || got.Phase != "copy" || string(got.Spec) != `{"shard":1}` || got.CreatedMs != 2000 {
		t.Errorf("started: %+v", got)
	}
	w.do(AdvanceOperationTxn(w.view(), 2001, 2, "switch", strings.Repeat("ü", MaxOperationErrorBytes)))
	if got := w.view().Operation(2); got.UpdatedMs != 2001 || len(got.Error) > MaxOperationErrorBytes+2 {
		t.Errorf("advanced: %d bytes of error at %d", len(got.Error), got.UpdatedMs)
	}
	late, err := AdvanceOperationTxn(w.view(), 2002, 2, "late", "")
	w.do(AdvanceOperationTxn(w.view(), 2002, 2, PhaseFailed, "no"))
	if err != nil || !errors.Is(w.try(late), base.ErrPrecondition) {
		t.Errorf("two drivers: %v", err)
	}
	_, err = AdvanceOperationTxn(w.view(), 2003, 2, "again", "")
	wantField(t, "an ended operation", err, base.ErrConflict, "phase")
	_, err = AdvanceOperationTxn(w.view(), 2003, 77, "again", "")
	wantField(t, "an unknown operation", err, base.ErrNotFound, "operation")
	_, err = AdvanceOperationTxn(w.view(), 2003, 1, "", "")
	wantField(t, "no phase", err, base.ErrInvalid, "phase")
	if _, _, err := StartOperationTxn(w.view(), 1, "bad", "first", func() {}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a specification that is no JSON: %v", err)
	}
	if _, _, err := StartOperationTxn(w.view(), 1, "big", "first", strings.Repeat("x", MaxRecordBytes)); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("a specification over the limit: %v", err)
	}
}
