package raftfsm_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

func TestSwapClosesTheOldStoreAfterItsViews(t *testing.T) {
	r, old := failingReplica(t)
	r.ok(r.command(r.encode(request(put("a", "1")))))
	r.ok(r.command(raftfsm.AppendHashMark(nil, 1)))
	// A peer that is ahead.
	peer := newReplica(t, raftfsm.Options{})
	peer.m.ApplyBatch(r.log)
	peer.log = append(peer.log[:0:0], r.log...)
	peer.ok(peer.command(peer.encode(inSession(1, 1, put("a", "2")))))
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := peer.store.Checkpoint(dir); err != nil {
		t.Fatal(err)
	}
	fresh, err := r.driver.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	before := r.view()
	var released engine.Store
	if err := r.m.Swap(fresh, func(s engine.Store) {
		released = s
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if old.closed {
		t.Fatal("closed under an open view")
	}
	a, err := before.Read(&state.Query{State: valueID, Kind: state.QueryGet, Group: groupOf("a"), Key: []byte("a")})
	if err != nil || string(a.Value) != "1" {
		t.Errorf("the old view reads %q: %v", a.Value, err)
	}
	if r.value("a") != "2" {
		t.Errorf("the new store reads %q", r.value("a"))
	}
	if i, _ := r.m.Applied(); i != uint64(len(peer.log)) || r.m.Header().Sessions != 1 {
		t.Errorf("applied %d, %d sessions", i, r.m.Header().Sessions)
	}
	if _, err := r.m.HashAt(t.Context(), 1); !errors.Is(err, base.ErrNotFound) {
		t.Error("a mark kept the old store open")
	}
	before.Close()
	before.Close() // twice does no harm
	if released != engine.Store(old) || !old.closed {
		t.Error("the old store was not released")
	}
	r.log = append(r.log[:0:0], peer.log...)
	if got := r.write(inSession(1, 1, put("a", "3"))); !got.Replayed {
		t.Error("the sessions were not swapped")
	}
}

func TestSwapRefusesForeignAndOlderStores(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.ok(r.command(raftfsm.AppendTick(nil, 1)))
	snapshot := func(p *replica) engine.Store {
		dir := filepath.Join(t.TempDir(), "snapshot")
		if err := p.store.Checkpoint(dir); err != nil {
			t.Fatal(err)
		}
		s, err := p.driver.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	older := newReplica(t, raftfsm.Options{})
	if err := r.m.Swap(snapshot(older), nil); !errors.Is(err, base.ErrConflict) {
		t.Error(err)
	}
	foreign := emptyReplica(t, mem.NewDriver(), raftfsm.Options{})
	for range 5 {
		foreign.ok(foreign.command(raftfsm.AppendInit(nil, raftfsm.Init{Group: 7, Range: keygroup.FullRange(groups), M: groups, Epoch: 1, Birth: 98, Incarnation: 1})))
	}
	if err := r.m.Swap(snapshot(foreign), nil); !errors.Is(err, base.ErrIdentity) {
		t.Error(err)
	}
	r.ok(r.command(r.encode(request(put("a", "1"))))) // goes on as before
	if r.value("a") != "1" {
		t.Error("lost its store")
	}
}

func TestHashMarksAreOfTheirIndexOnEveryReplica(t *testing.T) {
	a := newReplica(t, raftfsm.Options{HashMarks: 2})
	for i := range 20 {
		a.command(a.encode(inSession(1, uint64(i+1), put(fmt.Sprint("k", i), "v"), add(sumID, "s", i64(1)))))
		if i == 5 || i == 10 || i == 15 {
			a.command(raftfsm.AppendHashMark(nil, uint64(i)))
		}
	}
	// The other replica applies all of it in one batch, with the marks inside.
	b := emptyReplica(t, mem.NewDriver(), raftfsm.Options{})
	b.m.ApplyBatch(a.log)
	for _, mark := range []uint64{10, 15} {
		x, err := a.m.HashAt(t.Context(), mark)
		if err != nil {
			t.Fatal(err)
		}
		y, err := b.m.HashAt(t.Context(), mark)
		if err != nil {
			t.Fatal(err)
		}
		if diff, err := x.Diff(y); err != nil || len(diff) != 0 {
			t.Errorf("mark %d: groups %v differ: %v", mark, diff, err)
		}
		if x.Index != mark+4+map[uint64]uint64{10: 1, 15: 2}[mark] || x.Sequence != 2*(mark+1) {
			t.Errorf("mark %d is of index %d, sequence %d", mark, x.Index, x.Sequence)
		}
	}
	if _, err := a.m.HashAt(t.Context(), 5); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("an old mark is kept: %v", err)
	}
	if _, err := b.m.HashAt(t.Context(), 5); err != nil {
		t.Error(err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.m.HashAt(canceled, 10); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if o := a.command(raftfsm.AppendHashMark(nil, 0)); !errors.Is(o.Err, base.ErrInvalid) {
		t.Error(o.Err)
	}
}

func TestHashReportsNameWhatDiffers(t *testing.T) {
	a, b := newReplica(t, raftfsm.Options{}), newReplica(t, raftfsm.Options{})
	a.ok(a.command(a.encode(request(put("a", "1")))))
	b.ok(b.command(b.encode(request(put("a", "2")))))
	report := func(r *replica) *raftfsm.HashReport {
		r.ok(r.command(raftfsm.AppendHashMark(nil, 1)))
		h, err := r.m.HashAt(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	x, y := report(a), report(b)
	if diff, err := x.Diff(y); err != nil || len(diff) != 1 || diff[0] != groupOf("a") {
		t.Errorf("%v %v", diff, err)
	}
	y.Sequence++
	if _, err := x.Diff(y); !errors.Is(err, base.ErrConflict) {
		t.Error(err)
	}
	y.Mark++
	if _, err := x.Diff(y); !errors.Is(err, base.ErrConflict) {
		t.Error(err)
	}
}

// Whoever waits for a mark of a replica that is replaced is told, and does not wait
// for as long as it may.
func TestWaitMarkEndsWithTheMachine(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	begun, ended := make(chan struct{}), make(chan error)
	go func() {
		close(begun)
		ended <- r.m.WaitMark(context.Background(), 77)
	}()
	<-begun
	if err := r.m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, base.ErrClosed) {
		t.Errorf("%v", err)
	}
	r.open()
}
