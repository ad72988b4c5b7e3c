package check

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/history"
)

// did builds operations of hand-written histories: name, times, outcome.
func did(f, key string, arg, result []int64, invoke, ret int64) *history.Op {
	op := &history.Op{F: f, Key: key, Arg: arg, Result: result, Invoke: invoke, Return: ret, Outcome: history.OK}
	if ret == 0 {
		op.Return, op.Outcome = history.Never, history.Unknown
	}
	return op
}

func failed(op *history.Op) *history.Op {
	op.Outcome, op.Result = history.Fail, nil
	return op
}

func ints(v ...int64) []int64 { return v }

// number gives each operation an id and a process.
func number(ops []*history.Op) []*history.Op {
	for k, op := range ops {
		op.ID, op.Process = int64(k+1), int64(k+1)
	}
	return ops
}

type handwritten map[string]struct {
	ops  []*history.Op
	want Verdict
}

func (h handwritten) run(t *testing.T, c Checker) {
	t.Helper()
	for name, k := range h {
		t.Run(name, func(t *testing.T) {
			if res := c.Check(number(k.ops), Options{Limit: 20 * time.Second}); res.Verdict != k.want {
				t.Errorf("%v, want %v: %s", res.Verdict, k.want, res.Text)
			}
		})
	}
}

