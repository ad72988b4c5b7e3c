package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"

	"github.com/keelstate/keelstate/jepsen/runner"
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

// TestFindStore: a service that was named has to be there; one that was not is looked
// for, and that there is none is no mistake.
func TestFindStore(t *testing.T) {
	there := filepath.Join(t.TempDir(), "gateway")
	if err := os.WriteFile(there, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(there, filepath.Join(filepath.Dir(there), "versitygw")); err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for _, c := range []struct {
		name, path, given, want string
		without, usage          bool
	}{
		{name: "not wanted", path: filepath.Dir(there), without: true},
		{name: "named", given: there, want: there},
		{name: "named and missing", given: there + "x", usage: true},
		{name: "in the path", path: filepath.Dir(there), want: filepath.Join(filepath.Dir(there), "versitygw")},
		{name: "nowhere", path: t.TempDir()},
	} {
		t.Setenv("PATH", c.path)
		o := runner.Options{Checkpoints: !c.without, StoreBinary: c.given}
		err := findStore(&o)
		var mistake *usageError
		if errors.As(err, &mistake) != c.usage || err != nil && !c.usage || !c.usage && o.StoreBinary != c.want {
			t.Errorf("%s: %q, %v", c.name, o.StoreBinary, err)
		}
	}
}
