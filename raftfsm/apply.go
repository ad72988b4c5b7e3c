package raftfsm

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// applyEntry applies one entry to the batch. An error stops the machine.
func (m *Machine) applyEntry(e *Entry, out *Outcome) error {
	out.Index = e.Index
	if e.Index <= m.core.appliedIndex { // RF2
		out.Skipped = true
		out.Err = fmt.Errorf("entry %d had been applied before: %w", e.Index, base.ErrOutcomeUnknown)
		m.counts.skipped++
		return nil
	}
	var after func() error // of the commit that ends with this entry
	switch {
	case e.Configuration != nil:
		m.confIdx, m.conf = e.Index, slices.Clone(e.Configuration)
		m.tx.Batch().Put(engine.MetaFamily, configurationKey, encodeConfiguration(e.Index, m.conf))
	case e.Command != nil:
		if err := m.command.Decode(e.Command); err != nil {
			return &UnreadableCommand{Index: e.Index, Cause: err}
		}
		if c := &m.command; c.Kind == CommandRollback && m.core.initialised {
			if out.Err = m.core.mayRollBack(&c.Rollback); out.Err == nil {
				return m.rollBack(e, c.Rollback, out)
			}
		} else if err := m.applyCommand(e.Index, c, out); err != nil {
			return fmt.Errorf("entry %d: %w", e.Index, err)
		}
		after = m.atExactly(&m.command)
	}
	m.core.appliedIndex, m.core.appliedTerm = e.Index, e.Term
	m.advanced = true
	m.counts.entries++
	out.ClockMs, out.Sequence = m.core.clockMs, m.core.sequence
	if after == nil || out.Err != nil {
		return nil
	}
	if err := m.commit(); err != nil {
		return err
	}
	return after()
}

// atExactly returns what is to be done while the store holds the entries up to
// the command's own and no more; nil if nothing. The batch ends there.
func (m *Machine) atExactly(c *Command) func() error {
	switch c.Kind {
	case CommandHashMark:
		mark := c.MarkID
		return func() error { return m.takeMark(mark) }
	case CommandBarrier:
		b := c.Barrier
		return func() error {
			m.opts.OnBarrier(b)
			return nil
		}
	}
	return nil
}

func (m *Machine) applyCommand(index uint64, c *Command, out *Outcome) error {
	if c.Kind == CommandInit {
		return m.applyInit(&c.Init, out)
	}
	if !m.core.initialised {
		out.Err = fmt.Errorf("%s before init: %w", c.Kind, base.ErrNotReady)
		if c.Kind == CommandWrite {
			out.Err = nil
			out.Results = make([]Result, len(c.Requests))
			for i := range out.Results {
				out.Results[i].Err = &base.Error{Cause: base.ErrNotReady, Ordinal: -1}
			}
		}
		return nil
	}
	switch c.Kind {
	case CommandWrite:
		return m.applyWrite(c, out)
	case CommandTermStart, CommandTick:
		m.advanceClock(c.StampMs)
	case CommandDeclare:
		if m.core.rollback.fence != 0 { // the declarations would go with the store
			out.Err = m.core.fenced()
			return nil
		}
		return m.applyDeclare(c.Declarations, out)
	case CommandDrop:
		m.applyDrop(index, c.Drops)
	case CommandForget:
		m.core.forgotten = max(m.core.forgotten, c.SystemRevision)
		for _, id := range c.Sessions {
			m.sessions.forget(id)
		}
		failpoint.Hit("raftfsm.session.forget")
	case CommandHashMark:
		if c.MarkID == 0 {
			out.Err = base.Invalid("mark_id", "choose an id that is not 0")
		}
	case CommandBarrier:
		out.Err = m.core.pass(&c.Barrier)
	case CommandFence:
		out.Err = m.core.raise(&c.Fence)
		failpoint.Hit("raftfsm.rollback.fenced")
	case CommandReopen:
		out.Err = m.core.reopen(&c.Reopen)
		failpoint.Hit("raftfsm.rollback.reopened")
	}
	return nil
}

