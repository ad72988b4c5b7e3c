package check

import (
	"cmp"
	"slices"
	"sort"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Map checks maps with entries that many put, remove, get and scan. A scan sees
// one instant. It looks for contradictions between who saw what and who ended
// before whom, in maps of any size; and where a map has at most mapSlots user
// keys it searches an order of all operations, which finds all that is wrong.
type Map struct{}

// Name is "map".
func (Map) Name() string { return "map" }

// Check judges.
func (Map) Check(ops []*history.Op, o Options) Result {
	return check("map", ops, o, func(j *judge) {
		keys, by := byKey(ops)
		var small []string
		var parts [][]event
		big := 0
		for _, key := range keys {
			if j.late("looking at maps") {
				return
			}
			m := j.mapOf(key, by[key])
			if m.unfit {
				continue
			}
			from, to := m.contradictions(j)
			if j.failed() {
				continue
			}
			if len(m.slots) <= mapSlots {
				small, parts = append(small, key), append(parts, m.events(from, to))
			} else {
				big++
			}
		}
		if big > 0 {
			j.note("no order was searched for %d maps of more than %d user keys", big, mapSlots)
		}
		if !j.failed() {
			j.linearizable(mapModel(), small, parts)
		}
	})
}

// contradictions looks for cycles; if there are none it returns when each of the
// inputs took effect, from and to. Maps are apart: together they are in order if
// each is.
func (m *mapOps) contradictions(j *judge) (from, to []int64) {
	if j.failed() {
		return nil, nil
	}
	ops := make([]*history.Op, len(m.inputs))
	for n := range m.inputs {
		ops[n] = m.inputs[n].op
	}
	g := newGraph(ops)
	m.edges(g)
	cycles := g.cycles(3)
	for _, cycle := range cycles {
		ids, text := g.describe(cycle)
		j.fail(m.key, ids, "the operations contradict each other:%s", text)
	}
	if len(cycles) > 0 {
		return nil, nil
	}
	return g.bounds()
}

// mapSlots is how many user keys a state of the search holds.
const mapSlots = 16

// mapValues holds the number of each slot's value; 0 is absent.
type mapValues [mapSlots]int32

// mapState is the values and how many open removals have been used up (see
// events).
type mapState struct {
	v    mapValues
	used [mapSlots]uint8
}

// seenValue is what an operation saw of one slot.
type seenValue struct {
	slot  int
	value int32 // 0 is absent
}

// mapIn is an operation on a map.
type mapIn struct {
	write bool
	scan  bool
	slot  int       // of what is not a scan
	value int32     // what a write leaves, 0 for a removal
	all   mapValues // what a read saw
	open  *openRemovals
	end   int64 // of a read
}

// openRemovals are the removals of each slot with an unknown outcome: when the
// first began, and how many there are.
type openRemovals struct {
	first [mapSlots]int64
	count [mapSlots]uint8
}

// mapOps is one map: its operations in order of Invoke, and the numbers of its
// user keys and values.
type mapOps struct {
	key    string
	ops    []*history.Op
	slots  map[int64]int
	values map[int64]int32 // of puts; value 0 is kept for "absent"
	puts   []*history.Op   // of each value; 0 is nil
	nodes  []int32         // of each value's put in inputs; -1 where it has none
	inputs []mapInput
	unfit  bool // a value was put twice
}

// mapInput is an operation translated: what it wrote or saw.
type mapInput struct {
	op    *history.Op
	write bool
	slot  int
	value int32
	saw   []seenValue // a get one, a scan every slot that was present
	scan  bool
}

func (m *mapOps) slot(userKey int64) int {
	n, ok := m.slots[userKey]
	if !ok {
		n = len(m.slots)
		m.slots[userKey] = n
	}
	return n
}

func (j *judge) mapOf(key string, ops []*history.Op) *mapOps {
	m := &mapOps{key: key, slots: map[int64]int{}, values: map[int64]int32{}, puts: []*history.Op{nil}}
	m.ops = slices.Clone(ops)
	slices.SortFunc(m.ops, func(a, b *history.Op) int { return cmp.Or(cmp.Compare(a.Invoke, b.Invoke), cmp.Compare(a.ID, b.ID)) })
	for _, op := range m.ops { // first all puts, so that reads know them
		if op.F != "put" || len(op.Arg) != 2 {
			continue
		}
		if n, twice := m.values[op.Arg[1]]; twice {
			j.undecided(key, []int64{m.puts[n].ID, op.ID}, "the workload puts %d twice", op.Arg[1])
			m.unfit = true
			continue
		}
		m.slot(op.Arg[0])
		m.values[op.Arg[1]] = int32(len(m.puts))
		m.puts = append(m.puts, op)
	}
	for _, op := range m.ops {
		read := op.F == "get" || op.F == "scan"
		switch {
		case op.Outcome == history.Fail, op.Open() && read:
		case op.F == "put" && len(op.Arg) == 2:
			m.inputs = append(m.inputs, mapInput{op: op, write: true, slot: m.slot(op.Arg[0]), value: m.values[op.Arg[1]]})
		case op.F == "remove" && len(op.Arg) == 1:
			m.inputs = append(m.inputs, mapInput{op: op, write: true, slot: m.slot(op.Arg[0])})
		case op.F == "get" && len(op.Arg) == 1 && len(op.Result) <= 1:
			in := mapInput{op: op, saw: []seenValue{{slot: m.slot(op.Arg[0])}}}
			if len(op.Result) == 1 {
				in.saw[0].value = j.mapValue(m, op, op.Arg[0], op.Result[0])
			}
			m.inputs = append(m.inputs, in)
		case op.F == "scan" && len(op.Result)%2 == 0:
			m.inputs = append(m.inputs, j.mapScan(m, op))
		default:
			j.malformed(op)
		}
	}
	return m
}

func (j *judge) mapScan(m *mapOps, op *history.Op) mapInput {
	in := mapInput{op: op, scan: true}
	seen := map[int64]bool{}
	for k := 0; k < len(op.Result); k += 2 {
		userKey, v := op.Result[k], op.Result[k+1]
		if seen[userKey] {
			j.fail(m.key, []int64{op.ID}, "a scan has user key %d twice: %v", userKey, op)
		}
		seen[userKey] = true
		in.saw = append(in.saw, seenValue{slot: m.slot(userKey), value: j.mapValue(m, op, userKey, v)})
	}
	return in
}

// mapValue is the number of a value that was read, 0 if that is impossible,
// which is noted.
func (j *judge) mapValue(m *mapOps, op *history.Op, userKey, v int64) int32 {
	n, ok := m.values[v]
	switch {
	case !ok:
		j.fail(m.key, []int64{op.ID}, "value %d was never put: %v", v, op)
		return 0
	case m.puts[n].Arg[0] != userKey:
		j.fail(m.key, []int64{m.puts[n].ID, op.ID}, "value %d is under user key %d and was put under another: %v", v, userKey, m.puts[n])
		return 0
	case m.puts[n].Outcome == history.Fail:
		j.fail(m.key, []int64{m.puts[n].ID, op.ID}, "value %d is seen, and its put failed: %v", v, m.puts[n])
		return 0
	}
	return n
}

// slotWrites are the writes of one slot by Invoke, and for each a helper that
// comes before it and all later ones.
type slotWrites struct {
	writes  []int32 // in inputs
	chain   []int32
	removes bool
}

// edges adds what the reads of a map say. A reader of a value comes after its
// put and before every write of the entry that began after the put had ended,
// since such a write follows the put in any order. A reader of nothing comes
// before all writes of an entry that nobody removes.
func (m *mapOps) edges(g *graph) {
	slots := make([]slotWrites, len(m.slots))
	m.nodes = slices.Repeat([]int32{-1}, len(m.puts))
	for n, in := range m.inputs {
		if in.write {
			s := &slots[in.slot]
			s.writes, s.removes = append(s.writes, int32(n)), s.removes || in.value == 0
			m.nodes[in.value] = int32(n)
		}
	}
	applied := m.seenPuts()
	for k := range slots {
		s := &slots[k]
		s.chain = make([]int32, len(s.writes)+1)
		for n := range s.chain {
			s.chain[n] = g.node()
		}
		for n, w := range s.writes {
			g.add(s.chain[n], s.chain[n+1], edgeLink)
			if m.inputs[w].op.Outcome == history.OK || applied[m.inputs[w].value] {
				g.add(s.chain[n], w, edgeLink)
			}
		}
	}
	saw := make([]int32, len(m.slots)) // by a scan, which says something about every slot
	for n, in := range m.inputs {
		switch {
		case in.write:
		case in.scan:
			clear(saw)
			for _, v := range in.saw {
				saw[v.slot] = v.value
			}
			for slot := range saw {
				m.readEdges(g, &slots[slot], int32(n), saw[slot])
			}
		default:
			m.readEdges(g, &slots[in.saw[0].slot], int32(n), in.saw[0].value)
		}
	}
}

// seenPuts are the values that were seen: their puts took effect.
func (m *mapOps) seenPuts() []bool {
	seen := make([]bool, len(m.puts))
	for _, in := range m.inputs {
		for _, v := range in.saw {
			seen[v.value] = true
		}
	}
	seen[0] = false // "absent" is nobody's value
	return seen
}

func (m *mapOps) readEdges(g *graph, s *slotWrites, reader, value int32) {
	if value == 0 {
		if !s.removes {
			g.add(reader, s.chain[0], edgeRW)
		}
		return
	}
	put := m.puts[value]
	g.add(m.nodes[value], reader, edgeWR)
	if put.Return != history.Never {
		after := sort.Search(len(s.writes), func(n int) bool { return m.inputs[s.writes[n]].op.Invoke > put.Return })
		g.add(reader, s.chain[after], edgeRW)
	}
}

// events are those of a search, within the times of contradictions. An open put
// that nobody saw is left out, for nothing can stand between it and the next
// write of the entry. An open removal matters
// only where the entry is then found absent, and may be put off until just
// before: it is no event, but a read that finds a present entry absent uses it
// up, if one had begun by the read's end. (It may then come before what ended
// before it began: a little less is found, and nothing wrongly.)
func (m *mapOps) events(from, to []int64) []event {
	seen := m.seenPuts()
	open := &openRemovals{}
	for k := range open.first {
		open.first[k] = history.Never
	}
	for _, in := range m.inputs {
		if in.write && in.value == 0 && in.op.Open() {
			open.first[in.slot] = min(open.first[in.slot], in.op.Invoke)
			open.count[in.slot] = max(open.count[in.slot]+1, open.count[in.slot])
		}
	}
	events := make([]event, 0, len(m.inputs))
	for n, in := range m.inputs {
		if in.op.Open() && !seen[in.value] {
			continue
		}
		i := &mapIn{write: in.write, slot: in.slot, value: in.value, scan: in.scan, open: open, end: in.op.Return}
		if !in.write {
			in.values(&i.all)
			if !in.scan {
				i.slot = in.saw[0].slot
			}
		}
		events = append(events, event{op: in.op, call: from[n], ret: to[n], in: i})
	}
	return events
}

// values fills in what a read saw.
func (in *mapInput) values(s *mapValues) {
	for _, v := range in.saw {
		s[v.slot] = v.value
	}
}

func mapModel() model {
	return model{
		init: mapState{},
		step: func(state, in any) (bool, any) {
			s, i := state.(mapState), in.(*mapIn)
			switch {
			case i.write:
				s.v[i.slot] = i.value
				return true, s
			case !i.scan:
				return i.sees(&s, i.slot), s
			case s.v == i.all:
				return true, state
			}
			for slot := range mapSlots {
				if !i.sees(&s, slot) {
					return false, nil
				}
			}
			return true, s
		},
		open: func(in any) (any, bool) { return in, in.(*mapIn).write },
		pins: func(in any) (any, bool) {
			i := in.(*mapIn)
			return mapState{v: i.all}, i.scan
		},
	}
}

// sees says whether a read fits the state of a slot, with an open removal if
// it takes one.
func (i *mapIn) sees(s *mapState, slot int) bool {
	switch {
	case s.v[slot] == i.all[slot]:
		return true
	case i.all[slot] != 0 || i.open.first[slot] > i.end || s.used[slot] == i.open.count[slot]:
		return false
	}
	s.v[slot] = 0
	s.used[slot]++
	return true
}
