package metamorphic

import (
	"fmt"
	"strings"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// Write is a write command before it is encoded.
type Write struct {
	Stamp    uint64
	Revision base.Revision
	Requests []*raftfsm.Request
}

// Step is one entry of the log: its bytes, and what the model does with it.
type Step struct {
	Entry raftfsm.Entry
	Text  string
	// Write is set for writes, Predict for other commands; both nil for entries
	// that only move the index.
	Write   *Write
	Predict func(m *Model) error
	// Mark is set for hash marks.
	Mark uint64
}

// Log is a generated log and the shard that it founds.
type Log struct {
	Init  raftfsm.Init
	Steps []Step
}

// Entries returns the entries of the log.
func (l *Log) Entries() []raftfsm.Entry {
	var out []raftfsm.Entry
	for i := range l.Steps {
		out = append(out, l.Steps[i].Entry)
	}
	return out
}

// client is the generator's idea of one session.
type client struct {
	id   base.SessionID
	next uint64
	prev uint64
	sent []*raftfsm.Request // whole requests, also those of which a part was sent
}

type generator struct {
	*rapid.T
	init     raftfsm.Init
	decls    []state.Declaration
	clients  []*client
	stamp    uint64
	revision base.Revision
	passed   uint64 // newest barrier
	log      *Log
}

// Generate draws a log of about n entries.
func Generate(t *rapid.T, n int) *Log {
	m := rapid.SampledFrom([]int{1, 6, 130}).Draw(t, "M")
	g := &generator{T: t, decls: Declarations(), stamp: 1000, log: &Log{}}
	g.init = raftfsm.Init{Group: 4, Range: keygroup.FullRange(m), M: m, Epoch: 2, Birth: 77, Incarnation: 1, Sequence: 10, ClockMs: 900}
	if m > 1 && rapid.Bool().Draw(t, "part of the key groups") {
		g.init.Range = keygroup.Range{Lo: 0, Hi: keygroup.Group(m*3/4 + 1)}
	}
	g.log.Init = g.init
	for id := base.SessionID(0); id < 4; id++ {
		g.clients = append(g.clients, &client{id: id, next: 1})
	}
	g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendInit(nil, g.init)}, Text: "init", Predict: func(*Model) error { return nil }})
	g.declare(g.decls)
	for range n {
		g.step()
	}
	return g.log
}

func (g *generator) draw(label string, n int) int { return rapid.IntRange(0, n-1).Draw(g.T, label) }

// chance is true once in n draws, and false when shrunk.
func (g *generator) chance(label string, n int) bool { return g.draw(label, n) == n-1 }

func (g *generator) add(s Step) {
	s.Entry.Index = uint64(len(g.log.Steps)) + 1
	s.Entry.Term = 1 + s.Entry.Index/20
	g.log.Steps = append(g.log.Steps, s)
}

func (g *generator) step() {
	g.stamp = uint64(max(0, int(g.stamp)+rapid.IntRange(-20, 100).Draw(g.T, "stamp")))
	if g.chance("revision", 4) {
		g.revision++
	}
	switch k := g.draw("command", 21); k {
	default:
		g.write()
	case 13:
		stamp := g.stamp
		g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendTick(nil, stamp)}, Text: "tick",
			Predict: func(m *Model) error { m.Clock = max(m.Clock, stamp); return nil }})
	case 14:
		stamp := g.stamp
		g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendTermStart(nil, stamp)}, Text: "term start",
			Predict: func(m *Model) error { m.Clock = max(m.Clock, stamp); return nil }})
	case 15:
		g.redeclare()
	case 16:
		if g.chance("drop", 2) {
			ids := []engine.FamilyID{g.decls[g.draw("dropped", len(g.decls))].ID}
			g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendDrop(nil, ids)}, Text: fmt.Sprint("drop ", ids),
				Predict: func(m *Model) error { m.Drop(ids); return nil }})
		}
	case 17:
		g.forget()
	case 18:
		if g.chance("configuration", 2) {
			g.add(Step{Entry: raftfsm.Entry{Configuration: []byte{byte(len(g.log.Steps))}}, Text: "configuration"})
		} else {
			g.add(Step{Text: "no command"})
		}
	case 19:
		mark := uint64(len(g.log.Steps)) + 1
		g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendHashMark(nil, mark)}, Text: "hash mark", Mark: mark,
			Predict: func(*Model) error { return nil }})
	case 20:
		g.barrier()
	}
}

// barrier draws one that is next, was passed, or is of another epoch.
func (g *generator) barrier() {
	if g.chance("next barrier", 2) {
		g.passed++
	}
	b := raftfsm.Barrier{Number: g.passed, Epoch: g.init.Epoch}
	if g.chance("other epoch", 8) {
		b.Epoch++
	}
	if !g.chance("missed", 4) {
		b.Attempt, b.Uploader = uint64(len(g.log.Steps)), "n1"
	}
	g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendBarrier(nil, b)}, Text: fmt.Sprintf("barrier %+v", b),
		Predict: func(m *Model) error { return m.Pass(b) }})
}

