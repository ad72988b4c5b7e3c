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

// RollbackOptions are the settings of a run with rollback besides Options.
type RollbackOptions struct {
	// Open opens the input at its beginning; it is called for each attempt.
	Open func() (*Reader, io.Closer, error)
	// CheckpointEvery is after how long without a checkpoint the job takes one; 0
	// leaves it to others, but for the first and the last.
	CheckpointEvery time.Duration
	// Grace is how long a run that has lost its session leaves the turn to the run
	// that has taken it over, if one has. Default 2 seconds.
	Grace time.Duration
	// OnNote, if set, is told what happens, by one goroutine at a time.
	OnNote func(text string)
}

// askPause is between two attempts to take a checkpoint that is needed.
const askPause = 500 * time.Millisecond

// rollbackRun is a run with rollback: attempts, of which each begins with a state
// that holds the rows up to a position, and nothing else.
type rollbackRun struct {
	Options
	RollbackOptions
	cluster Cluster
	count   *Counters
	mu      sync.Mutex // of OnNote
	// progressed says that the last attempt has completed a checkpoint.
	progressed atomic.Bool
	registered bool // this run has registered the participant (FJ10)
}

// RunWithRollback counts the rows of the input exactly once, by nothing but
// checkpoints: its position in the source is kept with them, and after a failure the
// cluster is taken back to the last one and the source rewound (FJ7). It returns when
// all rows are in a complete checkpoint, or with an error that no other attempt mends.
func RunWithRollback(ctx context.Context, cluster Cluster, opts Options, ro RollbackOptions, count *Counters) error {
	opts.EnsureDefaults()
	if ro.Grace == 0 {
		ro.Grace = 2 * time.Second
	}
	w := &rollbackRun{Options: opts, RollbackOptions: ro, cluster: cluster, count: count}
	since := time.Now()
	for n := 1; ; n++ {
		w.progressed.Store(false)
		err := w.once(ctx, n)
		var next *again
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !errors.As(err, &next) && kindOf(err) == 0:
			return err
		}
		if w.progressed.Load() || count.Acked.Load() > 0 {
			since = time.Now()
		} else if time.Since(since) > w.GiveUp {
			return fmt.Errorf("giving up after %v: %w", w.GiveUp, err)
		}
		w.note("beginning again: " + err.Error())
		var back *takenBack
		if !errors.As(err, &back) && !pause(ctx, w.Grace) {
			return context.Cause(ctx)
		}
	}
}

func (w *rollbackRun) note(text string) {
	if w.OnNote == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.OnNote(text)
}

// takenBack ends an attempt that has taken the cluster back.
type takenBack struct{ checkpoint uint64 }

func (e *takenBack) Error() string {
	return fmt.Sprintf("the cluster was rolled back to checkpoint %d", e.checkpoint)
}

