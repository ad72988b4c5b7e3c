package keel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func wantApplied(t *testing.T, f *fake, want ...string) {
	t.Helper()
	if got, _ := f.seen(); !slices.Equal(got, want) {
		t.Fatalf("applied %q, want %q", got, want)
	}
}

// once runs do for the first write only.
func once(do deed) func(int, *keelstatepb.WriteRequest) deed {
	var n atomic.Int32
	return func(int, *keelstatepb.WriteRequest) deed {
		if n.Add(1) == 1 {
			return do
		}
		return normal
	}
}

// KC1: whatever happens to the first attempt, the write is applied once.
func TestOneFaultIsRepaired(t *testing.T) {
	refuse := func(err error) deed { return deed{refuse: err} }
	for _, tc := range []struct {
		name     string
		first    deed
		requests int
	}{
		{"none", normal, 1},
		{"the reply is lost", deed{apply: true, cut: true}, 2},
		{"the request is lost", deed{hang: true, cut: true}, 2},
		{"the reply comes twice", deed{apply: true, reply: true, twice: true}, 1},
		{"the stream breaks after the reply", deed{apply: true, reply: true, cut: true}, 1},
		{"unknown", refuse(base.ErrOutcomeUnknown), 2},
		{"internal", refuse(base.ErrInternal), 2},
		{"overloaded", refuse(base.ErrOverloaded), 2},
		{"order", refuse(base.ErrSessionOrder), 2},
		{"stale sessions", refuse(base.ErrSessionStale), 2},
		{"window", refuse(base.ErrSessionWindow), 2},
		{"not ready", refuse(base.ErrNotReady), 2},
		{"no quorum", refuse(base.ErrNoQuorum), 2},
		{"no leader known", refuse(base.ErrNotLeader), 2},
		{"shutting down", refuse(base.ErrShuttingDown), 2},
		{"damaged", refuse(base.ErrDamaged), 2},
		{"disk", refuse(base.ErrDiskFailed), 2},
		{"wrong range", refuse(base.ErrWrongRange), 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFake(t, 1)
			v := f.value(f.client())
			if tc.first.hang { // lost with the stream
				tc.first = deed{refuse: base.ErrOutcomeUnknown, cut: true}
			}
			f.setScript(once(tc.first))
			if _, err := v.Set(testContext(t), "a", "x"); err != nil {
				t.Fatal(err)
			}
			wantApplied(t, f, "x")
			if _, n := f.seen(); n != tc.requests {
				t.Fatalf("%d requests, want %d", n, tc.requests)
			}
		})
	}
}

// Refusals by content end the call at once and say what is at fault.
func TestFinalRefusals(t *testing.T) {
	for _, s := range []*base.Sentinel{base.ErrPrecondition, base.ErrInvalid, base.ErrTooLarge, base.ErrUndeclared,
		base.ErrWrongKind, base.ErrOutOfRange, base.ErrConflict, base.ErrUnsupported, base.ErrIncarnation} {
		f := newFake(t, 1)
		v := f.value(f.client())
		f.setScript(once(deed{refuse: &base.Error{Cause: s, Field: "mutations[0].value", Hint: "do it better", Ordinal: 0}}))
		_, err := v.Set(testContext(t), "a", "x")
		var e *Error
		if !errors.Is(err, s) || !errors.As(err, &e) {
			t.Fatalf("%s: got %v", s.Reason, err)
		}
		if e.Code != s.Reason || e.Outcome != OutcomeNotApplied || e.Field != "mutations[0].value" || e.Hint != "do it better" || e.Ordinal != 0 || e.Shard != 1 {
			t.Fatalf("%s: got %+v", s.Reason, e)
		}
		// The session goes on behind the number that was not used up.
		if _, err := v.Set(testContext(t), "a", "y"); err != nil {
			t.Fatalf("after %s: %v", s.Reason, err)
		}
		wantApplied(t, f, "y")
	}
}

func TestRedirect(t *testing.T) {
	f := newFake(t, 3)
	c := f.client(WithBackoff(time.Hour, time.Hour))
	v := f.value(c)
	if err := c.Ready(testContext(t)); err != nil { // it knows the old leader
		t.Fatal(err)
	}
	f.change(true, func() { f.leader = 2 })
	if _, err := v.Set(testContext(t), "a", "x"); err != nil { // an hour's pause would end it
		t.Fatal(err)
	}
	wantApplied(t, f, "x")
	if !slices.Equal(f.reached, []int{0, 2}) {
		t.Fatalf("the request reached %v, want the old leader and then the one it named", f.reached)
	}
	if got, found, err := v.Get(testContext(t), "a"); err != nil || !found || got != "x" {
		t.Fatal(got, found, err)
	}
}

