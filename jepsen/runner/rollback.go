//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/workload"
)

// How the live cluster is rolled back.
const (
	scribbleFor    = 3 * time.Second  // what is written and is to be gone
	rollbackFaults = 10 * time.Second // faults beside the rollback
	rollbackLater  = 2 * time.Second  // the rollback begins so long after them at most
	// rollbackLimit is from healing to its end: a node that has been away may take as
	// long as healing, and others wait for its replicas up to 30 s.
	rollbackLimit = time.Minute
)

// rolledBack is what was read from the live cluster after it had been taken back.
type rolledBack struct {
	restored
	// written is how many writes were acknowledged between savepoint and rollback.
	written int
	// harness is what the harness could not do; it may hide what the product did.
	harness error
	// after are the looks at the shards after the rollback.
	after []check.Result
}

// rollBack takes the live cluster back to a savepoint that was made after the final
// reads: what was written since is gone, answered or not, and every key reads as it
// did. The episode's history ends before the savepoint, the next one begins after the
// rollback with keys of its own, so that no checker has to know of rollbacks.
func (e *episode) rollBack(ctx context.Context) *rolledBack {
	res := &rolledBack{restored: restored{name: "rollback"}}
	making, stop := context.WithTimeout(ctx, createLimit)
	defer stop()
	var to host.Checkpoint
	until(making, 300*time.Millisecond, func() bool {
		// An automatic one may be running, which is refused.
		to, res.err = e.fleet.CreateSavepoint(making, createLimit)
		return res.err == nil
	})
	if res.err != nil {
		res.err = fmt.Errorf("making a savepoint of a cluster without faults within %s: %w", createLimit, res.err)
		return res
	}
	e.rollBackTo(ctx, to.Number, res)
	// The next episode counts what is retained.
	if err := deleteSavepoint(ctx, e.fleet, to.Number); err != nil && res.err == nil {
		res.err = fmt.Errorf("deleting savepoint %d within %s: %w", to.Number, createLimit, err)
	}
	return res
}

// rollBackTo writes what is to be undone, undoes it beside faults, and reads.
func (e *episode) rollBackTo(ctx context.Context, number uint64, res *rolledBack) {
	if res.written, res.harness = e.scribble(ctx); res.harness != nil {
		return
	}
	took := e.undo(ctx, number, res)
	if res.err != nil {
		return
	}
	res.after = e.heal(ctx).results(e.shards)
	reading, done := context.WithTimeout(ctx, finalLimit)
	defer done()
	if res.ops, res.err = e.readAgain(reading, e.fleet); res.err != nil {
		res.err = fmt.Errorf("reading after the rollback to savepoint %d: %w", number, res.err)
	}
	res.text = fmt.Sprintf("the live cluster, back at savepoint %d after %s beside faults", number, took.Round(time.Millisecond))
}

// undo rolls the cluster back beside faults, and says how long that took. It fails if
// the rollback has not come to its end rollbackLimit after all was healed.
func (e *episode) undo(ctx context.Context, number uint64, res *rolledBack) (took time.Duration) {
	following, end := context.WithCancel(ctx)
	defer end()
	rnd := rand.New(rand.NewPCG(e.Seed, number))
	later := time.Duration(rnd.Int64N(int64(rollbackLater)))
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-following.Done():
		case <-time.After(later):
		}
		began := time.Now()
		until(following, 300*time.Millisecond, func() bool {
			// A call that was cut off has begun a rollback or not: the next one follows
			// it, or goes back to the same.
			res.err = e.fleet.RollBack(following, number)
			return res.err == nil
		})
		took = time.Since(began)
	})
	res.harness = e.hurtRollback(ctx)
	defer e.env.Supervise()()
	limit := time.AfterFunc(rollbackLimit, end)
	wg.Wait()
	limit.Stop()
	if res.err != nil {
		res.err = fmt.Errorf("%s after all was healed the rollback to savepoint %d is not done: %w", rollbackLimit, number, res.err)
	}
	return took
}

