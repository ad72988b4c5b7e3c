//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
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
)

// RU7: what was read after a rollback is what the final reads had, all of it, and
// nothing of after the savepoint; what could not be looked at is no pass.
func TestRolledBack(t *testing.T) {
	final := []history.Op{
		{ID: 1, Workload: "list", F: "append", Key: "a", Arg: []int64{9}, Outcome: history.OK, Invoke: 5},
		{ID: 2, Workload: "register", F: "read", Key: "a", Result: []int64{2}, Outcome: history.OK, Invoke: 20},
		{ID: 3, Workload: "list", F: "read", Key: "a", Result: []int64{7, 8}, Outcome: history.OK, Invoke: 21},
		{ID: 4, Workload: "list", F: "read", Key: "never read before", Outcome: history.Fail, Invoke: 22},
	}
	register := history.Op{Workload: "register", F: "read", Key: "a", Result: []int64{2}, Outcome: history.OK}
	list := func(elements ...int64) history.Op {
		return history.Op{Workload: "list", F: "read", Key: "a", Result: elements, Outcome: history.OK}
	}
	fresh := func(result ...int64) history.Op {
		return history.Op{Workload: "register", F: "read", Key: "new", Result: result, Outcome: history.OK}
	}
	look := func(v check.Verdict) []check.Result {
		return []check.Result{{Name: "hashes", Verdict: check.Pass}, {Name: "liveness", Verdict: v, Text: "a shard"}}
	}
	why := errors.New("why")
	for _, c := range []struct {
		name   string
		ops    []history.Op
		change func(r *rolledBack)
		want   check.Verdict
		says   string
	}{
		{"as it was", []history.Op{register, list(7, 8)}, nil, check.Pass, "back at savepoint 3: 2 keys are as they were, and 5 writes are gone"},
		{"a new key is empty", []history.Op{register, list(7, 8), fresh()}, nil, check.Pass, "2 keys"},
		{"not compared: not read before", []history.Op{register, list(7, 8), {Workload: "list", F: "read", Key: "never read before", Result: []int64{4}, Outcome: history.OK}}, nil, check.Pass, "2 keys"},
		{"a later write is still there", []history.Op{register, list(7, 8, 9)}, nil, check.Fail, "1 of 2 keys differ"},
		{"an element differs", []history.Op{register, list(7, 9)}, nil, check.Fail, "1 of 2 keys differ"},
		{"an element is missing", []history.Op{register, list(7)}, nil, check.Fail, "1 of 2 keys differ"},
		{"all of a key is missing", []history.Op{register, list()}, nil, check.Fail, "1 of 2 keys differ"},
		{"a key was not read", []history.Op{register}, nil, check.Fail, "1 of 2 keys differ"},
		{"a new key is still there", []history.Op{register, list(7, 8), fresh(1)}, nil, check.Fail, "new was used for the first time after the savepoint"},
		{"not done", nil, func(r *rolledBack) { r.err = why }, check.Fail, "why"},
		{"the reads were not done", []history.Op{register}, func(r *rolledBack) { r.err = why }, check.Fail, "why"},
		{"nothing to undo", []history.Op{register, list(7, 8)}, func(r *rolledBack) { r.written = 0 }, check.Unknown, "nothing was written"},
		{"nothing to undo, and it differs", []history.Op{register, list(7)}, func(r *rolledBack) { r.written = 0 }, check.Fail, "1 of 2 keys differ"},
		{"clumsy", []history.Op{register, list(7, 8)}, func(r *rolledBack) { r.harness = why }, check.Unknown, "harness: why"},
		{"clumsy before it began", nil, func(r *rolledBack) { r.harness = why }, check.Unknown, "harness: why"},
		{"clumsy, and not done", nil, func(r *rolledBack) { r.harness, r.err = why, why }, check.Unknown, "harness: why"},
		{"clumsy, and it differs", []history.Op{register, list(7)}, func(r *rolledBack) { r.harness = why }, check.Fail, "1 of 2 keys differ"},
		{"not live after it", []history.Op{register, list(7, 8)}, func(r *rolledBack) { r.after = look(check.Fail) }, check.Fail, "after the rollback: liveness: a shard"},
		{"not seen to live", []history.Op{register, list(7, 8)}, func(r *rolledBack) { r.after = look(check.Unknown) }, check.Unknown, "after the rollback: liveness: a shard"},
	} {
		r := &rolledBack{restored: restored{name: "rollback", ops: c.ops, text: "back at savepoint 3"}, written: 5, after: look(check.Pass)}
		if c.change != nil {
			c.change(r)
		}
		if res := r.judge(final, 10); res.Name != "rollback" || res.Verdict != c.want || !strings.Contains(res.Text, c.says) {
			t.Errorf("%s: %+v", c.name, res)
		}
	}
	r := &rolledBack{restored: restored{name: "rollback"}, written: 5}
	if res := r.judge(final, 100); res.Verdict != check.Unknown {
		t.Errorf("with nothing to compare: %+v", res)
	}
}

