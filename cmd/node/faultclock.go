package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// faultClock is the wall clock of a node that a test may step and let drift. It
// exists under --fault-injection only (CN5).
type faultClock struct {
	// real is the true clock, with its monotonic reading.
	real func() time.Time

	mu struct {
		sync.Mutex
		set   clockSetting
		since time.Time // when it was set, true time
	}
}

// clockSetting is what a test asks for: the true time, OffsetMs later, and from
// then on faster by DriftPPM parts per million (slower if negative).
type clockSetting struct {
	OffsetMs int64 `json:"offsetMs"`
	DriftPPM int64 `json:"driftPPM"`
}

const (
	maxClockOffsetMs = 100 * 365 * 24 * 3600 * 1000 // 100 years: time.Duration holds it
	maxClockDriftPPM = 1_000_000                    // standing still, or twice as fast
	clockPath        = "/debug/fault/clock"
)

func newFaultClock() *faultClock { return &faultClock{real: time.Now} }

// Now is the time that the node sees. It has no monotonic reading: what is
// computed from it feels every step.
func (c *faultClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.real()
	passed := max(now.Sub(c.mu.since), 0)
	if c.mu.since.IsZero() {
		passed = 0
	}
	const million = 1_000_000
	ppm := time.Duration(c.mu.set.DriftPPM)
	drift := passed/million*ppm + passed%million*ppm/million
	return now.Add(time.Duration(c.mu.set.OffsetMs) * time.Millisecond).Add(drift).Round(0)
}

func (c *faultClock) setTo(s clockSetting) error {
	if s.OffsetMs > maxClockOffsetMs || s.OffsetMs < -maxClockOffsetMs {
		return fmt.Errorf("offsetMs %d: give at most 100 years either way", s.OffsetMs)
	}
	if s.DriftPPM > maxClockDriftPPM || s.DriftPPM < -maxClockDriftPPM {
		return fmt.Errorf("driftPPM %d: give -%d to %d", s.DriftPPM, maxClockDriftPPM, maxClockDriftPPM)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.set, c.mu.since = s, c.real()
	return nil
}

// ServeHTTP answers GET with what is set and PUT with what is set from then on.
func (c *faultClock) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet:
	case http.MethodPut:
		var s clockSetting
		d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
		d.DisallowUnknownFields()
		err := d.Decode(&s)
		if err == nil {
			err = c.setTo(s)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	default:
		w.Header().Set("Allow", "GET, PUT")
		http.Error(w, "use GET or PUT", http.StatusMethodNotAllowed)
		return
	}
	now := c.Now()
	c.mu.Lock()
	s := c.mu.set
	c.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(struct { // the peer may have gone
		clockSetting
		NowMs int64 `json:"nowMs"`
	}{s, now.UnixMilli()})
}
