package meta

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

func TestSessionLivesByTheSystemClockUntilItIsEnded(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	w.do(OpenSessionTxn(w.view(), 10_000, 1, 5000))
	w.do(OpenSessionTxn(w.view(), 10_000, 9, 2000))
	if v := w.view(); v.Session(1).ExpiresMs != 15_000 || v.Clock() != 10_000 || v.NextSessionID() != 10 {
		t.Fatalf("opened: %s", dumpView(v))
	}
	// A leader whose clock is behind does not shorten a lease.
	txn, ended, err := KeepAliveTxn(w.view(), 9000, []base.SessionID{1, 9, 1, 5})
	if err != nil || !Empty(txn) || !slices.Equal(ended, []base.SessionID{5}) {
		t.Errorf("keep-alive behind the clock: %+v, %v, %v", txn, ended, err)
	}
	w.tick(11_999)
	if txn, ids, err := ExpireSessionsTxn(w.view()); err != nil || !Empty(txn) || ids != nil {
		t.Errorf("expired early: %v, %v", ids, err)
	}
	w.tick(12_000)
	stale, ids, err := ExpireSessionsTxn(w.view())
	if err != nil || !slices.Equal(ids, []base.SessionID{9}) || !w.view().SessionAlive(9) {
		t.Errorf("due: %v, %v", ids, err)
	}
	// A keep-alive that commits before the end saves the session.
	txn, _, err = KeepAliveTxn(w.view(), 12_000, []base.SessionID{9, 1})
	w.do(txn, err)
	if err := w.try(stale); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("expiry of a renewed session: %v", err)
	}
	if v := w.view(); v.Session(9).ExpiresMs != 14_000 || v.Session(1).ExpiresMs != 17_000 {
		t.Errorf("renewed: %s", dumpView(v))
	}
	w.tick(14_000)
	late, _, err := KeepAliveTxn(w.view(), 14_000, []base.SessionID{9})
	if err != nil {
		t.Fatal(err)
	}
	txn, _, err = ExpireSessionsTxn(w.view())
	w.do(txn, err)
	if err := w.try(late); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("keep-alive of an ended session: %v", err)
	}
	v := w.view()
	list, complete := v.Ended(0, 0)
	if v.SessionAlive(9) || !v.SessionAlive(1) || len(list) != 1 || !complete || list[0].ID != 9 || !list[0].Expired || list[0].Revision != v.Revision() {
		t.Errorf("ended: %s", dumpView(v))
	}
}

func TestClosingASession(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	w.do(OpenSessionTxn(w.view(), 1, 3, MinLeaseMs))
	w.do(CloseSessionTxn(w.view(), 3))
	txn, err := CloseSessionTxn(w.view(), 3)
	if err != nil || !Empty(txn) || w.view().SessionAlive(3) {
		t.Errorf("closing twice: %+v, %v", txn, err)
	}
	for _, id := range []base.SessionID{0, 4} {
		_, err := CloseSessionTxn(w.view(), id)
		wantField(t, "closing what never was", err, base.ErrNotFound, "session")
	}
}

// ME1: an id is never used twice, whatever became of its session.
func TestSessionIDsAreNeverReused(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	old := w.view()
	w.do(OpenSessionTxn(w.view(), 1, 3, MinLeaseMs))
	for _, closed := range []bool{false, true} {
		for _, id := range []base.SessionID{0, 1, 3, ^base.SessionID(0)} {
			_, err := OpenSessionTxn(w.view(), 1, id, MinLeaseMs)
			wantField(t, "a used id", err, base.ErrConflict, "session")
		}
		txn, err := OpenSessionTxn(old, 1, 5, MinLeaseMs)
		if err != nil || !errors.Is(w.try(txn), base.ErrPrecondition) {
			t.Errorf("an id from an old view: %v", err)
		}
		if !closed {
			w.do(CloseSessionTxn(w.view(), 3))
		}
	}
	for _, lease := range []uint64{0, MinLeaseMs - 1, MaxLeaseMs + 1} {
		_, err := OpenSessionTxn(w.view(), 1, 4, lease)
		wantField(t, "lease", err, base.ErrInvalid, "lease_ms")
	}
}

