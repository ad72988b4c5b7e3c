package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/examples/flights/job"
)

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

func noEnv(string) string { return "" }

func TestParseNamesBadFlags(t *testing.T) {
	for _, tc := range []struct{ args, want string }{
		{"", "--input"},
		{"--input x --report - --days -", "--days"},
		{"--input x extra", `"extra"`},
		{"--input x --rate -1", "--rate"},
		{"--input x --batch 5000", "--batch"},
		{"--input x --window 1", "--window"},
		{"--input x --keyspace=", "--keyspace"},
		{"--input x --endpoints a:1,,b:2", "--endpoints"},
		{"--input x --rate fast", "rate"},
		{"--nonsense", "nonsense"},
		{"--input x --recovery never", "--recovery"},
		{"--input x --participant p", "--participant"},
		{"--input - --recovery rollback", "--input"},
		{"--input x --recovery rollback --checkpoint-every -1s", "--checkpoint-every"},
	} {
		_, err := parse(strings.Fields(tc.args), noEnv, io.Discard)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %v, want %s", tc.args, err, tc.want)
		}
	}
	if _, err := parse([]string{"--help"}, noEnv, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Error(err)
	}
}

func TestParseTakesEndpointsFromFlagThenEnvironment(t *testing.T) {
	env := func(string) string { return "a:1,b:2" }
	for _, tc := range []struct {
		args   string
		getenv func(string) string
		want   string
	}{
		{"--input x", noEnv, "[127.0.0.1:7401]"},
		{"--input x", env, "[a:1 b:2]"},
		{"--input x --endpoints c:3", env, "[c:3]"},
	} {
		o, err := parse(strings.Fields(tc.args), tc.getenv, io.Discard)
		if err != nil || fmt.Sprint(o.endpoints) != tc.want {
			t.Errorf("%s: %v, %v", tc.args, o, err)
		}
	}
}

// runWith runs the command and returns what it said.
func runWith(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out bytes.Buffer
	code = run(t.Context(), args, noEnv, &out, f)
	text, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return code, out.String(), string(text)
}

// A broken line is found before anything is sent: here nobody listens.
func TestBrokenInputIsRefusedBeforeTheClusterIsAsked(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return p
	}
	header := "date,delay,distance,origin,destination\n"
	for _, tc := range []struct {
		input, want string
	}{
		{file("bad.csv", header+"2001/01/01 00:47,66,1750,DTW,LAS\n2001/01/01 00:47,x,1750,DTW,LAS\n"),
			`line 3: delay "x" is not a whole number`},
		{file("first.csv", header+"2001/01/01 00:47,x,1750,DTW,LAS\n"), `"2001/01/01 00:47,x,1750,DTW,LAS"`},
		{file("head.csv", "a,b\n1,2\n"), `lacks the column "date"`},
		{filepath.Join(dir, "none.csv"), "--input: open"},
	} {
		code, stdout, stderr := runWith(t, "--input", tc.input, "--endpoints", "127.0.0.1:1")
		if code != exitFailed || stdout != "" || !strings.Contains(stderr, tc.want) {
			t.Errorf("%s: exit %d, %q", tc.input, code, stderr)
		}
	}
}

