package raftfsm_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// failingStore fails chosen calls.
type failingStore struct {
	engine.Store
	write, view, drop error
	// beforeWrite and afterWrite run inside Write, around the real one.
	beforeWrite, afterWrite func()
	closed                  bool
}

func (s *failingStore) Write(b *engine.Batch) error {
	if s.write != nil {
		return s.write
	}
	if s.beforeWrite != nil {
		s.beforeWrite()
	}
	err := s.Store.Write(b)
	if s.afterWrite != nil {
		s.afterWrite()
	}
	return err
}

func (s *failingStore) NewView() (engine.View, error) {
	if s.view != nil {
		return nil, s.view
	}
	return s.Store.NewView()
}

func (s *failingStore) DropFamily(f engine.FamilyID) error {
	if s.drop != nil {
		return s.drop
	}
	return s.Store.DropFamily(f)
}

func (s *failingStore) Close() error {
	s.closed = true
	return s.Store.Close()
}

type failingDriver struct {
	engine.Driver
	newest *failingStore
}

func (d *failingDriver) Open(dir string) (engine.Store, error) {
	s, err := d.Driver.Open(dir)
	d.newest = &failingStore{Store: s}
	return d.newest, err
}

func failingReplica(t *testing.T) (*replica, *failingStore) {
	t.Helper()
	d := &failingDriver{Driver: mem.NewDriver()}
	r := emptyReplica(t, d, raftfsm.Options{})
	r.ok(r.command(raftfsm.AppendInit(nil, raftfsm.Init{Group: 7, Range: keygroup.FullRange(groups), M: groups, Epoch: 1, Birth: 99, Incarnation: 1})))
	r.ok(r.command(raftfsm.AppendDeclare(nil, testDeclarations())))
	return r, d.newest
}

// RF8.
func TestFailedWriteStopsTheMachineForGood(t *testing.T) {
	r, store := failingReplica(t)
	r.ok(r.command(r.encode(request(put("a", "1")))))
	waiting := make(chan error, 1)
	go func() { waiting <- r.m.WaitApplied(t.Context(), 100) }()
	store.write = fmt.Errorf("no space: %w", base.ErrDiskFailed)
	check := func(out []raftfsm.Outcome) {
		t.Helper()
		for _, o := range out {
			if !errors.Is(o.Err, base.ErrDiskFailed) || base.OutcomeOf(o.Err) != base.OutcomeUnknown || o.Results != nil {
				t.Errorf("entry %d: %+v", o.Index, o)
			}
		}
	}
	check(r.m.ApplyBatch([]raftfsm.Entry{r.entry(r.encode(request(put("a", "2")))), r.entry(raftfsm.AppendTick(nil, 5))}))
	if !errors.Is(r.fatal, base.ErrDiskFailed) {
		t.Errorf("fatal: %v", r.fatal)
	}
	if err := <-waiting; !errors.Is(err, base.ErrDamaged) {
		t.Errorf("the waiter got %v", err)
	}
	store.write, r.fatal = nil, nil // the disk is back; the machine is not
	check(r.m.ApplyBatch([]raftfsm.Entry{r.entry(r.encode(request(put("a", "3"))))}))
	if r.fatal != nil {
		t.Error("OnFatal was called twice")
	}
	if i, _ := r.m.Applied(); i != 3 {
		t.Errorf("applied %d", i)
	}
	if err := r.m.WaitApplied(t.Context(), 4); !errors.Is(err, base.ErrDamaged) {
		t.Error(err)
	}
	if err := r.m.WaitApplied(t.Context(), 3); err != nil {
		t.Error(err)
	}
	// After a restart the log brings everything.
	r.restart(false)
	if r.value("a") != "3" {
		t.Errorf("value %q", r.value("a"))
	}
}

func TestFailureOfAnUnlistedKindIsUnknownToo(t *testing.T) {
	for name, fail := range map[string]func(*failingStore){
		"write": func(s *failingStore) { s.write = base.ErrClosed },
		"view":  func(s *failingStore) { s.view = errors.New("odd") },
	} {
		t.Run(name, func(t *testing.T) {
			r, store := failingReplica(t)
			fail(store)
			if o := r.command(raftfsm.AppendHashMark(nil, 1)); o.Err == nil || base.OutcomeOf(o.Err) != base.OutcomeUnknown {
				t.Errorf("%v", o.Err)
			}
			if r.m.Err() == nil {
				t.Error("still runs")
			}
		})
	}
	t.Run("drop", func(t *testing.T) {
		r, store := failingReplica(t)
		r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{valueID})))
		if err := store.Flush(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.m.DurableIndex(); err != nil {
			t.Fatal(err)
		}
		store.drop = errors.New("odd")
		if o := r.command(raftfsm.AppendTick(nil, 1)); o.Err == nil || r.m.Err() == nil {
			t.Error("still runs")
		}
	})
}

