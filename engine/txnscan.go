package engine

import (
	"bytes"
	"fmt"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/engine/internal/treescan"
)

// maxLimitSlack bounds how far a scan's limit is raised for what the overlay
// hides of the store below.
const maxLimitSlack = 64

// Scan implements Reader. The iterator sees the instant of the call (TX2).
func (t *Txn) Scan(f FamilyID, lo, hi []byte, o ScanOptions) Iterator {
	ov := t.find(f)
	if ov == nil || hi != nil && bytes.Compare(lo, hi) >= 0 {
		return t.below.Scan(f, lo, hi, o)
	}
	ov.buildIndex()
	lo, hi = bytes.Clone(lo), bytes.Clone(hi)
	index := ov.index.Copy()
	most := 1 // without a limit it only matters whether there are any
	if o.Limit > 0 {
		most = maxLimitSlack
	}
	hidden := countWithin(ov, index, lo, hi, most)
	belowLo, belowHi, some := trim(ov.ranges, lo, hi)
	cut := some && overlaps(ov.ranges, belowLo, belowHi)
	if hidden == 0 && some && !cut && bytes.Equal(belowLo, lo) && bytes.Equal(belowHi, hi) {
		return t.below.Scan(f, lo, hi, o)
	}
	it := &txnIterator{family: f, merge: ov.merge, options: o, top: ov.cursor(index, lo, hi, o.Reverse)}
	if some {
		so := o
		if cut || hidden >= maxLimitSlack {
			so.Limit = 0
		} else if o.Limit > 0 {
			so.Limit = o.Limit + hidden
		}
		it.below = t.below.Scan(f, belowLo, belowHi, so)
	}
	if cut {
		it.ranges = ov.ranges
	}
	return it
}

// countWithin counts the overlay's keys in [lo, hi), up to most.
func countWithin(ov *overlay, index *btree.BTreeG[indexed], lo, hi []byte, most int) int {
	n := 0
	for c := ov.cursor(index, lo, hi, false); n < most && c.Next(); {
		n++
	}
	return n
}

// trim cuts deleted ranges off both ends of [lo, hi) and reports whether
// anything is left, so that what a DeleteRange just removed is not walked.
func trim(ranges *btree.BTreeG[span], lo, hi []byte) ([]byte, []byte, bool) {
	if s, ok := spanOf(ranges, string(lo)); ok {
		lo = []byte(s.hi)
	}
	if hi == nil || ranges == nil {
		return lo, hi, hi == nil || bytes.Compare(lo, hi) < 0
	}
	// The last range that starts below hi reaches hi, or leaves keys before it.
	ranges.Descend(span{lo: string(hi)}, func(s span) bool {
		if s.lo == string(hi) {
			return true
		}
		if s.hi >= string(hi) {
			hi = []byte(s.lo)
		}
		return false
	})
	return lo, hi, bytes.Compare(lo, hi) < 0
}

// txnIterator merges the overlay's cells (top) with the store below.
type txnIterator struct {
	family  FamilyID
	merge   MergeKind
	options ScanOptions
	ranges  *btree.BTreeG[span] // nil where none cuts the scan
	top     *treescan.Cursor[indexed]
	below   Iterator // nil where nothing below shows

	topOn, belowOn     bool // the side stands on an entry not consumed yet
	topDone, belowDone bool
	emitted            int
	key, value         []byte
	err                error
	closed             bool
}

func (it *txnIterator) Next() bool {
	it.key, it.value = nil, nil
	if it.err != nil || it.closed || it.options.Limit > 0 && it.emitted >= it.options.Limit {
		return false
	}
	for {
		if !it.advance() {
			return false
		}
		shown := false
		switch order := it.order(); {
		case order < 0:
			shown = it.showTop(nil, false)
			it.topOn = false
		case order > 0:
			shown = it.showBelow()
			it.belowOn = false
		default:
			shown = it.showTop(it.below.Value(), true)
			it.topOn, it.belowOn = false, false
		}
		if it.err != nil {
			return false
		}
		if shown {
			it.emitted++
			return true
		}
	}
}

// advance brings both sides onto an entry where they have one, and reports
// whether any has.
func (it *txnIterator) advance() bool {
	if !it.topOn && !it.topDone {
		it.topOn = it.top.Next()
		it.topDone = !it.topOn
	}
	if !it.belowOn && !it.belowDone && it.below != nil {
		it.belowOn = it.below.Next()
		it.belowDone = !it.belowOn
		if it.belowDone {
			it.err = it.below.Err()
		}
	}
	return it.err == nil && (it.topOn || it.belowOn)
}

// order is negative if the overlay's entry comes first, positive if the store's
// does, zero if they have the same key.
func (it *txnIterator) order() int {
	switch {
	case !it.belowOn:
		return -1
	case !it.topOn:
		return 1
	}
	top, below := it.top.Item().key, it.below.Key()
	switch {
	case top == string(below):
		return 0
	case top < string(below) != it.options.Reverse:
		return -1
	default:
		return 1
	}
}

func (it *txnIterator) showBelow() bool {
	k := it.below.Key()
	if it.ranges != nil {
		if _, deleted := spanOf(it.ranges, string(k)); deleted {
			return false
		}
	}
	it.key, it.value = k, it.below.Value()
	return true
}

// showTop shows the overlay's entry over the store's value of the same key.
func (it *txnIterator) showTop(value []byte, has bool) bool {
	e := it.top.Item()
	v := e.version
	if v.kind == versionDeleted {
		return false
	}
	if v.err == nil && !it.options.KeysOnly {
		it.value = v.value
		if v.kind == versionMerged {
			it.value, v.err = Fold(it.merge, value, has, v.value)
		}
	}
	if v.err != nil {
		it.err = fmt.Errorf("scanning merged key %x of family %d: %w", e.key, it.family, v.err)
		return false
	}
	it.key = []byte(e.key)
	return true
}

func (it *txnIterator) Key() []byte   { return it.key }
func (it *txnIterator) Value() []byte { return it.value }
func (it *txnIterator) Err() error    { return it.err }

func (it *txnIterator) Close() {
	if it.closed {
		return
	}
	it.closed = true
	it.key, it.value = nil, nil
	if it.below != nil {
		it.below.Close()
	}
}
