package broadcast

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

func watch(t testing.TB, s *Store, prefix string, after base.Revision) *Watcher {
	t.Helper()
	w, err := s.Watch(t.Context(), prefix, after)
	if err != nil {
		t.Fatalf("Watch: %v", err)
	}
	return w
}

func describe(b Batch) string {
	s := fmt.Sprintf("%d:", b.Revision)
	for _, e := range b.Events {
		s += fmt.Sprintf(" %d %s=%s (%d,%d)", e.Kind, e.Key, e.Value, e.CreateRevision, e.Revision)
	}
	return s
}

// wantNext expects the watcher to hold the batches, and nothing behind them.
func wantNext(t *testing.T, w *Watcher, want ...string) {
	t.Helper()
	for _, x := range want {
		b, ok, err := w.Poll()
		if err != nil || !ok || describe(b) != x || w.Revision() != b.Revision {
			t.Fatalf("got %q, %v, %v, want %q", describe(b), ok, err, x)
		}
	}
	if b, ok, err := w.Poll(); ok || err != nil {
		t.Fatalf("got %q, %v, want nothing", describe(b), err)
	}
}

// BC6 and BC7: net changes, in key order, in one batch, of the prefix only.
func TestWatcherGetsTheNetChangesOfATransaction(t *testing.T) {
	s := New(Options{})
	all, some := watch(t, s, "", 0), watch(t, s, "p/", 0)
	apply(t, s, Txn{Then: []Op{Put("p/b", []byte("1")), Put("a", []byte("1")), Put("p/b", []byte("2")), Put("q", nil), Delete("q")}})
	put(t, s, "q", "1")
	apply(t, s, Txn{Then: []Op{DeletePrefix("p/"), Put("p/b", []byte("3")), Put("p/a", []byte("4"))}})
	apply(t, s, Txn{Then: []Op{DeletePrefix("p/"), Delete("absent")}})
	wantNext(t, all, "1: 1 a=1 (1,1) 1 p/b=2 (1,1)", "2: 1 q=1 (2,2)", "3: 1 p/a=4 (3,3) 1 p/b=3 (3,3)", "4: 2 p/a= (0,4) 2 p/b= (0,4)")
	wantNext(t, some, "1: 1 p/b=2 (1,1)", "3: 1 p/a=4 (3,3) 1 p/b=3 (3,3)", "4: 2 p/a= (0,4) 2 p/b= (0,4)")
	put(t, s, "z", "1")
	wantNext(t, some)
	if some.Revision() != 5 {
		t.Errorf("a watcher that had nothing to tell stands at %d, want 5", some.Revision())
	}
	wantNext(t, watch(t, s, "p/", 3), "4: 2 p/a= (0,4) 2 p/b= (0,4)")
	got, err := s.Changes("p/", 1, 3)
	if err != nil || len(got) != 1 || describe(got[0]) != "3: 1 p/a=4 (3,3) 1 p/b=3 (3,3)" {
		t.Errorf("Changes: %v, %v", got, err)
	}
	if _, err := s.Changes("", 1, 6); !errors.Is(err, base.ErrCompacted) {
		t.Errorf("changes of the future: %v", err)
	}
}

func TestWatchFromAFutureRevision(t *testing.T) {
	s := New(Options{})
	w := watch(t, s, "", 2)
	put(t, s, "a", "1")
	put(t, s, "a", "2")
	wantNext(t, w)
	put(t, s, "a", "3")
	wantNext(t, w, "3: 1 a=3 (1,3)")
}

// A slow watcher is left behind by the bounded history and told so; the usual
// recovery, a copy and a watch from its revision, misses nothing.
func TestSlowWatcherIsToldCompactedAndStartsAgain(t *testing.T) {
	for name, opts := range map[string]Options{"by count": {HistoryEvents: 10}, "by bytes": {HistoryBytes: 40}} {
		t.Run(name, func(t *testing.T) {
			s := New(opts)
			w := watch(t, s, "", 0)
			for i := range 1000 {
				put(t, s, "key", fmt.Sprint(i%10))
			}
			if n := s.mu.history.len(); n != 10 || cap(s.mu.history.batches) > 200 {
				t.Errorf("the history holds %d batches in room for %d", n, cap(s.mu.history.batches))
			}
			for range 2 {
				if _, _, err := w.Poll(); !errors.Is(err, base.ErrCompacted) {
					t.Fatalf("got %v, want ErrCompacted", err)
				}
			}
			if _, err := s.Watch(t.Context(), "", 989); !errors.Is(err, base.ErrCompacted) {
				t.Fatalf("a watch from before the history: %v", err)
			}
			watch(t, s, "", 990)
			snap := s.Snapshot()
			w = watch(t, s, "", snap.Revision())
			wantNext(t, w)
			put(t, s, "key", "x")
			wantNext(t, w, "1001: 1 key=x (1,1001)")
		})
	}
}

