package engine

import (
	"bytes"
	"fmt"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/internal/base"
)

// Txn overlays a Batch on a Reader, so that one apply batch reads its own
// writes: it is a Reader that shows the batch's operations on top of the one
// below, with merges folded. Nothing is written below; Write the Batch to a
// store for that, then Reset.
//
// Point reads and writes cost one hash lookup. Families that are scanned or
// range-deleted get an ordered index besides, from the first such call on until
// Reset.
//
// Invariants:
//
//	TX1  A read gives what the same read of the store would give after the
//	     Batch was written to it, if nothing else was written there.
//	TX2  An iterator sees the instant of the Scan call, whatever is written or
//	     rolled back later.
//	TX3  After Rollback(m), reads and the Batch are what they were at the call
//	     of Mark that returned m.
//
// A Txn belongs to one goroutine. The reader below must not change while it is
// in use.
type Txn struct {
	below    Reader
	merges   func(FamilyID) MergeKind
	batch    Batch
	families map[FamilyID]*overlay
	newest   *overlay // the family used last
	mem      arena

	// undo is kept from the first Mark on: nothing rolls back further.
	marked     bool
	undo       []undoRecord
	generation uint64 // counts Resets, so that a stale Mark is noticed
}

// Mark is a point of a Txn to roll back to. It ends with the Txn's Reset and
// with a Rollback to an earlier Mark.
type Mark struct {
	generation   uint64
	undo         int
	bytes, count int
}

// undoRecord takes back one change of an overlay: of a cell if cell is set,
// else of the range deletions.
type undoRecord struct {
	in     *overlay
	cell   *cell
	before version
	ranges *btree.BTreeG[span]
}

// NewTxn returns an empty overlay on r. The merge kind of each family that is
// used is asked for once.
func NewTxn(r Reader, merges func(FamilyID) MergeKind) *Txn {
	return &Txn{below: r, merges: merges, families: make(map[FamilyID]*overlay)}
}

// Batch is the batch so far. It belongs to the Txn: it changes with it, and
// Reset empties it.
func (t *Txn) Batch() *Batch { return &t.batch }

// Reset makes the Txn an empty overlay on r. Iterators of before must be closed.
func (t *Txn) Reset(r Reader) {
	t.below = r
	t.batch.Reset()
	for _, o := range t.families {
		o.reset()
	}
	t.mem = arena{}
	clear(t.undo)
	t.undo, t.marked = t.undo[:0], false
	t.generation++
}

// Mark returns the present point, for Rollback.
func (t *Txn) Mark() Mark {
	t.marked = true
	b, n := t.batch.position()
	return Mark{generation: t.generation, undo: len(t.undo), bytes: b, count: n}
}

// Rollback takes back everything since m. It panics if m is not a Mark of this
// Txn since its Reset, which is a mistake of the caller.
func (t *Txn) Rollback(m Mark) {
	if m.generation != t.generation || m.undo > len(t.undo) || m.bytes > len(t.batch.buf) {
		panic("engine: rolling back to a mark that has ended")
	}
	for i := len(t.undo) - 1; i >= m.undo; i-- {
		u := &t.undo[i]
		if u.cell == nil {
			u.in.ranges = u.ranges
			continue
		}
		u.cell.version = u.before
		if u.in.index != nil {
			u.in.reindex(u.cell)
		}
	}
	clear(t.undo[m.undo:])
	t.undo = t.undo[:m.undo]
	t.batch.truncate(m.bytes, m.count)
}

// Put sets key to value.
func (t *Txn) Put(f FamilyID, key, value []byte) {
	t.batch.Put(f, key, value)
	o := t.overlay(f)
	t.set(o, t.cell(o, key), version{kind: versionPut, value: t.mem.clone(value)})
}

// Delete removes key; an absent key is no error.
func (t *Txn) Delete(f FamilyID, key []byte) {
	t.batch.Delete(f, key)
	o := t.overlay(f)
	t.set(o, t.cell(o, key), version{kind: versionDeleted})
}

// DeleteRange removes all keys in [lo, hi); nothing if hi is not above lo.
func (t *Txn) DeleteRange(f FamilyID, lo, hi []byte) {
	if bytes.Compare(lo, hi) >= 0 {
		return
	}
	t.batch.DeleteRange(f, lo, hi)
	o := t.overlay(f)
	o.buildIndex()
	var within []*cell
	for cur := o.cursor(o.index, lo, hi, false); cur.Next(); {
		within = append(within, cur.Item().cell)
	}
	for _, c := range within {
		t.set(o, c, version{kind: versionDeleted})
	}
	if t.marked {
		t.undo = append(t.undo, undoRecord{in: o, ranges: o.ranges})
	}
	o.ranges = addSpan(o.ranges, lo, hi)
}

