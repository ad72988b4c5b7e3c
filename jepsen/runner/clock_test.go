//go:build linux

package runner

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
)

// notedClock notes what was set.
type notedClock struct{ set []time.Duration }

func (c *notedClock) Set(_ context.Context, _ *host.Node, offset time.Duration, _ int64) error {
	c.set = append(c.set, offset)
	return nil
}

// A node that is down has no clock to set, which is no mistake of the harness; a
// wrong clock stays in memory until it was set right.
func TestClock(t *testing.T) {
	inner := &notedClock{}
	c := newClock(inner)
	n := &host.Node{ID: "n1"}
	if err := c.Set(t.Context(), n, time.Hour, 0); !errors.Is(err, nemesis.ErrNotNow) {
		t.Errorf("a node that is down: %v", err)
	}
	must(t, c.Set(t.Context(), n, 0, 0))
	if len(inner.set) != 0 {
		t.Errorf("it was asked: %v", inner.set)
	}
	c.mark(n, 77)
	if !c.isWrong(n, 77) || c.isWrong(n, 78) || c.isWrong(n, 0) {
		t.Error("another process of a node has the true time, and the same has not")
	}
	must(t, c.settle(t.Context(), []*host.Node{n})) // it is down: nothing to do
}