func TestStaleEpoch(t *testing.T) {
	f := newFake(t, 2)
	v := f.value(f.client())
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	f.change(true, func() { f.epoch = 9 }) // the watch does not tell
	if _, err := v.Set(testContext(t), "a", "y"); err != nil {
		t.Fatal(err)
	}
	wantApplied(t, f, "x", "y")
}

func TestOverloadWaitsAsTold(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	f.setScript(once(deed{refuse: &base.Error{Cause: base.ErrOverloaded, RetryAfter: 150 * time.Millisecond, Ordinal: -1}}))
	start := time.Now()
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d < 150*time.Millisecond {
		t.Fatalf("sent again after %v, asked to wait 150ms", d)
	}
}

// A node that takes requests and never answers costs the attempt timeout.
func TestSilentNode(t *testing.T) {
	f := newFake(t, 2)
	v := f.value(f.client(WithAttemptTimeout(100 * time.Millisecond)))
	f.setScript(func(node int, _ *keelstatepb.WriteRequest) deed {
		if node == 0 {
			f.change(true, func() { f.leader = 1 })
			return deed{hang: true}
		}
		return normal
	})
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	wantApplied(t, f, "x")
}

// KC3: after a deadline the request stays open and is resolved behind it.
func TestDeadlineLeavesTheRequestOpen(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client(WithAttemptTimeout(time.Minute)))
	if _, err := v.Set(testContext(t), "a", "first"); err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	f.setScript(once(deed{apply: true, cut: true, delay: release}))                  // applied late, and the reply is lost
	short, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond) // it must be sent by then
	defer cancel()
	_, err := v.Set(short, "a", "late")
	var e *Error
	if !errors.As(err, &e) || e.Code != base.ErrDeadline.Reason || e.Outcome != OutcomeUnknown || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %+v, want a deadline with an unknown outcome", err)
	}
	next := v.client.Batch().Add(v.SetOp("a", "next")).Start(testContext(t))
	close(release)
	if _, err := next.Wait(testContext(t)); err != nil {
		t.Fatal(err)
	}
	wantApplied(t, f, "first", "late", "next")
	if _, err := v.Set(testContext(t), "a", "last"); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if q := f.writes[len(f.writes)-1]; q.GetFloor() != q.GetSequence() {
		t.Fatalf("number %d has the floor %d: the late request is still open", q.GetSequence(), q.GetFloor())
	}
}

// A write that never left is taken back at its deadline.
func TestDeadlineTakesBackWhatWasNotSent(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client(WithBackoff(time.Minute, time.Minute)))
	f.setScript(once(deed{refuse: base.ErrOverloaded}))
	first := v.client.Batch().Add(v.SetOp("a", "x")).Start(testContext(t))
	waitFor(t, func() bool { // the lane is broken and sleeps for long
		l, _ := v.client.mu.session.lane(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.broken && l.inFlight == 0
	})
	short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := v.Set(short, "a", "y")
	var e *Error
	if !errors.As(err, &e) || e.Outcome != OutcomeNotApplied {
		t.Fatalf("got %v, want not applied", err)
	}
	wantApplied(t, f)
	_ = first // ends with the client
}

// KC4 and the outcomes of what was open when the session ended.
func TestSessionEnded(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	// Applied, the reply lost, and then the session is gone.
	f.setScript(func() func(int, *keelstatepb.WriteRequest) deed {
		var n atomic.Int32
		return func(int, *keelstatepb.WriteRequest) deed {
			if n.Add(1) == 1 {
				return deed{apply: true, cut: true}
			}
			f.mu.Lock()
			f.sessions[1].ended = true
			f.mu.Unlock()
			return normal
		}
	}())
	_, err := v.Set(testContext(t), "a", "maybe")
	var e *Error
	if !errors.Is(err, ErrSessionEnded) || !errors.As(err, &e) || e.Outcome != OutcomeUnknown {
		t.Fatalf("got %v, want session ended with an unknown outcome", err)
	}
	f.setScript(nil)
	if _, err := v.Set(testContext(t), "a", "next"); err != nil {
		t.Fatal(err)
	}
	wantApplied(t, f, "x", "maybe", "next")
	f.mu.Lock()
	defer f.mu.Unlock()
	if q := f.writes[len(f.writes)-1]; q.GetSession() != 2 || q.GetSequence() != 1 {
		t.Fatalf("session %d number %d, want the first of the second", q.GetSession(), q.GetSequence())
	}
}

// An idle session that ran out costs the next call nothing.
func TestSessionRanOut(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.sessions[1].ended = true
	f.mu.Unlock()
	if _, err := v.Set(testContext(t), "a", "y"); err != nil {
		t.Fatal(err)
	}
	wantApplied(t, f, "x", "y")
}

