package cluster

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

// CL2: a round serves only reads that arrived before it started. The round
// reads a counter that every arrival has raised first: a read that gets less
// than the counter at its own arrival shared a round that was under way.
func TestReadNeverSharesARoundThatRunsProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		readers := rapid.IntRange(1, 20).Draw(rt, "readers")
		each := rapid.IntRange(1, 30).Draw(rt, "reads")
		var commit, running, rounds atomic.Uint64
		ctx, cancel := context.WithCancel(context.Background())
		r := newReadIndexer(ctx, func(context.Context) readPoint {
			if running.Add(1) != 1 {
				rt.Errorf("two rounds run at once")
			}
			defer running.Add(^uint64(0))
			rounds.Add(1)
			index := commit.Load()
			for range 50 { // more arrive while it runs
				yieldNow()
			}
			return readPoint{index: index}
		})
		var wg sync.WaitGroup
		for range readers {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range each {
					arrived := commit.Add(1)
					index, err := r.wait(context.Background())
					if err != nil || index < arrived {
						rt.Errorf("a read that arrived at %d got %d, %v", arrived, index, err)
					}
				}
			}()
		}
		wg.Wait()
		cancel()
		r.close()
		if n := rounds.Load(); n > uint64(readers*each) {
			rt.Errorf("%d rounds for %d reads", n, readers*each)
		}
	})
}

// yieldNow lets other goroutines run.
func yieldNow() {
	done := make(chan struct{})
	go close(done)
	<-done
}

// Reads that wait share the next round, and a failed round fails only those.
func TestWaitingReadsShareTheNextRound(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	begin, end := make(chan struct{}), make(chan readPoint)
	rounds := 0
	r := newReadIndexer(ctx, func(context.Context) readPoint {
		rounds++
		begin <- struct{}{}
		return <-end
	})
	type answer struct {
		index uint64
		err   error
	}
	answers := make(chan answer, 10)
	read := func() { i, err := r.wait(context.Background()); answers <- answer{i, err} }
	go read()
	<-begin
	for range 5 {
		go read()
	}
	waitFor(t, func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.mu.waiting) == 5 })
	end <- readPoint{index: 1, err: base.ErrNoQuorum}
	if a := <-answers; !errors.Is(a.err, base.ErrNoQuorum) {
		t.Fatalf("the first read: %+v", a)
	}
	<-begin
	end <- readPoint{index: 7}
	for range 5 {
		if a := <-answers; a.err != nil || a.index != 7 {
			t.Fatalf("a read of the second round: %+v", a)
		}
	}
	if rounds != 2 {
		t.Errorf("%d rounds, want 2", rounds)
	}
	cancel()
	r.close()
	if _, err := r.wait(context.Background()); !errors.Is(err, base.ErrShuttingDown) {
		t.Errorf("a read after the end: %v", err)
	}
}

// A read whose context ends is told so, as not served, while its round runs on;
// the indexer lives on.
func TestReadWhoseContextEndsIsNotServed(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	begin, end := make(chan struct{}), make(chan struct{})
	r := newReadIndexer(ctx, func(context.Context) readPoint {
		begin <- struct{}{}
		<-end
		return readPoint{index: 3}
	})
	short, stop := context.WithCancel(context.Background())
	got := make(chan error, 1)
	go func() { _, err := r.wait(short); got <- err }()
	<-begin
	stop()
	if err := <-got; !errors.Is(err, base.ErrNoQuorum) || base.OutcomeOf(err) != base.OutcomeNotApplied {
		t.Errorf("a read that ran out of time: %v", err)
	}
	go func() {
		end <- struct{}{}
		<-begin
		end <- struct{}{}
	}()
	if i, err := r.wait(context.Background()); err != nil || i != 3 {
		t.Errorf("the next read: %d, %v", i, err)
	}
	cancel()
	r.close()
}

// Whoever asked before a change is woken by it, and one broadcast wakes all.
func TestNotifierWakesWhoAskedBefore(t *testing.T) {
	var n notifier
	n.init()
	var before []<-chan struct{}
	for range 3 {
		before = append(before, n.wait())
	}
	for _, ch := range before {
		select {
		case <-ch:
			t.Fatal("woken without a change")
		default:
		}
	}
	n.broadcast()
	for _, ch := range before {
		<-ch
	}
	select {
	case <-n.wait():
		t.Fatal("a change wakes who asks after it")
	default:
	}
	// No change is missed by the pattern "ask, look, wait".
	var seen, state atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			ch := n.wait()
			seen.Store(state.Load())
			if seen.Load() == 1000 {
				return
			}
			<-ch
		}
	}()
	for range 1000 {
		state.Add(1)
		n.broadcast()
	}
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("stuck at %d of 1000", seen.Load())
	}
}

func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); !cond(); <-tick.C {
		if time.Now().After(end) {
			t.Fatal("the condition never held")
		}
	}
}

// Readers that were answered together share the next round too, although they
// do not come back at one instant; a lone reader waits for nobody.
func TestReadersThatComeBackTogetherShareARound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		rounds := 0
		const took = 4 * time.Millisecond // so that a round lingers as long as it may
		r := newReadIndexer(ctx, func(context.Context) readPoint {
			rounds++
			time.Sleep(took)
			return readPoint{}
		})
		read := func() {
			if _, err := r.wait(ctx); err != nil {
				t.Error(err)
			}
		}
		for range 20 { // alone
			start := time.Now()
			read()
			if d := time.Since(start); d != took {
				t.Fatalf("a lone reader waited %v", d)
			}
		}
		rounds = 0
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range 10 {
					time.Sleep(time.Duration(i) * 20 * time.Microsecond) // within the linger
					read()
				}
			}()
		}
		wg.Wait()
		if rounds > 13 { // 10, and a few until the readers have found together
			t.Errorf("%d rounds for 10 reads of 8 readers", rounds)
		}
		cancel()
		r.close()
	})
}