// advanceClock: stamps never go back (W5).
func (m *Machine) advanceClock(stampMs uint64) { m.core.clockMs = max(m.core.clockMs, stampMs) }

// pass notes the barrier, unless it was passed before or belongs to another
// version of the shard map; then nothing changes. Its error says which.
func (c *core) pass(b *Barrier) error {
	switch {
	case b.Number == 0:
		return base.Invalid("number", "checkpoints are numbered from 1")
	case b.Number <= c.barrier:
		return &base.Error{Cause: base.ErrConflict, Field: "number", Ordinal: -1, Hint: fmt.Sprintf("barrier %d was passed before", c.barrier)}
	case b.Epoch != c.epoch:
		return &base.Error{Cause: base.ErrStaleEpoch, Ordinal: -1, Epoch: c.epoch, Hint: fmt.Sprintf("the shard's epoch is %d", c.epoch)}
	}
	c.barrier = b.Number
	return nil
}

func (m *Machine) applyInit(i *Init, out *Outcome) error {
	if m.core.initialised {
		if m.core.group != i.Group || m.core.birth != i.Birth {
			out.Err = fmt.Errorf("init of group %s birth %x in group %s birth %x: %w", i.Group, uint64(i.Birth), m.core.group, uint64(m.core.birth), base.ErrConflict)
		}
		return nil
	}
	failpoint.Hit("raftfsm.init.begin")
	m.core.initialised = true
	m.core.group, m.core.birth = i.Group, i.Birth
	m.core.rng, m.core.m = i.Range, i.M
	m.core.epoch, m.core.incarnation = i.Epoch, i.Incarnation
	m.core.sequence = i.Sequence
	m.advanceClock(i.ClockMs)
	m.layout = state.Layout{M: i.M}
	m.hashes = newOpHashes(i.Range)
	return nil
}

