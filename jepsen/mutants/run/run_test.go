package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/mutants"
)

// TestOnlyAVerdictCounts holds MU2: a program that ran out of time, crashed
// without a verdict or could not be started has found nothing.
func TestOnlyAVerdictCounts(t *testing.T) {
	for _, c := range []struct {
		name, script, want string
		limit              time.Duration
	}{
		{"passes", "exit 0", missed, time.Minute},
		{"fails", "echo '--- FAIL: TestX'; exit 1", caught, time.Minute},
		{"cannot decide", "echo 'sim seed=1 verdict=unknown'; echo '--- FAIL: TestX'; exit 1", undecided, time.Minute},
		{"cannot decide one seed of two", "echo 'sim seed=1 verdict=unknown'; echo 'sim seed=2 verdict=fail'; exit 1", caught, time.Minute},
		{"runs out of its own time", "echo 'panic: test timed out after 3m0s'; exit 1", undecided, time.Minute},
		{"panics", "echo 'panic: nil map'; exit 1", caught, time.Minute},
		{"is killed", "kill -9 $$", undecided, time.Minute},
		{"hangs", "sleep 60 & wait", undecided, 100 * time.Millisecond},
	} {
		out, code, err := command(context.Background(), c.limit, t.TempDir(), "/bin/sh", "-c", c.script)
		e := entry{Verdict: missed}
		if e.judge(code == 1, err, out); e.Verdict != c.want {
			t.Errorf("a detector that %s: %s, want %s (%d, %v)", c.name, e.Verdict, c.want, code, err)
		}
	}
	if _, _, err := command(context.Background(), 50*time.Millisecond, t.TempDir(), "/bin/sh", "-c", "sleep 9"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a limit that is over: %v", err)
	}
}

// TestBookCountsHarnessesOnly: a mutant that only a unit test found has escaped.
func TestBookCountsHarnessesOnly(t *testing.T) {
	m := &mutants.Mutant{Name: "01-x", Rule: "W1"}
	b, err := openBook(t.TempDir(), []*mutants.Mutant{m})
	if err != nil {
		t.Fatal(err)
	}
	add := func(e entry) {
		t.Helper()
		if err := b.add(m.Name, e); err != nil {
			t.Fatal(err)
		}
	}
	add(entry{Detector: "unit", Verdict: caught, Seconds: 1})
	add(entry{Detector: "sim", Verdict: undecided, Seconds: 2})
	if b.found(m) || b.has(m.Name, "sim") || !strings.Contains(b.page(), "0 of 1 found by a harness") {
		t.Errorf("found by a unit test alone:\n%s", b.page())
	}
	add(entry{Detector: "sim", Verdict: caught, Seconds: 3, Seed: "7", Text: "a|b"})
	b, err = openBook(b.dir, b.mutants)
	if err != nil {
		t.Fatal(err)
	}
	if page := b.page(); !b.found(m) || !strings.Contains(page, "1 of 1 found by a harness; median 3 s") || !strings.Contains(page, `| sim (unit test too) | 3 | 7 | a\|b |`) {
		t.Errorf("after the simulation found it:\n%s", page)
	}
}

// TestEvidenceIsTheCheckersWord: the anomaly that a checker names, with the lines
// that explain it; not the summary, not who else failed, not go test's.
func TestEvidenceIsTheCheckersWord(t *testing.T) {
	out := "=== RUN   TestSimulation\n    sim_test.go:61: sim seed=1 ops=9 verdict=fail\n    sim_test.go:66: hashes: fail: at 7 [{Verdict:fail}]\n" +
		"    sim_test.go:66: session: fail: 3 was applied twice:\n        first here,\n        then there [{Verdict:fail Key:x}]\n    sim_test.go:70: replicas differ\n" +
		"--- FAIL: TestSimulation\nFAIL\n"
	if got, want := evidence(out), "session: fail: 3 was applied twice: first here, then there (and hashes)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := evidence("    sim_test.go:61: sim verdict=fail\n    sim_test.go:70: replicas of g1 differ: x\n"); got != "replicas of g1 differ: x" {
		t.Error(got)
	}
	if got := evidence("one\nlast\n"); got != "last" {
		t.Error(got)
	}
	if got := tell([]string{"liveness: fail: no leader", "list: fail: 5 is lost"}); got != "list: fail: 5 is lost (and liveness)" {
		t.Error(got)
	}
}

// A run of no mutant would say that all were found.
func TestOnlyNamesMutants(t *testing.T) {
	all := []*mutants.Mutant{{Name: "01-a"}, {Name: "02-b"}}
	for _, c := range []struct {
		only string
		want int // 0: refused
	}{{"", 2}, {"a$", 1}, {"^0[12]-", 2}, {"99", 0}, {"(", 0}} {
		got, err := choose(all, c.only)
		if len(got) != c.want || (err != nil) != (c.want == 0) {
			t.Errorf("-only %q: %d mutants, %v", c.only, len(got), err)
		}
	}
}
