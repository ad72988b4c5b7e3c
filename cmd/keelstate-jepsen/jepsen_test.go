package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/internal/cliout"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, prose bytes.Buffer
	code = run(t.Context(), args, environment{stdout: &out, stderr: &prose})
	return code, out.String(), prose.String()
}

// folder makes the folder of a run of one episode; lost adds are not in the sum.
func folder(t *testing.T, lost int64, other check.Verdict) string {
	t.Helper()
	dir := t.TempDir()
	e := report.Episode{Number: 1, Seed: 4, Style: "mixed", History: "history.jsonl", OK: 3, Results: []check.Result{{Name: "liveness", Verdict: other, Text: "as it was"}}}
	for _, name := range report.Looked {
		if name != "liveness" {
			e.Results = append(e.Results, check.Result{Name: name, Verdict: check.Pass})
		}
	}
	timeline, err := os.Create(filepath.Join(dir, report.TimelineFile))
	must(t, err)
	report.NewWriter(timeline, report.TimelineMagic).Write(report.Event{Type: report.EventPhase, Episode: 1, Text: "episode 1: " + report.LastPhase})
	must(t, timeline.Close())
	f, err := os.Create(filepath.Join(dir, e.History))
	must(t, err)
	now := int64(0)
	rec, err := history.NewRecorder(f, history.Header{Seed: 4}, history.Options{Clock: func() int64 { now++; return now }})
	must(t, err)
	do := func(name string, arg, result []int64) {
		c := rec.Invoke(history.Op{Process: 1, Workload: "counter", F: name, Key: "k", Arg: arg})
		rec.Complete(c, history.Done{Outcome: history.OK, Result: result})
	}
	do("add", []int64{5}, nil)
	do("add", []int64{7}, nil)
	do("read", nil, []int64{12 - lost})
	must(t, rec.Close())
	must(t, f.Close())
	e.Judge()
	r := &report.Run{Seed: 9, Repeat: "again", Episodes: []report.Episode{e}, ElapsedNs: 1e9, Done: true}
	r.Judge()
	must(t, r.Save(dir))
	return dir
}

// KJ3: the exit code follows the verdict, in every format.
func TestCheckExitCodes(t *testing.T) {
	for _, c := range []struct {
		name string
		lost int64
		live check.Verdict
		want int
	}{
		{"pass", 0, check.Pass, exitDone},
		{"lost", 7, check.Pass, exitVerdictFail},
		{"not live", 0, check.Fail, exitVerdictFail},
		{"undecided", 0, check.Unknown, exitUndecided},
		{"lost and undecided", 5, check.Unknown, exitVerdictFail},
	} {
		dir := folder(t, c.lost, c.live)
		for _, output := range []string{"table", "wide", "json", "yaml", "jsonl"} {
			code, out, prose := command(t, "check", dir, "-o", output)
			if code != c.want || !strings.Contains(out, "counter") || !strings.Contains(out, "liveness") {
				t.Errorf("%s, %s: code %d\n%s%s", c.name, output, code, out, prose)
			}
		}
	}
}

// A workload that did nothing in the run has not passed when it is judged again.
func TestCheckKeepsWhatDidNothing(t *testing.T) {
	dir := folder(t, 0, check.Pass)
	r, err := report.LoadRun(dir)
	must(t, err)
	r.Episodes[0].Results = append(r.Episodes[0].Results, check.Result{Name: "bank", Verdict: check.Unknown, Text: "it did nothing"})
	r.Episodes[0].Judge()
	r.Judge()
	must(t, r.Save(dir))
	if code, out, _ := command(t, "check", dir); code != exitUndecided || !strings.Contains(out, "did nothing") {
		t.Errorf("code %d:\n%s", code, out)
	}
}

