// Command run plants each bug of jepsen/mutants in turn and says which harness
// finds it, and how fast (RESULTS.md there):
//
//	go run ./jepsen/mutants/run [-only REGEXP] [-by unit,steps,sim,jepsen] [-seeds 4] ...
//
// The detectors run in order of their cost until one of the harnesses (steps, sim,
// jepsen) finds the mutant. First they run without any: a control that fails
// ends the command, for then nothing that they say counts.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/keelstate/keelstate/jepsen/mutants"
)

// options are the command line.
type options struct {
	root, only, by   string
	kind, keep, book string
	jepsenFlags      string
	control          bool
	seeds, stepSeeds int
	firstSeed        uint64
	hours            float64
	simLimit         time.Duration
	duration         time.Duration
	jepsenLimit      time.Duration
	buildLimit       time.Duration
	unitLimit        time.Duration
	again, stopAtEnd bool
}

func main() {
	var o options
	flag.StringVar(&o.root, "root", ".", "directory of the module")
	flag.StringVar(&o.only, "only", "", "regexp of the names of mutants to run")
	flag.StringVar(&o.by, "by", "unit,steps,sim,jepsen", "detectors, in order of their cost")
	flag.BoolVar(&o.control, "control", true, "first run without a mutant")
	flag.Uint64Var(&o.firstSeed, "first-seed", 1, "first seed of the detectors")
	flag.StringVar(&o.kind, "kind", "squalls", "-sim.kind of the simulation")
	flag.StringVar(&o.book, "book", "", "directory of results.json and RESULTS.md; jepsen/mutants if empty")
	flag.StringVar(&o.keep, "keep", "", "a directory where what the detectors print is kept")
	flag.IntVar(&o.stepSeeds, "step-seeds", 40, "seeds of the simulation of steps for each mutant")
	flag.IntVar(&o.seeds, "seeds", 6, "seeds of the simulation for each mutant")
	flag.Float64Var(&o.hours, "hours", 0.1, "simulated hours of each seed")
	flag.DurationVar(&o.simLimit, "sim-limit", 5*time.Minute, "bound of the simulation of one mutant")
	flag.DurationVar(&o.duration, "duration", 30*time.Second, "--duration of a real-process run")
	flag.StringVar(&o.jepsenFlags, "jepsen-flags", "--episode=25s --rate=100", "more flags of a real-process run")
	flag.DurationVar(&o.jepsenLimit, "jepsen-limit", 6*time.Minute, "bound of a real-process run")
	flag.DurationVar(&o.unitLimit, "unit-limit", 3*time.Minute, "bound of a mutant's unit tests")
	flag.DurationVar(&o.buildLimit, "build-limit", 10*time.Minute, "bound of one build")
	flag.BoolVar(&o.again, "again", false, "run a detector again that has an entry already")
	flag.BoolVar(&o.stopAtEnd, "first-finder", true, "stop at the first harness that finds a mutant")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// errNotFound: a mutant has run through all detectors that were asked for.
var errNotFound = errors.New("not every mutant was found")

func run(ctx context.Context, o options) error {
	root, err := filepath.Abs(o.root)
	if err != nil {
		return err
	}
	o.root = root
	dir := filepath.Join(root, "jepsen", "mutants")
	all, err := mutants.Load(dir)
	if err != nil {
		return err
	}
	chosen, err := choose(all, o.only)
	if err != nil {
		return err
	}
	book, err := openBook(cmp.Or(o.book, dir), all)
	if err != nil {
		return err
	}
	if err := book.save(); err != nil { // the page follows the results
		return err
	}
	by := strings.Split(o.by, ",")
	if o.control {
		if err := judgeControl(ctx, o, by, book); err != nil {
			return err
		}
	}
	escaped := 0
	for _, m := range chosen {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := judge(ctx, o, m, by, book); err != nil {
			return err
		}
		if !book.found(m) {
			escaped++
		}
	}
	if escaped > 0 {
		return fmt.Errorf("%w: %d escaped or were not run to an end", errNotFound, escaped)
	}
	return nil
}

// choose returns the mutants whose names match, and refuses an expression that
// none does: a run of nothing finds every mutant.
func choose(all []*mutants.Mutant, only string) ([]*mutants.Mutant, error) {
	re, err := regexp.Compile(only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	var chosen []*mutants.Mutant
	for _, m := range all {
		if re.MatchString(m.Name) {
			chosen = append(chosen, m)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("-only %q is the name of no mutant; their names are those of the patches in jepsen/mutants", only)
	}
	return chosen, nil
}

// judgeControl runs the detectors without a mutant.
func judgeControl(ctx context.Context, o options, by []string, b *book) error {
	w, err := newWorkshop(o, nil)
	if err != nil {
		return err
	}
	defer w.close()
	for _, name := range by {
		if name == "unit" {
			continue // they run in `make test`
		}
		e := w.detect(ctx, name, nil)
		if err := b.add(controlName, e); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if e.Verdict != missed {
			return fmt.Errorf("the control does not pass: %s: %s: %s", name, e.Verdict, e.Text)
		}
	}
	return nil
}

// judge runs the detectors on one mutant.
func judge(ctx context.Context, o options, m *mutants.Mutant, by []string, b *book) error {
	w, err := newWorkshop(o, m)
	if err != nil {
		return err
	}
	defer w.close()
	found := !o.again && b.found(m)
	for _, name := range by {
		if name == "steps" && !m.BySteps || name == "sim" && !m.BySim || name == "jepsen" && !m.ByJepsen || !o.again && b.has(m.Name, name) {
			continue
		}
		if o.stopAtEnd && found {
			break
		}
		e := w.detect(ctx, name, m)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := b.add(m.Name, e); err != nil {
			return err
		}
		found = found || name != "unit" && e.Verdict == caught
	}
	return nil
}