// RF10: while batches are written, before and after they show in the store.
func TestViewDuringAWriteHasOneInstant(t *testing.T) {
	r, store := failingReplica(t)
	look := func(when string, want uint64) {
		t.Helper()
		v := r.view()
		defer v.Close()
		a, err := v.Read(&state.Query{State: valueID, Kind: state.QueryGet, Group: groupOf("n"), Key: []byte("n")})
		if err != nil {
			t.Fatal(err)
		}
		if v.AppliedIndex != want || a.Found && string(a.Value) != fmt.Sprint(want) {
			t.Errorf("%s: header at %d, want %d, value %q", when, v.AppliedIndex, want, a.Value)
		}
		if v.Sequence != 0 && v.Sequence != want-2 {
			t.Errorf("%s: sequence %d at %d", when, v.Sequence, want)
		}
	}
	r.ok(r.command(r.encode(request(put("n", "3")))))
	store.beforeWrite = func() { look("before the store has it", 3) }
	store.afterWrite = func() { look("before the header is published", 4) }
	r.ok(r.command(r.encode(request(put("n", "4")))))
	// A change of the declarations is of the same instant too.
	declared := func(want bool) {
		t.Helper()
		v := r.view()
		defer v.Close()
		if got := v.Declaration(listID) != nil; got != want {
			t.Errorf("declared %t, want %t", got, want)
		}
	}
	store.beforeWrite = func() { declared(true) }
	store.afterWrite = func() { declared(false) }
	r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{listID})))
}

func TestReadersBesideTheWriterSeeOneInstant(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	base0, _ := r.m.Applied()
	ctx, stop := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			for ctx.Err() == nil {
				v, err := r.m.ReadView(1, 1)
				if err != nil {
					t.Error(err)
					return
				}
				a, err := v.Read(&state.Query{State: valueID, Kind: state.QueryGet, Group: groupOf("n"), Key: []byte("n")})
				n, _ := strconv.ParseUint(string(a.Value), 10, 64)
				if err != nil || n != v.AppliedIndex-base0 || v.Sequence != n {
					t.Errorf("index %d, sequence %d, value %d: %v", v.AppliedIndex, v.Sequence, n, err)
				}
				v.Close()
			}
		})
	}
	for i := range 400 {
		r.ok(r.command(r.encode(request(put("n", fmt.Sprint(i+1))))))
	}
	stop()
	readers.Wait()
}

func TestReadViewRefusesWhatIsNotTheShards(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	for _, c := range []struct {
		epoch       base.Epoch
		incarnation base.Incarnation
		want        error
	}{{1, 1, nil}, {0, 1, nil}, {2, 1, base.ErrStaleEpoch}, {1, 2, base.ErrIncarnation}} {
		v, err := r.m.ReadView(c.epoch, c.incarnation)
		if !errors.Is(err, c.want) {
			t.Errorf("%+v: %v", c, err)
		}
		if err == nil {
			v.Close()
		}
	}
	v := r.view()
	defer v.Close()
	q := func(id engine.FamilyID, g keygroup.Group) *state.Query {
		return &state.Query{State: id, Kind: state.QueryGet, Group: g, Key: []byte("a")}
	}
	_, errs := v.ReadMany([]*state.Query{q(valueID, groups), q(99, groupOf("a")), q(valueID, groupOf("a")), q(valueID, groupOf("a")+1)})
	for i, want := range []error{base.ErrWrongRange, base.ErrUndeclared, nil, base.ErrInvalid} {
		if !errors.Is(errs[i], want) {
			t.Errorf("query %d: %v, want %v", i, errs[i], want)
		}
		if _, err := v.Read([]*state.Query{q(valueID, groups), q(99, groupOf("a")), q(valueID, groupOf("a")), q(valueID, groupOf("a")+1)}[i]); !errors.Is(err, want) {
			t.Errorf("query %d alone: %v, want %v", i, err, want)
		}
	}
	if _, _, err := v.Scan(&state.ScanQuery{State: valueID, Range: keygroup.FullRange(groups + 1)}); !errors.Is(err, base.ErrWrongRange) {
		t.Error(err)
	}
	if _, err := v.Count(99, keygroup.FullRange(groups)); !errors.Is(err, base.ErrUndeclared) {
		t.Error(err)
	}
	if _, err := v.Hash(groups); !errors.Is(err, base.ErrWrongRange) {
		t.Error(err)
	}
}

