package keel

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// B77: what no shard can hold is refused before it reaches the stream that all
// reads share.
func TestB77OversizedReadIsRefusedByItself(t *testing.T) {
	f := newFake(t, 1)
	reads := 0
	f.read = func(q *keelstatepb.ReadRequest) ([]*keelstatepb.Answer, error) {
		reads++
		return []*keelstatepb.Answer{{}}, nil
	}
	c := f.client()
	v := f.value(c)
	m, err := DeclareMap(testContext(t), c.Keyspace("k", String.Type()), "m", String, String)
	if err != nil {
		t.Fatal(err)
	}
	ctx, long := testContext(t), strings.Repeat("x", 32<<10+1)
	check := func(field string, err error) {
		t.Helper()
		var e *Error
		if !errors.As(err, &e) || e.Code != base.ErrTooLarge.Reason || e.Field != field || e.Outcome != OutcomeNotApplied {
			t.Errorf("%s: %v", field, err)
		}
	}
	_, _, err = v.Get(ctx, long)
	check("key", err)
	_, _, err = v.In(long+"x").Get(ctx, "a")
	check("namespace", err)
	_, err = m.Get(ctx, "a", long)
	check("user_key", err)
	for _, err = range m.Entries(ctx, long) {
	}
	check("key", err)
	b := c.ReadBatch()
	m.Queue(b, "a", "b")
	m.Queue(b, "a", long)
	err = b.Do(ctx)
	check("user_key", err)
	if e := asError(err); e.Ordinal != 1 {
		t.Errorf("the ordinal is %d", e.Ordinal)
	}
	if reads != 0 {
		t.Errorf("%d reads were sent", reads)
	}
	if _, _, err := v.Get(ctx, strings.Repeat("x", 32<<10)); err != nil {
		t.Errorf("a key below the bound: %v", err)
	}
}

// B77: a stream that another one's request has broken is no failure of the
// reads beside it; one that every attempt breaks is.
func TestB77ReadsSurviveABrokenStream(t *testing.T) {
	for _, broken := range []error{status.Error(codes.ResourceExhausted, "received a message larger than the bound"),
		status.Error(codes.Internal, "unreadable message"), apierr.ToStatus(base.ErrTooLarge).Err(), apierr.ToStatus(base.ErrInvalid).Err()} {
		for _, times := range []int{1, 1000} {
			f := newFake(t, 1)
			v := f.value(f.client())
			n := 0
			f.mu.Lock()
			f.read = func(*keelstatepb.ReadRequest) ([]*keelstatepb.Answer, error) {
				if n++; n <= times && n <= 20 {
					return nil, broken
				}
				return []*keelstatepb.Answer{{}}, nil
			}
			f.mu.Unlock()
			_, _, err := v.Get(testContext(t), "a")
			retryable := readAgain(fromStatus(broken))
			if (err != nil) != (times > 1 && !retryable) {
				t.Errorf("%v, %d times: %v after %d reads", broken, times, err, n)
			}
		}
	}
}

// B77: a batch of reads takes as many requests as it needs, by the number of
// its queries and by what fits in an answer, and each future gets its own.
func TestB77ReadBatchIsSplit(t *testing.T) {
	const n, huge = 2500, 7
	f := newFake(t, 1)
	most, requests := 0, 0
	f.read = func(q *keelstatepb.ReadRequest) ([]*keelstatepb.Answer, error) {
		most = max(most, len(q.Queries))
		requests++
		var out []*keelstatepb.Answer
		for i, q := range q.Queries {
			a := &keelstatepb.Answer{Found: true, Value: q.UserKey}
			if i >= 400 || string(q.UserKey) == fmt.Sprint(huge) { // no more fits, or never
				a = &keelstatepb.Answer{Error: apierr.ToDetail(base.ErrTooLarge)}
			}
			out = append(out, a)
		}
		return out, nil
	}
	c := f.client()
	m, err := DeclareMap(testContext(t), c.Keyspace("k", String.Type()), "m", String, String)
	if err != nil {
		t.Fatal(err)
	}
	b := c.ReadBatch()
	got, errs := make([]string, n), make([]error, n)
	cl := m.cell("a")
	for i := range n {
		q := m.query(&cl, keelstatepb.QueryKind_QUERY_KIND_GET)
		q.UserKey = fmt.Append(nil, i)
		b.add(cl, q, func(a *keelstatepb.Answer, _ Token, err error) {
			if got[i] != "" || errs[i] != nil {
				t.Errorf("query %d is answered twice", i)
			}
			got[i], errs[i] = string(a.GetValue()), err
		})
	}
	err = b.Do(testContext(t))
	if e := asError(err); !errors.Is(err, ErrTooLarge) || e.Ordinal != huge || !errors.Is(errs[huge], ErrTooLarge) {
		t.Errorf("the query that never fits: %v, %v", err, errs[huge])
	}
	for i := range n {
		if i != huge && (errs[i] != nil || got[i] != fmt.Sprint(i)) {
			t.Fatalf("query %d: %q, %v", i, got[i], errs[i])
		}
	}
	if most > 1000 || requests > 20 {
		t.Errorf("%d requests with up to %d queries", requests, most)
	}
}

// A batch of reads of which nothing is asked gives its error to every future: what
// was not read is not absent.
func TestReadBatchThatIsNotAskedFailsEveryQuery(t *testing.T) {
	f := newFake(t, 1)
	asked := 0
	f.read = func(q *keelstatepb.ReadRequest) ([]*keelstatepb.Answer, error) {
		asked++
		return nil, nil
	}
	c := f.client()
	v, err := DeclareValue(testContext(t), c.Keyspace("k", String.Type()), "v", String)
	if err != nil {
		t.Fatal(err)
	}
	for name, second := range map[string]any{"a key of another type": 7, "a caller that is gone": "b"} {
		ctx, cancel := context.WithCancel(testContext(t))
		if second == "b" {
			cancel()
		}
		b := c.ReadBatch()
		futures := []*Future[string]{v.Queue(b, "a"), v.Queue(b, second)}
		if err := b.Do(ctx); err == nil {
			t.Errorf("%s: no error", name)
		}
		for i, f := range futures {
			if _, err := f.Get(); err == nil {
				t.Errorf("%s: query %d looks absent", name, i)
			}
		}
		cancel()
	}
	if asked > 0 {
		t.Errorf("%d requests", asked)
	}
}
