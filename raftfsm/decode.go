package raftfsm

import (
	"fmt"
	"math"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Decode reads an encoded command into c, reusing c's memory. Byte strings in c
// alias b. It accepts exactly what the Append functions make: anything else is
// base.ErrCorrupt, or base.ErrFormatVersion for a version, kind, operation or
// flag that this build does not know.
func (c *Command) Decode(b []byte) error {
	c.reset()
	if len(b) > MaxCommandBytes {
		return fmt.Errorf("decoding command of %d bytes: %w", len(b), base.ErrCorrupt)
	}
	r := reader{b: b}
	if r.u8("magic") != commandMagic && r.err == nil {
		r.fail("magic")
	}
	if v := r.u8("version"); v != commandVersion && r.err == nil {
		r.unknown("command version", uint64(v))
	}
	c.Kind = CommandKind(r.u8("kind"))
	if r.err != nil {
		return fmt.Errorf("decoding command: %w", r.err)
	}
	c.body(&r)
	if err := r.end("command"); err != nil {
		return fmt.Errorf("decoding %s command: %w", c.Kind, err)
	}
	return nil
}

// reset empties c and forgets the buffers that it aliased, but keeps memory.
func (c *Command) reset() {
	clear(c.Requests)
	clear(c.mutations)
	clear(c.preconditions)
	clear(c.elements)
	clear(c.entries)
	clear(c.sources)
	*c = Command{
		Requests: c.Requests[:0], Declarations: c.Declarations[:0], Drops: c.Drops[:0], Sessions: c.Sessions[:0],
		mutations: c.mutations[:0], preconditions: c.preconditions[:0],
		elements: c.elements[:0], entries: c.entries[:0], sources: c.sources[:0],
	}
}

func (c *Command) body(r *reader) {
	switch c.Kind {
	case CommandInit:
		c.Init = readInit(r)
	case CommandWrite:
		c.readWrite(r)
	case CommandTermStart, CommandTick:
		c.StampMs = r.uvarint("stamp")
	case CommandDeclare:
		for n := r.count("declarations", MaxCommandItems); n > 0 && r.err == nil; n-- {
			c.Declarations = append(c.Declarations, readDeclaration(r))
		}
	case CommandDrop:
		for n := r.count("drops", MaxCommandItems); n > 0 && r.err == nil; n-- {
			c.Drops = append(c.Drops, engine.FamilyID(r.u32("state id")))
		}
	case CommandForget:
		c.SystemRevision = base.Revision(r.uvarint("revision"))
		for n := r.count("sessions", MaxCommandItems); n > 0 && r.err == nil; n-- {
			c.Sessions = append(c.Sessions, base.SessionID(r.u64("session")))
		}
	case CommandHashMark:
		c.MarkID = r.uvarint("mark")
	case CommandBarrier:
		c.Barrier = readBarrier(r)
	case CommandFence:
		c.Fence = Fence{Operation: readNumber(r, "operation"), Checkpoint: readNumber(r, "checkpoint")}
	case CommandRollback:
		c.Rollback = Rollback{Operation: readNumber(r, "operation"), Checkpoint: readNumber(r, "checkpoint"),
			Incarnation: base.Incarnation(r.uvarint("incarnation")), Epoch: base.Epoch(r.uvarint("epoch"))}
	case CommandReopen:
		c.Reopen = Reopen{Operation: readNumber(r, "operation"), Revision: base.Revision(r.uvarint("revision"))}
	default:
		r.unknown("command kind", uint64(c.Kind))
	}
}

func readInit(r *reader) Init {
	i := Init{
		Group:       base.GroupID(r.uvarint("group")),
		Range:       keygroup.Range{Lo: keygroup.Group(r.u32("range")), Hi: keygroup.Group(r.u32("range"))},
		M:           int(r.u32("M")),
		Epoch:       base.Epoch(r.uvarint("epoch")),
		Birth:       base.Birth(r.uvarint("birth")),
		Incarnation: base.Incarnation(r.uvarint("incarnation")),
		Sequence:    r.uvarint("sequence"),
		ClockMs:     r.uvarint("clock"),
	}
	if r.err == nil && !validRange(i.Range, i.M) {
		r.fail("range")
	}
	return i
}

func readBarrier(r *reader) Barrier {
	b := Barrier{Number: r.uvarint("number"), Epoch: base.Epoch(r.uvarint("epoch")), Attempt: r.uvarint("attempt")}
	b.Uploader = base.NodeID(r.text("uploader", maxNameBytes))
	if r.err == nil && b.Missed() != (b.Uploader == "") {
		r.fail("uploader")
	}
	return b
}

// readNumber reads a number that counts from 1.
func readNumber(r *reader, what string) uint64 {
	n := r.uvarint(what)
	if n == 0 && r.err == nil {
		r.fail(what)
	}
	return n
}

func validRange(rg keygroup.Range, m int) bool {
	return keygroup.CheckM(m) == nil && !rg.Empty() && int(rg.Hi) <= m
}

func readDeclaration(r *reader) state.Declaration {
	d := state.Declaration{ID: engine.FamilyID(r.u32("state id")), Kind: state.Kind(r.u8("kind"))}
	v := r.uvarint("codec version")
	if v > math.MaxUint16 {
		r.fail("codec version")
	}
	d.CodecVersion = uint16(v)
	d.Keyspace = r.text("keyspace", maxNameBytes)
	d.Name = r.text("name", maxNameBytes)
	d.KeyType = readType(r, "key type")
	d.UserKeyType = readType(r, "user key type")
	d.ValueType = readType(r, "value type")
	d.Function = r.text("function", maxNameBytes)
	return d
}

// typeText is the text of a type, empty for no type.
func typeText(t keygroup.Type) string {
	if t == (keygroup.Type{}) {
		return ""
	}
	return t.String()
}

// readType accepts the canonical text only, so that a type has one encoding.
func readType(r *reader, what string) keygroup.Type {
	s := r.text(what, maxNameBytes)
	if s == "" {
		return keygroup.Type{}
	}
	t, err := keygroup.ParseType(s)
	if err != nil || t.String() != s {
		r.fail(what)
	}
	return t
}

func (c *Command) readWrite(r *reader) {
	c.StampMs = r.uvarint("stamp")
	c.SystemRevision = base.Revision(r.uvarint("revision"))
	for n := r.count("requests", MaxCommandRequests); n > 0 && r.err == nil; n-- {
		one := reader{b: r.bytes("request")}
		if r.err != nil {
			return
		}
		c.Requests = append(c.Requests, Request{size: len(one.b)})
		c.readRequest(&one, &c.Requests[len(c.Requests)-1])
		if err := one.end("request"); err != nil {
			r.err, r.b = err, nil
		}
	}
}

// DecodeRequest reads one request that AppendRequest encoded.
func DecodeRequest(b []byte) (*Request, error) {
	var c Command
	q := &Request{size: len(b)}
	r := reader{b: b}
	c.readRequest(&r, q)
	if err := r.end("request"); err != nil {
		return nil, fmt.Errorf("decoding request: %w", err)
	}
	return q, nil
}

func (c *Command) readRequest(r *reader, q *Request) {
	flags := r.u8("request flags")
	if flags&^(requestAtomic|requestSession) != 0 {
		r.unknown("request flags", uint64(flags))
	}
	q.Atomic = flags&requestAtomic != 0
	q.Incarnation = base.Incarnation(r.uvarint("incarnation"))
	q.Epoch = base.Epoch(r.uvarint("epoch"))
	if flags&requestSession != 0 {
		q.Session = base.SessionID(r.u64("session"))
		if q.Session == 0 && r.err == nil {
			r.fail("session")
		}
		q.Seq, q.Prev, q.Floor = r.uvarint("seq"), r.uvarint("prev"), r.uvarint("floor")
	}
	q.BarrierSeen = r.uvarint("barrier")

	first := len(c.preconditions)
	for n := r.count("preconditions", MaxCommandMutations-first); n > 0 && r.err == nil; n-- {
		c.preconditions = append(c.preconditions, readPrecondition(r))
	}
	q.Preconditions = c.preconditions[first:len(c.preconditions):len(c.preconditions)]

	first = len(c.mutations)
	next := uint64(0)
	for n := r.count("mutations", MaxCommandMutations-first); n > 0 && r.err == nil; n-- {
		ordinal := next + r.uvarint("ordinal")
		if ordinal >= math.MaxUint32 || ordinal < next {
			r.fail("ordinal")
			return
		}
		next = ordinal + 1
		c.mutations = append(c.mutations, Mutation{Ordinal: uint32(ordinal)})
		c.readMutation(r, &c.mutations[len(c.mutations)-1])
	}
	q.Mutations = c.mutations[first:len(c.mutations):len(c.mutations)]
}

type target struct {
	flags byte
	state engine.FamilyID
	group keygroup.Group
	key   []byte
	ns    state.Namespace
}

func readTarget(r *reader, known byte) target {
	t := target{flags: r.u8("flags")}
	if t.flags&^known != 0 {
		r.unknown("flags", uint64(t.flags))
	}
	t.state = engine.FamilyID(r.u32("state id"))
	t.group = keygroup.Group(r.u32("group"))
	t.key = r.bytes("key")
	if t.flags&hasNamespace != 0 {
		t.ns = state.Namespace{Set: true, Bytes: r.bytes("namespace")}
	}
	return t
}

func readPrecondition(r *reader) state.Precondition {
	p := state.Precondition{Kind: state.PreKind(r.u8("precondition kind"))}
	t := readTarget(r, hasNamespace|hasUserKey)
	p.State, p.Group, p.Key, p.Namespace = t.state, t.group, t.key, t.ns
	if p.HasUserKey = t.flags&hasUserKey != 0; p.HasUserKey {
		p.UserKey = r.bytes("user key")
	}
	switch p.Kind {
	case state.PreAbsent, state.PrePresent, state.PreNull:
	case state.PreEqual:
		p.Bytes = r.bytes("bytes")
	case state.PreVersion:
		p.Version = r.uvarint("version")
	default:
		r.unknown("precondition kind", uint64(p.Kind))
	}
	return p
}

// items returns how many more elements, entries and sources may come.
func (c *Command) items() int {
	return MaxCommandItems - len(c.elements) - len(c.entries) - len(c.sources)
}

func (c *Command) readMutation(r *reader, m *Mutation) {
	begin := r.b
	m.Op = state.Op(r.u8("op"))
	t := readTarget(r, hasNamespace)
	m.State, m.Group, m.Key, m.Namespace = t.state, t.group, t.key, t.ns
	switch m.Op {
	case state.OpClear:
	case state.OpValuePut:
		m.Value = r.bytes("value")
	case state.OpListAdd, state.OpListUpdate, state.OpAdd:
		first := len(c.elements)
		for n := r.count("elements", c.items()); n > 0 && r.err == nil; n-- {
			c.elements = append(c.elements, r.optional("element"))
		}
		m.Elements = c.elements[first:len(c.elements):len(c.elements)]
	case state.OpMapPut, state.OpMapRemove:
		m.Entries = c.readEntries(r, m.Op == state.OpMapPut)
	case state.OpMergeNamespaces:
		first := len(c.sources)
		for n := r.count("sources", c.items()); n > 0 && r.err == nil; n-- {
			b := r.optional("source")
			c.sources = append(c.sources, state.Namespace{Set: b != nil, Bytes: b})
		}
		m.Sources = c.sources[first:len(c.sources):len(c.sources)]
	default:
		r.unknown("operation", uint64(m.Op))
	}
	if r.err == nil {
		n := len(begin) - len(r.b)
		m.raw = begin[:n:n]
	}
}

func (c *Command) readEntries(r *reader, values bool) []state.Entry {
	first := len(c.entries)
	for n := r.count("entries", c.items()); n > 0 && r.err == nil; n-- {
		e := state.Entry{UserKey: r.bytes("user key")}
		if values {
			e.Value = r.optional("entry value")
			e.Null = e.Value == nil
		}
		c.entries = append(c.entries, e)
	}
	return c.entries[first:len(c.entries):len(c.entries)]
}