// What is not there, is damaged, or is not the run's own is named and never passes;
// a failure that was seen stays one.
func TestCheckOfASpoiltFolder(t *testing.T) {
	changed := func(change func(r *report.Run, e *report.Episode)) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			r, err := report.LoadRun(dir)
			must(t, err)
			change(r, &r.Episodes[0])
			must(t, r.Save(dir))
		}
	}
	cut := func(file string, keep func(b []byte) []byte) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			b, err := os.ReadFile(filepath.Join(dir, file))
			must(t, err)
			must(t, os.WriteFile(filepath.Join(dir, file), keep(b), 0o644))
		}
	}
	lines := func(n int) func(b []byte) []byte {
		return func(b []byte) []byte { return bytes.Join(bytes.SplitAfter(b, []byte("\n"))[:n], nil) }
	}
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	remove := func(file string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) { must(t, os.Remove(filepath.Join(dir, file))) }
	}
	for _, c := range []struct {
		name, says string
		spoil      func(t *testing.T, dir string)
	}{
		{"no history", "history.jsonl: not found", remove("history.jsonl")},
		{"damaged history", "history.jsonl: reading line", cut("history.jsonl", flip)},
		{"history that ends early", "it ends early", cut("history.jsonl", lines(7))},
		{"another episode's history", "its seed is 4, not 5", changed(func(_ *report.Run, e *report.Episode) { e.Seed = 5 })},
		{"operations are missing", "has 3 operations that are ok", changed(func(_ *report.Run, e *report.Episode) { e.OK = 4 })},
		{"outcomes differ", "0 failed", changed(func(_ *report.Run, e *report.Episode) { e.Failed = 1 })},
		{"a workload is missing", "it did nothing", changed(func(r *report.Run, _ *report.Episode) { r.Options = map[string]string{"workloads": "counter,bank"} })},
		{"a result is missing", "run.json does not say", changed(func(_ *report.Run, e *report.Episode) { e.Results = e.Results[:2] })},
		{"the rollback's result is missing", "run.json does not say", changed(func(r *report.Run, _ *report.Episode) { r.Options = map[string]string{"rollback": "true"} })},
		{"the checkpoints' results are missing", "run.json does not say", changed(func(r *report.Run, _ *report.Episode) { r.Options = map[string]string{"checkpoints": "true"} })},
		{"no timeline", "timeline.jsonl does not have all", remove(report.TimelineFile)},
		{"timeline that ends early", "timeline.jsonl does not have all", cut(report.TimelineFile, lines(1))},
		{"damaged timeline", "keelstate-jepsen-timeline", cut(report.TimelineFile, flip)},
		{"the run did not end", "did not come to its end", changed(func(r *report.Run, _ *report.Episode) { r.Done = false })},
	} {
		for live, want := range map[check.Verdict]int{check.Pass: exitUndecided, check.Fail: exitVerdictFail} {
			dir := folder(t, 0, live)
			c.spoil(t, dir)
			code, out, prose := command(t, "check", dir)
			if code != want || (live == check.Pass && !strings.Contains(out+prose, c.says)) {
				t.Errorf("%s: code %d, want %d:\n%s%s", c.name, code, want, out, prose)
			}
		}
	}
}

func TestCheckLeavesTheFolderAlone(t *testing.T) {
	dir := folder(t, 7, check.Pass)
	before, err := os.ReadFile(filepath.Join(dir, report.RunFile))
	must(t, err)
	command(t, "check", dir)
	after, err := os.ReadFile(filepath.Join(dir, report.RunFile))
	must(t, err)
	if !bytes.Equal(before, after) {
		t.Error("run.json is changed")
	}
}

func TestReport(t *testing.T) {
	dir := folder(t, 0, check.Pass)
	code, out, prose := command(t, "report", dir, "-o", "json")
	var got map[string]any
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || got["kind"] != "Run" || got["verdict"] != "pass" || got["apiVersion"] != cliout.APIVersion {
		t.Fatalf("code %d: %v\n%s%s", code, err, out, prose)
	}
	if _, err := os.Stat(filepath.Join(dir, report.PageFile)); err != nil {
		t.Error(err)
	}
	if code, out, _ := command(t, "report", dir, "--ledger", "--quiet"); code != 0 || !strings.HasPrefix(out, "|") {
		t.Errorf("code %d: %s", code, out)
	}
	if code, out, _ := command(t, "report", dir, "--columns", "verdict,seed", "-o", "yaml"); code != 0 || !strings.HasSuffix(out, "verdict: \"pass\"\nseed: 9\n") {
		t.Errorf("code %d: %s", code, out)
	}
}