// A client with one session writes nothing under another, whoever notices the end.
func TestOneSessionIsNeverReplaced(t *testing.T) {
	for name, lease := range map[string]time.Duration{"a write notices": time.Minute, "keeping it alive notices": 30 * time.Millisecond} {
		f := newFake(t, 1)
		c := f.client(WithOneSession(), WithSessionLease(lease))
		v := f.value(c)
		if _, err := v.Set(testContext(t), "a", "x"); err != nil {
			t.Fatal(err)
		}
		f.mu.Lock()
		f.sessions[1].ended = true
		f.mu.Unlock()
		if lease < time.Second {
			waitFor(t, func() bool {
				c.mu.Lock()
				defer c.mu.Unlock()
				return c.mu.over != nil
			})
		}
		for range 3 {
			_, err := v.Set(testContext(t), "a", "y")
			var e *Error
			if !errors.Is(err, ErrSessionEnded) || !errors.As(err, &e) || e.Outcome != OutcomeNotApplied || e.Retryable {
				t.Errorf("%s: %v, want a session that has ended for good", name, err)
			}
		}
		if _, err := c.Participate(testContext(t), "p"); !errors.Is(err, ErrSessionEnded) {
			t.Errorf("%s: participating: %v", name, err)
		}
		wantApplied(t, f, "x")
		if f.lastID != 1 {
			t.Errorf("%s: %d sessions were opened", name, f.lastID)
		}
	}
}

func TestKeepAliveNoticesTheEnd(t *testing.T) {
	f := newFake(t, 1)
	c := f.client(WithSessionLease(30 * time.Millisecond))
	v := f.value(c)
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.sessions[1].ended = true
	f.mu.Unlock()
	waitFor(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.mu.session == nil
	})
}

// Without a session an unknown outcome is never tried again (KC1).
func TestSessionless(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	set := func(x string) error {
		_, err := v.client.Batch().Add(v.SetOp("a", x)).WithoutSession().Commit(testContext(t))
		return err
	}
	f.setScript(once(deed{refuse: base.ErrOverloaded}))
	if err := set("x"); err != nil {
		t.Fatal(err)
	}
	f.setScript(once(deed{apply: true, cut: true}))
	var e *Error
	if err := set("y"); !errors.As(err, &e) || e.Outcome != OutcomeUnknown {
		t.Fatalf("got %v, want an unknown outcome", err)
	}
	wantApplied(t, f, "x", "y")
	if _, n := f.seen(); n != 3 {
		t.Fatalf("%d requests, want 3", n)
	}
}

// KC1 and KC2 under random faults: every acknowledged write is applied exactly
// once and in the order started, every other one at most once.
func TestRandomFaults(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := newFake(t, 3)
		c := f.client(WithAttemptTimeout(100*time.Millisecond), WithMaxInFlight(rapid.IntRange(1, 20).Draw(rt, "window"), 1<<20))
		defer f.end(c) // not with the test: there are a hundred
		v := f.value(c)
		faults := rapid.SliceOfN(rapid.IntRange(0, 9), 0, 30).Draw(rt, "faults")
		var next atomic.Int32
		f.setScript(func(node int, _ *keelstatepb.WriteRequest) deed {
			i := int(next.Add(1)) - 1
			if i >= len(faults) {
				return normal
			}
			return randomDeed(f, faults[i])
		})
		n := rapid.IntRange(1, 40).Draw(rt, "writes")
		var pending []*Pending
		for i := range n {
			pending = append(pending, c.Batch().Add(v.SetOp("a", fmt.Sprintf("%03d", i))).Start(testContext(t)))
		}
		acked := make(map[string]bool)
		for i, p := range pending {
			if _, err := p.Wait(testContext(t)); err != nil {
				rt.Fatalf("write %d: %v", i, err)
			}
			acked[fmt.Sprintf("%03d", i)] = true
		}
		applied, _ := f.seen()
		if !slices.IsSorted(applied) || len(slices.Compact(slices.Clone(applied))) != len(applied) {
			rt.Fatalf("applied %q: out of order or twice", applied)
		}
		if len(applied) != len(acked) {
			rt.Fatalf("%d applied, %d acknowledged", len(applied), len(acked))
		}
	})
}

func randomDeed(f *fake, n int) deed {
	switch n {
	case 0:
		return deed{apply: true, cut: true}
	case 1:
		return deed{refuse: base.ErrOutcomeUnknown, cut: true}
	case 2:
		return deed{refuse: base.ErrOverloaded}
	case 3:
		return deed{refuse: base.ErrOutcomeUnknown}
	case 4:
		f.change(true, func() { f.leader = (f.leader + 1) % len(f.nodes) })
		return normal
	case 5:
		f.change(false, func() { f.epoch++ })
		return normal
	case 6:
		return deed{apply: true, reply: true, twice: true}
	case 7:
		return deed{hang: true}
	default:
		return normal
	}
}

