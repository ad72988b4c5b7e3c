package checkpoint

import (
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// rollBack starts a rollback as a user does.
func (k *kit) rollBack(number uint64) *meta.Rollback {
	k.t.Helper()
	txn, op, err := meta.StartRollbackTxn(k.view(), k.wallMs, meta.RollbackStart{Checkpoint: number, TimeoutMs: 60_000})
	k.do(txn, err)
	return k.view().Rollback(op.ID)
}

// placed is a kit whose founding has ended, with a checkpoint.
func placed(t *testing.T) (*kit, uint64) {
	k := newKit(t)
	op, _, err := k.view().FoundingOperation()
	if err != nil {
		t.Fatal(err)
	}
	k.do(meta.AdvanceOperationTxn(k.view(), k.wallMs, op.ID, meta.PhaseDone, ""))
	return k, k.complete()
}

func (k *kit) prepared(r *meta.Rollback, g base.GroupID, nodes ...base.NodeID) {
	k.t.Helper()
	for _, n := range nodes {
		k.do(meta.ReportPreparedTxn(k.view(), k.wallMs, r.ID, g, base.MakeReplicaID(n, 1)))
	}
}

func (k *kit) phase(r *meta.Rollback, want string) {
	k.t.Helper()
	k.none(time.Second)
	if got := k.view().Rollback(r.ID); got.Phase != want {
		k.t.Fatalf("the phase is %s (%s), want %s", got.Phase, got.Error, want)
	}
}

// A rollback goes from phase to phase when every shard is so far, also under a new
// coordinator in each, and no checkpoint starts beside it (CK5).
func TestRollbackIsLedThroughItsPhases(t *testing.T) {
	for _, fresh := range []bool{false, true} {
		k, n := placed(t)
		k.cfg.Interval = 10 * time.Second
		k.none(0)
		r := k.rollBack(n)
		next := func(want string) {
			t.Helper()
			if fresh {
				k.c = New()
			}
			k.phase(r, want)
		}
		k.prepared(r, 1, "n1", "n2", "n3")
		k.prepared(r, 2, "n1", "n3")
		next(meta.PhaseRollbackPrepare) // n2 leads the second
		k.none(30 * time.Second)
		if k.view().RunningCheckpoint() != nil {
			t.Fatal("a checkpoint runs beside it")
		}
		k.prepared(r, 2, "n2")
		next(meta.PhaseRollbackFence)
		k.reportState(r, 1, meta.RollbackShardFenced)
		next(meta.PhaseRollbackFence)
		k.none(10 * time.Minute) // too late to be given up
		k.reportState(r, 2, meta.RollbackShardFenced)
		next(meta.PhaseRollbackSwap)
		k.reportState(r, 1, meta.RollbackShardSwapped)
		k.reportState(r, 2, meta.RollbackShardSwapped)
		next(meta.PhaseRollbackOpen)
		if k.view().Cluster().Incarnation != r.Incarnation {
			t.Errorf("the incarnation is %d", k.view().Cluster().Incarnation)
		}
		k.reportState(r, 1, meta.RollbackShardOpen)
		k.reportState(r, 2, meta.RollbackShardOpen)
		next(meta.PhaseDone)
		k.none(10 * time.Second)
		if k.view().RunningCheckpoint() == nil {
			t.Error("no checkpoint has started after it")
		}
	}
}

func (k *kit) reportState(r *meta.Rollback, g base.GroupID, s meta.RollbackShardState) {
	k.t.Helper()
	k.do(meta.ReportRollbackStateTxn(k.view(), k.wallMs, r.ID, g, s))
}

// Once it could go on it waits for the replicas that live and prepare still, for as
// long again as it took so far, within bounds, and not beyond its timeout (CK5).
func TestRollbackWaitsForWhoPreparesStill(t *testing.T) {
	for name, c := range map[string]struct {
		took   time.Duration // until a quorum is prepared
		end    func(*kit, *meta.Rollback)
		waited time.Duration // until it goes on
	}{
		"all are prepared": {took: 10 * time.Second, end: func(k *kit, r *meta.Rollback) { k.prepared(r, 2, "n3") }},
		"the node dies":    {took: 10 * time.Second, end: func(k *kit, _ *meta.Rollback) { k.dead["n3"] = true }},
		"as long again":    {took: 10 * time.Second, waited: 10 * time.Second},
		"at least a while": {took: time.Millisecond, waited: minPreparationWait},
		"at most a while":  {took: 30 * time.Second, waited: 30 * time.Second},
		"the timeout":      {took: 50 * time.Second, waited: 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			k, n := placed(t)
			r := k.rollBack(n)
			k.none(0)
			k.none(c.took)
			k.prepared(r, 1, "n1", "n2", "n3")
			k.prepared(r, 2, "n1", "n2")
			k.none(0)
			if got := k.view().Rollback(r.ID).Phase; got != meta.PhaseRollbackPrepare {
				t.Fatalf("the phase is %s while a replica prepares still", got)
			}
			if c.end != nil {
				c.end(k, r)
			} else {
				k.none(c.waited - time.Millisecond)
				if got := k.view().Rollback(r.ID).Phase; got != meta.PhaseRollbackPrepare {
					t.Fatalf("the phase is %s after less than %v", got, c.waited)
				}
				k.none(time.Millisecond)
			}
			k.none(0)
			if got := k.view().Rollback(r.ID); got.Phase != meta.PhaseRollbackFence {
				t.Fatalf("the phase is %s (%s)", got.Phase, got.Error)
			}
		})
	}
}

// One that is not prepared in time is given up, and says who was not.
func TestRollbackIsGivenUpInTime(t *testing.T) {
	k, n := placed(t)
	r := k.rollBack(n)
	k.prepared(r, 1, "n1", "n2")
	k.do(meta.ReportUnpreparedTxn(k.view(), k.wallMs, r.ID, 2, "node n2: the store is away", false))
	k.phase(r, meta.PhaseRollbackPrepare)
	k.none(50 * time.Second)
	k.phase(r, meta.PhaseRollbackPrepare)
	k.none(9 * time.Second)
	k.phase(r, meta.PhaseFailed)
	if got := k.view().Rollback(r.ID).Error; !strings.Contains(got, "1m0s") || !strings.Contains(got, "shard S2") || !strings.Contains(got, "node n2: the store is away") {
		t.Errorf("%q", got)
	}
}
