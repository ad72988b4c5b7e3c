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
	"time"
)

// Options of a schedule. The zero value is usable.
type Options struct {
	Seed uint64
	// MinHold and MaxHold bound how long faults are in force; default 1 s and 8 s.
	MinHold, MaxHold time.Duration
	// MinGap and MaxGap bound the time without faults between two steps; default
	// 500 ms and 4 s.
	MinGap, MaxGap time.Duration
	// MaxAtOnce bounds the faults in force at once; default 3.
	MaxAtOnce int
	// Composed is the share of steps with more than one fault; default 0.3, -1 for
	// none.
	Composed float64
	// OnRecord is called when a fault begins (End is zero) and when it has ended.
	OnRecord func(Record)
	// Settle is called after each step, for example to wait until the cluster is
	// healthy. Its error ends the schedule.
	Settle func(context.Context) error
}

func (o *Options) ensureDefaults() {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&o.MinHold, time.Second)
	set(&o.MaxHold, max(8*time.Second, o.MinHold))
	set(&o.MinGap, 500*time.Millisecond)
	set(&o.MaxGap, max(4*time.Second, o.MinGap))
	o.MaxHold, o.MaxGap = max(o.MinHold, o.MaxHold), max(o.MinGap, o.MaxGap)
	if o.MaxAtOnce <= 0 {
		o.MaxAtOnce = 3
	}
	if o.Composed == 0 {
		o.Composed = 0.3
	}
}

// Record is one injection on the timeline.
type Record struct {
	Step        int       `json:"step"`
	Name        string    `json:"name"`
	Kind        Kind      `json:"kind"`
	Targets     []string  `json:"targets,omitempty"`
	Description string    `json:"description,omitempty"`
	Begin       time.Time `json:"begin"`
	End         time.Time `json:"end"`
	// Skipped says why it was not injected, Error what failed. Idle is that of the
	// injection.
	Skipped string `json:"skipped,omitempty"`
	Error   string `json:"error,omitempty"`
	Idle    bool   `json:"idle,omitempty"`
}

// String is a line of a log.
func (r Record) String() string {
	switch {
	case r.Skipped != "":
		return fmt.Sprintf("step %d: %s skipped: %s", r.Step, r.Name, r.Skipped)
	case r.Error != "":
		return fmt.Sprintf("step %d: %s failed: %s (%s)", r.Step, r.Name, r.Error, r.Description)
	case r.End.IsZero():
		return fmt.Sprintf("step %d: %s: %s", r.Step, r.Name, r.Description)
	}
	return fmt.Sprintf("step %d: %s healed after %s: %s", r.Step, r.Name, r.End.Sub(r.Begin).Round(time.Millisecond), r.Description)
}

// Scheduler draws faults and injects them.
type Scheduler struct {
	env    *Env
	faults []Fault
	kinds  []Kind
	opts   Options

	mu struct {
		sync.Mutex
		records []Record
	}
}

// NewScheduler prepares a schedule of faults of a catalogue.
func NewScheduler(env *Env, faults []Fault, opts Options) (*Scheduler, error) {
	if len(faults) == 0 {
		return nil, errors.New("a schedule needs faults")
	}
	opts.ensureDefaults()
	s := &Scheduler{env: env, faults: faults, opts: opts}
	for _, f := range faults {
		if !slices.Contains(s.kinds, f.Kind()) {
			s.kinds = append(s.kinds, f.Kind())
		}
	}
	return s, nil
}

// draw is one fault of a step, with the seed of its own choices.
type draw struct {
	fault Fault
	seed  uint64
	// before passes before it is injected, and again before the next is healed.
	before time.Duration
}

// step is what is injected at once.
type step struct {
	draws     []draw
	healOrder []int
	hold, gap time.Duration
}

// plan is the n-th step, by the seed alone (NE2). Kinds are equally likely, and
// so are the faults of one kind.
func (s *Scheduler) plan(n int) step {
	rnd := rand.New(rand.NewPCG(s.opts.Seed, uint64(n)))
	between := func(low, high time.Duration) time.Duration { return low + time.Duration(rnd.Int64N(int64(high-low)+1)) }
	count := 1
	if s.opts.MaxAtOnce > 1 && rnd.Float64() < s.opts.Composed {
		count = 2 + rnd.IntN(s.opts.MaxAtOnce-1)
	}
	var p step
	for _, kind := range shuffled(rnd, s.kinds) {
		var candidates []Fault
		for _, f := range s.faults {
			if f.Kind() == kind && (len(p.draws) == 0 || !f.Alone()) {
				candidates = append(candidates, f)
			}
		}
		if len(candidates) == 0 {
			continue
		}
		f := candidates[rnd.IntN(len(candidates))]
		p.draws = append(p.draws, draw{f, rnd.Uint64(), between(0, s.opts.MaxHold/10)})
		if f.Alone() || len(p.draws) == count {
			break
		}
	}
	p.healOrder = rnd.Perm(len(p.draws))
	p.hold, p.gap = between(s.opts.MinHold, s.opts.MaxHold), between(s.opts.MinGap, s.opts.MaxGap)
	if slices.ContainsFunc(p.draws, func(d draw) bool { return d.fault.Halts() }) {
		p.hold = s.opts.MinHold + (p.hold-s.opts.MinHold)/4
	}
	return p
}

