package transport

import (
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/memnet"
)

// cutFollower is a follower whose log is cut right behind its snapshot, which ends
// at 10 in term 3; behind it lie entries 11 to 20 of term 5 that nobody committed.
func cutFollower(t *testing.T, over func(uint64) (uint64, error)) (v *raft.Raft, log *raft.InmemStore, leader *Group) {
	t.Helper()
	n := memnet.New(1)
	nv, nx := startNode(t, n, "v"), startNode(t, n, "x")
	gv, gx := nv.group(t, 7, GroupOptions{Local: "v", SnapshotOver: over}), nx.group(t, 7, GroupOptions{})
	log = raft.NewInmemStore()
	for i := uint64(11); i <= 20; i++ {
		if err := log.StoreLog(&raft.Log{Index: i, Term: 5, Data: []byte("uncommitted")}); err != nil {
			t.Fatal(err)
		}
	}
	snaps := raft.NewInmemSnapshotStore()
	servers := raft.Configuration{Servers: []raft.Server{{ID: "v", Address: "v"}, {ID: "x", Address: "x"}, {ID: "y", Address: "y"}}}
	sink, err := snaps.Create(raft.SnapshotVersionMax, 10, 3, servers, 1, gv)
	if err == nil {
		err = sink.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	v, err = raft.NewRaft(quietConfig("v", time.Hour), new(nothingFSM), log, log, snaps, gv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Shutdown().Error(); err != nil {
			t.Error(err)
		}
	})
	return v, log, gx
}

// over10 is what a replica with a snapshot up to 10 and a log from 11 on says.
func over10(index uint64) (uint64, error) {
	if index <= 10 {
		return 10, nil
	}
	return 0, nil
}

// A follower whose log is cut right behind its snapshot takes appends that begin
// at the snapshot or before it, and never commits entries that the append does not
// have.
func TestAppendBehindACutLog(t *testing.T) {
	for _, c := range []struct {
		name           string
		prev, prevTerm uint64
		from, to       uint64 // entries of term 7; none if to is 0
		commit         uint64 // of the leader
		over           func(uint64) (uint64, error)
		refused        bool
		last           uint64 // of the log afterwards
		committed      uint64 // at most
	}{
		{name: "right behind", prev: 10, prevTerm: 3, from: 11, to: 12, commit: 11, over: over10, last: 12, committed: 11},
		{name: "before and behind", prev: 7, prevTerm: 2, from: 8, to: 12, commit: 12, over: over10, last: 12, committed: 12},
		{name: "before alone", prev: 5, prevTerm: 2, from: 6, to: 9, commit: 30, over: over10, last: 20, committed: 10},
		{name: "up to the end", prev: 5, prevTerm: 2, from: 6, to: 10, commit: 30, over: over10, last: 20, committed: 10},
		{name: "nothing, at the end", prev: 10, prevTerm: 3, commit: 30, over: over10, last: 20, committed: 10},
		{name: "in the log", prev: 12, prevTerm: 5, commit: 30, over: over10, last: 20, committed: 12},
		{name: "in the log, with entries", prev: 12, prevTerm: 5, from: 13, to: 14, commit: 30, over: over10, last: 14, committed: 14},
		{name: "in the log, another term", prev: 12, prevTerm: 6, from: 13, to: 14, commit: 30, over: over10, refused: true, last: 20},
		// The control: raft alone refuses, and the test would notice if it did not.
		{name: "raft alone", prev: 10, prevTerm: 3, from: 11, to: 12, commit: 11, refused: true, last: 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			v, log, leader := cutFollower(t, c.over)
			m := &raft.AppendEntriesRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: 3, ID: []byte("x"), Addr: []byte("x")},
				Term: 8, PrevLogEntry: c.prev, PrevLogTerm: c.prevTerm, LeaderCommitIndex: c.commit}
			for i := c.from; i <= c.to && c.to > 0; i++ {
				m.Entries = append(m.Entries, &raft.Log{Index: i, Term: 7, Data: []byte("new")})
			}
			var resp raft.AppendEntriesResponse
			if err := leader.AppendEntries("v", "v", m, &resp); err != nil {
				t.Fatal(err)
			}
			if resp.Success == c.refused {
				t.Fatalf("success %v", resp.Success)
			}
			last, err := log.LastIndex()
			if err != nil || last != c.last {
				t.Errorf("the log ends at %d, %v; want %d", last, err, c.last)
			}
			if at := v.CommitIndex(); at > c.committed {
				t.Errorf("committed up to %d, want %d at most", at, c.committed)
			}
			var e raft.Log
			if err := log.GetLog(11, &e); err != nil || (e.Term == 7) != (c.from > 0 && c.from <= 11 && c.to >= 11 && !c.refused) {
				t.Errorf("entry 11 is of term %d, %v", e.Term, err)
			}
		})
	}
}
