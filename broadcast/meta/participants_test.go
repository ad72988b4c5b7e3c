package meta

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// session opens one that lasts for lease milliseconds.
func (w *world) session(lease uint64) base.SessionID {
	w.t.Helper()
	id := w.quick().NextSessionID()
	w.do(OpenSessionTxn(w.quick(), 1000, id, lease))
	return id
}

func (w *world) register(id string) base.SessionID {
	w.t.Helper()
	s := w.session(60_000)
	w.do(RegisterTxn(w.view(), 7, id, s))
	return s
}

// ME11: shards have no part before all have acknowledged, and then all is as
// without participants.
func TestParticipantsAcknowledgeBeforeTheBarrier(t *testing.T) {
	w := founded(t)
	a, b := w.register("a"), w.register("b")
	c := w.start()
	if c.Phase != CheckpointWaiting || c.Participants != 2 || !c.Running() || w.view().WaitingFor(c.Number) != "a" || w.view().PassedBarrier() != c.Number-1 {
		t.Fatalf("%+v, passed %d", c, w.view().PassedBarrier())
	}
	s := w.view().CheckpointShards(c.Number)[0]
	if _, err := ReportFlushedTxn(w.view(), 1, c.Number, s.Group, s.Attempt); !errors.Is(err, base.ErrConflict) {
		t.Errorf("flushed while it waits: %v", err)
	}
	w.do(AcknowledgeTxn(w.view(), 8, c.Number, "b", b, []byte("B")))
	if _, err := PutBarriersTxn(w.view(), 9, c.Number); !errors.Is(err, base.ErrConflict) {
		t.Errorf("barriers without a: %v", err)
	}
	w.do(AcknowledgeTxn(w.view(), 8, c.Number, "a", a, nil))
	if txn, err := AcknowledgeTxn(w.view(), 8, c.Number, "b", b, []byte("B")); err != nil || !Empty(txn) {
		t.Errorf("the same again: %v, %v", txn, err)
	}
	_, err := AcknowledgeTxn(w.view(), 8, c.Number, "b", b, []byte("C"))
	wantField(t, "another position", err, base.ErrConflict, "position")
	w.do(PutBarriersTxn(w.view(), 9, c.Number))
	if txn, err := PutBarriersTxn(w.view(), 9, c.Number); err != nil || !Empty(txn) {
		t.Errorf("barriers again: %v, %v", txn, err)
	}
	if c := w.view().Checkpoint(c.Number); c.Phase != CheckpointAnnounced || c.PositionBytes != 1 || w.view().PassedBarrier() != c.Number {
		t.Errorf("%+v", c)
	}
	w.upload(c, nil, nil)
	w.complete(c, 1)
	if p := w.view().Positions(c.Number); len(p) != 2 || string(p[1].Bytes) != "B" || !p[0].Given {
		t.Errorf("positions %+v", p)
	}
	if p := w.view().LastPosition("b"); p == nil || p.Checkpoint != c.Number {
		t.Errorf("last position %+v", p)
	}
}

