package main

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"
)

// crashTests matches the tests of the stage "crash".
const crashTests = "^Test(Crash|Kill)"

// stage is one part of the run.
type stage struct {
	name  string
	about string
	limit time.Duration
	// byDefault says that the stage belongs to a plain run; longOnly ones run
	// with -long or by name.
	byDefault bool
	run       func(context.Context, *runner) tally
}

// concurrent are the packages whose tests run under the race detector, as
// prefixes of the import path below the module.
var concurrent = []string{
	"api/server", "broadcast", "client", "cluster", "engine", "raftfsm", "internal/memnet", "internal/vfs",
}

// twoEngines is the package whose tests run on both engines without the race
// detector, and on engine/mem alone with it, where they take longest of all: a plain
// run leaves them to the stage unit.
const twoEngines = "cluster"

// clustersAtOnce is how many tests of a package run beside one another: most wait
// for elections and fsyncs, so that two for two processors leave these idle.
const clustersAtOnce = "4"

func stages() []stage {
	return []stage{
		{"checks", "go vet, gofmt, layering and dependency rules", 6 * time.Minute, true, runChecks},
		{"unit", "all packages; in a plain run those that the stage race does not run anyway", 13 * time.Minute, true, runUnit},
		{"race", "the concurrent packages under the race detector", 13 * time.Minute, true, runRace},
		{"meta", "random operations against a model", 6 * time.Minute, true, runMeta},
		{"crash", "tests that crash or kill what they test", 8 * time.Minute, true, runCrash},
		{"chaos", "simulated clusters, and real ones under faults", 8 * time.Minute, true, runChaos},
		{"demo", "three nodes, the flights job, a killed leader", 6 * time.Minute, true, runDemo},
		{"fuzz", "each fuzz target for a while", 60 * time.Minute, false, runFuzz},
	}
}

func runChecks(ctx context.Context, r *runner) tally {
	var t tally
	t.add(r.check(ctx, "checks", "go vet ./...", "go", "vet", "./..."))
	t.add(r.gofmt(ctx))
	// Never from the cache: what the rules look at are all files of the tree.
	t.add(r.goTest(ctx, "checks", []string{"./internal/lint/..."}, "-count=1"))
	return t
}

// plain says that all stages of a short run are run.
func (r *runner) plain() bool { return r.opts.stages == "" && !r.opts.long }

func runUnit(ctx context.Context, r *runner) tally {
	// A plain run has the race detector for the concurrent packages: the same tests
	// once more without it would find nothing.
	plain := r.plain()
	pkgs, err := r.packages(ctx, func(p string) bool {
		if plain && underAny(p, concurrent) && p != twoEngines {
			return false
		}
		return !under(p, "internal/lint") && !under(p, "internal/metamorphic") && !under(p, "internal/sim")
	})
	if err != nil {
		return failure("unit", "go list", err.Error())
	}
	return r.goTest(ctx, "unit", pkgs, "-skip", crashTests, "-parallel", clustersAtOnce)
}

func runRace(ctx context.Context, r *runner) tally {
	pkgs, err := r.packages(ctx, func(p string) bool {
		if r.opts.long {
			return !under(p, "internal/lint") && !under(p, "internal/ci")
		}
		return underAny(p, concurrent) && !(r.plain() && p == twoEngines)
	})
	if err != nil {
		return failure("race", "go list", err.Error())
	}
	return r.goTest(ctx, "race", pkgs, "-race", "-skip", crashTests)
}

func runMeta(ctx context.Context, r *runner) tally {
	pkgs, err := r.packages(ctx, func(p string) bool { return under(p, "internal/metamorphic") })
	if err != nil {
		return failure("meta", "go list", err.Error())
	}
	return r.goTest(ctx, "meta", pkgs, r.repeat(5)...)
}

func runCrash(ctx context.Context, r *runner) tally {
	pkgs, err := r.packages(ctx, func(p string) bool {
		return !under(p, "internal/ci") && !under(p, "internal/metamorphic") && !chaos(p)
	})
	if err != nil {
		return failure("crash", "go list", err.Error())
	}
	pkgs, err = r.withTests(ctx, pkgs, "TestCrash", "TestKill")
	if err != nil {
		return failure("crash", "finding crash tests", err.Error())
	}
	return r.goTest(ctx, "crash", pkgs, append(r.repeat(5), "-run", crashTests)...)
}

// chaos says whether the faults that a package's tests inject are the harness's
// or the simulation's.
func chaos(pkg string) bool { return under(pkg, "jepsen") || under(pkg, "internal/sim") }