func (g *generator) declare(ds []state.Declaration) {
	g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendDeclare(nil, ds)}, Text: fmt.Sprint("declare ", len(ds)),
		Predict: func(m *Model) error { return m.Declare(ds) }})
}

// redeclare declares a state again, differently, or a new one.
func (g *generator) redeclare() {
	d := g.decls[g.draw("declared", len(g.decls))]
	switch g.draw("how", 3) {
	case 1:
		d.Name += "x"
	case 2:
		d.ID = engine.FamilyID(len(g.decls) + 1)
		d.Name = fmt.Sprintf("s%d", d.ID)
		g.decls = append(g.decls, d)
	}
	g.declare([]state.Declaration{d})
}

func (g *generator) forget() {
	rev := g.revision + base.Revision(g.draw("revision of forgetting", 3))
	var ids []base.SessionID
	if c := g.clients[g.draw("forgotten", len(g.clients))]; c.id != 0 {
		ids = append(ids, c.id)
		if g.chance("goes on", 2) {
			// The client opens a new session; else it goes on with the ended one.
			c.id, c.next, c.prev, c.sent = c.id+10, 1, 0, nil
		}
	}
	g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendForget(nil, rev, ids)}, Text: fmt.Sprint("forget ", ids),
		Predict: func(m *Model) error { m.Forget(rev, ids); return nil }})
}

func (g *generator) write() {
	w := &Write{Stamp: g.stamp, Revision: g.revision}
	var encoded [][]byte
	var text strings.Builder
	for range rapid.IntRange(1, 4).Draw(g.T, "requests") {
		q := g.request()
		b, err := raftfsm.AppendRequest(nil, q)
		if err != nil {
			g.Fatalf("encoding %+v: %v", q, err)
		}
		w.Requests, encoded = append(w.Requests, q), append(encoded, b)
		fmt.Fprintf(&text, "\n    session %d seq %d prev %d floor %d atomic %t epoch %d pre %+v", q.Session, q.Seq, q.Prev, q.Floor, q.Atomic, q.Epoch, q.Preconditions)
		for _, mu := range q.Mutations {
			fmt.Fprintf(&text, "\n      %d: %+v", mu.Ordinal, mu.Mutation)
		}
	}
	g.add(Step{Entry: raftfsm.Entry{Command: raftfsm.AppendWrite(nil, w.Stamp, w.Revision, encoded...)},
		Text: fmt.Sprintf("write at %d revision %d%s", w.Stamp, w.Revision, text.String()), Write: w})
}

// request draws a new request, an old one again, or a part of either.
func (g *generator) request() *raftfsm.Request {
	c := g.clients[g.draw("client", len(g.clients))]
	var q raftfsm.Request
	if len(c.sent) > 0 && g.chance("again", 3) {
		q = *c.sent[g.draw("which", len(c.sent))]
		if g.chance("whole again", 2) {
			q.Floor = 0
		}
	} else {
		q = *g.fresh(c)
	}
	if len(q.Mutations) > 1 && g.chance("part", 3) {
		var some []raftfsm.Mutation
		for _, mu := range q.Mutations {
			if g.chance("in part", 2) {
				some = append(some, mu)
			}
		}
		q.Mutations = some
	}
	switch g.draw("fault", 30) {
	case 27:
		q.Epoch++
	case 28:
		q.Incarnation++
	case 29:
		q.Prev++
	}
	return &q
}

func (g *generator) fresh(c *client) *raftfsm.Request {
	q := &raftfsm.Request{Epoch: g.init.Epoch, Incarnation: g.init.Incarnation, Atomic: g.chance("atomic", 6)}
	for range rapid.IntRange(0, 4).Draw(g.T, "mutations") {
		ordinal := uint32(0)
		if n := len(q.Mutations); n > 0 {
			ordinal = q.Mutations[n-1].Ordinal + 1
		}
		if g.chance("gap", 4) {
			ordinal += 3
		}
		q.Mutations = append(q.Mutations, raftfsm.Mutation{Ordinal: ordinal, Mutation: g.mutation()})
	}
	if g.chance("precondition", 4) {
		for range rapid.IntRange(1, 2).Draw(g.T, "preconditions") {
			q.Preconditions = append(q.Preconditions, g.precondition())
		}
	}
	if c.id == 0 {
		return q
	}
	q.Session, q.Seq, q.Prev = c.id, c.next+uint64(g.draw("skipped numbers", 3)/2), c.prev
	if len(c.sent) > 0 && g.chance("floor", 3) {
		q.Floor = c.sent[g.draw("lowest open", len(c.sent))].Seq
	}
	c.next, c.prev = q.Seq+1, q.Seq
	c.sent = append(c.sent, q)
	return q
}

