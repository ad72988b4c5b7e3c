package cluster

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// pulse is when a group's two goroutines that do its work were last seen to go
// on: raft's main loop, and the one that applies. Neither needs a quorum for it.
type pulse struct {
	// loop is when the main loop last answered, apply when the state machine last
	// had all it was given or got further; not set before the first look.
	loop, apply moment
	probing     atomic.Bool   // one probe at a time; it waits as long as the loop hangs
	applied     atomic.Uint64 // at the last look
}

// pulseInterval is how often a group is looked at, if Options.CheckInterval is
// not longer; maxPulseInterval is far below liveLimit.
const (
	pulseInterval    = 2 * time.Second
	maxPulseInterval = liveLimit / 4
)

// pulsePace is how often a group is looked at.
func pulsePace(check time.Duration) time.Duration {
	return min(max(pulseInterval, check), maxPulseInterval)
}

// watchPulse looks at the group until it is closed.
func (g *group) watchPulse() {
	tick := time.NewTicker(pulsePace(g.opts.CheckInterval))
	defer tick.Stop()
	for {
		g.feelPulse()
		select {
		case <-g.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (g *group) feelPulse() {
	now := time.Now()
	given := g.log.NewestCommandAtOrBelow(g.raft.AppliedIndex())
	_, looked := g.pulse.apply.age(now)
	if has := g.applied(); has >= given || has != g.pulse.applied.Load() || !looked {
		g.pulse.applied.Store(has)
		g.pulse.apply.set(now)
	}
	g.pulse.loop.setFirst(now)
	if g.guard.HighestTerm() == 0 {
		g.pulse.loop.set(now) // raft would take the probe for a leader's first word
		return
	}
	if !g.pulse.probing.CompareAndSwap(false, true) {
		return
	}
	g.spawn(func() {
		defer g.pulse.probing.Store(false)
		if g.wire.Probe(g.ctx) == nil {
			g.pulse.loop.set(time.Now())
		}
	})
}

// hangs says what of the group has not gone on for longer than limit, empty if
// nothing.
func (g *group) hangs(now time.Time, limit time.Duration) string {
	if g.raft == nil || g.raft.State() == raft.Shutdown {
		return ""
	}
	return g.pulse.hangs(now, limit)
}

func (p *pulse) hangs(now time.Time, limit time.Duration) string {
	for _, part := range []struct {
		name string
		at   *moment
	}{{"raft's main loop", &p.loop}, {"the state machine", &p.apply}} {
		if age, looked := part.at.age(now); looked && age > limit {
			return fmt.Sprintf("%s has not gone on for %s", part.name, age.Round(time.Second))
		}
	}
	return ""
}

// groupsLive fails for a group of this node that hangs.
func (n *Node) groupsLive(now time.Time) error {
	for _, g := range n.groups() {
		if why := g.hangs(now, liveLimit); why != "" {
			return fmt.Errorf("%s: %s: %w", g.id, why, base.ErrUnavailable)
		}
	}
	return nil
}
