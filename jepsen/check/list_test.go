package check

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

// many builds an operation on lists a and b.
func many(f string, at, ret int64, a, b []int64) *history.Op {
	op := did(f, "", nil, nil, at, ret)
	op.Parts = []history.Part{{Key: "a"}, {Key: "b"}}
	if f == "append" {
		op.Parts[0].Arg, op.Parts[1].Arg = a, b
	} else {
		op.Parts[0].Result, op.Parts[1].Result = a, b
	}
	return op
}

func TestListCases(t *testing.T) {
	add := func(at, ret int64, v ...int64) *history.Op { return did("append", "a", v, nil, at, ret) }
	r := func(at, ret int64, v ...int64) *history.Op { return did("read", "a", nil, v, at, ret) }
	rb := func(at, ret int64, v ...int64) *history.Op { return did("read", "b", nil, v, at, ret) }
	handwritten{
		"B81 unknown append seen":   {[]*history.Op{add(1, 2, 1), add(3, 0, 2), r(5, 6, 1, 2)}, Pass},
		"B81 unknown append unseen": {[]*history.Op{add(1, 2, 1), add(3, 0, 2), r(5, 6, 1)}, Pass},
		"B81 failed append seen":    {[]*history.Op{add(1, 2, 1), failed(add(3, 4, 2)), r(5, 6, 1, 2)}, Fail},
		"B81 acked append lost":     {[]*history.Op{add(1, 2, 1), add(3, 4, 2), r(5, 6, 1)}, Fail},
		"lost, nobody read since":   {[]*history.Op{add(1, 2, 1), r(3, 4, 1), add(5, 6, 2)}, Pass},
		"twice":                     {[]*history.Op{add(1, 2, 1), add(3, 4, 2), r(5, 6, 1, 2, 1)}, Fail},
		"never appended":            {[]*history.Op{add(1, 2, 1), r(5, 6, 1, 9)}, Fail},
		"before it began":           {[]*history.Op{r(1, 2, 1), add(3, 4, 1)}, Fail},
		"concurrent, either order":  {[]*history.Op{add(1, 9, 1), add(1, 9, 2), r(10, 11, 2, 1)}, Pass},
		"two orders":                {[]*history.Op{add(1, 9, 1), add(1, 9, 2), r(10, 11, 2, 1), r(12, 13, 1, 2)}, Fail},
		"against real time":         {[]*history.Op{add(1, 2, 1), add(3, 4, 2), r(10, 11, 2, 1)}, Fail},
		"a read goes back":          {[]*history.Op{add(1, 20, 1), r(2, 3, 1), r(4, 5)}, Fail},
		"stale though longer later": {[]*history.Op{add(1, 2, 1), r(3, 4), r(5, 6, 1)}, Fail},
		"elements stay together":    {[]*history.Op{add(1, 9, 1, 2), add(1, 9, 3), r(10, 11, 3, 1, 2)}, Pass},
		"elements are parted":       {[]*history.Op{add(1, 9, 1, 2), add(1, 9, 3), r(10, 11, 1, 3, 2)}, Fail},
		"a part is seen":            {[]*history.Op{add(1, 9, 1, 2), r(2, 3, 1), r(10, 11, 1, 2)}, Fail},
		"a part is lost":            {[]*history.Op{add(1, 0, 1, 2), r(2, 3, 1)}, Fail},
		"two lists at once":         {[]*history.Op{many("append", 1, 2, ints(1), ints(1)), many("read", 3, 4, ints(1), ints(1))}, Pass},
		"a torn read": {[]*history.Op{many("append", 1, 9, ints(1), ints(1)), many("append", 1, 9, ints(2), ints(2)),
			many("read", 3, 4, ints(1), ints(1, 2)), many("read", 10, 11, ints(1, 2), ints(1, 2))}, Fail},
		"half of an append seen":        {[]*history.Op{many("append", 1, 9, ints(1), ints(1)), r(2, 3, 1), rb(4, 5)}, Fail},
		"half of an unknown one":        {[]*history.Op{many("append", 1, 0, ints(1), ints(1)), r(2, 3, 1), rb(4, 5)}, Fail},
		"two lists, orders cross":       {[]*history.Op{many("append", 1, 9, ints(1), ints(1)), many("append", 1, 9, ints(2), ints(2)), many("read", 10, 11, ints(1, 2), ints(2, 1))}, Fail},
		"two readers disagree (write)":  {[]*history.Op{add(1, 20, 1), did("append", "b", ints(1), nil, 1, 20), many("read", 2, 9, ints(1), nil), many("read", 2, 9, nil, ints(1))}, Fail},
		"two readers, one after other":  {[]*history.Op{add(1, 20, 1), did("append", "b", ints(1), nil, 1, 20), many("read", 2, 9, ints(1), nil), many("read", 2, 9, ints(1), ints(1))}, Pass},
		"the workload repeats itself":   {[]*history.Op{add(1, 2, 1), add(3, 4, 1)}, Unknown},
		"another word":                  {[]*history.Op{add(1, 2, 1), did("pop", "a", nil, nil, 3, 4)}, Unknown},
		"an unknown read says nothing":  {[]*history.Op{add(1, 2, 1), r(3, 0)}, Unknown},
		"an empty list is a good list":  {[]*history.Op{r(1, 2), add(3, 4, 1)}, Pass},
		"failed, and its number unused": {[]*history.Op{failed(add(1, 2, 1)), add(3, 4, 2), r(5, 6, 2)}, Pass},
	}.run(t, List{})
}

