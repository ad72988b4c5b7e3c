//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/report"
)

// keeper is a cluster that keeps checkpoints.
type keeper struct {
	list []host.Checkpoint
	// creates and verifies are what the calls return, the last again and again.
	creates []error
	bad     map[uint64][]error
	// retires is a checkpoint that is gone once it was looked at.
	retires uint64
	took    time.Duration
}

func next(list *[]error) error {
	if len(*list) == 0 {
		return nil
	}
	err := (*list)[0]
	if len(*list) > 1 {
		*list = (*list)[1:]
	}
	return err
}

func (k *keeper) CreateCheckpoint(context.Context, time.Duration) (host.Checkpoint, error) {
	<-time.After(k.took)
	return host.Checkpoint{Number: 9}, next(&k.creates)
}

func (k *keeper) Checkpoints(context.Context) ([]host.Checkpoint, error) { return k.list, nil }

func (k *keeper) VerifyCheckpoint(_ context.Context, number uint64, _ time.Duration) (host.Verification, error) {
	if number == k.retires {
		k.list = slices.DeleteFunc(k.list, func(c host.Checkpoint) bool { return c.Number == number })
	}
	list := k.bad[number]
	err := next(&list)
	if k.bad != nil {
		k.bad[number] = list
	}
	return host.Verification{Sound: err == nil, Objects: 2, Bytes: 5}, err
}

// TestLookAtCheckpoints: one has to complete in time, no more are retained than
// should be, and each that is retained is read; one that is retired meanwhile is no
// finding.
func TestLookAtCheckpoints(t *testing.T) {
	running, broken := errors.New("one is running"), fmt.Errorf("%w: an object is missing", host.ErrUnsound)
	for _, c := range []struct {
		name   string
		change func(k *keeper)
		want   check.Verdict
		says   string
	}{
		{"all is well", func(*keeper) {}, check.Pass, "2 are retained, 2 of them read whole (4 objects, 10 bytes), 0 retired"},
		{"refused at first", func(k *keeper) { k.creates = []error{running, running, nil} }, check.Pass, "read whole"},
		{"none completes", func(k *keeper) { k.creates = []error{running} }, check.Fail, "no checkpoint has completed: one is running"},
		{"slow", func(k *keeper) { k.creates, k.took = []error{running}, 50*time.Second }, check.Fail, "no checkpoint has completed"},
		{"too many", func(k *keeper) {
			for n := range uint64(2) {
				k.list = append(k.list, host.Checkpoint{Number: 10 + n, Phase: host.CheckpointCompleted})
			}
		}, check.Fail, "4 checkpoints are retained, not 3"},
		{"one is bad", func(k *keeper) { k.bad = map[uint64][]error{7: {broken}} }, check.Fail, "checkpoint 7, which is retained: it is not sound: an object is missing"},
		{"one was busy", func(k *keeper) { k.bad = map[uint64][]error{7: {running, nil}} }, check.Pass, "2 of them read whole"},
		{"one is never read", func(k *keeper) { k.bad = map[uint64][]error{7: {running}} }, check.Unknown, "checkpoint 7, which is retained: one is running"},
		{"bad, and retired meanwhile", func(k *keeper) { k.retires, k.bad = 7, map[uint64][]error{7: {broken}} }, check.Pass, "1 of them read whole (2 objects, 5 bytes), 1 retired"},
		{"nothing is retained", func(k *keeper) { k.list = nil }, check.Unknown, "0 are retained"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := &keeper{list: []host.Checkpoint{{Number: 9, Phase: host.CheckpointCompleted}, {Number: 7, Phase: host.CheckpointCompleted}, {Number: 8, Phase: "failed"}}}
				c.change(k)
				if res := lookAtCheckpoints(t.Context(), k); res.Verdict != c.want || !strings.Contains(res.Text, c.says) {
					t.Errorf("%s: %s", res.Verdict, res.Text)
				}
			})
		})
	}
}

// pretend is a fault that does nothing.
type pretend struct {
	nemesis.Fault
	kind nemesis.Kind
	err  error
}

func (p pretend) Kind() nemesis.Kind { return p.kind }