// Merge folds operand into key with the family's MergeKind. A key or operand
// that cannot be folded shows as an error of the next read of the key; the
// store refuses it too.
func (t *Txn) Merge(f FamilyID, key, operand []byte) {
	t.batch.Merge(f, key, operand)
	o := t.overlay(f)
	c := t.cell(o, key)
	t.set(o, c, t.merged(o, c, operand))
}

// merged is the version of c after operand. Since folds are associative,
// operands over a value that is not known yet are folded among themselves, so
// that a key merged often costs no more to read than one merged once.
func (t *Txn) merged(o *overlay, c *cell, operand []byte) version {
	before := c.version
	if before.kind == versionNone && o.rangeDeleted(c.key) {
		before.kind = versionDeleted
	}
	v := version{kind: versionMerged}
	if before.kind == versionPut || before.kind == versionDeleted {
		v.kind = versionPut
	}
	if before.err != nil {
		v.err = before.err
		return v
	}
	known := before.kind == versionPut || before.kind == versionMerged
	v.value, v.err = Fold(o.merge, before.value, known, operand)
	return v
}

// Get implements Reader.
func (t *Txn) Get(f FamilyID, key []byte) ([]byte, bool, error) {
	o := t.find(f)
	if o == nil {
		return t.below.Get(f, key)
	}
	v := o.lookup(key)
	if v.err != nil {
		return nil, false, fmt.Errorf("reading merged key %x of family %d: %w", key, f, v.err)
	}
	switch v.kind {
	case versionPut:
		return clone(v.value), true, nil
	case versionDeleted:
		return nil, false, nil
	case versionMerged:
		b, ok, err := t.below.Get(f, key)
		if err != nil {
			return nil, false, err
		}
		out, err := Fold(o.merge, b, ok, v.value)
		if err != nil {
			return nil, false, fmt.Errorf("reading merged key %x of family %d: %w", key, f, err)
		}
		return out, true, nil
	default:
		return t.below.Get(f, key)
	}
}

// MultiGet implements Reader.
func (t *Txn) MultiGet(f FamilyID, keys [][]byte) ([][]byte, error) {
	o := t.find(f)
	if o == nil {
		return t.below.MultiGet(f, keys)
	}
	out := make([][]byte, len(keys))
	var askKeys [][]byte
	var askAt []int
	for i, k := range keys {
		v := o.lookup(k)
		switch {
		case v.err != nil:
			return nil, fmt.Errorf("reading merged key %x of family %d: %w", k, f, v.err)
		case v.kind == versionPut:
			out[i] = clone(v.value)
		case v.kind != versionDeleted:
			askKeys, askAt = append(askKeys, k), append(askAt, i)
		}
	}
	if len(askKeys) == 0 {
		return out, nil
	}
	got, err := t.below.MultiGet(f, askKeys)
	if err != nil {
		return nil, err
	}
	if len(got) != len(askKeys) {
		return nil, fmt.Errorf("reading %d keys of family %d: %d answers: %w", len(askKeys), f, len(got), base.ErrInternal)
	}
	for j, i := range askAt {
		out[i] = got[j]
		if v := o.lookup(keys[i]); v.kind == versionMerged {
			if out[i], err = Fold(o.merge, got[j], got[j] != nil, v.value); err != nil {
				return nil, fmt.Errorf("reading merged key %x of family %d: %w", keys[i], f, err)
			}
		}
	}
	return out, nil
}

// find returns the overlay of f if this batch wrote in f, else nil.
func (t *Txn) find(f FamilyID) *overlay {
	o := t.newest
	if o == nil || o.id != f {
		if o = t.families[f]; o == nil {
			return nil
		}
		t.newest = o
	}
	if o.empty() {
		return nil
	}
	return o
}

func (t *Txn) overlay(f FamilyID) *overlay {
	if o := t.newest; o != nil && o.id == f && o.ready {
		return o
	}
	o := t.families[f]
	if o == nil {
		o = &overlay{id: f, cells: make(map[string]*cell)}
		t.families[f] = o
	}
	if !o.ready {
		o.ready, o.merge = true, t.merges(f)
	}
	t.newest = o
	return o
}

func (t *Txn) cell(o *overlay, key []byte) *cell {
	if c := o.cells[string(key)]; c != nil {
		return c
	}
	c := t.mem.cell()
	c.key = string(key)
	o.cells[c.key] = c
	return c
}

func (t *Txn) set(o *overlay, c *cell, v version) {
	if t.marked {
		t.undo = append(t.undo, undoRecord{in: o, cell: c, before: c.version})
	}
	c.version = v
	if o.index != nil {
		o.reindex(c)
	}
}
