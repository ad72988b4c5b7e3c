//go:build linux

package runner

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/report"
)

var (
	smokeSeed = flag.Uint64("smoke-seed", 1, "the seed of TestCrashJepsenSmoke")
	smokeFor  = flag.Duration("smoke-for", 10*time.Second, "how long it begins episodes")
)

// binaries is the directory of what build made; removed by TestMain.
var binaries string

// build makes the real binaries once per process.
var build = sync.OnceValue(func() (err error) {
	if binaries, err = os.MkdirTemp("", "jepsen"); err != nil {
		return err
	}
	for _, p := range []string{"node", "keelctl"} {
		out, err := exec.Command("go", "build", "-o", filepath.Join(binaries, p), "../../cmd/"+p).CombinedOutput()
		if err != nil {
			return fmt.Errorf("building %s: %w: %s", p, err, out)
		}
	}
	return nil
})

// options of a short run; on a machine without namespaces and FUSE on loopback
// and a plain disk, where every fault here exists too.
func options(t *testing.T) Options {
	t.Helper()
	must(t, build())
	return Options{Dir: filepath.Join(t.TempDir(), "run"), NodeBinary: filepath.Join(binaries, "node"), CtlBinary: filepath.Join(binaries, "keelctl"),
		Seed: *smokeSeed, Duration: *smokeFor, Episode: 10 * time.Second, Memory: "256MiB", Rate: 60, Clients: 4, Workers: 4,
		Workloads: []string{"register", "list", "session"}, Faults: []string{"kill", "pause", "restart", "transfer"}, Note: func(s string) { t.Log(s) }}
}

// nothingLeft looks for what a run of this process left on the machine (RU1).
func nothingLeft(t *testing.T, dir string) {
	t.Helper()
	mark := fmt.Sprintf("keelj-%d-", os.Getpid())
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if strings.Contains(string(mounts), mark) {
		t.Errorf("mounts are left:\n%s", mounts)
	}
	names, err := filepath.Glob("/run/netns/" + mark + "*")
	must(t, err)
	groups, err := filepath.Glob("/sys/fs/cgroup/*/" + mark + "*")
	must(t, err)
	if len(names)+len(groups) > 0 {
		t.Errorf("left: %v %v", names, groups)
	}
	tasks, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, task := range tasks {
		if b, err := os.ReadFile(task); err == nil && strings.Contains(string(b), dir) {
			t.Errorf("a process is left: %s", strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
}

// TestCrashJepsenSmoke is the harness from end to end: real processes, faults,
// a verdict, and a folder that can be judged and drawn again.
func TestCrashJepsenSmoke(t *testing.T) {
	o := options(t)
	var rep *report.Run
	var totals report.Totals
	// On a busy machine a run comes to little, which is then no proof.
	for n := range 3 {
		o.Dir = filepath.Join(t.TempDir(), fmt.Sprint("run", n))
		var err error
		rep, err = Run(t.Context(), o)
		must(t, err)
		nothingLeft(t, o.Dir)
		if totals = rep.Totals(); rep.Verdict != check.Pass || totals.Injections > 0 && totals.OK >= 300 {
			break
		}
	}
	t.Logf("%s: %d operations, %d injections: %s", rep.Verdict, totals.Operations, totals.Injections, totals.FaultText())
	if rep.Verdict != check.Pass {
		t.Errorf("verdict %s: %s", rep.Verdict, rep.Text)
		for _, n := range []string{"n1", "n2", "n3"} {
			b, _ := os.ReadFile(filepath.Join(o.Dir, report.NodesDir, n+".log"))
			t.Logf("the end of the log of %s:\n%s", n, b[max(0, len(b)-3000):])
		}
	}
	if totals.Injections == 0 || totals.OK < 300 {
		t.Errorf("%d injections and %d operations that succeeded prove little", totals.Injections, totals.OK)
	}
	saved, err := report.LoadRun(o.Dir)
	must(t, err)
	if saved.Verdict != rep.Verdict || len(saved.Episodes) != len(rep.Episodes) || !saved.Done {
		t.Errorf("saved: %s, %d episodes, done %v", saved.Verdict, len(saved.Episodes), saved.Done)
	}
	for i := range saved.Episodes {
		h, err := report.LoadHistory(o.Dir, &saved.Episodes[i])
		must(t, err)
		for _, res := range check.Judge(h, check.Options{}) {
			if res.Verdict != check.Pass {
				t.Errorf("episode %d, judged again: %s %s: %s", i+1, res.Name, res.Verdict, res.Text)
			}
		}
	}
	samples, err := report.LoadSamples(o.Dir)
	must(t, err)
	if len(samples) < 10 {
		t.Errorf("only %d samples", len(samples))
	}
	if _, err := os.Stat(filepath.Join(o.Dir, report.PageFile)); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(o.Dir, report.NodesDir, "keelj-*")); len(left) > 0 && rep.Verdict == check.Pass {
		t.Errorf("the nodes' data is left: %v", left)
	}
}

// TestCrashInterrupt: an interrupt in the midst of faults leaves nothing behind
// but a folder that says so, and is no pass (RU1, RU2).
func TestCrashInterrupt(t *testing.T) {
	o := options(t)
	o.Duration, o.Episode = time.Hour, time.Hour
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		until(ctx, 20*time.Millisecond, func() bool {
			events, err := report.LoadEvents(o.Dir)
			for _, v := range events {
				if err == nil && v.Type == report.EventBegun {
					interrupt()
				}
			}
			return false
		})
	}()
	rep, err := Run(ctx, o)
	interrupt()
	<-watching
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	nothingLeft(t, o.Dir)
	if rep.Verdict != check.Unknown || rep.Done || !strings.Contains(rep.Text, "interrupted") {
		t.Errorf("verdict %s, done %v: %s", rep.Verdict, rep.Done, rep.Text)
	}
}

// TestCrashStopsAtFailure: replicas that differ end the run with everything kept
// and the command that repeats it (RU3). A keelctl that lies about one hash makes
// them differ.
func TestCrashStopsAtFailure(t *testing.T) {
	o := options(t)
	liar := filepath.Join(t.TempDir(), "keelctl")
	script := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in\n*\" shard hash \"*) %[1]s \"$@\" | sed '0,/\"content\": \"/s//\"content\": \"00/' ;;\n*) exec %[1]s \"$@\" ;;\nesac\n", o.CtlBinary)
	must(t, os.WriteFile(liar, []byte(script), 0o755))
	o.CtlBinary, o.Episode, o.Duration, o.Faults, o.Workloads = liar, 3*time.Second, time.Hour, []string{"kill-one"}, []string{"counter"}
	o.Repeat = "the command"
	rep, err := Run(t.Context(), o)
	must(t, err)
	nothingLeft(t, o.Dir)
	if rep.Verdict != check.Fail || !rep.Done || len(rep.Episodes) != 1 || !strings.Contains(rep.Text, "applied index") {
		t.Errorf("verdict %s after %d episodes, done %v: %s", rep.Verdict, len(rep.Episodes), rep.Done, rep.Text)
	}
	if data, _ := filepath.Glob(filepath.Join(o.Dir, report.NodesDir, "keelj-*", "n1")); len(data) == 0 {
		t.Error("the nodes' data is not kept")
	}
	if _, err := os.Stat(filepath.Join(o.Dir, report.EpisodesDir, "00001.jsonl")); err != nil {
		t.Error(err)
	}
	page, err := os.ReadFile(filepath.Join(o.Dir, report.PageFile))
	must(t, err)
	if !strings.Contains(string(page), "the command") {
		t.Error("the page does not say how to repeat it")
	}
}