// B81 with its kin, CK2.
func TestRegisterCases(t *testing.T) {
	w := func(v, at, ret int64) *history.Op { return did("write", "k", ints(v), nil, at, ret) }
	r := func(at, ret int64, v ...int64) *history.Op { return did("read", "k", nil, v, at, ret) }
	cas := func(a, b, ok, at, ret int64) *history.Op { return did("cas", "k", ints(a, b), ints(ok), at, ret) }
	handwritten{
		"B81 unknown write seen":         {[]*history.Op{w(1, 1, 2), w(2, 3, 0), r(5, 6, 2)}, Pass},
		"B81 failed write seen":          {[]*history.Op{w(1, 1, 2), failed(w(2, 3, 4)), r(5, 6, 2)}, Fail},
		"B81 acked write lost":           {[]*history.Op{w(1, 1, 2), w(2, 3, 4), r(5, 6, 1)}, Fail},
		"unknown write seen late":        {[]*history.Op{w(1, 1, 2), w(2, 3, 0), r(5, 6, 1), r(7, 8, 2)}, Pass},
		"unknown write seen, then not":   {[]*history.Op{w(1, 1, 2), w(2, 3, 0), r(5, 6, 2), r(7, 8, 1)}, Fail},
		"unknown write never seen":       {[]*history.Op{w(1, 1, 2), w(2, 3, 0), r(5, 6, 1)}, Pass},
		"seen before it began":           {[]*history.Op{w(1, 1, 2), r(3, 4, 2), w(2, 5, 0)}, Fail},
		"concurrent, either":             {[]*history.Op{w(1, 1, 9), w(2, 1, 9), r(10, 11, 1)}, Pass},
		"concurrent, both":               {[]*history.Op{w(1, 1, 9), w(2, 1, 9), r(10, 11, 1), r(12, 13, 2)}, Fail},
		"initially absent":               {[]*history.Op{r(1, 2), w(1, 3, 4), r(5, 6, 1)}, Pass},
		"absent after a write":           {[]*history.Op{w(1, 1, 2), r(3, 4)}, Fail},
		"cleared":                        {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 4), r(5, 6)}, Pass},
		"cas":                            {[]*history.Op{w(1, 1, 2), cas(1, 2, 1, 3, 4), r(5, 6, 2)}, Pass},
		"cas refused rightly":            {[]*history.Op{w(1, 1, 2), cas(3, 2, 0, 3, 4), r(5, 6, 1)}, Pass},
		"cas refused wrongly":            {[]*history.Op{w(1, 1, 2), cas(1, 2, 0, 3, 4)}, Fail},
		"cas succeeds wrongly":           {[]*history.Op{w(1, 1, 2), cas(3, 2, 1, 3, 4)}, Fail},
		"two cas win":                    {[]*history.Op{w(1, 1, 2), cas(1, 2, 1, 3, 9), cas(1, 3, 1, 3, 9)}, Fail},
		"unknown cas seen":               {[]*history.Op{w(1, 1, 2), cas(1, 2, 0, 3, 0), r(5, 6, 2)}, Pass},
		"unknown cas explains a refusal": {[]*history.Op{w(1, 1, 2), cas(1, 2, 0, 3, 0), cas(1, 3, 0, 5, 6)}, Pass},
		"unknown write, then cas, seen":  {[]*history.Op{w(1, 1, 2), w(2, 3, 0), cas(2, 3, 0, 4, 0), r(5, 6, 3)}, Pass},
		"unknown cas of what never was":  {[]*history.Op{w(1, 1, 2), cas(2, 3, 0, 4, 0), r(5, 6, 3)}, Fail},
		"unknown clear seen":             {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), r(5, 6)}, Pass},
		"unknown clear unseen":           {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), r(5, 6, 1)}, Pass},
		"unknown clear seen twice":       {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), r(5, 6), w(2, 7, 8), r(9, 10)}, Fail},
		"two unknown clears":             {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), did("clear", "k", nil, nil, 4, 0), r(5, 6), w(2, 7, 8), r(9, 10)}, Pass},
		"unknown clear seen too early":   {[]*history.Op{w(1, 1, 2), r(3, 4), did("clear", "k", nil, nil, 5, 0)}, Fail},
		"unknown clear before a create":  {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), did("create", "k", ints(2), ints(1), 4, 5), r(6, 7, 2)}, Pass},
		"unknown clear, refused cas":     {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), cas(1, 2, 0, 4, 5), r(6, 7)}, Pass},
		"refused cas, then the old":      {[]*history.Op{w(1, 1, 2), did("clear", "k", nil, nil, 3, 0), cas(1, 2, 0, 4, 5), r(6, 7, 1)}, Fail},
		"unknown create seen":            {[]*history.Op{did("create", "k", ints(2), nil, 1, 0), r(3, 4, 2)}, Pass},
		"unknown create over a value":    {[]*history.Op{w(1, 1, 2), did("create", "k", ints(2), nil, 3, 0), r(5, 6, 2)}, Fail},
		"create twice":                   {[]*history.Op{did("create", "k", ints(1), ints(1), 1, 2), did("create", "k", ints(2), ints(1), 3, 4)}, Fail},
		"create refused":                 {[]*history.Op{did("create", "k", ints(1), ints(1), 1, 2), did("create", "k", ints(2), ints(0), 3, 4), r(5, 6, 1)}, Pass},
		"same value twice":               {[]*history.Op{w(1, 1, 2), w(2, 3, 0), w(2, 4, 0), r(5, 6, 2), w(1, 7, 8), r(9, 10, 2)}, Pass},
		"keys are apart":                 {[]*history.Op{w(1, 1, 2), did("read", "other", nil, nil, 3, 4)}, Pass},
		"nothing":                        {nil, Unknown},
		"only failures":                  {[]*history.Op{failed(w(1, 1, 2))}, Unknown},
		"another word":                   {[]*history.Op{w(1, 1, 2), did("shout", "k", nil, nil, 3, 4)}, Unknown},
		"a write without a value":        {[]*history.Op{w(1, 1, 2), did("write", "k", nil, nil, 3, 4)}, Unknown},
	}.run(t, Register{})
}

