package check

import (
	"fmt"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Histories as the workloads make them under heavy faults, with many clients at
// once on few keys and many unknown outcomes, are still decided.
func TestHardHistories(t *testing.T) {
	const keys, each = 20, 400
	for _, w := range worlds {
		var ops []*history.Op
		for k := range keys {
			for _, op := range w.generate(rng(uint64(k)), 8, each, 25) {
				op.Key, op.Process = fmt.Sprint(k, op.Key), op.Process+int64(k)<<41
				for p := range op.Parts {
					op.Parts[p].Key = fmt.Sprint(k, op.Parts[p].Key)
				}
				if w.checker.Name() == "session" { // named by their processes
					for _, v := range [][]int64{op.Arg, op.Result} {
						for n := 0; n < len(v); n += 2 {
							v[n] += int64(k) << 41
						}
					}
				}
				ops = append(ops, op)
			}
		}
		res := w.checker.Check(ops, Options{Limit: 30 * time.Second})
		if res.Verdict != Pass {
			t.Errorf("%s: %v: %s", res.Name, res.Verdict, res.Text)
		}
		t.Logf("%s: %v %v", res.Name, res.Elapsed.Round(time.Millisecond), res.Text)
	}
}