func TestHistoryKeepsAtLeastTheNewestChange(t *testing.T) {
	s := New(Options{HistoryBytes: 1})
	w := watch(t, s, "", 0)
	put(t, s, "a", "a value over the limit")
	wantNext(t, w, "1: 1 a=a value over the limit (1,1)")
}

func TestCompactDropsHistoryOnEveryNode(t *testing.T) {
	s := New(Options{})
	for i := range 10 {
		put(t, s, "a", fmt.Sprint(i))
	}
	behind, ahead := watch(t, s, "", 3), watch(t, s, "", 5)
	if _, err := s.Apply(100, EncodeCompact(5)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := behind.Poll(); !errors.Is(err, base.ErrCompacted) {
		t.Errorf("behind the compaction: %v", err)
	}
	if b, ok, err := ahead.Poll(); !ok || err != nil || b.Revision != 6 {
		t.Errorf("at the compaction: %v, %v, %v", b, ok, err)
	}
	if _, err := s.Apply(101, EncodeCompact(2)); err != nil || s.Snapshot().Compacted() != 5 {
		t.Errorf("an older compaction: %v, at %d", err, s.Snapshot().Compacted())
	}
	if _, err := s.Apply(102, EncodeCompact(10)); err != nil {
		t.Fatal(err)
	}
	w := watch(t, s, "", 10)
	put(t, s, "a", "x")
	wantNext(t, w, "11: 1 a=x (1,11)")
}

func TestWatchersAcrossRestore(t *testing.T) {
	older, newer := New(Options{}), New(Options{})
	put(t, older, "a", "0")
	put(t, newer, "a", "0")
	image := snapshotBytes(t, older)
	for i := range 5 {
		put(t, newer, "a", fmt.Sprint(i))
	}
	newest := snapshotBytes(t, newer)

	s := New(Options{})
	put(t, s, "a", "0")
	put(t, s, "a", "1")
	behind, future := watch(t, s, "", 1), watch(t, s, "", 6)
	if err := s.Restore(bytes.NewReader(newest)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := behind.Poll(); !errors.Is(err, base.ErrCompacted) {
		t.Errorf("restored past the watcher: %v", err)
	}
	wantNext(t, future)
	put(t, s, "a", "x")
	wantNext(t, future, "7: 1 a=x (1,7)")
	if err := s.Restore(bytes.NewReader(image)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := future.Poll(); !errors.Is(err, base.ErrCompacted) {
		t.Errorf("restored to before the watcher: %v", err)
	}
}

func TestNextWaitsAndEnds(t *testing.T) {
	s := New(Options{})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	cancelled, err := s.Watch(ctx, "p/", 0)
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		if b, err := cancelled.Next(); err != nil || b.Revision != 2 {
			t.Errorf("got %v, %v", b, err)
		}
		cancel()
		if _, err := cancelled.Next(); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want the context's error", err)
		}
	})
	put(t, s, "a", "1")
	put(t, s, "p/a", "1")
	wg.Wait()
	closed := watch(t, s, "", 2)
	wg.Go(func() {
		if _, err := closed.Next(); !errors.Is(err, base.ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
	})
	s.Close()
	wg.Wait()
	if _, err := s.Watch(t.Context(), "", 2); !errors.Is(err, base.ErrClosed) {
		t.Errorf("watching a closed store: %v", err)
	}
}

// Watchers that run beside Apply see every revision once and in order, or are
// told that they were too slow; then a copy continues exactly where they are.
func TestConcurrentWatchersMissNothing(t *testing.T) {
	const writes = 3000
	s := New(Options{HistoryEvents: 50})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			seen := base.Revision(0)
			w, err := s.Watch(t.Context(), "", 0)
			for seen < writes {
				var b Batch
				if err == nil {
					b, err = w.Next()
				}
				switch {
				case errors.Is(err, base.ErrCompacted):
					v := s.Snapshot()
					if v.Revision() < seen {
						t.Errorf("backwards from %d to %d", seen, v.Revision())
						return
					}
					seen = v.Revision()
					w, err = s.Watch(t.Context(), "", seen)
				case err != nil || b.Revision != seen+1:
					t.Errorf("after %d: %v, %v", seen, b, err)
					return
				default:
					seen = b.Revision
				}
			}
		})
	}
	for i := range writes {
		put(t, s, "a", fmt.Sprint(i))
	}
	wg.Wait()
}
