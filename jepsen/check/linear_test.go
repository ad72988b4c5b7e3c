package check

import (
	"slices"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Cutting changes no verdict, and cuts where it may.
func TestCut(t *testing.T) {
	var ops []*history.Op
	for k := range int64(200) {
		at := 100 * k
		ops = append(ops, did("write", "k", ints(2*k+1), nil, at, at+10), did("write", "k", ints(2*k+2), nil, at+5, at+15),
			did("read", "k", nil, ints(2*k+2), at+20, at+30))
	}
	number(ops)
	j := &judge{}
	m := registerModel()
	segments := m.cut("k", j.registerEvents(ops))
	if len(segments) < 15 || len(segments) > 600/minSegment+1 {
		t.Errorf("%d segments", len(segments))
	}
	n := 0
	for k, s := range segments {
		n += len(s.events)
		if k > 0 {
			last := segments[k-1].events[len(segments[k-1].events)-1]
			if want := (register{present: true, v: last.op.Result[0]}); s.init != want {
				t.Errorf("segment %d begins with %v, want %v", k, s.init, want)
			}
		}
	}
	if n != len(ops) {
		t.Errorf("%d operations in all segments", n)
	}
	// What is open from before keeps everything together.
	open := append(slices.Clone(ops), did("write", "k", ints(9999), nil, 1, 0), did("read", "k", nil, ints(9999), 90000, 90001))
	if got := len(m.cut("k", j.registerEvents(number(open)))); got != 1 {
		t.Errorf("%d segments around an open write that was seen late", got)
	}
	open[len(open)-1].Result = ints(400)
	if res := (Register{}).Check(open, Options{}); res.Verdict != Pass {
		t.Errorf("%v %s", res.Verdict, res.Text)
	}
	ops[300].Result, ops[301].Arg = nil, ints(5) // a value twice: nothing is pruned
	if res := (Register{}).Check(ops, Options{}); res.Verdict != Fail {
		t.Errorf("%v %s", res.Verdict, res.Text)
	}
}

// What a search cannot hold is not tried.
func TestTooMuchForASearch(t *testing.T) {
	var ops []*history.Op
	for k := range int64(maxPart + 1) { // each overlaps the next
		ops = append(ops, did("write", "k", ints(k), nil, 10*k+1, 10*k+15))
	}
	if res := (Register{}).Check(number(ops), Options{}); res.Verdict != Unknown {
		t.Errorf("%v %s", res.Verdict, res.Text)
	}
}

// The bounds of a graph are those of what must come before and after.
func TestBounds(t *testing.T) {
	ops := number([]*history.Op{
		did("put", "m", ints(1, 1), nil, 1, 100), // seen by the third: before 30
		did("put", "m", ints(1, 2), nil, 5, 100), // not seen by the fourth: from there on
		did("get", "m", ints(1), ints(1), 20, 30),
		did("get", "m", ints(1), ints(1), 40, 50),
	})
	g := newGraph(ops)
	g.add(0, 2, edgeWR)
	g.add(3, 1, edgeRW)
	if c := g.cycles(1); len(c) != 0 {
		t.Fatalf("a cycle: %v", c)
	}
	from, to := g.bounds()
	if !slices.Equal(from[:4], ints(1, 40, 20, 40)) || !slices.Equal(to[:4], ints(30, 100, 30, 50)) {
		t.Errorf("from %v to %v", from[:4], to[:4])
	}
}
