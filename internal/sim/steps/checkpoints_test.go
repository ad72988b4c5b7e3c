package steps

import (
	"flag"
	"strings"
	"testing"
	"time"
)

var (
	checkpointSeedsFlag = flag.Int("steps.checkpoint-seeds", 12, "how many seeds TestCheckpoints runs")
	checkpointTimeFlag  = flag.Duration("steps.checkpoint-time", 20*time.Second, "the virtual time of each seed of TestCheckpoints")
)

func checkpointRun(t *testing.T, seed uint64, fault CheckpointFault, lines func(string)) *CheckpointReport {
	t.Helper()
	r, err := RunCheckpoints(seed, *checkpointTimeFlag, fault, lines)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestCheckpoints runs the coordinator, the registry and the deletions under many
// seeds (SS6 to SS9).
func TestCheckpoints(t *testing.T) {
	var all CheckpointReport
	for seed := *firstFlag; seed < *firstFlag+uint64(*checkpointSeedsFlag); seed++ {
		var lines func(string)
		if *linesFlag {
			lines = func(s string) { t.Log(s) }
		}
		r := checkpointRun(t, seed, "", lines)
		for _, p := range r.Problems {
			t.Errorf("seed %d: %s", seed, p)
		}
		if len(r.Problems) > 0 {
			t.Errorf("run it again with: go test ./internal/sim/steps -run TestCheckpoints -steps.first %d -steps.checkpoint-seeds 1 -steps.checkpoint-time %v -steps.trace", seed, *checkpointTimeFlag)
		}
		all.Simulated += r.Simulated
		all.Completed, all.Failed, all.Deleted, all.Swept, all.Reused = all.Completed+r.Completed, all.Failed+r.Failed, all.Deleted+r.Deleted, all.Swept+r.Swept, all.Reused+r.Reused
		all.Positions, all.Lost = all.Positions+r.Positions, all.Lost+r.Lost
		all.Logged, all.Ahead, all.Registered = all.Logged+r.Logged, all.Ahead+r.Ahead, all.Registered+r.Registered
		all.Puts, all.Deletes = all.Puts+r.Puts, all.Deletes+r.Deletes
		if done := seed - *firstFlag + 1; done%100 == 0 {
			t.Logf("%d seeds from %d on", done, *firstFlag)
		}
	}
	t.Logf("checkpoints seeds=%d virtual=%v completed=%d failed=%d deleted=%d swept=%d reused=%d puts=%d deletes=%d positions=%d lost=%d logs=%d ahead=%d registered=%d",
		*checkpointSeedsFlag, all.Simulated, all.Completed, all.Failed, all.Deleted, all.Swept, all.Reused, all.Puts, all.Deletes, all.Positions, all.Lost, all.Logged, all.Ahead, all.Registered)
	if *checkpointSeedsFlag >= 5 && (all.Completed == 0 || all.Failed == 0 || all.Deleted == 0 || all.Swept == 0 || all.Reused == 0 || all.Deletes == 0 || all.Positions == 0 || all.Lost == 0 || all.Logged == 0 || all.Registered == 0 || all.Registered == all.Ahead) {
		t.Error("something did not happen at all: the test shows nothing")
	}
}

// The invariants notice planted bugs, each for its own reason.
func TestCheckpointInvariantsBite(t *testing.T) {
	for fault, want := range map[CheckpointFault]string{
		RetireBeforeMetadata: "its _metadata is not in the store",
		ReusePlanned:         "is not in object",
		SweepRunning:         "not in the store",
		RegisterBeforePut:    "in the registry and not in the store",
		DeleteBeforePlan:     "in the registry and not in the store",
		SweepForeign:         "foreign object",
		ForgetPlans:          "objects are left",
		SweepAhead:           "in the registry and not in the store",
		LogBeyond:            "the cut is at",
		WriteBeforeBarrier:   "the cuts hold",
		CarryNoBarrier:       "the cuts hold",
	} {
		found := false
		for seed := uint64(1); seed <= 20 && !found; seed++ {
			r := checkpointRun(t, seed, fault, nil)
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

// TestSameSeedSameCheckpoints is SS1 for the world of checkpoints.
func TestSameSeedSameCheckpoints(t *testing.T) {
	for seed := uint64(1); seed <= 2; seed++ {
		a, b := checkpointRun(t, seed, "", nil), checkpointRun(t, seed, "", nil)
		if a.Sum != b.Sum || a.Puts != b.Puts {
			t.Errorf("seed %d has two traces: %s and %s", seed, a.Sum, b.Sum)
		}
	}
}
