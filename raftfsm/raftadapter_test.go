package raftfsm_test

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

func TestAdapterAppliesCommandsAndConfigurations(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	a := raftfsm.NewAdapter(r.m, raftfsm.Hooks{})
	conf := raft.Configuration{Servers: []raft.Server{{Suffrage: raft.Voter, ID: "n1/1", Address: "n1"}}}
	out := a.ApplyBatch([]*raft.Log{
		{Index: 3, Term: 2, Type: raft.LogCommand, Data: r.encode(request(put("a", "1")))},
		{Index: 4, Term: 2, Type: raft.LogConfiguration, Data: raft.EncodeConfiguration(conf)},
		{Index: 6, Term: 3, Type: raft.LogCommand, Data: raftfsm.AppendTick(nil, 9000)},
	})
	for i, o := range out {
		if o.(*raftfsm.Outcome).Err != nil {
			t.Errorf("%d: %v", i, o)
		}
	}
	if got := out[0].(*raftfsm.Outcome); got.Index != 3 || len(got.Results) != 1 || got.Results[0].First != 1 {
		t.Errorf("%+v", got)
	}
	if i, term := a.Machine().Applied(); i != 6 || term != 3 {
		t.Errorf("applied %d %d", i, term)
	}
	index, got, err := raftfsm.RaftConfiguration(r.m)
	if err != nil || index != 4 || !reflect.DeepEqual(got, conf) {
		t.Errorf("%d %+v %v", index, got, err)
	}
	conf.Servers[0].Suffrage = raft.Nonvoter
	a.StoreConfiguration(7, conf)
	if index, got, _ := raftfsm.RaftConfiguration(r.m); index != 7 || got.Servers[0].Suffrage != raft.Nonvoter {
		t.Errorf("%d %+v", index, got)
	}
	if _, term := r.m.Applied(); term != 3 {
		t.Errorf("term %d", term)
	}
	if o := a.Apply(&raft.Log{Index: 8, Term: 3, Type: raft.LogCommand}).(*raftfsm.Outcome); !errors.Is(o.Err, base.ErrCorrupt) || r.m.Err() == nil {
		t.Errorf("an empty command: %v", o.Err)
	}
	if _, err := a.Snapshot(); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("a stopped machine gives snapshots: %v", err)
	}
}

func TestUndecodableConfigurationIsAnErrorAndNoPanic(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	if i, _, err := raftfsm.RaftConfiguration(r.m); i != 0 || err != nil {
		t.Errorf("%d %v", i, err)
	}
	raftfsm.NewAdapter(r.m, raftfsm.Hooks{}).ApplyBatch([]*raft.Log{{Index: 3, Type: raft.LogConfiguration, Data: []byte("no")}})
	if _, _, err := raftfsm.RaftConfiguration(r.m); !errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
}

type fakeSnapshot struct{ raft.FSMSnapshot }

func TestAdapterDelegatesSnapshots(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	none := raftfsm.NewAdapter(r.m, raftfsm.Hooks{})
	if _, err := none.Snapshot(); !errors.Is(err, base.ErrUnsupported) {
		t.Error(err)
	}
	if err := none.Restore(io.NopCloser(&bytes.Buffer{})); !errors.Is(err, base.ErrUnsupported) {
		t.Error(err)
	}
	want := &fakeSnapshot{}
	var manifest []byte
	a := raftfsm.NewAdapter(r.m, raftfsm.Hooks{
		Snapshot: func() (raft.FSMSnapshot, error) { return want, nil },
		Restore: func(rc io.ReadCloser) (err error) {
			manifest, err = io.ReadAll(rc)
			return errors.Join(err, rc.Close())
		},
	})
	if got, err := a.Snapshot(); got != want || err != nil {
		t.Errorf("%v %v", got, err)
	}
	if err := a.Restore(io.NopCloser(bytes.NewBufferString("manifest"))); err != nil || string(manifest) != "manifest" {
		t.Errorf("%q %v", manifest, err)
	}
}
