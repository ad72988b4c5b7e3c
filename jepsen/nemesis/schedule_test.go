//go:build linux

package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/keelstate/keelstate/jepsen/host"
)

// world counts what is in force.
type world struct {
	mu      sync.Mutex
	inForce map[string]int
	most    int
	log     []string
	t       *testing.T
}

// pretend is a fault of a world. Its first heal fails if it is clumsy.
type pretend struct {
	w      *world
	name   string
	kind   Kind
	alone  bool
	halts  bool
	clumsy bool
	fails  error
}

func (p *pretend) Name() string { return p.name }
func (p *pretend) Kind() Kind   { return p.kind }
func (p *pretend) Alone() bool  { return p.alone }
func (p *pretend) Halts() bool  { return p.halts }

func (p *pretend) Inject(_ context.Context, rnd *rand.Rand) (*Injection, error) {
	if p.fails != nil {
		return nil, p.fails
	}
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.inForce[p.name]++
	if p.alone && len(p.w.inForce) > 1 {
		p.w.t.Errorf("%s is not alone: %v", p.name, p.w.inForce)
	}
	p.w.most = max(p.w.most, len(p.w.inForce))
	p.w.log = append(p.w.log, fmt.Sprint(p.name, rnd.IntN(1000)))
	tries := 0
	return newInjection([]string{"n1"}, "pretended", func(ctx context.Context) error {
		p.w.mu.Lock()
		defer p.w.mu.Unlock()
		if ctx.Err() != nil {
			p.w.t.Error("healing with a context that is done")
		}
		if tries++; p.clumsy && tries == 1 {
			return errors.New("clumsy")
		}
		delete(p.w.inForce, p.name)
		return nil
	}), nil
}

func newWorld(t *testing.T) (*world, []Fault) {
	w := &world{inForce: map[string]int{}, t: t}
	return w, []Fault{
		&pretend{w: w, name: "a1", kind: "a"}, &pretend{w: w, name: "a2", kind: "a"}, &pretend{w: w, name: "b", kind: "b", clumsy: true},
		&pretend{w: w, name: "c", kind: "c"}, &pretend{w: w, name: "lonely", kind: "d", alone: true},
		&pretend{w: w, name: "never", kind: "e", fails: ErrNotNow},
	}
}

// TestSchedule runs ten simulated minutes: everything is healed at the end, in
// time, recorded, and the same for the same seed (NE1, NE2, NE3).
func TestSchedule(t *testing.T) {
	run := func(seed uint64) (log []string) {
		synctest.Test(t, func(t *testing.T) {
			w, faults := newWorld(t)
			begun, ended := 0, 0
			s, err := NewScheduler(NewEnv(&host.Fleet{}, seed), faults, Options{Seed: seed, OnRecord: func(r Record) {
				if r.End.IsZero() {
					begun++
				} else if r.Skipped == "" {
					ended++
				}
			}})
			must(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			must(t, s.Run(ctx))
			if len(w.inForce) != 0 {
				t.Errorf("still in force: %v", w.inForce)
			}
			if w.most != 3 {
				t.Errorf("at most %d at once", w.most)
			}
			records := s.Records()
			counts := Count(records)
			if counts["a"] < 20 || counts["b"] < 20 || counts["d"] < 5 || counts["e"] != 0 {
				t.Errorf("injected: %v", counts)
			}
			var skipped int
			for _, r := range records {
				if r.Name == "never" {
					skipped++
					if r.Skipped == "" {
						t.Errorf("record: %+v", r)
					}
					continue
				}
				if r.Begin.IsZero() || r.End.Before(r.Begin) || r.Description == "" || len(r.Targets) == 0 || r.Error != "" || r.String() == "" {
					t.Errorf("record: %+v", r)
				}
			}
			if begun != ended || begun+skipped != len(records) {
				t.Errorf("told of %d begun and %d ended, %d records", begun, ended, len(records))
			}
			log = w.log
		})
		return log
	}
	if one, two := run(7), run(7); !slices.Equal(one, two) {
		t.Error("one seed, two schedules")
	} else if other := run(8); slices.Equal(one, other) {
		t.Error("two seeds, one schedule")
	}
}

// A step with a fault that halts everything is short, with or without others.
func TestHaltsAreShort(t *testing.T) {
	w, faults := newWorld(t)
	faults = append(faults, &pretend{w: w, name: "halt", kind: "h", halts: true})
	s, err := NewScheduler(nil, faults, Options{Seed: 3, MinHold: time.Second, MaxHold: 9 * time.Second, Composed: 0.5})
	must(t, err)
	var longest, longestHalt time.Duration
	halts := 0
	for n := range 500 {
		p := s.plan(n)
		if slices.ContainsFunc(p.draws, func(d draw) bool { return d.fault.Name() == "halt" }) {
			halts++
			longestHalt = max(longestHalt, p.hold)
		}
		longest = max(longest, p.hold)
	}
	if halts < 50 || longestHalt > 3*time.Second || longestHalt < 2*time.Second || longest < 8*time.Second {
		t.Errorf("%d steps that halt, for %s at most; all for %s at most", halts, longestHalt, longest)
	}
}

// TestScheduleErrors: what the harness cannot do is an error of Run, and ends
// nothing but the fault.
func TestScheduleErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, faults := newWorld(t)
		faults = append(faults, &pretend{w: w, name: "broken", kind: "f", fails: errors.New("no such thing")})
		settled := 0
		s, err := NewScheduler(NewEnv(&host.Fleet{}, 1), faults, Options{Seed: 1, Composed: -1, Settle: func(context.Context) error {
			if settled++; settled == 50 {
				return errors.New("not healthy")
			}
			return nil
		}})
		must(t, err)
		err = s.Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "no such thing") || !strings.Contains(err.Error(), "not healthy") {
			t.Errorf("error: %v", err)
		}
		if settled != 50 || w.most != 1 || len(w.inForce) != 0 {
			t.Errorf("settled %d times, at most %d at once, %v in force", settled, w.most, w.inForce)
		}
	})
	if _, err := NewScheduler(nil, nil, Options{}); err == nil {
		t.Error("a schedule of nothing")
	}
}

func TestSelect(t *testing.T) {
	_, faults := newWorld(t)
	for wanted, want := range map[string]int{"": 6, "a": 2, "a1": 1, "a,a1,lonely": 3} {
		var names []string
		if wanted != "" {
			names = strings.Split(wanted, ",")
		}
		got, err := Select(faults, names)
		if err != nil || len(got) != want {
			t.Errorf("%q: %d faults, %v", wanted, len(got), err)
		}
	}
	if _, err := Select(faults, []string{"zzz"}); err == nil {
		t.Error("an unknown fault")
	}
	s, err := NewScheduler(nil, faults, Options{})
	must(t, err)
	if plan := s.Plan(3); len(plan) != 3 || !strings.Contains(plan[0], " for ") {
		t.Errorf("plan: %q", plan)
	}
}
