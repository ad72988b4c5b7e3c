package raftfsm_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

func wantErr(t testing.TB, r raftfsm.Result, want error) {
	t.Helper()
	if want == nil {
		if r.Err != nil {
			t.Fatalf("refused: %v", r.Err)
		}
		return
	}
	if !errors.Is(r.Failure(), want) {
		t.Fatalf("got %v, want %v", r.Failure(), want)
	}
}

// B10, B12: whatever the reason of the retry, the effect happens once and the
// answer is the first one, also after restarts and when both are in one entry.
func TestRetryGetsTheFirstResult(t *testing.T) {
	putIfAbsent := func() *raftfsm.Request {
		q := inSession(1, 1, put("p", "7"))
		q.Preconditions = []state.Precondition{{State: valueID, Kind: state.PreAbsent, Group: groupOf("p"), Key: []byte("p")}}
		return q
	}
	refused := func() *raftfsm.Request {
		q := putIfAbsent()
		q.Preconditions[0].Kind = state.PrePresent
		return q
	}
	cases := map[string]func() *raftfsm.Request{
		"put if absent":        putIfAbsent,
		"refused precondition": refused,
		"add":                  func() *raftfsm.Request { return inSession(1, 1, add(sumID, "s", i64(1))) },
		"append":               func() *raftfsm.Request { return inSession(1, 1, listAdd("l", "x")) },
		"batch":                func() *raftfsm.Request { return inSession(1, 1, add(sumID, "s", i64(1)), listAdd("l", "x")) },
		"undeclared": func() *raftfsm.Request {
			q := inSession(1, 1, put("p", "1"))
			q.Mutations[0].State = 77
			return q
		},
		"no mutations": func() *raftfsm.Request { return inSession(1, 1) },
	}
	for name, build := range cases {
		t.Run(name, func(t *testing.T) {
			r := newReplica(t, raftfsm.Options{})
			// The retry is in the same entry, in the next, and after restarts.
			o := r.command(r.encode(build(), build()))
			first := o.Results[0]
			again := []raftfsm.Result{o.Results[1], r.write(build())}
			for _, flush := range []bool{false, true, false} {
				r.restart(flush)
				again = append(again, r.write(build()))
			}
			for i, got := range again {
				if !got.Replayed {
					t.Errorf("retry %d was executed", i)
				}
				got.Replayed = false
				if !reflect.DeepEqual(got, first) {
					t.Errorf("retry %d got %+v, first %+v", i, got, first)
				}
			}
			if s := r.sum("s"); s > 1 {
				t.Errorf("sum is %d", s)
			}
			if l := r.list("l"); len(l) > 1 {
				t.Errorf("list is %q", l)
			}
		})
	}
}

func TestWithoutASessionNothingIsDeduplicated(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := request(add(sumID, "s", i64(1)))
	q.Seq, q.Prev = 0, 0
	r.write(q)
	r.write(q)
	if s := r.sum("s"); s != 2 {
		t.Errorf("sum is %d", s)
	}
	if r.m.Header().Sessions != 0 {
		t.Error("a session was made")
	}
}

func TestPipelineNeverOvertakesItself(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	three := inSession(1, 3, listAdd("l", "3"))
	two := inSession(1, 2, listAdd("l", "2"))
	wantErr(t, r.write(two), base.ErrSessionOrder) // also as the first of a session
	if r.m.Header().Sessions != 0 {
		t.Error("a refused request made a session")
	}
	r.ok(r.command(r.encode(inSession(1, 1, listAdd("l", "1")))))
	wantErr(t, r.write(three), base.ErrSessionOrder)
	r.ok(r.command(r.encode(two)))
	r.ok(r.command(r.encode(three))) // the refusal was not recorded
	if l := r.list("l"); !slices.Equal(l, []string{"1", "2", "3"}) {
		t.Errorf("list is %q", l)
	}
}

func TestNumbersWithoutARecordAreNeverExecuted(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	at := func(seq, prev, floor uint64) *raftfsm.Request {
		q := inSession(1, seq, add(sumID, "s", i64(1)))
		q.Prev, q.Floor = prev, floor
		return q
	}
	wantErr(t, r.write(at(1, 0, 1)), nil)
	wantErr(t, r.write(at(5, 1, 1)), nil)
	wantErr(t, r.write(at(3, 1, 1)), base.ErrSessionForgot) // at or below last
	wantErr(t, r.write(at(9, 5, 5)), nil)                   // raises the floor over 1
	wantErr(t, r.write(at(1, 0, 1)), base.ErrSessionForgot)
	wantErr(t, r.write(at(5, 1, 1)), nil) // its record is at the floor
	wantErr(t, r.write(at(10, 9, 20)), base.ErrSessionForgot)
	wantErr(t, r.write(at(11, 9, 1)), base.ErrSessionForgot) // the floor stays at 20
	r.restart(false)
	wantErr(t, r.write(at(12, 9, 1)), base.ErrSessionForgot)
	wantErr(t, r.write(at(20, 9, 1)), nil)
	if s := r.sum("s"); s != 4 {
		t.Errorf("sum is %d", s)
	}
	q := at(2, 0, 3)
	q.Session = 2
	wantErr(t, r.write(q), base.ErrSessionForgot) // unknown session, below its own floor
}

