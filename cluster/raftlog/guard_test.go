package raftlog

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// TestTermGuardRefusesLowerTerm is RL10 and rule R1.
func TestTermGuardRefusesLowerTerm(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store := raft.NewInmemStore()
		var stopped error
		g, err := NewTermGuard(store, 1, func(err error) { stopped = err })
		must(t, err)
		high := uint64(0)
		for range rapid.IntRange(1, 20).Draw(rt, "n") {
			key := rapid.SampledFrom([]string{keyCurrentTerm, keyLastVoteTerm}).Draw(rt, "key")
			term := rapid.Uint64Range(0, 10).Draw(rt, "term")
			before, _ := store.GetUint64([]byte(key))
			stopped = nil
			err := g.SetUint64([]byte(key), term)
			after, _ := store.GetUint64([]byte(key))
			switch {
			case term < high:
				if !errors.Is(err, base.ErrDamaged) || !errors.Is(stopped, base.ErrDamaged) || after != before {
					rt.Fatalf("term %d below %d: %v, stop %v, store %d", term, high, err, stopped, after)
				}
			case err != nil || stopped != nil || after != term:
				rt.Fatalf("term %d at or above %d: %v, stop %v, store %d", term, high, err, stopped, after)
			default:
				high = term
			}
			if g.HighestTerm() != high {
				rt.Fatalf("highest is %d, want %d", g.HighestTerm(), high)
			}
		}
		again, err := NewTermGuard(store, 1, func(error) {})
		must(t, err)
		if again.HighestTerm() != high {
			rt.Fatalf("after restart highest is %d, want %d", again.HighestTerm(), high)
		}
	})
}

// TestTermGuardUnderRace: whatever the order of two writers, the store never goes
// back. Without the guard's lock the last write could be the lower one.
func TestTermGuardUnderRace(t *testing.T) {
	l := mustOpen(t, vfs.NewMem(), Options{})
	defer func() { must(t, l.Close()) }()
	g, err := NewTermGuard(l.Group(1), 1, func(error) {})
	must(t, err)
	for round := uint64(1); round < 400; round += 2 {
		var wg sync.WaitGroup
		for _, term := range []uint64{round, round + 1} {
			wg.Add(1)
			go func() {
				defer wg.Done()
				_ = g.SetUint64([]byte(keyCurrentTerm), term)
			}()
		}
		wg.Wait()
		got, err := g.GetUint64([]byte(keyCurrentTerm))
		must(t, err)
		if got != round+1 || g.HighestTerm() != got {
			t.Fatalf("store has term %d, guard %d, want %d", got, g.HighestTerm(), round+1)
		}
	}
}

// TestWritesThatFailStopTheReplica is rule W2: raft only logs a StoreLogs error.
func TestWritesThatFailStopTheReplica(t *testing.T) {
	armed := false
	l := mustOpen(t, vfs.Faulty(vfs.NewMem(), func(op vfs.Op) vfs.Fault {
		if armed && op.Kind == vfs.OpSync {
			return vfs.Fault{Err: syscall.EIO}
		}
		return vfs.Fault{}
	}), Options{MarkDelay: -1})
	defer func() { must(t, l.Close()) }()
	var stops []error
	stop := func(err error) { stops = append(stops, err) }
	logs := NewStoppingStore(l.Group(1), stop)
	guard, err := NewTermGuard(l.Group(1), 1, stop)
	must(t, err)
	if !logs.IsMonotonic() {
		t.Error("the wrapper hides that the store is monotonic")
	}
	must(t, logs.StoreLogs(entries(1, 2, 1)))
	must(t, logs.DeleteRange(1, 1))
	must(t, guard.SetUint64([]byte(keyCurrentTerm), 4))
	if len(stops) != 0 {
		t.Fatalf("stopped without a reason: %v", stops)
	}
	armed = true
	calls := []func() error{
		func() error { return logs.StoreLog(entry(3, 1, 0, "")) },
		func() error { return logs.StoreLogs(entries(3, 3, 1)) },
		func() error { return logs.DeleteRange(0, 9) },
		func() error { return guard.SetUint64([]byte(keyCurrentTerm), 5) },
		func() error { return guard.Set([]byte("LastVoteCand"), []byte("n1/1")) },
	}
	for k, call := range calls {
		if err := call(); !errors.Is(err, base.ErrDiskFailed) || len(stops) != k+1 || !errors.Is(stops[k], base.ErrDiskFailed) {
			t.Fatalf("call %d: %v, stops %v", k, err, stops)
		}
	}
}
