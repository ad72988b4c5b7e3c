package retry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/objectstore/objectstoretest"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, o Options, hook fault.Hook) *Store {
	t.Helper()
	f, err := file.Open(t.TempDir())
	must(t, err)
	s := Wrap(fault.Wrap(f, hook), o)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// With a fault in every third call, of every kind that a repeat mends, the store
// still does all that a store must.
func TestConformanceBesideFaults(t *testing.T) {
	objectstoretest.Run(t, objectstoretest.Options{Open: func(t testing.TB) objectstore.Store {
		var mu sync.Mutex
		rnd := rand.New(rand.NewPCG(1, 2))
		o := Options{Attempts: 100, First: time.Microsecond, Longest: time.Microsecond, Budget: NewBudget(1e9, 1)}
		return open(t, o, func(fault.Op, string) fault.Fault {
			mu.Lock()
			defer mu.Unlock()
			if rnd.IntN(3) > 0 {
				return fault.Fault{}
			}
			trouble := fault.Trouble("test")
			return []fault.Fault{
				{Err: trouble}, {After: trouble}, {Items: 1 + rnd.IntN(500)},
				{Body: fault.Body{Kind: fault.BodyBroken, At: rnd.Int64N(100_000)}},
			}[rnd.IntN(4)]
		})
	}})
}

// OT1
func TestAnswersAreNotRepeated(t *testing.T) {
	for _, answer := range []error{base.ErrNotFound, base.ErrConflict, base.ErrCorrupt, base.ErrInvalid, base.ErrClosed, context.Canceled, io.ErrUnexpectedEOF} {
		calls := 0
		s := open(t, Options{}, func(fault.Op, string) fault.Fault { calls++; return fault.Fault{Err: answer} })
		ctx := context.Background()
		all := []error{s.Put(ctx, "k", objectstore.Bytes(nil)), s.Delete(ctx, "k")}
		_, err := s.Stat(ctx, "k")
		all = append(all, err)
		_, err = s.Get(ctx, "k", 0, 1)
		all = append(all, err)
		_, err = s.Sweep(ctx, "", time.Now())
		all = append(all, err)
		for _, err := range s.List(ctx, "", "") {
			all = append(all, err)
		}
		for i, err := range all {
			if !errors.Is(err, answer) {
				t.Errorf("call %d: %v, want %v", i, err, answer)
			}
		}
		if calls != len(all) {
			t.Errorf("%v: %d calls for %d", answer, calls, len(all))
		}
	}
}

// OT2
func TestRepeatedPutMeetsItsOwnObject(t *testing.T) {
	for _, c := range []struct {
		there string // what another has stored in between
		want  error
	}{{"mine", nil}, {"your", base.ErrConflict}, {"longer", base.ErrConflict}} {
		var s *Store
		first := true
		s = open(t, Options{First: time.Microsecond}, func(op fault.Op, key string) fault.Fault {
			if op == fault.OpPut && first {
				first = false
				must(t, s.inner.Put(context.Background(), key, objectstore.Bytes([]byte(c.there))))
				return fault.Fault{Err: fault.Trouble("the answer was lost")}
			}
			return fault.Fault{}
		})
		if err := s.Put(context.Background(), "k", objectstore.Bytes([]byte("mine"))); !errors.Is(err, c.want) {
			t.Errorf("beside %q: %v, want %v", c.there, err, c.want)
		}
	}
	// One that was there for a moment is no reason to give up.
	answers := []fault.Fault{{Err: fault.Trouble("the answer was lost")}, {Err: base.ErrConflict}}
	s := open(t, Options{First: time.Microsecond}, func(op fault.Op, _ string) (f fault.Fault) {
		if op == fault.OpPut && len(answers) > 0 {
			f, answers = answers[0], answers[1:]
		}
		return f
	})
	must(t, s.Put(context.Background(), "k", objectstore.Bytes([]byte("mine"))))
	if err := s.Put(context.Background(), "k", objectstore.Bytes([]byte("mine"))); !errors.Is(err, base.ErrConflict) {
		t.Errorf("the same object put again by another call: %v", err)
	}
}

