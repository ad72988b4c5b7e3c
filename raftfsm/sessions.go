package raftfsm

import (
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// The bounds of what a shard remembers of one session. They are part of the
// format: replicas that disagree about them would diverge.
const (
	// SessionWindow is the number of open requests of a session at a shard.
	SessionWindow = 1024
	// SessionBytes bounds the encoded records of a session at a shard.
	SessionBytes = 1 << 20
	// Bounds of the texts of a recorded refusal.
	maxFieldBytes = 256
	maxHintBytes  = 512
)

// decided is the fate of some ordinals of a request: applied with the sequences
// [first, sequence], or refused with err.
type decided struct {
	ordinals []OrdinalRange
	first    uint64
	sequence uint64
	barrier  uint64
	err      *base.Error
}

// record is what a session's request number did at this shard.
type record struct {
	seq   uint64
	parts []decided
	size  int // encoded
}

// session is a session's memory for one key-group range.
type session struct {
	id   base.SessionID
	rng  keygroup.Range
	last uint64 // newest number that was executed
	// floor: the client has no open number below it. Records below are gone.
	floor   uint64
	records []record // ascending by seq, all >= floor and <= last
	bytes   int      // sum of the records' sizes
	dirty   bool
}

// sessionTable holds the sessions of a shard and which of them changed since
// the last batch. Ranges are not cut in this version: a session has one.
type sessionTable struct {
	byID    map[base.SessionID]*session
	changed []*session
	removed []*session
}

func newSessionTable() sessionTable {
	return sessionTable{byID: make(map[base.SessionID]*session)}
}

func (t *sessionTable) touch(s *session) {
	if !s.dirty {
		s.dirty = true
		t.changed = append(t.changed, s)
	}
}

// forget removes a session. It says whether the session was there.
func (t *sessionTable) forget(id base.SessionID) bool {
	s := t.byID[id]
	if s == nil {
		return false
	}
	delete(t.byID, id)
	t.removed = append(t.removed, s)
	return true
}

// flush hands out every change since the last call: removals first, so that a
// session that was removed and came back in one batch stays.
func (t *sessionTable) flush(remove, put func(*session)) {
	for _, s := range t.removed {
		remove(s)
	}
	for _, s := range t.changed {
		s.dirty = false
		if t.byID[s.id] == s {
			put(s)
		}
	}
	t.removed, t.changed = t.removed[:0], t.changed[:0]
}

// raiseFloor drops the records that the client will not ask for again.
func (s *session) raiseFloor(floor uint64) bool {
	if floor <= s.floor {
		return false
	}
	s.floor = floor
	n := 0
	for n < len(s.records) && s.records[n].seq < floor {
		s.bytes -= s.records[n].size
		s.records[n] = record{}
		n++
	}
	s.records = s.records[n:]
	return true
}

func (s *session) find(seq uint64) *record {
	i, ok := slices.BinarySearchFunc(s.records, seq, func(r record, seq uint64) int {
		switch {
		case r.seq < seq:
			return -1
		case r.seq > seq:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return &s.records[i]
}

// admit decides by number and order alone whether a request without a record is
// executed. It changes nothing.
func (s *session) admit(r *Request) *base.Error {
	switch {
	case r.Seq <= s.last || r.Seq < s.floor:
		return &base.Error{Cause: base.ErrSessionForgot, Ordinal: -1,
			Hint: fmt.Sprintf("number %d: newest executed %d, floor %d", r.Seq, s.last, s.floor)}
	case r.Prev > s.last:
		return &base.Error{Cause: base.ErrSessionOrder, Ordinal: -1,
			Hint: fmt.Sprintf("send number %d again first", r.Prev)}
	case len(s.records) >= SessionWindow || s.bytes >= SessionBytes:
		return &base.Error{Cause: base.ErrSessionWindow, Ordinal: -1,
			Hint: "raise the floor by resolving older requests"}
	}
	return nil
}

// remember adds the fate of ordinals to the record of seq, which is either new
// and newer than every other, or rec.
func (s *session) remember(seq uint64, rec *record, d decided) {
	if rec == nil {
		s.records = append(s.records, record{seq: seq})
		rec = &s.records[len(s.records)-1]
		s.last = seq
	}
	rec.parts = append(rec.parts, d)
	size := rec.encodedSize()
	s.bytes += size - rec.size
	rec.size = size
}

// covers says whether an ordinal has been decided.
func (rec *record) covers(ordinal uint32) *decided {
	for i := range rec.parts {
		d := &rec.parts[i]
		j, _ := slices.BinarySearchFunc(d.ordinals, ordinal, func(r OrdinalRange, o uint32) int {
			switch {
			case r.Hi <= o:
				return -1
			case r.Lo > o:
				return 1
			}
			return 0
		})
		if j < len(d.ordinals) && d.ordinals[j].Lo <= ordinal && ordinal < d.ordinals[j].Hi {
			return d
		}
	}
	return nil
}

// uncovered returns the mutations whose ordinals nothing has decided yet.
func (rec *record) uncovered(ms []Mutation) []Mutation {
	open := 0
	for i := range ms {
		if rec.covers(ms[i].Ordinal) == nil {
			open++
		}
	}
	switch open {
	case 0:
		return nil
	case len(ms):
		return ms
	}
	rest := make([]Mutation, 0, open)
	for i := range ms {
		if rec.covers(ms[i].Ordinal) == nil {
			rest = append(rest, ms[i])
		}
	}
	return rest
}

// ordinalsOf compresses ascending ordinals into ranges.
func ordinalsOf(ms []Mutation) []OrdinalRange {
	if len(ms) == 0 {
		return nil
	}
	n := 1
	for i := 1; i < len(ms); i++ {
		if ms[i].Ordinal != ms[i-1].Ordinal+1 {
			n++
		}
	}
	rs := make([]OrdinalRange, 0, n)
	for i := range ms {
		if o := ms[i].Ordinal; len(rs) > 0 && rs[len(rs)-1].Hi == o {
			rs[len(rs)-1].Hi++
		} else {
			rs = append(rs, OrdinalRange{Lo: o, Hi: o + 1})
		}
	}
	return rs
}

// relevant returns the parts that decided an ordinal of ms, in the order in
// which they were decided; all parts if ms is empty.
func (rec *record) relevant(ms []Mutation) []*decided {
	var out []*decided
	for i := range rec.parts {
		d := &rec.parts[i]
		if len(ms) == 0 || slices.ContainsFunc(ms, func(m Mutation) bool { return rec.covers(m.Ordinal) == d }) {
			out = append(out, d)
		}
	}
	return out
}
