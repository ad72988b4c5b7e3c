package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// Driver wraps a driver; its stores follow Plan.
type Driver struct {
	engine.Driver
	Plan *Plan
}

var _ engine.Driver = (*Driver)(nil)

// NewDriver wraps d. Closing the wrapper closes d.
func NewDriver(d engine.Driver) *Driver { return &Driver{Driver: d, Plan: &Plan{}} }

// Open implements engine.Driver. If it fails by After, the store below has been
// closed again.
func (d *Driver) Open(dir string) (engine.Store, error) {
	var s engine.Store
	err := d.Plan.run(OpOpen, dir, func() (err error) {
		s, err = d.Driver.Open(dir)
		return err
	})
	if err != nil {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
		return nil, err
	}
	return NewStore(s, dir, d.Plan), nil
}

// Verify implements engine.Driver.
func (d *Driver) Verify(dir string) error {
	return d.Plan.run(OpVerify, dir, func() error { return d.Driver.Verify(dir) })
}

// Store wraps a store. Families and Stats never fail.
type Store struct {
	engine.Store
	reader
}

var (
	_ engine.Store    = (*Store)(nil)
	_ engine.Absorber = (*Store)(nil)
)

// NewStore wraps s, which rules know as dir.
func NewStore(s engine.Store, dir string, p *Plan) *Store {
	return &Store{Store: s, reader: reader{below: s, dir: dir, plan: p}}
}

// Get implements engine.Reader.
func (s *Store) Get(f engine.FamilyID, key []byte) ([]byte, bool, error) {
	return s.reader.Get(f, key)
}

// MultiGet implements engine.Reader.
func (s *Store) MultiGet(f engine.FamilyID, keys [][]byte) ([][]byte, error) {
	return s.reader.MultiGet(f, keys)
}

// Scan implements engine.Reader.
func (s *Store) Scan(f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	return s.reader.Scan(f, lo, hi, o)
}

// EnsureFamily implements engine.Store.
func (s *Store) EnsureFamily(f engine.FamilyID, o engine.FamilyOptions) error {
	return s.plan.run(OpEnsureFamily, s.dir, func() error { return s.Store.EnsureFamily(f, o) })
}

// DropFamily implements engine.Store.
func (s *Store) DropFamily(f engine.FamilyID) error {
	return s.plan.run(OpDropFamily, s.dir, func() error { return s.Store.DropFamily(f) })
}

// Write implements engine.Store.
func (s *Store) Write(b *engine.Batch) error {
	return s.plan.run(OpWrite, s.dir, func() error { return s.Store.Write(b) })
}

// NewView implements engine.Store.
func (s *Store) NewView() (engine.View, error) {
	var v engine.View
	err := s.plan.run(OpNewView, s.dir, func() (err error) {
		v, err = s.Store.NewView()
		return err
	})
	if err != nil {
		if v != nil {
			v.Close()
		}
		return nil, err
	}
	return &view{reader: reader{below: v, dir: s.dir, plan: s.plan}, below: v}, nil
}

// Flush implements engine.Store.
func (s *Store) Flush() error { return s.plan.run(OpFlush, s.dir, s.Store.Flush) }

// DurableGet implements engine.Store.
func (s *Store) DurableGet(key []byte) (value []byte, ok bool, err error) {
	err = s.plan.run(OpDurableGet, s.dir, func() (err error) {
		value, ok, err = s.Store.DurableGet(key)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return value, ok, nil
}

// BeginCheckpoint implements engine.Store; a fault strikes at its begin.
func (s *Store) BeginCheckpoint(dir string) (finish func() error, err error) {
	err = s.plan.run(OpCheckpoint, s.dir, func() (err error) {
		finish, err = s.Store.BeginCheckpoint(dir)
		return err
	})
	return finish, err
}

// Checkpoint implements engine.Store.
func (s *Store) Checkpoint(dir string) error {
	return s.plan.run(OpCheckpoint, s.dir, func() error { return s.Store.Checkpoint(dir) })
}

// Compact implements engine.Store.
func (s *Store) Compact() error { return s.plan.run(OpCompact, s.dir, s.Store.Compact) }

// Clip implements engine.Absorber; it fails with base.ErrUnsupported if the store
// below does not.
func (s *Store) Clip(ctx context.Context, families []engine.FamilyID, lo, hi []byte) error {
	return s.plan.run(OpClip, s.dir, func() error {
		a, ok := s.Store.(engine.Absorber)
		if !ok {
			return fmt.Errorf("clipping %s: %w", s.dir, base.ErrUnsupported)
		}
		return a.Clip(ctx, families, lo, hi)
	})
}

// Absorb implements engine.Absorber as Clip does. Others may be wrapped.
func (s *Store) Absorb(ctx context.Context, families []engine.FamilyID, others []engine.Store) error {
	below := slices.Clone(others)
	for i, o := range below {
		if w, ok := o.(*Store); ok {
			below[i] = w.Store
		}
	}
	return s.plan.run(OpAbsorb, s.dir, func() error {
		a, ok := s.Store.(engine.Absorber)
		if !ok {
			return fmt.Errorf("absorbing into %s: %w", s.dir, base.ErrUnsupported)
		}
		return a.Absorb(ctx, families, below)
	})
}

// Close implements engine.Store.
func (s *Store) Close() error { return s.plan.run(OpClose, s.dir, s.Store.Close) }

// reader is what stores and views have in common.
type reader struct {
	below engine.Reader
	dir   string
	plan  *Plan
}

func (r *reader) Get(f engine.FamilyID, key []byte) (value []byte, ok bool, err error) {
	err = r.plan.run(OpGet, r.dir, func() (err error) {
		value, ok, err = r.below.Get(f, key)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return value, ok, nil
}

func (r *reader) MultiGet(f engine.FamilyID, keys [][]byte) (values [][]byte, err error) {
	err = r.plan.run(OpMultiGet, r.dir, func() (err error) {
		values, err = r.below.MultiGet(f, keys)
		return err
	})
	if err != nil {
		return nil, err
	}
	return values, nil
}

func (r *reader) Scan(f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	var it engine.Iterator
	err := r.plan.run(OpScan, r.dir, func() error {
		it = r.below.Scan(f, lo, hi, o)
		return nil
	})
	if err != nil {
		if it != nil {
			it.Close()
		}
		return engine.FailedIterator(err)
	}
	return &iterator{Iterator: it, reader: r}
}

// view is a wrapped view.
type view struct {
	reader
	below engine.View
}

func (v *view) Close() { v.below.Close() }

// iterator is a wrapped iterator; once a step has failed it stays there.
type iterator struct {
	engine.Iterator
	reader *reader
	err    error
}

func (it *iterator) Next() bool {
	if it.err != nil {
		return false
	}
	var ok bool
	it.err = it.reader.plan.run(OpNext, it.reader.dir, func() error {
		ok = it.Iterator.Next()
		return nil
	})
	return ok && it.err == nil
}

func (it *iterator) Err() error {
	if it.err != nil {
		return it.err
	}
	return it.Iterator.Err()
}