// hurtRollback runs a schedule of faults, another than that of the workloads, and
// heals. Its error is the harness's.
func (e *episode) hurtRollback(ctx context.Context) error {
	faults, cancel := context.WithTimeout(ctx, rollbackFaults)
	defer cancel()
	o := e.style.options
	o.Seed ^= 1 << 62
	o.OnRecord = e.record
	o.Settle = func(ctx context.Context) error { return e.clock.settle(ctx, e.fleet.Nodes) }
	s, err := nemesis.NewScheduler(e.env, e.faults, o)
	if err != nil {
		return err
	}
	err = errors.Join(s.Run(faults), e.clock.settle(context.WithoutCancel(ctx), e.fleet.Nodes))
	if e.fleet.Store != nil {
		err = errors.Join(err, e.fleet.Store.Err())
	}
	e.count(s.Records())
	if err != nil {
		e.healHarder(ctx)
	}
	return err
}

// scribble goes on with the workloads, beside no fault: it writes to the episode's
// keys, and to some new ones, what the rollback is to undo. When it returns nothing
// more is sent; what has no answer may be applied until the fence.
func (e *episode) scribble(ctx context.Context) (written int, err error) {
	rec, err := history.NewRecorder(nil, history.Header{}, history.Options{Clock: e.now})
	if err != nil {
		return 0, err
	}
	for _, w := range e.workloads {
		if err := w.Setup(ctx, e.stores, rec); err != nil {
			return 0, err
		}
	}
	writing, cancel := context.WithTimeout(ctx, scribbleFor)
	defer cancel()
	workload.Drive(writing, e.workloads, e.Workers)
	if err := rec.Close(); err != nil {
		return 0, err
	}
	for _, op := range rec.History().Ops {
		if op.Outcome == history.OK && !slices.Contains([]string{"read", "get", "scan"}, op.F) {
			written++
		}
	}
	return written, nil
}

// savepoints is what is asked of a cluster about a savepoint that is to go.
type savepoints interface {
	Checkpoints(ctx context.Context) ([]host.Checkpoint, error)
	DeleteSavepoint(ctx context.Context, number uint64) error
}

// deleteSavepoint deletes one; that it is gone counts, not who says so.
func deleteSavepoint(ctx context.Context, c savepoints, number uint64) (err error) {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	until(ctx, 300*time.Millisecond, func() bool {
		if err = c.DeleteSavepoint(ctx, number); err == nil {
			return true
		}
		all, listErr := c.Checkpoints(ctx)
		gone := listErr == nil && !slices.ContainsFunc(all, func(one host.Checkpoint) bool {
			return one.Number == number && one.Phase == host.CheckpointCompleted
		})
		if gone {
			err = nil
		}
		return gone
	})
	return err
}

// judge compares what was read after the rollback with the final reads, which came
// before the savepoint. What was used for the first time after the savepoint is empty.
func (r *rolledBack) judge(ops []history.Op, from int64) check.Result {
	if r.harness != nil && len(r.ops) == 0 {
		return check.Result{Name: r.name, Verdict: check.Unknown, Text: "harness: " + r.harness.Error()}
	}
	res := r.restored.judge(ops, from)
	if r.err == nil {
		r.judgeNew(&res, ops, from)
	}
	worse := func(v check.Verdict, text string) {
		if all := check.Combine(res.Verdict, v); all != res.Verdict {
			res.Verdict, res.Text = all, text
		}
	}
	for _, look := range r.after {
		worse(look.Verdict, "after the rollback: "+look.Name+": "+look.Text)
	}
	if r.written == 0 {
		worse(check.Unknown, "nothing was written between savepoint and rollback")
	}
	if r.harness != nil && res.Failed == 0 { // else what was read is wrong, whatever the harness did
		res.Verdict, res.Text = check.Unknown, "harness: "+r.harness.Error()
	}
	if res.Verdict == check.Pass {
		res.Text += fmt.Sprintf(", and %d writes are gone", r.written)
	}
	return res
}

// judgeNew looks at what was read only after the rollback.
func (r *rolledBack) judgeNew(res *check.Result, ops []history.Op, from int64) {
	before := map[string]bool{}
	for i := range ops {
		if ops[i].Invoke >= from {
			before[what(&ops[i])] = true
		}
	}
	for name, g := range reads(r.ops, 0) {
		if before[name] || len(g.Result) == 0 {
			continue
		}
		res.Failed++
		text := fmt.Sprintf("%s was used for the first time after the savepoint, and has %v", g.Key, g)
		if len(res.Details) < 20 {
			res.Details = append(res.Details, check.Detail{Verdict: check.Fail, Key: g.Key, Text: text})
		}
		if res.Verdict != check.Fail {
			res.Verdict, res.Text = check.Fail, r.text+": "+text
		}
	}
}