// What ends a registration between the start and the barriers keeps them from being
// put, also where it comes between the view and the transaction.
func TestBarriersNeedLastingRegistrations(t *testing.T) {
	for _, x := range []struct {
		what string
		do   func(w *world, s base.SessionID)
	}{
		{"session closed", func(w *world, s base.SessionID) { w.do(CloseSessionTxn(w.view(), s)) }},
		{"session expired", func(w *world, _ base.SessionID) {
			w.tick(10_000_000)
			txn, _, err := ExpireSessionsTxn(w.view())
			w.do(txn, err)
		}},
		{"registered again", func(w *world, _ base.SessionID) { w.register("a") }},
		{"unregistered", func(w *world, s base.SessionID) { w.do(UnregisterTxn(w.view(), "a", s)) }},
		{"by an operator", func(w *world, _ base.SessionID) { w.do(UnregisterTxn(w.view(), "a", 0)) }},
	} {
		w := founded(t)
		s := w.register("a")
		c := w.start()
		w.do(AcknowledgeTxn(w.view(), 8, c.Number, "a", s, []byte("A")))
		late, err := PutBarriersTxn(w.view(), 9, c.Number)
		if err != nil {
			t.Fatal(err)
		}
		x.do(w, s)
		if err := w.try(late); !errors.Is(err, base.ErrPrecondition) {
			t.Errorf("%s: barriers from the view before: %v", x.what, err)
		}
		if _, err := PutBarriersTxn(w.view(), 9, c.Number); !errors.Is(err, base.ErrConflict) || w.view().LostParticipant(c.Number) != "a" {
			t.Errorf("%s: %v, lost %q", x.what, err, w.view().LostParticipant(c.Number))
		}
		w.do(FailCheckpointTxn(w.view(), 9, c.Number, "lost"))
		if len(w.view().Positions(c.Number)) != 0 {
			t.Errorf("%s: positions of a failed checkpoint are left", x.what)
		}
	}
}

// One that is registered between the view and the start is not left out.
func TestRegistrationExcludesAStartThatMissesIt(t *testing.T) {
	w := founded(t)
	late, _, err := StartCheckpointTxn(w.view(), 1, CheckpointSpec{TimeoutMs: 1, Uploaders: uploaders(w.view())})
	if err != nil {
		t.Fatal(err)
	}
	w.register("a")
	if err := w.try(late); !errors.Is(err, base.ErrPrecondition) {
		t.Fatalf("a start that does not know the participant: %v", err)
	}
}

func TestRegistrationIsRefused(t *testing.T) {
	w := founded(t)
	s := w.session(60_000)
	for _, x := range []struct {
		id      string
		session base.SessionID
		want    *base.Sentinel
	}{
		{"", s, base.ErrInvalid}, {"a/b", s, base.ErrInvalid}, {strings.Repeat("x", MaxNameBytes+1), s, base.ErrInvalid}, {"a\n", s, base.ErrInvalid},
		{"a", s + 1, base.ErrSessionEnded}, {"a", 0, base.ErrSessionEnded},
	} {
		if _, err := RegisterTxn(w.view(), 1, x.id, x.session); !errors.Is(err, x.want) {
			t.Errorf("%.20q by session %d: %v", x.id, x.session, err)
		}
	}
	for i := range MaxParticipants {
		w.do(RegisterTxn(w.quick(), 1, fmt.Sprintf("p%02d", i), s))
	}
	if _, err := RegisterTxn(w.view(), 1, "more", s); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("one too many: %v", err)
	}
	if txn, err := RegisterTxn(w.view(), 1, "p00", s); err != nil || !Empty(txn) {
		t.Errorf("again: %v %v", txn, err)
	}
	c := w.start()
	if c.Participants != MaxParticipants {
		t.Fatalf("%+v", c)
	}
	big := make([]byte, MaxPositionBytes)
	if _, err := AcknowledgeTxn(w.view(), 1, c.Number, "p00", s, append(big, 0)); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("a position too large: %v", err)
	}
	w.do(AcknowledgeTxn(w.quick(), 1, c.Number, "p00", s, big))
	w.do(AcknowledgeTxn(w.quick(), 1, c.Number, "p01", s, big))
	if _, err := AcknowledgeTxn(w.view(), 1, c.Number, "p02", s, []byte{0}); !errors.Is(err, base.ErrTooLarge) {
		t.Errorf("positions too large: %v", err)
	}
}

// run takes a checkpoint through all phases; with a session the participant "a"
// acknowledges with the number.
func (w *world) run(session base.SessionID, retain int) uint64 {
	w.t.Helper()
	c := w.start()
	w.acknowledge(c, session)
	w.upload(c, nil, nil)
	w.complete(c, retain)
	return c.Number
}

