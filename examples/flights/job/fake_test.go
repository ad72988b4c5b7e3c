package job

import (
	"context"
	"errors"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
)

// fate is what a faulty network does to a write.
type fate int

const (
	fine       fate = iota
	lostReply       // applied, the caller does not know
	lostCall        // not applied, the caller does not know
	refused         // not applied, try again
	lateCall        // the caller gives up, and it is applied at some later time
	fatesCount      // number of fates
)

var errNet = errors.New("a fault of the network")

// cell is the state of one origin in the fake.
type cell struct {
	position Position
	sum      Summary
	late     []Flight
	delays   int64
	days     map[string]int64
	applied  []int64 // lines of the positions, in order
}

// fakeStore is a cluster in memory, as linearizable as the real one, with
// faults on demand.
type fakeStore struct {
	mu      sync.Mutex
	newest  *Generation
	origins map[string]*cell
	rng     *rand.Rand
	faults  float64                        // probability that a write has another fate than fine
	gate    func(context.Context, *Update) // called before each Apply, outside the lock
	always  fate                           // of every write, but for faults
	delayed []func()
	calls   int
}

func newFake(seed uint64, faults float64) *fakeStore {
	return &fakeStore{origins: make(map[string]*cell), rng: rand.New(rand.NewPCG(seed, 1)), faults: faults}
}

// writeLocked runs a conditional write under a fate.
func (s *fakeStore) writeLocked(write func() error) error {
	s.calls++
	f := s.always
	if s.rng.Float64() < s.faults {
		f = fate(1 + s.rng.IntN(int(fatesCount)-1))
	}
	if len(s.delayed) > 0 && s.rng.IntN(4) == 0 { // what was under way arrives
		i := s.rng.IntN(len(s.delayed))
		s.delayed[i]()
		s.delayed = slices.Delete(s.delayed, i, i+1)
	}
	switch f {
	case lostReply:
		_ = write()
		return &Failure{Kind: Unknown, Cause: errNet}
	case lostCall:
		return &Failure{Kind: Unknown, Cause: errNet}
	case refused:
		return &Failure{Kind: Transient, Cause: errNet}
	case lateCall:
		s.delayed = append(s.delayed, func() { _ = write() })
		return &Failure{Kind: Unknown, Cause: errNet}
	}
	return write()
}

func (s *fakeStore) holdsLocked(origin string, want *Position) error {
	c := s.origins[origin]
	if (want == nil) != (c == nil) || want != nil && c.position != *want {
		return &Failure{Kind: Conflict, Cause: errors.New("the position is another")}
	}
	return nil
}

func (s *fakeStore) Generation(context.Context) (Generation, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.newest == nil {
		return Generation{}, false, nil
	}
	return *s.newest, true, nil
}

func (s *fakeStore) Raise(_ context.Context, old *Generation, raised Generation) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writeLocked(func() error {
		if (old == nil) != (s.newest == nil) || old != nil && *s.newest != *old {
			return &Failure{Kind: Conflict, Cause: errors.New("the generation is another")}
		}
		s.newest = &raised
		return nil
	})
}

func (s *fakeStore) Position(_ context.Context, origin string) (Position, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.origins[origin]
	if c == nil {
		return Position{}, false, nil
	}
	return c.position, true, nil
}

func (s *fakeStore) Claim(_ context.Context, origin string, old *Position, claimed Position) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writeLocked(func() error {
		if err := s.holdsLocked(origin, old); err != nil {
			return err
		}
		if s.origins[origin] == nil {
			s.origins[origin] = &cell{days: map[string]int64{}, sum: Summary{Destinations: map[string]int64{}}}
		}
		s.origins[origin].position = claimed
		return nil
	})
}

func (s *fakeStore) Destinations(_ context.Context, origin string) (map[string]int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.origins[origin].sum.Destinations), nil
}

func (s *fakeStore) Apply(ctx context.Context, u *Update) (uint64, error) {
	if s.gate != nil {
		s.gate(ctx, u)
	}
	if ctx.Err() != nil {
		return 0, &Failure{Kind: Unknown, Cause: ctx.Err()}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return 1, s.writeLocked(func() error {
		if err := s.holdsLocked(u.Origin, &u.Before); err != nil {
			return err
		}
		s.origins[u.Origin].apply(u)
		return nil
	})
}

func (c *cell) apply(u *Update) {
	first := len(c.applied) == 0
	c.position = u.After
	c.applied = append(c.applied, u.After.Line)
	maps.Copy(c.sum.Destinations, u.Destinations)
	if first || u.DelayMax > c.sum.DelayMax {
		c.sum.DelayMax = u.DelayMax
	}
	c.sum.DistanceSum += u.DistanceSum
	c.sum.Last = u.Last
	c.late = append(c.late, u.Late...)
	for _, d := range u.Delays {
		c.sum.DelayMean += float64(d) // the sum; Summary divides
		c.delays++
	}
	for _, d := range u.Days {
		c.days[d.Day] += d.Flights
	}
}

func (s *fakeStore) Origins(context.Context) iter.Seq2[string, error] {
	s.mu.Lock()
	names := slices.Collect(maps.Keys(s.origins))
	s.mu.Unlock()
	return func(yield func(string, error) bool) {
		for _, n := range names {
			if !yield(n, nil) {
				return
			}
		}
	}
}

func (s *fakeStore) Summary(_ context.Context, origin string) (Summary, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.origins[origin]
	out := c.sum
	out.Destinations = maps.Clone(c.sum.Destinations)
	out.Late = int64(len(c.late))
	if c.delays > 0 {
		out.DelayMean /= float64(c.delays)
	}
	return out, nil
}

func (s *fakeStore) Days(context.Context) iter.Seq2[DayCount, error] {
	return func(yield func(DayCount, error) bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for origin, c := range s.origins {
			for day, n := range c.days {
				if !yield(DayCount{Origin: origin, Day: day, Flights: n}, nil) {
					return
				}
			}
		}
	}
}
