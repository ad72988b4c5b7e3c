package check

import (
	"cmp"
	"math/big"
	"slices"
	"sort"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Counter checks sums that many add to: a read holds every add that was
// acknowledged before it began and none that began after it ended; reads of a
// counter that only grows never go back; and the last reads are the
// acknowledged sum plus that of some of the adds with an unknown outcome.
// Where a counter is small, it also searches an order of its operations.
type Counter struct{}

// Name is "counter".
func (Counter) Name() string { return "counter" }

// Check judges.
func (Counter) Check(ops []*history.Op, o Options) Result {
	return check("counter", ops, o, func(j *judge) {
		keys, by := byKey(ops)
		var exactKeys []string
		var exact [][]event
		for _, key := range keys {
			if j.late("looking at the bounds of counters") {
				return
			}
			before := len(j.Details)
			c := j.counterOf(key, by[key])
			c.bounds(j)
			c.final(j)
			if events, ok := c.events(); ok && len(j.Details) == before {
				exactKeys, exact = append(exactKeys, key), append(exact, events)
			}
		}
		j.searchCounters(exactKeys, exact)
	})
}

// counter is the operations of one counter.
type counter struct {
	key   string
	reads []*history.Op // ok, by Invoke
	adds  []*history.Op // ok and unknown, by Invoke
	acked sums          // by Return
	begun sums          // by Invoke
	grows bool          // no add is negative
}

// sums are adds by a time, with the sums of all until each.
type sums struct {
	at       []int64
	pos, neg []int64 // one longer than at
}

func sumsOf(adds []*history.Op, at func(*history.Op) int64) sums {
	byTime := slices.Clone(adds)
	slices.SortFunc(byTime, func(a, b *history.Op) int { return cmp.Compare(at(a), at(b)) })
	s := sums{pos: []int64{0}, neg: []int64{0}}
	for _, op := range byTime {
		p, n := s.pos[len(s.at)], s.neg[len(s.at)]
		if d := op.Arg[0]; d > 0 {
			p += d
		} else {
			n += d
		}
		s.at, s.pos, s.neg = append(s.at, at(op)), append(s.pos, p), append(s.neg, n)
	}
	return s
}

// until counts the adds whose time is below t.
func (s sums) until(t int64) int {
	return sort.Search(len(s.at), func(i int) bool { return s.at[i] >= t })
}

func (j *judge) counterOf(key string, ops []*history.Op) *counter {
	c := &counter{key: key, grows: true}
	var acked []*history.Op
	for _, op := range ops {
		switch {
		case op.Outcome == history.Fail:
		case op.F == "add" && len(op.Arg) == 1:
			c.adds = append(c.adds, op)
			c.grows = c.grows && op.Arg[0] >= 0
			if op.Outcome == history.OK {
				acked = append(acked, op)
			}
		case op.F == "read" && len(op.Result) <= 1:
			if op.Outcome == history.OK {
				c.reads = append(c.reads, op)
			}
		default:
			j.malformed(op)
		}
	}
	byInvoke := func(a, b *history.Op) int { return cmp.Compare(a.Invoke, b.Invoke) }
	slices.SortFunc(c.reads, byInvoke)
	slices.SortFunc(c.adds, byInvoke)
	c.acked = sumsOf(acked, func(op *history.Op) int64 { return op.Return })
	c.begun = sumsOf(c.adds, func(op *history.Op) int64 { return op.Invoke })
	return c
}

func sumRead(op *history.Op) int64 {
	if len(op.Result) == 0 {
		return 0
	}
	return op.Result[0]
}

// bounds looks at each read alone, and at each after those that ended before.
func (c *counter) bounds(j *judge) {
	ends := slices.Clone(c.reads)
	slices.SortFunc(ends, func(a, b *history.Op) int { return cmp.Compare(a.Return, b.Return) })
	var top *history.Op // the highest read that has ended
	next := 0
	for _, r := range c.reads {
		v := sumRead(r)
		a, b := c.acked.until(r.Invoke), c.begun.until(r.Return+1)
		lo := c.acked.pos[a] + c.begun.neg[b]
		hi := c.acked.neg[a] + c.begun.pos[b]
		switch {
		case len(r.Result) == 0 && a > 0:
			j.fail(c.key, []int64{r.ID}, "a read saw nothing after %d acknowledged adds: %v", a, r)
		case v < lo:
			j.fail(c.key, []int64{r.ID}, "a read misses acknowledged adds, it must be %d or more: %v", lo, r)
		case v > hi:
			j.fail(c.key, []int64{r.ID}, "a read holds more than was ever added, it must be %d or less: %v", hi, r)
		}
		for ; next < len(ends) && ends[next].Return < r.Invoke; next++ {
			if top == nil || sumRead(ends[next]) > sumRead(top) {
				top = ends[next]
			}
		}
		if c.grows && top != nil && v < sumRead(top) {
			j.fail(c.key, []int64{top.ID, r.ID}, "a read goes back: %v after %v", r, top)
		}
	}
}

// maxSubset bounds the sums that final looks at, in bits.
const maxSubset = 1 << 24

// final looks at the reads that began after every add had ended or was given
// up: their value is the acknowledged sum and some of the unknown adds.
func (c *counter) final(j *judge) {
	var last, sum, below, size int64
	var open []int64
	for _, op := range c.adds {
		last = max(last, op.Invoke)
		if op.Open() {
			open = append(open, op.Arg[0])
			below += min(op.Arg[0], 0)
			size += max(op.Arg[0], -op.Arg[0])
			continue
		}
		last = max(last, op.Return)
		sum += op.Arg[0]
	}
	if size < 0 || size > maxSubset {
		return // the bounds have been looked at
	}
	possible := big.NewInt(1) // bit i: sum+below+i can be had
	for _, d := range open {
		possible.Or(possible, new(big.Int).Lsh(possible, uint(max(d, -d))))
	}
	for _, r := range c.reads {
		if r.Invoke <= last {
			continue
		}
		at := sumRead(r) - sum - below
		if at < 0 || at > size || possible.Bit(int(at)) == 0 {
			j.fail(c.key, []int64{r.ID}, "the last value is not the acknowledged sum %d with any of %d unknown adds: %v", sum, len(open), r)
		}
	}
}

// maxExactOps and maxExactOpen bound the counters for which an order is
// searched: adds commute, so that a search tries all sets of those that are
// open together.
const (
	maxExactOps  = 4000
	maxExactOpen = 4
)

type counterIn struct {
	read    bool
	present bool
	v       int64
}

// counterState is the sum, or absent.
type counterState struct {
	present bool
	v       int64
}

func counterModel() model {
	return model{
		init: counterState{},
		step: func(state, in any) (bool, any) {
			s, i := state.(counterState), in.(*counterIn)
			if i.read {
				return s.present == i.present && s.v == i.v, state
			}
			return true, counterState{present: true, v: s.v + i.v}
		},
		open: func(in any) (any, bool) { return in, !in.(*counterIn).read },
		pins: func(in any) (any, bool) {
			i := in.(*counterIn)
			return counterState{present: i.present, v: i.v}, i.read
		},
	}
}

func (c *counter) events() ([]event, bool) {
	open := 0
	var events []event
	for _, op := range c.adds {
		if op.Open() {
			open++
		}
		events = append(events, event{op: op, call: op.Invoke, ret: op.Return, in: &counterIn{v: op.Arg[0]}})
	}
	for _, op := range c.reads {
		events = append(events, event{op: op, call: op.Invoke, ret: op.Return, in: &counterIn{read: true, present: len(op.Result) == 1, v: sumRead(op)}})
	}
	return events, open <= maxExactOpen && len(events) <= maxExactOps
}

// searchCounters searches in half of the time that is left. That it finds
// nothing in it is no verdict: what a counter promises has been looked at.
func (j *judge) searchCounters(keys []string, parts [][]event) {
	sub := &judge{o: j.o, deadline: j.deadline.Add(-j.left() / 2)}
	sub.linearizable(counterModel(), keys, parts)
	undecided := 0
	for _, d := range sub.Details {
		if d.Verdict == Fail {
			j.add(d)
		} else {
			undecided++
		}
	}
	if n := undecided + sub.more; n > 0 {
		j.note("no order was searched to the end for %d counters", n)
	}
}
