package cluster

import (
	"sync/atomic"
	"time"
)

// moment is when something last happened, for many goroutines. It keeps the
// monotonic reading of its time, which a number of nanoseconds since 1970 has
// lost: a step of the wall clock makes nothing older or newer.
type moment struct{ at atomic.Pointer[time.Time] }

func (m *moment) set(t time.Time) { m.at.Store(&t) }

// setFirst sets the moment if it was never set.
func (m *moment) setFirst(t time.Time) { m.at.CompareAndSwap(nil, &t) }

func (m *moment) clear() { m.at.Store(nil) }

// age is how long ago it was at now; false if it never was.
func (m *moment) age(now time.Time) (time.Duration, bool) {
	at := m.at.Load()
	if at == nil {
		return 0, false
	}
	return now.Sub(*at), true
}
