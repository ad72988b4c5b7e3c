package cluster

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

type manualClock struct{ t time.Duration }

func (m *manualClock) now() time.Duration { return m.t }

func TestLeaderClockJumpsOnceAtStartOfOffice(t *testing.T) {
	m := &manualClock{}
	c := newLeaderClock(m.now, 1_000)
	c.Steer(61_000)
	if got := c.NowMs(); got != 61_000 {
		t.Fatalf("first target behind: got %d, want a jump to 61000", got)
	}
	c.Steer(71_000)
	if got := c.NowMs(); got != 61_000 {
		t.Fatalf("second target: got %d, want no jump", got)
	}
	m.t += 10 * time.Second
	if got := c.NowMs(); got != 81_000 {
		t.Fatalf("double speed: got %d, want 81000", got)
	}
	m.t += time.Second
	if got := c.NowMs(); got != 82_000 {
		t.Fatalf("after the slew: got %d, want plain speed", got)
	}
}

func TestLeaderClockAheadRunsAtHalfSpeed(t *testing.T) {
	m := &manualClock{}
	c := newLeaderClock(m.now, 100_000)
	c.Steer(90_000)
	m.t += 4 * time.Second
	if got := c.NowMs(); got != 102_000 {
		t.Fatalf("got %d, want half speed: 102000", got)
	}
}

func TestLeaderClockNeverGoesBackNorStands(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &manualClock{}
		c := newLeaderClock(m.now, uint64(rapid.IntRange(0, 1<<40).Draw(t, "start")))
		last := c.NowMs()
		for range 50 {
			switch rapid.IntRange(0, 2).Draw(t, "op") {
			case 0:
				step := time.Duration(rapid.IntRange(0, 20_000).Draw(t, "ms")) * time.Millisecond
				m.t += step
				got := c.NowMs()
				if got < last+uint64(step.Milliseconds()/2)-min(1, last) && got < last {
					t.Fatalf("stamp went back: %d after %d", got, last)
				}
				if step >= 4*time.Millisecond && got == last {
					t.Fatalf("stamp stood still for %v", step)
				}
			case 1:
				c.Steer(uint64(rapid.IntRange(0, 1<<41).Draw(t, "target")))
			case 2:
				c.Observe(last + uint64(rapid.IntRange(-5, 5).Draw(t, "d")+5))
			}
			got := c.NowMs()
			if got < last {
				t.Fatalf("stamp went back: %d after %d", got, last)
			}
			last = got
		}
	})
}

func TestAgreedClockIsTheMedianOfAnAgreeingQuorum(t *testing.T) {
	cases := []struct {
		name     string
		readings []int64
		quorum   int
		want     uint64
		ok       bool
	}{
		{"all agree", []int64{1000, 1200, 1400}, 2, 1200, true},
		{"one far off", []int64{1000, 1200, 900_000}, 2, 1000, true},
		{"no quorum agrees", []int64{1000, 10_000, 100_000}, 2, 0, false},
		{"single voter", []int64{5000}, 1, 5000, true},
		{"nobody answered", nil, 1, 0, false},
		{"just within", []int64{1000, 2000}, 2, 1000, true},
		{"just outside", []int64{1000, 2001}, 2, 0, false},
		{"before 1970", []int64{-20, -10}, 2, 0, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, ok := agreedClock(c.readings, c.quorum)
			if got != c.want || ok != c.ok {
				t.Fatalf("got %d, %v; want %d, %v", got, ok, c.want, c.ok)
			}
		})
	}
}