func TestViewsReadAndScanTheirInstant(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.ok(r.command(r.encode(request(put("a", "1"), put("b", "2")))))
	v := r.view()
	defer v.Close()
	r.ok(r.command(r.encode(request(put("a", "9"), put("c", "3")))))
	items, next, err := v.Scan(&state.ScanQuery{State: valueID, Range: keygroup.FullRange(groups)})
	if err != nil || next != nil || len(items) != 2 {
		t.Errorf("%d items, next %x: %v", len(items), next, err)
	}
	if n, err := v.Count(valueID, v.Range); err != nil || n != 2 {
		t.Errorf("count %d: %v", n, err)
	}
	got, errs := v.ReadMany([]*state.Query{
		{State: valueID, Kind: state.QueryGet, Group: groupOf("a"), Key: []byte("a")},
		{State: valueID, Kind: state.QueryGet, Group: groupOf("c"), Key: []byte("c")},
	})
	if errs[0] != nil || errs[1] != nil || string(got[0].Value) != "1" || got[1].Found {
		t.Errorf("%+v %v", got, errs)
	}
	if v.Token().Sequence != 2 || v.Layout().M != groups || v.Engine() == nil {
		t.Errorf("token %+v", v.Token())
	}
}

func TestWaitAppliedEndsWithItsContext(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- r.m.WaitApplied(ctx, 1000) }()
	go func() { done <- r.m.WaitApplied(t.Context(), 4) }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r.ok(r.command(raftfsm.AppendTick(nil, 1)))
	r.ok(r.command(raftfsm.AppendTick(nil, 1)))
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the waiter was not woken")
	}
}

func TestClosedMachineRefusesEverything(t *testing.T) {
	r, store := failingReplica(t)
	s, release, err := r.m.Store()
	if err != nil || s != engine.Store(store) {
		t.Fatal(err)
	}
	if err := r.m.Close(); err != nil {
		t.Fatal(err)
	}
	if store.closed {
		t.Error("closed while in use")
	}
	release()
	release()
	if !store.closed {
		t.Error("not closed")
	}
	if _, err := r.m.View(); !errors.Is(err, base.ErrClosed) {
		t.Error(err)
	}
	if _, _, err := r.m.Store(); !errors.Is(err, base.ErrClosed) {
		t.Error(err)
	}
	if o := r.command(raftfsm.AppendTick(nil, 1)); base.OutcomeOf(o.Err) != base.OutcomeUnknown {
		t.Error(o.Err)
	}
	if r.fatal != nil {
		t.Error("closing is no failure")
	}
}

func TestOpenRefusesDamagedMetadata(t *testing.T) {
	open := func(damage func(b *engine.Batch)) error {
		r := newReplica(t, raftfsm.Options{})
		r.ok(r.command(r.encode(inSession(1, 1, put("a", "1")))))
		var b engine.Batch
		damage(&b)
		dir := filepath.Join(t.TempDir(), "damaged")
		if err := r.store.Write(&b); err != nil {
			t.Fatal(err)
		}
		if err := r.store.Checkpoint(dir); err != nil {
			t.Fatal(err)
		}
		s, err := r.driver.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		_, err = raftfsm.Open(s, raftfsm.Options{})
		return err
	}
	for name, c := range map[string]struct {
		want   error
		damage func(b *engine.Batch)
	}{
		"core":         {base.ErrCorrupt, func(b *engine.Batch) { b.Put(engine.MetaFamily, []byte{1}, []byte("x")) }},
		"no core":      {base.ErrCorrupt, func(b *engine.Batch) { b.Delete(engine.MetaFamily, []byte{1}) }},
		"declaration":  {base.ErrCorrupt, func(b *engine.Batch) { b.Put(engine.MetaFamily, []byte{3, 0, 0, 0, 1}, []byte("x")) }},
		"short key":    {base.ErrCorrupt, func(b *engine.Batch) { b.Put(engine.MetaFamily, []byte{3, 0}, []byte("x")) }},
		"unknown kind": {base.ErrFormatVersion, func(b *engine.Batch) { b.Put(engine.MetaFamily, []byte{99}, []byte("x")) }},
		"session":      {base.ErrFormatVersion, func(b *engine.Batch) { b.Put(engine.MetaFamily, append([]byte{4}, make([]byte, 16)...), []byte("x")) }},
		"op hash":      {base.ErrCorrupt, func(b *engine.Batch) { b.Put(engine.MetaFamily, []byte{5, 0, 0, 0, 200}, []byte("x")) }},
		"tombstone":    {base.ErrCorrupt, func(b *engine.Batch) { b.Put(engine.MetaFamily, []byte{6, 0, 0, 0, 1}, []byte("x")) }},
	} {
		t.Run(name, func(t *testing.T) {
			if err := open(c.damage); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
	t.Run("missing family", func(t *testing.T) {
		r := newReplica(t, raftfsm.Options{})
		if err := r.store.DropFamily(valueID); err != nil {
			t.Fatal(err)
		}
		if err := r.store.Flush(); err != nil {
			t.Fatal(err)
		}
		r.m.Close()
		s, err := r.driver.Open(r.dir)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := raftfsm.Open(s, raftfsm.Options{}); !errors.Is(err, base.ErrCorrupt) {
			t.Error(err)
		}
	})
}
