package main

import (
	"context"
	"errors"
	"fmt"
	"iter"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/examples/flights/job"
)

// store binds the job to a cluster.
type store struct {
	client *keel.Client
	// sort says what an error means to the job; free updates require no position of
	// the origin.
	sort         func(error) error
	free         bool
	generation   *keel.Value[job.Generation]
	position     *keel.Value[job.Position]
	last         *keel.Value[job.Flight]
	late         *keel.List[job.Flight]
	destinations *keel.Map[string, int64]
	delayMax     *keel.Reducing[int64]
	distanceSum  *keel.Reducing[int64]
	delayMean    *keel.Aggregating[int64, float64]
	byDay        *keel.Reducing[int64]
}

// openStore declares the states; ones that exist and are equal are opened.
func openStore(ctx context.Context, c *keel.Client, keyspace string) (*store, error) {
	s := &store{client: c, sort: failure}
	k := c.Keyspace(keyspace, keel.String.Type())
	var name string
	var err error
	declare := func(state string, f func() error) {
		if err == nil {
			name, err = state, f()
		}
	}
	declare("generation", func() (err error) {
		s.generation, err = keel.DeclareValue(ctx, k, "generation", keel.JSON[job.Generation]())
		return err
	})
	declare("position", func() (err error) {
		s.position, err = keel.DeclareValue(ctx, k, "position", keel.JSON[job.Position]())
		return err
	})
	declare("last", func() (err error) {
		s.last, err = keel.DeclareValue(ctx, k, "last", keel.JSON[job.Flight]())
		return err
	})
	declare("late", func() (err error) {
		s.late, err = keel.DeclareList(ctx, k, "late", keel.JSON[job.Flight]())
		return err
	})
	declare("destinations", func() (err error) {
		s.destinations, err = keel.DeclareMap(ctx, k, "destinations", keel.String, keel.Int64)
		return err
	})
	declare("delay_max", func() (err error) {
		s.delayMax, err = keel.DeclareReducing(ctx, k, "delay_max", "max", keel.Int64)
		return err
	})
	declare("distance_sum", func() (err error) {
		s.distanceSum, err = keel.DeclareReducing(ctx, k, "distance_sum", "sum", keel.Int64)
		return err
	})
	declare("delay_mean", func() (err error) {
		s.delayMean, err = keel.DeclareAggregating(ctx, k, "delay_mean", "mean", keel.Int64, keel.Float64)
		return err
	})
	declare("by_day", func() (err error) {
		s.byDay, err = keel.DeclareReducing(ctx, k, "by_day", "sum", keel.Int64)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("declaring state %s/%s: %w", keyspace, name, err)
	}
	return s, nil
}

// failure sorts an error of the client into what the job can deal with.
func failure(err error) error {
	var e *keel.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	switch {
	case errors.Is(err, keel.ErrPrecondition):
		return &job.Failure{Kind: job.Conflict, Cause: err}
	case e.Outcome == keel.OutcomeUnknown:
		return &job.Failure{Kind: job.Unknown, Cause: err}
	case e.Outcome == keel.OutcomeNotApplied && (e.Retryable || errors.Is(err, keel.ErrDeadline) || errors.Is(err, keel.ErrSessionEnded)):
		return &job.Failure{Kind: job.Transient, Cause: err}
	}
	return err
}

// generationKey is the one key of the state generation.
const generationKey = "newest"

func (s *store) Generation(ctx context.Context) (job.Generation, bool, error) {
	g, ok, err := s.generation.Get(ctx, generationKey)
	return g, ok, s.sort(err)
}

func (s *store) Raise(ctx context.Context, old *job.Generation, raised job.Generation) error {
	was := s.generation.IfAbsent(generationKey)
	if old != nil {
		was = s.generation.IfEqual(generationKey, *old)
	}
	_, err := s.client.Batch().Add(s.generation.SetOp(generationKey, raised)).Require(was).Commit(ctx)
	return s.sort(err)
}

func (s *store) Position(ctx context.Context, origin string) (job.Position, bool, error) {
	p, ok, err := s.position.Get(ctx, origin)
	return p, ok, s.sort(err)
}

func (s *store) Claim(ctx context.Context, origin string, old *job.Position, claimed job.Position) error {
	b := s.client.Batch().Add(s.position.SetOp(origin, claimed)).Require(s.at(origin, old))
	_, err := b.Commit(ctx)
	return s.sort(err)
}

// at requires a position, or none.
func (s *store) at(origin string, p *job.Position) keel.Precondition {
	if p == nil {
		return s.position.IfAbsent(origin)
	}
	return s.position.IfEqual(origin, *p)
}

func (s *store) Destinations(ctx context.Context, origin string) (map[string]int64, error) {
	out := make(map[string]int64)
	for e, err := range s.destinations.Entries(ctx, origin) {
		if err != nil {
			return nil, s.sort(err)
		}
		out[e.Key] = e.Value
	}
	return out, nil
}

// Apply sends everything under the key of the origin, so it is one request to
// one shard, applied as a whole.
func (s *store) Apply(ctx context.Context, u *job.Update) (uint64, error) {
	var counts []keel.Entry[string, int64]
	for d, n := range u.Destinations {
		counts = append(counts, keel.Entry[string, int64]{Key: d, Value: n})
	}
	b := s.client.Batch().Atomic()
	if !s.free {
		b.Require(s.at(u.Origin, &u.Before))
	}
	b.Add(
		s.position.SetOp(u.Origin, u.After),
		s.last.SetOp(u.Origin, u.Last),
		s.destinations.PutAllOp(u.Origin, counts...),
		s.delayMax.AddOp(u.Origin, u.DelayMax),
		s.distanceSum.AddOp(u.Origin, u.DistanceSum),
		s.delayMean.AddAllOp(u.Origin, u.Delays...),
	)
	if len(u.Late) > 0 {
		b.Add(s.late.AddAllOp(u.Origin, u.Late...))
	}
	for _, d := range u.Days {
		b.Add(s.byDay.In(d.Day).AddOp(u.Origin, d.Flights))
	}
	r, err := b.Commit(ctx)
	if err != nil {
		return 0, s.sort(err)
	}
	return r.Parts[0].Shard, nil
}

func (s *store) Origins(ctx context.Context) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for k, err := range s.position.ListKeys(ctx, keel.ScanOptions{}) {
			if err != nil {
				yield("", s.sort(err))
				return
			}
			name, ok := k.Key.(string)
			if !ok {
				yield("", fmt.Errorf("a key of the state position is a %T, not a string", k.Key))
				return
			}
			if !yield(name, nil) {
				return
			}
		}
	}
}

