package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
)

// A checkpoint that may hold what a job has written, and has no position of it, is
// gone back to only by force; a dry run says whom that is about.
func TestRollbackThatLeavesAJobWithoutItsPosition(t *testing.T) {
	c := cluster.New(t, cluster.Options{Nodes: 1, Shards: 1})
	on := c.Endpoints()[0]
	ctl := func(want int, args ...string) (stdout, stderr string) {
		t.Helper()
		code, stdout, stderr := keelctl(on, args...)
		if code != want {
			t.Fatalf("%q: exit %d, %s", args, code, stderr)
		}
		return stdout, stderr
	}
	k, err := keel.Open(t.Context(), c.Endpoints())
	if err != nil {
		t.Fatal(err)
	}
	p, err := k.Participate(t.Context(), "job")
	if err != nil {
		t.Fatal(err)
	}
	given := make(chan error, 1)
	go func() {
		number, err := p.Next(t.Context())
		if err == nil {
			err = p.Ack(t.Context(), number, []byte("place"))
		}
		given <- err
	}()
	ctl(exitDone, "checkpoint", "create")
	if err := <-given; err != nil {
		t.Fatal(err)
	}
	if err := k.Close(context.Background()); err != nil { // it goes, and its name is known
		t.Fatal(err)
	}
	ctl(exitDone, "checkpoint", "create")

	var plan struct {
		Lacked []struct {
			Participant string
			Alive       bool
			Newest      int
		}
	}
	text, prose := ctl(exitDone, "checkpoint", "rollback", "2", "--dry-run", "-o", "json")
	if err := json.Unmarshal([]byte(text), &plan); err != nil || len(plan.Lacked) != 1 || plan.Lacked[0].Participant != "job" || plan.Lacked[0].Alive || plan.Lacked[0].Newest != 1 ||
		!strings.Contains(prose, "--force") {
		t.Errorf("%v, %s, %s", err, text, prose)
	}
	_, prose = ctl(exitRefused, "checkpoint", "rollback", "2", "--yes")
	if !strings.Contains(prose, `participant "job"`) || !strings.Contains(prose, "the newest one that has is 1") {
		t.Errorf("refused with %s", prose)
	}
	client := c.Client()
	var e *keel.Error
	if err := client.RollBack(t.Context(), 2); !errors.Is(err, keel.ErrPrecondition) || !errors.As(err, &e) || e.Field != "participant" {
		t.Errorf("by the client: %v", err)
	}
	text, _ = ctl(exitDone, "checkpoint", "rollback", "1", "--dry-run", "-o", "json")
	if !strings.Contains(text, `"lacked": []`) {
		t.Errorf("with its position: %s", text)
	}
	ctl(exitDone, "checkpoint", "rollback", "2", "--yes", "--force")
	if err := client.RollBack(t.Context(), 2, keel.WithoutPositions()); err != nil {
		t.Errorf("forced by the client: %v", err)
	}
	if err := client.RollBack(t.Context(), 1); err != nil {
		t.Errorf("back to its position: %v", err)
	}
}
