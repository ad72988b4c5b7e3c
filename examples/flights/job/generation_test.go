package job

import (
	"context"
	"errors"
	"iter"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// stopped is a store as a process sees it that is stopped (and woken up) by
// somebody else: from the call number at on, calls wait for wake.
type stopped struct {
	Store
	at    int64
	calls atomic.Int64
	once  sync.Once
	sleep chan struct{} // closed when the process is asleep
	wake  <-chan struct{}
}

func (s *stopped) call() {
	if s.calls.Add(1) > s.at {
		s.once.Do(func() { close(s.sleep) })
		<-s.wake
	}
}

func (s *stopped) Position(ctx context.Context, origin string) (Position, bool, error) {
	s.call()
	return s.Store.Position(ctx, origin)
}

func (s *stopped) Claim(ctx context.Context, origin string, old *Position, claimed Position) error {
	s.call()
	return s.Store.Claim(ctx, origin, old, claimed)
}

func (s *stopped) Destinations(ctx context.Context, origin string) (map[string]int64, error) {
	s.call()
	return s.Store.Destinations(ctx, origin)
}

func (s *stopped) Apply(ctx context.Context, u *Update) (uint64, error) {
	s.call()
	return s.Store.Apply(ctx, u)
}

func (s *stopped) Origins(ctx context.Context) iter.Seq2[string, error] {
	s.call()
	return s.Store.Origins(ctx)
}

// FJ3: wherever an old run was stopped, and wherever the new one is when the
// old one wakes up, the new one goes on to the end, the old one ends or is
// fenced, and nothing counts twice.
func TestOldRunNeverStopsANewerOne(t *testing.T) {
	var fences atomic.Int64
	rapid.Check(t, func(r *rapid.T) {
		text := flightsOf(r)
		s := newFake(rapid.Uint64().Draw(r, "seed"), rapid.SampledFrom([]float64{0, 0.2}).Draw(r, "faults"))
		oldEnded, newAsleep := make(chan struct{}), make(chan struct{})
		before := &stopped{Store: s, at: rapid.Int64Range(0, 40).Draw(r, "calls of the old run"), sleep: make(chan struct{}), wake: newAsleep}
		after := &stopped{Store: s, at: rapid.Int64Range(0, 40).Draw(r, "calls of the new run"), sleep: newAsleep, wake: oldEnded}
		var oldErr error
		go func() {
			defer close(oldEnded)
			var c Counters
			oldErr = start(context.Background(), t, text, before, Options{Run: "old", Workers: 3, BatchRows: 5, WindowRows: 64}, &c)
		}()
		select {
		case <-before.sleep:
		case <-oldEnded:
		}
		var c Counters
		err := start(context.Background(), t, text, after, Options{Run: "new", Workers: 3, BatchRows: 7, WindowRows: 64}, &c)
		after.once.Do(func() { close(newAsleep) }) // it had fewer calls
		<-oldEnded
		if err != nil {
			r.Fatalf("the new run ended with %v", err)
		}
		var fenced *Fenced
		if errors.As(oldErr, &fenced) {
			fences.Add(1)
			if fenced.Theirs.Run != "new" || !strings.Contains(oldErr.Error(), "another run has taken over") {
				r.Errorf("the old run says %v", oldErr)
			}
		} else if oldErr != nil {
			r.Fatalf("the old run ended with %v", oldErr)
		}
		report, days := singlePass(t, text)
		if got := reportOf(t, s); got != report {
			r.Errorf("report\n%s\nwant\n%s", got, report)
		}
		if got := daysOf(t, s); got != days {
			r.Errorf("days\n%s\nwant\n%s", got, days)
		}
	})
	if fences.Load() == 0 {
		t.Error("no old run was ever fenced")
	}
}

// Every run has a number of its own, higher than those before, whatever is lost
// on the way.
func TestGenerationsRise(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		s := newFake(rapid.Uint64().Draw(r, "seed"), 0.4)
		last := int64(0)
		for i := range rapid.IntRange(1, 4).Draw(r, "runs") {
			o := Options{Run: string(rune('a' + i))}
			o.EnsureDefaults()
			one := &run{opts: o, store: s}
			if err := one.begin(context.Background()); err != nil {
				r.Fatal(err)
			}
			if one.generation <= last {
				r.Fatalf("generation %d after %d", one.generation, last)
			}
			last = one.generation
		}
	})
}
