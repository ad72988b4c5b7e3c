package main

import (
	"testing"

	"github.com/spf13/cobra"
)

// The command that repeats a run has its seed and what changes it, quoted, and
// nothing of where the report goes.
func TestRepeatCommand(t *testing.T) {
	a := &app{}
	c := a.runCommand()
	got := ""
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		got = repeatCommand(cmd, 77)
		return nil
	}
	c.SetArgs([]string{"--out", "x", "--duration", "3m", "--faults", "kill,pause", "--faults", "cpu", "--node-flag=--log-level=it's", "--node-flag=--b"})
	must(t, c.Execute())
	const want = `keelstate-jepsen run --seed 77 --duration=3m0s --faults=kill,pause,cpu --node-flag='--log-level=it'\''s' --node-flag=--b`
	if got != want {
		t.Errorf("%s", got)
	}
}