// Plan names what the first steps inject, one line each.
func (s *Scheduler) Plan(steps int) []string {
	var lines []string
	for n := range steps {
		p := s.plan(n)
		var parts []string
		for _, d := range p.draws {
			parts = append(parts, d.fault.Name())
		}
		lines = append(lines, fmt.Sprintf("%s for %s", strings.Join(parts, " + "), p.hold.Round(time.Millisecond)))
	}
	return lines
}

// Records is the timeline so far: one record per injection.
func (s *Scheduler) Records() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.mu.records)
}

// Run injects until the context is done, and heals everything before it returns
// (NE1). Its error says what the harness could not do; what the product did is for
// others to judge.
func (s *Scheduler) Run(ctx context.Context) error {
	var failed error
	for n := 0; ctx.Err() == nil; n++ {
		p := s.plan(n)
		s.step(ctx, n, p)
		if err := s.env.upAll(); err != nil {
			failed = errors.Join(failed, fmt.Errorf("step %d: %w", n, err))
		}
		if s.opts.Settle != nil && ctx.Err() == nil {
			if err := s.opts.Settle(ctx); err != nil && ctx.Err() == nil {
				failed = errors.Join(failed, fmt.Errorf("after step %d: %w", n, err))
				break
			}
		}
		pauseFor(ctx, p.gap)
	}
	for _, r := range s.Records() {
		if r.Error != "" {
			failed = errors.Join(failed, errors.New(r.String()))
		}
	}
	return errors.Join(failed, s.env.HealAll(healContext(ctx)))
}

// healContext outlives the schedule: healing must go on after its end.
func healContext(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// force is an injection in force, and the place of its record.
type force struct {
	in     *Injection
	record int
}

func (s *Scheduler) step(ctx context.Context, n int, p step) {
	inForce := make([]*force, len(p.draws))
	for i, d := range p.draws {
		if !pauseFor(ctx, d.before) {
			break
		}
		inForce[i] = s.inject(ctx, n, d)
	}
	if !slices.ContainsFunc(inForce, func(f *force) bool { return f != nil }) {
		return
	}
	pauseFor(ctx, p.hold)
	for k, i := range p.healOrder {
		if inForce[i] == nil {
			continue
		}
		if k > 0 {
			pauseFor(ctx, p.draws[i].before)
		}
		s.heal(ctx, inForce[i])
	}
}

func (s *Scheduler) inject(ctx context.Context, n int, d draw) *force {
	r := Record{Step: n, Name: d.fault.Name(), Kind: d.fault.Kind(), Begin: time.Now()}
	in, err := d.fault.Inject(ctx, rand.New(rand.NewPCG(d.seed, 0)))
	switch {
	case err == nil:
		r.Targets, r.Description, r.Idle = in.Targets, in.Description, in.Idle
	case errors.Is(err, ErrNotNow) || ctx.Err() != nil:
		r.Skipped, r.End = err.Error(), time.Now()
	default:
		r.Error, r.End = err.Error(), time.Now()
	}
	s.mu.Lock()
	s.mu.records = append(s.mu.records, r)
	place := len(s.mu.records) - 1
	s.mu.Unlock()
	s.tell(r)
	if err != nil {
		return nil
	}
	return &force{in, place}
}

// healTries is how often a heal is tried before it is given up.
const healTries = 3

func (s *Scheduler) heal(ctx context.Context, f *force) {
	var err error
	for range healTries {
		if err = f.in.Heal(healContext(ctx)); err == nil {
			break
		}
	}
	s.mu.Lock()
	r := &s.mu.records[f.record]
	r.End, r.Idle = time.Now(), f.in.Idle
	if f.in.Outcome != "" {
		r.Description += "; " + f.in.Outcome
	}
	if err != nil {
		r.Error = "healing: " + err.Error()
	}
	done := *r
	s.mu.Unlock()
	s.tell(done)
}

func (s *Scheduler) tell(r Record) {
	if s.opts.OnRecord != nil {
		s.opts.OnRecord(r)
	}
}

// Count counts the injections that took place and were not idle, by kind.
func Count(records []Record) map[Kind]int {
	counts := make(map[Kind]int)
	for _, r := range records {
		if r.Skipped == "" && r.Error == "" && !r.Idle {
			counts[r.Kind]++
		}
	}
	return counts
}