// CK5, CK3.
func TestRegisterSaysUnknown(t *testing.T) {
	stale := did("read", "k", nil, ints(1), 3, 4)
	stale.Level = history.Stale
	res := Register{}.Check(number([]*history.Op{did("write", "k", ints(1), nil, 1, 2), stale}), Options{})
	if res.Verdict != Unknown || !strings.Contains(res.Text, "level") {
		t.Errorf("a stale read: %v %s", res.Verdict, res.Text)
	}
	// Values that come again and hundreds of open writes: no search ends.
	var ops []*history.Op
	for k := range int64(300) {
		ops = append(ops, did("write", "k", ints(k%40), nil, 1+k, 0))
	}
	for k := range int64(300) {
		ops = append(ops, did("read", "k", nil, ints((k*7)%40), 1000+2*k, 1001+2*k))
	}
	ops = append(ops, did("read", "k", nil, ints(77), 5000, 5001))
	res = Register{}.Check(number(ops), Options{Limit: 300 * time.Millisecond})
	if res.Verdict != Unknown || res.Elapsed > 10*time.Second {
		t.Errorf("a hard history: %v %s in %v", res.Verdict, res.Text, res.Elapsed)
	}
}

// The operation that shows a violation is named.
func TestRegisterNamesTheCulprit(t *testing.T) {
	var ops []*history.Op
	for k := range int64(200) {
		ops = append(ops, did("write", "k", ints(k+1), nil, 10*k+1, 10*k+2), did("read", "k", nil, ints(k+1), 10*k+3, 10*k+4))
	}
	ops[301].Result = ints(7) // read
	res := Register{}.Check(number(ops), Options{})
	if res.Verdict != Fail || len(res.Details) != 1 || res.Details[0].Ops[0] != ops[301].ID {
		t.Errorf("%v %+v", res.Verdict, res.Details)
	}
}

// refuses: a compare-and-set with many open writes does not make the search
// endless (dropSilent).
func TestRegisterManySilentWrites(t *testing.T) {
	var ops []*history.Op
	for k := range int64(60) {
		ops = append(ops, did("write", "k", ints(1000+k), nil, 10*k+1, 0), did("write", "k", ints(k), nil, 10*k+2, 10*k+3),
			did("cas", "k", ints(k, 5000+k), ints(0), 10*k+4, 10*k+5), did("read", "k", nil, ints(k), 10*k+6, 10*k+7))
	}
	if res := (Register{}).Check(number(ops), Options{Limit: 20 * time.Second}); res.Verdict != Pass || !strings.Contains(res.Text, "not looked at") {
		t.Errorf("%v: %s", res.Verdict, res.Text)
	}
	ops[len(ops)-1].Result = ints(3)
	if res := (Register{}).Check(number(ops), Options{Limit: 20 * time.Second}); res.Verdict != Fail {
		t.Errorf("%v: %s", res.Verdict, res.Text)
	}
}

func registers(r *rand.Rand, procs, n, lossy int) []*history.Op {
	keys := 1 + r.IntN(3)
	next := int64(0)
	state := map[string]register{}
	recent := func() int64 { return max(1, next-int64(r.IntN(6))) }
	ps := plan(r, procs, n, lossy, func() *history.Op {
		op := &history.Op{Key: fmt.Sprint("k", r.IntN(keys))}
		switch p := r.IntN(20); {
		case p < 8:
			op.F = "read"
		case p < 15:
			next++
			op.F, op.Arg = "write", ints(next)
		case p < 18:
			old := recent()
			next++
			op.F, op.Arg = "cas", ints(old, next)
		case p < 19:
			next++
			op.F, op.Arg = "create", ints(next)
		default:
			op.F = "clear"
		}
		return op
	})
	var last []*history.Op
	for k := range keys {
		last = append(last, &history.Op{F: "read", Key: fmt.Sprint("k", k)})
	}
	return apply(ps, func(op *history.Op) {
		s := state[op.Key]
		holds := int64(0)
		switch op.F {
		case "read":
			if op.Result = nil; s.present {
				op.Result = ints(s.v)
			}
			return
		case "write":
			s = register{present: true, v: op.Arg[0]}
		case "clear":
			s = register{}
		case "cas":
			if s.present && s.v == op.Arg[0] {
				s, holds = register{present: true, v: op.Arg[1]}, 1
			}
			op.Result = ints(holds)
		case "create":
			if !s.present {
				s, holds = register{present: true, v: op.Arg[0]}, 1
			}
			op.Result = ints(holds)
		}
		state[op.Key] = s
	}, last...)
}

