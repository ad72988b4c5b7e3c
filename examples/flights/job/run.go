package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Options are the settings of a run.
type Options struct {
	// Run names the run; no two runs share a name.
	Run string
	// SourceID is that of the input.
	SourceID string
	// Keyspace is that of the states; RunWithRollback keeps it with positions.
	Keyspace string
	// Workers bounds the updates on their way. Default 64.
	Workers int
	// BatchRows bounds the rows of one update. Default 200, at most 1000.
	BatchRows int
	// WindowRows bounds the rows that were read and are not yet counted.
	// Default 4096.
	WindowRows int
	// RowsPerSecond throttles the reading; 0 does not.
	RowsPerSecond float64
	// GiveUp ends the run when one call found no answer for so long. Default
	// 2 minutes.
	GiveUp time.Duration
	// OnBadLine, if set, is called for each bad line, and the run goes on.
	OnBadLine func(*BadLine)
	// OnAck, if set, is called after each update that was applied, by many
	// goroutines.
	OnAck func(Ack)
}

// Ack is one update that the cluster has acknowledged.
type Ack struct {
	At time.Time
	// Waited is how long the update was on its way, retries included.
	Waited time.Duration
	Origin string
	// Shard is 0 where a lost answer was resolved by reading the position.
	Shard uint64
	Rows  int
	// Total is the number of rows acknowledged in this run.
	Total int64
}

// EnsureDefaults fills in what is not set.
func (o *Options) EnsureDefaults() {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.Workers, 64)
	set(&o.BatchRows, 200)
	set(&o.WindowRows, 4096)
	if o.GiveUp == 0 {
		o.GiveUp = 2 * time.Minute
	}
}

// Validate returns all that is wrong with the options.
func (o *Options) Validate() error {
	var errs []error
	check := func(ok bool, text string) {
		if !ok {
			errs = append(errs, errors.New(text))
		}
	}
	check(o.Run != "", "run: a name is needed")
	check(o.Workers >= 1 && o.Workers <= 4096, "workers: from 1 to 4096")
	check(o.BatchRows >= 1 && o.BatchRows <= 1000, "batch: from 1 to 1000 rows")
	check(o.WindowRows >= o.BatchRows, "window: at least one batch")
	check(o.RowsPerSecond >= 0, "rate: not below 0")
	check(o.GiveUp > 0, "give-up: above 0")
	return errors.Join(errs...)
}

// Counters say how far a run is. They may be read at any time.
type Counters struct {
	// Read counts rows; Bad the lines that were no rows.
	Read, Bad atomic.Int64
	// Skipped are rows that an earlier run had counted.
	Skipped atomic.Int64
	// Acked are rows that this run has counted.
	Acked atomic.Int64
	// WaitedMost is the longest that one update was on its way.
	WaitedMost atomic.Int64
}

// run is one run, or one attempt of a run with rollback. Rows flow from the reading goroutine through the queues of
// the origins to the workers.
type run struct {
	opts  Options
	store Store
	count *Counters
	// generation orders this run among all; set before the workers start.
	generation int64
	slots      chan struct{} // one for each row of the window; taken by the reader, given back by workers
	// attempt is set where positions are kept by checkpoints (FJ7).
	attempt *attempt

	mu struct {
		sync.Mutex
		origins map[string]*origin
		ready   []*origin // have rows and no worker
		ended   bool      // no more rows will come
		wake    *sync.Cond
	}
}

// Run counts the rows of the input that the store has not counted yet. It
// returns when all are acknowledged, or with the first error, or when the
// context ends; then it can be repeated.
func Run(ctx context.Context, in *Reader, store Store, opts Options, count *Counters) error {
	opts.EnsureDefaults()
	opts.SourceID = in.SourceID()
	if err := opts.Validate(); err != nil {
		return err
	}
	r := newRun(opts, store, count)
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	if err := r.begin(ctx); err != nil {
		return err
	}
	if err := r.resume(ctx, fail); err != nil {
		return err
	}
	return r.drive(ctx, fail, func() error { return r.feed(ctx, in, r.claimedLines()) })
}

func newRun(opts Options, store Store, count *Counters) *run {
	r := &run{opts: opts, store: store, count: count, slots: make(chan struct{}, opts.WindowRows)}
	r.mu.origins = make(map[string]*origin)
	r.mu.wake = sync.NewCond(&r.mu)
	return r
}

