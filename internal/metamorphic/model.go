package metamorphic

import (
	"errors"
	"slices"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/engine/state/statemodel"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// Verdict is what the model predicts of a request or of a part of one.
type Verdict struct {
	Reason   base.Reason // empty if applied
	Ordinal  int         // at fault, -1 if none
	First    uint64
	Sequence uint64
	Barrier  uint64
	Replayed bool
	Parts    []PartVerdict
}

// PartVerdict is the prediction of a Part.
type PartVerdict struct {
	Ordinals []uint32
	Reason   base.Reason
	First    uint64
	Sequence uint64
	Replayed bool
}

// Model is a naive shard: maps all through, no batches, no bytes.
type Model struct {
	Init      raftfsm.Init
	Clock     uint64
	Sequence  uint64
	Forgotten base.Revision
	Barrier   uint64
	Data      *statemodel.Model
	Declared  map[engine.FamilyID]*state.Declaration
	Dropped   map[engine.FamilyID]bool
	Sessions  map[base.SessionID]*modelSession
}

type modelSession struct {
	last, floor uint64
	requests    map[uint64][]*modelPart
}

// modelPart is the fate of ordinals that were decided together.
type modelPart struct {
	ordinals map[uint32]bool
	verdict  Verdict
}

// NewModel returns a shard after Init.
func NewModel(i raftfsm.Init) *Model {
	return &Model{
		Init: i, Clock: i.ClockMs, Sequence: i.Sequence, Data: statemodel.New(i.M),
		Declared: make(map[engine.FamilyID]*state.Declaration), Dropped: make(map[engine.FamilyID]bool),
		Sessions: make(map[base.SessionID]*modelSession),
	}
}

func (m *Model) office(s *base.Sentinel, ordinal int) Verdict {
	return Verdict{Reason: s.Reason, Ordinal: ordinal, Sequence: m.Sequence, Barrier: m.Barrier}
}

// Write predicts the results of a write.
func (m *Model) Write(w *Write) []Verdict {
	m.Clock = max(m.Clock, w.Stamp)
	var out []Verdict
	for _, q := range w.Requests {
		out = append(out, m.request(q, w.Revision))
	}
	return out
}

func (m *Model) request(q *raftfsm.Request, rev base.Revision) Verdict {
	if q.Incarnation != m.Init.Incarnation {
		return m.office(base.ErrIncarnation, -1)
	}
	if q.Epoch != m.Init.Epoch {
		return m.office(base.ErrStaleEpoch, -1)
	}
	outside := func(g keygroup.Group) bool { return g < m.Init.Range.Lo || g >= m.Init.Range.Hi }
	for i, p := range q.Preconditions {
		if outside(p.Group) {
			return m.office(base.ErrWrongRange, i)
		}
	}
	for _, mu := range q.Mutations {
		if outside(mu.Group) {
			return m.office(base.ErrWrongRange, int(mu.Ordinal))
		}
	}
	if q.Session == 0 {
		return m.execute(q, q.Mutations)
	}
	s := m.Sessions[q.Session]
	if s == nil {
		if rev < m.Forgotten {
			return m.office(base.ErrSessionStale, -1)
		}
		s = &modelSession{requests: make(map[uint64][]*modelPart)}
	}
	s.floor = max(s.floor, q.Floor)
	for seq := range s.requests {
		if seq < s.floor {
			delete(s.requests, seq)
		}
	}
	if parts, ok := s.requests[q.Seq]; ok {
		return m.again(s, parts, q)
	}
	switch {
	case q.Seq <= s.last || q.Seq < s.floor:
		return m.office(base.ErrSessionForgot, -1)
	case q.Prev > s.last:
		return m.office(base.ErrSessionOrder, -1)
	case len(s.requests) >= raftfsm.SessionWindow:
		return m.office(base.ErrSessionWindow, -1)
	}
	v := m.execute(q, q.Mutations)
	s.last = q.Seq
	s.requests[q.Seq] = []*modelPart{newModelPart(q.Mutations, v)}
	m.Sessions[q.Session] = s
	return v
}

func newModelPart(ms []raftfsm.Mutation, v Verdict) *modelPart {
	p := &modelPart{ordinals: make(map[uint32]bool), verdict: v}
	for _, mu := range ms {
		p.ordinals[mu.Ordinal] = true
	}
	return p
}

// again answers a number that has a record.
func (m *Model) again(s *modelSession, parts []*modelPart, q *raftfsm.Request) Verdict {
	var rest []raftfsm.Mutation
	for _, mu := range q.Mutations {
		if !slices.ContainsFunc(parts, func(p *modelPart) bool { return p.ordinals[mu.Ordinal] }) {
			rest = append(rest, mu)
		}
	}
	var fresh *modelPart
	if len(rest) > 0 {
		if q.Atomic || len(q.Preconditions) > 0 {
			return m.office(base.ErrConflict, int(rest[0].Ordinal))
		}
		fresh = newModelPart(rest, m.execute(q, rest))
		parts = append(parts, fresh)
		s.requests[q.Seq] = parts
	}
	var concerned []*modelPart
	for _, p := range parts {
		if len(q.Mutations) == 0 || slices.ContainsFunc(q.Mutations, func(mu raftfsm.Mutation) bool { return p.ordinals[mu.Ordinal] }) {
			concerned = append(concerned, p)
		}
	}
	if len(concerned) == 1 {
		v := concerned[0].verdict
		v.Replayed = fresh == nil
		return v
	}
	out := Verdict{Ordinal: -1, Replayed: fresh == nil}
	for _, p := range concerned {
		pv := PartVerdict{Reason: p.verdict.Reason, First: p.verdict.First, Sequence: p.verdict.Sequence, Replayed: p != fresh}
		for o := range p.ordinals {
			pv.Ordinals = append(pv.Ordinals, o)
		}
		slices.Sort(pv.Ordinals)
		out.Parts = append(out.Parts, pv)
		out.Sequence = max(out.Sequence, pv.Sequence)
		out.Barrier = max(out.Barrier, p.verdict.Barrier)
		if out.Reason == "" && pv.Reason != "" {
			out.Reason, out.Ordinal = pv.Reason, p.verdict.Ordinal
		}
	}
	return out
}

func (m *Model) execute(q *raftfsm.Request, ms []raftfsm.Mutation) Verdict {
	var conditions []statemodel.Condition
	var changes []statemodel.Change
	for i := range q.Preconditions {
		d := m.Declared[q.Preconditions[i].State]
		if d == nil {
			return m.office(base.ErrUndeclared, i)
		}
		conditions = append(conditions, statemodel.Condition{D: d, P: &q.Preconditions[i]})
	}
	for i := range q.Mutations {
		if m.Declared[q.Mutations[i].State] == nil {
			return m.office(base.ErrUndeclared, int(q.Mutations[i].Ordinal))
		}
	}
	for i := range ms {
		st := state.Stamp{Sequence: m.Sequence + uint64(i) + 1, ClockMs: m.Clock}
		changes = append(changes, statemodel.Change{D: m.Declared[ms[i].State], M: &ms[i].Mutation, St: st})
	}
	for i, c := range conditions {
		if err := m.Data.Check(c.D, c.P); err != nil {
			return m.office(base.SentinelOf(err), i)
		}
	}
	if at, err := m.Data.Request(nil, changes); err != nil {
		return m.office(base.SentinelOf(err), int(ms[at].Ordinal))
	}
	v := Verdict{Ordinal: -1, Barrier: m.Barrier}
	if len(ms) > 0 {
		v.First = m.Sequence + 1
	}
	m.Sequence += uint64(len(ms))
	v.Sequence = m.Sequence
	return v
}

// Declare predicts a Declare; the error is nil, base.ErrConflict or
// base.ErrInvalid.
func (m *Model) Declare(ds []state.Declaration) error {
	for i := range ds {
		d := &ds[i]
		if err := state.ValidateDeclaration(d); err != nil {
			return err
		}
		if old := m.Declared[d.ID]; m.Dropped[d.ID] || old != nil && *old != *d {
			return base.ErrConflict
		}
	}
	for i := range ds {
		m.Declared[ds[i].ID] = &ds[i]
	}
	return nil
}

// Drop predicts a Drop.
func (m *Model) Drop(ids []engine.FamilyID) {
	for _, id := range ids {
		m.Dropped[id] = true
		delete(m.Declared, id)
		m.Data.Drop(id)
	}
}

// Pass predicts a Barrier.
func (m *Model) Pass(b raftfsm.Barrier) error {
	switch {
	case b.Number == 0:
		return base.ErrInvalid
	case b.Number <= m.Barrier:
		return base.ErrConflict
	case b.Epoch != m.Init.Epoch:
		return base.ErrStaleEpoch
	}
	m.Barrier = b.Number
	return nil
}

// Forget predicts a Forget.
func (m *Model) Forget(rev base.Revision, ids []base.SessionID) {
	m.Forgotten = max(m.Forgotten, rev)
	for _, id := range ids {
		delete(m.Sessions, id)
	}
}

// VerdictOf is what a result says, in the terms of the model.
func VerdictOf(r *raftfsm.Result) Verdict {
	v := Verdict{Ordinal: -1, First: r.First, Sequence: r.Token.Sequence, Barrier: r.Token.Barrier, Replayed: r.Replayed}
	if r.Err != nil {
		v.Reason, v.Ordinal = base.SentinelOf(r.Err).Reason, r.Err.Ordinal
	}
	for _, p := range r.Parts {
		pv := PartVerdict{First: p.First, Sequence: p.Sequence, Replayed: p.Replayed}
		if p.Err != nil {
			pv.Reason = base.SentinelOf(p.Err).Reason
		}
		for _, o := range p.Ordinals {
			for i := o.Lo; i < o.Hi; i++ {
				pv.Ordinals = append(pv.Ordinals, i)
			}
		}
		v.Parts = append(v.Parts, pv)
	}
	return v
}

func reasonOf(err error) base.Reason {
	var s *base.Sentinel
	if errors.As(err, &s) {
		return s.Reason
	}
	return ""
}
