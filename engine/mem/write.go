package mem

import (
	"bytes"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// pending is a family that a Write has touched. Its tree is private until the
// Write succeeds (ME2).
type pending struct {
	family *family // as published
	tree   *tree
	bytes  uint64
}

// write is one Write in progress.
type write struct {
	store   *store
	root    *root
	touched map[engine.FamilyID]*pending
	newest  *pending
}

// Write implements engine.Store. It fails with base.ErrNotFound for a family
// that does not exist, base.ErrTooLarge for a key and value of more than 32 MiB
// together, and with the errors of engine.Fold; nothing is written then.
func (s *store) Write(b *engine.Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.root("writing")
	if err != nil {
		return err
	}
	if err := s.usable(); err != nil {
		return fmt.Errorf("writing: %w", err)
	}
	w := &write{store: s, root: r, touched: make(map[engine.FamilyID]*pending)}
	if err := b.Each(w.apply); err != nil {
		return fmt.Errorf("writing a batch of %d to store %s: %w", b.Len(), s.dir, err)
	}
	if len(w.touched) == 0 {
		return nil
	}
	w.publish()
	return nil
}

func (w *write) family(f engine.FamilyID) (*pending, error) {
	if w.newest != nil && w.newest.family.id == f {
		return w.newest, nil
	}
	p := w.touched[f]
	if p == nil {
		fam, err := w.root.family(f)
		if err != nil {
			return nil, err
		}
		p = &pending{family: fam, tree: w.store.work[f].Copy(), bytes: fam.bytes}
		w.touched[f] = p
	}
	w.newest = p
	return p, nil
}

func (w *write) apply(kind engine.OpKind, f engine.FamilyID, key, value []byte) error {
	p, err := w.family(f)
	if err != nil {
		return err
	}
	switch kind {
	case engine.OpPut:
		return p.put(key, value)
	case engine.OpDelete:
		p.delete(pivot(key))
		return nil
	case engine.OpDeleteRange:
		p.deleteRange(key, value)
		return nil
	case engine.OpMerge:
		old, ok := p.tree.Get(pivot(key))
		var base []byte
		if ok {
			base = old.value
		}
		folded, err := engine.Fold(p.family.options.Merge, base, ok, value)
		if err != nil {
			return fmt.Errorf("merging key %x of family %d: %w", key, f, err)
		}
		return p.put(key, folded)
	default:
		return fmt.Errorf("operation %d: %w", kind, base.ErrInvalid)
	}
}

func (p *pending) put(key, value []byte) error {
	n := uint64(len(key)) + uint64(len(value))
	if n > maxEntryBytes {
		return fmt.Errorf("key and value of %d bytes in family %d: %w", n, p.family.id, base.ErrTooLarge)
	}
	if old, replaced := p.tree.Set(newItem(key, value)); replaced {
		p.bytes -= uint64(len(old.key) + len(old.value))
	}
	p.bytes += n
	return nil
}

func (p *pending) delete(it item) {
	if old, ok := p.tree.Delete(it); ok {
		p.bytes -= uint64(len(old.key) + len(old.value))
	}
}

// deleteRange removes [lo, hi), nothing if hi is not above lo.
func (p *pending) deleteRange(lo, hi []byte) {
	if bytes.Compare(lo, hi) >= 0 {
		return
	}
	var within []item
	for c := scanTree(p.tree, lo, hi, false); c.Next(); {
		within = append(within, c.Item())
	}
	for _, it := range within {
		p.delete(it)
	}
}
