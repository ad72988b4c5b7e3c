package crashtest

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// TestCrashUnderLoad kills and stops nodes while every kind of state is written.
func TestCrashUnderLoad(t *testing.T) {
	for _, engine := range []string{"rocks", "mem"} {
		t.Run(engine, func(t *testing.T) {
			r := seeded(t)
			c := newNodes(t, engine)
			c.found(4)
			s := declare(t, c.client())
			l := startLoad(t, c, r.Uint64())
			faults, limit := 0, 12*time.Second
			if *long {
				limit = 90 * time.Second
			}
			for begin := time.Now(); time.Since(begin) < limit && !t.Failed(); faults++ {
				pause(t.Context(), time.Duration(200+r.IntN(800))*time.Millisecond)
				c.fault(r, faults%6)
				c.serves(s.probe)
			}
			l.end()
			t.Logf("%d faults", faults)
			c.healthy()
			l.judge(s)
			c.agree()
		})
	}
}

// fault does one thing to the nodes and leaves all of them running. The first
// kinds come in turn, so that a short run has each.
func (c *nodes) fault(r *rand.Rand, kind int) {
	one := r.IntN(len(c.n))
	down := time.Duration(100+r.IntN(1500)) * time.Millisecond
	what := ""
	switch kind {
	case 0, 3:
		if l := c.leader(1 + r.IntN(4)); l >= 0 {
			one = l
		}
		what = "kill the leader " + c.n[one].id
		c.kill(one)
		pause(c.t.Context(), down)
		c.start(one)
	case 1:
		what = "kill all at once"
		for i := range c.n {
			c.signal(i, syscall.SIGKILL)
		}
		for i := range c.n {
			c.kill(i)
		}
		for i := range c.n {
			c.start(i)
		}
	case 2:
		what = fmt.Sprintf("stop %s for %v", c.n[one].id, down)
		c.signal(one, syscall.SIGSTOP)
		pause(c.t.Context(), down)
		c.signal(one, syscall.SIGCONT)
	case 4:
		other := (one + 1) % len(c.n)
		what = "kill " + c.n[one].id + " and " + c.n[other].id + ", one after the other"
		c.kill(one)
		c.start(one)
		c.kill(other)
		pause(c.t.Context(), down)
		c.start(other)
	default:
		what = "SIGTERM to " + c.n[one].id
		c.signal(one, syscall.SIGTERM)
		pause(c.t.Context(), down)
		c.kill(one)
		c.start(one)
	}
	c.t.Log(what)
}