func runChaos(ctx context.Context, r *runner) tally {
	sim, err := r.packages(ctx, func(p string) bool { return under(p, "internal/sim") })
	if err != nil {
		return failure("chaos", "go list", err.Error())
	}
	t := r.goTest(ctx, "chaos", sim, "-count=1")
	pkgs, err := r.packages(ctx, chaos)
	if err != nil {
		return failure("chaos", "go list", err.Error())
	}
	if pkgs, err = r.withTests(ctx, pkgs, "TestCrash", "TestKill"); err != nil {
		return failure("chaos", "finding chaos tests", err.Error())
	}
	// One package at a time: each has a cluster of its own, and a starved one
	// shows what no user would see.
	t.add(r.goTest(ctx, "chaos", pkgs, "-count=1", "-p", "1", "-run", crashTests))
	return t
}

func runDemo(ctx context.Context, r *runner) tally {
	script := filepath.Join("scripts", "demo.sh")
	if _, err := os.Stat(script); err != nil {
		r.say("demo: there is no %s yet", script)
		return tally{}
	}
	return r.check(ctx, "demo", script, "./"+script)
}

// runFuzz runs the fuzz targets one after the other: go test -fuzz takes only
// one target of one package at a time.
func runFuzz(ctx context.Context, r *runner) tally {
	pkgs, err := r.packages(ctx, func(string) bool { return true })
	if err != nil {
		return failure("fuzz", "go list", err.Error())
	}
	var t tally
	for _, pkg := range pkgs {
		names, err := r.testNames(ctx, pkg, "Fuzz")
		if err != nil {
			t.add(failure("fuzz", pkg, err.Error()))
			continue
		}
		for _, name := range names {
			t.add(r.check(ctx, "fuzz", pkg+"."+name,
				"go", "test", pkg, "-run", "^$", "-fuzz", "^"+name+"$", "-fuzztime", r.opts.fuzzTime))
		}
	}
	return t
}

// under says whether a package path below the module is dir or below it.
func under(pkg, dir string) bool {
	return pkg == dir || strings.HasPrefix(pkg, dir+"/")
}

func underAny(pkg string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return under(pkg, d) })
}

func failure(stage, what, detail string) tally {
	return tally{Failed: []outcome{{Stage: stage, Package: what, Detail: detail}}}
}

// repeat gives the arguments that run tests n times in a long run. Fresh runs:
// these stages draw new seeds each time, so a cached result is no result.
func (r *runner) repeat(n int) []string {
	if !r.opts.long {
		n = 1
	}
	return []string{fmt.Sprintf("-count=%d", n)}
}

// packages lists the module's packages whose path below the module is wanted.
func (r *runner) packages(ctx context.Context, want func(string) bool) ([]string, error) {
	out, err := r.goList(ctx, "-f", "{{.ImportPath}} {{if .Module}}{{.Module.Path}}{{end}}", "./...")
	if err != nil {
		return nil, err
	}
	var pkgs []string
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		path, module, _ := strings.Cut(line, " ")
		if rel := strings.TrimPrefix(strings.TrimPrefix(path, module), "/"); path != "" && want(rel) {
			pkgs = append(pkgs, path)
		}
	}
	return pkgs, nil
}

func (r *runner) goList(ctx context.Context, args ...string) (string, error) {
	// -e: a broken package must not hide the others; go test will report it.
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-e"}, args...)...)
	cmd.Dir = r.dir
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		return "", fmt.Errorf("go list: %w\n%s", err, exit.Stderr)
	}
	return string(out), err
}

// withTests keeps the packages that have a test with one of the prefixes, so
// that the others need not be built.
func (r *runner) withTests(ctx context.Context, pkgs []string, prefixes ...string) ([]string, error) {
	var kept []string
	for _, pkg := range pkgs {
		names, err := r.testNames(ctx, pkg, prefixes...)
		if err != nil {
			return nil, err
		}
		if len(names) > 0 {
			kept = append(kept, pkg)
		}
	}
	return kept, nil
}

// testNames lists the top-level functions of a package's test files whose name
// starts with one of the prefixes.
func (r *runner) testNames(ctx context.Context, pkg string, prefixes ...string) ([]string, error) {
	out, err := r.goList(ctx, "-f", `{{$d := .Dir}}{{range .TestGoFiles}}{{$d}}/{{.}}
{{end}}{{range .XTestGoFiles}}{{$d}}/{{.}}
{{end}}`, pkg)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, file := range strings.Fields(out) {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range parsed.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv != nil {
				continue
			}
			for _, p := range prefixes {
				if strings.HasPrefix(f.Name.Name, p) {
					names = append(names, f.Name.Name)
				}
			}
		}
	}
	sort.Strings(names)
	return names, nil
}
