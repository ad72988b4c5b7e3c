package cluster

import (
	"slices"
	"sync"
	"time"
)

// leaderClock gives the stamps of one shard's leader (rule W5). It starts at
// the last stamp in the log, advances by the leader's monotonic time, and is
// steered towards the median of a quorum's wall clocks when these agree:
// behind the target it jumps once, at the start of office, and otherwise runs
// at double speed; ahead of it, it runs at half speed. It never stands and
// never goes back. Without agreement it just runs on: TTL may be late, never
// early.
type leaderClock struct {
	// now is the monotonic clock; it never goes back.
	now func() time.Duration

	mu struct {
		sync.Mutex
		at      time.Duration // monotonic time of stamp
		stamp   time.Duration // stamp at that time, since the Unix epoch
		slew    time.Duration // what is still to gain (> 0) or to lose (< 0)
		steered bool          // a target was given in this term of office
	}
}

// newLeaderClock starts at lastMs, the newest stamp applied by the shard.
func newLeaderClock(now func() time.Duration, lastMs uint64) *leaderClock {
	c := &leaderClock{now: now}
	c.mu.at = now()
	c.mu.stamp = time.Duration(lastMs) * time.Millisecond
	return c
}

// NowMs is the stamp for an entry proposed now.
func (c *leaderClock) NowMs() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked()
	return uint64(c.mu.stamp / time.Millisecond)
}

// Observe raises the stamp to at least ms: a stamp that the log already holds.
func (c *leaderClock) Observe(ms uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked()
	c.mu.stamp = max(c.mu.stamp, time.Duration(ms)*time.Millisecond)
}

// Steer sets the target that the stamps move to.
func (c *leaderClock) Steer(targetMs uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked()
	diff := time.Duration(targetMs)*time.Millisecond - c.mu.stamp
	if diff > 0 && !c.mu.steered {
		c.mu.stamp += diff
		diff = 0
	}
	c.mu.steered = true
	c.mu.slew = diff
}

// advanceLocked moves the stamp by the time that has passed, faster or slower
// while there is something to slew.
func (c *leaderClock) advanceLocked() {
	now := c.now()
	passed := now - c.mu.at
	if passed <= 0 {
		return
	}
	c.mu.at = now
	gain := time.Duration(0)
	switch {
	case c.mu.slew > 0: // double speed
		gain = min(passed, c.mu.slew)
	case c.mu.slew < 0: // half speed
		gain = -min(passed/2, -c.mu.slew)
	}
	c.mu.slew -= gain
	c.mu.stamp += passed + gain
}

// clockAgreement is how close a quorum's clocks must be to one another before
// their median steers the shard's clock.
const clockAgreement = time.Second

// agreedClock returns the median of a largest set of at least quorum clocks
// that lie within clockAgreement of each other, and false if there is none.
// The readings are wall clocks in ms of one poll.
func agreedClock(readings []int64, quorum int) (uint64, bool) {
	r := slices.Clone(readings)
	slices.Sort(r)
	lo, n := 0, 0
	for i := range r {
		j := i
		for j < len(r) && r[j]-r[i] <= clockAgreement.Milliseconds() {
			j++
		}
		if j-i > n {
			lo, n = i, j-i
		}
	}
	if n < quorum || n == 0 {
		return 0, false
	}
	m := r[lo+(n-1)/2]
	if m < 0 {
		return 0, false
	}
	return uint64(m), true
}
