package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// point is a checkpoint of the fake cluster.
type point struct {
	number  uint64
	origins map[string]*cell
	turn    *Turn
	given   []byte // nil for none
	// state is 0 while it waits for the position, 1 complete, -1 failed.
	state  int
	holder *fakeSession
	era    uint64
}

// fakeCluster is a cluster with checkpoints and rollbacks in memory.
type fakeCluster struct {
	*fakeStore  // its lock guards the rest
	turn        *Turn
	incarnation uint64
	holder      *fakeSession // that gives positions
	points      []*point
	restored    *point
	changed     chan struct{} // closed at a change, then replaced
	// trouble is the probability that a call has an end of its own; shift is added to
	// positions that are given.
	trouble float64
	shift   int64
}

func newFakeCluster(seed uint64, trouble float64) *fakeCluster {
	return &fakeCluster{fakeStore: newFake(seed, 0), changed: make(chan struct{}), trouble: trouble}
}

func copyOf(origins map[string]*cell) map[string]*cell {
	out := make(map[string]*cell)
	for name, c := range origins {
		n := *c
		n.sum.Destinations, n.days = maps.Clone(c.sum.Destinations), maps.Clone(c.days)
		n.late, n.applied = slices.Clone(c.late), slices.Clone(c.applied)
		out[name] = &n
	}
	return out
}

func (c *fakeCluster) changeLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

func failed(k Kind) error { return &Failure{Kind: k, Cause: errNet} }

// endsLocked draws whether the session of a call ends now.
func (c *fakeCluster) endsLocked(s *fakeSession) error {
	if s.alive && c.rng.Float64() < c.trouble/10 {
		s.alive = false
		c.changeLocked()
	}
	if !s.alive {
		return failed(Lost)
	}
	return nil
}

func (c *fakeCluster) drawLocked(kinds ...Kind) error {
	if c.rng.Float64() < c.trouble {
		return failed(kinds[c.rng.IntN(len(kinds))])
	}
	return nil
}

func (c *fakeCluster) Begin(ctx context.Context) (Session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.drawLocked(Transient); err != nil {
		return nil, err
	}
	s := &fakeSession{fakeCluster: c, alive: true, ctx: ctx, era: c.incarnation}
	return s, nil
}

// lastLocked is the newest complete checkpoint that has a position and belongs to the
// present incarnation.
func (c *fakeCluster) lastLocked() *point {
	for _, p := range slices.Backward(c.points) {
		if p.state == 1 && p.given != nil && (p.era == c.incarnation || p == c.restored) {
			return p
		}
	}
	return nil
}

func (c *fakeCluster) RollBack(_ context.Context, number uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.drawLocked(NotTaken, Transient); err != nil {
		return err
	}
	if c.settleLocked() {
		return failed(NotTaken)
	}
	c.rollBackLocked(c.points[number-1])
	return c.drawLocked(Unknown)
}

// settleLocked fails checkpoints whose participant is gone, and says whether one still
// waits.
func (c *fakeCluster) settleLocked() (waits bool) {
	for _, p := range c.points {
		if h := p.holder; p.state == 0 && (!h.alive || h != c.holder || h.era != c.incarnation) {
			p.state = -1
			c.changeLocked()
		}
		waits = waits || p.state == 0
	}
	return waits
}

func (c *fakeCluster) rollBackLocked(p *point) {
	c.origins, c.turn, c.restored = copyOf(p.origins), p.turn, p
	c.incarnation++ // ends all sessions
	c.changeLocked()
}

type fakeSession struct {
	*fakeCluster
	alive bool
	ctx   context.Context // a run whose context has ended was killed
	era   uint64
}

// guard locks, and fails if the session has ended.
func (s *fakeSession) guard(kinds ...Kind) error {
	s.mu.Lock()
	if s.era != s.incarnation {
		s.alive = false
	}
	if err := s.endsLocked(s); err != nil || len(kinds) == 0 {
		return err
	}
	return s.drawLocked(kinds...)
}

func (s *fakeSession) Turn(context.Context) (Turn, bool, error) {
	defer s.mu.Unlock()
	if err := s.guard(Transient); err != nil || s.turn == nil {
		return Turn{}, false, err
	}
	return *s.turn, true, nil
}

