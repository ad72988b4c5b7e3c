package meta

import (
	"fmt"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// Limits of sessions.
const (
	// MinLeaseMs and MaxLeaseMs bound a lease.
	MinLeaseMs = 1_000
	MaxLeaseMs = 24 * 3600 * 1000
	// MaxEndedSessions bounds the list of ended sessions (ME3): whoever ends a
	// session cuts the list to it.
	MaxEndedSessions = 1 << 16
	// MaxSessionBatch bounds the sessions that one transaction ends or keeps.
	MaxSessionBatch = 10_000
)

// OpenSessionTxn opens a session with the id that the leader chose, which must
// not be below v.NextSessionID(). Ids are never used again (ME1). nowMs is what the
// leader's clock may be by now; the lease counts from it, or from the system clock
// if that is later.
func OpenSessionTxn(v *View, nowMs uint64, id base.SessionID, leaseMs uint64) (broadcast.Txn, error) {
	if leaseMs < MinLeaseMs || leaseMs > MaxLeaseMs {
		return broadcast.Txn{}, base.Invalid("lease_ms", fmt.Sprintf("must be from %d to %d", MinLeaseMs, MaxLeaseMs))
	}
	if id < v.NextSessionID() || id == ^base.SessionID(0) {
		return broadcast.Txn{}, conflict("session", fmt.Sprintf("ids up to %d are used", v.NextSessionID()-1))
	}
	b := builder{txn: broadcast.Txn{Stamp: nowMs}}
	b.advance(v, counterSession, uint64(id)+1)
	b.replace(kindSession, idKey(kindSession, uint64(id)), 0, Session{ID: id, LeaseMs: leaseMs, ExpiresMs: expiry(v, nowMs, leaseMs)})
	return b.done()
}

func expiry(v *View, nowMs, leaseMs uint64) uint64 { return max(nowMs, v.Clock()) + leaseMs }

// KeepAliveTxn renews the leases of sessions, at most MaxSessionBatch of them.
// It returns those that have ended or never were, to be refused with
// base.ErrSessionEnded; they do not keep the others from being renewed. An id
// may be named twice. A lease is never made shorter.
func KeepAliveTxn(v *View, nowMs uint64, ids []base.SessionID) (txn broadcast.Txn, ended []base.SessionID, err error) {
	if len(ids) > MaxSessionBatch {
		return txn, nil, tooMany("sessions", MaxSessionBatch)
	}
	b := builder{txn: broadcast.Txn{Stamp: nowMs}}
	named := make(map[base.SessionID]struct{}, len(ids))
	for _, id := range ids {
		if _, twice := named[id]; twice {
			continue
		}
		named[id] = struct{}{}
		s := v.Session(id)
		if s == nil {
			ended = append(ended, id)
			continue
		}
		if until := expiry(v, nowMs, s.LeaseMs); until > s.ExpiresMs {
			b.replace(kindSession, idKey(kindSession, uint64(id)), s.Revision, Session{ID: id, LeaseMs: s.LeaseMs, ExpiresMs: until})
		}
	}
	txn, err = b.done()
	return txn, ended, err
}

// ExpireSessionsTxn ends the sessions whose lease is past by the system clock,
// at most MaxSessionBatch of them; it returns which. It is empty if there are
// none.
func ExpireSessionsTxn(v *View) (txn broadcast.Txn, expired []base.SessionID, err error) {
	var due []*Session
	v.ScanSessions(func(s *Session) bool {
		if s.ExpiresMs <= v.Clock() {
			due = append(due, s)
		}
		return len(due) < MaxSessionBatch
	})
	if len(due) == 0 {
		return txn, nil, nil
	}
	var b builder
	b.end(v, due, true)
	for _, s := range due {
		expired = append(expired, s.ID)
	}
	txn, err = b.done()
	return txn, expired, err
}

// CloseSessionTxn ends a session at its owner's wish. Closing one that has
// ended already does nothing; one that never was is base.ErrNotFound.
func CloseSessionTxn(v *View, id base.SessionID) (broadcast.Txn, error) {
	s := v.Session(id)
	if s == nil {
		if id == 0 || id >= v.NextSessionID() {
			return broadcast.Txn{}, notFound("session", fmt.Sprintf("no session %d", id))
		}
		return broadcast.Txn{}, nil
	}
	var b builder
	b.end(v, []*Session{s}, false)
	return b.done()
}

// end moves sessions to the list of the ended, and cuts that list (ME2, ME3).
func (b *builder) end(v *View, list []*Session, expired bool) {
	for _, s := range list {
		key := idKey(kindSession, uint64(s.ID))
		b.expect(key, s.Revision)
		b.delete(key)
		b.put(kindEnded, idKey(kindEnded, uint64(s.ID)), EndedSession{ID: s.ID, EndedMs: v.Clock(), Expired: expired})
	}
	b.cutEnded(v, MaxEndedSessions-len(list))
}

// cutEnded leaves the newest keep ended sessions, and moves the floor.
func (b *builder) cutEnded(v *View, keep int) {
	excess := v.EndedCount() - keep
	if excess <= 0 {
		return
	}
	floor := v.EndedFloor()
	v.ended.Scan(func(_ string, e *EndedSession) bool {
		b.delete(idKey(kindEnded, uint64(e.ID)))
		floor = max(floor, e.Revision)
		excess--
		return excess > 0
	})
	b.replace(kindEndedFloor, endedFloorKey, v.floorRev, endedFloor{Revision: floor})
}

func tooMany(field string, limit int) error {
	return &base.Error{Cause: base.ErrTooLarge, Field: field, Hint: fmt.Sprintf("the limit is %d", limit), Ordinal: -1}
}
