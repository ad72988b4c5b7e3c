package engine

import (
	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/engine/internal/treescan"
)

// versionKind says what a batch has done to a key.
type versionKind uint8

const (
	versionNone    versionKind = iota // nothing, or taken back
	versionPut                        // value is the whole value
	versionDeleted                    // by a Delete, or by a DeleteRange after it
	versionMerged                     // value is an operand over what is below
)

// version is what a Txn knows about a key. It is never changed, only replaced.
type version struct {
	kind  versionKind
	value []byte
	err   error // of a fold; reads of the key return it
}

// cell is the place of a key in an overlay.
type cell struct {
	key     string
	version version
}

// indexed is an item of the ordered index. It holds the version besides the
// cell, so that a copy of the index is a snapshot (TX2).
type indexed struct {
	key     string
	version version
	cell    *cell
}

// span is a deleted range [lo, hi).
type span struct{ lo, hi string }

// overlay is the part of a Txn in one family.
type overlay struct {
	id    FamilyID
	ready bool // merge is known
	merge MergeKind
	cells map[string]*cell
	// index orders the cells whose version is not none; nil until it is needed.
	index *btree.BTreeG[indexed]
	// ranges are the deleted ranges over what is below, disjoint and not
	// touching; nil where there are none. A tree is never changed once it is
	// here: undo records and iterators hold it.
	ranges *btree.BTreeG[span]
}

// keepCells is the number of cells up to which a family's map is kept at reset.
const keepCells = 1 << 14

func (o *overlay) reset() {
	if len(o.cells) > keepCells {
		o.cells = make(map[string]*cell)
	} else {
		clear(o.cells)
	}
	o.index, o.ranges, o.ready = nil, nil, false
}

func (o *overlay) empty() bool { return len(o.cells) == 0 && o.ranges == nil }

// lookup is the version of key, deleted if a range deletion covers it.
func (o *overlay) lookup(key []byte) version {
	if c := o.cells[string(key)]; c != nil && c.version.kind != versionNone {
		return c.version
	}
	if o.ranges != nil && o.rangeDeleted(string(key)) {
		return version{kind: versionDeleted}
	}
	return version{}
}

func indexedLess(a, b indexed) bool { return a.key < b.key }

func (o *overlay) buildIndex() {
	if o.index != nil {
		return
	}
	o.index = btree.NewBTreeGOptions(indexedLess, btree.Options{NoLocks: true})
	for _, c := range o.cells {
		o.reindex(c)
	}
}

func (o *overlay) reindex(c *cell) {
	if c.version.kind == versionNone {
		o.index.Delete(indexed{key: c.key})
		return
	}
	o.index.Set(indexed{key: c.key, version: c.version, cell: c})
}

// cursor walks the cells in [lo, hi) of a copy of the index; hi nil means to
// the end.
func (o *overlay) cursor(index *btree.BTreeG[indexed], lo, hi []byte, reverse bool) *treescan.Cursor[indexed] {
	var to *indexed
	if hi != nil {
		to = &indexed{key: string(hi)}
	}
	return treescan.New(index, &indexed{key: string(lo)}, to, reverse)
}

func spanLess(a, b span) bool { return a.lo < b.lo }

func (o *overlay) rangeDeleted(key string) bool {
	_, ok := spanOf(o.ranges, key)
	return ok
}

// spanOf returns the deleted range that key is in.
func spanOf(ranges *btree.BTreeG[span], key string) (span, bool) {
	if ranges == nil {
		return span{}, false
	}
	var found span
	ok := false
	ranges.Descend(span{lo: key}, func(s span) bool {
		found, ok = s, key < s.hi
		return false
	})
	return found, ok
}

// addSpan returns ranges with [lo, hi) in it, and leaves ranges as it is.
func addSpan(ranges *btree.BTreeG[span], lo, hi []byte) *btree.BTreeG[span] {
	s := span{lo: string(lo), hi: string(hi)}
	if ranges == nil {
		ranges = btree.NewBTreeGOptions(spanLess, btree.Options{NoLocks: true})
	} else {
		ranges = ranges.Copy()
	}
	var touching []span
	ranges.Descend(span{lo: s.hi}, func(o span) bool {
		if o.hi < s.lo {
			return false
		}
		touching = append(touching, o)
		return true
	})
	for _, o := range touching {
		s.lo, s.hi = min(s.lo, o.lo), max(s.hi, o.hi)
		ranges.Delete(o)
	}
	ranges.Set(s)
	return ranges
}

// overlaps reports whether a deleted range meets [lo, hi); hi nil means to the
// end.
func overlaps(ranges *btree.BTreeG[span], lo, hi []byte) bool {
	if ranges == nil {
		return false
	}
	if _, ok := spanOf(ranges, string(lo)); ok {
		return true
	}
	found := false
	ranges.Ascend(span{lo: string(lo)}, func(s span) bool {
		found = hi == nil || s.lo < string(hi)
		return false
	})
	return found
}

// arena hands out memory for the versions of one batch in chunks. It is dropped
// as a whole at Reset and never reused, so nothing that was handed out changes.
type arena struct {
	bytes []byte
	cells []cell
}

const (
	arenaChunk   = 64 << 10
	arenaLargest = 8 << 10 // larger values are allocated on their own
	arenaCells   = 128
)

// clone copies b; the copy is never nil.
func (a *arena) clone(b []byte) []byte {
	if len(b) > arenaLargest {
		return clone(b)
	}
	if len(b) > cap(a.bytes)-len(a.bytes) || a.bytes == nil {
		a.bytes = make([]byte, 0, arenaChunk)
	}
	n := len(a.bytes)
	a.bytes = append(a.bytes, b...)
	return a.bytes[n:len(a.bytes):len(a.bytes)]
}

func (a *arena) cell() *cell {
	if len(a.cells) == 0 {
		a.cells = make([]cell, arenaCells)
	}
	c := &a.cells[0]
	a.cells = a.cells[1:]
	return c
}

// clone copies b; the copy is never nil, since an empty value is not absent.
func clone(b []byte) []byte {
	out := make([]byte, len(b))
	copy(out, b)
	return out
}
