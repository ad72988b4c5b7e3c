package mem

import (
	"bytes"
	"context"
	"fmt"
	"maps"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

var _ engine.Absorber = (*store)(nil)

// Clip implements engine.Absorber. A view needs nothing of what goes: it has its
// own trees (ME1), so that it may be open.
func (s *store) Clip(ctx context.Context, families []engine.FamilyID, lo, hi []byte) error {
	err := s.rework("clipping", families, func(p *pending) error {
		var outside []item
		for c := scanTree(p.tree, nil, lo, false); lo != nil && c.Next(); {
			outside = append(outside, c.Item())
		}
		for c := scanTree(p.tree, hi, nil, false); hi != nil && c.Next(); {
			outside = append(outside, c.Item())
		}
		for _, it := range outside {
			p.delete(it)
		}
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	return s.Flush()
}

// Absorb implements engine.Absorber: entries never change, so that the trees of
// several stores may hold the same ones (ME1).
func (s *store) Absorb(ctx context.Context, families []engine.FamilyID, others []engine.Store) error {
	roots := make([]*root, len(others))
	for i, other := range others {
		o, ok := other.(*store)
		if !ok {
			return fmt.Errorf("absorbing into store %s: source %d is no store of this package: %w", s.dir, i, base.ErrUnsupported)
		}
		if o == s {
			return fmt.Errorf("absorbing into store %s: source %d is the store itself: %w", s.dir, i, base.ErrInvalid)
		}
		r, err := o.root("being absorbed")
		if err != nil {
			return err
		}
		roots[i] = r
	}
	return s.rework("absorbing", families, func(p *pending) error {
		if p.family.id == engine.MetaFamily {
			return fmt.Errorf("the metadata family is not absorbed: %w", base.ErrInvalid)
		}
		var taken []keyRange
		if r, any := keysOf(p.tree); any {
			taken = append(taken, r)
		}
		for i, r := range roots {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := p.absorb(r.families[p.family.id], &taken); err != nil {
				return fmt.Errorf("source %d: %w", i, err)
			}
		}
		return nil
	})
}

// rework changes families under the writer's lock: all of them, or if it fails none.
func (s *store) rework(doing string, families []engine.FamilyID, change func(p *pending) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.root(doing)
	if err != nil {
		return err
	}
	if err := s.usable(); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	w := &write{store: s, root: r, touched: make(map[engine.FamilyID]*pending)}
	for _, id := range families {
		p, err := w.family(id)
		if err == nil {
			err = change(p)
		}
		if err != nil {
			return fmt.Errorf("%s family %d of store %s: %w", doing, id, s.dir, err)
		}
	}
	w.publish()
	return nil
}

// keyRange are the smallest and the largest key of a tree.
type keyRange struct{ lo, hi []byte }

func keysOf(t *tree) (keyRange, bool) {
	lo, ok := t.Min()
	if !ok {
		return keyRange{}, false
	}
	hi, _ := t.Max()
	return keyRange{lo.key, hi.key}, true
}

// absorb adds another store's family, if it has it, and its range to what is taken.
func (p *pending) absorb(f *family, taken *[]keyRange) error {
	if f == nil {
		return nil
	}
	if f.options != p.family.options {
		return fmt.Errorf("options %v, here %v: %w", f.options, p.family.options, base.ErrConflict)
	}
	r, any := keysOf(f.tree)
	if !any {
		return nil
	}
	for _, t := range *taken {
		if bytes.Compare(r.lo, t.hi) <= 0 && bytes.Compare(t.lo, r.hi) <= 0 {
			return fmt.Errorf("two stores have keys in one range: %w", base.ErrConflict)
		}
	}
	*taken = append(*taken, r)
	for c := scanTree(f.tree, nil, nil, false); c.Next(); {
		it := c.Item()
		p.tree.Set(it)
		p.bytes += uint64(len(it.key) + len(it.value))
	}
	return nil
}

// publish makes what a write has touched what readers see.
func (w *write) publish() {
	next := &root{families: maps.Clone(w.root.families)}
	for id, p := range w.touched {
		f := *p.family
		// The copy is published and never changes; the tree itself goes on as
		// the next Write's start.
		f.tree, f.bytes = p.tree.Copy(), p.bytes
		next.families[id] = &f
		w.store.work[id] = p.tree
	}
	w.store.current.Store(next)
}
