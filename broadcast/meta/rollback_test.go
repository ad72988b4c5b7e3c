package meta

import (
	"errors"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// rollBack starts a rollback.
func (w *world) rollBack(number uint64) *Rollback {
	w.t.Helper()
	txn, op, err := StartRollbackTxn(w.quick(), 9000, RollbackStart{Checkpoint: number, TimeoutMs: 60000})
	w.do(txn, err)
	return w.view().Rollback(op.ID)
}

// leads is a function for the transactions that ask who leads.
func leads(n base.NodeID) func(base.GroupID) base.NodeID {
	return func(base.GroupID) base.NodeID { return n }
}

// completed takes a checkpoint.
func (w *world) completed(name string) uint64 {
	w.t.Helper()
	c := w.start()
	w.upload(c, []string{"file " + name}, nil)
	w.complete(c, 9)
	return c.Number
}

// placed is founded with the founding at its end.
func placed(t fataler) *world {
	w := founded(t)
	w.do(AdvanceOperationTxn(w.quick(), 1, foundingOperation, PhaseDone, ""))
	return w
}

func refusedWith(t *testing.T, s *base.Sentinel, text string, err error) {
	t.Helper()
	if !errors.Is(err, s) || !strings.Contains(err.Error(), text) {
		t.Errorf("%v, want %v with %q", err, s, text)
	}
}

func TestRollbackGoesFromPhaseToPhase(t *testing.T) {
	w := placed(t)
	for i := range base.SessionID(3) {
		w.do(OpenSessionTxn(w.quick(), 1, i+1, 60000))
	}
	n := w.completed("a")
	r := w.rollBack(n)
	if r.Phase != PhaseRollbackPrepare || r.Incarnation != w.quick().Cluster().Incarnation+1 || r.Checkpoint != n || w.quick().RunningRollback().ID != r.ID {
		t.Fatalf("%+v", r)
	}
	shards := w.quick().RollbackShards(r.ID)
	if len(shards) != len(w.quick().Shards()) || shards[0].Epoch != w.quick().Shard(shards[0].Group).Epoch+1 || shards[0].State != RollbackShardServing {
		t.Fatalf("%+v", shards)
	}
	phase := func(leader base.NodeID) error {
		txn, err := RollbackPhaseTxn(w.quick(), 9500, r.ID, leads(leader))
		if err == nil {
			w.do(txn, nil)
			w.view()
		}
		return err
	}
	state := func(g base.GroupID, s RollbackShardState) error {
		txn, err := ReportRollbackStateTxn(w.quick(), 9500, r.ID, g, s)
		if err == nil && !Empty(txn) {
			w.do(txn, nil)
		}
		return err
	}
	refusedWith(t, base.ErrConflict, "not so far", phase("n1"))
	for _, s := range shards {
		replicas := w.quick().Shard(s.Group).Replicas
		for i, rep := range replicas {
			if i > len(replicas)/2 {
				break
			}
			refusedWith(t, base.ErrConflict, "not so far", phase("n1"))
			w.do(ReportPreparedTxn(w.quick(), 9100, r.ID, s.Group, rep.ReplicaID))
			if txn, err := ReportPreparedTxn(w.quick(), 9100, r.ID, s.Group, rep.ReplicaID); err != nil || !Empty(txn) {
				t.Errorf("again: %v %+v", err, txn)
			}
		}
	}
	refusedWith(t, base.ErrConflict, "not so far", phase("n3")) // who leads is not among them
	refusedWith(t, base.ErrConflict, "phase prepare", state(shards[0].Group, RollbackShardFenced))
	if err := phase("n1"); err != nil || w.quick().Rollback(r.ID).Phase != PhaseRollbackFence {
		t.Fatal(err)
	}
	for _, next := range []struct {
		state RollbackShardState
		phase string
	}{{RollbackShardFenced, PhaseRollbackSwap}, {RollbackShardSwapped, PhaseRollbackOpen}, {RollbackShardOpen, PhaseDone}} {
		_, err := AbortRollbackTxn(w.quick(), 1, r.ID, "too late")
		refusedWith(t, base.ErrConflict, "cannot be given up", err)
		for _, s := range shards {
			refusedWith(t, base.ErrConflict, "not so far", phase("n1"))
			if err := state(s.Group, next.state); err != nil {
				t.Fatal(err)
			}
		}
		before := w.quick()
		if before.Cluster().Incarnation == r.Incarnation && next.phase != PhaseDone || before.SessionCount() == 0 && next.phase != PhaseDone {
			t.Errorf("before %s the incarnation is %d, there are %d sessions", next.phase, before.Cluster().Incarnation, before.SessionCount())
		}
		if err := phase("n1"); err != nil || w.quick().Rollback(r.ID).Phase != next.phase {
			t.Fatalf("%v, %+v", err, w.quick().Rollback(r.ID))
		}
	}
	v := w.view()
	if v.Cluster().Incarnation != r.Incarnation || v.SessionCount() != 0 || v.EndedCount() != 3 || v.RunningRollback() != nil || len(v.RollbackShards(r.ID)) != 0 {
		t.Errorf("incarnation %d, %d sessions", v.Cluster().Incarnation, v.SessionCount())
	}
	for _, s := range shards {
		if v.Shard(s.Group).Epoch != s.Epoch {
			t.Errorf("shard %s has epoch %d", s.Group, v.Shard(s.Group).Epoch)
		}
	}
	_, err := ReportPreparedTxn(v, 1, r.ID, 1, "n1.1")
	refusedWith(t, base.ErrConflict, "running", err)
	w.completed("b") // goes on
	w.rollBack(n)    // though the epochs differ
}

// While a rollback runs no checkpoint starts, and the one that it goes back to
// stays, however their transactions meet (ME10).
func TestRollbackAndCheckpointsExcludeEachOther(t *testing.T) {
	w := placed(t)
	n := w.completed("a")
	v := w.quick()
	start, _, err := StartCheckpointTxn(v, 1, CheckpointSpec{TimeoutMs: 1000, Uploaders: uploaders(v)})
	if err != nil {
		t.Fatal(err)
	}
	remove, err := DeleteCheckpointTxn(v, 1, n)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := StartRollbackTxn(v, 1, RollbackStart{Checkpoint: n, TimeoutMs: 1000})
	if err != nil {
		t.Fatal(err)
	}
	open, err := OpenSessionTxn(v, 1, 1, 60000)
	if err != nil {
		t.Fatal(err)
	}
	r := w.rollBack(n)
	for what, txn := range map[string]broadcast.Txn{"a checkpoint": start, "its deletion": remove, "another rollback": other} {
		if err := w.try(txn); !errors.Is(err, base.ErrPrecondition) {
			t.Errorf("%s from the view before: %v", what, err)
		}
	}
	w.do(open, nil) // sessions go on
	_, _, err = StartCheckpointTxn(w.quick(), 1, CheckpointSpec{TimeoutMs: 1000, Uploaders: uploaders(w.quick())})
	refusedWith(t, base.ErrConflict, "rolling the cluster back", err)
	_, err = DeleteCheckpointTxn(w.quick(), 1, n)
	refusedWith(t, base.ErrConflict, "rolling the cluster back", err)
	refusedWith(t, base.ErrConflict, "rolling the cluster back", CheckRollback(w.quick(), n))
	w.do(AbortRollbackTxn(w.quick(), 1, r.ID, "enough"))
	if txn, err := AbortRollbackTxn(w.quick(), 1, r.ID, "again"); err != nil || !Empty(txn) {
		t.Errorf("giving up twice: %v", err)
	}
	if got := w.view().Rollback(r.ID); got.Phase != PhaseFailed || got.Error != "enough" || len(w.quick().RollbackShards(r.ID)) != 0 {
		t.Errorf("%+v", got)
	}
	c := w.start()
	refusedWith(t, base.ErrConflict, "is running", CheckRollback(w.quick(), n))
	refusedWith(t, base.ErrConflict, "announced", CheckRollback(w.quick(), c.Number))
	refusedWith(t, base.ErrNotFound, "", CheckRollback(w.quick(), 77))
}

// A checkpoint that only waits for participants fails with the start of a rollback;
// once the shards may pass its barriers the rollback is refused, however the
// transactions meet.
func TestRollbackEndsACheckpointThatWaits(t *testing.T) {
	w := placed(t)
	n := w.completed("a")
	session := w.register("a")
	c := w.start()
	if c.Phase != CheckpointWaiting {
		t.Fatalf("%+v", c)
	}
	if err := CheckRollback(w.quick(), n); err != nil {
		t.Errorf("while checkpoint %d waits: %v", c.Number, err)
	}
	late, _, err := StartRollbackTxn(w.quick(), 1, RollbackStart{Checkpoint: n, TimeoutMs: 1})
	if err != nil {
		t.Fatal(err)
	}
	w.acknowledge(c, session)
	if err := w.try(late); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("beside the barriers: %v", err)
	}
	_, _, err = StartRollbackTxn(w.quick(), 1, RollbackStart{Checkpoint: n, TimeoutMs: 1})
	refusedWith(t, base.ErrConflict, "is running", err)
	w.upload(c, nil, nil)
	w.complete(c, 9)

	c = w.start()
	barriers := func() broadcast.Txn {
		w.do(AcknowledgeTxn(w.quick(), 1, c.Number, "a", session, []byte("x")))
		txn, err := PutBarriersTxn(w.quick(), 1, c.Number)
		if err != nil {
			t.Fatal(err)
		}
		return txn
	}()
	r := w.rollBack(n)
	if err := w.try(barriers); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("the barriers from the view before: %v", err)
	}
	got := w.view().Checkpoint(c.Number)
	if got.Phase != CheckpointFailed || !strings.Contains(got.Error, "rolled back meanwhile, to checkpoint 1") || w.quick().RunningCheckpoint() != nil || w.quick().RunningRollback().ID != r.ID {
		t.Errorf("%+v", got)
	}
	if w.quick().PassedBarrier() != c.Number {
		t.Errorf("passed %d", w.quick().PassedBarrier())
	}
}