func TestListTellsTheCycle(t *testing.T) {
	ops := number([]*history.Op{did("append", "a", ints(1), nil, 1, 20), did("append", "b", ints(1), nil, 1, 20),
		many("read", 2, 9, ints(1), nil), many("read", 2, 9, nil, ints(1))})
	res := List{}.Check(ops, Options{})
	for _, want := range []string{"contradict", "G2", "is seen by", "did not see"} {
		if !strings.Contains(res.Details[0].Text, want) {
			t.Errorf("no %q in: %s", want, res.Details[0].Text)
		}
	}
	ids := slices.Clone(res.Details[0].Ops)
	slices.Sort(ids)
	if !slices.Equal(ids, ints(1, 2, 3, 4)) {
		t.Errorf("operations %v", ids)
	}
}

// Cycles are named by their steps.
func TestAnomaly(t *testing.T) {
	for want, steps := range map[string][]edgeKind{
		"G0":                {edgeWW, edgeWW},
		"G1c":               {edgeWW, edgeWR},
		"G-single":          {edgeRW, edgeWR, edgeWW, edgeLink},
		"G-single-realtime": {edgeRW, edgeTime, edgeLink},
		"G2":                {edgeRW, edgeRW},
	} {
		var cycle []edge
		for _, k := range steps {
			cycle = append(cycle, edge{kind: k})
		}
		if got := anomaly(cycle); got != want {
			t.Errorf("%v: %s, want %s", steps, got, want)
		}
	}
}

func appends(r *rand.Rand, procs, n, lossy int) []*history.Op {
	keys := 1 + r.IntN(3)
	next := int64(0)
	state := map[string][]int64{}
	name := func(k int) string { return fmt.Sprint("l", k) }
	values := func() []int64 {
		var v []int64
		for range 1 + r.IntN(2)*r.IntN(3) {
			next++
			v = append(v, next)
		}
		return v
	}
	ps := plan(r, procs, n, lossy, func() *history.Op {
		op := &history.Op{F: []string{"read", "append"}[r.IntN(2)]}
		if r.IntN(3) == 0 {
			for k := range keys {
				p := history.Part{Key: name(k)}
				if op.F == "append" {
					p.Arg = values()
				}
				op.Parts = append(op.Parts, p)
			}
			return op
		}
		if op.Key = name(r.IntN(keys)); op.F == "append" {
			op.Arg = values()
		}
		return op
	})
	var last []*history.Op
	for k := range keys {
		last = append(last, &history.Op{F: "read", Key: name(k)})
	}
	return apply(ps, func(op *history.Op) {
		do := func(key string, arg []int64) (result []int64) {
			if op.F == "append" {
				state[key] = append(state[key], arg...)
				return nil
			}
			return slices.Clone(state[key])
		}
		if op.Parts == nil {
			op.Result = do(op.Key, op.Arg)
		}
		for k := range op.Parts {
			op.Parts[k].Result = do(op.Parts[k].Key, op.Parts[k].Arg)
		}
	}, last...)
}

