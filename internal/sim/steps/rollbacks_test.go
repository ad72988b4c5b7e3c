package steps

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var rollbackSeedsFlag = flag.Int("steps.rollback-seeds", 6, "how many seeds TestRollbacks runs")

func rollbackRun(t *testing.T, seed uint64, fault CheckpointFault, lines func(string)) *CheckpointReport {
	t.Helper()
	dir := t.TempDir()
	r, err := RunRollbacks(seed, *checkpointTimeFlag, dir, fault, lines)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRollbacks rolls shards back that are written to, under many seeds (SS6 to SS15).
func TestRollbacks(t *testing.T) {
	var all CheckpointReport
	for seed := *firstFlag; seed < *firstFlag+uint64(*rollbackSeedsFlag); seed++ {
		var lines func(string)
		if *linesFlag {
			lines = func(s string) { t.Log(s) }
		}
		r := rollbackRun(t, seed, "", lines)
		for _, p := range r.Problems {
			t.Errorf("seed %d: %s", seed, p)
		}
		if len(r.Problems) > 0 {
			t.Errorf("run it again with: go test ./internal/sim/steps -run 'TestRollbacks$' -steps.first %d -steps.rollback-seeds 1 -steps.checkpoint-time %v -steps.trace", seed, *checkpointTimeFlag)
		}
		all.Simulated += r.Simulated
		all.Completed, all.Failed, all.Savepoints = all.Completed+r.Completed, all.Failed+r.Failed, all.Savepoints+r.Savepoints
		all.RolledBack, all.GivenUp, all.Damaged, all.Rewound = all.RolledBack+r.RolledBack, all.GivenUp+r.GivenUp, all.Damaged+r.Damaged, all.Rewound+r.Rewound
		if done := seed - *firstFlag + 1; done%100 == 0 {
			t.Logf("%d seeds from %d on", done, *firstFlag)
		}
	}
	t.Logf("rollbacks seeds=%d virtual=%v completed=%d failed=%d savepoints=%d rolled-back=%d given-up=%d damaged=%d rewound=%d",
		*rollbackSeedsFlag, all.Simulated, all.Completed, all.Failed, all.Savepoints, all.RolledBack, all.GivenUp, all.Damaged, all.Rewound)
	if *rollbackSeedsFlag >= 5 && (all.Savepoints == 0 || all.RolledBack == 0 || all.GivenUp == 0 || all.Rewound == 0) {
		t.Error("something did not happen at all: the test shows nothing")
	}
}

// The invariants of rollbacks and savepoints notice planted bugs, each for its own
// reason.
func TestRollbackInvariantsBite(t *testing.T) {
	for fault, want := range map[CheckpointFault]string{
		CountSavepoints:    "newer ones and not",
		RetireSavepoints:   "nobody has asked for that",
		PreparedUntrue:     "that are not damaged",
		PrepareOther:       "at its barrier it held",
		FenceUntold:        "was acknowledged in the phase swap",
		SwapUntold:         "is not rolled back",
		ForgiveIncarnation: "made before a rollback was applied after it",
		RewindNothing:      "the cuts hold",
	} {
		found := false
		for seed := uint64(1); seed <= 30 && !found; seed++ {
			r := rollbackRun(t, seed, fault, nil)
			for _, p := range r.Problems {
				if found = strings.Contains(p, want); found {
					t.Logf("%s: seed %d: %s", fault, seed, p)
					break
				}
			}
		}
		if !found {
			t.Errorf("%s is not noticed", fault)
		}
	}
}

// TestSameSeedSameRollbacks is SS1 for the world of rollbacks.
func TestSameSeedSameRollbacks(t *testing.T) {
	a, b := rollbackRun(t, 1, "", nil), rollbackRun(t, 1, "", nil)
	if a.Sum != b.Sum || a.Puts != b.Puts {
		t.Errorf("seed 1 has two traces: %s and %s", a.Sum, b.Sum)
	}
}
