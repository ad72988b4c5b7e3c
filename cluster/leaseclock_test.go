package cluster

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever is committed when, by whichever leader: the system clock never goes
// back, no command moves it by more than a step, and it never runs faster than
// time; where changes are committed often enough and the leader stays, it does not
// lose any.
func TestLeaseClock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const step = 4 * time.Second
		start := rapid.Uint64Range(0, 1<<42).Draw(t, "clock")
		committed, now := start, time.Duration(0)
		lost := false
		monotonic := func() time.Duration { return now }
		c := newLeaseClock(monotonic, step, committed)
		lastCommit := now
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			now += time.Duration(rapid.OneOf(rapid.Int64Range(0, 2000), rapid.Int64Range(0, 100_000_000)).Draw(t, "ms")) * time.Millisecond
			lost = lost || now-lastCommit > step
			stamp := c.stampMs(committed)
			if stamp < committed || stamp > committed+uint64(step.Milliseconds()) {
				t.Fatalf("stamp %d on a clock of %d", stamp, committed)
			}
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0: // not committed
			case 1: // another leads, after a while
				now += time.Duration(rapid.Int64Range(0, 100_000).Draw(t, "without a leader")) * time.Millisecond
				c, lost = newLeaseClock(monotonic, step, committed), true
				lastCommit = now
			default:
				committed, lastCommit = stamp, now
			}
			ran := time.Duration(committed-start) * time.Millisecond
			if ran > now {
				t.Fatalf("the clock ran %s in %s", ran, now)
			}
			if !lost && lastCommit == now && ran != now {
				t.Fatalf("the clock lost %s", now-ran)
			}
		}
	})
}
