//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
)

// Limits of setting a clock.
const (
	clockLimit = time.Second
	// startLimit is how long a node that was just started may take to listen.
	startLimit = 20 * time.Second
)

// clock sets clocks of nodes that other faults may have stopped. What cannot be
// set right while a node is paused is set right at the end of the step.
type clock struct {
	inner nemesis.Clock

	mu sync.Mutex
	// wrong is, by node, the process whose clock was changed; another process of
	// the node has the true time.
	wrong map[*host.Node]int
}

var _ nemesis.Clock = (*clock)(nil)

func newClock(inner nemesis.Clock) *clock {
	return &clock{inner: inner, wrong: map[*host.Node]int{}}
}

// Set implements nemesis.Clock.
func (c *clock) Set(ctx context.Context, n *host.Node, offset time.Duration, driftPPM int64) error {
	pid := n.Pid()
	if offset == 0 && driftPPM == 0 {
		if !c.isWrong(n, pid) {
			return nil
		}
		if err := c.inner.Set(ctx, n, 0, 0); err == nil {
			c.mark(n, 0)
		}
		return nil // or settle does it
	}
	if pid == 0 {
		return fmt.Errorf("%s is down: %w", n.ID, nemesis.ErrNotNow)
	}
	c.mark(n, pid) // before: what fails may have come through
	if err := c.inner.Set(ctx, n, offset, driftPPM); err != nil {
		return errors.Join(fmt.Errorf("%s takes no clock: %w", n.ID, nemesis.ErrNotNow), err)
	}
	return nil
}

func (c *clock) isWrong(n *host.Node, pid int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return pid != 0 && c.wrong[n] == pid
}

func (c *clock) mark(n *host.Node, pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrong[n] = pid
}

// settle sets every clock right; it is for the time after faults.
func (c *clock) settle(ctx context.Context, nodes []*host.Node) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	var failed error
	for _, n := range nodes {
		until(ctx, 100*time.Millisecond, func() bool {
			return c.Set(ctx, n, 0, 0) == nil && !c.isWrong(n, n.Pid())
		})
		if c.isWrong(n, n.Pid()) {
			failed = errors.Join(failed, fmt.Errorf("the clock of %s could not be set right", n.ID))
		}
	}
	return failed
}