func init() {
	long := func(op *history.Op) bool { return is("read")(op) && op.Parts == nil && len(op.Result) > 1 }
	// dropped takes the elements of one acknowledged append out of all reads
	// from its end on.
	worlds = append(worlds, world{checker: List{}, generate: appends, spoil: map[string]func(*rand.Rand, []*history.Op) bool{
		"an acknowledged append is lost": func(r *rand.Rand, ops []*history.Op) bool {
			a := pick(r, ops, func(op *history.Op) bool { return is("append")(op) && op.Parts == nil })
			if a == nil {
				return false
			}
			gone := func(v int64) bool { return slices.Contains(a.Arg, v) }
			for _, op := range ops {
				op.Result = slices.DeleteFunc(op.Result, gone)
				for k := range op.Parts {
					op.Parts[k].Result = slices.DeleteFunc(op.Parts[k].Result, gone)
				}
			}
			return true
		},
		"an element comes twice": func(r *rand.Rand, ops []*history.Op) bool {
			op := pick(r, ops, long)
			if op == nil {
				return false
			}
			op.Result = append(op.Result, op.Result[r.IntN(len(op.Result))])
			return true
		},
		"two elements change places in one read": func(r *rand.Rand, ops []*history.Op) bool {
			op := pick(r, ops, long)
			if op == nil {
				return false
			}
			n := len(op.Result)
			op.Result[n-1], op.Result[n-2] = op.Result[n-2], op.Result[n-1]
			// Somebody must have seen it otherwise: the last read has.
			last := ops[len(ops)-1]
			return last != op && pick(r, ops, func(x *history.Op) bool {
				return x != op && long(x) && x.Key == op.Key && len(x.Result) >= n
			}) != nil
		},
		"a stale read": func(r *rand.Rand, ops []*history.Op) bool {
			for range 50 {
				a, b := pick(r, ops, long), pick(r, ops, long)
				if a != nil && a.Key == b.Key && a.Return < b.Invoke {
					b.Result = b.Result[:len(a.Result)-1]
					return true
				}
			}
			return false
		},
		"a torn read of two lists": func(r *rand.Rand, ops []*history.Op) bool {
			// It misses on its last list what was acknowledged before it.
			for range 50 {
				op := pick(r, ops, func(op *history.Op) bool { return is("read")(op) && len(op.Parts) > 1 })
				if op == nil {
					return false
				}
				p := &op.Parts[len(op.Parts)-1]
				for _, a := range ops {
					if is("append")(a) && a.Return < op.Invoke && len(a.Parts) == len(op.Parts) {
						at := slices.Index(p.Result, a.Parts[len(a.Parts)-1].Arg[0])
						p.Result = p.Result[:at]
						return true
					}
				}
			}
			return false
		},
		"a failed append is seen": func(r *rand.Rand, ops []*history.Op) bool {
			a := pick(r, ops, func(op *history.Op) bool { return op.F == "append" && op.Outcome == history.Fail && op.Parts == nil })
			if a == nil {
				return false
			}
			for _, op := range ops {
				if is("read")(op) && op.Parts == nil && op.Key == a.Key {
					op.Result = append(op.Result, a.Arg...)
				}
			}
			return true
		},
	}})
}

func BenchmarkList(b *testing.B) {
	ops := million(1_000_000, 20000, 32)
	state := map[string][]int64{}
	at := int64(0)
	for _, op := range ops {
		if op.Outcome != history.OK {
			op.Outcome, op.Return = history.Fail, op.Invoke
		}
		at += 10
		op.Invoke, op.Return = at, at+5
		if op.F == "write" {
			op.F = "append"
			if op.Outcome == history.OK {
				state[op.Key] = append(state[op.Key], op.Arg[0])
			}
		} else if op.Result = nil; op.Outcome == history.OK {
			s := state[op.Key]
			op.Result = s[:len(s):len(s)]
		}
	}
	b.ResetTimer()
	for b.Loop() {
		if res := (List{}).Check(ops, Options{}); res.Verdict != Pass {
			b.Fatal(res.Text)
		}
	}
	b.ReportMetric(float64(b.N)*float64(len(ops))/b.Elapsed().Seconds(), "ops/s")
}
