package state

import (
	"bytes"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

const (
	// scanExaminedMax bounds the engine keys that one page of a scan looks at, so
	// that a filter that matches nothing cannot hold a reader for long. It is more
	// than a full page needs without a filter: MaxPageItems * (scanSteps + 2).
	scanExaminedMax = 200_000
	// scanSteps is how many unwanted keys are stepped over before the scan seeks.
	scanSteps = 8
	// countExaminedMax bounds the work of Count.
	countExaminedMax = 100_000
)

// ValidateScan refuses whatever can be refused without the store.
func (l Layout) ValidateScan(d *Declaration, q *ScanQuery) error {
	if d.ID == engine.MetaFamily || q.State != d.ID {
		return base.Invalid("state", "name the declaration that the request is for")
	}
	if q.Range.Lo > q.Range.Hi || int(q.Range.Hi) > l.M {
		return base.Invalid("range", fmt.Sprintf("use a range within [0,%d)", l.M))
	}
	if err := validateNamespace("namespace", q.Namespace); err != nil {
		return err
	}
	return validatePage(q.Limit, q.PageBytes)
}

// Scan returns a page of a state's items in order of (group, key, namespace,
// user key or append), and the cursor of the next page, nil at the end. A page
// has at least one item, except that with a namespace filter it may be empty
// and still have a next: one page looks at a bounded number of keys.
//
// A result that does not fit its type is base.ErrOutOfRange once it is the
// first item of a page; a scan with KeysOnly passes it.
func (l Layout) Scan(r engine.Reader, d *Declaration, q *ScanQuery) (items []ScanItem, next []byte, err error) {
	if err := l.ValidateScan(d, q); err != nil {
		return nil, nil, err
	}
	lo, hi := l.GroupBounds(q.Range)
	if len(q.Cursor) > 0 {
		if lo, err = l.scanStart(d, q); err != nil {
			return nil, nil, err
		}
	}
	w := l.newWalk(r, d, q, lo, hi)
	defer w.close()
	budget := newBudget(q.Limit, q.PageBytes)
	var last []byte // cursor after the last item taken
	for {
		cellLen, ok, err := w.next()
		if err != nil {
			return nil, nil, err
		}
		if !ok {
			if !w.exhausted {
				return items, nil, nil
			}
			next, err = w.cursor()
			return items, next, err
		}
		item, err := l.scanItem(d, w.it, cellLen, q.KeysOnly)
		if err != nil {
			if len(items) > 0 && base.SentinelOf(err) == base.ErrOutOfRange {
				return items, last, nil
			}
			return nil, nil, err
		}
		size := len(item.Key) + len(item.Namespace.Bytes) + len(item.Entry.UserKey) + len(item.Entry.Value)
		if !budget.take(size) {
			return items, last, nil
		}
		items = append(items, item)
		w.taken(cellLen)
		if last, err = w.cursor(); err != nil {
			return nil, nil, err
		}
	}
}

func (l Layout) scanItem(d *Declaration, it engine.Iterator, cellLen int, keysOnly bool) (ScanItem, error) {
	k, err := l.ParseKey(KindValue, it.Key()[:cellLen])
	if err != nil {
		return ScanItem{}, fmt.Errorf("scanning state %d: %w", d.ID, err)
	}
	item := ScanItem{Group: k.Group, Key: k.Key, Namespace: k.Namespace}
	if keysOnly {
		return item, nil
	}
	if item.Entry, _, err = l.entry(d, it, cellLen, false); err != nil {
		return ScanItem{}, err
	}
	if d.Kind == KindReducing || d.Kind == KindAggregating {
		f, err := functionOf(d)
		if err != nil {
			return ScanItem{}, refuse(err, "function", "")
		}
		if item.Entry.Value, err = f.result(item.Entry.Value); err != nil {
			return ScanItem{}, fmt.Errorf("scanning state %d: key %x: %w", d.ID, k.Key, err)
		}
	}
	return item, nil
}

// walk steps through the engine keys of a scan, passing over those that the
// query does not want: other namespaces, and with keysOnly all but the first
// entry of a cell. It steps over a few and seeks past many.
type walk struct {
	l        Layout
	r        engine.Reader
	d        *Declaration
	keysOnly bool
	want     []byte // namespace part to keep; nil keeps all
	hi       []byte
	chunk    int

	it        engine.Iterator
	inChunk   int    // keys that it has given
	place     []byte // the last key seen
	cellLen   int    // of place
	skipTo    []byte // keys below it are unwanted
	steps     int
	examined  int
	limit     int
	exhausted bool // the limit of examined keys was reached
}

func (l Layout) newWalk(r engine.Reader, d *Declaration, q *ScanQuery, lo, hi []byte) *walk {
	w := &walk{l: l, r: r, d: d, keysOnly: q.KeysOnly, hi: hi, limit: scanExaminedMax}
	w.chunk = newBudget(q.Limit, q.PageBytes).limit + 1
	if q.Filter {
		w.want = appendNamespace(nil, q.Namespace)
	}
	if q.Filter || q.KeysOnly && (d.Kind == KindList || d.Kind == KindMap) {
		w.chunk = min(w.chunk, 4*scanSteps) // most chunks end early by a seek
	}
	w.open(lo)
	return w
}

func (w *walk) open(lo []byte) {
	w.close()
	w.inChunk = 0
	w.it = w.r.Scan(w.d.ID, lo, w.hi, engine.ScanOptions{KeysOnly: w.keysOnly, Limit: w.chunk})
}

func (w *walk) close() {
	if w.it != nil {
		w.it.Close()
		w.it = nil
	}
}

// next moves to the next wanted key and returns the length of its cell. It is
// false at the end and when the limit of examined keys is reached.
func (w *walk) next() (cellLen int, ok bool, err error) {
	for {
		if w.examined == w.limit {
			w.exhausted = true
			return 0, false, nil
		}
		if !w.it.Next() {
			if err := w.it.Err(); err != nil {
				return 0, false, fmt.Errorf("scanning state %d: %w", w.d.ID, err)
			}
			if w.inChunk < w.chunk {
				return 0, false, nil
			}
			w.open(after(w.place))
			continue
		}
		w.inChunk++
		w.examined++
		key := w.it.Key()
		w.place = append(w.place[:0], key...)
		if w.skipTo != nil && bytes.Compare(key, w.skipTo) < 0 {
			w.step()
			continue
		}
		w.skipTo, w.steps = nil, 0
		if w.cellLen, err = w.l.cellLen(key); err != nil {
			return 0, false, fmt.Errorf("scanning state %d: %w", w.d.ID, err)
		}
		wanted, err := w.filter()
		if err != nil {
			return 0, false, fmt.Errorf("scanning state %d: %w", w.d.ID, err)
		}
		if wanted {
			return w.cellLen, true, nil
		}
		w.step()
	}
}

// step counts a key that was passed over, and seeks when they get many.
func (w *walk) step() {
	if w.steps++; w.steps > scanSteps {
		w.steps = 0
		w.open(w.skipTo)
	}
}

// filter says whether the present cell has the wanted namespace; if not, it
// sets where such a one can be next: later in this key, or in the next key.
func (w *walk) filter() (bool, error) {
	if w.want == nil {
		return true, nil
	}
	keyLen, err := w.l.keyLen(w.place)
	if err != nil {
		return false, err
	}
	switch bytes.Compare(w.place[keyLen:w.cellLen], w.want) {
	case 0:
		return true, nil
	case -1:
		w.skipTo = append(append([]byte{}, w.place[:keyLen]...), w.want...)
	default:
		w.skipTo = prefixEnd(w.place[:keyLen])
	}
	return false, nil
}

// taken marks the present key as used: with keysOnly the rest of its cell is
// not wanted.
func (w *walk) taken(cellLen int) {
	if w.keysOnly && (w.d.Kind == KindList || w.d.Kind == KindMap) {
		w.skipTo = prefixEnd(w.place[:cellLen])
	}
}

// cursor continues after the last key seen, which may be one passed over, so
// that its cell has not been looked for yet.
func (w *walk) cursor() ([]byte, error) {
	if !w.keysOnly {
		return scanCursor(false, w.place), nil
	}
	n, err := w.l.cellLen(w.place)
	if err != nil {
		return nil, fmt.Errorf("scanning state %d: %w", w.d.ID, err)
	}
	return scanCursor(true, w.place[:n]), nil
}

// Count estimates how many different (key, namespace) pairs of the state are in
// the range. Up to 100,000 engine keys are looked at; if that does not reach
// the end of the range, the result is extrapolated from the key groups that
// were finished, over which hashing spreads keys evenly. A small state's count
// is exact.
func (l Layout) Count(r engine.Reader, d *Declaration, rng keygroup.Range) (estimate uint64, err error) {
	return l.count(r, d, rng, countExaminedMax)
}

func (l Layout) count(r engine.Reader, d *Declaration, rng keygroup.Range, limit int) (uint64, error) {
	q := &ScanQuery{State: d.ID, Range: rng, KeysOnly: true}
	if err := l.ValidateScan(d, q); err != nil {
		return 0, err
	}
	lo, hi := l.GroupBounds(rng)
	w := l.newWalk(r, d, q, lo, hi)
	defer w.close()
	w.limit = limit
	var total, finished uint64 // finished: counted in groups before group
	group := rng.Lo
	for {
		cellLen, ok, err := w.next()
		if err != nil {
			return 0, err
		}
		if !ok {
			break
		}
		g, _, err := keygroup.CutGroup(w.place, l.M)
		if err != nil {
			return 0, fmt.Errorf("counting state %d: %w", d.ID, err)
		}
		if g != group {
			group, finished = g, total
		}
		total++
		w.taken(cellLen)
	}
	if !w.exhausted {
		return total, nil
	}
	if groups := uint64(group - rng.Lo); groups > 0 {
		return max(total, finished*uint64(rng.Len())/groups), nil
	}
	return total * uint64(rng.Len()), nil
}