// once is one attempt. A Failure, or again, asks for another.
func (w *rollbackRun) once(ctx context.Context, n int) error {
	in, file, err := w.Open()
	if err != nil {
		return err
	}
	defer file.Close()
	w.SourceID = in.SourceID()
	if err := w.Validate(); err != nil {
		return err
	}
	s, err := w.cluster.Begin(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	for _, c := range []*atomic.Int64{&w.count.Read, &w.count.Bad, &w.count.Skipped, &w.count.Acked} {
		c.Store(0)
	}
	a, err := w.begin(ctx, s, n)
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer fail(nil)
	wg.Go(func() { a.watch(ctx, fail) })
	wg.Go(func() { a.take(ctx, fail) })
	return a.run(ctx, fail, in)
}

// begin finds out where the attempt begins. What another attempt has begun is taken
// back (FJ8).
func (w *rollbackRun) begin(ctx context.Context, s Session, n int) (*attempt, error) {
	incarnation, err := s.Incarnation(ctx)
	if err != nil {
		return nil, err
	}
	turn, taken, err := s.Turn(ctx)
	if err != nil {
		return nil, err
	}
	a := &attempt{w: w, session: s, started: time.Now(), now: Turn{Incarnation: incarnation, Attempt: fmt.Sprintf("%s-%d", w.Run, n), Begun: true},
		barriers: make(chan barrier), asks: make(chan struct{}, 1), completed: make(chan int64, 1)}
	if taken {
		a.old = &turn
	}
	if w.registered { // else the one that is registered is whoever this run takes over from
		replaced, err := s.Replaced(ctx)
		if err != nil {
			return nil, err
		}
		if replaced {
			return nil, &Replaced{errors.New("it has registered the participant")}
		}
	}
	// Before the rollback: a checkpoint that waits for one who is gone fails by this.
	if a.participant, err = s.Participate(ctx); err != nil {
		return nil, err
	}
	w.registered = true
	last := a.participant.Last()
	if last != nil {
		if _, err := w.place(last); err != nil {
			return nil, err
		}
	}
	if taken && turn.Incarnation == incarnation && turn.Begun {
		if last == nil {
			return nil, &NoPosition{w.Keyspace}
		}
		if err := w.cluster.RollBack(ctx, last.Checkpoint); err != nil {
			return nil, err
		}
		return nil, &again{&takenBack{last.Checkpoint}}
	}
	a.secured = last != nil
	return a, a.rewind(ctx)
}

// barrier is a checkpoint that waits for the position.
type barrier struct {
	number uint64
	acked  chan int64 // the line that was given, -1 for none
}

// attempt is one attempt of a run with rollback.
type attempt struct {
	w           *rollbackRun
	session     Session
	participant Participant
	slots       chan struct{} // of the run
	old         *Turn
	now         Turn
	from        int64 // rows up to this line are in the state
	line        int64 // that was read last; of the goroutine that reads
	secured     bool  // there is a checkpoint with the position
	barriers    chan barrier
	asks        chan struct{}
	completed   chan int64 // the line in the newest complete checkpoint
	started     time.Time
	seen        atomic.Int64 // when the last checkpoint came, ns since started
}

// rewind finds the position that belongs to the state.
func (a *attempt) rewind(ctx context.Context) error {
	if r := a.participant.Restored(); r != nil {
		p, err := a.w.place(r)
		a.from, a.line = p.Line, p.Line
		if err == nil && p.Line > 0 {
			a.w.note(fmt.Sprintf("going on behind line %d, the position in checkpoint %d", p.Line, r.Checkpoint))
		}
		return err
	}
	for _, err := range a.session.Origins(ctx) {
		if err != nil {
			return err
		}
		return &NoPosition{a.w.Keyspace}
	}
	return nil
}

// run counts the rows behind the position.
func (a *attempt) run(ctx context.Context, fail context.CancelCauseFunc, in *Reader) error {
	opts := a.w.Options
	opts.Run = a.now.Attempt
	r := newRun(opts, a.session, a.w.count)
	r.attempt, a.slots = a, r.slots
	if !a.secured { // FJ9
		if err := a.secure(ctx); err != nil {
			return err
		}
	}
	if err := a.session.Take(ctx, a.old, a.now); err != nil {
		return beginAgain(err)
	}
	return r.drive(ctx, fail, func() error {
		if err := r.feed(ctx, in, nil); err != nil {
			return err
		}
		return a.secure(ctx)
	})
}

// The three are called by feed; a run without rollback has no attempt.

func (a *attempt) covers(line int64) bool { return a != nil && line <= a.from }

func (a *attempt) read(line int64) {
	if a != nil {
		a.line = line
	}
}

// pass gives a checkpoint that waits its position.
func (a *attempt) pass(ctx context.Context) error {
	if a == nil {
		return nil
	}
	select {
	case b := <-a.barriers:
		return a.answer(ctx, b)
	default:
		return nil
	}
}

// answer waits until every row that was read is counted, and gives the position
// (FJ7). The reader stands meanwhile.
func (a *attempt) answer(ctx context.Context, b barrier) error {
	taken := 0
	defer func() {
		for range taken {
			<-a.slots
		}
	}()
	for taken < cap(a.slots) {
		select {
		case a.slots <- struct{}{}:
			taken++
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if ctx.Err() != nil { // a row was not counted
		return context.Cause(ctx)
	}
	err := a.participant.Ack(ctx, b.number, Place{Keyspace: a.w.Keyspace, Source: a.w.SourceID, Line: a.line}.encode())
	switch {
	case err == nil:
		b.acked <- a.line
	case kindOf(err) == NotTaken:
		b.acked <- -1
		a.w.note(fmt.Sprintf("checkpoint %d: %v", b.number, err))
	default: // the position may be in it, and what is written now too
		return &again{fmt.Errorf("giving checkpoint %d the position: %s", b.number, err)}
	}
	return nil
}

// secure returns when a checkpoint with the present position is complete. It is
// called by the goroutine that reads.
func (a *attempt) secure(ctx context.Context) error {
	deadline := time.NewTimer(a.w.GiveUp)
	defer deadline.Stop()
	tick := time.NewTicker(askPause)
	defer tick.Stop()
	for {
		select {
		case a.asks <- struct{}{}:
		default:
		}
		select {
		case b := <-a.barriers:
			if err := a.answer(ctx, b); err != nil {
				return err
			}
		case line := <-a.completed:
			if line >= a.line {
				return nil
			}
		case <-tick.C:
		case <-deadline.C:
			return fmt.Errorf("no checkpoint was completed in %v; see keelctl checkpoint list", a.w.GiveUp)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// watch hands checkpoints that wait to the reader, and tells it of complete ones.
func (a *attempt) watch(ctx context.Context, fail context.CancelCauseFunc) {
	for {
		number, err := a.participant.Next(ctx)
		if err != nil {
			fail(&again{fmt.Errorf("waiting for checkpoints: %s", err)})
			return
		}
		a.seen.Store(int64(time.Since(a.started)))
		b := barrier{number: number, acked: make(chan int64, 1)}
		select {
		case a.barriers <- b:
		case <-ctx.Done():
			return
		}
		var line int64
		select {
		case line = <-b.acked:
		case <-ctx.Done():
			return
		}
		if line < 0 {
			continue
		}
		if err := a.participant.Done(ctx, number); err != nil {
			if ctx.Err() == nil {
				a.w.note(fmt.Sprintf("checkpoint %d: %v", number, err))
			}
			continue
		}
		a.w.progressed.Store(true)
		select { // only the newest counts
		case <-a.completed:
		default:
		}
		a.completed <- line
	}
}

// take takes checkpoints: when one is needed, and when none has come for a while.
func (a *attempt) take(ctx context.Context, fail context.CancelCauseFunc) {
	var due <-chan time.Time
	if every := a.w.CheckpointEvery; every > 0 {
		t := time.NewTicker(every)
		defer t.Stop()
		due = t.C
	}
	for {
		select {
		case <-a.asks:
		case <-due:
			if seen := a.seen.Load(); seen > 0 && time.Since(a.started)-time.Duration(seen) < a.w.CheckpointEvery/2 {
				continue // another's, or the cluster's own
			}
		case <-ctx.Done():
			return
		}
		err := a.session.Checkpoint(ctx)
		switch {
		case err == nil || ctx.Err() != nil:
		case kindOf(err) == 0:
			fail(fmt.Errorf("taking a checkpoint: %w", err))
			return
		case kindOf(err) == Lost:
			fail(&again{fmt.Errorf("taking a checkpoint: %s", err)})
			return
		default:
			a.w.note(fmt.Sprintf("taking a checkpoint: %v", err))
			if !pause(ctx, askPause) {
				return
			}
		}
	}
}
