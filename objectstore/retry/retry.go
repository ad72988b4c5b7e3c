package retry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Options say how often and when a call is repeated. Zero fields have defaults.
type Options struct {
	// Attempts of one call, the first included. Default 6.
	Attempts int
	// First is the longest pause before the first repeat; it doubles with each,
	// up to Longest. A pause is drawn evenly between half of it and all of it.
	// Defaults 100 ms and 10 s.
	First, Longest time.Duration
	// Budget is shared with other stores. Default: one of its own.
	Budget *Budget
	// Repeated is told of every repeat, for metrics and logs; may be nil.
	Repeated func(op string, attempt int, err error)
}

func (o *Options) ensureDefaults() {
	if o.Attempts <= 0 {
		o.Attempts = 6
	}
	if o.First <= 0 {
		o.First = 100 * time.Millisecond
	}
	if o.Longest <= 0 {
		o.Longest = 10 * time.Second
	}
	if o.Budget == nil {
		o.Budget = DefaultBudget()
	}
}

// Store repeats the calls of another one. It implements objectstore.Store.
type Store struct {
	inner objectstore.Store
	o     Options
}

var _ objectstore.Store = (*Store)(nil)

// Wrap returns a store that repeats the calls of inner.
func Wrap(inner objectstore.Store, o Options) *Store {
	o.ensureDefaults()
	return &Store{inner: inner, o: o}
}

// call is the state of one call's attempts.
type call struct {
	s       *Store
	op      string
	attempt int
}

// again says whether a failed attempt is to be repeated, after its pause.
func (c *call) again(ctx context.Context, err error) bool {
	c.attempt++
	if !errors.Is(err, base.ErrObjectStore) || c.attempt >= c.s.o.Attempts || ctx.Err() != nil || !c.s.o.Budget.take() {
		return false
	}
	if c.s.o.Repeated != nil {
		c.s.o.Repeated(c.op, c.attempt, err)
	}
	t := time.NewTimer(c.s.pause(c.attempt, err))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// pause is the time before the repeat of so many failed attempts (OT5).
func (s *Store) pause(failed int, err error) time.Duration {
	d := s.o.First
	for i := 1; i < failed && d < s.o.Longest; i++ {
		d *= 2
	}
	d = min(d, s.o.Longest)
	d = d/2 + rand.N(d/2+1)
	var detail *base.Error
	if errors.As(err, &detail) && detail.RetryAfter > d {
		d = detail.RetryAfter + rand.N(d+1)
	}
	return d
}

// do repeats one call that has no state of its own.
func (s *Store) do(ctx context.Context, op string, attempt func() error) error {
	c := call{s: s, op: op}
	for {
		err := attempt()
		if err == nil {
			s.o.Budget.success()
			return nil
		}
		if !c.again(ctx, err) {
			return c.last(err)
		}
	}
}

// last is the error of a call that is given up.
func (c *call) last(err error) error {
	if c.attempt > 1 {
		return fmt.Errorf("%w (after %d attempts)", err, c.attempt)
	}
	return err
}

// Put implements objectstore.Store.
func (s *Store) Put(ctx context.Context, key string, body objectstore.Body) error {
	tried := false
	return s.do(ctx, "put", func() error {
		err := s.inner.Put(ctx, key, body)
		if tried && errors.Is(err, base.ErrConflict) {
			return s.compare(ctx, key, body, err)
		}
		tried = true
		return err
	})
}

// compare makes a conflict with the call's own object a success, and one with nothing
// a reason to try again (OT2).
func (s *Store) compare(ctx context.Context, key string, body objectstore.Body, conflict error) error {
	o, err := s.inner.Stat(ctx, key)
	if errors.Is(err, base.ErrNotFound) {
		return fmt.Errorf("%w: it refused object %s for one that is not there", base.ErrObjectStore, key)
	}
	if err != nil {
		return err
	}
	if o.Size != body.Size {
		return conflict
	}
	r, err := s.inner.Get(ctx, key, 0, body.Size)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(sum, r)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if !bytes.Equal(sum.Sum(nil), body.SHA256[:]) {
		return conflict
	}
	return nil
}

// Stat implements objectstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (o objectstore.Object, err error) {
	err = s.do(ctx, "stat", func() error {
		o, err = s.inner.Stat(ctx, key)
		return err
	})
	return o, err
}

// List implements objectstore.Store. A list that breaks off goes on after the last
// object that it gave.
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	return func(yield func(objectstore.Object, error) bool) {
		c := call{s: s, op: "list"}
		for {
			var broken error
			for o, err := range s.inner.List(ctx, prefix, after) {
				if err != nil {
					broken = err
					break
				}
				after = o.Key
				if !yield(o, nil) {
					return
				}
			}
			if broken == nil {
				s.o.Budget.success()
				return
			}
			if !c.again(ctx, broken) {
				yield(objectstore.Object{}, c.last(broken))
				return
			}
		}
	}
}

// Delete implements objectstore.Store.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	return s.do(ctx, "delete", func() error { return s.inner.Delete(ctx, keys...) })
}

// Sweep implements objectstore.Store; it counts what the last attempt removed and
// those before it.
func (s *Store) Sweep(ctx context.Context, prefix string, before time.Time) (int, error) {
	all := 0
	err := s.do(ctx, "sweep", func() error {
		n, err := s.inner.Sweep(ctx, prefix, before)
		all += n
		return err
	})
	return all, err
}

// Close implements objectstore.Store.
func (s *Store) Close() error { return s.inner.Close() }