// applyDeclare makes all states known, or none if one is refused. Families are
// created at once, which a replay repeats without harm.
func (m *Machine) applyDeclare(ds []state.Declaration, out *Outcome) error {
	var fresh []*declared
	for i := range ds {
		d := &declared{Declaration: ds[i]}
		if err := m.checkDeclare(d); err != nil {
			out.Err = fmt.Errorf("declaring state %d (%s/%s): %w", d.ID, d.Keyspace, d.Name, err)
			return nil
		}
		twice := slices.ContainsFunc(fresh, func(f *declared) bool { return f.ID == d.ID })
		if m.decls[d.ID] == nil && !twice {
			d.options = m.layout.FamilyOptions(&d.Declaration)
			fresh = append(fresh, d)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	decls := maps.Clone(m.decls)
	for _, d := range fresh {
		if err := m.ensureFamily(d); err != nil {
			return err
		}
		decls[d.ID] = d
		m.tx.Batch().Put(engine.MetaFamily, declarationKey(d.ID), encodeDeclaration(&d.Declaration))
	}
	failpoint.Hit("raftfsm.declare.families-made")
	m.decls = decls
	m.core.generation++
	return nil
}

func (m *Machine) checkDeclare(d *declared) error {
	if d.ID == engine.MetaFamily {
		return base.Invalid("id", "0 is the metadata family")
	}
	if err := state.ValidateDeclaration(&d.Declaration); err != nil {
		return err
	}
	if _, ok := m.dropped[d.ID]; ok {
		return fmt.Errorf("the id was dropped: %w", base.ErrConflict)
	}
	if old := m.decls[d.ID]; old != nil && old.Declaration != d.Declaration {
		return fmt.Errorf("the id is declared differently: %w", base.ErrConflict)
	}
	return nil
}

func (m *Machine) ensureFamily(d *declared) error {
	m.mu.Lock()
	store := m.mu.ref.store
	m.mu.Unlock()
	if err := store.EnsureFamily(d.ID, d.options); err != nil {
		return fmt.Errorf("creating family %d: %w", d.ID, err)
	}
	return nil
}

// applyDrop forgets states at once; their families go later (RF9).
func (m *Machine) applyDrop(index uint64, ids []engine.FamilyID) {
	decls := maps.Clone(m.decls)
	b := m.tx.Batch()
	for _, id := range ids {
		if _, ok := m.dropped[id]; ok || id == engine.MetaFamily {
			continue
		}
		d := dropped{index: index, gone: decls[id] == nil}
		if !d.gone {
			delete(decls, id)
			b.Delete(engine.MetaFamily, declarationKey(id))
			m.undropped++
		}
		m.dropped[id] = d
		b.Put(engine.MetaFamily, droppedKey(id), encodeDropped(d))
	}
	m.decls = decls
	m.core.generation++
}

func (m *Machine) applyWrite(c *Command, out *Outcome) error {
	m.advanceClock(c.StampMs)
	out.Results = make([]Result, len(c.Requests))
	for i := range c.Requests {
		if err := m.applyRequest(&c.Requests[i], c.SystemRevision, &out.Results[i]); err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		m.counts.result(&out.Results[i])
	}
	return nil
}

// applyRequest decides one request (W1, W3). An error stops the machine.
func (m *Machine) applyRequest(r *Request, rev base.Revision, out *Result) error {
	out.Token = m.token(m.core.sequence, m.core.barrier)
	if out.Err = m.core.route(r); out.Err != nil {
		return nil
	}
	if r.Session == 0 {
		d, err := m.execute(r, r.Mutations)
		m.answer(out, &d)
		return err
	}
	s := m.sessions.byID[r.Session]
	var rec *record
	if s == nil {
		if rev < m.core.forgotten {
			out.Err = &base.Error{Cause: base.ErrSessionStale, Ordinal: -1,
				Hint: fmt.Sprintf("the leader needs system revision %d", m.core.forgotten)}
			return nil
		}
		// Not kept unless the request is executed.
		s = &session{id: r.Session, rng: m.core.rng, floor: r.Floor}
	} else {
		if s.raiseFloor(r.Floor) {
			m.sessions.touch(s)
		}
		rec = s.find(r.Seq)
	}
	if rec == nil {
		if out.Err = s.admit(r); out.Err != nil {
			return nil
		}
		return m.executeInSession(s, nil, r, r.Mutations, out)
	}
	rest := rec.uncovered(r.Mutations)
	if len(rest) == 0 {
		m.replay(out, rec, r)
		return nil
	}
	if r.indivisible() {
		out.Err = &base.Error{Cause: base.ErrConflict, Ordinal: int(rest[0].Ordinal),
			Hint: "an atomic request was sent again under its number with other mutations"}
		return nil
	}
	if s.bytes >= SessionBytes {
		out.Err = &base.Error{Cause: base.ErrSessionWindow, Ordinal: -1, Hint: "raise the floor by resolving older requests"}
		return nil
	}
	return m.executeInSession(s, rec, r, rest, out)
}

// executeInSession executes ms and records their fate under the request's
// number; rec holds what other ordinals did before.
func (m *Machine) executeInSession(s *session, rec *record, r *Request, ms []Mutation, out *Result) error {
	d, err := m.execute(r, ms)
	if err != nil {
		return err
	}
	d.ordinals = ordinalsOf(ms)
	if m.sessions.byID[s.id] == nil {
		failpoint.Hit("raftfsm.session.create")
		m.sessions.byID[s.id] = s
	}
	m.sessions.touch(s)
	s.remember(r.Seq, rec, d)
	rec = s.find(r.Seq)
	latest := &rec.parts[len(rec.parts)-1]
	if len(ms) == len(r.Mutations) {
		m.answer(out, latest)
		return nil
	}
	m.combine(out, rec, r, latest)
	return nil
}

// replay answers from the record alone.
func (m *Machine) replay(out *Result, rec *record, r *Request) {
	out.Replayed = true
	if len(rec.parts) == 1 {
		m.answer(out, &rec.parts[0])
		return
	}
	m.combine(out, rec, r, nil)
}

// combine answers a request whose ordinals were decided at different times;
// executed is the part that was decided now, nil if none was.
func (m *Machine) combine(out *Result, rec *record, r *Request, executed *decided) {
	parts := rec.relevant(r.Mutations)
	if len(parts) == 1 {
		m.answer(out, parts[0])
		return
	}
	var newest decided
	for _, d := range parts {
		out.Parts = append(out.Parts, Part{Ordinals: slices.Clone(d.ordinals), Err: d.err, First: d.first, Sequence: d.sequence, Replayed: d != executed})
		newest.sequence = max(newest.sequence, d.sequence)
		newest.barrier = max(newest.barrier, d.barrier)
		if newest.err == nil {
			newest.err = d.err
		}
	}
	m.answer(out, &newest)
}

func (m *Machine) answer(out *Result, d *decided) {
	out.Err, out.First = d.err, d.first
	out.Token = m.token(d.sequence, d.barrier)
}

func (m *Machine) token(sequence, barrier uint64) Token {
	return Token{
		Incarnation: m.core.incarnation, Group: m.core.group, Birth: m.core.birth,
		Sequence: sequence, Barrier: barrier,
	}
}

// execute carries out ms, all or nothing (RF4). The error is not nil only if
// the store failed, and then stops the machine.
func (m *Machine) execute(r *Request, ms []Mutation) (decided, error) {
	refused := func(e *base.Error) (decided, error) {
		return decided{sequence: m.core.sequence, barrier: m.core.barrier, err: e}, nil
	}
	if e := checkContent(m.decls, r); e != nil {
		return refused(e)
	}
	for i := range r.Preconditions {
		p := &r.Preconditions[i]
		if err := m.layout.Check(m.tx, &m.decls[p.State].Declaration, p); err != nil {
			if !isContent(err) {
				return decided{}, fmt.Errorf("checking precondition %d: %w", i, err)
			}
			return refused(refusal(err, i, fmt.Sprintf("preconditions[%d]", i)))
		}
	}
	mark := m.tx.Mark()
	for i := range ms {
		stamp := state.Stamp{Sequence: m.core.sequence + uint64(i) + 1, ClockMs: m.core.clockMs}
		if err := m.layout.Apply(m.tx, &m.decls[ms[i].State].Declaration, &ms[i].Mutation, stamp); err != nil {
			if !isContent(err) {
				return decided{}, fmt.Errorf("applying mutation %d: %w", ms[i].Ordinal, err)
			}
			m.tx.Rollback(mark)
			return refused(refusal(err, int(ms[i].Ordinal), fmt.Sprintf("mutations[%d]", ms[i].Ordinal)))
		}
	}
	d := decided{barrier: m.core.barrier}
	if len(ms) > 0 {
		d.first = m.core.sequence + 1
	}
	for i := range ms {
		m.core.sequence++
		m.hashes.apply(ms[i].Group, m.core.sequence, ms[i].raw)
	}
	d.sequence = m.core.sequence
	m.counts.mutations += uint64(len(ms))
	return d, nil
}

// isContent says that the request is at fault, so that every replica refuses it
// alike. Anything else is a failure of this replica.
func isContent(err error) bool {
	var s *base.Sentinel
	if !errors.As(err, &s) {
		return false
	}
	switch s {
	case base.ErrPrecondition, base.ErrInvalid, base.ErrTooLarge, base.ErrUndeclared, base.ErrWrongKind,
		base.ErrOutOfRange, base.ErrConflict, base.ErrNotFound, base.ErrUnsupported:
		return true
	}
	return false
}

// refusal brings an error into the bounded form in which it is recorded, so
// that the first answer and every replay are the same.
func refusal(err error, ordinal int, field string) *base.Error {
	e := &base.Error{Cause: base.SentinelOf(err), Ordinal: ordinal, Field: field}
	var detail *base.Error
	if errors.As(err, &detail) {
		if detail.Field != "" {
			if e.Field != "" {
				e.Field += "."
			}
			e.Field += detail.Field
		}
		e.Hint = detail.Hint
	} else {
		e.Hint = err.Error()
	}
	e.Field, e.Hint = bound(e.Field, maxFieldBytes), bound(e.Hint, maxHintBytes)
	return e
}