func TestUnreachableClusterIsNamed(t *testing.T) {
	code, _, stderr := runWith(t, "--report", "-", "--endpoints", "127.0.0.1:1", "--connect-timeout", "300ms")
	if code != exitUnavailable || !strings.Contains(stderr, "127.0.0.1:1") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

func TestUsageErrorsExitWithTwo(t *testing.T) {
	if code, _, stderr := runWith(t); code != exitUsage || !strings.Contains(stderr, "--input") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if code, _, stderr := runWith(t, "--help"); code != 0 || !strings.Contains(stderr, "Examples:") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

func TestFailureSortsErrorsOfTheClient(t *testing.T) {
	plain := errors.New("plain")
	if err := failure(plain); err != plain {
		t.Error(err)
	}
	if failure(nil) != nil {
		t.Error("nil is a failure")
	}
	for _, tc := range []struct {
		e    keel.Error
		kind job.Kind // 0: ends the run
	}{
		{keel.Error{Outcome: keel.OutcomeUnknown}, job.Unknown},
		{keel.Error{Outcome: keel.OutcomeNotApplied, Retryable: true}, job.Transient},
		{keel.Error{Outcome: keel.OutcomeNotApplied}, 0},
		{keel.Error{Outcome: keel.OutcomeApplied}, 0},
	} {
		var f *job.Failure
		err := failure(&tc.e)
		if errors.As(err, &f) != (tc.kind != 0) || f != nil && f.Kind != tc.kind {
			t.Errorf("%+v: %v, want kind %d", tc.e, err, tc.kind)
		}
	}
}

func TestRollingFailureSortsErrorsOfTheClient(t *testing.T) {
	for _, tc := range []struct {
		err  error
		kind job.Kind // 0: ends the run
	}{
		{nil, 0},
		{errors.New("plain"), 0},
		{keel.NewError(keel.ErrIncarnation, keel.OutcomeUnknown, "", ""), job.Lost},
		{keel.NewError(keel.ErrSessionEnded, keel.OutcomeNotApplied, "", ""), job.Lost},
		{keel.NewError(keel.ErrPrecondition, keel.OutcomeNotApplied, "", ""), job.Conflict},
		{keel.NewError(keel.ErrConflict, keel.OutcomeNotApplied, "", ""), job.NotTaken},
		{keel.NewError(keel.ErrCheckpoint, keel.OutcomeNotApplied, "", ""), job.NotTaken},
		{keel.NewError(keel.ErrDeadline, keel.OutcomeUnknown, "", ""), job.Unknown},
		{keel.NewError(keel.ErrDeadline, keel.OutcomeNotApplied, "", ""), job.Transient},
		{keel.NewError(keel.ErrUnavailable, keel.OutcomeNotApplied, "", ""), job.Transient},
		{keel.NewError(keel.ErrUndeclared, keel.OutcomeNotApplied, "", ""), 0},
	} {
		var f *job.Failure
		err := rollingFailure(tc.err)
		if errors.As(err, &f) != (tc.kind != 0) || f != nil && f.Kind != tc.kind || (err == nil) != (tc.err == nil) {
			t.Errorf("%v: %v, want kind %d", tc.err, err, tc.kind)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for _, tc := range []struct {
		err  error
		code int
	}{
		{&job.Fenced{}, exitRefused},
		{fmt.Errorf("x: %w", &job.OtherInput{}), exitRefused},
		{fmt.Errorf("giving up: %w", &job.Failure{Kind: job.Transient, Cause: errors.New("x")}), exitUnavailable},
		{&job.BadLine{}, exitFailed},
		{keel.ErrConflict, exitRefused},
		{&job.Replaced{}, exitRefused},
		{fmt.Errorf("x: %w", &job.NoPosition{}), exitRefused},
	} {
		if got := exitCode(tc.err); got != tc.code {
			t.Errorf("%v: exit %d, want %d", tc.err, got, tc.code)
		}
	}
}

func TestWriteFileLeavesNothingBehindAFailure(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "report.csv")
	if err := writeFile(name, nil, func(w io.Writer) error {
		_, err := io.WriteString(w, "whole\n")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	err := writeFile(name, nil, func(w io.Writer) error {
		io.WriteString(w, "half")
		return broken
	})
	if err != broken {
		t.Error(err)
	}
	text, err := os.ReadFile(name)
	if string(text) != "whole\n" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("%d files are left", len(left))
	}
}

func TestProgressLine(t *testing.T) {
	var c job.Counters
	c.Acked.Store(25)
	c.Skipped.Store(25)
	p := &progress{count: &c, rows: 100}
	if got := p.line(25, 10); got != "50 of 100 rows acknowledged (50 %), 10/s" {
		t.Error(got)
	}
	p.tty = true
	if got := p.line(25, 10); !strings.HasPrefix(got, "["+strings.Repeat("#", 15)+strings.Repeat(".", 15)+"] ") {
		t.Error(got)
	}
	p.rows = 0
	if got := p.line(25, 10); got != "50 rows acknowledged, 10/s" {
		t.Error(got)
	}
}
