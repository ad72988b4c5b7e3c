package sim

import (
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
)

// SM8: a rewound history has what must be in a checkpoint, may have what was under way,
// and has nothing of what came later; so each other content is found.
func TestRewoundHistoriesJudgeTheCheckpoint(t *testing.T) {
	op := func(process, invoke, end int64, f string, arg ...int64) history.Op {
		return history.Op{Process: process, Workload: "register", F: f, Key: "a", Arg: arg, Invoke: invoke, Return: end, Outcome: history.OK}
	}
	seen := func(process, invoke, end, v int64) history.Op {
		o := op(process, invoke, end, "read")
		o.Result = []int64{v}
		return o
	}
	open := op(5, 12, history.Never, "write", 8)
	open.Outcome = history.Unknown
	ops := []history.Op{op(1, 1, 2, "write", 1), op(1, 3, 4, "write", 2), seen(2, 5, 6, 2),
		// The checkpoint is asked for at 10, and has completed at 20.
		op(1, 9, 11, "write", 3), seen(2, 12, 13, 3), open, op(1, 18, 25, "write", 4),
		op(1, 30, 31, "write", 5), seen(2, 32, 33, 5)}
	for _, c := range []struct {
		name string
		has  []int64
		want check.Verdict
	}{
		{"what was acknowledged before", []int64{2}, check.Pass},
		{"what was under way when it was asked for", []int64{3}, check.Pass},
		{"what was under way when it completed", []int64{4}, check.Pass},
		{"what nobody was told the outcome of", []int64{8}, check.Pass},
		{"an older value", []int64{1}, check.Fail},
		{"nothing", nil, check.Fail},
		{"a later write", []int64{5}, check.Fail},
	} {
		after := op(1, 100, 101, "read")
		after.Result = c.has
		h := rewind(ops, window{asked: 10, done: 20}, []history.Op{after})
		got := check.Judge(h, check.Options{Limit: 10 * time.Second})
		if len(got) != 1 || got[0].Verdict != c.want {
			t.Errorf("%s: %+v of %v", c.name, got, h.Ops)
		}
	}
	if ops[3].Outcome != history.OK || ops[3].Process != 1 {
		t.Error("the history itself was changed")
	}
}

// A bank that was opened too late is none; one that must be there is missed.
func TestRewoundBanks(t *testing.T) {
	bank := func(invoke int64, f string, result ...int64) history.Op {
		o := history.Op{Process: invoke, Workload: "bank", F: f, Key: "b", Result: result, Invoke: invoke, Return: invoke + 1, Outcome: history.OK}
		if f == "open" {
			o.Arg = []int64{2, 100}
		}
		return o
	}
	ops := []history.Op{bank(1, "open"), bank(3, "read", 0, 100, 100)}
	for _, c := range []struct {
		name   string
		window window
		after  []int64
		want   check.Verdict
	}{
		{"it is there", window{10, 20}, []int64{0, 100, 100}, check.Pass},
		{"it is missed", window{10, 20}, nil, check.Fail},
		{"half of it", window{10, 20}, []int64{0, 100}, check.Fail},
		{"it may be there, and is", window{1, 20}, []int64{0, 100, 100}, check.Pass},
		{"it must not be there, and is", window{0, 0}, []int64{0, 100, 100}, check.Unknown}, // "was never opened"
	} {
		h := rewind(ops, c.window, []history.Op{bank(100, "read", c.after...)})
		got := check.Judge(h, check.Options{Limit: 10 * time.Second})
		if len(got) != 1 || got[0].Verdict != c.want {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
	for _, at := range []window{{1, 20}, {0, 0}} { // it may be missing, or must be
		if h := rewind(ops, at, []history.Op{bank(100, "read")}); len(h.Ops) != 0 {
			t.Errorf("a bank that is not there: %v", h.Ops)
		}
	}
}

// SM9: readings are compared down to the last element, and what only one has counts.
func TestContentsDiffer(t *testing.T) {
	of := func(key string, result ...int64) history.Op {
		return history.Op{Workload: "list", F: "read", Key: key, Result: result, Outcome: history.OK}
	}
	base := contentsOf([]history.Op{of("a", 1, 2), of("b")})
	for _, c := range []struct {
		name string
		ops  []history.Op
		same bool
	}{
		{"equal", []history.Op{of("a", 1, 2), of("b")}, true},
		{"an empty key more", []history.Op{of("a", 1, 2), of("b"), of("c")}, true},
		{"an empty key less", []history.Op{of("a", 1, 2)}, true},
		{"an element less", []history.Op{of("a", 1), of("b")}, false},
		{"an element more", []history.Op{of("a", 1, 2, 3), of("b")}, false},
		{"a key more", []history.Op{of("a", 1, 2), of("b"), of("c", 1)}, false},
		{"a key less", []history.Op{of("b")}, false},
	} {
		if diff := contentsOf(c.ops).differs(base); (diff == "") != c.same {
			t.Errorf("%s: %q", c.name, diff)
		}
	}
}

// TestShortErasProveNothing: an era in which a workload came to nothing is no failure, if
// another era shows something of it.
func TestShortErasProveNothing(t *testing.T) {
	op := func(o history.Outcome, f string) history.Op {
		return history.Op{ID: 1, Process: 1, Workload: "register", F: f, Key: "a", Invoke: 1, Return: 2, Outcome: o}
	}
	unknown := op(history.Unknown, "write")
	unknown.Arg, unknown.Return = []int64{1}, history.Never
	short := &history.History{Ops: []history.Op{unknown}, Complete: true}
	long := &history.History{Ops: []history.Op{op(history.OK, "read")}, Complete: true}
	for _, c := range []struct {
		name string
		of   []judged
		want check.Verdict
	}{
		{"a short era before a long one", []judged{{"", short, true}, {"era 0", long, true}}, check.Pass},
		{"behind it", []judged{{"era 0", long, true}, {"", short, true}}, check.Pass},
		{"nothing but short ones", []judged{{"", short, true}, {"era 0", short, true}}, check.Unknown},
		{"nothing but short ones that were ended", []judged{{"era 0", short, false}}, check.Unknown},
	} {
		r := &Report{histories: c.of}
		r.judge()
		if got := r.Verdict(); got != c.want {
			t.Errorf("%s: %v, want %v: %+v", c.name, got, c.want, r.Results)
		}
	}
}