func (s *fakeSession) Take(_ context.Context, old *Turn, now Turn) error {
	defer s.mu.Unlock()
	err := s.guard(Transient, Unknown)
	if err != nil && (kindOf(err) != Unknown || s.rng.IntN(2) == 0) {
		return err
	}
	if (old == nil) != (s.turn == nil) || old != nil && *old != *s.turn {
		return failed(Conflict)
	}
	s.turn = &now
	return err
}

func (s *fakeSession) Apply(_ context.Context, u *Update) (uint64, error) {
	defer s.mu.Unlock()
	err := s.guard(Transient, Transient, Transient, Unknown)
	if err != nil && (kindOf(err) != Unknown || s.rng.IntN(2) == 0) {
		return 0, err
	}
	if s.origins[u.Origin] == nil {
		s.origins[u.Origin] = &cell{days: map[string]int64{}, sum: Summary{Destinations: map[string]int64{}}}
	}
	s.origins[u.Origin].apply(u)
	return 1, err
}

func (s *fakeSession) Destinations(_ context.Context, origin string) (map[string]int64, error) {
	defer s.mu.Unlock()
	if err := s.guard(Transient); err != nil || s.origins[origin] == nil {
		return map[string]int64{}, err
	}
	return maps.Clone(s.origins[origin].sum.Destinations), nil
}

func (s *fakeSession) Incarnation(context.Context) (uint64, error) {
	defer s.mu.Unlock()
	return s.era, s.guard(Transient)
}

func (s *fakeSession) Replaced(context.Context) (bool, error) {
	defer s.mu.Unlock()
	err := s.guard(Transient)
	h := s.holder
	return h != nil && h.alive && h.era == s.incarnation && h.ctx != s.ctx, err
}

func (s *fakeSession) Participate(context.Context) (Participant, error) {
	defer s.mu.Unlock()
	if err := s.guard(Transient); err != nil {
		return nil, err
	}
	s.holder = s
	s.changeLocked()
	p := &fakeParticipant{fakeSession: s}
	given := func(p *point) *Given {
		if p == nil || p.given == nil {
			return nil
		}
		return &Given{Checkpoint: p.number, Position: p.given}
	}
	p.last, p.restored = given(s.lastLocked()), given(s.restored)
	return p, nil
}

// Checkpoint takes a checkpoint, which waits for the holder as long as it lives.
func (s *fakeSession) Checkpoint(ctx context.Context) error {
	if err := s.guard(Transient, NotTaken); err != nil {
		s.mu.Unlock()
		return err
	}
	if s.settleLocked() { // one at a time
		s.mu.Unlock()
		return failed(NotTaken)
	}
	p := &point{number: uint64(len(s.points) + 1), era: s.incarnation}
	if h := s.holder; h != nil && h.alive && h.era == s.incarnation {
		p.holder = h
	} else {
		s.completeLocked(p)
	}
	s.points = append(s.points, p)
	s.changeLocked()
	s.mu.Unlock()
	return s.wait(ctx, func() (bool, error) {
		if s.settleLocked(); p.state < 0 {
			return true, failed(NotTaken)
		}
		return p.state > 0, nil
	})
}

func (c *fakeCluster) completeLocked(p *point) {
	p.origins, p.turn, p.state = copyOf(c.origins), c.turn, 1
	c.changeLocked()
}

// wait calls look under the lock, at once and after each change.
func (c *fakeCluster) wait(ctx context.Context, look func() (bool, error)) error {
	for {
		c.mu.Lock()
		done, err := look()
		changed := c.changed
		c.mu.Unlock()
		if done || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return failed(Transient)
		}
	}
}

func (s *fakeSession) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() == nil {
		s.alive = false
		s.changeLocked()
	}
}

type fakeParticipant struct {
	*fakeSession
	last, restored *Given
	after          uint64
}

func (p *fakeParticipant) Last() *Given     { return p.last }
func (p *fakeParticipant) Restored() *Given { return p.restored }

func (p *fakeParticipant) lostLocked() error {
	if !p.alive || p.era != p.incarnation || p.holder != p.fakeSession {
		return failed(Lost)
	}
	return nil
}

