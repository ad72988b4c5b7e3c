package keel

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
