package check

import (
	"cmp"
	"slices"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Session checks numbered operations of sessions, each of which the client sent
// as often as it took: an acknowledged one was applied exactly once, an unknown
// one at most once, a failed one never; those of one session were applied in
// the order of their numbers, in which they were started; and acknowledged ones
// are in every later read. Reads of one list are prefixes of one order, which
// does not contradict real time.
type Session struct{}

// Name is "session".
func (Session) Name() string { return "session" }

// Check judges. A session's numbers are appended to lists as pairs.
func (Session) Check(ops []*history.Op, o Options) Result {
	return check("session", ops, o, func(j *judge) {
		keys, by := byKey(ops)
		for _, key := range keys {
			if j.late("reading sessions") {
				return
			}
			s := &sessionList{key: key, appends: map[numbered]*history.Op{}}
			if s.index(j, by[key]) {
				s.content(j)
				s.lost(j)
				if !j.failed() {
					s.order(j, by[key])
				}
			}
		}
	})
}

// numbered is one operation's name: its session and number.
type numbered struct{ session, n int64 }

type sessionList struct {
	key     string
	appends map[numbered]*history.Op
	acked   []*history.Op // by Return
	reads   []*history.Op // ok, by length
}

func (s *sessionList) index(j *judge, ops []*history.Op) bool {
	good := true
	for _, op := range ops {
		switch {
		case op.F == "append" && len(op.Arg) == 2:
			id := numbered{op.Arg[0], op.Arg[1]}
			if other, ok := s.appends[id]; ok {
				j.undecided(s.key, []int64{other.ID, op.ID}, "the workload uses number %d of session %d twice", id.n, id.session)
				good = false
			}
			s.appends[id] = op
			if op.Outcome == history.OK {
				s.acked = append(s.acked, op)
			}
		case op.F == "read" && len(op.Result)%2 == 0:
			if op.Outcome == history.OK {
				s.reads = append(s.reads, op)
			}
		default:
			j.malformed(op)
			good = false
		}
	}
	slices.SortFunc(s.acked, func(a, b *history.Op) int { return cmp.Compare(a.Return, b.Return) })
	slices.SortStableFunc(s.reads, func(a, b *history.Op) int { return cmp.Compare(len(a.Result), len(b.Result)) })
	if len(s.reads) == 0 && len(s.acked) > 0 {
		j.undecided(s.key, nil, "nobody read what %d appends left", len(s.acked))
		good = false
	}
	return good
}

// content checks the longest read, and that the others are prefixes of it.
func (s *sessionList) content(j *judge) {
	if len(s.reads) == 0 {
		return
	}
	longest := s.reads[len(s.reads)-1]
	for _, r := range s.reads {
		if !slices.Equal(r.Result, longest.Result[:len(r.Result)]) {
			j.fail(s.key, []int64{r.ID, longest.ID}, "two reads disagree: %v and %v", r, longest)
		}
	}
	times := map[numbered]int{}
	top := map[int64]numbered{}
	for k := 0; k < len(longest.Result); k += 2 {
		id := numbered{longest.Result[k], longest.Result[k+1]}
		ids := []int64{longest.ID}
		op, ok := s.appends[id]
		if ok {
			ids = append(ids, op.ID)
		}
		times[id]++
		before, began := top[id.session]
		switch {
		case !ok:
			j.fail(s.key, ids, "number %d of session %d was never sent", id.n, id.session)
		case times[id] == 2:
			j.fail(s.key, ids, "number %d of session %d was applied twice: %v", id.n, id.session, op)
		case op.Outcome == history.Fail:
			j.fail(s.key, ids, "number %d of session %d failed and was applied: %v", id.n, id.session, op)
		case times[id] == 1 && began && before.n > id.n:
			j.fail(s.key, ids, "number %d of session %d was applied after %d", id.n, id.session, before.n)
		}
		if !began || id.n > before.n {
			top[id.session] = id
		}
	}
}

// order looks for contradictions as List does, each pair being an element.
func (s *sessionList) order(j *judge, ops []*history.Op) {
	elements := map[numbered]int64{}
	pairs := func(v []int64) []int64 {
		var out []int64
		for k := 0; k < len(v); k += 2 {
			id := numbered{v[k], v[k+1]}
			if _, ok := elements[id]; !ok {
				elements[id] = int64(len(elements))
			}
			out = append(out, elements[id])
		}
		return out
	}
	l := &lists{by: map[string]*list{}}
	var said []*history.Op // the operations as they are told
	for _, op := range ops {
		if op.Open() && op.F == "read" {
			continue
		}
		as := *op
		as.Arg, as.Result = pairs(op.Arg), pairs(op.Result)
		l.ops, said = append(l.ops, &as), append(said, op)
	}
	l.index(j)
	l.ops = said
	l.order(j)
}

// lost looks in each read for what had been acknowledged before it began, and
// for what did not begin before it ended.
func (s *sessionList) lost(j *judge) {
	place := map[numbered]int{} // in the longest read
	if len(s.reads) > 0 {
		longest := s.reads[len(s.reads)-1]
		for k := 0; k < len(longest.Result); k += 2 {
			place[numbered{longest.Result[k], longest.Result[k+1]}] = k
		}
	}
	byTime := slices.Clone(s.reads)
	slices.SortFunc(byTime, func(a, b *history.Op) int { return cmp.Compare(a.Invoke, b.Invoke) })
	next, furthest := 0, -1 // the furthest place of what was acknowledged
	var who *history.Op
	for _, r := range byTime {
		for ; next < len(s.acked) && s.acked[next].Return < r.Invoke; next++ {
			op := s.acked[next]
			k, ok := place[numbered{op.Arg[0], op.Arg[1]}]
			switch {
			case !ok:
				j.fail(s.key, []int64{op.ID, r.ID}, "acknowledged number %d of session %d is lost: %v, and later %v", op.Arg[1], op.Arg[0], op, r)
			case k > furthest:
				furthest, who = k, op
			}
		}
		if furthest >= len(r.Result) {
			j.fail(s.key, []int64{who.ID, r.ID}, "a read misses what was acknowledged before it: %v, and later %v", who, r)
		}
		for k := 0; k < len(r.Result); k += 2 {
			op := s.appends[numbered{r.Result[k], r.Result[k+1]}]
			if op != nil && op.Invoke > r.Return {
				j.fail(s.key, []int64{r.ID, op.ID}, "a read saw what had not begun: %v, and later %v", r, op)
			}
		}
	}
}