// A mistake that is only found once the fleet is there leaves nothing.
func TestCrashUnknownFault(t *testing.T) {
	for _, c := range []struct {
		name, says string
		change     func(*Options)
	}{
		{"to have", `"nonsense"; the kinds are bandwidth, `, func(o *Options) { o.Faults = []string{"kill", "nonsense"} }},
		{"to leave out", `"nonsense"; the kinds are bandwidth, `, func(o *Options) { o.Without = []string{"nonsense"} }},
		{"not here", "partition cannot be injected here: the nodes are on loopback", func(o *Options) { o.Net, o.Faults = host.NetLoopback, []string{"partition"} }},
		{"left out not here", "no fault is left", func(o *Options) {
			o.Net, o.Without, o.Faults = host.NetLoopback, []string{"partition", "kill"}, []string{"kill"}
		}},
	} {
		o := options(t)
		c.change(&o)
		if _, err := Run(t.Context(), o); !errors.Is(err, ErrUsage) || !strings.Contains(err.Error(), c.says) {
			t.Fatalf("%s: %v", c.name, err)
		}
		if _, err := os.Stat(o.Dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: its folder is left: %v", c.name, err)
		}
		nothingLeft(t, o.Dir)
	}
}

// Nodes that do not start are not waited for: the run ends and says what they said.
func TestCrashNodeThatDoesNotStart(t *testing.T) {
	o := options(t)
	o.NodeFlags = []string{"--nonsense"}
	rep, err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "ended by itself with code") || !strings.Contains(err.Error(), "--nonsense") {
		t.Fatalf("%v", err)
	}
	if rep.Verdict != check.Unknown || !strings.Contains(rep.Text, "ended by itself") {
		t.Errorf("verdict %s: %s", rep.Verdict, rep.Text)
	}
	nothingLeft(t, o.Dir)
}