// A scan whose stream breaks goes on behind the last page.
func TestScanResumes(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	items := func(from, to int) (out []*keelstatepb.ScanItem) {
		for i := from; i < to; i++ {
			key, _ := String.Encode(fmt.Sprintf("%03d", i))
			out = append(out, &keelstatepb.ScanItem{Key: key, Entry: &keelstatepb.MapEntry{Value: key}})
		}
		return out
	}
	f.scan = func(_ int, q *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
		from := 0
		if len(q.GetCursor()) > 0 {
			from = int(q.GetCursor()[0])
		}
		if err := s.Send(&keelstatepb.ScanPage{Items: items(from, from+10), Cursor: []byte{byte(from + 10)}}); err != nil {
			return err
		}
		if from < 50 {
			return status.Error(codes.Unavailable, "cut by the test")
		}
		return nil
	}
	for _, limit := range []uint64{0, 25, 10, 1} {
		i := 0
		for it, err := range v.Scan(testContext(t), ScanOptions{Limit: limit}) {
			if err != nil {
				t.Fatal(err)
			}
			if want := fmt.Sprintf("%03d", i); it.Key != want || it.Value != want {
				t.Fatalf("item %d is %v", i, it)
			}
			i++
		}
		if want := 60; limit == 0 && i != want || limit > 0 && uint64(i) != limit {
			t.Fatalf("limit %d: %d items", limit, i)
		}
	}
}

// A scan that is resumed stays in its incarnation: a rollback ends it.
func TestScanEndsWithItsIncarnation(t *testing.T) {
	f := newFake(t, 1)
	f.incarnation = 3
	v := f.value(f.client())
	var asked []uint64
	f.scan = func(_ int, q *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
		asked = append(asked, q.GetIncarnation())
		if len(asked) > 1 {
			return apierr.ToStatus(&base.Error{Cause: base.ErrIncarnation, Ordinal: -1, Hint: "rolled back to checkpoint 7"}).Err()
		}
		key, _ := String.Encode("a")
		if err := s.Send(&keelstatepb.ScanPage{Items: []*keelstatepb.ScanItem{{Key: key, Entry: &keelstatepb.MapEntry{Value: key}}}, Cursor: []byte{1}}); err != nil {
			return err
		}
		f.change(false, func() { f.incarnation = 4 })
		waitFor(t, func() bool { return v.client.topo.Load().incarnation == 4 })
		return status.Error(codes.Unavailable, "cut by the test")
	}
	items := 0
	for _, err := range v.Scan(testContext(t), ScanOptions{}) {
		if err == nil {
			items++
		} else if !errors.Is(err, ErrIncarnation) {
			t.Error(err)
		}
	}
	if items != 1 || len(asked) != 2 || asked[0] != 3 || asked[1] != 3 {
		t.Errorf("%d items, asked for the incarnations %d", items, asked)
	}
}

func TestReadyNamesTheReason(t *testing.T) {
	c, err := Open(context.Background(), []string{"nowhere:1"}, WithDialer(newFake(t, 0).dialNone))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	var e *Error
	waitFor(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		return errors.As(c.Ready(ctx), &e) && e.Code == codeUnavailable
	})
	if e.Outcome != OutcomeNotApplied {
		t.Fatalf("got %+v", e)
	}
}

// waitFor polls a condition.
func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	waitLonger(t, 10*time.Second, cond)
}

func waitLonger(t *testing.T, longest time.Duration, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(longest)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatal("the condition never held")
		}
		time.Sleep(time.Millisecond) // between two looks
	}
}

func TestBudget(t *testing.T) {
	b := newBudget(0.5, 100)
	for range int(b.capacity) {
		if w := b.take(); w != 0 {
			t.Fatalf("a full budget asks to wait %v", w)
		}
	}
	if w := b.take(); w <= 0 || w > 20*time.Millisecond {
		t.Fatalf("an empty budget of 100 per second asks to wait %v", w)
	}
	for range 10 {
		b.called()
	}
	if w := b.take(); w != 0 {
		t.Fatalf("after calls the budget asks to wait %v", w)
	}
}

func TestBackoffBounds(t *testing.T) {
	o := defaults()
	for n := range 100 {
		want := o.backoffMax
		if n < 6 {
			want = min(want, o.backoffMin<<n)
		}
		for range 20 {
			if d := o.backoff(n); d < want/2 || d > want {
				t.Fatalf("pause %d is %v, want %v to %v", n, d, want/2, want)
			}
		}
	}
}
