package check

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/keelstate/keelstate/jepsen/history"
)

// maxPart bounds the operations of one search: its memory is about n*n/8 bytes.
const maxPart = 40000

// event is one operation of a search.
type event struct {
	op *history.Op
	// call is op.Invoke, or later where it is known that the operation took
	// effect later.
	call int64
	// ret is op.Return, or earlier where it is known that the operation had taken
	// effect by then.
	ret int64
	in  any // input and output in one, for the model
}

// model is a sequential specification. States are compared with ==.
type model struct {
	init any
	step func(state, in any) (bool, any)
	// open is the input of the same operation with an unknown outcome, false
	// if it then is of no effect.
	open func(in any) (any, bool)
	// pins is the state after an operation that ran alone, where its input
	// tells.
	pins func(in any) (any, bool)
}

func (m model) porcupine(init any) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return init },
		Step: func(state, in, _ any) (bool, any) { return m.step(state, in) },
	}
}

func operations(events []event) []porcupine.Operation {
	ops := make([]porcupine.Operation, len(events))
	for i, e := range events {
		ops[i] = porcupine.Operation{Input: e.in, Call: e.call, Return: e.ret}
	}
	return ops
}

// segment is a piece of a part that can be judged alone.
type segment struct {
	key    string
	init   any
	events []event
}

// cut splits the events of a key where an operation ran alone and pins the
// state: what comes later does not depend on how it came about.
func (m model) cut(key string, events []event) []segment {
	slices.SortFunc(events, func(a, b event) int {
		return cmp.Or(cmp.Compare(a.call, b.call), cmp.Compare(a.op.ID, b.op.ID))
	})
	var out []segment
	init, from := m.init, 0
	latest := int64(math.MinInt64) // return of all before
	for i, e := range events {
		alone := latest < e.call && (i+1 == len(events) || e.ret < events[i+1].call)
		latest = max(latest, e.ret)
		if !alone || i+1 == len(events) || i+1-from < minSegment {
			continue
		}
		if state, ok := m.pins(e.in); ok {
			out = append(out, segment{key: key, init: init, events: events[from : i+1]})
			init, from = state, i+1
		}
	}
	return append(out, segment{key: key, init: init, events: events[from:]})
}

// minSegment keeps segments from being too small to be worth a search.
const minSegment = 32

// linearizable searches an order for the events of every key, in parallel, and
// notes keys that have none or could not be decided.
func (j *judge) linearizable(m model, keys []string, parts [][]event) {
	var segments []segment
	for i, key := range keys {
		segments = append(segments, m.cut(key, parts[i])...)
	}
	jobs := make(chan segment)
	var mu sync.Mutex // guards j
	var workers sync.WaitGroup
	for range j.o.Parallel {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for s := range jobs {
				j.search(m, s, &mu)
			}
		}()
	}
	for _, s := range segments {
		jobs <- s
	}
	close(jobs)
	workers.Wait()
}

func (j *judge) search(m model, s segment, mu *sync.Mutex) {
	left := j.left()
	verdict := porcupine.Unknown
	why := "the time was over before an order was found or refuted"
	switch {
	case len(s.events) > maxPart:
		why = "more concurrent operations on one key than a search can hold"
	case left > 0:
		verdict = timed(m, s.init, s.events, left)
	}
	switch verdict {
	case porcupine.Illegal:
		events, last := j.shrink(m, s)
		mu.Lock()
		defer mu.Unlock()
		ids, text := describe(events, last)
		j.fail(s.key, ids, "no order of the operations explains their results%s", text)
	case porcupine.Unknown:
		mu.Lock()
		defer mu.Unlock()
		j.undecided(s.key, nil, "%s (%d operations)", why, len(s.events))
	}
}

// timed runs a search and waits until it has ended.
func timed(m model, init any, events []event, limit time.Duration) porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(m.porcupine(init), operations(events), limit)
}

// shrinkTime bounds the search for the operation that shows a violation.
const shrinkTime = 5 * time.Second

// shrink finds the shortest time in which the history went wrong: the events
// that began until then, with those that had not ended left open, and the one
// whose end shows the violation. Going on cannot mend a violation, so a binary
// search finds it.
func (j *judge) shrink(m model, s segment) ([]event, *history.Op) {
	ends := slices.Clone(s.events)
	ends = slices.DeleteFunc(ends, func(e event) bool { return e.ret == history.Never })
	slices.SortFunc(ends, func(a, b event) int { return cmp.Compare(a.ret, b.ret) })
	deadline := time.Now().Add(shrinkTime)
	lo, hi := 0, len(ends) // the prefix of lo ends is good, that of hi is not
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		switch timed(m, s.init, m.prefix(s.events, ends[mid-1].ret), max(time.Until(deadline), time.Millisecond)) {
		case porcupine.Ok:
			lo = mid
		case porcupine.Illegal:
			hi = mid
		default:
			return m.prefix(s.events, ends[hi-1].ret), ends[hi-1].op
		}
	}
	if hi == 0 {
		return s.events, nil
	}
	last := ends[hi-1]
	for _, e := range ends { // a write whose end is only inferred says less than the read that saw it
		if e.ret == last.ret && e.op.Return == last.ret {
			last = e
		}
	}
	return m.prefix(s.events, last.ret), last.op
}

// prefix is the history until a time.
func (m model) prefix(events []event, until int64) []event {
	var out []event
	for _, e := range events {
		if e.call > until {
			continue
		}
		if e.ret > until {
			in, ok := m.open(e.in)
			if !ok {
				continue
			}
			e.in, e.ret = in, history.Never
		}
		out = append(out, e)
	}
	return out
}

// describe tells the last events before a violation.
func describe(events []event, last *history.Op) ([]int64, string) {
	slices.SortFunc(events, func(a, b event) int { return cmp.Compare(a.op.Invoke, b.op.Invoke) })
	const shown = 12
	var b strings.Builder
	var ids []int64
	if last != nil {
		b.WriteString("; with the end of this one there is none:\n  " + last.String() + "\nafter:")
		ids = append(ids, last.ID)
	} else {
		b.WriteString(":")
	}
	for _, e := range events[max(0, len(events)-shown):] {
		if e.op == last {
			continue
		}
		b.WriteString("\n  " + e.op.String())
		ids = append(ids, e.op.ID)
	}
	return ids, b.String()
}
