package main

import (
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
