package steps

import (
	"flag"
	"testing"
	"time"
)

var (
	seedsFlag = flag.Int("steps.seeds", 6, "how many seeds TestSteps runs")
	firstFlag = flag.Uint64("steps.first", 1, "the first seed of TestSteps")
	timeFlag  = flag.Duration("steps.time", 20*time.Second, "the virtual time of each seed")
	linesFlag = flag.Bool("steps.trace", false, "print the trace of each seed")
)

func run(t *testing.T, seed uint64, lines func(string)) *Report {
	t.Helper()
	r, err := Run(seed, *timeFlag, t.TempDir(), lines)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestSteps runs the step functions under many seeds (SS2 to SS5).
func TestSteps(t *testing.T) {
	var all Report
	for seed := *firstFlag; seed < *firstFlag+uint64(*seedsFlag); seed++ {
		var lines func(string)
		if *linesFlag {
			lines = func(s string) { t.Log(s) }
		}
		r := run(t, seed, lines)
		for _, p := range r.Problems {
			t.Errorf("seed %d: %s", seed, p)
		}
		if len(r.Problems) > 0 {
			t.Errorf("run it again with: go test ./internal/sim/steps -run TestSteps -steps.first %d -steps.seeds 1 -steps.time %v -steps.trace", seed, *timeFlag)
		}
		all.Simulated, all.Txns, all.Writes, all.Placed = all.Simulated+r.Simulated, all.Txns+r.Txns, all.Writes+r.Writes, all.Placed+r.Placed
	}
	t.Logf("steps seeds=%d virtual=%v txns=%d writes=%d placements=%d", *seedsFlag, all.Simulated, all.Txns, all.Writes, all.Placed)
	if all.Txns == 0 || all.Writes == 0 || all.Placed == 0 {
		t.Error("something did not happen at all: the test shows nothing")
	}
}

// TestSameSeedSameTrace is SS1.
func TestSameSeedSameTrace(t *testing.T) {
	sums := map[string]uint64{}
	for seed := uint64(1); seed <= 2; seed++ {
		a, b := run(t, seed, nil), run(t, seed, nil)
		if a.Sum != b.Sum {
			t.Errorf("seed %d has two traces: %s and %s", seed, a.Sum, b.Sum)
		}
		if other, ok := sums[a.Sum]; ok {
			t.Errorf("seeds %d and %d have the same trace", other, seed)
		}
		sums[a.Sum] = seed
	}
}