// drive lets workers count what feed reads, and returns when all is counted.
func (r *run) drive(ctx context.Context, fail context.CancelCauseFunc, feed func() error) error {
	stop := context.AfterFunc(ctx, func() { r.end() })
	defer stop()
	wait := r.work(ctx, fail)
	if err := feed(); err != nil {
		fail(err)
	}
	r.end()
	wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// resume claims every origin that the store knows.
func (r *run) resume(ctx context.Context, fail context.CancelCauseFunc) error {
	for name, err := range r.store.Origins(ctx) {
		if err != nil {
			return fmt.Errorf("listing the origins: %w", err)
		}
		o := &origin{name: name, busy: true}
		r.mu.origins[name] = o
		r.mu.ready = append(r.mu.ready, o)
	}
	r.mu.ended = true // the workers leave when all are claimed
	r.work(ctx, fail)()
	r.mu.ended = false
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// work starts the workers. The function returned waits for them.
func (r *run) work(ctx context.Context, fail context.CancelCauseFunc) (wait func()) {
	var wg sync.WaitGroup
	for range r.opts.Workers {
		wg.Go(func() {
			for o, rows := r.next(); o != nil; o, rows = r.next() {
				if err := r.serve(ctx, o, rows); err != nil {
					fail(err)
					return
				}
				r.release(o)
			}
		})
	}
	return wg.Wait
}

// serve does one turn for an origin.
func (r *run) serve(ctx context.Context, o *origin, rows []Row) (err error) {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !o.claimed {
		if r.attempt != nil {
			err = r.open(ctx, o)
		} else {
			err = r.claim(ctx, o)
		}
		if err != nil {
			return err
		}
	}
	taken := len(rows)
	// After the answer: rows on their way are read and not yet counted (FJ5). Rows
	// that could not be counted keep their slots, so that no position covers them
	// (FJ7); the run ends.
	defer func() {
		if err != nil {
			return
		}
		for range taken {
			<-r.slots
		}
	}()
	for len(rows) > 0 && rows[0].Line <= o.position.Line {
		rows = rows[1:]
	}
	r.count.Skipped.Add(int64(taken - len(rows)))
	if len(rows) == 0 {
		return nil
	}
	return r.apply(ctx, o, rows)
}

// next waits for an origin with work and takes a batch of it; nil at the end.
func (r *run) next() (*origin, []Row) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.mu.ready) == 0 {
		if r.mu.ended {
			return nil, nil
		}
		r.mu.wake.Wait()
	}
	o := r.mu.ready[0]
	r.mu.ready = r.mu.ready[1:]
	n := min(len(o.queue), r.opts.BatchRows)
	rows := o.queue[:n:n]
	o.queue = o.queue[n:]
	return o, rows
}

// release gives an origin back after a turn.
func (r *run) release(o *origin) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.busy = len(o.queue) > 0; o.busy {
		r.mu.ready = append(r.mu.ready, o)
		r.mu.wake.Signal()
	} else {
		o.queue = nil
	}
}

// end tells the workers to leave when nothing is ready.
func (r *run) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.ended = true
	r.mu.wake.Broadcast()
}

// feed reads the input into the queues, without the rows that are counted: those of
// each origin up to a line, or of all up to the attempt's.
func (r *run) feed(ctx context.Context, in *Reader, counted map[string]int64) error {
	pace := pacer{perSecond: r.opts.RowsPerSecond}
	for {
		if err := r.attempt.pass(ctx); err != nil {
			return err
		}
		row, err := in.Next()
		var bad *BadLine
		switch {
		case err == io.EOF:
			return nil
		case errors.As(err, &bad) && r.opts.OnBadLine != nil:
			if !r.attempt.covers(bad.Line) {
				r.count.Bad.Add(1)
				r.opts.OnBadLine(bad)
			}
			continue
		case err != nil:
			return err
		}
		r.count.Read.Add(1)
		if row.Line <= counted[row.Origin] || r.attempt.covers(row.Line) {
			r.count.Skipped.Add(1)
			continue
		}
		if !pace.wait(ctx) {
			return ctx.Err()
		}
		select {
		case r.slots <- struct{}{}:
			r.enqueue(row)
			r.attempt.read(row.Line)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// claimedLines are the positions at the start: rows up to them need no window
// and no pace.
func (r *run) claimedLines() map[string]int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	lines := make(map[string]int64, len(r.mu.origins))
	for name, o := range r.mu.origins {
		lines[name] = o.position.Line
	}
	return lines
}

func (r *run) enqueue(row Row) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.mu.origins[row.Origin]
	if o == nil {
		o = &origin{name: row.Origin}
		r.mu.origins[row.Origin] = o
	}
	o.queue = append(o.queue, row)
	if !o.busy {
		o.busy = true
		r.mu.ready = append(r.mu.ready, o)
		r.mu.wake.Signal()
	}
}

func (r *run) acknowledge(a Ack) {
	a.Total = r.count.Acked.Add(int64(a.Rows))
	for most := r.count.WaitedMost.Load(); int64(a.Waited) > most; most = r.count.WaitedMost.Load() {
		if r.count.WaitedMost.CompareAndSwap(most, int64(a.Waited)) {
			break
		}
	}
	if r.opts.OnAck != nil {
		r.opts.OnAck(a)
	}
}

// pacer spreads rows evenly over time. After a stall it does not rush.
type pacer struct {
	perSecond float64
	due       time.Time
}

func (p *pacer) wait(ctx context.Context) bool {
	if p.perSecond <= 0 {
		return ctx.Err() == nil
	}
	now := time.Now()
	if p.due.Before(now.Add(-100 * time.Millisecond)) {
		p.due = now
	}
	ahead := p.due.Sub(now)
	p.due = p.due.Add(time.Duration(float64(time.Second) / p.perSecond))
	if ahead < time.Millisecond { // timers are not finer than this
		return ctx.Err() == nil
	}
	return pause(ctx, ahead)
}
