package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// fullDisk is a stdout like /dev/full.
type fullDisk struct{}

var errFull = errors.New("no space left on device")

func (fullDisk) Write([]byte) (int, error) { return 0, errFull }

// failing runs a line that must fail and returns its error object.
func failing(t *testing.T, endpoint string, stdout io.Writer, args ...string) failure {
	t.Helper()
	var errs bytes.Buffer
	env := environment{stdin: strings.NewReader(""), stdout: stdout, stderr: &errs, getenv: func(name string) (string, bool) {
		return endpoint, name == "KEELSTATE_ENDPOINTS"
	}}
	code := run(context.Background(), args, env)
	var f failure
	if slices.Contains(args, "json") {
		if err := json.Unmarshal(errs.Bytes(), &f); err != nil || f.ExitCode != code {
			t.Fatalf("%q: exit %d, %v in %q", args, code, err, errs.String())
		}
	}
	f.ExitCode = code
	return f
}

// KX5: an unknown column is refused before the write, and what could not be
// printed after the write is applied.
func TestAWriteThatWasAppliedIsNeverReportedAsNotApplied(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	on := c.Endpoints()[0]
	if code, _, stderr := keelctl(on, "state", "declare", "k", "v", "--kind", "value", "--value-type", "int64"); code != exitDone {
		t.Fatal(stderr)
	}
	set := func(v string, more ...string) []string {
		return append([]string{"value", "set", "k", "v", v, "--key", "x"}, more...)
	}
	holds := func() string {
		_, stdout, _ := keelctl(on, "value", "get", "k", "v", "--key", "x", "--columns", "value")
		return strings.TrimSpace(strings.TrimPrefix(stdout, "VALUE"))
	}
	if f := failing(t, on, io.Discard, set("1", "--columns", "nonsense", "-o", "json")...); f.ExitCode != exitUsage || holds() != "" {
		t.Errorf("an unknown column: %+v, and the state holds %q", f, holds())
	}
	for i, format := range []string{"json", "table"} {
		want := []string{"2", "3"}[i]
		f := failing(t, on, fullDisk{}, set(want, "-o", format)...)
		if f.ExitCode != exitUnknown || holds() != want {
			t.Errorf("-o %s: exit %d, and the state holds %q", format, f.ExitCode, holds())
		}
		if format == "json" && (f.Outcome != "applied" || f.Code != "unprinted") {
			t.Errorf("%+v", f)
		}
	}
	if code, _, stderr := keelctl(on, set("4", "--columns", "Token")...); code != exitDone || holds() != "4" {
		t.Errorf("a known column: exit %d, %s", code, stderr)
	}
}

// Every read fails, in every format, where its output cannot be written.
func TestOutputThatCannotBeWrittenFails(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	for _, line := range [][]string{{"version"}, {"config", "explain"}, {"cluster", "status"}, {"node", "list"}, {"shard", "list"}} {
		for _, format := range []string{"table", "wide", "json", "yaml", "jsonl"} {
			f := failing(t, c.Endpoints()[0], fullDisk{}, append(slices.Clone(line), "-o", format)...)
			if f.ExitCode != exitFailed {
				t.Errorf("%q -o %s: exit %d", line, format, f.ExitCode)
			}
		}
	}
}

// Which condition a compare-and-set has depends on the flag that was given, not
// on its value: version 0 is not the empty string.
func TestCompareAndSetTakesTheConditionThatWasGiven(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1})
	on := c.Endpoints()[0]
	for _, line := range [][]string{
		{"state", "declare", "k", "v", "--kind", "value"}, {"value", "set", "k", "v", "", "--key", "x"},
	} {
		if code, _, stderr := keelctl(on, line...); code != exitDone {
			t.Fatal(stderr)
		}
	}
	for _, tc := range []struct {
		code int
		flag string
	}{
		{exitUsage, "--if-version=0"}, {exitUsage, "--if-absent=false"}, {exitRefused, "--if-version=999999999"},
		{exitRefused, "--if-equal=other"}, {exitRefused, "--if-absent"}, {exitDone, "--if-equal="},
	} {
		if code, _, stderr := keelctl(on, "value", "cas", "k", "v", "new", "--key", "x", tc.flag); code != tc.code {
			t.Errorf("%s: exit %d, want %d: %s", tc.flag, code, tc.code, stderr)
		}
	}
}

