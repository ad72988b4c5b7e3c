package main

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// halfFounded is a cluster whose founding waits for the node n3, which is down.
func halfFounded(t *testing.T) *cluster.Cluster {
	t.Helper()
	c := cluster.New(t, cluster.Options{Unfounded: true})
	c.Stop(2)
	c.Nodes().Eventually("the founding is recorded", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, err := c.Nodes().Node(0).Init(ctx, c.Nodes().Spec())
		return err
	})
	return c
}

// A cluster that is being founded is not ready: no usage error, and the error
// says how far the founding is and what it waits for.
func TestWhileFoundingTheClusterIsNotReady(t *testing.T) {
	on := halfFounded(t).Endpoints()[0]
	if code, _, stderr := keelctl(on, "state", "declare", "k", "v", "--kind", "value"); code != exitDone {
		t.Fatalf("state declare: exit %d, %s", code, stderr)
	}
	for _, line := range []string{"value set k v x --key y", "value get k v --key y", "scan k v"} {
		f := failing(t, on, io.Discard, append(strings.Fields(line), "--timeout", "2s", "-o", "json")...)
		if f.ExitCode != exitUnavailable || f.Code != "not_ready" || f.Outcome != "not applied" || !f.Retryable ||
			!strings.Contains(f.Hint, "being founded") || !strings.Contains(f.Hint, "phase admit") || !strings.Contains(f.Hint, "n3") {
			t.Errorf("%s: %+v", line, f)
		}
	}
}