// KJ2: errors obey the output, also where the command line could not be read.
func TestErrors(t *testing.T) {
	full := t.TempDir()
	must(t, os.WriteFile(filepath.Join(full, "x"), nil, 0o755))
	binary := filepath.Join(full, "x")
	damaged := folder(t, 0, check.Pass)
	must(t, os.WriteFile(filepath.Join(damaged, report.RunFile), []byte("{}"), 0o644))
	for _, c := range []struct {
		args []string
		want int
		code string
	}{
		{[]string{"check", t.TempDir()}, exitNotFound, "not_found"},
		{[]string{"report", t.TempDir()}, exitNotFound, "not_found"},
		{[]string{"check", damaged}, exitFailed, "failed"},
		{[]string{"check"}, exitUsage, "usage"},
		{[]string{"nonsense"}, exitUsage, "usage"},
		{[]string{"check", "--nonsense"}, exitUsage, "usage"},
		{[]string{"check", full, "--limit", "0s"}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", filepath.Join(full, "none")}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", binary, "--keelctl", binary, "--out", full}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", binary, "--keelctl", binary, "--out", filepath.Join(full, "out"), "--workloads", "nonsense"}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", binary, "--keelctl", binary, "--out", filepath.Join(full, "out"), "--keys", "0"}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", binary, "--keelctl", binary, "--out", filepath.Join(full, "out"), "--duration", "0s"}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", binary, "--keelctl", binary, "--out", filepath.Join(full, "out"), "--rollback"}, exitUsage, "usage"},
		{[]string{"report", folder(t, 0, check.Pass), "--columns", "nonsense"}, exitUsage, "usage"},
		{[]string{"check", folder(t, 5, check.Pass), "--columns", "nonsense"}, exitUsage, "usage"},
		{[]string{"run", "--node-binary", binary, "--keelctl", binary, "--out", filepath.Join(full, "out"), "--columns", "nonsense"}, exitUsage, "usage"},
		{[]string{"check", folder(t, 5, check.Pass)}, exitVerdictFail, "verdict_fail"},
	} {
		code, _, prose := command(t, append(c.args, "--quiet", "-o", "json")...)
		var e failure
		if err := json.Unmarshal([]byte(prose), &e); err != nil || code != c.want || e.Code != c.code || e.ExitCode != c.want || e.Message == "" {
			t.Errorf("%v: code %d, %v: %s", c.args, code, err, prose)
		}
		if code, _, prose := command(t, c.args...); code != c.want || !strings.Contains(prose, "error: ") {
			t.Errorf("%v: code %d: %s", c.args, code, prose)
		}
	}
	if code, _, prose := command(t, "check", full, "-o", "xml"); code != exitUsage || !strings.Contains(prose, "xml") {
		t.Errorf("code %d: %s", code, prose)
	}
}

// KJ2: the environment's format holds for a line that could not be parsed, too.
func TestErrorsObeyTheEnvironment(t *testing.T) {
	var prose bytes.Buffer
	getenv := func(string) (string, bool) { return "json", true }
	code := run(t.Context(), []string{"check", "--nonsense"}, environment{stdout: &prose, stderr: &prose, getenv: getenv})
	var e failure
	if err := json.Unmarshal(prose.Bytes(), &e); err != nil || code != exitUsage || e.Kind != "Error" {
		t.Errorf("code %d, %v: %s", code, err, prose.String())
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, prose bytes.Buffer
	if code := run(ctx, []string{"check", folder(t, 0, check.Pass)}, environment{stdout: &out, stderr: &prose}); code != exitInterrupted {
		t.Errorf("code %d: %s", code, prose.String())
	}
}

// Every command has help with an example and a short text, and takes -o.
func TestEveryCommandHasHelp(t *testing.T) {
	a := &app{environment: environment{stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}}}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Example == "" || c.Short == "" {
			t.Errorf("%s: example %q, short %q", c.CommandPath(), c.Example, c.Short)
		}
		if c.PersistentFlags().Lookup("output") == nil && c.InheritedFlags().Lookup("output") == nil {
			t.Errorf("%s takes no --output", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(a.command())
}
