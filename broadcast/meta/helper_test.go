package meta

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"reflect"
	"testing"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fataler is what *testing.T and *rapid.T share.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// world is a store with its mirror.
type world struct {
	t      fataler
	store  *broadcast.Store
	mirror *Mirror
}

func newWorld(t fataler, opts broadcast.Options) *world {
	s := broadcast.New(opts)
	return &world{t: t, store: s, mirror: NewMirror(s)}
}

// view returns the mirror's view, after comparing it with one decoded afresh.
func (w *world) view() *View {
	w.t.Helper()
	v, err := w.mirror.View()
	if err != nil {
		w.t.Fatalf("View: %v", err)
	}
	fresh, err := NewView(w.store.Snapshot())
	if err != nil {
		w.t.Fatalf("NewView: %v", err)
	}
	if got, want := dumpView(v), dumpView(fresh); got != want {
		w.t.Fatalf("the mirror shows\n%s\na fresh view\n%s", got, want)
	}
	return v
}

// quick is view without the comparison, for long loops.
func (w *world) quick() *View {
	w.t.Helper()
	v, err := w.mirror.View()
	if err != nil {
		w.t.Fatalf("View: %v", err)
	}
	return v
}

// try applies a transaction and returns its result's error.
func (w *world) try(txn broadcast.Txn) error {
	w.t.Helper()
	b, err := broadcast.EncodeTxn(txn)
	if err != nil {
		w.t.Fatalf("EncodeTxn: %v", err)
	}
	res, err := w.store.Apply(w.store.Snapshot().AppliedIndex()+1, b)
	if err != nil {
		w.t.Fatalf("Apply: %v", err)
	}
	return res.Err()
}

func (w *world) do(txn broadcast.Txn, err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf("building: %v", err)
	}
	if err := w.try(txn); err != nil {
		w.t.Fatalf("applying: %v", err)
	}
}

func (w *world) tick(ms uint64) {
	w.t.Helper()
	if _, err := w.store.Apply(w.store.Snapshot().AppliedIndex()+1, broadcast.EncodeTick(ms)); err != nil {
		w.t.Fatalf("Tick: %v", err)
	}
}

func dumpAll[T any](s string, name string, list []*T) string {
	b := []byte(s)
	for _, x := range list {
		b = fmt.Appendf(b, "%s %+v\n", name, *x)
	}
	return string(b)
}

// dumpView prints everything that a view answers.
func dumpView(v *View) string {
	s := fmt.Sprintf("revision %d clock %d floor %d next %d %d sessions %d ended %d\n", v.Revision(), v.Clock(), v.EndedFloor(), v.NextSessionID(), v.NextShardID(), v.SessionCount(), v.EndedCount())
	if c := v.Cluster(); c != nil {
		s += fmt.Sprintf("cluster %+v\n", *c)
	}
	s = dumpAll(s, "node", v.Nodes())
	s = dumpAll(s, "shard", v.Shards())
	s = dumpAll(s, "keyspace", v.Keyspaces())
	s = dumpAll(s, "state", v.States())
	s = dumpAll(s, "named", v.states.Values())
	s = dumpAll(s, "dropped", v.Dropped())
	s = dumpAll(s, "session", v.sessions.Values())
	ended, complete := v.Ended(0, 0)
	s = dumpAll(s, fmt.Sprintf("ended %v", complete), ended)
	s = dumpAll(s, "ended by id", v.endedByID.Values())
	s = dumpAll(s, "counter", v.counters.Values())
	s = dumpAll(s, "operation", v.Operations())
	return s + dumpCheckpoints(v)
}

func wantField(t *testing.T, what string, err error, sentinel *base.Sentinel, field string) {
	t.Helper()
	var e *base.Error
	if !errors.Is(err, sentinel) || (field != "" && (!errors.As(err, &e) || e.Field != field)) {
		t.Errorf("%s: %v, want %v at %q", what, err, sentinel, field)
	}
}

func spec(nodes ...string) FoundingSpec {
	s := FoundingSpec{Engine: "rocks"}
	for _, n := range nodes {
		s.Nodes = append(s.Nodes, FoundingNode{ID: base.NodeID(n), RaftAddr: n + ":7411"})
	}
	return s
}

// founded returns a world with three member nodes and placed shards.
func founded(t fataler) *world {
	w := newWorld(t, broadcast.Options{})
	txn, _, err := FoundTxn(w.view(), Founding{Spec: spec("n1", "n2", "n3"), Self: "n1", Cluster: "c1", FormatVersion: 1, NowMs: 1000})
	w.do(txn, err)
	for _, n := range []base.NodeID{"n1", "n2", "n3"} {
		w.do(AdmitNodeTxn(w.view(), Node{ID: n, DiskID: base.DiskID("disk-" + n), RaftAddr: string(n) + ":7411", GRPCAddr: string(n) + ":7401"}))
	}
	w.do(PlaceShardsTxn(w.view(), tiling(4, 128)))
	return w
}

func replicas(generation uint64, nodes ...base.NodeID) []Replica {
	var list []Replica
	for _, n := range nodes {
		list = append(list, Replica{Node: n, Generation: generation, ReplicaID: base.MakeReplicaID(n, generation), Role: RoleVoter})
	}
	return list
}

func tiling(shards, m int) []Shard {
	var list []Shard
	for i := range shards {
		list = append(list, Shard{
			ID: base.GroupID(i + 1), Lo: i * m / shards, Hi: (i + 1) * m / shards, Epoch: 1, Birth: base.Birth(1<<63 + uint64(i)),
			Replicas: replicas(1, "n1", "n2", "n3"), PreferredLeader: "n2",
		})
	}
	return list
}

func readGolden(t *testing.T, path string, got []byte) []byte {
	t.Helper()
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s differs from what this build writes (-rewrite, and review the diff):\n%s", path, got)
	}
	return want
}
