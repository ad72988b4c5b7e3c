package main

import (
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// What cannot be restored is refused with a code and a hint, and the node can be
// founded otherwise afterwards.
func TestInitRefusesACheckpointThatIsNotThere(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1, Unfounded: true})
	on, line := c.Endpoints()[0], []string{"cluster", "init", "--nodes", "n1=n1:7000", "--shards", "1", "--timeout", "20s", "-o", "json"}
	for _, bad := range []struct {
		flags string
		code  int
		says  string
	}{
		{"--restore nobody/latest", exitNotFound, "nobody"},
		{"--restore nobody/7", exitNotFound, "0000000007"},
		{"--restore nobody/7 --dry-run", exitNotFound, "0000000007"},
		{"--restore s3://elsewhere/nobody/7", exitUsage, "object store"},
		{"--restore nobody", exitNotFound, "nobody/_metadata"}, // any folder may hold a savepoint
		{"--restore nobody//7", exitUsage, "names no checkpoint"},
		{"--dry-run", exitUsage, "restore"},
		{"--claim", exitUsage, "name it"},
	} {
		f := failing(t, on, io.Discard, append(append([]string{}, line...), strings.Fields(bad.flags)...)...)
		if f.ExitCode != bad.code || f.Outcome != "not applied" || !strings.Contains(f.Hint, bad.says) {
			t.Errorf("%s: %+v", bad.flags, f)
		}
	}
	code, stdout, stderr := keelctl(on, line...)
	var done struct{ Phase string }
	if err := json.Unmarshal([]byte(stdout), &done); err != nil || code != exitDone || done.Phase != phaseDone {
		t.Errorf("exit %d, %q, %s", code, stdout, stderr)
	}
}
