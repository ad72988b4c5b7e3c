package check

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

func TestCounterCases(t *testing.T) {
	add := func(d, at, ret int64) *history.Op { return did("add", "c", ints(d), nil, at, ret) }
	r := func(at, ret int64, v ...int64) *history.Op { return did("read", "c", nil, v, at, ret) }
	handwritten{
		"B81 unknown add seen":    {[]*history.Op{add(1, 1, 2), add(2, 3, 0), r(5, 6, 3)}, Pass},
		"B81 unknown add unseen":  {[]*history.Op{add(1, 1, 2), add(2, 3, 0), r(5, 6, 1)}, Pass},
		"B81 failed add seen":     {[]*history.Op{add(1, 1, 2), failed(add(2, 3, 4)), r(5, 6, 3)}, Fail},
		"B81 acked add lost":      {[]*history.Op{add(1, 1, 2), add(2, 3, 4), r(5, 6, 1)}, Fail},
		"applied twice":           {[]*history.Op{add(1, 1, 2), add(2, 3, 4), r(5, 6, 5)}, Fail},
		"half of an unknown add":  {[]*history.Op{add(1, 1, 2), add(5, 3, 0), r(5, 6, 3)}, Fail},
		"half, too many to try":   {[]*history.Op{add(1, 1, 2), add(5<<30, 3, 0), add(7<<30, 3, 0), r(5, 6, 1+6<<30)}, Fail},
		"seen, then not":          {[]*history.Op{add(1, 1, 2), add(2, 3, 0), r(5, 6, 3), r(7, 8, 1)}, Fail},
		"concurrent":              {[]*history.Op{add(1, 1, 9), r(2, 3, 1), r(4, 5, 1)}, Pass},
		"concurrent, not yet":     {[]*history.Op{add(1, 1, 9), r(2, 3), r(4, 5, 1)}, Pass},
		"before it began":         {[]*history.Op{r(1, 2, 1), add(1, 3, 4)}, Fail},
		"nothing after an add":    {[]*history.Op{add(0, 1, 2), r(3, 4)}, Fail},
		"down and up":             {[]*history.Op{add(5, 1, 2), add(-3, 3, 4), r(5, 6, 2), add(1, 7, 0), r(9, 10, 3)}, Pass},
		"down, lost":              {[]*history.Op{add(5, 1, 2), add(-3, 3, 4), r(5, 6, 5)}, Fail},
		"down, within the bounds": {[]*history.Op{add(5, 1, 9), add(-3, 2, 9), r(3, 4, 2), r(5, 6, 5)}, Fail},
		"another word":            {[]*history.Op{add(1, 1, 2), did("sub", "c", ints(1), nil, 3, 4)}, Unknown},
		"nothing":                 {nil, Unknown},
	}.run(t, Counter{})
}

func counters(r *rand.Rand, procs, n, lossy int) []*history.Op {
	keys := 1 + r.IntN(3)
	down := r.IntN(3) == 0
	state, present := map[string]int64{}, map[string]bool{}
	ps := plan(r, procs, n, lossy, func() *history.Op {
		op := &history.Op{Key: fmt.Sprint("c", r.IntN(keys)), F: "read"}
		if r.IntN(2) == 0 {
			op.F, op.Arg = "add", ints(1+int64(r.IntN(1000)))
			if down && r.IntN(2) == 0 {
				op.Arg[0] *= -1
			}
		}
		return op
	})
	var last []*history.Op
	for k := range keys {
		last = append(last, &history.Op{F: "read", Key: fmt.Sprint("c", k)})
	}
	return apply(ps, func(op *history.Op) {
		if op.F == "add" {
			state[op.Key], present[op.Key] = state[op.Key]+op.Arg[0], true
		} else if op.Result = nil; present[op.Key] {
			op.Result = ints(state[op.Key])
		}
	}, last...)
}

func init() {
	final := func(ops []*history.Op) *history.Op {
		for k := len(ops) - 1; k >= 0; k-- {
			if is("read")(ops[k]) {
				return ops[k]
			}
		}
		return nil
	}
	// shift moves the last read of a counter by what no subset of its unknown
	// adds can make up for.
	shift := func(by func(op *history.Op) int64) func(r *rand.Rand, ops []*history.Op) bool {
		return func(r *rand.Rand, ops []*history.Op) bool {
			read := final(ops)
			add := pick(r, ops, func(op *history.Op) bool { return is("add")(op) && op.Key == read.Key })
			if add == nil {
				return false
			}
			sum, sums := int64(0), map[int64]bool{0: true}
			for _, op := range ops {
				if op.F != "add" || op.Key != read.Key || op.Outcome == history.Fail {
					continue
				}
				if op.Outcome == history.OK {
					sum += op.Arg[0]
					continue
				}
				more := map[int64]bool{}
				for s := range sums {
					more[s], more[s+op.Arg[0]] = true, true
				}
				sums = more
			}
			v := read.Result[0] + by(add)
			if sums[v-sum] {
				return false
			}
			read.Result = ints(v)
			return true
		}
	}
	worlds = append(worlds, world{checker: Counter{}, generate: counters, spoil: map[string]func(*rand.Rand, []*history.Op) bool{
		"an acknowledged add is lost":         shift(func(op *history.Op) int64 { return -op.Arg[0] }),
		"an acknowledged add counts twice":    shift(func(op *history.Op) int64 { return op.Arg[0] }),
		"an acknowledged add is half applied": shift(func(op *history.Op) int64 { return -op.Arg[0] / 2 }),
		"a read goes back": func(r *rand.Rand, ops []*history.Op) bool {
			for range 100 {
				a, b := pick(r, ops, is("read")), pick(r, ops, is("read"))
				if a == nil || a.Key != b.Key || a.Return >= b.Invoke || sumRead(a) == sumRead(b) {
					continue
				}
				// Only adds of one sign between them: then the values cannot
				// change places.
				up, fit := sumRead(b) > sumRead(a), true
				for _, op := range ops {
					if op.F == "add" && op.Key == a.Key && op.Outcome != history.Fail {
						fit = fit && (op.Arg[0] > 0) == up
					}
				}
				if fit {
					a.Result, b.Result = b.Result, a.Result
					return true
				}
			}
			return false
		},
	}})
}

func BenchmarkCounter(b *testing.B) {
	ops := million(1_000_000, 1000, 32)
	sum := map[string]int64{}
	for _, op := range ops { // the values of a run without overlaps
		if op.F == "write" {
			op.F, op.Arg = "add", ints(1)
			if op.Outcome != history.Fail {
				sum[op.Key]++
			}
			if op.Open() {
				op.Outcome, op.Return = history.OK, op.Invoke
			}
		}
	}
	clear(sum)
	at := int64(0)
	for _, op := range ops {
		if op.Outcome == history.Unknown {
			op.Return, op.Outcome = 0, history.Fail
		}
		at += 10
		op.Invoke, op.Return = at, at+5
		if op.F == "add" && op.Outcome == history.OK {
			sum[op.Key]++
		} else if op.F == "read" {
			if op.Result = nil; sum[op.Key] > 0 {
				op.Result = ints(sum[op.Key])
			}
		}
	}
	b.ResetTimer()
	for b.Loop() {
		if res := (Counter{}).Check(ops, Options{}); res.Verdict != Pass {
			b.Fatal(res.Text)
		}
	}
	b.ReportMetric(float64(b.N)*float64(len(ops))/b.Elapsed().Seconds(), "ops/s")
}