func (s *store) Summary(ctx context.Context, origin string) (job.Summary, error) {
	var out job.Summary
	b := s.client.ReadBatch()
	last := s.last.Queue(b, origin)
	delayMax := s.delayMax.Queue(b, origin)
	distance := s.distanceSum.Queue(b, origin)
	mean := s.delayMean.Queue(b, origin)
	if err := b.Do(ctx); err != nil {
		return out, err
	}
	// Do has returned the error of each.
	l, _ := last.Get()
	m, _ := delayMax.Get()
	d, _ := distance.Get()
	a, _ := mean.Get()
	out.Last, out.DelayMax, out.DistanceSum, out.DelayMean = l.Value, m.Value, d.Value, a.Value
	for _, err := range s.late.All(ctx, origin) {
		if err != nil {
			return out, err
		}
		out.Late++
	}
	var err error
	out.Destinations, err = s.Destinations(ctx, origin)
	return out, err
}

func (s *store) Days(ctx context.Context) iter.Seq2[job.DayCount, error] {
	return func(yield func(job.DayCount, error) bool) {
		for it, err := range s.byDay.Scan(ctx, keel.ScanOptions{}) {
			if err != nil {
				yield(job.DayCount{}, err)
				return
			}
			origin, ok1 := it.Key.(string)
			flights, ok2 := it.Value.(int64)
			day, ok3 := it.Namespace.Bytes()
			if !ok1 || !ok2 || !ok3 {
				yield(job.DayCount{}, fmt.Errorf("state by_day holds key %v, value %v: not what this job writes", it.Key, it.Value))
				return
			}
			if !yield(job.DayCount{Origin: origin, Day: string(day), Flights: flights}, nil) {
				return
			}
		}
	}
}