// place draws where a mutation or precondition aims: a state, a key in the
// shard's range (nearly always) and a namespace.
func (g *generator) place() (d *state.Declaration, key []byte, group keygroup.Group, ns state.Namespace) {
	d = &g.decls[g.draw("state", len(g.decls))]
	key = []byte(rapid.SampledFrom([]string{"a", "", "b", "a\x00", "\x00\x01", "c", "dd", "ü"}).Draw(g.T, "key"))
	group, err := keygroup.GroupOfKey(keygroup.String, key, g.init.M)
	if err != nil {
		g.Fatal(err)
	}
	if !g.init.Range.Contains(group) && !g.chance("outside", 10) {
		key = []byte("a") // may be outside too; then the request is refused
		group, _ = keygroup.GroupOfKey(keygroup.String, key, g.init.M)
	}
	return d, key, group, g.namespace()
}

func (g *generator) namespace() state.Namespace {
	n := g.draw("namespace", 5)
	if n == 0 {
		return state.Namespace{}
	}
	return state.Namespace{Set: true, Bytes: []byte([]string{"", "n", "n\x00", "m"}[n-1])}
}

func (g *generator) value(t keygroup.Type) []byte {
	var v any
	switch t {
	case keygroup.Int64:
		v = rapid.OneOf(rapid.Int64Range(-3, 3), rapid.Int64()).Draw(g.T, "int64")
	case keygroup.Float64:
		v = rapid.OneOf(rapid.SampledFrom([]float64{0, 1, -1.5, 0.1, 1e16}), rapid.Float64()).Draw(g.T, "float64")
	default:
		v = []byte(rapid.SampledFrom([]string{"x", "", "\x00", "\xff\x00", "y", "zz"}).Draw(g.T, "bytes"))
	}
	b, err := keygroup.Encode(t, v)
	if err != nil {
		g.Fatal(err)
	}
	return b
}

func (g *generator) userKey() []byte {
	return []byte(rapid.SampledFrom([]string{"u", "", "\x00", "u\x00", "v"}).Draw(g.T, "user key"))
}

// mutation draws an operation, which nearly always fits the state's kind.
func (g *generator) mutation() state.Mutation {
	d, key, group, ns := g.place()
	ops := map[state.Kind][]state.Op{
		state.KindValue:       {state.OpValuePut, state.OpValuePut, state.OpClear},
		state.KindList:        {state.OpListAdd, state.OpListAdd, state.OpListUpdate, state.OpClear, state.OpMergeNamespaces},
		state.KindMap:         {state.OpMapPut, state.OpMapPut, state.OpMapRemove, state.OpClear},
		state.KindReducing:    {state.OpAdd, state.OpAdd, state.OpMergeNamespaces, state.OpClear},
		state.KindAggregating: {state.OpAdd, state.OpAdd, state.OpMergeNamespaces, state.OpClear},
	}[d.Kind]
	m := state.Mutation{State: d.ID, Op: ops[g.draw("op", len(ops))], Group: group, Key: key, Namespace: ns}
	if g.chance("any op", 20) {
		m.Op = state.Op(1 + g.draw("op", 8))
	}
	n := rapid.IntRange(0, 3).Draw(g.T, "n")
	switch m.Op {
	case state.OpValuePut:
		m.Value = g.value(d.ValueType)
	case state.OpListAdd, state.OpListUpdate, state.OpAdd:
		for range n {
			e := g.value(d.ValueType)
			if g.chance("null element", 30) {
				e = nil
			}
			m.Elements = append(m.Elements, e)
		}
	case state.OpMapPut:
		for range n {
			e := state.Entry{UserKey: g.userKey(), Null: g.chance("null", 3)}
			if !e.Null {
				e.Value = g.value(d.ValueType)
			}
			m.Entries = append(m.Entries, e)
		}
	case state.OpMapRemove:
		for range n {
			m.Entries = append(m.Entries, state.Entry{UserKey: g.userKey()})
		}
	case state.OpMergeNamespaces:
		for range n {
			m.Sources = append(m.Sources, g.namespace())
		}
	}
	return m
}

func (g *generator) precondition() state.Precondition {
	d, key, group, ns := g.place()
	p := state.Precondition{State: d.ID, Kind: state.PreKind(1 + g.draw("precondition kind", 5)), Group: group, Key: key, Namespace: ns}
	if d.Kind == state.KindMap && g.chance("entry", 2) {
		p.HasUserKey, p.UserKey = true, g.userKey()
	}
	switch p.Kind {
	case state.PreEqual:
		p.Bytes = g.value(d.ValueType)
	case state.PreVersion:
		p.Version = uint64(10 + g.draw("version", 60))
	}
	return p
}
