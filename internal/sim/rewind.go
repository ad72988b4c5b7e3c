package sim

import (
	"slices"

	"github.com/keelstate/keelstate/jepsen/history"
)

// window is when a checkpoint was made: it was asked for at asked, and known to have
// completed at done.
type window struct{ asked, done int64 }

// rewind is the history of an era as a rollback to a checkpoint makes it, with what
// was read after the rollback. What was acknowledged before the checkpoint was asked
// for is in it; what was sent after it completed is not; what lies between may be:
// such writes are unknown, and such reads tell nothing, for what they saw may be
// gone.
func rewind(ops []history.Op, at window, after []history.Op) *history.History {
	h := &history.History{Complete: true}
	opened := map[string]bool{}
	process := int64(0)
	for i := range ops {
		process = max(process, ops[i].Process)
	}
	for i := range ops {
		op := ops[i]
		op.Parts = slices.Clone(op.Parts)
		switch {
		case op.Invoke > at.done:
			continue
		case op.Outcome == history.Fail || op.Outcome == history.OK && op.Return < at.asked:
		case isRead(op.F):
			continue
		case op.Outcome == history.OK: // who did it has gone on, as no client does after an unknown outcome
			process++
			op.Process = process
			op.Outcome, op.Return, op.Result = history.Unknown, history.Never, nil
			for k := range op.Parts {
				op.Parts[k].Result = nil
			}
		}
		if op.F == "open" && op.Outcome == history.OK {
			opened[op.Key] = true
		}
		h.Ops = append(h.Ops, op)
	}
	known := map[string]bool{} // banks that are not empty
	for _, op := range after {
		if op.Outcome != history.OK {
			continue
		}
		known[op.Key] = known[op.Key] || len(op.Result) > 0
		op.Process += process
		h.Ops = append(h.Ops, op)
	}
	// A bank that was opened too late for the checkpoint is none.
	h.Ops = slices.DeleteFunc(h.Ops, func(op history.Op) bool { return op.Workload == "bank" && !opened[op.Key] && !known[op.Key] })
	for i := range h.Ops {
		h.Ops[i].ID = int64(i + 1)
	}
	return h
}

func isRead(f string) bool { return f == "read" || f == "get" || f == "scan" }
