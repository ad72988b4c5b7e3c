package cluster

import (
	"errors"
	"testing"
	"time"

	"github.com/keelstate/keelstate/snapshot"
)

// A store that refuses is asked again after a pause that doubles, up to its bound and
// never to less than half of it; one success ends that.
func TestPausesOfAStoreThatRefusesTheLog(t *testing.T) {
	var a aheadStore
	now := time.Unix(1000, 0)
	for round := range 2 {
		if !a.ready(now) {
			t.Fatalf("round %d: a store that was not asked is not ready", round)
		}
		want := aheadPauseMin
		for range 12 {
			a.ended(now, errors.New("no"))
			if pause := a.again.Sub(now); pause < want/2 || pause > want {
				t.Errorf("the pause is %s, want %s to %s", pause, want/2, want)
			}
			if a.ready(a.again.Add(-1)) || !a.ready(a.again) {
				t.Error("it is ready too early or too late")
			}
			now = a.again
			want = min(2*want, aheadPauseMax)
		}
		a.ended(now, nil)
	}
}

// A segment that was stored ahead belongs to the lineage only as long as that is open
// under its attempt and it is the next one: not behind a barrier, not after a
// checkpoint that may not register it, not twice.
func TestWhatIsStoredAheadJoinsItsLineageOnly(t *testing.T) {
	ref := func(first, last uint64) snapshot.SegmentRef {
		return snapshot.SegmentRef{First: first, Last: last, Size: 10}
	}
	open := func() *changelog {
		c := &changelog{}
		c.set(&lineage{base: &snapshot.Manifest{Index: 9}, segments: []snapshot.SegmentRef{ref(10, 12)}, attempt: 5})
		return c
	}
	c := open()
	if c.add(6, ref(13, 14)) || c.add(5, ref(14, 14)) || c.add(5, ref(12, 14)) || !c.add(5, ref(13, 14)) || c.add(5, ref(13, 14)) {
		t.Fatal("a segment of another attempt or place was added, or the next one was not")
	}
	before := c.get()
	if !c.add(5, ref(15, 20)) || len(before.ahead) != 1 || c.get().next() != 21 || c.get().bytes() != 30 || len(c.get().segments) != 1 {
		t.Errorf("%+v after %+v", c.get(), before)
	}

	if l := c.announced(5); len(l.ahead) != 2 || l.attempt != 5 {
		t.Errorf("the checkpoint that may register it finds %+v", l)
	}
	if !c.add(5, ref(21, 21)) {
		t.Error("nothing is added between announcement and barrier")
	}
	for _, prior := range []uint64{0, 4, 6} {
		c := open()
		c.add(5, ref(13, 14))
		if l := c.announced(prior); len(l.ahead) != 0 || l.next() != 13 || c.add(5, ref(13, 14)) {
			t.Errorf("prior %d: %+v", prior, l)
		}
	}
	c.set(nil)
	if c.add(5, ref(22, 22)) || c.announced(0) != nil {
		t.Error("there is a lineage")
	}
}

// What has come together is old once it has been enough for so long without a break.
func TestAgeOfTheLog(t *testing.T) {
	var c changelog
	now := time.Unix(1000, 0)
	for i, step := range []struct {
		enough, want bool
		after        time.Duration
	}{{true, false, 0}, {true, false, 9 * time.Second}, {true, true, time.Second}, {false, false, 0}, {true, false, time.Second}, {true, true, 10 * time.Second}} {
		now = now.Add(step.after)
		if got := c.aged(step.enough, now, 10*time.Second); got != step.want {
			t.Errorf("step %d: %v", i, got)
		}
	}
}
