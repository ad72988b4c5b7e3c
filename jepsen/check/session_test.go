package check

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

func TestSessionCases(t *testing.T) {
	add := func(s, n, at, ret int64) *history.Op { return did("append", "l", ints(s, n), nil, at, ret) }
	r := func(at, ret int64, v ...int64) *history.Op { return did("read", "l", nil, v, at, ret) }
	handwritten{
		"B81 unknown append seen":   {[]*history.Op{add(1, 1, 1, 2), add(1, 2, 3, 0), r(5, 6, 1, 1, 1, 2)}, Pass},
		"B81 unknown append unseen": {[]*history.Op{add(1, 1, 1, 2), add(1, 2, 3, 0), r(5, 6, 1, 1)}, Pass},
		"B81 failed append seen":    {[]*history.Op{add(1, 1, 1, 2), failed(add(1, 2, 3, 4)), r(5, 6, 1, 1, 1, 2)}, Fail},
		"B81 acked append lost":     {[]*history.Op{add(1, 1, 1, 2), add(1, 2, 3, 4), r(5, 6, 1, 1)}, Fail},
		"applied twice":             {[]*history.Op{add(1, 1, 1, 2), r(5, 6, 1, 1, 1, 1)}, Fail},
		"unknown applied twice":     {[]*history.Op{add(1, 1, 1, 2), add(1, 2, 3, 0), r(5, 6, 1, 1, 1, 2, 1, 2)}, Fail},
		"never sent":                {[]*history.Op{add(1, 1, 1, 2), r(5, 6, 1, 1, 2, 2)}, Fail},
		"out of order":              {[]*history.Op{add(1, 1, 1, 9), add(1, 2, 1, 9), r(10, 11, 1, 2, 1, 1)}, Fail},
		"sessions mix":              {[]*history.Op{add(1, 1, 1, 9), add(2, 1, 1, 9), add(1, 2, 1, 9), r(10, 11, 1, 1, 2, 1, 1, 2)}, Pass},
		"a gap":                     {[]*history.Op{add(1, 1, 1, 2), add(1, 2, 3, 0), add(1, 3, 4, 5), r(6, 7, 1, 1, 1, 3)}, Pass},
		"two reads disagree":        {[]*history.Op{add(1, 1, 1, 9), add(2, 1, 1, 9), r(10, 11, 1, 1, 2, 1), r(10, 11, 2, 1, 1, 1)}, Fail},
		"a read too early":          {[]*history.Op{r(1, 2, 1, 1), add(1, 1, 3, 4)}, Fail},
		"a stale read":              {[]*history.Op{add(1, 1, 1, 2), r(3, 4), r(5, 6, 1, 1)}, Fail},
		"nobody read":               {[]*history.Op{add(1, 1, 1, 2)}, Unknown},
		"a number twice":            {[]*history.Op{add(1, 1, 1, 2), add(1, 1, 3, 4), r(5, 6, 1, 1)}, Unknown},
	}.run(t, Session{})
}

func sessions(r *rand.Rand, procs, n, lossy int) []*history.Op {
	keys := 1 + r.IntN(2)
	state := map[string][]int64{}
	next := int64(0)
	ps := plan(r, procs, n, lossy, func() *history.Op {
		op := &history.Op{F: "append", Key: fmt.Sprint("s", r.IntN(keys)), Arg: ints(0, 0)}
		if r.IntN(4) == 0 {
			op.F, op.Arg = "read", nil
		}
		return op
	})
	for _, p := range ps { // a process is a session
		if p.op.F == "append" {
			next++
			p.op.Arg[0], p.op.Arg[1] = p.op.Process, next
		}
	}
	var last []*history.Op
	for k := range keys {
		last = append(last, &history.Op{F: "read", Key: fmt.Sprint("s", k)})
	}
	return apply(ps, func(op *history.Op) {
		if op.F == "append" {
			state[op.Key] = append(state[op.Key], op.Arg...)
		} else {
			op.Result = slices.Clone(state[op.Key])
		}
	}, last...)
}

func init() {
	read := is("read")
	// each changes the list in every read of one key.
	each := func(ops []*history.Op, key string, f func(v []int64) []int64) bool {
		for _, op := range ops {
			if read(op) && op.Key == key {
				op.Result = f(op.Result)
			}
		}
		return true
	}
	find := func(v []int64, op *history.Op) int {
		for k := 0; k < len(v); k += 2 {
			if v[k] == op.Arg[0] && v[k+1] == op.Arg[1] {
				return k
			}
		}
		return -1
	}
	worlds = append(worlds, world{checker: Session{}, generate: sessions, spoil: map[string]func(*rand.Rand, []*history.Op) bool{
		"an acknowledged number is lost": func(r *rand.Rand, ops []*history.Op) bool {
			a := pick(r, ops, is("append"))
			return a != nil && each(ops, a.Key, func(v []int64) []int64 {
				if k := find(v, a); k >= 0 {
					return slices.Delete(v, k, k+2)
				}
				return v
			})
		},
		"a number is applied twice": func(r *rand.Rand, ops []*history.Op) bool {
			a := pick(r, ops, is("append"))
			return a != nil && each(ops, a.Key, func(v []int64) []int64 {
				if k := find(v, a); k >= 0 {
					return slices.Insert(v, k, a.Arg...)
				}
				return v
			})
		},
		"a failed number is applied": func(r *rand.Rand, ops []*history.Op) bool {
			a := pick(r, ops, func(op *history.Op) bool { return op.F == "append" && op.Outcome == history.Fail })
			return a != nil && each(ops, a.Key, func(v []int64) []int64 { return append(v, a.Arg...) })
		},
		// Who wrote what changes places, so that the list has it the other way.
		"a session's numbers change places": func(r *rand.Rand, ops []*history.Op) bool {
			for range 50 {
				a, b := pick(r, ops, is("append")), pick(r, ops, is("append"))
				if a != nil && a.Process == b.Process && a.Key == b.Key && a.Arg[1] < b.Arg[1] {
					a.Arg[1], b.Arg[1] = b.Arg[1], a.Arg[1]
					return true
				}
			}
			return false
		},
	}})
}
