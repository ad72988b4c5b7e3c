package meta

import (
	"bytes"
	"cmp"
	"fmt"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// Limits of participants.
const (
	// MaxParticipants bounds the registered ones, those with an ended session too.
	MaxParticipants = 64
	// MaxPositionBytes bounds what one participant gives to a checkpoint, and
	// MaxPositionsBytes what all of them do: they are kept in records of this map.
	MaxPositionBytes  = 512 << 10
	MaxPositionsBytes = 1 << 20
)

// Participant is a client that has a part in every checkpoint: the position in its
// source that belongs to what it has written. It takes part as long as its session
// lives. Its record stays after that, until it is registered again or unregistered,
// and keeps the newest checkpoint that has its position from being retired (ME12).
type Participant struct {
	// ID is the name that it has chosen.
	ID string `json:"id"`
	// Number is that of the registration, given once (ME1).
	Number       uint64         `json:"number"`
	Session      base.SessionID `json:"session,string"`
	RegisteredMs uint64         `json:"registered_ms"`
	// Since is the number of the oldest checkpoint that may hold what was written under
	// the name, since it became known; 0: any.
	Since uint64 `json:"since,omitempty"`

	Revision base.Revision `json:"-"`
}

// Position is the part of a participant in a checkpoint.
type Position struct {
	Checkpoint  uint64 `json:"checkpoint"`
	Participant string `json:"participant"`
	// Registration is the number of the registration that the checkpoint waits
	// for, Session its session.
	Registration uint64         `json:"registration"`
	Session      base.SessionID `json:"session,string"`
	// Given says that it has acknowledged, with Bytes.
	Given     bool   `json:"given,omitempty"`
	Bytes     []byte `json:"bytes,omitempty"`
	UpdatedMs uint64 `json:"updated_ms"`

	Revision base.Revision `json:"-"`
}

// RestoredPosition is what a participant had given to the checkpoint that the
// cluster was last taken back to, or was made of.
type RestoredPosition struct {
	Participant string `json:"participant"`
	// Cluster is the one that has made the checkpoint, empty for this one.
	Cluster    base.ClusterID `json:"cluster,omitempty"`
	Checkpoint uint64         `json:"checkpoint"`
	// Incarnation is the one that began with the checkpoint.
	Incarnation base.Incarnation `json:"incarnation"`
	Bytes       []byte           `json:"bytes,omitempty"`

	Revision base.Revision `json:"-"`
}

// positionKey has the number in front, so that those of a checkpoint have one
// prefix (deleteOf).
func positionKey(checkpoint uint64, participant string) string {
	return idKey(kindPosition, checkpoint) + "/" + participant
}

// Participant returns a registered participant, or nil.
func (v *View) Participant(id string) *Participant { p, _ := v.participants.Get(id); return p }

// Participants returns all that are registered, those with an ended session too,
// in the order of their ids.
func (v *View) Participants() []*Participant { return v.participants.Values() }

// Takes says whether a participant takes part in checkpoints that start now.
func (v *View) Takes(p *Participant) bool { return v.SessionAlive(p.Session) }

// Position returns the part of a participant in a checkpoint, or nil.
func (v *View) Position(checkpoint uint64, participant string) *Position {
	p, _ := v.positions.Get(numbersKey(checkpoint) + participant)
	return p
}

// Positions returns the parts of all participants in a checkpoint, in the order of
// their ids; none of one that has failed or is not kept.
func (v *View) Positions(checkpoint uint64) []*Position {
	var list []*Position
	v.positions.Ascend(numbersKey(checkpoint), func(_ string, p *Position) bool {
		if p.Checkpoint != checkpoint {
			return false
		}
		list = append(list, p)
		return true
	})
	return list
}

// RestoredPosition returns what a participant is given back, or nil.
func (v *View) RestoredPosition(participant string) *RestoredPosition {
	p, _ := v.restored.Get(participant)
	return p
}

// LostParticipant returns the first participant of a checkpoint whose registration
// has ended since the start, or "": who is registered again, or writes under another
// session, does not know where the cut is to be.
func (v *View) LostParticipant(checkpoint uint64) string {
	for _, p := range v.Positions(checkpoint) {
		if r := v.Participant(p.Participant); r == nil || r.Number != p.Registration || !v.SessionAlive(p.Session) {
			return p.Participant
		}
	}
	return ""
}

// WaitingFor returns the first participant that has not acknowledged a checkpoint,
// or "".
func (v *View) WaitingFor(checkpoint uint64) string {
	for _, p := range v.Positions(checkpoint) {
		if !p.Given {
			return p.Participant
		}
	}
	return ""
}

// PassedBarrier is the newest checkpoint of which shards may have passed the
// barrier (ME11).
func (v *View) PassedBarrier() uint64 {
	newest := v.NextCheckpoint() - 1
	if r := v.RunningCheckpoint(); r != nil && r.Phase == CheckpointWaiting {
		newest = r.Number - 1
	}
	return newest
}

// RegisterTxn registers a participant under a living session. The newest
// registration of an id counts: a checkpoint that waits for an older one fails. It
// is empty if the session has registered it already; base.ErrSessionEnded without a
// living session, base.ErrTooLarge if there are too many.
func RegisterTxn(v *View, nowMs uint64, id string, session base.SessionID) (broadcast.Txn, error) {
	if err := checkName("participant", id); err != nil {
		return broadcast.Txn{}, err
	}
	s, was := v.Session(session), v.Participant(id)
	switch {
	case v.Cluster() == nil:
		return broadcast.Txn{}, base.ErrNotFounded
	case s == nil:
		return broadcast.Txn{}, sessionEnded(session)
	case was != nil && was.Session == session:
		return broadcast.Txn{}, nil
	case was == nil && v.participants.Len() >= MaxParticipants:
		return broadcast.Txn{}, tooMany("participants", MaxParticipants)
	}
	var b builder
	var rev base.Revision
	if was != nil {
		rev = was.Revision
	}
	number := v.next(counterParticipant)
	since := v.PassedBarrier() + 1 // what is written from now on is behind those barriers
	if was != nil {
		since = was.Since
	}
	b.advance(v, counterParticipant, number+1) // no checkpoint starts or is put meanwhile
	b.expect(idKey(kindSession, uint64(session)), s.Revision)
	b.replace(kindParticipant, nameKey(kindParticipant, id), rev, Participant{ID: id, Number: number, Session: session, RegisteredMs: nowMs, Since: since})
	return b.done()
}

func sessionEnded(session base.SessionID) error {
	return &base.Error{Cause: base.ErrSessionEnded, Field: "session", Ordinal: -1, Hint: fmt.Sprintf("session %d has ended; register again under a new one", session)}
}

// UnregisterTxn ends a registration: that of the session only, or, with session 0,
// whoever's it is. It is empty if there is none such.
func UnregisterTxn(v *View, id string, session base.SessionID) (broadcast.Txn, error) {
	p := v.Participant(id)
	if p == nil || session != 0 && p.Session != session {
		return broadcast.Txn{}, nil
	}
	var b builder
	b.advance(v, counterParticipant, v.next(counterParticipant)+1)
	b.expect(nameKey(kindParticipant, id), p.Revision)
	b.delete(nameKey(kindParticipant, id))
	return b.done()
}

// ForgetTxn ends a registration whose session has ended, by an operator: nobody with
// that name takes part any more, and its positions are not kept longer than others.
// It is empty if there is none; base.ErrConflict if the session lives.
func ForgetTxn(v *View, id string) (broadcast.Txn, error) {
	if p := v.Participant(id); p != nil && v.Takes(p) {
		return broadcast.Txn{}, conflict("participant", fmt.Sprintf("the session that has registered %q lives", id))
	}
	return UnregisterTxn(v, id, 0)
}

// AcknowledgeTxn records the position of a participant for a checkpoint that waits
// for it. It is empty if the same was given already. base.ErrConflict says that
// the checkpoint waits for no such registration (any more), or that something else
// was given; base.ErrSessionEnded that the session has ended.
func AcknowledgeTxn(v *View, nowMs, number uint64, id string, session base.SessionID, position []byte) (broadcast.Txn, error) {
	if len(position) > MaxPositionBytes {
		return broadcast.Txn{}, tooMany("position", MaxPositionBytes)
	}
	if !v.SessionAlive(session) {
		return broadcast.Txn{}, sessionEnded(session)
	}
	c, p := v.Checkpoint(number), v.Position(number, id)
	switch {
	case c == nil:
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d is not running", number))
	case c.Phase == CheckpointFailed:
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d has failed: %s", number, c.Error))
	case p == nil || p.Session != session:
		return broadcast.Txn{}, conflict("participant", fmt.Sprintf("checkpoint %d does not wait for participant %q of session %d", number, id, session))
	case p.Given && bytes.Equal(p.Bytes, position):
		return broadcast.Txn{}, nil
	case p.Given || c.Phase != CheckpointWaiting:
		return broadcast.Txn{}, conflict("position", fmt.Sprintf("participant %q has given checkpoint %d another position", id, number))
	case c.PositionBytes+len(position) > MaxPositionsBytes:
		return broadcast.Txn{}, tooMany("positions", MaxPositionsBytes)
	}
	given, next := *p, *c
	given.Given, given.Bytes, given.UpdatedMs = true, position, max(nowMs, p.UpdatedMs)
	// Acknowledgements exclude each other, so that the sum is right.
	next.PositionBytes, next.UpdatedMs = c.PositionBytes+len(position), max(nowMs, c.UpdatedMs)
	var b builder
	b.replaceCheckpoint(&next)
	b.replace(kindPosition, positionKey(number, id), p.Revision, given)
	return b.done()
}

// PutBarriersTxn lets the shards pass the barrier of a checkpoint whose
// participants have all acknowledged, and whose registrations have lasted until
// this very transaction (ME11). It is empty if that was done; base.ErrConflict if
// one is missing.
func PutBarriersTxn(v *View, nowMs, number uint64) (broadcast.Txn, error) {
	c := v.Checkpoint(number)
	switch {
	case c == nil || !c.Running():
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d is not running", number))
	case c.Phase != CheckpointWaiting:
		return broadcast.Txn{}, nil
	}
	if id := v.LostParticipant(number); id != "" {
		return broadcast.Txn{}, conflict("participant", fmt.Sprintf("participant %q is lost", id))
	}
	if id := v.WaitingFor(number); id != "" {
		return broadcast.Txn{}, conflict("participant", fmt.Sprintf("participant %q has not acknowledged", id))
	}
	next := *c
	next.Phase, next.UpdatedMs = CheckpointAnnounced, max(nowMs, c.UpdatedMs)
	var b builder
	b.expectCounter(v, counterParticipant)
	for _, p := range v.Positions(number) {
		b.expect(idKey(kindSession, uint64(p.Session)), v.Session(p.Session).Revision)
	}
	b.replaceCheckpoint(&next)
	return b.done()
}

// await makes a new checkpoint wait for those who take part.
func (b *builder) await(v *View, c *Checkpoint) {
	b.expectCounter(v, counterParticipant)
	for _, p := range v.Participants() {
		if !v.Takes(p) {
			continue
		}
		c.Phase = CheckpointWaiting
		c.Participants++
		b.replace(kindPosition, positionKey(c.Number, p.ID), 0, Position{Checkpoint: c.Number, Participant: p.ID, Registration: p.Number, Session: p.Session, UpdatedMs: c.CreatedMs})
	}
}

// LastPosition returns what a participant has given to the newest checkpoint that
// the cluster can be rolled back to and that belongs to what the cluster holds: it
// is of the present incarnation, or the one that this began with. It returns nil if
// there is none.
func (v *View) LastPosition(participant string) *Position {
	var found *Position
	v.checkpoints.Reverse(func(n uint64, c *Checkpoint) bool {
		// The files of a savepoint are its owner's, who may have deleted them.
		if c.Phase == CheckpointCompleted && !c.Savepoint {
			found = v.present(c, participant)
		}
		return found == nil
	})
	return found
}

// LackedPosition is a participant whose writes a checkpoint may hold, and that has
// given it no position.
type LackedPosition struct {
	Participant string
	Alive       bool
	// Newest is the newest checkpoint with its position, 0 if none is kept.
	Newest uint64
}

// LackedPositions returns the registered participants that could not go on from a
// checkpoint, in the order of their names: its state may hold their writes, and it has
// no position of theirs.
func (v *View) LackedPositions(checkpoint uint64) []LackedPosition {
	var out []LackedPosition
	for _, p := range v.Participants() {
		if at := v.Position(checkpoint, p.ID); checkpoint >= p.Since && (at == nil || !at.Given) {
			out = append(out, LackedPosition{Participant: p.ID, Alive: v.Takes(p), Newest: v.newestWith(p.ID)})
		}
	}
	return out
}

// newestWith returns the newest checkpoint with the position of a participant, a
// savepoint only where there is no other; 0 for none.
func (v *View) newestWith(participant string) uint64 {
	var newest, saved uint64
	v.checkpoints.Reverse(func(n uint64, c *Checkpoint) bool {
		if at := v.Position(n, participant); c.Phase != CheckpointCompleted || at == nil || !at.Given {
			return true
		}
		if c.Savepoint {
			saved = max(saved, n)
			return true
		}
		newest = n
		return false
	})
	return cmp.Or(newest, saved)
}

// present returns the position in a checkpoint if that is no abandoned one: behind
// a rollback the checkpoints that it has left behind stay, until they are retired.
func (v *View) present(c *Checkpoint, participant string) *Position {
	p := v.Position(c.Number, participant)
	if p == nil || !p.Given || v.Cluster() == nil {
		return nil
	}
	if c.Incarnation == v.Cluster().Incarnation {
		return p
	}
	r := v.RestoredPosition(participant)
	if r == nil || r.Cluster != "" || r.Checkpoint != c.Number || r.Incarnation != v.Cluster().Incarnation {
		return nil
	}
	return p
}

// pinned are the checkpoints that registered participants need when the given one
// has completed (ME12).
func (v *View) pinned(completing *Checkpoint) map[uint64]bool {
	pins := make(map[uint64]bool)
	for _, p := range v.Participants() {
		if v.present(completing, p.ID) != nil {
			continue
		}
		if last := v.LastPosition(p.ID); last != nil {
			pins[last.Checkpoint] = true
		}
	}
	return pins
}

// giveBack makes the positions of a checkpoint those that participants are given
// back.
func (b *builder) giveBack(v *View, checkpoint uint64, incarnation base.Incarnation) {
	for _, old := range v.restored.Values() {
		if p := v.Position(checkpoint, old.Participant); p == nil || !p.Given {
			b.delete(nameKey(kindRestoredPosition, old.Participant))
		}
	}
	for _, p := range v.Positions(checkpoint) {
		if p.Given {
			b.put(kindRestoredPosition, nameKey(kindRestoredPosition, p.Participant),
				RestoredPosition{Participant: p.Participant, Checkpoint: checkpoint, Incarnation: incarnation, Bytes: p.Bytes})
		}
	}
}
