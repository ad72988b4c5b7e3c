//go:build failpoints

package failpoint

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// Enabled says whether this build has failpoints.
const Enabled = true

// Hit marks a place that can crash, panic, be delayed or stall.
func Hit(name string) { _ = lookup(name, KindHit).act() }

// Err marks a place that can fail as well.
func Err(name string) error { return lookup(name, KindErr).act() }

// Int is v, or what the point is armed with.
func Int(name string, v int64) int64 {
	p := lookup(name, KindInt)
	p.hits.Add(1)
	if a := p.armed.Load(); a.next() {
		return a.value
	}
	return v
}

// point is a registered point and what is armed at it.
type point struct {
	Point
	hits  atomic.Uint64
	armed atomic.Pointer[armed]
}

// points by name; never changed.
var points = func() map[string]*point {
	m := make(map[string]*point)
	for _, p := range Points() {
		m[p.Name] = &point{Point: p}
	}
	return m
}()

// lookup panics on a name that is not registered with this kind (FP2).
func lookup(name string, k Kind) *point {
	p := points[name]
	if p == nil || p.Kind != k {
		panic(fmt.Sprintf("failpoint %q is not registered as %s", name, k))
	}
	return p
}

// armed is an action at a point. It is never changed: arming anew replaces it.
type armed struct {
	spec        string // as it was given, without the name
	action      string
	err         error
	delay       time.Duration
	value       int64
	skip, limit uint64 // limit 0: none
	seen        atomic.Uint64
	released    chan struct{} // closed by release or replacement
	once        atomic.Bool   // whether released is closed
}

// next counts one arrival and says whether it acts.
func (a *armed) next() bool {
	if a == nil {
		return false
	}
	n := a.seen.Add(1)
	return n > a.skip && (a.limit == 0 || n-a.skip <= a.limit)
}

func (a *armed) release() {
	if a != nil && a.once.CompareAndSwap(false, true) {
		close(a.released)
	}
}

func (p *point) act() error {
	p.hits.Add(1)
	a := p.armed.Load()
	if !a.next() {
		return nil
	}
	switch a.action {
	case "crash":
		crash(p.Name)
	case "panic":
		panic("failpoint " + p.Name)
	case "error":
		return fmt.Errorf("failpoint %s: %w", p.Name, a.err)
	case "delay":
		time.Sleep(a.delay)
	case "stall":
		<-a.released
	}
	return nil
}

// crash ends the process as kill -9 does. Its last words go straight to the
// standard error, so that a test knows where it ended.
func crash(name string) {
	fmt.Fprintf(os.Stderr, "failpoint: crash at %s\n", name)
	for {
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			panic(fmt.Sprintf("failpoint %s: %v", name, err))
		}
		time.Sleep(time.Second) // the signal ends it before
	}
}