func TestReCutRequestExecutesOnlyNewOrdinals(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	whole := inSession(1, 1, add(sumID, "s", i64(1)), add(sumID, "s", i64(10)), add(sumID, "s", i64(100)), add(sumID, "s", i64(1000)))
	cut := func(lo, hi int) *raftfsm.Request {
		q := *whole
		q.Mutations = whole.Mutations[lo:hi]
		return &q
	}
	first := r.write(cut(1, 3))
	if r.sum("s") != 110 || first.Replayed {
		t.Fatalf("sum is %d", r.sum("s"))
	}
	// A part of what was covered gets the first result.
	if got := r.write(cut(2, 3)); !got.Replayed || got.Token != first.Token {
		t.Errorf("got %+v, first %+v", got, first)
	}
	all := r.write(whole)
	if r.sum("s") != 1111 || all.Replayed || all.Err != nil {
		t.Fatalf("sum is %d, %+v", r.sum("s"), all)
	}
	want := []raftfsm.Part{
		{Ordinals: []raftfsm.OrdinalRange{{Lo: 1, Hi: 3}}, First: 1, Sequence: 2, Replayed: true},
		{Ordinals: []raftfsm.OrdinalRange{{Lo: 0, Hi: 1}, {Lo: 3, Hi: 4}}, First: 3, Sequence: 4},
	}
	if !reflect.DeepEqual(all.Parts, want) {
		t.Errorf("parts %+v, want %+v", all.Parts, want)
	}
	r.restart(true)
	again := r.write(whole)
	want[1].Replayed = true
	if !again.Replayed || !reflect.DeepEqual(again.Parts, want) || again.Token != all.Token {
		t.Errorf("replayed %+v, want parts %+v", again, want)
	}
	if r.sum("s") != 1111 {
		t.Errorf("sum is %d", r.sum("s"))
	}
}

func TestReCutRequestReportsTheEarlierRefusal(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := inSession(1, 1, put("a", "1"), put("b", "1"))
	q.Mutations[0].State = 77
	bad := *q
	bad.Mutations = q.Mutations[:1]
	wantErr(t, r.write(&bad), base.ErrUndeclared)
	got := r.write(q)
	wantErr(t, got, base.ErrUndeclared)
	if len(got.Parts) != 2 || got.Parts[0].Err == nil || !got.Parts[0].Replayed || got.Parts[1].Replayed {
		t.Errorf("got %+v", got.Parts)
	}
}

func TestAtomicRequestsAreNeverReCut(t *testing.T) {
	for name, mark := range map[string]func(*raftfsm.Request){
		"atomic": func(q *raftfsm.Request) { q.Atomic = true },
		"precondition": func(q *raftfsm.Request) {
			q.Preconditions = []state.Precondition{{State: valueID, Kind: state.PreAbsent, Group: groupOf("z"), Key: []byte("z")}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReplica(t, raftfsm.Options{})
			q := inSession(1, 1, add(sumID, "s", i64(1)), add(sumID, "s", i64(10)))
			mark(q)
			half := *q
			half.Mutations = q.Mutations[:1]
			wantErr(t, r.write(&half), nil)
			got := r.write(q)
			wantErr(t, got, base.ErrConflict)
			if got.Err.Ordinal != 1 || r.sum("s") != 1 {
				t.Errorf("ordinal %d, sum %d", got.Err.Ordinal, r.sum("s"))
			}
			wantErr(t, r.write(&half), nil) // the record is as it was
		})
	}
}

func TestWindowBoundsOpenRequests(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	var qs []*raftfsm.Request
	for seq := uint64(1); seq <= raftfsm.SessionWindow; seq++ {
		q := inSession(1, seq, add(sumID, "s", i64(1)))
		q.Floor = 1
		qs = append(qs, q)
	}
	r.ok(r.command(r.encode(qs...)))
	next := inSession(1, raftfsm.SessionWindow+1, add(sumID, "s", i64(1)))
	next.Floor = 1
	wantErr(t, r.write(next), base.ErrSessionWindow)
	if got := r.write(qs[0]); !got.Replayed {
		t.Error("a full window must still answer")
	}
	r.restart(true)
	wantErr(t, r.write(next), base.ErrSessionWindow)
	next.Floor = 2
	wantErr(t, r.write(next), nil) // the refusal was not recorded
	if s := r.sum("s"); s != raftfsm.SessionWindow+1 {
		t.Errorf("sum is %d", s)
	}
}

