package fault

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/enginetest"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/internal/base"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestTransparent: without rules the wrapper changes nothing (FA1).
func TestTransparent(t *testing.T) {
	enginetest.Run(t, func(*testing.T) engine.Driver { return NewDriver(mem.NewDriver()) })
}

var options = engine.FamilyOptions{GroupWidth: 1}

func open(t *testing.T, d engine.Driver, name string) engine.Store {
	t.Helper()
	s, err := d.Open(filepath.Join(t.TempDir(), name))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureFamily(1, options); err != nil {
		t.Fatal(err)
	}
	return s
}

func put(s engine.Store, key string) error {
	var b engine.Batch
	b.Put(1, []byte(key), []byte("v"))
	b.Put(engine.MetaFamily, []byte(key), []byte("v"))
	return s.Write(&b)
}

// TestEveryOperationFails: each operation can be made to fail before and after
// it is done below.
func TestEveryOperationFails(t *testing.T) {
	injected := errors.New("injected")
	dir := t.TempDir()
	calls := map[Op]func(s engine.Store) error{
		OpGet:          func(s engine.Store) error { _, _, err := s.Get(1, []byte("a")); return err },
		OpMultiGet:     func(s engine.Store) error { _, err := s.MultiGet(1, [][]byte{[]byte("a")}); return err },
		OpScan:         scanAll,
		OpNext:         scanAll,
		OpEnsureFamily: func(s engine.Store) error { return s.EnsureFamily(1, options) },
		OpDropFamily:   func(s engine.Store) error { return s.DropFamily(77) },
		OpWrite:        func(s engine.Store) error { return put(s, "k") },
		OpFlush:        func(s engine.Store) error { return s.Flush() },
		OpDurableGet:   func(s engine.Store) error { _, _, err := s.DurableGet([]byte("a")); return err },
		OpCheckpoint:   func(s engine.Store) error { return s.Checkpoint(filepath.Join(t.TempDir(), "c")) },
		OpCompact:      func(s engine.Store) error { return s.Compact() },
		OpClip: func(s engine.Store) error {
			return s.(engine.Absorber).Clip(context.Background(), []engine.FamilyID{1}, nil, nil)
		},
		OpAbsorb: func(s engine.Store) error { return s.(engine.Absorber).Absorb(context.Background(), nil, nil) },
		OpNewView: func(s engine.Store) error {
			v, err := s.NewView()
			if err == nil {
				v.Close()
			}
			return err
		},
		OpOpen: func(engine.Store) error { return nil }, OpVerify: nil, OpClose: nil,
	}
	for op, call := range calls {
		for _, r := range []Rule{{Error: injected}, {After: injected}} {
			d := NewDriver(mem.NewDriver())
			s := open(t, d, "s")
			r.Ops, r.Times = []Op{op}, 1
			_, fired := d.Plan.Add(r)
			switch op {
			case OpOpen:
				where := filepath.Join(dir, "o")
				if _, err := d.Open(where); !errors.Is(err, injected) {
					t.Errorf("open: %v", err)
				}
				o, err := d.Open(where) // the failed one must not hold the directory
				if err != nil {
					t.Fatal(err)
				}
				if err := o.Close(); err != nil {
					t.Fatal(err)
				}
			case OpVerify:
				if err := d.Verify(dir); !errors.Is(err, injected) && r.Error != nil {
					t.Errorf("verify: %v", err)
				}
			case OpClose:
				if err := s.Close(); !errors.Is(err, injected) {
					t.Errorf("close: %v", err)
				}
				if err := s.Close(); errors.Is(err, base.ErrClosed) != (r.After != nil) {
					t.Errorf("second close after %+v: %v", r, err)
				}
				continue
			default:
				if err := call(s); !errors.Is(err, injected) {
					t.Errorf("%s with %+v: %v", op, r, err)
				}
				if err := call(s); err != nil {
					t.Errorf("%s after the rule was used up: %v", op, err)
				}
			}
			if fired() != 1 {
				t.Errorf("%s: fired %d times", op, fired())
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func scanAll(s engine.Store) error {
	it := s.Scan(1, nil, nil, engine.ScanOptions{})
	defer it.Close()
	for it.Next() {
	}
	return it.Err()
}

// TestErrorIsNotDone: Error keeps an operation from the store, After does not.
func TestErrorIsNotDone(t *testing.T) {
	d := NewDriver(mem.NewDriver())
	s := open(t, d, "s")
	defer s.Close()
	d.Plan.Add(Rule{Ops: []Op{OpWrite}, Times: 1, Error: base.ErrDiskFailed})
	d.Plan.Add(Rule{Ops: []Op{OpWrite}, Times: 1, After: base.ErrDiskFailed})
	for i, want := range []bool{false, true} {
		key := string(rune('a' + i))
		if err := put(s, key); !errors.Is(err, base.ErrDiskFailed) {
			t.Fatalf("write %d: %v", i, err)
		}
		if _, ok, err := s.Get(1, []byte(key)); err != nil || ok != want {
			t.Fatalf("after write %d: %v, %v; want %v", i, ok, err, want)
		}
	}
}

// TestCounts: Skip, Times, Dir and removal (FA2).
func TestCounts(t *testing.T) {
	d := NewDriver(mem.NewDriver())
	one, two := open(t, d, "one"), open(t, d, "two")
	defer one.Close()
	defer two.Close()
	remove, fired := d.Plan.Add(Rule{Ops: []Op{OpWrite}, Dir: "one", Skip: 2, Times: 2, Error: base.ErrOverloaded})
	for i, want := range []bool{false, false, true, true, false} {
		if err := put(one, "k"); errors.Is(err, base.ErrOverloaded) != want {
			t.Fatalf("write %d: %v", i, err)
		}
		if err := put(two, "k"); err != nil {
			t.Fatalf("write %d of the other store: %v", i, err)
		}
	}
	if fired() != 2 || d.Plan.Count(OpWrite) != 10 {
		t.Fatalf("fired %d, counted %d", fired(), d.Plan.Count(OpWrite))
	}
	remove()
	remove()
	removeAll, _ := d.Plan.Add(Rule{Error: base.ErrOverloaded})
	if _, _, err := two.Get(1, []byte("k")); !errors.Is(err, base.ErrOverloaded) {
		t.Fatalf("rule for every operation: %v", err)
	}
	removeAll()
	if _, _, err := two.Get(1, []byte("k")); err != nil {
		t.Fatalf("after removal: %v", err)
	}
}

// TestGateAndDelay: an operation waits for the gate, and at least the delay.
func TestGateAndDelay(t *testing.T) {
	d := NewDriver(mem.NewDriver())
	s := open(t, d, "s")
	defer s.Close()
	gate := make(chan struct{})
	d.Plan.Add(Rule{Ops: []Op{OpFlush}, Times: 1, Gate: gate})
	done := make(chan error, 1)
	go func() { done <- s.Flush() }()
	if err := put(s, "k"); err != nil { // the writer goes on beside it
		t.Fatal(err)
	}
	select {
	case err := <-done:
		t.Fatalf("flushed before the gate opened: %v", err)
	default:
	}
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	const delay = 20 * time.Millisecond
	d.Plan.Add(Rule{Ops: []Op{OpWrite}, Times: 1, Delay: delay})
	start := time.Now()
	if err := put(s, "k"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < delay {
		t.Fatalf("took %v", took)
	}
}
