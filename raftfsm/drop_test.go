package raftfsm_test

import (
	"errors"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// W7, RF9: the family goes only when the drop is durable, and never returns.
func TestDroppedFamilyGoesAfterItsDropIsDurable(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.ok(r.command(r.encode(request(put("a", "1")))))
	if err := r.store.Flush(); err != nil {
		t.Fatal(err)
	}
	r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{valueID, 60})))
	has := func() bool { _, ok := r.store.Families()[valueID]; return ok }
	durable := func() uint64 {
		i, err := r.m.DurableIndex()
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	if i := durable(); i != 3 {
		t.Errorf("durable index %d", i)
	}
	r.ok(r.command(raftfsm.AppendTick(nil, 1)))
	if !has() {
		t.Fatal("dropped before the drop was durable")
	}
	r.restart(false) // the crash takes the drop back; the replay repeats it
	if !has() {
		t.Fatal("lost in the restart")
	}
	if err := r.store.Flush(); err != nil {
		t.Fatal(err)
	}
	if i := durable(); i != uint64(len(r.log)) {
		t.Errorf("durable index %d", i)
	}
	r.ok(r.command(raftfsm.AppendTick(nil, 2)))
	if has() {
		t.Error("not dropped although the drop is durable")
	}
	for _, d := range []state.Declaration{testDeclarations()[0], {ID: 60, Keyspace: "ks", Name: "x", Kind: state.KindValue, KeyType: keygroup.String, ValueType: keygroup.Bytes, CodecVersion: 1}} {
		if o := r.command(raftfsm.AppendDeclare(nil, []state.Declaration{d})); !errors.Is(o.Err, base.ErrConflict) {
			t.Errorf("a dropped id was declared again: %v", o.Err)
		}
	}
	r.restart(true)
	r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{valueID})))
	if has() || r.m.Header().Declaration(valueID) != nil {
		t.Error("came back")
	}
}

func TestDropPendingAtOpenIsFinished(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{valueID})))
	r.restart(true)
	r.ok(r.command(raftfsm.AppendTick(nil, 2)))
	if _, ok := r.store.Families()[valueID]; ok {
		t.Error("still there")
	}
}

// A view and a hash mark of before the drop either read what they saw or say
// that it is gone; they never say that it is absent.
func TestViewOfADroppedFamilyNeverLies(t *testing.T) {
	for _, name := range []string{"mem", "rocks"} {
		t.Run(name, func(t *testing.T) {
			r := emptyReplica(t, newDriver(t, name), raftfsm.Options{})
			r.found()
			r.ok(r.command(r.encode(request(put("a", "1")))))
			r.ok(r.command(raftfsm.AppendHashMark(nil, 1)))
			want, err := r.m.HashAt(t.Context(), 1)
			if err != nil {
				t.Fatal(err)
			}
			v := r.view()
			defer v.Close()
			r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{valueID})))
			if err := r.store.Flush(); err != nil {
				t.Fatal(err)
			}
			if _, err := r.m.DurableIndex(); err != nil {
				t.Fatal(err)
			}
			r.ok(r.command(raftfsm.AppendTick(nil, 1)))
			if _, ok := r.store.Families()[valueID]; ok {
				t.Fatal("the family is still there")
			}
			a, err := v.Read(&state.Query{State: valueID, Kind: state.QueryGet, Group: groupOf("a"), Key: []byte("a")})
			if err == nil && string(a.Value) != "1" {
				t.Errorf("the view reads %+v", a)
			}
			h, hashErr := r.m.HashAt(t.Context(), 1)
			if hashErr == nil {
				if diff, err := want.Diff(h); err != nil || len(diff) > 0 {
					t.Errorf("groups %v differ: %v", diff, err)
				}
			}
			t.Logf("read: %v; hash: %v", err, hashErr)
		})
	}
}