func (w *world) acknowledge(c *Checkpoint, session base.SessionID) {
	w.t.Helper()
	if c.Phase == CheckpointWaiting {
		w.do(AcknowledgeTxn(w.quick(), 1, c.Number, "a", session, fmt.Append(nil, c.Number)))
		w.do(PutBarriersTxn(w.quick(), 1, c.Number))
	}
}

// ME12: the newest checkpoint with the position of a participant that is away
// stays, until there is a newer one, or the participant is unregistered.
func TestCheckpointThatAParticipantNeedsStays(t *testing.T) {
	completed := func(w *world) (list []uint64) {
		for _, c := range w.view().Checkpoints() {
			if c.Phase == CheckpointCompleted {
				list = append(list, c.Number)
			}
		}
		return list
	}
	w := founded(t)
	s := w.register("a")
	w.run(s, 1)
	two := w.run(s, 1)
	// A savepoint with a newer position takes no checkpoint's place: its files are
	// its owner's.
	c := w.startSavepoint()
	w.acknowledge(c, s)
	c, _ = w.saveInto(c, true)
	if p := w.view().LastPosition("a"); p == nil || p.Checkpoint != two || !w.view().Position(c.Number, "a").Given {
		t.Fatalf("beside savepoint %d the position is %+v, want that of %d", c.Number, p, two)
	}
	w.do(DeleteSavepointTxn(w.view(), 1, c.Number))
	w.do(PlanDeletionsTxn(w.view(), 1))
	w.do(CloseSessionTxn(w.view(), s))
	w.run(0, 1)
	four := w.run(0, 1)
	if got := completed(w); fmt.Sprint(got) != fmt.Sprint([]uint64{two, four}) || w.view().LastPosition("a").Checkpoint != two {
		t.Fatalf("retained %v", got)
	}
	s = w.register("a")
	five := w.run(s, 1)
	if got := completed(w); fmt.Sprint(got) != fmt.Sprint([]uint64{five}) {
		t.Fatalf("retained %v after a new position", got)
	}
	w.do(UnregisterTxn(w.view(), "a", s))
	six := w.run(0, 1)
	if got := completed(w); fmt.Sprint(got) != fmt.Sprint([]uint64{six}) {
		t.Fatalf("retained %v once it is unregistered", got)
	}
}

// An operator forgets a name whose session has ended, and no other.
func TestForgetRefusesALivingSession(t *testing.T) {
	w := founded(t)
	s := w.register("a")
	if _, err := ForgetTxn(w.view(), "a"); !errors.Is(err, base.ErrConflict) || !strings.Contains(err.Error(), `"a" lives`) {
		t.Errorf("forgetting a living one: %v", err)
	}
	if txn, err := ForgetTxn(w.view(), "b"); err != nil || !Empty(txn) {
		t.Errorf("forgetting nobody: %+v, %v", txn, err)
	}
	late, err := UnregisterTxn(w.view(), "a", s)
	if err != nil {
		t.Fatal(err)
	}
	w.do(CloseSessionTxn(w.view(), s))
	w.do(ForgetTxn(w.view(), "a"))
	if w.view().Participant("a") != nil {
		t.Error("it is known still")
	}
	w.register("a")
	if err := w.try(late); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("an older end of the registration: %v", err)
	}
}

// rollAllBack takes the world back to a checkpoint.
func (w *world) rollAllBack(number uint64) {
	w.t.Helper()
	op := w.rollBack(number)
	leader := func(g base.GroupID) base.NodeID { return w.quick().Shard(g).Replicas[0].Node }
	for _, s := range w.quick().Shards() {
		for _, r := range s.Replicas {
			w.do(ReportPreparedTxn(w.quick(), 1, op.ID, s.ID, r.ReplicaID))
		}
	}
	for _, state := range []RollbackShardState{RollbackShardFenced, RollbackShardSwapped, RollbackShardOpen} {
		w.do(RollbackPhaseTxn(w.quick(), 1, op.ID, leader))
		for _, s := range w.quick().Shards() {
			w.do(ReportRollbackStateTxn(w.quick(), 1, op.ID, s.ID, state))
		}
	}
	w.do(RollbackPhaseTxn(w.quick(), 1, op.ID, leader))
	if w.view().RunningRollback() != nil {
		w.t.Fatalf("the rollback has not ended")
	}
}

