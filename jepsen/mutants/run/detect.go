package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/keelstate/keelstate/jepsen/mutants"
)

// Verdicts of a detector about a mutant.
const (
	caught    = "found"
	missed    = "not found"
	broken    = "not built"
	undecided = "undecided" // out of time, or the checkers could not decide
)

// exits of keelstate-jepsen.
const exitVerdictFail = 6

// entry is what one detector said.
type entry struct {
	Detector string  `json:"detector"`
	Verdict  string  `json:"verdict"`
	Seconds  float64 `json:"seconds"` // from the start of the run, without the build
	Seed     string  `json:"seed,omitempty"`
	Text     string  `json:"text,omitempty"`
}

// workshop is where one mutant is built and run.
type workshop struct {
	o       options
	name    string
	dir     string
	overlay string
}

func newWorkshop(o options, m *mutants.Mutant) (*workshop, error) {
	name := controlName
	if m != nil {
		name = m.Name
	}
	if o.keep != "" {
		if err := os.MkdirAll(o.keep, 0o755); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp("", "keelstate-mutant-")
	if err != nil {
		return nil, err
	}
	overlay, err := m.Overlay(o.root, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &workshop{o: o, name: name, dir: dir, overlay: overlay}, nil
}

func (w *workshop) close() {
	if err := os.RemoveAll(w.dir); err != nil {
		fmt.Fprintln(os.Stderr, "mutants: tidying up:", err)
	}
}

// detect runs one detector to its verdict.
func (w *workshop) detect(ctx context.Context, name string, m *mutants.Mutant) entry {
	e := entry{Detector: name, Verdict: missed}
	switch name {
	case "unit":
		w.unit(ctx, m, &e)
	case "steps":
		w.steps(ctx, &e)
	case "sim":
		w.simulate(ctx, m, &e)
	case "jepsen":
		w.jepsen(ctx, m, &e)
	default:
		e.Verdict, e.Text = broken, "there is no such detector"
	}
	return e
}

// unit runs the tests that hold the mutant's rule.
func (w *workshop) unit(ctx context.Context, m *mutants.Mutant, e *entry) {
	bin := filepath.Join(w.dir, "unit.test")
	if !w.build(ctx, e, "test", "-c", "-overlay", w.overlay, "-o", bin, m.UnitPackage) {
		return
	}
	began := time.Now()
	out, code, err := command(ctx, w.o.unitLimit, filepath.Join(w.o.root, m.UnitPackage), bin, "-test.run", m.UnitRE, "-test.failfast", "-test.timeout", w.o.unitLimit.String())
	e.Seconds = time.Since(began).Seconds()
	w.keepOutput("unit", out)
	e.judge(code == 1 || code == 2, err, out)
}

// steps runs seeds of the step functions of checkpoints and rollbacks until one
// fails.
func (w *workshop) steps(ctx context.Context, e *entry) {
	bin := filepath.Join(w.dir, "steps.test")
	if !w.build(ctx, e, "test", "-c", "-overlay", w.overlay, "-o", bin, "./internal/sim/steps") {
		return
	}
	w.untilFound(ctx, e, w.o.stepSeeds, func(seed string) []string {
		return []string{bin, "-test.run", "^Test(Checkpoints|Rollbacks)$", "-test.v", "-test.timeout", w.o.simLimit.String(),
			"-steps.first", seed, "-steps.checkpoint-seeds", "1", "-steps.rollback-seeds", "1"}
	})
}

// simulate runs seeds until one fails.
func (w *workshop) simulate(ctx context.Context, m *mutants.Mutant, e *entry) {
	kind := w.o.kind
	if m != nil && m.Kind != "" {
		kind = m.Kind
	}
	bin := filepath.Join(w.dir, "sim.test")
	if !w.build(ctx, e, "test", "-c", "-overlay", w.overlay, "-o", bin, "./internal/sim") {
		return
	}
	w.untilFound(ctx, e, w.o.seeds, func(seed string) []string {
		return []string{bin, "-test.run", "^TestSimulation$", "-test.v", "-test.timeout", w.o.simLimit.String(),
			"-sim.kind", kind, "-sim.seeds", seed, "-sim.hours", fmt.Sprint(w.o.hours), "-sim.out", filepath.Join(w.dir, "sim")}
	})
}

// untilFound runs a simulation, whose arguments are those of each seed, until a seed
// comes to another verdict than that nothing was found.
func (w *workshop) untilFound(ctx context.Context, e *entry, seeds int, argv func(seed string) []string) {
	began := time.Now()
	for k := range seeds {
		left := w.o.simLimit - time.Since(began)
		if left <= 0 {
			e.Verdict, e.Text = undecided, fmt.Sprintf("out of time after %d seeds", k)
			return
		}
		e.Seed = strconv.FormatUint(w.o.firstSeed+uint64(k), 10)
		args := argv(e.Seed)
		out, code, err := command(ctx, left, filepath.Join(w.o.root, "internal", "sim"), args[0], args[1:]...)
		e.Seconds = time.Since(began).Seconds()
		w.keepOutput(e.Detector+"-"+e.Seed, out)
		if e.judge(code == 1 || code == 2, err, out); e.Verdict != missed {
			return
		}
	}
}

// jepsen builds all binaries, since a mutant may be the client's, and runs them.
func (w *workshop) jepsen(ctx context.Context, m *mutants.Mutant, e *entry) {
	for _, p := range []struct{ bin, pkg string }{{"keelstate-node", "./cmd/node"}, {"keelctl", "./cmd/keelctl"}, {"keelstate-jepsen", "./cmd/keelstate-jepsen"}} {
		if !w.build(ctx, e, "build", "-overlay", w.overlay, "-o", filepath.Join(w.dir, p.bin), p.pkg) {
			return
		}
	}
	e.Seed = strconv.FormatUint(w.o.firstSeed, 10)
	args := []string{"run", "--seed", e.Seed, "--duration", w.o.duration.String(), "--out", filepath.Join(w.dir, "run")}
	args = append(args, strings.Fields(w.o.jepsenFlags)...)
	if m != nil {
		if m.Faults != "" {
			args = append(args, "--faults", m.Faults)
		}
		args = append(args, strings.Fields(m.Flags)...)
	}
	began := time.Now()
	out, code, err := command(ctx, w.o.jepsenLimit, w.dir, filepath.Join(w.dir, "keelstate-jepsen"), args...)
	e.Seconds = time.Since(began).Seconds()
	w.keepOutput("jepsen", out)
	if code > 0 && code != exitVerdictFail {
		e.Verdict, e.Text = undecided, fmt.Sprintf("exit %d: %s", code, lastLine(out))
		return
	}
	if e.judge(code == exitVerdictFail, err, out); e.Verdict == caught {
		if said := runSaid(filepath.Join(w.dir, "run")); said != nil {
			e.Text = tell(said)
		}
	}
}

// keepOutput leaves what a detector printed where -keep says.
func (w *workshop) keepOutput(detector, out string) {
	if w.o.keep == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(w.o.keep, w.name+"-"+detector+".log"), []byte(out), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "mutants: keeping the output:", err)
	}
}

