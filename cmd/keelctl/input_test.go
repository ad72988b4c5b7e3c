package main

import (
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

// A script whose variable is unset must not found an empty cluster.
func TestEmptyRestoreIsRefused(t *testing.T) {
	code, _, stderr := keelctl("127.0.0.1:1", "cluster", "init", "--nodes", "n1=n1:1", "--restore", "", "--wait", "50ms")
	if code != exitUsage || !strings.Contains(stderr, "--restore") {
		t.Fatalf("exit %d: %s", code, stderr)
	}
}
