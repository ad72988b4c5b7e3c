package check

import (
	"slices"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Register checks that reads, writes and compare-and-sets of single keys are
// linearizable. It searches an order for each key; a compare-and-set that was
// refused is a read that saw another value.
type Register struct{}

// Name is "register".
func (Register) Name() string { return "register" }

// Check judges.
func (Register) Check(ops []*history.Op, o Options) Result {
	return check("register", ops, o, func(j *judge) {
		keys, by := byKey(ops)
		parts := make([][]event, len(keys))
		weaker := 0
		for i, key := range keys {
			parts[i] = j.registerEvents(by[key])
			if slices.ContainsFunc(parts[i], func(e event) bool { return e.in.(*registerIn).blind }) {
				weaker++
			}
		}
		if weaker > 0 {
			j.note("refusals of %d registers with too many unseen writes were not looked at", weaker)
		}
		j.linearizable(registerModel(), keys, parts)
	})
}

type registerKind uint8

const (
	regWrite registerKind = iota
	regClear
	regRead
	regCAS    // from a to v
	regCreate // from absent to v
)

// registerIn is an operation on a register with its outcome.
type registerIn struct {
	kind    registerKind
	unknown bool
	done    bool  // a read found a value; a CAS or create was not refused
	blind   bool  // the result is not looked at, see dropSilent
	clears  int   // open clears that began before the end, see dropSilent
	a, v    int64 // v: the value written or read
}

// register is the state: a value, or absent; and how many open clears have been
// used up.
type register struct {
	present bool
	v       int64
	used    int
}

// without is the state after an open clear, if there is one for the operation.
func (s register) without(i *registerIn) (register, bool) {
	if s.used >= i.clears {
		return s, false
	}
	return register{used: s.used + 1}, true
}

func registerModel() model {
	return model{
		init: register{},
		step: func(state, in any) (bool, any) { return stepRegister(state, in.(*registerIn)) },
		open: func(in any) (any, bool) {
			open := *in.(*registerIn)
			if open.unknown {
				return in, true
			}
			if open.kind == regRead || (!open.done && (open.kind == regCAS || open.kind == regCreate)) {
				return nil, false
			}
			open.unknown = true
			return &open, true
		},
		pins: func(in any) (any, bool) {
			switch i := in.(*registerIn); {
			case i.kind == regClear, i.kind == regRead && !i.done:
				return register{}, true
			case i.unknown, !i.done && (i.kind == regCAS || i.kind == regCreate):
				return nil, false
			default:
				return register{present: true, v: i.v}, true
			}
		},
	}
}

func stepRegister(state any, i *registerIn) (bool, any) {
	s := state.(register)
	put := func(s register) (bool, any) { return true, register{present: true, v: i.v, used: s.used} }
	switch i.kind {
	case regWrite:
		return put(s)
	case regClear:
		return true, register{used: s.used}
	case regRead:
		if s.present && !i.done {
			return second(s.without(i))
		}
		return s.present == i.done && (!s.present || s.v == i.v), state
	}
	if i.blind {
		return true, state
	}
	holds := !s.present
	if i.kind == regCAS {
		holds = s.present && s.v == i.a
	}
	switch {
	case i.unknown && !holds, holds == i.done && !holds:
		return true, state
	case i.unknown, holds && i.done:
		return put(s)
	case i.kind == regCreate && i.done: // there is a value, unless it was cleared
		without, ok := s.without(i)
		_, after := put(without)
		return ok, after
	case i.kind == regCAS && !i.done: // it is what was wanted, unless it was cleared
		return second(s.without(i))
	default:
		return false, nil
	}
}

func second(s register, ok bool) (bool, any) { return ok, s }

// registerInput translates an operation, nil if it has no meaning.
func registerInput(op *history.Op) *registerIn {
	in := &registerIn{unknown: op.Open()}
	arg, result := 1, 0
	switch op.F {
	case "write":
		in.kind = regWrite
	case "clear":
		in.kind, arg = regClear, 0
	case "read":
		in.kind, arg, result = regRead, 0, len(op.Result)
		if in.done = result == 1; in.done {
			in.v = op.Result[0]
		}
	case "create":
		in.kind, result = regCreate, 1
	case "cas":
		in.kind, arg, result = regCAS, 2, 1
	default:
		return nil
	}
	if len(op.Arg) != arg || result > 1 || (!op.Open() && len(op.Result) != result) {
		return nil
	}
	if arg > 0 {
		in.v = op.Arg[arg-1]
	}
	if arg == 2 {
		in.a = op.Arg[0]
	}
	if result == 1 && in.kind != regRead && !in.unknown {
		in.done = op.Result[0] == 1
	}
	return in
}

// registerEvents are the events of one key: what failed is of no effect, and
// neither is a read without a result (CK2).
func (j *judge) registerEvents(ops []*history.Op) []event {
	events := make([]event, 0, len(ops))
	for _, op := range ops {
		if op.Outcome == history.Fail || (op.Open() && op.F == "read") {
			continue
		}
		in := registerInput(op)
		if in == nil {
			j.malformed(op)
			continue
		}
		events = append(events, event{op: op, call: op.Invoke, ret: op.Return, in: in})
	}
	return pruneRegister(events)
}

// maxSilent bounds the open writes of a key that nobody saw; with more the
// refusals that they could explain are not looked at.
const maxSilent = 5

// pruneRegister makes the search short without changing what it finds, where
// every value is written once.
//
//   - A write with an unknown outcome whose value was seen had taken effect by
//     the end of the first operation that saw it.
//   - So a compare-and-set or create with an unknown outcome whose value was seen
//     was not refused.
//   - A clear with an unknown outcome matters only where the register is then
//     found to be absent, and may be put off until just before: it is no event,
//     but what finds a value gone may use it up.
//   - A write whose value nobody saw can be left out: no operation can stand between
//     it and the next write, but for a refused compare-and-set, which wants the
//     value to be another. Such refusals keep it in. If that were too many, they
//     are not believed: a weaker check, but no false one.
func pruneRegister(events []event) []event {
	writes := map[int64]bool{}
	seen := map[int64]int64{} // value: end of the first that saw it
	from := map[int64]int64{} // what an open compare-and-set wrote: what it saw
	see := func(v int64, ret int64) {
		if at, ok := seen[v]; !ok || ret < at {
			seen[v] = ret
		}
	}
	refused, unknown := int64(-1), 0 // end of the last refusal; open operations
	for _, e := range events {
		in := e.in.(*registerIn)
		switch {
		case in.kind == regRead && in.done:
			see(in.v, e.ret)
		case in.kind == regRead:
		case in.kind == regClear:
			if in.unknown {
				unknown++
			}
		case writes[in.v]:
			return events // not unique: every order counts
		default:
			writes[in.v] = true
			switch {
			case in.unknown:
				unknown++
				if in.kind == regCAS {
					from[in.v] = in.a
				}
			case in.refused():
				refused = max(refused, e.ret)
			case in.kind == regCAS:
				see(in.a, e.ret)
			}
		}
	}
	if unknown == 0 {
		return events
	}
	seeThrough(seen, from, see)
	return dropSilent(events, seen, refused)
}

// seeThrough adds what was seen by compare-and-sets that are open, but whose own
// value was seen: they were not refused.
func seeThrough(seen, from map[int64]int64, see func(v, ret int64)) {
	for v := range from {
		ret, ok := seen[v]
		for steps := 0; ok && steps <= len(from); steps++ {
			if v, ok = from[v]; ok {
				see(v, ret)
			}
		}
	}
}

func dropSilent(events []event, seen map[int64]int64, refused int64) []event {
	silent, first := 0, int64(history.Never)
	clears, cleared := 0, int64(history.Never) // open ones, when the first began
	out := events[:0]
	var open []event // silent, but of use for a refusal
	for _, e := range events {
		in := e.in.(*registerIn)
		switch ret, ok := seen[in.v]; {
		case !in.unknown:
			out = append(out, e)
		case in.kind == regClear:
			clears++
			cleared = min(cleared, e.op.Invoke)
		case ok:
			if ret >= e.op.Invoke { // else it is wrong anyhow
				e.ret = ret
			}
			applied := *in
			applied.unknown, applied.done = false, true
			e.in = &applied
			out = append(out, e)
		case e.op.Invoke <= refused:
			silent++
			first = min(first, e.op.Invoke)
			open = append(open, e)
		}
	}
	if silent <= maxSilent {
		out = append(out, open...)
		first = history.Never
	}
	for i, e := range out {
		in := *e.in.(*registerIn)
		in.blind = e.op.Return >= first && in.refused() && e.op.Return != history.Never
		if e.ret >= cleared {
			in.clears = clears
		}
		out[i].in = &in
	}
	return out
}

// refused says that a compare-and-set or create surely found its condition not
// to hold.
func (in *registerIn) refused() bool {
	return !in.unknown && !in.done && (in.kind == regCAS || in.kind == regCreate)
}