func (p *fakeParticipant) Next(ctx context.Context) (number uint64, err error) {
	err = p.wait(ctx, func() (bool, error) {
		for _, c := range p.points {
			if c.state == 0 && c.holder == p.fakeSession && c.number > p.after {
				number = c.number
				return true, nil
			}
		}
		return false, p.lostLocked()
	})
	p.after = max(p.after, number)
	return number, err
}

func (p *fakeParticipant) Ack(_ context.Context, number uint64, position []byte) error {
	defer p.mu.Unlock()
	if err := p.guard(NotTaken); err != nil {
		if c := p.points[number-1]; c.state == 0 {
			c.state = -1
			p.changeLocked()
		}
		return err
	}
	c := p.points[number-1]
	if err := p.lostLocked(); err != nil || c.state != 0 {
		return errors.Join(err, failed(NotTaken))
	}
	var place Place
	o := Options{Keyspace: "k"}
	if at, err := o.place(&Given{Position: position}); kindOf(err) == 0 {
		place = at
	}
	if place.Line > 1 {
		place.Line += p.shift
	}
	c.given = place.encode()
	p.completeLocked(c)
	return nil
}

func (p *fakeParticipant) Done(context.Context, uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.drawLocked(Transient)
}

// count runs the job with rollback on a fake cluster.
func (c *fakeCluster) count(ctx context.Context, text, name string, onAck func(Ack), notes func(string)) error {
	open := func() (*Reader, io.Closer, error) {
		in, err := NewReader(strings.NewReader(text))
		return in, io.NopCloser(nil), err
	}
	var n Counters
	return RunWithRollback(ctx, c, Options{Run: name, Keyspace: "k", Workers: 3, BatchRows: 4, WindowRows: 12, OnAck: onAck, RowsPerSecond: 400},
		RollbackOptions{Open: open, CheckpointEvery: 20 * time.Millisecond, OnNote: notes}, &n)
}

// FJ7 to FJ10: whatever fails, is killed, or is rolled back by somebody else, and
// though a run goes on that was thought to be dead, the state is that of one pass.
func TestRollbackAndRewindCountExactlyOnce(t *testing.T) {
	var rollbacks, replaced atomic.Int64
	check := func(r *rapid.T) {
		text := flightsOf(r)
		seed, trouble := rapid.Uint64().Draw(r, "seed"), rapid.SampledFrom([]float64{0, 0.02, 0.1}).Draw(r, "trouble")
		kills := rapid.SliceOfN(rapid.Int64Range(1, 100), 0, 3).Draw(r, "rows before each kill")
		operator := rapid.Int64Range(0, 60).Draw(r, "rows before the operator's rollback")
		zombie := rapid.Bool().Draw(r, "zombie")
		var errs []error
		var got [2]string
		synctest.Test(t, func(t *testing.T) {
			c := newFakeCluster(seed, trouble)
			rows := atomic.Int64{}
			onAck := func(a Ack) {
				if rows.Add(int64(a.Rows)) >= operator && operator > 0 {
					c.mu.Lock()
					if p := c.lastLocked(); p != nil && rows.Swap(-1<<40) >= 0 {
						c.rollBackLocked(p)
					}
					c.mu.Unlock()
				}
			}
			ends := make(chan error, 1)
			for i, at := range kills {
				ctx, kill := context.WithCancel(t.Context())
				err := c.count(ctx, text, fmt.Sprint("killed", i), func(a Ack) {
					if onAck(a); a.Total >= at {
						kill()
					}
				}, nil)
				if kill(); err != nil && !errors.Is(err, context.Canceled) {
					errs = append(errs, err)
				}
			}
			if zombie {
				half := make(chan struct{})
				once := atomic.Bool{}
				go func() {
					ends <- c.count(context.WithValue(t.Context(), errNet, 1), text, "zombie", func(a Ack) {
						if a.Total > 20 && once.CompareAndSwap(false, true) {
							close(half)
						}
					}, nil)
					if once.CompareAndSwap(false, true) {
						close(half)
					}
				}()
				<-half
			}
			last, stop := context.WithCancel(t.Context())
			err := c.count(last, text, "last", onAck, nil)
			stop()
			if zombie {
				var r *Replaced
				if end := <-ends; errors.As(end, &r) {
					replaced.Add(1)
				} else if end != nil {
					errs = append(errs, end)
				}
				if errors.As(err, &r) { // the two changed places
					err = nil
				}
			}
			errs = append(errs, err)
			rollbacks.Add(int64(c.incarnation))
			got = [2]string{reportOf(t, c), daysOf(t, c)}
		})
		if err := errors.Join(errs...); err != nil {
			r.Fatal(err)
		}
		report, days := singlePass(t, text)
		if got[0] != report || got[1] != days {
			r.Fatalf("report\n%s\nwant\n%s\ndays\n%s\nwant\n%s", got[0], report, got[1], days)
		}
	}
	for range 8 { // few runs are replaced, and in one of seven times none
		if rapid.Check(t, check); t.Failed() || rollbacks.Load() > 0 && replaced.Load() > 0 {
			break
		}
	}
	if rollbacks.Load() == 0 || replaced.Load() == 0 {
		t.Errorf("%d rollbacks, %d runs were replaced", rollbacks.Load(), replaced.Load())
	}
}