// KX5: whatever the condition, the codes that stand for "not applied" need that
// outcome.
func TestExitCodeOfAnUnknownOutcome(t *testing.T) {
	for condition, code := range map[error]int{
		keel.ErrNotFound: exitNotFound, keel.ErrUndeclared: exitNotFound, keel.ErrPrecondition: exitRefused, keel.ErrConflict: exitRefused,
		keel.ErrAlreadyFounded: exitRefused, keel.ErrInvalid: exitUsage, keel.ErrUnsupported: exitUsage, keel.ErrDeadline: exitUnavailable,
		keel.ErrOutOfRange: exitFailed,
	} {
		for outcome, want := range map[keel.Outcome]int{
			keel.OutcomeNotApplied: code, keel.OutcomeUnknown: exitUnknown, keel.OutcomeApplied: exitUnknown,
		} {
			if got := exitCode(keel.NewError(condition, outcome, "", "")); got != want {
				t.Errorf("%v, outcome %v: exit %d, want %d", condition, outcome, got, want)
			}
		}
	}
}

// KX2: a usage error obeys the output that was asked for, by flag or by the
// environment, wherever on the line the mistake is.
func TestUsageErrorsObeyTheFormat(t *testing.T) {
	for _, tc := range []struct {
		line string
		env  string // KEELSTATE_OUTPUT
		json bool
	}{
		{"state list --bad -o json", "", true}, {"state list --bad -ojson", "", true}, {"state list --bad -o=json", "", true},
		{"state list --bad --output json", "", true}, {"state list --bad --output=jsonl", "", true}, {"-o json nonsense", "", true},
		{"state list --bad", "json", true}, {"nonsense", "json", true}, {"value get k", "json", true}, {"state nonsense", "json", true},
		{"state list --timeout soon", "json", true}, {"value get k v", "json", true}, {"state list --timeout -1s", "json", true},
		{"state list --bad -o table", "json", false}, {"state list --bad -o json -o wide", "", false}, {"state list --bad -- -o json", "", false},
		{"state list --bad", "", false}, {"state list --bad", "xml", false}, {"state list -o xml", "", false}, {"state list --bad -o", "", false},
	} {
		var errs bytes.Buffer
		env := environment{stdin: strings.NewReader(""), stdout: io.Discard, stderr: &errs, getenv: func(name string) (string, bool) {
			return tc.env, name == "KEELSTATE_OUTPUT" && tc.env != ""
		}}
		code := run(context.Background(), strings.Fields(tc.line), env)
		var f failure
		err := json.Unmarshal(errs.Bytes(), &f)
		if code != exitUsage || (err == nil) != tc.json || tc.json && (f.Kind != "Error" || f.Code != "usage") {
			t.Errorf("KEELSTATE_OUTPUT=%s keelctl %s: exit %d, %q", tc.env, tc.line, code, errs.String())
		}
	}
	// A bad timeout in the environment hides no format.
	var errs bytes.Buffer
	run(context.Background(), []string{"version"}, environment{stdin: strings.NewReader(""), stdout: io.Discard, stderr: &errs,
		getenv: func(name string) (string, bool) {
			v, ok := map[string]string{"KEELSTATE_TIMEOUT": "soon", "KEELSTATE_OUTPUT": "json"}[name]
			return v, ok
		}})
	if !json.Valid(errs.Bytes()) {
		t.Errorf("%q", errs.String())
	}
}
