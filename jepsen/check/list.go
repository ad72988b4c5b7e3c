package check

import "github.com/keelstate/keelstate/jepsen/history"

// List checks lists that many append unique elements to, in operations on one
// list or at once on several: all reads of a list are prefixes of one order,
// nothing in it is lost, comes twice, was refused or never appended, an
// operation's elements stay together and are seen together, and what was seen
// by whom, who followed whom and who ended before whom do not contradict each
// other (cycles, as Elle finds them; the real-time order is part of it).
type List struct{}

// Name is "list".
func (List) Name() string { return "list" }

// Check judges.
func (List) Check(ops []*history.Op, o Options) Result {
	return check("list", ops, o, func(j *judge) {
		l := &lists{by: map[string]*list{}}
		for _, op := range ops {
			if op.Outcome == history.Fail || op.Outcome == history.OK || op.F == "append" {
				l.ops = append(l.ops, op)
			}
		}
		l.index(j)
		for _, key := range l.keys {
			l.by[key].content(j, l.ops)
		}
		if j.failed() || j.late("comparing reads of lists") {
			return
		}
		l.order(j)
	})
}

// element is where an element was appended.
type element struct {
	op    int32 // in lists.ops
	at, n int32 // its place among the elements that the operation appended
}

// listRead is one list as one operation saw it.
type listRead struct {
	op     int32
	result []int64
}

// list is one list.
type list struct {
	key     string
	appends map[int64]element
	reads   []listRead
	longest []int64
	full    int32 // who read it
}

type lists struct {
	ops  []*history.Op
	keys []string
	by   map[string]*list
	// applied are the appends that took effect: they were acknowledged, or one
	// of their elements was seen.
	applied []bool
}

func (l *lists) of(key string) *list {
	at := l.by[key]
	if at == nil {
		at = &list{key: key, appends: map[int64]element{}}
		l.by[key], l.keys = at, append(l.keys, key)
	}
	return at
}

// eachPart calls f for each list of an operation.
func eachPart(op *history.Op, f func(key string, arg, result []int64)) {
	if len(op.Parts) == 0 {
		f(op.Key, op.Arg, op.Result)
	}
	for _, p := range op.Parts {
		f(p.Key, p.Arg, p.Result)
	}
}

func (l *lists) index(j *judge) {
	for i, op := range l.ops {
		switch op.F {
		case "append":
			eachPart(op, func(key string, arg, _ []int64) {
				at := l.of(key)
				for n, v := range arg {
					if e, ok := at.appends[v]; ok {
						j.undecided(key, []int64{l.ops[e.op].ID, op.ID}, "the workload appends %d twice", v)
					}
					at.appends[v] = element{op: int32(i), at: int32(n), n: int32(len(arg))}
				}
			})
		case "read":
			if op.Outcome != history.OK {
				continue
			}
			eachPart(op, func(key string, _, result []int64) {
				at := l.of(key)
				at.reads = append(at.reads, listRead{op: int32(i), result: result})
				if len(at.reads) == 1 || len(result) > len(at.longest) {
					at.longest, at.full = result, int32(i)
				}
			})
		default:
			j.malformed(op)
		}
	}
}

// content checks the elements of the longest read, and that all others are a
// prefix of it.
func (l *list) content(j *judge, ops []*history.Op) {
	full := []int64{}
	if len(l.reads) > 0 {
		full = append(full, ops[l.full].ID)
	}
	place := make(map[int64]int, len(l.longest))
	for i, v := range l.longest {
		e, ok := l.appends[v]
		switch before, twice := place[v]; {
		case twice:
			j.fail(l.key, full, "element %d is twice in the list, at %d and %d", v, before, i)
		case !ok:
			j.fail(l.key, full, "element %d was never appended", v)
		case ops[e.op].Outcome == history.Fail:
			j.fail(l.key, append(full, ops[e.op].ID), "element %d is in the list, and its append failed: %v", v, ops[e.op])
		case e.at > 0 && (i == 0 || l.appends[l.longest[i-1]] != element{e.op, e.at - 1, e.n}):
			j.fail(l.key, append(full, ops[e.op].ID), "element %d does not follow the one before it of the same append: %v", v, ops[e.op])
		}
		place[v] = i
	}
	latest := int32(-1) // who began last
	for _, r := range l.reads {
		for i, v := range r.result {
			if v != l.longest[i] {
				j.fail(l.key, append(full, ops[r.op].ID), "two reads disagree at place %d: %d and %d: %v", i, v, l.longest[i], ops[r.op])
				break
			}
		}
		if n := len(r.result); n > 0 {
			if e, ok := l.appends[r.result[n-1]]; ok && e.at+1 < e.n {
				j.fail(l.key, []int64{ops[r.op].ID, ops[e.op].ID}, "a read saw a part of one append only: %v", ops[r.op])
			}
		}
		if latest < 0 || ops[r.op].Invoke > ops[latest].Invoke {
			latest = r.op
		}
	}
	if latest < 0 {
		return
	}
	for v, e := range l.appends {
		if _, ok := place[v]; !ok && ops[e.op].Outcome == history.OK && ops[e.op].Return < ops[latest].Invoke {
			j.fail(l.key, []int64{ops[e.op].ID, ops[latest].ID}, "acknowledged element %d is lost: %v, and later %v", v, ops[e.op], ops[latest])
		}
	}
}

// order looks for contradictions.
func (l *lists) order(j *judge) {
	g := newGraph(l.ops)
	l.applied = make([]bool, len(l.ops))
	for i, op := range l.ops {
		l.applied[i] = op.F == "append" && op.Outcome == history.OK
	}
	for _, at := range l.by {
		for _, v := range at.longest {
			l.applied[at.appends[v].op] = true
		}
	}
	unread := 0
	for _, key := range l.keys {
		unread += l.by[key].edges(g, l.applied)
	}
	for _, cycle := range g.cycles(5) {
		ids, text := g.describe(cycle)
		j.fail("", ids, "the operations contradict each other:%s", text)
	}
	if unread > 0 {
		j.note("%d lists were never read", unread)
	}
}

// edges adds what a list says about the order; 1 if nobody read it.
func (l *list) edges(g *graph, applied []bool) (unread int) {
	if len(l.reads) == 0 {
		return 1
	}
	writer := func(i int) int32 { return l.appends[l.longest[i]].op }
	for i := 1; i < len(l.longest); i++ {
		g.add(writer(i-1), writer(i), edgeWW)
	}
	end := g.node() // after all that was seen, before all that was not
	n := len(l.longest)
	if n > 0 {
		g.add(writer(n-1), end, edgeWW)
	}
	for _, r := range l.reads {
		if len(r.result) > 0 {
			g.add(writer(len(r.result)-1), r.op, edgeWR)
		}
		if len(r.result) < n {
			g.add(r.op, writer(len(r.result)), edgeRW)
		} else {
			g.add(r.op, end, edgeRW)
		}
	}
	seen := make(map[int64]bool, n)
	for _, v := range l.longest {
		seen[v] = true
	}
	for v, e := range l.appends {
		if !seen[v] && applied[e.op] {
			g.add(end, e.op, edgeLink)
		}
	}
	return 0
}