// A rollback gives positions back, and what it leaves behind is no place to go to.
func TestRollbackGivesPositionsBack(t *testing.T) {
	w := placed(t)
	s := w.register("a")
	one := w.run(s, 10)
	w.run(s, 10)
	w.rollAllBack(one)
	if w.view().SessionAlive(s) || w.view().Takes(w.view().Participant("a")) {
		t.Error("the session has outlived the rollback")
	}
	r := w.view().RestoredPosition("a")
	if r == nil || r.Checkpoint != one || r.Incarnation != w.view().Cluster().Incarnation || string(r.Bytes) != "1" {
		t.Fatalf("given back %+v", r)
	}
	if p := w.view().LastPosition("a"); p == nil || p.Checkpoint != one {
		t.Errorf("last position %+v, not that of checkpoint %d", p, one)
	}
	s = w.register("a")
	three := w.run(s, 10)
	if p := w.view().LastPosition("a"); p.Checkpoint != three {
		t.Errorf("last position %+v", p)
	}
	// To one without it: there is nothing to give back.
	w.do(UnregisterTxn(w.view(), "a", s))
	four := w.run(0, 10)
	w.rollAllBack(four)
	if r, p := w.view().RestoredPosition("a"), w.view().LastPosition("a"); r != nil || p != nil {
		t.Errorf("given back %+v, last %+v", r, p)
	}
}

// Random steps from views of any age: no checkpoint leaves the first phase without
// the position of everyone who was registered when it started, under a registration
// that lasted.
func TestParticipantsModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		w := founded(r)
		ids := []string{"a", "b", "c"}
		sessions := []base.SessionID{w.session(60_000), w.session(60_000), w.session(60_000)}
		views := []*View{w.quick()}
		for range 60 {
			v := views[len(views)-1-rapid.IntRange(0, min(len(views)-1, 3)).Draw(r, "age")]
			id := rapid.SampledFrom(ids).Draw(r, "id")
			s := rapid.SampledFrom(sessions).Draw(r, "session")
			number := max(v.NextCheckpoint(), 2) - 1
			was := w.quick().RunningCheckpoint()
			var txn broadcast.Txn
			var err error
			switch rapid.IntRange(0, 6).Draw(r, "step") {
			case 0:
				txn, err = RegisterTxn(v, 1, id, s)
			case 1:
				txn, err = UnregisterTxn(v, id, s)
			case 2:
				txn, _, err = StartCheckpointTxn(v, 1, CheckpointSpec{TimeoutMs: 1, Uploaders: uploaders(v)})
			case 3:
				txn, err = AcknowledgeTxn(v, 1, number, id, s, fmt.Append(nil, number))
			case 4:
				txn, err = PutBarriersTxn(v, 1, number)
			case 5:
				if rapid.IntRange(0, 3).Draw(r, "end") == 0 {
					txn, err = CloseSessionTxn(v, s)
					sessions = append(sessions, w.session(60_000))
				}
			case 6:
				if rapid.IntRange(0, 2).Draw(r, "fail") == 0 {
					txn, err = FailCheckpointTxn(v, 1, number, "test")
				}
			}
			if err != nil || Empty(txn) {
				continue
			}
			before := w.quick()
			if w.try(txn) != nil {
				continue
			}
			now := w.quick()
			views = append(views, now)
			c := now.RunningCheckpoint()
			if c == nil {
				continue
			}
			if was == nil {
				// One whose session has ended between the view and now may be listed; it is lost.
				for _, p := range before.Participants() {
					if at := now.Position(c.Number, p.ID); before.Takes(p) && (at == nil || at.Registration != p.Number) {
						r.Fatalf("checkpoint %+v started without %+v: %+v", c, p, at)
					}
				}
				if n := len(now.Positions(c.Number)); c.Participants != n || (n > 0) != (c.Phase == CheckpointWaiting) {
					r.Fatalf("checkpoint %+v started with %d participants", c, n)
				}
			} else if was.Phase == CheckpointWaiting && c.Phase == CheckpointAnnounced {
				for _, p := range now.Positions(c.Number) {
					reg := now.Participant(p.Participant)
					if !p.Given || reg == nil || reg.Number != p.Registration || !now.SessionAlive(p.Session) {
						r.Fatalf("barriers are put without %+v, registered %+v", p, reg)
					}
				}
			}
		}
	})
}

