package sim

import (
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
)

var (
	seedsFlag = flag.String("sim.seeds", "5,16", "the seeds to run: numbers and ranges, as 1,5,10-20")
	hoursFlag = flag.Float64("sim.hours", 0.1, "the simulated hours of each seed")
	kindFlag  = flag.String("sim.kind", string(Mixed), "what the runs are like: storms, days, mixed (of both), weeks, squalls or rollbacks")
	outFlag   = flag.String("sim.out", "", "where failed runs leave trace and history; default a new directory of the system's for temporary files")
	lookFlag  = flag.Duration("sim.look", -1, "how often the terms and leaders of all replicas are looked at; 0 is at starts and crashes only, less is as the kind has it")
	keepFlag  = flag.Bool("sim.keep", false, "keep trace and history of runs that pass, too")
)

func seeds(t *testing.T) []uint64 {
	t.Helper()
	var out []uint64
	for _, part := range strings.Split(*seedsFlag, ",") {
		lo, hi, ranged := strings.Cut(part, "-")
		if !ranged {
			hi = lo
		}
		a, err := strconv.ParseUint(lo, 10, 64)
		b, err2 := strconv.ParseUint(hi, 10, 64)
		if err != nil || err2 != nil || a > b {
			t.Fatalf("-sim.seeds: %q is neither a number nor a range", part)
		}
		for ; a <= b; a++ {
			out = append(out, a)
		}
	}
	return out
}

// TestSimulation runs the real cluster code for simulated hours.
func TestSimulation(t *testing.T) {
	var simulated, wall time.Duration
	for _, seed := range seeds(t) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := runSeed(t, Kind(*kindFlag), seed, *hoursFlag)
			simulated, wall = simulated+r.Simulated, wall+r.Wall
		})
	}
	t.Logf("sim total hours=%.2f speedup=%.0f", simulated.Hours(), simulated.Seconds()/max(wall.Seconds(), 1e-3))
}

// TestGoesBack holds SM8 and SM9 over some rollbacks.
func TestGoesBack(t *testing.T) {
	if r := runSeed(t, Rollbacks, 70004, 0.04); r.Rollbacks == 0 {
		t.Error("the cluster never went back")
	}
}

// runSeed simulates one cluster, and fails the test by its verdict.
func runSeed(t *testing.T, kind Kind, seed uint64, hours float64) *Report {
	t.Helper()
	out := *outFlag
	if out == "" { // its own: others on the machine may run the same seed
		var err error
		if out, err = os.MkdirTemp("", "keelstate-sim-"); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(out, "seed-"+strconv.FormatUint(seed, 10))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cfg, err := Draw(kind, seed, time.Duration(hours*float64(time.Hour)))
	if err != nil {
		t.Fatal(err)
	}
	if *lookFlag >= 0 {
		cfg.Look = *lookFlag
	}
	r := Run(t, cfg, dir)
	t.Log(r)
	if r.Verdict() == check.Pass && !t.Failed() {
		if !*keepFlag {
			_ = os.RemoveAll(dir)
			if *outFlag == "" {
				_ = os.RemoveAll(out)
			}
		}
		return r
	}
	for _, x := range r.Results {
		if x.Verdict != check.Pass {
			t.Errorf("%s: %s: %s %+v", x.Name, x.Verdict, x.Text, x.Details)
		}
	}
	for _, f := range r.Findings {
		t.Errorf("%.2000s", f)
	}
	t.Errorf("trace and history are in %s; run it again with: go test ./internal/sim -run 'TestSimulation$' -sim.kind %s -sim.seeds %d -sim.hours %g -sim.out %s", dir, kind, seed, hours, out)
	return r
}