// ME3: the list of the ended is bounded, and whoever has read up to the floor
// misses nothing.
func TestListOfEndedSessionsIsBounded(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	total := MaxEndedSessions + 2*MaxSessionBatch
	id := base.SessionID(1)
	var revs []base.Revision
	for opened := 0; opened < total; opened += MaxSessionBatch {
		// Opened in one command, as Join would, to keep the test short.
		var b builder
		for range MaxSessionBatch {
			b.replace(kindSession, idKey(kindSession, uint64(id)), 0, Session{ID: id, LeaseMs: 1, ExpiresMs: 1})
			id++
		}
		b.txn.Stamp = 10
		w.do(b.done())
		txn, ids, err := ExpireSessionsTxn(w.quick())
		if len(ids) != MaxSessionBatch {
			t.Fatalf("%d sessions expire at once", len(ids))
		}
		w.do(txn, err)
		revs = append(revs, w.store.Snapshot().Revision())
	}
	v := w.quick()
	if v.SessionCount() != 0 || v.EndedCount() > MaxEndedSessions || v.EndedCount() < MaxEndedSessions-MaxSessionBatch {
		t.Fatalf("%d living, %d ended", v.SessionCount(), v.EndedCount())
	}
	if list, complete := v.Ended(0, 10); complete || len(list) != 10 {
		t.Errorf("from the beginning: %d, complete %v", len(list), complete)
	}
	for i, rev := range revs {
		list, complete := v.Ended(rev, 0)
		if complete != (rev >= v.EndedFloor()) || (complete && len(list) != (len(revs)-1-i)*MaxSessionBatch) {
			t.Errorf("after revision %d, floor %d: %d, complete %v", rev, v.EndedFloor(), len(list), complete)
		}
	}
}

// Random opens, renewals, expiries and closes against a map of the living.
func TestSessionRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, broadcast.Options{HistoryEvents: 20})
		now := uint64(1)
		alive := map[base.SessionID]uint64{} // until
		ended := map[base.SessionID]bool{}
		pick := func(t *rapid.T) base.SessionID {
			return base.SessionID(rapid.Uint64Range(1, uint64(w.view().NextSessionID())).Draw(t, "id"))
		}
		t.Repeat(map[string]func(*rapid.T){
			"tick": func(t *rapid.T) { now += rapid.Uint64Range(0, 3000).Draw(t, "ms"); w.tick(now) },
			"open": func(t *rapid.T) {
				id := w.view().NextSessionID() + base.SessionID(rapid.Uint64Range(0, 3).Draw(t, "skip"))
				w.do(OpenSessionTxn(w.view(), now, id, 2000))
				alive[id] = now + 2000
			},
			"keep": func(t *rapid.T) {
				ids := []base.SessionID{pick(t), pick(t)}
				txn, gone, err := KeepAliveTxn(w.view(), now, ids)
				w.do(txn, err)
				for _, id := range ids {
					if _, ok := alive[id]; ok == slices.Contains(gone, id) {
						t.Fatalf("session %d, alive %v, reported ended %v", id, ok, gone)
					} else if ok {
						alive[id] = now + 2000
					}
				}
			},
			"close": func(t *rapid.T) {
				id := pick(t)
				if txn, err := CloseSessionTxn(w.view(), id); err == nil {
					w.do(txn, nil)
					if _, ok := alive[id]; ok {
						ended[id] = true
						delete(alive, id)
					}
				}
			},
			"expire": func(t *rapid.T) {
				txn, ids, err := ExpireSessionsTxn(w.view())
				w.do(txn, err)
				for id, until := range alive {
					if (until <= w.view().Clock()) != slices.Contains(ids, id) {
						t.Fatalf("session %d until %d at %d: expired %v", id, until, w.view().Clock(), ids)
					}
				}
				for _, id := range ids {
					ended[id] = true
					delete(alive, id)
				}
			},
			"": func(t *rapid.T) {
				v := w.view()
				list, complete := v.Ended(0, 0)
				if v.SessionCount() != len(alive) || len(list) != len(ended) || !complete {
					t.Fatalf("%d living and %d ended, the model has %d and %d", v.SessionCount(), len(list), len(alive), len(ended))
				}
				for id := range alive {
					if !v.SessionAlive(id) {
						t.Fatalf("session %d is gone", id)
					}
				}
				if !slices.IsSortedFunc(list, func(a, b *EndedSession) int { return int(a.Revision) - int(b.Revision) }) {
					t.Fatal("the ended are not in the order of their end")
				}
			},
		})
	})
}
