package keel

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// After a page without a cursor a scan is over, however its stream ends.
func TestScanEndsAfterItsLastPage(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	var streams atomic.Int32
	f.scan = func(_ int, q *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
		from := 0
		if streams.Add(1) > 1 {
			from = int(q.GetCursor()[0]) // panics for a scan from the start
		}
		key, err := String.Encode(fmt.Sprint(from))
		if err != nil {
			return err
		}
		p := &keelstatepb.ScanPage{Items: []*keelstatepb.ScanItem{{Key: key, Entry: &keelstatepb.MapEntry{Value: key}}}}
		if from == 0 {
			p.Cursor = []byte{1}
		}
		if err := s.Send(p); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "cut by the test")
	}
	n := 0
	for it, err := range v.Scan(testContext(t), ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if it.Key != fmt.Sprint(n) {
			t.Fatalf("item %d is %v", n, it.Key)
		}
		n++
	}
	if n != 2 || streams.Load() != 2 {
		t.Fatalf("%d items from %d streams", n, streams.Load())
	}
}

// The status of a stream says nothing of the requests that were sent on it: a
// write may have been applied although the stream ends as not applied (KC1, KC3).
func TestStreamStatusLeavesOutcomeUnknown(t *testing.T) {
	lost := deed{apply: true, cut: true, status: base.ErrShuttingDown}
	f := newFake(t, 1)
	c := f.client()
	v := f.value(c)
	check := func(what string, err error) {
		t.Helper()
		var e *Error
		if !errors.As(err, &e) || e.Outcome != OutcomeUnknown {
			t.Fatalf("%s: %v, want an unknown outcome", what, err)
		}
	}
	f.setScript(once(lost))
	_, err := c.Batch().Add(v.SetOp("a", "x")).WithoutSession().Commit(testContext(t))
	check("without a session", err)
	wantApplied(t, f, "x")

	var n atomic.Int32
	f.setScript(func(int, *keelstatepb.WriteRequest) deed {
		if n.Add(1) == 1 {
			return lost
		}
		return deed{refuse: base.ErrSessionEnded}
	})
	_, err = v.Set(testContext(t), "a", "y")
	check("in a session that then ends", err)
	wantApplied(t, f, "x", "y")
}

// What is owed to the budget is bounded: nobody waits longer than a second,
// however long an outage was.
func TestBudgetDebtIsBounded(t *testing.T) {
	b := newBudget(0.1, 10)
	for range 10000 {
		if w := b.take(); w > time.Second {
			t.Fatalf("a retry has to wait %v", w)
		}
	}
}

// What does not load a node that has refused is not bound by the budget: a
// redirect by name, the open writes of a lane sent again, a sign of life.
func TestRedirectsAndLanesGoWithoutBudget(t *testing.T) {
	f := newFake(t, 2)
	c := f.client(WithRetryBudget(0, 0.1))
	v := f.value(c)
	c.budget.mu.Lock()
	c.budget.mu.tokens = -c.budget.perSecond // whoever takes waits about a second
	c.budget.mu.Unlock()
	if _, err := v.Set(testContext(t), "a", "x"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	f.setScript(once(deed{refuse: base.ErrNotReady}))
	if _, err := v.Set(testContext(t), "a", "y"); err != nil {
		t.Fatal(err)
	}
	f.change(true, func() { f.leader = 1 })
	if _, _, err := v.Get(testContext(t), "a"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 500*time.Millisecond {
		t.Fatalf("they waited %v", took)
	}
}

// Open writes go to a new leader as soon as the topology names it, whether they
// wait for another attempt or for a node that has fallen silent.
func TestNewLeaderWakesLanes(t *testing.T) {
	for name, atFirst := range map[string]deed{"paused": {refuse: base.ErrNotReady}, "in flight": {hang: true}} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 2)
			c := f.client(WithBackoff(time.Hour, time.Hour), WithAttemptTimeout(time.Hour))
			v := f.value(c)
			f.setScript(func(node int, _ *keelstatepb.WriteRequest) deed {
				if node == 0 {
					return atFirst
				}
				return normal
			})
			p := c.Batch().Add(v.SetOp("a", "x")).Start(testContext(t))
			if p.err != nil {
				t.Fatal(p.err)
			}
			l := p.parts[0].lane
			waitFor(t, func() bool {
				_, n := f.seen()
				l.mu.Lock()
				defer l.mu.Unlock()
				return n == 1 && l.resuming == (name == "paused")
			})
			start := time.Now()
			f.change(false, func() { f.leader = 1 })
			if _, err := p.Wait(testContext(t)); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > 2*time.Second {
				t.Fatalf("the write went on after %v", took)
			}
			wantApplied(t, f, "x")
		})
	}
}