func (p pretend) Inject(context.Context, *rand.Rand) (*nemesis.Injection, error) {
	tries := 0
	return &nemesis.Injection{Heal: func(context.Context) error {
		if tries++; tries == 1 {
			return errors.New("clumsy")
		}
		return nil
	}}, p.err
}

// TestStoreWatch: what counts is the time without a write while the store alone is
// at fault, and only after a write that began when all else was healed.
func TestStoreWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var wrote time.Duration
		w := &storeWatch{now: func() int64 { return int64(time.Since(start)) }, limit: withoutStoreLimit}
		faults := w.all([]nemesis.Fault{pretend{kind: nemesis.KindStoreHang}, pretend{kind: nemesis.KindKill}, pretend{kind: nemesis.KindPause, err: nemesis.ErrNotNow}})
		inject := func(i int) (heal func()) {
			in, err := faults[i].Inject(t.Context(), nil)
			must(t, err)
			return func() {
				if in.Heal(t.Context()) == nil {
					t.Error("the first heal succeeds")
				}
				must(t, in.Heal(t.Context()))
				must(t, in.Heal(t.Context())) // again
			}
		}
		pass := func(d time.Duration, writes bool) {
			for range d / time.Second {
				time.Sleep(time.Second)
				if writes {
					wrote = time.Since(start)
				}
				w.look(int64(wrote))
			}
		}
		is := func(want time.Duration) {
			t.Helper()
			if got := time.Duration(w.longest); got != want {
				t.Errorf("the longest time is %s, not %s", got, want)
			}
		}
		pass(20*time.Second, false) // no fault, and never a write
		heal := inject(0)
		pass(20*time.Second, false) // nobody has written yet
		is(0)
		pass(5*time.Second, true)
		pass(3*time.Second, false)
		is(3 * time.Second)
		if _, err := faults[2].Inject(t.Context(), nil); !errors.Is(err, nemesis.ErrNotNow) || w.others != 0 {
			t.Errorf("a fault that was skipped: %v, %d", err, w.others)
		}
		killed := inject(1)
		pass(30*time.Second, false)
		killed()
		pass(30*time.Second, false) // it recovers
		is(3 * time.Second)
		pass(time.Second, true)
		pass(4*time.Second, false)
		is(4 * time.Second)
		if res := w.result(nil); res.Verdict != check.Pass || !strings.Contains(res.Text, "every 4s at the latest") {
			t.Errorf("%+v", res)
		}
		refused := []history.Op{{ID: 1, Code: "deadline"}, {ID: 2, Code: "object_store", Key: "k"}}
		if res := w.result(refused[:1]); res.Verdict != check.Pass {
			t.Errorf("%+v", res)
		}
		if res := w.result(refused); res.Verdict != check.Fail || !slices.Equal(res.Details[0].Ops, []int64{2}) {
			t.Errorf("%+v", res)
		}
		pass(2*time.Second, false)
		if res := w.result(nil); res.Verdict != check.Fail || !strings.Contains(res.Text, "no write was acknowledged for 6s") {
			t.Errorf("%+v", res)
		}
		heal()
		w.longest = 0
		pass(20*time.Second, false) // nothing is at fault
		is(0)
	})
}

// TestReadBeside: a checkpoint that is not sound counts unless the store had a fault
// while it was read, or it was retired.
func TestReadBeside(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(k *keeper, w *storeWatch)
		want   check.Verdict
	}{
		{"sound", func(k *keeper, _ *storeWatch) { k.bad = nil }, check.Pass},
		{"not sound", func(*keeper, *storeWatch) {}, check.Fail},
		{"while the store lies", func(_ *keeper, w *storeWatch) { w.count(nemesis.KindStoreWrongBytes, 1) }, check.Pass},
		{"retired", func(k *keeper, _ *storeWatch) { k.retires = 7 }, check.Pass},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := &keeper{list: []host.Checkpoint{{Number: 7, Phase: host.CheckpointCompleted}}, bad: map[uint64][]error{7: {host.ErrUnsound}}}
				w := &storeWatch{now: func() int64 { return 1 }, limit: time.Second}
				c.change(k, w)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				w.read(ctx, k)
				if res := w.result(nil); res.Verdict != c.want || (w.whole > 0) != (k.bad == nil) {
					t.Errorf("%+v, %d whole", res, w.whole)
				}
			})
		})
	}
}