func init() {
	read := is("read")
	worlds = append(worlds, world{checker: Register{}, generate: registers, spoil: map[string]func(*rand.Rand, []*history.Op) bool{
		"a value that was never written": func(r *rand.Rand, ops []*history.Op) bool {
			op := pick(r, ops, read)
			op.Result = ints(1 << 40)
			return true
		},
		"a failed write is seen": func(r *rand.Rand, ops []*history.Op) bool {
			w := pick(r, ops, func(op *history.Op) bool { return op.F == "write" && op.Outcome == history.Fail })
			if w == nil {
				return false
			}
			op := pick(r, ops, func(op *history.Op) bool { return read(op) && op.Key == w.Key && op.Return > w.Invoke })
			op.Result = w.Arg
			return true
		},
		"a stale read": func(r *rand.Rand, ops []*history.Op) bool {
			return overwritten(r, ops, func(w1, w2, op *history.Op) { op.Result = w1.Arg })
		},
		"an acknowledged write is lost": func(r *rand.Rand, ops []*history.Op) bool {
			return overwritten(r, ops, func(_, _, op *history.Op) { op.Result = nil })
		},
		"a read of the future": func(r *rand.Rand, ops []*history.Op) bool {
			w := pick(r, ops, is("write"))
			if w == nil {
				return false
			}
			op := pick(r, ops, func(op *history.Op) bool { return read(op) && op.Key == w.Key && op.Return < w.Invoke })
			if op == nil {
				return false
			}
			op.Result = w.Arg
			return true
		},
		"a refused compare-and-set claims success": func(r *rand.Rand, ops []*history.Op) bool {
			op := pick(r, ops, func(op *history.Op) bool { return is("cas")(op) && op.Result[0] == 0 })
			if op == nil {
				return false
			}
			// The value that it wants was written by nobody.
			op.Arg[0], op.Result = 1<<41, ints(1)
			return true
		},
	}})
}

// overwritten finds w1 before w2 before a read of one key that nobody clears,
// and lets f spoil the read.
func overwritten(r *rand.Rand, ops []*history.Op, f func(w1, w2, read *history.Op)) bool {
	cleared := map[string]bool{}
	for _, op := range ops {
		if op.F == "clear" {
			cleared[op.Key] = true
		}
	}
	for range 50 {
		w1, w2 := pick(r, ops, is("write")), pick(r, ops, is("write"))
		if w1 == nil || cleared[w1.Key] || w1.Key != w2.Key || w1.Return >= w2.Invoke {
			continue
		}
		op := pick(r, ops, func(op *history.Op) bool { return is("read")(op) && op.Key == w1.Key && w2.Return < op.Invoke })
		if op != nil {
			f(w1, w2, op)
			return true
		}
	}
	return false
}

// The figure: a million operations over a thousand keys.
func BenchmarkRegister(b *testing.B) {
	ops := million(1_000_000, 1000, 32)
	b.ResetTimer()
	for b.Loop() {
		if res := (Register{}).Check(ops, Options{Limit: 5 * time.Minute}); res.Verdict != Pass {
			b.Fatal(res.Text)
		}
	}
	b.ReportMetric(float64(b.N)*float64(len(ops))/b.Elapsed().Seconds(), "ops/s")
}

func million(n, keys, procs int) []*history.Op {
	r := rng(9)
	next := int64(0)
	state := make([]int64, keys)
	names := make([]string, keys)
	for k := range names {
		names[k] = fmt.Sprint("k", k)
	}
	index := map[*history.Op]int{}
	ps := plan(r, procs, n, 200, func() *history.Op {
		k := r.IntN(keys)
		op := &history.Op{Key: names[k], F: "read"}
		if r.IntN(2) == 0 {
			next++
			op.F, op.Arg = "write", ints(next)
		}
		index[op] = k
		return op
	})
	return apply(ps, func(op *history.Op) {
		k := index[op]
		if op.F == "write" {
			state[k] = op.Arg[0]
		} else if op.Result = nil; state[k] != 0 {
			op.Result = ints(state[k])
		}
	})
}