// OT3: whatever breaks where, the bytes are those of the object.
func TestBodyIsReadOn(t *testing.T) {
	body := objectstoretest.Pattern(50_000)
	var breaks []int64
	s := open(t, Options{First: time.Microsecond, Attempts: 4}, func(op fault.Op, _ string) fault.Fault {
		if op != fault.OpGet || len(breaks) == 0 {
			return fault.Fault{}
		}
		at := breaks[0]
		breaks = breaks[1:]
		return fault.Fault{Body: fault.Body{Kind: fault.BodyBroken, At: at}}
	})
	must(t, s.Put(context.Background(), "k", objectstore.Bytes(body)))
	get := func(offset, length int64) ([]byte, error) {
		r, err := s.Get(context.Background(), "k", offset, length)
		if err != nil {
			return nil, err
		}
		b, err := io.ReadAll(r)
		return b, errors.Join(err, r.Close())
	}
	for _, at := range [][]int64{{0}, {1, 1, 1}, {20_000, 10_000, 0}, {49_999}, {50_000}} {
		breaks = slices.Clone(at)
		if got, err := get(0, -1); err != nil || !bytes.Equal(got, body) {
			t.Errorf("broken at %v: %d bytes, %v", at, len(got), err)
		}
		breaks = slices.Clone(at)
		if got, err := get(100, 40_000); err != nil || !bytes.Equal(got, body[100:40_100]) {
			t.Errorf("a range broken at %v: %d bytes, %v", at, len(got), err)
		}
	}
	breaks = []int64{5, 5, 5, 5, 5}
	if _, err := get(0, -1); !errors.Is(err, base.ErrObjectStore) {
		t.Errorf("broken more often than there are attempts: %v", err)
	}
}

// OT4
func TestBudgetIsShared(t *testing.T) {
	budget := NewBudget(10, 0.5)
	calls := 0
	fails := true
	hook := func(fault.Op, string) fault.Fault {
		calls++
		if fails {
			return fault.Fault{Err: fault.Trouble("down")}
		}
		return fault.Fault{}
	}
	o := Options{First: time.Microsecond, Attempts: 4, Budget: budget}
	a, b := open(t, o, hook), open(t, o, hook)
	for i := range 20 {
		s := []*Store{a, b}[i%2]
		if err := s.Delete(context.Background(), "k"); !errors.Is(err, base.ErrObjectStore) {
			t.Fatal(err)
		}
	}
	if calls != 30 {
		t.Errorf("%d calls, want 20 and 10 repeats", calls)
	}
	fails = false
	for range 4 {
		must(t, a.Delete(context.Background(), "k"))
	}
	fails, calls = true, 0
	for range 5 {
		_ = b.Delete(context.Background(), "k")
	}
	if calls != 7 {
		t.Errorf("%d calls after 4 successes, want 5 and 2 repeats", calls)
	}
}

// OT5, in simulated time.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		failure := fault.Trouble("down")
		s := Wrap(fault.Wrap(nil, func(fault.Op, string) fault.Fault {
			at = append(at, time.Since(began))
			return fault.Fault{Err: failure}
		}), Options{Attempts: 5, First: time.Second, Longest: 3 * time.Second})
		err := s.Delete(context.Background(), "k")
		if !errors.Is(err, base.ErrObjectStore) || len(at) != 5 {
			t.Fatalf("%d attempts: %v", len(at), err)
		}
		for i, longest := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 3 * time.Second} {
			if d := at[i+1] - at[i]; d < longest/2 || d > longest {
				t.Errorf("pause %d is %v, want half of %v to all of it", i, d, longest)
			}
		}
		// A store that throttles says how long.
		failure = fmt.Errorf("throttled: %w", &base.Error{Cause: base.ErrObjectStore, RetryAfter: time.Minute, Ordinal: -1})
		at = nil
		_ = s.Delete(context.Background(), "k")
		for i := range len(at) - 1 {
			if d := at[i+1] - at[i]; d < time.Minute || d > time.Minute+3*time.Second {
				t.Errorf("pause of a throttled call: %v", d)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		before := time.Now()
		if err := s.Delete(ctx, "k"); !errors.Is(err, base.ErrObjectStore) || time.Since(before) != time.Second {
			t.Errorf("given up after %v: %v", time.Since(before), err)
		}
	})
}
