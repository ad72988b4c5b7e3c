package meta

import (
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// A checkpoint of mode changelog takes reports of files and of a log; another one,
// and every savepoint, of files only. What a report says of its log adds up.
func TestReportsOfALog(t *testing.T) {
	w := founded(t)
	for _, c := range []struct {
		changelog, savepoint bool
	}{{false, false}, {true, false}, {true, true}} {
		txn, rec, err := StartCheckpointTxn(w.view(), 5000, CheckpointSpec{TimeoutMs: 1000, Changelog: c.changelog, Savepoint: c.savepoint, Uploaders: uploaders(w.view())})
		w.do(txn, err)
		number, logs := rec.Number, c.changelog && !c.savepoint
		if got := w.view().Checkpoint(number); got.Changelog != logs {
			t.Errorf("%+v is %+v", c, got)
		}
		s := w.view().CheckpointShards(number)[0]
		good, m := reported("m", s.Attempt)
		good.BaseIndex, good.Segments, good.LogBytes, good.FullBytes = good.Index-1, 2, 10, 100
		for name, change := range map[string]func(r *ShardReport){
			"no segments":     func(r *ShardReport) { r.Segments = 0 },
			"no bytes":        func(r *ShardReport) { r.LogBytes = 0 },
			"more than all":   func(r *ShardReport) { r.LogBytes = 101 },
			"base of the cut": func(r *ShardReport) { r.BaseIndex = r.Index },
			"a log of files":  func(r *ShardReport) { r.BaseIndex = 0 },
		} {
			r := good
			change(&r)
			_, err := ReportUploadedTxn(w.view(), 1, number, s.Group, s.Attempt, r, []Object{m}, nil)
			wantField(t, name, err, base.ErrInvalid, "report")
		}
		if !c.savepoint {
			_, err = ReportUploadedTxn(w.view(), 1, number, s.Group, s.Attempt, good, []Object{m}, nil)
			if logs && err != nil {
				t.Errorf("a log: %v", err)
			} else if !logs {
				wantField(t, "a log", err, base.ErrInvalid, "report")
			}
		}
		w.do(FailCheckpointTxn(w.view(), 1, number, "test"))
		w.do(PlanDeletionsTxn(w.view(), 1))
	}
}
