package job

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// origin is the work for one origin. The queue is guarded by the run's lock;
// the rest belongs to the one goroutine that has the origin at a time.
type origin struct {
	name    string
	queue   []Row // guarded by run.mu
	busy    bool  // guarded by run.mu: a worker has it, or it is in run.ready
	claimed bool
	// position and counts are what the store holds after the last update.
	position Position
	counts   map[string]int64
}

// begin raises the generation (FJ3).
func (r *run) begin(ctx context.Context) error {
	return r.persist(ctx, "raising the generation", func() (done bool, err error) {
		old, ok, err := r.store.Generation(ctx)
		if err != nil {
			return false, err
		}
		if ok && old.Run == r.opts.Run { // an earlier attempt whose answer was lost
			r.generation = old.Number
			return true, nil
		}
		raised := Generation{Number: old.Number + 1, Run: r.opts.Run}
		if ok {
			err = r.store.Raise(ctx, &old, raised)
		} else {
			err = r.store.Raise(ctx, nil, raised)
		}
		r.generation = raised.Number
		return err == nil, err
	})
}

// open reads what updates write absolutely. Nobody else writes: the attempt has the
// turn (FJ8).
func (r *run) open(ctx context.Context, o *origin) error {
	err := r.persist(ctx, "origin "+o.name, func() (bool, error) {
		var err error
		o.counts, err = r.store.Destinations(ctx, o.name)
		return err == nil, beginAgain(err)
	})
	if err != nil {
		return fmt.Errorf("reading the flights by destination: %w", err)
	}
	o.position = Position{Run: r.opts.Run, Source: r.opts.SourceID}
	o.claimed = true
	return nil
}

// claim takes the origin over from whoever had it (FJ3) and reads what updates
// write absolutely (FJ4).
func (r *run) claim(ctx context.Context, o *origin) error {
	err := r.persist(ctx, "origin "+o.name, func() (done bool, err error) {
		old, ok, err := r.store.Position(ctx, o.name)
		if err != nil {
			return false, err
		}
		mine := Position{Run: r.opts.Run, Source: r.opts.SourceID, Line: old.Line, Generation: r.generation}
		switch {
		case ok && old.Source != mine.Source:
			return false, &OtherInput{Origin: o.name, Ours: mine.Source, Theirs: old.Source}
		case ok && old.Generation > mine.Generation:
			return false, &Fenced{Origin: o.name, Ours: o.position, Theirs: old}
		case ok && old == mine: // an earlier attempt whose answer was lost
			o.position = old
			return true, nil
		case ok:
			err = r.store.Claim(ctx, o.name, &old, mine)
		default:
			err = r.store.Claim(ctx, o.name, nil, mine)
		}
		o.position = mine
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("claiming the position: %w", err)
	}
	err = r.persist(ctx, "origin "+o.name, func() (bool, error) {
		var err error
		o.counts, err = r.store.Destinations(ctx, o.name)
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("reading the flights by destination: %w", err)
	}
	o.claimed = true
	return nil
}

// apply counts a batch of rows, all of them beyond the position.
func (r *run) apply(ctx context.Context, o *origin, rows []Row) error {
	u := o.update(rows)
	start := time.Now()
	var shard uint64
	unsure := false // whether an earlier attempt was applied is not known
	err := r.persist(ctx, "origin "+o.name, func() (done bool, err error) {
		if unsure {
			now, _, err := r.store.Position(ctx, o.name)
			if err != nil {
				return false, err
			}
			if now == u.After {
				return true, nil
			}
			if now != u.Before {
				return false, &Fenced{Origin: o.name, Ours: u.Before, Theirs: now}
			}
		}
		s, err := r.store.Apply(ctx, u)
		if err == nil {
			shard = s
			return true, nil
		}
		if r.attempt != nil {
			return false, beginAgain(err)
		}
		var f *Failure
		if errors.As(err, &f) && f.Kind != Transient {
			unsure = true
		}
		return false, err
	})
	if err != nil {
		return err
	}
	o.position = u.After
	for d, n := range u.Destinations {
		o.counts[d] = n
	}
	r.acknowledge(Ack{At: time.Now(), Waited: time.Since(start), Origin: o.name, Shard: shard, Rows: u.Rows})
	return nil
}

// update folds rows into one update of the origin.
func (o *origin) update(rows []Row) *Update {
	last := rows[len(rows)-1]
	u := &Update{
		Origin: o.name, Rows: len(rows), Before: o.position, After: o.position, Last: last.Flight,
		Destinations: make(map[string]int64), DelayMax: rows[0].DelayMinutes, Delays: make([]int64, 0, len(rows)),
	}
	u.After.Line = last.Line
	for _, row := range rows {
		n, ok := u.Destinations[row.Destination]
		if !ok {
			n = o.counts[row.Destination]
		}
		u.Destinations[row.Destination] = n + 1
		u.DelayMax = max(u.DelayMax, row.DelayMinutes)
		u.DistanceSum += row.DistanceMiles
		u.Delays = append(u.Delays, row.DelayMinutes)
		if row.DelayMinutes > LateMinutes {
			u.Late = append(u.Late, row.Flight)
		}
		u.addDay(row.Day())
	}
	return u
}

func (u *Update) addDay(day string) {
	for i := range u.Days {
		if u.Days[i].Day == day {
			u.Days[i].Flights++
			return
		}
	}
	u.Days = append(u.Days, DayCount{Origin: u.Origin, Day: day, Flights: 1})
}

// persist calls try until it is done, as long as its failures are ones that
// another attempt may mend, and for at most GiveUp.
func (r *run) persist(ctx context.Context, what string, try func() (done bool, err error)) error {
	deadline := time.Now().Add(r.opts.GiveUp)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		done, err := try()
		if done {
			return nil
		}
		var f *Failure
		if err != nil && !errors.As(err, &f) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: giving up after %v: %w", what, r.opts.GiveUp, err)
		}
		if !pause(ctx, wait/2+rand.N(wait)) {
			return ctx.Err()
		}
	}
}

// pause waits for d; false if the context ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
