// Package fault wraps an object store so that it fails as stores do: errors
// before and after the effect, delays, bodies that are cut, grow, stall or lie,
// lists that break off. For tests and chaos runs.
//
// It must not know which store it wraps.
//
// Concurrency: as package objectstore says; the hook is called by many
// goroutines at once.
//
// Invariants:
//
//	OFT1 Without a fault the wrapped store is asked once, with the same arguments.
//	OFT2 A body that is cut below the contract fails as OS3 says.
//	OFT3 An error that a fault makes is base.ErrObjectStore, as a real one is.
package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Op is a method of a store.
type Op string

// The methods that can fail.
const (
	OpPut    Op = "put"
	OpGet    Op = "get"
	OpStat   Op = "stat"
	OpList   Op = "list"
	OpDelete Op = "delete"
	OpSweep  Op = "sweep"
)

// Fault is what goes wrong with one call. The zero value is nothing.
type Fault struct {
	// Delay passes before the store is asked; the context ends it.
	Delay time.Duration
	// Err is the answer, without the store being asked.
	Err error
	// After is the answer after the store has done what it was asked, as when the
	// connection breaks before the response.
	After error
	// Body changes what a Get reads.
	Body Body
	// Items, if above 0, ends a List with an error after so many objects, and a
	// Delete after so many keys.
	Items int
}

// Body is what is wrong with the body of a Get, from byte At on.
type Body struct {
	Kind BodyKind
	At   int64
}

// BodyKind is a way in which a body goes wrong.
type BodyKind string

// The ways, beside "", which is none.
const (
	// BodyCut ends it early, as if it were whole.
	BodyCut BodyKind = "cut"
	// BodyBroken ends it with an error.
	BodyBroken BodyKind = "broken"
	// BodyFlip flips a bit of one byte.
	BodyFlip BodyKind = "flip"
	// BodyStall gives nothing any more until it is closed or its context ends.
	BodyStall BodyKind = "stall"
)

// Hook chooses the fault of a call; key is the prefix of a List or Sweep, and
// the first key of a Delete.
type Hook func(op Op, key string) Fault

// Store wraps another one. It implements objectstore.Store.
type Store struct {
	inner objectstore.Store
	hook  Hook
}

var _ objectstore.Store = (*Store)(nil)

// Wrap returns a store that fails as the hook says.
func Wrap(inner objectstore.Store, hook Hook) *Store { return &Store{inner: inner, hook: hook} }

// Trouble is an error as a store gives it, for Err and After.
func Trouble(what string) error {
	return fmt.Errorf("injected: %s: %w", what, base.ErrObjectStore)
}

// begin chooses the fault of a call and lets its delay pass.
func (s *Store) begin(ctx context.Context, op Op, key string) (Fault, error) {
	f := s.hook(op, key)
	if f.Delay > 0 {
		t := time.NewTimer(f.Delay)
		defer t.Stop()
		select {
		case <-ctx.Done():
			return f, ctx.Err()
		case <-t.C:
		}
	}
	return f, f.Err
}

// Put implements objectstore.Store.
func (s *Store) Put(ctx context.Context, key string, body objectstore.Body) error {
	f, err := s.begin(ctx, OpPut, key)
	if err != nil {
		return err
	}
	return errors.Join(s.inner.Put(ctx, key, body), f.After)
}

// Get implements objectstore.Store.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	f, err := s.begin(ctx, OpGet, key)
	if err != nil {
		return nil, err
	}
	r, err := s.inner.Get(ctx, key, offset, length)
	if err != nil || f.Body.Kind == "" {
		return r, errors.Join(err, f.After)
	}
	n := length
	if n < 0 {
		o, err := s.inner.Stat(ctx, key)
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		n = o.Size - offset
	}
	return objectstore.Exactly(key, n, newBody(ctx, r, f.Body)), nil
}

// Stat implements objectstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (objectstore.Object, error) {
	f, err := s.begin(ctx, OpStat, key)
	if err != nil {
		return objectstore.Object{}, err
	}
	o, err := s.inner.Stat(ctx, key)
	return o, errors.Join(err, f.After)
}

// List implements objectstore.Store.
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	return func(yield func(objectstore.Object, error) bool) {
		f, err := s.begin(ctx, OpList, prefix)
		if err != nil {
			yield(objectstore.Object{}, err)
			return
		}
		n := 0
		for o, err := range s.inner.List(ctx, prefix, after) {
			if f.Items > 0 && n == f.Items {
				yield(objectstore.Object{}, Trouble("the list broke off"))
				return
			}
			if !yield(o, err) {
				return
			}
			n++
		}
		if f.After != nil {
			yield(objectstore.Object{}, f.After)
		}
	}
}

// Delete implements objectstore.Store.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	first := ""
	if len(keys) > 0 {
		first = keys[0]
	}
	f, err := s.begin(ctx, OpDelete, first)
	if err != nil {
		return err
	}
	if f.Items > 0 && f.Items < len(keys) {
		return errors.Join(s.inner.Delete(ctx, keys[:f.Items]...), Trouble("the connection broke"))
	}
	return errors.Join(s.inner.Delete(ctx, keys...), f.After)
}

// Sweep implements objectstore.Store.
func (s *Store) Sweep(ctx context.Context, prefix string, before time.Time) (int, error) {
	f, err := s.begin(ctx, OpSweep, prefix)
	if err != nil {
		return 0, err
	}
	n, err := s.inner.Sweep(ctx, prefix, before)
	return n, errors.Join(err, f.After)
}

// Close implements objectstore.Store.
func (s *Store) Close() error { return s.inner.Close() }
