package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/jepsen/mutants"
)

const controlName = "(control)"

// book holds what was found, in results.json, and writes RESULTS.md from it. It
// is written after each detector, so that an interrupted run loses nothing.
type book struct {
	dir     string
	mutants []*mutants.Mutant
	entries map[string][]entry // by mutant, in order of the detectors' cost
}

func openBook(dir string, all []*mutants.Mutant) (*book, error) {
	b := &book{dir: dir, mutants: all, entries: map[string][]entry{}}
	raw, err := os.ReadFile(b.path())
	if errors.Is(err, fs.ErrNotExist) {
		return b, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(raw, &b.entries); err != nil {
		return nil, fmt.Errorf("reading %s: %w", b.path(), err)
	}
	return b, nil
}

func (b *book) path() string { return filepath.Join(b.dir, "results.json") }

// add replaces what the detector said before.
func (b *book) add(mutant string, e entry) error {
	fmt.Printf("%-34s %-7s %-10s %7.1f s  seed %-4s %s\n", mutant, e.Detector, e.Verdict, e.Seconds, e.Seed, e.Text)
	es := slices.DeleteFunc(b.entries[mutant], func(o entry) bool { return o.Detector == e.Detector })
	es = append(es, e)
	order := []string{"unit", "steps", "sim", "jepsen"}
	slices.SortStableFunc(es, func(x, y entry) int { return slices.Index(order, x.Detector) - slices.Index(order, y.Detector) })
	b.entries[mutant] = es
	return b.save()
}

// save writes both files.
func (b *book) save() error {
	raw, err := json.MarshalIndent(b.entries, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.path(), append(raw, '\n'), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.dir, "RESULTS.md"), []byte(b.page()), 0o644)
}

// has says whether a detector has come to a verdict.
func (b *book) has(mutant, detector string) bool {
	return slices.ContainsFunc(b.entries[mutant], func(e entry) bool {
		return e.Detector == detector && (e.Verdict == caught || e.Verdict == missed)
	})
}

// found says whether a harness, not only a unit test, found a mutant.
func (b *book) found(m *mutants.Mutant) bool {
	_, ok := b.finder(m.Name)
	return ok
}

// finder is the harness that found a mutant fastest.
func (b *book) finder(mutant string) (best entry, ok bool) {
	for _, e := range b.entries[mutant] {
		if e.Detector != "unit" && e.Verdict == caught && (!ok || e.Seconds < best.Seconds) {
			best, ok = e, true
		}
	}
	return best, ok
}

// page is RESULTS.md.
func (b *book) page() string {
	var rows strings.Builder
	var seconds []float64
	for _, m := range b.mutants {
		line := func(e entry, by string) {
			fmt.Fprintf(&rows, "| [%s](%s.patch) | %s | %s | %s | %s | %s |\n", m.Name, m.Name, m.Rule, by, took(e), e.Seed, cell(e.Text))
		}
		if e, ok := b.finder(m.Name); ok {
			seconds = append(seconds, e.Seconds)
			line(e, e.Detector+b.unitToo(m.Name))
			continue
		}
		line(entry{Text: b.tried(m.Name)}, "**nobody yet**"+b.unitToo(m.Name))
	}
	slices.Sort(seconds)
	median := "none"
	if n := len(seconds); n > 0 {
		median = fmt.Sprintf("%.0f s", seconds[n/2])
	}
	return fmt.Sprintf(`# Planted bugs, and who found them

Written by %[1]sgo run ./jepsen/mutants/run%[1]s (%[1]smake mutants%[1]s) from %[1]sresults.json%[1]s; do not edit.
A bug counts as found when a simulation (%[1]ssteps%[1]s, %[1]ssim%[1]s) or a run of real processes
(%[1]sjepsen%[1]s) found it. Seconds are wall time from the start of that run, without the
build, on a machine that was shared. A unit test that holds the rule as well is noted.

%[2]d of %[3]d found by a harness; median %[4]s. Control: %[5]s.

| Mutant | Rule | Found by | Seconds | Seed | Evidence, or what was tried |
|---|---|---|---|---|---|
%[6]s`, "`", len(seconds), len(b.mutants), median, b.tried(controlName), rows.String())
}

func (b *book) unitToo(mutant string) string {
	for _, e := range b.entries[mutant] {
		if e.Detector == "unit" && e.Verdict == caught {
			return " (unit test too)"
		}
	}
	return ""
}

// tried is what every harness said.
func (b *book) tried(mutant string) string {
	var out []string
	for _, e := range b.entries[mutant] {
		if e.Detector != "unit" {
			out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s after %.0f s %s", e.Detector, e.Verdict, e.Seconds, e.Text)))
		}
	}
	if out == nil {
		return "not run"
	}
	return strings.Join(out, "; ")
}

func took(e entry) string {
	if e.Seconds == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f", e.Seconds)
}

func cell(s string) string { return strings.ReplaceAll(s, "|", "\\|") }
