package cluster

import (
	"testing"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// A replica that led may have entries that nobody else has. When it has installed a
// snapshot that covers them, and raft has not dropped them yet, the header is of the
// others' log: nothing is stored of its own, whether it ends before or behind the
// snapshot.
func TestEntriesThatWereNotAppliedAreNotStored(t *testing.T) {
	l, err := raftlog.Open(t.TempDir(), raftlog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	const group, applied, last = 7, 6, 10
	if err := l.CreateGroup(group, 1); err != nil {
		t.Fatal(err)
	}
	r := &replica{}
	r.log = l.Group(group)
	for i := uint64(1); i <= last; i++ {
		e := &raft.Log{Index: i, Term: 2, Type: raft.LogCommand, Data: []byte("x")}
		if i > applied {
			e.Term = 3 // of its own office
		}
		if err := r.log.StoreLog(e); err != nil {
			t.Fatal(err)
		}
	}
	lin := &lineage{base: &snapshot.Manifest{Index: 4}}
	for _, c := range []struct {
		name        string
		index, term uint64
		can         bool
	}{
		{"what it has applied", applied, 2, true},
		{"its own, committed", last, 3, true},
		{"nothing new", 4, 2, true},
		{"a snapshot within its own", last - 2, 4, false},
		{"a snapshot at its end", last, 4, false},
		{"a snapshot behind its end", last + 5, 4, false},
	} {
		if why := r.cannotGoOn(lin, &raftfsm.Header{AppliedIndex: c.index, AppliedTerm: c.term}); (why == "") != c.can {
			t.Errorf("%s: %q", c.name, why)
		}
	}
}