// A caller of Call may allow an attempt more or less time than the client does.
func TestCallsOwnAttemptTimeout(t *testing.T) {
	c := newFake(t, 1).client(WithAttemptTimeout(time.Minute))
	for _, want := range []time.Duration{time.Minute, time.Hour, time.Second, 0} {
		opts := []CallOption{AttemptTimeout(want)}
		if want == time.Minute {
			opts = nil
		}
		err := c.Call(context.Background(), func(ctx context.Context, _ grpc.ClientConnInterface) error {
			at, has := ctx.Deadline()
			if left := time.Until(at); has != (want > 0) || has && (left > want || left < want-time.Second/2) {
				t.Errorf("an attempt of %v has %v, deadline %v", want, left, has)
			}
			return nil
		}, opts...)
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A node that falls silent in a scan is given up after the attempt timeout, and
// the scan goes on behind the last page; the call timeout bounds all of it. The
// time that the consumer takes does not count.
func TestSilentScan(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client(WithAttemptTimeout(50 * time.Millisecond)))
	key, err := String.Encode("k")
	if err != nil {
		t.Fatal(err)
	}
	var streams atomic.Int32
	silent := false // from the start
	f.scan = func(_ int, q *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
		first := streams.Add(1) == 1
		if !silent {
			p := &keelstatepb.ScanPage{Items: []*keelstatepb.ScanItem{{Key: key, Entry: &keelstatepb.MapEntry{Value: key}}}}
			if first {
				p.Cursor = []byte{1}
			}
			if err := s.Send(p); err != nil || !first {
				return err
			}
		}
		<-s.Context().Done()
		return s.Context().Err()
	}
	n := 0
	for _, err := range v.Scan(testContext(t), ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 2 {
			<-time.After(100 * time.Millisecond) // the consumer's own time
		}
	}
	if n != 2 || streams.Load() != 2 {
		t.Fatalf("%d items from %d streams", n, streams.Load())
	}

	silent = true
	v = f.value(f.client(WithAttemptTimeout(time.Hour), WithCallTimeout(100*time.Millisecond)))
	for _, err = range v.Scan(context.Background(), ScanOptions{}) {
	}
	if !errors.Is(err, ErrDeadline) {
		t.Fatalf("got %v, want the call timeout", err)
	}
}

// A call that runs out of time says what the last answer before said.
func TestCallOutOfTimeTellsTheLastRefusal(t *testing.T) {
	f := newFake(t, 1)
	c := f.client()
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	n := 0
	err := c.Call(ctx, func(ctx context.Context, _ grpc.ClientConnInterface) error {
		if n++; n == 1 {
			return apierr.ToStatus(&base.Error{Cause: base.ErrNoQuorum, Ordinal: -1, Hint: "start node n9"}).Err()
		}
		<-ctx.Done()
		return ctx.Err()
	})
	var e *Error
	if !errors.As(err, &e) || !errors.Is(e, ErrDeadline) || !strings.Contains(e.Hint, "start node n9") {
		t.Fatalf("got %v", err)
	}
}

// Every answer that shows what is behind the barrier of a checkpoint tells the
// client of it, and so the next write, wherever it goes: one without a session, a
// page of a scan, and a refusal by what the shard holds.
func TestEveryAnswerTellsItsBarrier(t *testing.T) {
	f := newFake(t, 1)
	v := f.value(f.client())
	bare := func(x string) error {
		_, err := v.client.Batch().Add(v.SetOp("a", x)).WithoutSession().Commit(testContext(t))
		return err
	}
	passed := func(n uint64) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.barrier = n
	}
	next := func() uint64 {
		t.Helper()
		if err := bare("x"); err != nil {
			t.Fatal(err)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.writes[len(f.writes)-1].GetBarrierSeen()
	}
	passed(3)
	if got := next(); got != 0 {
		t.Fatalf("the first write has seen barrier %d", got)
	}
	passed(4)
	if got := next(); got != 3 {
		t.Errorf("after a write without a session: barrier %d, want 3", got)
	}
	f.scan = func(_ int, _ *keelstatepb.ScanRequest, s grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
		return s.Send(&keelstatepb.ScanPage{Token: &keelstatepb.Token{Shard: 1, Barrier: 7}})
	}
	for _, err := range v.Scan(testContext(t), ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := next(); got != 7 {
		t.Errorf("after a scan: barrier %d, want 7", got)
	}
	passed(9)
	f.setScript(once(deed{refuse: base.ErrPrecondition}))
	if err := bare("y"); !errors.Is(err, ErrPrecondition) {
		t.Fatal(err)
	}
	if got := next(); got != 9 {
		t.Errorf("after a refusal: barrier %d, want 9", got)
	}
}