// What a replica waits for is shown; what will not be better ends the rollback
// while it can be ended.
func TestUnpreparedReplicasAreHeard(t *testing.T) {
	w := placed(t)
	r := w.rollBack(w.completed("a"))
	g := w.quick().Shards()[0].ID
	long := strings.Repeat("x", 5000)
	w.do(ReportUnpreparedTxn(w.quick(), 1, r.ID, g, long, false))
	if p := w.quick().RollbackShard(r.ID, g).Problem; len(p) != maxRollbackProblemBytes {
		t.Errorf("%d bytes are kept", len(p))
	}
	if txn, err := ReportUnpreparedTxn(w.quick(), 1, r.ID, g, long, false); err != nil || !Empty(txn) {
		t.Errorf("the same again: %v", err)
	}
	w.do(ReportUnpreparedTxn(w.quick(), 1, r.ID, g, "object x is damaged", true))
	if got := w.view().Rollback(r.ID); got.Phase != PhaseFailed || !strings.Contains(got.Error, "object x is damaged") || !strings.Contains(got.Error, "shard") {
		t.Errorf("%+v", got)
	}
	_, err := ReportUnpreparedTxn(w.quick(), 1, r.ID, g, "late", true)
	refusedWith(t, base.ErrConflict, "running", err)
}