// A position that is wrong by one row is told from the right one.
func TestAWrongPositionGivesAnotherAnswer(t *testing.T) {
	text := header
	for i := range 300 {
		text += fmt.Sprintf("2001/01/%02d 10:00,%d,%d,O%d,D%d\n", 1+i/20, i%90, 100+i, i%4, i%3)
	}
	want, _ := singlePass(t, text)
	for _, shift := range []int64{0, -1, 1} {
		synctest.Test(t, func(t *testing.T) {
			c := newFakeCluster(1, 0)
			c.shift = shift
			ctx, kill := context.WithCancel(t.Context())
			if err := c.count(ctx, text, "killed", func(a Ack) {
				if a.Total > 150 {
					kill()
				}
			}, nil); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			kill()
			if err := c.count(t.Context(), text, "last", nil, nil); err != nil {
				t.Fatal(err)
			}
			if same := reportOf(t, c) == want; same != (shift == 0) {
				t.Errorf("wrong by %d: the answer is right: %t", shift, same)
			}
		})
	}
}

// State whose position nobody knows is refused, and so is a position of another job.
func TestStateWithoutItsPositionIsRefused(t *testing.T) {
	text := header + strings.Repeat("2001/01/01 00:47,66,1750,DTW,LAS\n", 30)
	given := func(position []byte) func(*fakeCluster) {
		return func(c *fakeCluster) {
			for _, p := range c.points {
				p.given = position
			}
		}
	}
	for name, tc := range map[string]struct {
		change func(c *fakeCluster)
		want   string
	}{
		"counted otherwise": {func(c *fakeCluster) { c.points, c.turn, c.restored = nil, nil, nil }, "no checkpoint that is kept has the position"},
		"removed":           {given(nil), "no checkpoint that is kept has the position"},
		"another keyspace":  {given(Place{Keyspace: "other"}.encode()), "one of keyspace other"},
		"another input":     {given(Place{Keyspace: "k", Source: "x"}.encode()), "another input"},
		"no position":       {given([]byte("7")), "no position of this job"},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newFakeCluster(1, 0)
			if err := c.count(t.Context(), text, "first", nil, nil); err != nil {
				t.Fatal(err)
			}
			tc.change(c)
			before := reportOf(t, c)
			err := c.count(t.Context(), text, "second", nil, nil)
			if err == nil || !strings.Contains(err.Error(), tc.want) || reportOf(t, c) != before {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}

// A run that finds no checkpoint possible writes nothing, and gives up.
func TestNothingIsWrittenBeforeTheFirstCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(1, 0)
		c.rng = rand.New(rand.NewPCG(1, 2))
		c.trouble = 1 // every call that may fail does
		err := c.count(t.Context(), header+"2001/01/01 00:47,66,1750,DTW,LAS\n", "first", nil, nil)
		if err == nil || !strings.Contains(err.Error(), "giving up after 2m0s") || len(c.origins) > 0 {
			t.Errorf("%v, %d origins", err, len(c.origins))
		}
	})
}
