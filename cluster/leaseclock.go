package cluster

import (
	"sync"
	"time"
)

// leaseClock gives the stamps of the system group's leader, by which the leases
// of sessions run. It knows no wall clock: it goes on from the newest stamp that
// any leader committed, by the monotonic time of this one, and only while changes
// are committed. A command moves the committed clock by at most step; what passes
// beyond that while nothing can be committed (a disk that hangs, a lost quorum, a
// stopped process, nobody in office) is not counted, for no lease could be renewed
// then. So a lease may end late, by the time that was not counted, never early,
// whatever becomes of a wall clock.
type leaseClock struct {
	// now is the monotonic clock; it never goes back.
	now  func() time.Duration
	step time.Duration

	mu struct {
		sync.Mutex
		at    time.Duration // monotonic time of stamp
		stamp time.Duration
	}
}

// newLeaseClock goes on from committedMs, the system clock when office was taken.
func newLeaseClock(now func() time.Duration, step time.Duration, committedMs uint64) *leaseClock {
	c := &leaseClock{now: now, step: step}
	c.mu.at, c.mu.stamp = now(), time.Duration(committedMs)*time.Millisecond
	return c
}

// stampMs is the stamp for a command that is proposed now; committedMs is the
// system clock as it is applied here.
func (c *leaseClock) stampMs(committedMs uint64) uint64 {
	committed := time.Duration(committedMs) * time.Millisecond
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	c.mu.stamp += max(now-c.mu.at, 0)
	c.mu.at = now
	c.mu.stamp = min(max(c.mu.stamp, committed), committed+c.step)
	return uint64(c.mu.stamp / time.Millisecond)
}

// leaseStep is how far one command may move the system clock: a few of the ticks
// that a leader proposes while sessions live.
func leaseStep(checkInterval time.Duration) time.Duration { return 4 * checkInterval }
