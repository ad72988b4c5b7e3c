package check

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

func TestBankCases(t *testing.T) {
	open := func() *history.Op { return did("open", "b", ints(3, 10), nil, 1, 2) }
	move := func(id, from, to, n, at, ret int64) *history.Op {
		return did("transfer", "b", ints(id, from, to, n), nil, at, ret)
	}
	r := func(at, ret int64, v ...int64) *history.Op { return did("read", "b", nil, v, at, ret) }
	handwritten{
		"B81 unknown transfer seen":   {[]*history.Op{open(), move(1, 0, 1, 5, 3, 0), r(5, 6, 1, 5, 15, 10)}, Pass},
		"B81 unknown transfer unseen": {[]*history.Op{open(), move(1, 0, 1, 5, 3, 0), r(5, 6, 0, 10, 10, 10)}, Pass},
		"B81 failed transfer seen":    {[]*history.Op{open(), failed(move(1, 0, 1, 5, 3, 4)), r(5, 6, 1, 5, 15, 10)}, Fail},
		"B81 acked transfer lost":     {[]*history.Op{open(), move(1, 0, 1, 5, 3, 4), r(5, 6, 0, 10, 10, 10)}, Fail},
		"unknown, then not":           {[]*history.Op{open(), move(1, 0, 1, 5, 3, 0), r(5, 6, 1, 5, 15, 10), r(7, 8, 0, 10, 10, 10)}, Fail},
		"half lost":                   {[]*history.Op{open(), move(1, 0, 1, 5, 3, 4), r(5, 6, 1, 5, 10, 10)}, Fail},
		"applied twice":               {[]*history.Op{open(), move(1, 0, 1, 5, 3, 4), r(5, 6, 1, 0, 20, 10)}, Fail},
		"the id without the money":    {[]*history.Op{open(), move(1, 0, 1, 5, 3, 4), r(5, 6, 1, 10, 10, 10)}, Fail},
		"negative":                    {[]*history.Op{open(), move(1, 0, 1, 15, 3, 4), r(5, 6, 1, -5, 25, 10)}, Fail},
		"an account is gone":          {[]*history.Op{open(), r(5, 6, 0, 10, 20)}, Fail},
		"nothing is read":             {[]*history.Op{open(), r(5, 6)}, Fail},
		"never opened":                {[]*history.Op{r(5, 6, 0, 10, 10, 10)}, Unknown},
		"another account":             {[]*history.Op{open(), move(1, 0, 7, 5, 3, 4)}, Unknown},
		"of two unknown one":          {[]*history.Op{open(), move(1, 0, 1, 5, 3, 0), move(2, 1, 2, 5, 3, 0), r(5, 6, 2, 10, 5, 15)}, Pass},
		"of two unknown, nonsense":    {[]*history.Op{open(), move(1, 0, 1, 5, 3, 0), move(2, 1, 2, 5, 3, 0), r(5, 6, 2, 10, 4, 16)}, Fail},
	}.run(t, Bank{})
	handwritten{"negative is allowed": {[]*history.Op{open(), move(1, 0, 1, 15, 3, 4), r(5, 6, 1, -5, 25, 10)}, Pass}}.run(t, Bank{AllowNegative: true})
}

func banks(r *rand.Rand, procs, n, lossy int) []*history.Op {
	const accounts, balance = 4, 100
	next := int64(0)
	type bank struct {
		id  int64
		all []int64
	}
	state := map[string]*bank{}
	name := func(k int) string { return fmt.Sprint("b", k) }
	keys := 1 + r.IntN(2)
	var opened []*history.Op
	for k := range keys {
		state[name(k)] = &bank{all: slices.Repeat(ints(balance), accounts)}
		opened = append(opened, &history.Op{F: "open", Key: name(k), Arg: ints(accounts, balance), Process: int64(-1 - k), Outcome: history.OK})
	}
	ps := plan(r, procs, n, lossy, func() *history.Op {
		op := &history.Op{F: "read", Key: name(r.IntN(keys))}
		if r.IntN(2) == 0 {
			next++
			from := r.IntN(accounts)
			op.F, op.Arg = "transfer", ints(next, int64(from), int64((from+1+r.IntN(accounts-1))%accounts), int64(1+r.IntN(5)))
		}
		return op
	})
	var last []*history.Op
	for k := range keys {
		last = append(last, &history.Op{F: "read", Key: name(k)})
	}
	// What an account has not got is refused, definitely.
	ops := apply(ps, func(op *history.Op) {
		b := state[op.Key]
		switch {
		case op.F == "read":
			op.Result = append(ints(b.id), b.all...)
		case b.all[op.Arg[1]] >= op.Arg[3]:
			b.id = op.Arg[0]
			move(b.all, op, 1)
		case op.Outcome == history.OK:
			op.Outcome = history.Fail
		}
	}, last...)
	ops = append(opened, ops...)
	for k, op := range ops {
		op.ID = int64(k + 1)
	}
	return ops
}

func init() {
	last := func(ops []*history.Op) *history.Op { return ops[len(ops)-1] }
	worlds = append(worlds, world{checker: Bank{}, generate: banks, spoil: map[string]func(*rand.Rand, []*history.Op) bool{
		"half of a transfer is lost": func(r *rand.Rand, ops []*history.Op) bool {
			op := pick(r, ops, is("read"))
			op.Result[1+r.IntN(4)] -= int64(1 + r.IntN(5))
			return true
		},
		"a stale read": func(r *rand.Rand, ops []*history.Op) bool {
			for range 100 {
				a, b := pick(r, ops, is("read")), pick(r, ops, is("transfer"))
				if b == nil {
					return false
				}
				c := pick(r, ops, func(op *history.Op) bool { return is("read")(op) && op.Key == a.Key && b.Return < op.Invoke })
				if c != nil && a.Key == b.Key && a.Return < b.Invoke {
					c.Result = slices.Clone(a.Result)
					return true
				}
			}
			return false
		},
		"a transfer is applied twice": func(r *rand.Rand, ops []*history.Op) bool {
			read := last(ops)
			for _, op := range ops { // with unknown ones other sums could be had
				if op.F == "transfer" && op.Outcome == history.Unknown {
					return false
				}
			}
			op := pick(r, ops, func(op *history.Op) bool { return is("transfer")(op) && op.Key == read.Key })
			if op == nil {
				return false
			}
			move(read.Result[1:], op, 1)
			return true
		},
		"an account is overdrawn": func(r *rand.Rand, ops []*history.Op) bool {
			op := pick(r, ops, is("read"))
			op.Result[1] -= 1000
			op.Result[2] += 1000
			return true
		},
		"a failed transfer is seen": func(r *rand.Rand, ops []*history.Op) bool {
			x := pick(r, ops, func(op *history.Op) bool { return op.F == "transfer" && op.Outcome == history.Fail })
			if x == nil {
				return false
			}
			op := pick(r, ops, func(op *history.Op) bool { return is("read")(op) && op.Key == x.Key })
			op.Result[0] = x.Arg[0]
			return true
		},
	}})
}