// tryBack starts a rollback that is not forced.
func (w *world) tryBack(number uint64, force bool) (broadcast.Txn, error) {
	txn, _, err := StartRollbackTxn(w.quick(), 1, RollbackStart{Checkpoint: number, TimeoutMs: 1, Force: force})
	return txn, err
}

// ME15: what a checkpoint may hold of a participant that has no position in it keeps
// the cluster from going back there, whether it lives or not, as long as it is known.
func TestRollbackNeedsThePositionsOfParticipants(t *testing.T) {
	w := placed(t)
	before := w.run(0, 9)
	session := w.register("a")
	with := w.run(session, 9)
	w.do(CloseSessionTxn(w.view(), session))
	without := w.run(0, 9)
	newest := w.run(0, 9)
	for _, number := range []uint64{before, with} {
		if _, err := w.tryBack(number, false); err != nil {
			t.Errorf("back to checkpoint %d: %v", number, err)
		}
	}
	refuse := func(number uint64, alive bool) {
		t.Helper()
		_, err := w.tryBack(number, false)
		wantField(t, "without its position", err, base.ErrPrecondition, "participant")
		refusedWith(t, base.ErrPrecondition, fmt.Sprintf("%q and has no position of it; the newest one that has is %d", "a", with), err)
		if l := w.quick().LackedPositions(number); len(l) != 1 || l[0] != (LackedPosition{Participant: "a", Alive: alive, Newest: with}) {
			t.Errorf("%+v", l)
		}
	}
	refuse(without, false)
	refuse(newest, false)
	if _, err := w.tryBack(without, true); err != nil {
		t.Errorf("forced: %v", err)
	}
	w.register("a") // again: it has been known all the time
	refuse(newest, true)
	if l := w.quick().LackedPositions(before); len(l) != 0 {
		t.Errorf("of before it was known: %+v", l)
	}
	late, err := w.tryBack(before, false)
	if err != nil {
		t.Fatal(err)
	}
	w.register("b")
	if err := w.try(late); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("one came between the view and the start: %v", err)
	}
	w.do(UnregisterTxn(w.view(), "a", 0))
	if txn, err := w.tryBack(without, false); err != nil {
		t.Errorf("forgotten: %v", err)
	} else {
		w.do(txn, nil)
	}
}

// A checkpoint that waits when a participant becomes known may hold what that one
// writes: its barriers are not put yet. One whose barriers are put does not.
func TestParticipantIsKnownSinceTheBarriers(t *testing.T) {
	w := placed(t)
	a := w.register("a")
	waits := w.start()
	w.do(RegisterTxn(w.view(), 7, "b", a))
	w.acknowledge(waits, a)
	w.do(RegisterTxn(w.view(), 7, "c", a))
	w.upload(waits, nil, nil)
	w.complete(waits, 9)
	var names []string
	for _, l := range w.view().LackedPositions(waits.Number) {
		names = append(names, l.Participant)
	}
	if strings.Join(names, " ") != "b" {
		t.Errorf("lacked by %v", names)
	}
	_, err := w.tryBack(waits.Number, false)
	refusedWith(t, base.ErrPrecondition, "none that is kept has", err)
}