func (w *workshop) build(ctx context.Context, e *entry, args ...string) bool {
	out, _, err := command(ctx, w.o.buildLimit, w.o.root, "go", args...)
	if err != nil {
		e.Verdict, e.Text = broken, lastLine(out)
	}
	return err == nil
}

// judge gives the verdict of a command that ended: failed says that it ran to a
// verdict and that this was a failure (MU2).
func (e *entry) judge(failed bool, err error, out string) {
	switch {
	case failed && noVerdict.MatchString(out) && !strings.Contains(out, "verdict=fail"):
		e.Verdict, e.Text = undecided, evidence(out)
	case failed:
		e.Verdict, e.Text = caught, evidence(out)
	case err != nil:
		e.Verdict, e.Text = undecided, err.Error()
	}
}

// noVerdict is in the output of tests that failed because they did not come to a
// verdict: their checkers could not decide, their own time was over, or the machine
// was too slow for the watchdog.
var noVerdict = regexp.MustCompile(`(?m)verdict=unknown|^panic: test timed out|simulated time stands still`)

// command runs a program in a process group of its own, which is killed at the
// limit. code is the program's exit code, -1 if it has none.
func command(ctx context.Context, limit time.Duration, dir, name string, args ...string) (out string, code int, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	var buf bytes.Buffer
	cmd.Stdout, cmd.Stderr = &buf, &buf
	err = cmd.Run()
	code = -1
	if cmd.ProcessState != nil {
		code = cmd.ProcessState.ExitCode()
	}
	if ctx.Err() != nil {
		return buf.String(), -1, fmt.Errorf("%s: %w", filepath.Base(name), ctx.Err())
	}
	return buf.String(), code, err
}
