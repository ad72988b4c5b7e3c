package raftfsm_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

func barrier(number uint64) []byte {
	return raftfsm.AppendBarrier(nil, raftfsm.Barrier{Number: number, Epoch: 1, Attempt: 10 + number, Uploader: "n1"})
}

// However entries are grouped, a checkpoint that begins in OnBarrier holds what
// is before the barrier in the log and nothing that follows.
func TestACheckpointInOnBarrierIsTheCut(t *testing.T) {
	for _, together := range []bool{false, true} {
		var r *replica
		var cut string
		r = newReplica(t, raftfsm.Options{OnBarrier: func(b raftfsm.Barrier) {
			if b.Number != 3 || b.Attempt != 13 || b.Uploader != "n1" {
				t.Errorf("passed %+v", b)
			}
			cut = filepath.Join(t.TempDir(), "cut")
			if err := r.store.Checkpoint(cut); err != nil {
				t.Error(err)
			}
		}})
		entries := []raftfsm.Entry{
			r.entry(r.encode(request(put("a", "before")))),
			r.entry(barrier(3)),
			r.entry(r.encode(request(put("a", "after"), put("b", "after")))),
		}
		at := entries[1].Index
		if together {
			for _, o := range r.m.ApplyBatch(entries) {
				r.ok(o)
			}
		} else {
			for i := range entries {
				r.ok(r.m.ApplyBatch(entries[i : i+1])[0])
			}
		}
		if cut == "" {
			t.Fatal("the barrier was not announced")
		}
		store, err := r.driver.Open(cut)
		if err != nil {
			t.Fatal(err)
		}
		then := &replica{t: t, driver: r.driver, dir: cut, store: store}
		if then.m, err = raftfsm.Open(store, raftfsm.Options{}); err != nil {
			t.Fatal(err)
		}
		if h := then.m.Header(); h.AppliedIndex != at || h.Barrier != 3 {
			t.Errorf("the cut is at index %d of barrier %d, not at %d of 3", h.AppliedIndex, h.Barrier, at)
		}
		if then.value("a") != "before" || then.value("b") != "" {
			t.Errorf("the cut holds a=%q b=%q", then.value("a"), then.value("b"))
		}
		if r.value("a") != "after" {
			t.Errorf("the store holds a=%q", r.value("a"))
		}
		if err := then.m.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestBarriersAreInEveryTokenAfterThem(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	before := r.write(inSession(1, 1, put("a", "1")))
	r.ok(r.command(barrier(7)))
	after := r.write(inSession(1, 2, put("a", "2")))
	if before.Token.Barrier != 0 || after.Token.Barrier != 7 {
		t.Errorf("tokens of barriers %d and %d", before.Token.Barrier, after.Token.Barrier)
	}
	r.restart(true)
	if got := r.m.Header().Barrier; got != 7 {
		t.Errorf("barrier %d after a restart", got)
	}
	// A retry gets the first answer, token and all.
	if again := r.write(inSession(1, 1, put("a", "1"))); !again.Replayed || again.Token != before.Token {
		t.Errorf("replayed %v, token %+v", again.Replayed, again.Token)
	}
}

func TestRefusedBarriersChangeNothing(t *testing.T) {
	passed := 0
	r := newReplica(t, raftfsm.Options{OnBarrier: func(raftfsm.Barrier) { passed++ }})
	r.ok(r.command(barrier(5)))
	for _, c := range []struct {
		why  string
		b    raftfsm.Barrier
		want error
	}{
		{"no number", raftfsm.Barrier{Epoch: 1, Attempt: 1, Uploader: "n1"}, base.ErrInvalid},
		{"passed", raftfsm.Barrier{Number: 5, Epoch: 1, Attempt: 2, Uploader: "n1"}, base.ErrConflict},
		{"older", raftfsm.Barrier{Number: 4, Epoch: 1, Attempt: 2, Uploader: "n1"}, base.ErrConflict},
		{"another map", raftfsm.Barrier{Number: 6, Epoch: 2, Attempt: 2, Uploader: "n1"}, base.ErrStaleEpoch},
	} {
		if o := r.command(raftfsm.AppendBarrier(nil, c.b)); !errors.Is(o.Err, c.want) {
			t.Errorf("%s: %v, want %v", c.why, o.Err, c.want)
		}
	}
	if passed != 1 || r.m.Header().Barrier != 5 {
		t.Errorf("%d barriers announced, the shard is at %d", passed, r.m.Header().Barrier)
	}
	// One that is passed without taking part is announced as such.
	var missed raftfsm.Barrier
	r = newReplica(t, raftfsm.Options{OnBarrier: func(b raftfsm.Barrier) { missed = b }})
	r.ok(r.command(raftfsm.AppendBarrier(nil, raftfsm.Barrier{Number: 9, Epoch: 1})))
	if !missed.Missed() || missed.Number != 9 || r.m.Header().Barrier != 9 {
		t.Errorf("announced %+v, the shard is at %d", missed, r.m.Header().Barrier)
	}
}
