package main

import (
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// --wait bounds the commands that wait; a --timeout that was given, by flag or
// environment, counts as given.
func TestWaitBoundsTheCommand(t *testing.T) {
	for _, tc := range []struct {
		args []string
		env  string // KEELSTATE_TIMEOUT
		init time.Duration
	}{
		{nil, "", time.Minute},
		{[]string{"--wait=2s"}, "", 2 * time.Second},
		{[]string{"--wait=2m"}, "", 2 * time.Minute},
		{[]string{"--wait=0"}, "", defaultTimeout},
		{[]string{"--timeout=5s"}, "", 5 * time.Second},
		{nil, "5s", 5 * time.Second},
		{[]string{"--wait=2s"}, "5s", 2 * time.Second},
		{[]string{"--wait=2m"}, "5s", 5 * time.Second},
		{[]string{"--wait=2m", "--timeout=5s"}, "", 5 * time.Second},
		{[]string{"--wait=2s", "--timeout=5s"}, "", 2 * time.Second},
		{[]string{"--wait=2s", "--timeout=0"}, "", 2 * time.Second},
	} {
		a := &app{environment: environment{getenv: func(name string) (string, bool) {
			return tc.env, name == "KEELSTATE_TIMEOUT" && tc.env != ""
		}}}
		root := a.command()
		leaf, _, err := root.Find([]string{"cluster", "init"})
		if err != nil {
			t.Fatal(err)
		}
		var wait time.Duration
		leaf.RunE = func(cmd *cobra.Command, _ []string) error {
			wait, err = cmd.Flags().GetDuration("wait")
			a.boundBy(cmd, wait)
			return err
		}
		root.SetArgs(append([]string{"cluster", "init"}, tc.args...))
		if err := root.Execute(); err != nil || a.timeout != tc.init {
			t.Errorf("KEELSTATE_TIMEOUT=%s %q: bounded by %v, want %v (%v)", tc.env, tc.args, a.timeout, tc.init, err)
		}
	}
}

// The whole way: with nobody to answer, init and status end after --wait.
func TestWaitShorterThanTheTimeoutIsHonoured(t *testing.T) {
	for _, line := range [][]string{{"cluster", "init", "--nodes", "n1=n1:1", "--wait", "50ms", "--timeout", "2m"}, {"cluster", "status", "--wait", "50ms", "--timeout", "2m"}} {
		began := time.Now()
		code, _, stderr := keelctl("127.0.0.1:1", line...)
		if took := time.Since(began); code == exitDone || took > 30*time.Second {
			t.Errorf("%q: exit %d after %v: %s", line, code, took, stderr)
		}
	}
}
