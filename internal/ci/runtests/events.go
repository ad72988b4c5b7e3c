package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"sort"
	"strings"
)

// event is one line of `go test -json`.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output and build-fail
	Test        string
	Output      string
	FailedBuild string
}

// outcome is a listed test: a failed or a skipped one.
type outcome struct {
	Stage, Package, Test string
	Detail               string // output of a failure, reason of a skip
}

func (o outcome) name() string {
	if o.Test == "" {
		return o.Package
	}
	return o.Package + "." + o.Test
}

// cause is the line of the details that says most, cut to a readable length: a
// panic, else the first complaint of a test, else the first line.
func (o outcome) cause() string {
	lines := strings.Split(o.Detail, "\n")
	best, rank := "", 0
	for i, l := range lines {
		l = strings.TrimSpace(l)
		switch {
		case strings.HasPrefix(l, "panic:") && rank < 3:
			best, rank = l, 3
			// "panic: test timed out" names the running tests below it.
			if i+2 < len(lines) && strings.Contains(l, "timed out") {
				best += "; " + strings.TrimSpace(lines[i+1]) + " " + strings.TrimSpace(lines[i+2])
			}
		case strings.Contains(l, "_test.go:") && rank < 2:
			best, rank = l, 2
		case l != "" && rank < 1:
			best, rank = l, 1
		}
	}
	const longest = 300
	if len(best) > longest {
		best = best[:longest] + "..."
	}
	return best
}

// tally is the result of one or more stages.
type tally struct {
	Passed          int
	Failed, Skipped []outcome
}

func (t *tally) add(u tally) {
	t.Passed += u.Passed
	t.Failed = append(t.Failed, u.Failed...)
	t.Skipped = append(t.Skipped, u.Skipped...)
}

// maxOutput bounds the output kept per test, in bytes; the middle is dropped.
const maxOutput = 64 << 10

// testState follows one test of one package, or a package itself (name "").
type testState struct {
	output   bytes.Buffer
	result   string // "", pass, fail or skip
	hasChild bool
	failed   bool // itself or a subtest
	subFails bool // a subtest failed
}

func (s *testState) write(text string) {
	if s.output.Len() < maxOutput {
		s.output.WriteString(text)
	} else if s.output.Len() < maxOutput+len(text) {
		s.output.WriteString("... (cut)\n")
	}
}

// collector turns events into a tally. Not safe for concurrent use.
type collector struct {
	stage    string
	packages map[string]map[string]*testState
	builds   map[string]*strings.Builder // build output by import path
	total    tally
	// packagesDone counts finished packages, for the progress line.
	packagesDone int
}

func newCollector(stage string) *collector {
	return &collector{
		stage:    stage,
		packages: make(map[string]map[string]*testState),
		builds:   make(map[string]*strings.Builder),
	}
}

// read consumes events until the stream ends. Lines that are no events are
// returned, for they are what go itself had to say.
func (c *collector) read(r io.Reader) (other string, err error) {
	var rest strings.Builder
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				c.handle(e)
			} else {
				rest.Write(line)
			}
		}
		if err == io.EOF {
			return rest.String(), nil
		}
		if err != nil {
			return rest.String(), fmt.Errorf("reading test events: %w", err)
		}
	}
}

func (c *collector) state(pkg, test string) *testState {
	tests := c.packages[pkg]
	if tests == nil {
		tests = make(map[string]*testState)
		c.packages[pkg] = tests
	}
	s := tests[test]
	if s == nil {
		s = &testState{}
		tests[test] = s
	}
	return s
}

func (c *collector) handle(e event) {
	switch e.Action {
	case "build-output":
		b := c.builds[e.ImportPath]
		if b == nil {
			b = &strings.Builder{}
			c.builds[e.ImportPath] = b
		}
		b.WriteString(e.Output)
	case "run":
		c.state(e.Package, e.Test)
		for p := parent(e.Test); p != ""; p = parent(p) {
			c.state(e.Package, p).hasChild = true
		}
	case "output":
		c.state(e.Package, e.Test).write(e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			c.finishPackage(e)
			return
		}
		c.state(e.Package, e.Test).result = e.Action
	}
}

func parent(test string) string {
	i := strings.LastIndexByte(test, '/')
	if i < 0 {
		return ""
	}
	return test[:i]
}

// finishPackage counts the tests of a package that has ended, and forgets them.
func (c *collector) finishPackage(e event) {
	tests := c.packages[e.Package]
	delete(c.packages, e.Package)
	c.packagesDone++
	names := make([]string, 0, len(tests))
	for name, s := range tests {
		if name == "" {
			continue
		}
		names = append(names, name)
		if s.result == "" && e.Action == "fail" {
			s.result = "fail"
			s.write("(was still running when its package ended)\n")
		}
		if s.result == "fail" {
			for p := parent(name); p != ""; p = parent(p) {
				if ps := tests[p]; ps != nil {
					ps.subFails = true
				}
			}
		}
	}
	sort.Strings(names)
	failedBefore := len(c.total.Failed)
	for _, name := range names {
		c.count(e.Package, name, tests[name])
	}
	if e.Action == "fail" && len(c.total.Failed) == failedBefore {
		c.total.Failed = append(c.total.Failed, outcome{c.stage, e.Package, "", c.packageFailure(e, tests[""])})
	}
}

func (c *collector) count(pkg, name string, s *testState) {
	o := outcome{Stage: c.stage, Package: pkg, Test: name, Detail: s.output.String()}
	switch {
	case s.result == "fail" && !s.subFails:
		c.total.Failed = append(c.total.Failed, o)
	case s.hasChild:
		// Its subtests are counted instead.
	case s.result == "pass":
		c.total.Passed++
	case s.result == "skip":
		o.Detail = skipReason(o.Detail)
		c.total.Skipped = append(c.total.Skipped, o)
	}
}

func (c *collector) packageFailure(e event, s *testState) string {
	var out strings.Builder
	if b := c.builds[e.FailedBuild]; e.FailedBuild != "" && b != nil {
		out.WriteString(b.String())
	}
	if s != nil {
		out.WriteString(s.output.String())
	}
	return out.String()
}

// unfinished counts packages that started but never ended: go test was killed.
func (c *collector) unfinished(why string) {
	pkgs := make([]string, 0, len(c.packages))
	for pkg := range c.packages {
		pkgs = append(pkgs, pkg)
	}
	sort.Strings(pkgs)
	for _, pkg := range pkgs {
		c.state(pkg, "").write("(" + why + ")\n")
		c.finishPackage(event{Action: "fail", Package: pkg})
	}
}

// skipReason takes what the test logged from the output of a skipped test.
func skipReason(output string) string {
	var lines []string
	for _, line := range strings.Split(output, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		lines = append(lines, line)
	}
	if len(lines) == 0 {
		return "(no reason given)"
	}
	return strings.Join(lines, " ")
}