// Of many sessions the most end before; the incarnation changes with the last, and
// with nobody opening one at that moment.
func TestRollbackEndsEverySession(t *testing.T) {
	w := placed(t)
	const sessions = MaxSessionBatch + maxRollbackSessions + 10
	for i := range base.SessionID(sessions) {
		txn, err := OpenSessionTxn(w.quick(), 1, i+1, 60000)
		w.do(txn, err)
	}
	r := w.rollBack(w.completed("a"))
	op := *r.Operation
	op.Phase = PhaseRollbackSwap // the phases are under test elsewhere
	b := builder{}
	b.replace(kindOperation, idKey(kindOperation, op.ID), op.Revision, op)
	for _, s := range w.quick().RollbackShards(r.ID) {
		next := *s
		next.State = RollbackShardSwapped
		b.replaceRollbackShard(r, &next)
	}
	txn, err := b.done()
	w.do(txn, err)
	steps := 0
	for ; w.quick().Rollback(r.ID).Phase == PhaseRollbackSwap; steps++ {
		txn, err := RollbackPhaseTxn(w.quick(), 1, r.ID, leads("n1"))
		if err != nil {
			t.Fatal(err)
		}
		if w.quick().SessionCount() <= maxRollbackSessions && w.quick().SessionCount() > 0 {
			w.do(OpenSessionTxn(w.quick(), 1, w.quick().NextSessionID(), 60000))
			if err := w.try(txn); !errors.Is(err, base.ErrPrecondition) {
				t.Fatalf("a session was opened beside it: %v", err)
			}
			txn, err = RollbackPhaseTxn(w.quick(), 1, r.ID, leads("n1"))
		}
		w.do(txn, err)
	}
	if v := w.view(); v.SessionCount() != 0 || v.Cluster().Incarnation != r.Incarnation || steps != 3 {
		t.Errorf("%d sessions, incarnation %d, %d steps", v.SessionCount(), v.Cluster().Incarnation, steps)
	}
}
