package cluster

import (
	"testing"
	"time"
)

// Whoever has waited longest is next; one that could not be scrubbed lets the
// others go first, and one that is gone is forgotten.
func TestScrubTimes(t *testing.T) {
	a, b, c := &replica{}, &replica{}, &replica{}
	now := time.Now()
	due := scrubTimes{a: now.Add(-time.Hour), b: now.Add(-2 * time.Hour), c: now.Add(time.Hour)}
	all := []*replica{a, b, c}
	if due.next(all, 24*time.Hour) != b {
		t.Error("not the one that has waited longest")
	}
	due[b] = now.Add(time.Minute)
	if due.next(all, 24*time.Hour) != a {
		t.Error("one that was put off holds the others up")
	}
	if due.next([]*replica{b, c}, 24*time.Hour) != nil || len(due) != 2 {
		t.Errorf("one that is gone is not forgotten: %v", due)
	}
	if fresh := (&replica{}); due.next([]*replica{fresh}, time.Hour) != nil || due[fresh].Before(now) || due[fresh].After(now.Add(2*time.Hour)) {
		t.Errorf("a new one is due at %v", due[fresh])
	}
}
