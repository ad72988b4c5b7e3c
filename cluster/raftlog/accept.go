package raftlog

import (
	"fmt"

	"github.com/keelstate/keelstate/internal/base"
)

// accept decides an op against all that was accepted before it, in the order in
// which the records will stand in the log.
func (l *Log) accept(o *op) {
	p := &o.g.proj
	if p.tombstone && o.kind != opCreate && o.kind != opTombstone {
		o.err = fmt.Errorf("%s was deleted from this node: %w", o.g.id, base.ErrNoSuchShard)
		return
	}
	switch o.kind {
	case opAppend:
		o.err = l.acceptAppend(o, p)
	case opMove:
		o.err = l.acceptMove(o, p)
	case opDelete:
		o.err = l.acceptDelete(o, p)
	case opStable:
		if p.keys == nil {
			p.keys = map[string]bool{}
		}
		if !p.keys[o.key] && len(p.keys) >= maxKeys {
			o.err = fmt.Errorf("more than %d stable keys: %w", maxKeys, base.ErrTooLarge)
			return
		}
		p.keys[o.key] = true
	case opCreate:
		o.err = acceptCreate(o, p)
	case opTombstone:
		o.skip = p.tombstone
		*p = projection{tombstone: true, generation: p.generation, touched: l.commit.batch}
	}
	if o.err == nil {
		p.exists = true
	}
}

func (l *Log) acceptAppend(o *op, p *projection) error {
	switch {
	case o.prev != nil && o.prev.err != nil:
		return o.prev.err
	case p.last != 0 && o.lo != p.last+1:
		return fmt.Errorf("the last entry is %d: %w", p.last, base.ErrInvalid)
	case p.last != 0 && o.hi-p.first >= maxEntries:
		return fmt.Errorf("more than %d entries: %w", maxEntries, base.ErrTooLarge)
	}
	if p.last == 0 {
		p.first = o.lo
	}
	p.last, p.touched = o.hi, l.commit.batch
	return nil
}

// acceptDelete clamps the range to what exists.
func (l *Log) acceptDelete(o *op, p *projection) error {
	if p.last == 0 || o.hi < p.first || o.lo > p.last {
		o.skip = true
		return nil
	}
	lo, hi := max(o.lo, p.first), min(o.hi, p.last)
	switch {
	case lo == p.first && hi == p.last:
		p.first, p.last = 0, 0
	case lo == p.first:
		p.first = hi + 1
	case hi == p.last:
		p.last = lo - 1
	default:
		return fmt.Errorf("entries %d to %d exist, the middle cannot be deleted: %w", p.first, p.last, base.ErrInvalid)
	}
	if lo != o.lo || hi != o.hi {
		o.lo, o.hi = lo, hi
		o.encodeRange()
	}
	p.touched = l.commit.batch
	return nil
}

// errMoved tells the compactor that its copies are out of date.
var errMoved = fmt.Errorf("entries changed under the compactor: %w", base.ErrConflict)

func (l *Log) acceptMove(o *op, p *projection) error {
	if p.touched == l.commit.batch {
		return errMoved
	}
	for _, m := range o.moves {
		if !o.g.mu.index.has(m.index) {
			return errMoved
		}
		s := o.g.mu.index.at(m.index)
		if s.seg != m.old.seg || s.off != m.old.off || s.len != m.old.len {
			return errMoved
		}
	}
	return nil
}

func acceptCreate(o *op, p *projection) error {
	switch {
	case p.exists && !p.tombstone && p.generation == o.gen:
		o.skip = true
	case p.exists && !p.tombstone:
		return fmt.Errorf("generation %d exists: %w", p.generation, base.ErrConflict)
	case p.tombstone && o.gen <= p.generation:
		return fmt.Errorf("generation %d was deleted: %w", p.generation, base.ErrConflict)
	default:
		p.generation, p.tombstone = o.gen, false
	}
	return nil
}