func TestRecordsAreBoundedInBytes(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	var last raftfsm.Result
	n := uint64(0)
	for last.Err == nil && n < raftfsm.SessionWindow {
		n++
		q := inSession(1, n)
		q.Floor = 1
		for i := range 4000 { // gaps, so that ordinals take space
			q.Mutations = append(q.Mutations, raftfsm.Mutation{Ordinal: uint32(i << 20), Mutation: add(countID, "c", []byte("12345678"))})
		}
		for i := range q.Mutations {
			q.Mutations[i].Elements = [][]byte{i64(1)}
		}
		last = r.write(q)
	}
	wantErr(t, last, base.ErrSessionWindow)
	if n*4000*4 < raftfsm.SessionBytes/2 || n*4000*4 > raftfsm.SessionBytes*2 {
		t.Errorf("full after %d requests", n)
	}
}

func TestForgottenSessionIsNotReopenedByAStaleLeader(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	r.rev = 10
	q := inSession(1, 1, add(sumID, "s", i64(1)))
	wantErr(t, r.write(q), nil)
	r.ok(r.command(raftfsm.AppendForget(nil, 20, []base.SessionID{1, 2})))
	if r.m.Header().Sessions != 0 {
		t.Error("the session is still there")
	}
	// A leader at revision 10 does not know that it ended.
	wantErr(t, r.write(q), base.ErrSessionStale)
	r.restart(true)
	wantErr(t, r.write(q), base.ErrSessionStale)
	// An older Forget does not lower the revision.
	r.ok(r.command(raftfsm.AppendForget(nil, 15, nil)))
	r.rev = 19
	wantErr(t, r.write(q), base.ErrSessionStale)
	// Sessions that the shard knows are not asked for the revision.
	r.rev = 20
	fresh := inSession(3, 1, add(sumID, "s", i64(1)))
	wantErr(t, r.write(fresh), nil)
	r.rev = 1
	fresh = inSession(3, 2, add(sumID, "s", i64(1)))
	wantErr(t, r.write(fresh), nil)
	if s := r.sum("s"); s != 3 {
		t.Errorf("sum is %d", s)
	}
}

func TestSessionForgottenAndBroughtBackInOneBatch(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := inSession(1, 1, add(sumID, "s", i64(1)))
	r.rev = 20
	entries := []raftfsm.Entry{
		r.entry(r.encode(q)), r.entry(raftfsm.AppendForget(nil, 20, []base.SessionID{1})), r.entry(r.encode(q)),
	}
	r.m.ApplyBatch(entries)
	r.restart(true)
	if got := r.write(q); !got.Replayed || r.m.Header().Sessions != 1 || r.sum("s") != 2 {
		t.Errorf("%+v, %d sessions, sum %d", got, r.m.Header().Sessions, r.sum("s"))
	}
}

func TestRefusalsByOfficeAreNotRecorded(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := inSession(1, 1, add(sumID, "s", i64(1)))
	q.Epoch = 2
	wantErr(t, r.write(q), base.ErrStaleEpoch)
	q.Epoch, q.Incarnation = 1, 2
	wantErr(t, r.write(q), base.ErrIncarnation)
	q.Incarnation = 1
	q.Mutations[0].Group = groups
	wantErr(t, r.write(q), base.ErrWrongRange)
	q.Mutations[0].Group = groupOf("s")
	got := r.write(q)
	wantErr(t, got, nil)
	if got.Replayed || r.sum("s") != 1 {
		t.Errorf("%+v, sum %d", got, r.sum("s"))
	}
}

func TestRecordedTextsAreBounded(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	q := inSession(1, 1, put("a", "1"))
	q.Mutations[0].Key = []byte(strings.Repeat("x", state.MaxKeyBytes+1))
	got := r.write(q)
	wantErr(t, got, base.ErrTooLarge)
	if len(got.Err.Field) > 256 || len(got.Err.Hint) > 512 || !strings.HasPrefix(got.Err.Field, "mutations[0].") {
		t.Errorf("field %q hint %q", got.Err.Field, got.Err.Hint)
	}
}

// B10: the pipeline of several clients with retries, duplicates and losses gives
// every number exactly once.
func TestClientsWithRetriesAppendEachNumberOnce(t *testing.T) {
	r := newReplica(t, raftfsm.Options{})
	var want []string
	for seq := uint64(1); seq <= 50; seq++ {
		var qs []*raftfsm.Request
		for c := base.SessionID(1); c <= 5; c++ {
			e := fmt.Sprintf("%d-%d", c, seq)
			want = append(want, e)
			q := inSession(c, seq, listAdd("l", e))
			q.Floor = seq
			qs = append(qs, q, q)
		}
		r.command(r.encode(qs...))
		if seq%10 == 0 {
			r.restart(seq%20 == 0)
		}
		r.command(r.encode(qs...))
	}
	got := r.list("l")
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%d elements, want %d", len(got), len(want))
	}
}
