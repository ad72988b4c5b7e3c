package s3fault

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Kind is what a fault does.
type Kind string

// The kinds of faults.
const (
	// Down resets the connection of each request.
	Down Kind = "down"
	// Hang accepts requests and answers none while it is in force.
	Hang Kind = "hang"
	// Slow delays each request, and bounds the bandwidth of all together.
	Slow Kind = "slow"
	// Throttle answers 503 SlowDown, every second time with Retry-After.
	Throttle Kind = "throttle"
	// Errors answers 500 InternalError.
	Errors Kind = "errors"
	// LostAnswer passes a request on, and resets the connection instead of
	// answering.
	LostAnswer Kind = "lost-answer"
	// CutBody ends a body, of an upload or of an answer, after 60 % of what was
	// promised.
	CutBody Kind = "cut-body"
	// WrongBytes changes a byte of an object that is read.
	WrongBytes Kind = "wrong-bytes"
)

// Kinds are all of them.
func Kinds() []Kind {
	return []Kind{Down, Hang, Slow, Throttle, Errors, LostAnswer, CutBody, WrongBytes}
}

// Fault is what is done to requests.
type Fault struct {
	Kind Kind
	// Share is the part of the requests that are hit, of those that can be; above
	// 0, at most 1.
	Share float64
	// From are the addresses, without a port, whose requests are hit; all if empty.
	From []string
	// Seed of the choices.
	Seed uint64
	// Delay and BytesPerSecond are those of Slow; 0 bytes is no bound.
	Delay          time.Duration
	BytesPerSecond int64
}

func (f *Fault) validate() error {
	switch {
	case !slices.Contains(Kinds(), f.Kind):
		return fmt.Errorf("there is no fault %q", f.Kind)
	case !(f.Share > 0 && f.Share <= 1):
		return fmt.Errorf("%v is no share of requests", f.Share)
	case f.Delay < 0 || f.BytesPerSecond < 0:
		return fmt.Errorf("a delay of %s and %d bytes a second cannot be", f.Delay, f.BytesPerSecond)
	}
	return nil
}

// Active is a fault in force.
type Active struct {
	Fault
	proxy *Proxy
	over  chan struct{} // closed by Remove

	mu   sync.Mutex
	rnd  *rand.Rand
	met  int
	next time.Time // when the next byte may pass
}

// hits says whether the fault hits a request, and counts it (SF2).
func (a *Active) hits(from string) bool {
	if len(a.From) > 0 && !slices.Contains(a.From, from) {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.rnd.Float64() >= a.Share {
		return false
	}
	a.met++
	return true
}

// Met is how many requests it has hit.
func (a *Active) Met() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.met
}

// below draws a number.
func (a *Active) below(n int64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rnd.Int64N(n)
}

// Remove ends the fault, and says how many requests it has hit. It may be called
// again.
func (a *Active) Remove() (met int) {
	a.proxy.mu.Lock()
	if i := slices.Index(a.proxy.mu.active, a); i >= 0 {
		a.proxy.mu.active = slices.Delete(a.proxy.mu.active, i, i+1)
		close(a.over)
	}
	a.proxy.mu.Unlock()
	return a.Met()
}

// await waits until the fault is over, for d at most if that is not 0, or until
// ctx ends, which it then says.
func (a *Active) await(ctx context.Context, d time.Duration) error {
	var due <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-a.over:
	case <-due:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// pass lets n bytes pass at the rate of the fault.
func (a *Active) pass(ctx context.Context, n int) error {
	if a.BytesPerSecond == 0 || n == 0 {
		return nil
	}
	a.mu.Lock()
	now := time.Now()
	if a.next.Before(now) {
		a.next = now
	}
	a.next = a.next.Add(time.Duration(n) * time.Second / time.Duration(a.BytesPerSecond))
	wait := a.next.Sub(now)
	a.mu.Unlock()
	return a.await(ctx, wait)
}

// isObject says that a request reads an object, and not a list or a setting.
func isObject(r *http.Request) bool {
	if r.Method != http.MethodGet {
		return false
	}
	_, key, found := cutPath(r.URL.Path)
	q := r.URL.Query()
	return found && key != "" && !q.Has("uploads") && !q.Has("uploadId")
}
