package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	keel "github.com/keelstate/keelstate/client"
)

// What a failed checkpoint or rollback ends with is what the help says, not the
// code for a cluster that cannot be reached.
func TestFailedCheckpointExitsAsTheHelpSays(t *testing.T) {
	if code := exitCode(keel.NewError(keel.ErrCheckpoint, keel.OutcomeNotApplied, "checkpoint 3", "not done after 10m0s")); code != exitFailed {
		t.Fatalf("exit %d, want %d", code, exitFailed)
	}
}

// The null device is a character device and no terminal: nobody answers there.
func TestNobodyIsAskedOnTheNullDevice(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	var stderr bytes.Buffer
	a := &app{environment: environment{stdin: null, stderr: &stderr}}
	if err := a.confirm(false, "deleting checkpoint 1", "1"); err == nil || !strings.Contains(err.Error(), "needs --yes") || stderr.Len() > 0 {
		t.Fatalf("%v, and on stderr %q", err, &stderr)
	}
}

// A script whose variable is unset must not found an empty cluster.
func TestEmptyRestoreIsRefused(t *testing.T) {
	code, _, stderr := keelctl("127.0.0.1:1", "cluster", "init", "--nodes", "n1=n1:1", "--restore", "", "--wait", "50ms")
	if code != exitUsage || !strings.Contains(stderr, "--restore") {
		t.Fatalf("exit %d: %s", code, stderr)
	}
}

func TestNegativeDurationsAreRefused(t *testing.T) {
	for _, line := range []string{"cluster init --nodes n1=n1:1 --wait -1s", "cluster status --wait -1s", "checkpoint create --wait -1s",
		"checkpoint rollback 1 --yes --wait -1s", "checkpoint rollback 1 --yes --give-up-after -1s", "operation watch 1 --wait -1s", "node list --timeout -1s"} {
		args := strings.Fields(line)
		code, _, stderr := keelctl("127.0.0.1:1", args...)
		if code != exitUsage || !strings.Contains(stderr, args[len(args)-2]+": must not be negative") {
			t.Errorf("keelctl %s: exit %d: %s", line, code, stderr)
		}
	}
}