// TestRestored: what the other cluster has is compared with the final reads, not
// with what came before; a key that is missing or differs fails.
func TestRestored(t *testing.T) {
	final := []history.Op{
		{ID: 1, Workload: "register", F: "read", Key: "a", Result: []int64{1}, Outcome: history.OK, Invoke: 5},
		{ID: 2, Workload: "register", F: "read", Key: "a", Result: []int64{2}, Outcome: history.OK, Invoke: 20},
		{ID: 3, Workload: "list", F: "read", Key: "a", Result: []int64{7, 8}, Outcome: history.OK, Invoke: 21},
		{ID: 4, Workload: "list", F: "read", Key: "b", Outcome: history.Fail, Invoke: 22},
	}
	same := []history.Op{
		{Workload: "list", F: "read", Key: "a", Result: []int64{7, 8}, Outcome: history.OK},
		{Workload: "register", F: "read", Key: "a", Result: []int64{2}, Outcome: history.OK},
		{Workload: "list", F: "read", Key: "b", Result: []int64{1}, Outcome: history.OK},
	}
	differs := slices.Clone(same)
	differs[1].Result = []int64{1}
	for _, c := range []struct {
		name string
		r    restored
		from int64
		want check.Verdict
	}{
		{"the same", restored{ops: same}, 10, check.Pass},
		{"differs", restored{ops: differs}, 10, check.Fail},
		{"missing", restored{ops: same[:1]}, 10, check.Fail},
		{"nothing to compare", restored{ops: same}, 100, check.Unknown},
		{"not restored", restored{err: errors.New("why")}, 10, check.Fail},
		{"late", restored{err: errors.New("why"), late: true}, 10, check.Unknown},
	} {
		if res := c.r.judge(final, c.from); res.Verdict != c.want || res.Text == "" || c.want == check.Fail && c.r.err == nil && !slices.Equal(res.Details[0].Ops, []int64{2}) && !slices.Equal(res.Details[0].Ops, []int64{3}) {
			t.Errorf("%s: %+v", c.name, res)
		}
	}
}

// TestCrashCheckpoints is a short run with checkpoints, a rollback and, where versitygw was
// built, an object store that fails.
func TestCrashCheckpoints(t *testing.T) {
	o := options(t)
	o.Checkpoints, o.Rollback, o.Duration, o.Episode, o.Faults = true, true, time.Second, 8*time.Second, []string{"kill-one"}
	if path, err := filepath.Abs("../../.deps/bin/versitygw"); err == nil {
		if _, err := os.Stat(path); err == nil {
			o.StoreBinary, o.Faults = path, []string{"kill-one", "object-store-down", "object-store-errors", "object-store-lost-answer", "object-store-wrong-bytes"}
		}
	}
	rep, err := Run(t.Context(), o)
	must(t, err)
	nothingLeft(t, o.Dir)
	if rep.Verdict != check.Pass {
		t.Errorf("verdict %s: %s", rep.Verdict, rep.Text)
		for _, n := range []string{"n1", "n2", "n3"} {
			b, _ := os.ReadFile(filepath.Join(o.Dir, report.NodesDir, n+".log"))
			t.Logf("the end of the log of %s:\n%s", n, b[max(0, len(b)-3000):])
		}
	}
	for _, name := range []string{"checkpoints", "without the store", "restore", "rollback"} {
		if i := slices.IndexFunc(rep.Episodes[0].Results, func(r check.Result) bool { return r.Name == name }); i < 0 {
			t.Errorf("nobody looked at %s", name)
		} else {
			t.Logf("%s: %s", name, rep.Episodes[0].Results[i].Text)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(o.Dir, report.NodesDir, "*", "*")); len(left) > 0 && rep.Verdict == check.Pass {
		t.Errorf("data is left: %v", left)
	}
}
