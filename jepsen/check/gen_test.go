package check

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

// planned is an operation of a generated execution, with the moment at which
// it takes effect.
type planned struct {
	op  *history.Op
	at  int64
	not bool // it takes no effect
}

// plan lays out n operations of procs clients with random overlaps. One in
// lossy has an unknown outcome (and takes effect in time, late or never), one
// in lossy fails.
func plan(r *rand.Rand, procs, n, lossy int, what func() *history.Op) []planned {
	now := make([]int64, procs)
	process := make([]int64, procs)
	for i := range process {
		process[i], now[i] = int64(i+1), int64(r.IntN(50))
	}
	next := int64(procs)
	var out []planned
	for range n {
		i := r.IntN(procs)
		if r.IntN(3) > 0 { // mostly the one that is behind
			i = slices.Index(now, slices.Min(now))
		}
		op := what()
		p := planned{op: op}
		op.Process, op.Invoke, op.Outcome = process[i], now[i]+1+int64(r.IntN(20)), history.OK
		p.at = op.Invoke + int64(r.IntN(40))
		op.Return = p.at + int64(r.IntN(40))
		now[i] = op.Return
		switch r.IntN(max(lossy, 2)) {
		case 0:
			if lossy > 0 {
				op.Outcome, op.Return = history.Unknown, history.Never
				next++
				process[i] = next
				p.not = r.IntN(2) == 0
				if r.IntN(4) == 0 {
					p.at += int64(r.IntN(2000))
				}
			}
		case 1:
			if lossy > 0 {
				op.Outcome, p.not = history.Fail, true
			}
		}
		out = append(out, p)
	}
	return out
}

// apply puts the operations into effect, one after the other, and returns them
// numbered; last are reads after everything.
func apply(ps []planned, do func(op *history.Op), last ...*history.Op) []*history.Op {
	slices.SortStableFunc(ps, func(a, b planned) int { return cmp.Compare(a.at, b.at) })
	var ops []*history.Op
	end := int64(0)
	for _, p := range ps {
		if !p.not {
			do(p.op)
		}
		end = max(end, p.at, p.op.Invoke)
		if p.op.Outcome != history.OK {
			p.op.Result = nil
			for i := range p.op.Parts {
				p.op.Parts[i].Result = nil
			}
		} else {
			end = max(end, p.op.Return)
		}
		ops = append(ops, p.op)
	}
	for i, op := range last {
		op.Process, op.Outcome = int64(1<<40+i), history.OK
		op.Invoke, op.Return = end+10, end+20
		do(op)
		ops = append(ops, op)
	}
	slices.SortStableFunc(ops, func(a, b *history.Op) int { return cmp.Compare(a.Invoke, b.Invoke) })
	for i, op := range ops {
		op.ID = int64(i + 1)
	}
	return ops
}

// world generates valid histories of one workload and spoils them.
type world struct {
	checker  Checker
	generate func(r *rand.Rand, procs, n, lossy int) []*history.Op
	// spoil has the kinds of mutations, each of which makes a history that no
	// correct cluster could produce; false if this one gives no occasion.
	spoil map[string]func(r *rand.Rand, ops []*history.Op) bool
}

func clone(ops []*history.Op) []*history.Op {
	out := make([]*history.Op, len(ops))
	for i, op := range ops {
		c := *op
		c.Arg, c.Result, c.Parts = slices.Clone(op.Arg), slices.Clone(op.Result), slices.Clone(op.Parts)
		for k := range c.Parts {
			c.Parts[k].Result = slices.Clone(c.Parts[k].Result)
		}
		out[i] = &c
	}
	return out
}

func rng(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

// pick is a random operation for which want holds, nil if there is none.
func pick(r *rand.Rand, ops []*history.Op, want func(*history.Op) bool) *history.Op {
	var fit []*history.Op
	for _, op := range ops {
		if want(op) {
			fit = append(fit, op)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[r.IntN(len(fit))]
}

func is(f string) func(*history.Op) bool {
	return func(op *history.Op) bool { return op.F == f && op.Outcome == history.OK }
}

// worlds is filled by the tests of each checker.
var worlds []world

// CK1: what a correct cluster can produce passes; and every kind of mutation is
// caught every time.
func TestGeneratedHistories(t *testing.T) {
	rounds := 150
	if testing.Short() {
		rounds = 40
	}
	for _, w := range worlds {
		t.Run(w.checker.Name(), func(t *testing.T) {
			caught := map[string]int{}
			for seed := range uint64(rounds) {
				r := rng(seed)
				procs, n := 2+r.IntN(6), 10+r.IntN(190)
				lossy := []int{0, 5, 12, 40}[r.IntN(4)]
				ops := w.generate(r, procs, n, lossy)
				if res := w.checker.Check(ops, Options{}); res.Verdict != Pass {
					t.Fatalf("seed %d: %v: %s\n%s", seed, res.Verdict, res.Text, lines(ops))
				}
				for _, kind := range kinds(w) {
					bad := clone(ops)
					if !w.spoil[kind](r, bad) {
						continue
					}
					if res := w.checker.Check(bad, Options{}); res.Verdict != Fail {
						t.Fatalf("seed %d: %s is not caught: %v: %s\n%s", seed, kind, res.Verdict, res.Text, lines(bad))
					}
					caught[kind]++
				}
			}
			for _, kind := range kinds(w) {
				if caught[kind] < rounds/10 {
					t.Errorf("%s was tried %d times only", kind, caught[kind])
				}
			}
			t.Logf("caught: %v", caught)
		})
	}
}

func kinds(w world) []string {
	var ks []string
	for k := range w.spoil {
		ks = append(ks, k)
	}
	slices.Sort(ks)
	return ks
}

func lines(ops []*history.Op) string {
	s := ""
	for _, op := range ops {
		s += fmt.Sprintln(op)
	}
	return s
}
