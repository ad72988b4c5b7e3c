package cluster

import (
	"errors"
	"fmt"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
)

// Two take part; one goes before it has acknowledged. The other one, which waits
// with its writes, is told at once that the checkpoint has failed, and so is who
// asked for it; then the next checkpoint needs the one that is left only.
func TestWhoWaitsIsToldThatACheckpointHasFailed(t *testing.T) {
	c := New(t, Options{Nodes: 1})
	ctx := testContext(t, 60*time.Second)
	stays, goes, asks := c.Client(), c.Client(), c.Client()
	p, err := stays.Participate(ctx, "stays")
	if err != nil {
		t.Fatal(err)
	}
	q, err := goes.Participate(ctx, "goes")
	if err != nil {
		t.Fatal(err)
	}
	taken := make(chan error, 1)
	take := func() {
		_, err := asks.Checkpoint(ctx)
		taken <- err
	}
	go take()
	number, err := p.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	acked := make(chan error, 1)
	go func() { acked <- p.Ack(ctx, number, []byte("here")) }()
	if err := q.Close(ctx); err != nil {
		t.Fatal(err)
	}
	failed := func(what string, got <-chan error) {
		t.Helper()
		select {
		case err := <-got:
			if !errors.Is(err, keel.ErrCheckpoint) {
				t.Errorf("%s ends with: %v", what, err)
			}
		case <-time.After(15 * time.Second):
			t.Fatalf("%s does not end", what)
		}
	}
	failed("the acknowledgement", acked)
	failed("the checkpoint", taken)

	go take()
	next, err := p.Next(ctx)
	if err == nil {
		err = p.Ack(ctx, next, []byte("there"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := <-taken; err != nil {
		t.Error(err)
	}
	if last, _, err := asks.Positions(ctx, "stays"); err != nil || fmt.Sprintf("%d %s", last.Checkpoint, last.Bytes) != fmt.Sprintf("%d there", next) {
		t.Errorf("%+v, %v", last, err)
	}
}
