package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// writeModule makes a module in a temporary directory.
func writeModule(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example.test/m\n\ngo 1.26\n"
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func newRunner(dir string, opts options) (*runner, *bytes.Buffer) {
	var out bytes.Buffer
	return &runner{dir: dir, opts: opts, out: &out}, &out
}

func names(list []outcome) string {
	var s []string
	for _, o := range list {
		s = append(s, strings.TrimPrefix(o.name(), "example.test/m/"))
	}
	return strings.Join(s, " ")
}

// One real go test over a module in which everything that can go wrong does.
func TestCountsWhatGoTestReports(t *testing.T) {
	dir := writeModule(t, map[string]string{
		"good/good.go": "package good\n",
		"good/good_test.go": `package good
import "testing"
func TestPass(t *testing.T) {}
func TestTable(t *testing.T) { t.Run("a", func(t *testing.T) {}); t.Run("b", func(t *testing.T) { t.Run("c", func(t *testing.T) {}) }) }
func TestSkipped(t *testing.T) { t.Skip("needs a", "moon") }
func TestSilent(t *testing.T) { t.SkipNow() }
func FuzzSeeds(f *testing.F) { f.Add(1); f.Add(2); f.Fuzz(func(t *testing.T, n int) {}) }
func TestCrashElsewhere(t *testing.T) { panic("must be left to the stage crash") }
`,
		"bad/bad_test.go": `package bad
import "testing"
func TestFine(t *testing.T) {}
func TestFail(t *testing.T) { t.Error("the reason of TestFail") }
func TestSub(t *testing.T) { t.Run("ok", func(t *testing.T) {}); t.Run("ko", func(t *testing.T) { t.Fatal("the reason of ko") }) }
func TestParentOnly(t *testing.T) { t.Run("ok", func(t *testing.T) {}); t.Error("after the subtests") }
`,
		"panics/p_test.go": `package panics
import "testing"
func TestBefore(t *testing.T) {}
func TestPanics(t *testing.T) { panic("the reason of the panic") }
func TestNever(t *testing.T) {}
`,
		"broken/b_test.go": "package broken\nimport \"testing\"\nfunc TestX(t *testing.T) { undefinedThing() }\n",
		"exits/e_test.go":  "package exits\nimport (\"os\"; \"testing\")\nfunc TestMain(m *testing.M) { os.Exit(3) }\nfunc TestX(t *testing.T) {}\n",
		"setup/s_test.go":  "package setup\nimport (\"testing\"; _ \"example.test/m/gone\")\nfunc TestX(t *testing.T) {}\n",
		"none/none.go":     "package none\n",
	})
	r, out := newRunner(dir, options{})
	total := runUnit(t.Context(), r)

	// good: TestPass, a, b/c, two seeds; bad: TestFine, two "ok"; panics: TestBefore.
	if total.Passed != 9 {
		t.Errorf("%d passed, want 9", total.Passed)
	}
	if got, want := names(total.Skipped), "good.TestSilent good.TestSkipped"; got != want {
		t.Errorf("skipped: %s; want %s", got, want)
	}
	failed := " " + names(total.Failed) + " "
	for _, want := range []string{"bad.TestFail", "bad.TestSub/ko", "bad.TestParentOnly", "panics.TestPanics", "broken", "exits", "setup"} {
		if !strings.Contains(failed, " "+want+" ") {
			t.Errorf("%s is not among the failed:%s", want, failed)
		}
	}
	if len(total.Failed) != 7 {
		t.Errorf("%d failed, want 7:%s", len(total.Failed), failed)
	}

	r.report(total, time.Second)
	report := out.String()
	for _, want := range []string{
		"good.TestSkipped:", "needs a moon", "good.TestSilent: (no reason given)", "the reason of TestFail",
		"the reason of ko", "after the subtests", "the reason of the panic", "undefined: undefinedThing", "example.test/m/gone",
	} {
		if !strings.Contains(report, want) {
			t.Errorf("the report does not have %q", want)
		}
	}
	if !strings.HasSuffix(report, "\n9 passed, 7 failed, 2 skipped\n") {
		t.Errorf("the report ends with %q", report[max(0, len(report)-80):])
	}
	if t.Failed() {
		t.Log(report)
	}
}

// Every package's tests run in a plain run, those of concurrent packages under the
// race detector alone; a stage by itself leaves nothing out.
func TestPlainRunDoesNotRunConcurrentPackagesTwice(t *testing.T) {
	files := map[string]string{}
	for _, p := range []string{"a", "cluster", "cluster/gossip", "raftfsm"} {
		name := p[strings.LastIndex(p, "/")+1:]
		files[p+"/x_test.go"] = fmt.Sprintf("package %s\nimport \"testing\"\nfunc TestOf_%s(t *testing.T) { t.Fail() }\n", name, name)
	}
	dir := writeModule(t, files)
	for _, c := range []struct {
		opts options
		run  func(context.Context, *runner) tally
		want string
	}{
		{options{}, runUnit, "a.TestOf_a cluster.TestOf_cluster"},
		{options{}, runRace, "cluster/gossip.TestOf_gossip raftfsm.TestOf_raftfsm"},
		{options{stages: "race"}, runRace, "cluster.TestOf_cluster cluster/gossip.TestOf_gossip raftfsm.TestOf_raftfsm"},
		{options{stages: "unit"}, runUnit, "a.TestOf_a cluster.TestOf_cluster cluster/gossip.TestOf_gossip raftfsm.TestOf_raftfsm"},
		{options{long: true}, runUnit, "a.TestOf_a cluster.TestOf_cluster cluster/gossip.TestOf_gossip raftfsm.TestOf_raftfsm"},
	} {
		r, _ := newRunner(dir, c.opts)
		total := c.run(t.Context(), r)
		failed := strings.Fields(names(total.Failed))
		slices.Sort(failed)
		if got := strings.Join(failed, " "); got != c.want {
			t.Errorf("%+v: %s, want %s", c.opts, got, c.want)
		}
	}
}

func TestCrashStageRunsOnlyCrashTests(t *testing.T) {
	dir := writeModule(t, map[string]string{
		"a/a_test.go": "package a\nimport \"testing\"\nfunc TestCrashX(t *testing.T) {}\nfunc TestKillX(t *testing.T) {}\nfunc TestOther(t *testing.T) { t.Error() }\n",
		"b/b_test.go": "package b\nthis package does not even parse if it is built\n",
		"c/c_test.go": "package c\nimport \"testing\"\nfunc TestOther(t *testing.T) { t.Error() }\n",
	})
	if err := os.Remove(filepath.Join(dir, "b", "b_test.go")); err != nil {
		t.Fatal(err)
	}
	r, _ := newRunner(dir, options{})
	if total := runCrash(t.Context(), r); total.Passed != 2 || len(total.Failed) != 0 {
		t.Errorf("%d passed, failed: %s", total.Passed, names(total.Failed))
	}
}

// The harness's clusters and the simulation have a stage of their own; neither
// the unit tests nor the crash stage run them.
func TestChaosStageRunsTheHarnessAndTheSimulation(t *testing.T) {
	dir := writeModule(t, map[string]string{
		"a/a_test.go":            "package a\nimport \"testing\"\nfunc TestCrashX(t *testing.T) {}\nfunc TestPlain(t *testing.T) {}\n",
		"jepsen/j/j_test.go":     "package j\nimport \"testing\"\nfunc TestCrashY(t *testing.T) {}\nfunc TestPlain(t *testing.T) {}\n",
		"internal/sim/s_test.go": "package sim\nimport \"testing\"\nfunc TestCluster(t *testing.T) {}\n",
	})
	r, _ := newRunner(dir, options{})
	for name, c := range map[string]struct {
		run  func(context.Context, *runner) tally
		want int
	}{"unit": {runUnit, 2}, "crash": {runCrash, 1}, "chaos": {runChaos, 2}} {
		if total := c.run(t.Context(), r); total.Passed != c.want || len(total.Failed) != 0 {
			t.Errorf("%s: %d passed, want %d; failed: %s", name, total.Passed, c.want, names(total.Failed))
		}
	}
}

// A hanging test is named, the stage ends near its limit, and nothing is left
// running.
func TestStageLimitEndsAHangingTest(t *testing.T) {
	dir := writeModule(t, map[string]string{
		"h/h_test.go": "package h\nimport \"testing\"\nfunc TestFast(t *testing.T) {}\nfunc TestHangs(t *testing.T) { <-make(chan int) }\n",
	})
	r, out := newRunner(dir, options{})
	// The test's own limit ends it; the stage has time to build, on a busy machine too.
	s := stage{name: "unit", limit: 5 * time.Minute, run: func(ctx context.Context, r *runner) tally {
		return r.goTest(ctx, "unit", []string{"./..."}, "-timeout", "5s")
	}}
	if r.runStages(t.Context(), []stage{s}) {
		t.Error("a hanging test passes")
	}
	if !strings.Contains(out.String(), "h.TestHangs") || !strings.HasSuffix(out.String(), "\n1 passed, 1 failed, 0 skipped\n") {
		t.Errorf("the report is\n%s", out)
	}
}

func TestStageLimitKillsTheWholeGroup(t *testing.T) {
	r, out := newRunner(t.TempDir(), options{})
	s := stage{name: "demo", limit: time.Second, run: func(ctx context.Context, r *runner) tally {
		// The shell's child inherits its output, so that Run returns early only
		// if the child dies too.
		return r.check(ctx, "demo", "sleeper", "sh", "-c", "sleep 60 & wait")
	}}
	began := time.Now()
	if r.runStages(t.Context(), []stage{s}) {
		t.Error("a stage over its limit passes")
	}
	if took := time.Since(began); took > 50*time.Second {
		t.Errorf("the stage ended after %s", took)
	}
	if !strings.Contains(out.String(), "ended at its limit of 1s") {
		t.Errorf("the report is\n%s", out)
	}
}

func TestInterruptedStagesFail(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, out := newRunner(t.TempDir(), options{})
	ran := false
	s := stage{name: "unit", limit: time.Minute, run: func(context.Context, *runner) tally { ran = true; return tally{} }}
	if r.runStages(ctx, []stage{s}) || ran {
		t.Errorf("an interrupted run passes (stage ran: %v)\n%s", ran, out)
	}
}

func TestFailureWithoutEventsIsCounted(t *testing.T) {
	r, out := newRunner(t.TempDir(), options{}) // no module here
	total := r.goTest(t.Context(), "unit", []string{"./..."})
	if total.Passed != 0 || len(total.Failed) != 1 {
		t.Errorf("%+v\n%s", total, out)
	}
	if total := runUnit(t.Context(), r); len(total.Failed) != 1 {
		t.Errorf("%+v", total)
	}
}

func TestChecksReportOutput(t *testing.T) {
	r, _ := newRunner(t.TempDir(), options{})
	total := r.check(t.Context(), "checks", "thing", "sh", "-c", "echo because; exit 1")
	if len(total.Failed) != 1 || !strings.Contains(total.Failed[0].Detail, "because") {
		t.Errorf("%+v", total)
	}
	if total := r.check(t.Context(), "checks", "thing", "true"); total.Passed != 1 {
		t.Errorf("%+v", total)
	}
}

func TestGofmtFindsUnformattedFiles(t *testing.T) {
	dir := writeModule(t, map[string]string{"ok.go": "package m\n", "ugly.go": "package m\nfunc  f( ) {}\n"})
	if out, err := exec.Command("git", "-C", dir, "init", "-q").CombinedOutput(); err != nil {
		t.Fatalf("git init: %v\n%s", err, out)
	}
	r, _ := newRunner(dir, options{})
	total := r.gofmt(t.Context())
	if len(total.Failed) != 1 || !strings.Contains(total.Failed[0].Detail, "ugly.go") || strings.Contains(total.Failed[0].Detail, "ok.go") {
		t.Errorf("%+v", total)
	}
}

func TestFuzzStageRunsEveryTarget(t *testing.T) {
	dir := writeModule(t, map[string]string{
		"f/f_test.go": "package f\nimport \"testing\"\nfunc FuzzA(f *testing.F) { f.Fuzz(func(t *testing.T, n int) {}) }\nfunc FuzzB(f *testing.F) { f.Add(1); f.Fuzz(func(t *testing.T, n int) { t.Error(\"the reason\") }) }\n",
	})
	r, _ := newRunner(dir, options{fuzzTime: "1x"})
	total := runFuzz(t.Context(), r)
	if total.Passed != 1 || names(total.Failed) != "f.FuzzB" || !strings.Contains(total.Failed[0].Detail, "the reason") {
		t.Errorf("%+v", total)
	}
}

func TestChoose(t *testing.T) {
	pick := func(opts options) string {
		chosen, err := choose(stages(), opts)
		if err != nil {
			return err.Error()
		}
		var s []string
		for _, c := range chosen {
			s = append(s, c.name)
		}
		return strings.Join(s, " ")
	}
	for _, tc := range []struct {
		opts options
		want string
	}{
		{options{}, "checks unit race meta crash chaos demo"},
		{options{long: true}, "checks unit race meta crash chaos demo fuzz"},
		{options{stages: "race,unit"}, "unit race"},
		{options{stages: "fuzz"}, "fuzz"},
		{options{stages: "units"}, `there is no stage "units"`},
	} {
		if got := pick(tc.opts); got != tc.want {
			t.Errorf("%+v chooses %q, want %q", tc.opts, got, tc.want)
		}
	}
}

func TestLongOutputIsCut(t *testing.T) {
	c := newCollector("unit")
	for range 10 {
		c.handle(event{Action: "output", Package: "p", Test: "T", Output: strings.Repeat("x", maxOutput/4)})
	}
	c.handle(event{Action: "fail", Package: "p", Test: "T"})
	c.handle(event{Action: "fail", Package: "p"})
	if n := len(c.total.Failed[0].Detail); n > 2*maxOutput {
		t.Errorf("%d bytes of output are kept", n)
	}
	if got := tail(strings.Repeat("x", 2*maxOutput)); len(got) > maxOutput+20 {
		t.Errorf("tail keeps %d bytes", len(got))
	}
}

func TestKilledGoTestLeavesNoPackageUncounted(t *testing.T) {
	c := newCollector("unit")
	c.handle(event{Action: "run", Package: "p", Test: "TestA"})
	c.handle(event{Action: "pass", Package: "p", Test: "TestA"})
	c.handle(event{Action: "run", Package: "p", Test: "TestB"})
	c.handle(event{Action: "output", Package: "q", Output: "starting"})
	c.unfinished("killed")
	if c.total.Passed != 1 || names(c.total.Failed) != "p.TestB q" {
		t.Errorf("%d passed, failed: %s", c.total.Passed, names(c.total.Failed))
	}
}

func TestShortListSaysWhatFailedLast(t *testing.T) {
	for _, tc := range []struct{ detail, want string }{
		{"", ""},
		{"=== RUN TestX\n    x_test.go:7: want 1\n    x_test.go:9: want 2\n", "x_test.go:7: want 1"},
		{"    x_test.go:7: want 1\npanic: oh no\n\ngoroutine 1", "panic: oh no"},
		{"panic: test timed out after 9m0s\n\trunning tests:\n\t\tTestHangs (8m)\n\ngoroutine 1", "panic: test timed out after 9m0s; running tests: TestHangs (8m)"},
		{"exit status 2\n", "exit status 2"},
	} {
		if got := (outcome{Detail: tc.detail}).cause(); got != tc.want {
			t.Errorf("the cause of %q is %q, want %q", tc.detail, got, tc.want)
		}
	}
	var out strings.Builder
	r := &runner{out: &out}
	r.report(tally{Failed: []outcome{{Stage: "unit", Package: "p", Test: "TestX", Detail: strings.Repeat("stack\n", 1000)}}}, time.Second)
	if got := out.String(); !strings.HasSuffix(got, "failed, in short:\n  [unit] p.TestX: stack\n\nleaf tests, in 1s:\n0 passed, 1 failed, 0 skipped\n") {
		t.Errorf("the report ends with %q", got[max(0, len(got)-200):])
	}
}
