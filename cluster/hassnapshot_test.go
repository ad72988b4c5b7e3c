package cluster

import (
	"testing"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/cluster/transport"
)

// What a snapshot covers is had if a snapshot of the replica's own covers it,
// whatever the log still holds, or if the log goes on behind it.
func TestSnapshotThatIsHadIsNotGivenToRaft(t *testing.T) {
	type logRange struct{ lo, hi uint64 } // entries held; hi 0: none
	cases := []struct {
		name     string
		own      uint64 // index of the replica's own snapshot, 0: none
		log      logRange
		meta     transport.SnapshotMeta
		have     bool
		highest  uint64
		leadTerm uint64
	}{
		{name: "an empty replica", meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}},
		{name: "an older own snapshot", own: 4, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}},
		{name: "the same own snapshot, log empty", own: 5, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}, have: true},
		{name: "a newer own snapshot, log cut behind", own: 20, log: logRange{18, 30}, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}, have: true},
		{name: "the log goes on behind", log: logRange{1, 10}, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}, have: true},
		{name: "the log ends there", log: logRange{1, 5}, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}},
		{name: "the log is of another term there", log: logRange{1, 10}, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 2}},
		{name: "the log begins behind", log: logRange{7, 10}, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}},
		{name: "a deposed leader's: raft refuses it", own: 20, highest: 4, leadTerm: 3, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}},
		{name: "a new leader's", own: 20, highest: 4, leadTerm: 5, meta: transport.SnapshotMeta{LastIndex: 5, LastTerm: 1}, have: true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g, snaps := heldBy(t, c.own, c.log.lo, c.log.hi)
			if c.highest > 0 {
				if err := g.guard.SetUint64([]byte("CurrentTerm"), c.highest); err != nil {
					t.Fatal(err)
				}
			}
			c.meta.Term = max(c.leadTerm, 1)
			if have, err := g.hasSnapshot(snaps, c.meta); err != nil || have != c.have {
				t.Fatalf("%v, %v, want %v", have, err, c.have)
			}
		})
	}
}

// heldBy is a replica with a snapshot up to own (0: none) and the entries lo to hi
// (hi 0: none) in its log.
func heldBy(t *testing.T, own, lo, hi uint64) (*group, *raft.InmemSnapshotStore) {
	t.Helper()
	l, err := raftlog.Open(t.TempDir(), raftlog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	g := &group{id: 7, log: l.Group(7)}
	if err := l.CreateGroup(7, 1); err != nil {
		t.Fatal(err)
	}
	if g.guard, err = raftlog.NewTermGuard(g.log, 7, func(err error) { t.Error(err) }); err != nil {
		t.Fatal(err)
	}
	for i := lo; i <= hi && hi > 0; i++ {
		if err := g.log.StoreLog(&raft.Log{Index: i, Term: 1, Data: []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	snaps := raft.NewInmemSnapshotStore()
	if own > 0 {
		sink, err := snaps.Create(raft.SnapshotVersionMax, own, 1, raft.Configuration{}, 1, nil)
		if err == nil {
			err = sink.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return g, snaps
}

func TestSnapshotOverWhatTheLogDoesNotHold(t *testing.T) {
	for _, c := range []struct {
		name               string
		own, lo, hi, index uint64
		want               uint64
	}{
		{"nothing at all", 0, 0, 0, 5, 0},
		{"no snapshot", 0, 1, 10, 5, 0},
		{"in the log", 8, 3, 10, 5, 0},
		{"the first of the log", 8, 5, 10, 5, 0},
		{"before the log", 8, 6, 10, 5, 8},
		{"at the end of the snapshot, log cut right behind", 8, 9, 10, 8, 8},
		{"before a log that was cut right behind", 8, 9, 10, 2, 8},
		{"no log", 8, 0, 0, 8, 8},
		{"no log, behind the snapshot", 8, 0, 0, 9, 0},
		{"behind the log", 8, 5, 10, 11, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, snaps := heldBy(t, c.own, c.lo, c.hi)
			if got, err := g.snapshotOver(snaps, c.index); err != nil || got != c.want {
				t.Fatalf("%d, %v, want %d", got, err, c.want)
			}
		})
	}
}