// bin is a cluster with a savepoint.
type bin struct {
	list    []host.Checkpoint
	deletes []error
	gone    bool // the first delete does it, whatever it says
}

func (b *bin) Checkpoints(context.Context) ([]host.Checkpoint, error) { return b.list, nil }

func (b *bin) DeleteSavepoint(_ context.Context, number uint64) error {
	if b.gone {
		b.list = slices.DeleteFunc(b.list, func(c host.Checkpoint) bool { return c.Number == number })
	}
	return next(&b.deletes)
}

// A delete that is refused is tried again; one whose answer was lost is done when the
// savepoint is gone.
func TestDeleteSavepoint(t *testing.T) {
	busy := errors.New("it is in use")
	for _, c := range []struct {
		name    string
		deletes []error
		gone    bool
		done    bool
	}{
		{"at once", nil, true, true},
		{"busy at first", []error{busy, busy, nil}, false, true},
		{"the answer was lost", []error{busy}, true, true},
		{"never", []error{busy}, false, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := &bin{list: []host.Checkpoint{{Number: 4, Phase: host.CheckpointCompleted}, {Number: 5, Phase: host.CheckpointCompleted}}, deletes: c.deletes, gone: c.gone}
			began := time.Now()
			err := deleteSavepoint(t.Context(), b, 4)
			if (err == nil) != c.done || !c.done && (!errors.Is(err, busy) || time.Since(began) < createLimit) {
				t.Errorf("%s: %v after %s", c.name, err, time.Since(began))
			}
		})
	}
}

// TestCrashRollbackThatIsNone: a rollback that is said to be done and was never begun
// is found by what the cluster holds.
func TestCrashRollbackThatIsNone(t *testing.T) {
	o := options(t)
	o.Checkpoints, o.Rollback, o.Duration, o.Episode, o.Faults = true, true, time.Second, 2*time.Second, []string{"pause"}
	liar := filepath.Join(t.TempDir(), "keelctl")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *'checkpoint rollback'*) exit 0;; esac\nexec '%s' \"$@\"\n", o.CtlBinary)
	must(t, os.WriteFile(liar, []byte(script), 0o755))
	o.CtlBinary = liar
	rep, err := Run(t.Context(), o)
	must(t, err)
	nothingLeft(t, o.Dir)
	i := slices.IndexFunc(rep.Episodes[0].Results, func(r check.Result) bool { return r.Name == "rollback" })
	if i < 0 {
		t.Fatalf("nobody looked at the rollback: %s", rep.Text)
	}
	if res := rep.Episodes[0].Results[i]; rep.Verdict != check.Fail || res.Verdict != check.Fail || res.Failed == 0 {
		t.Errorf("verdict %s: %+v", rep.Verdict, res)
	} else {
		t.Log(res.Text)
	}
}
