package state

import (
	"fmt"

	"github.com/keelstate/keelstate/engine"
)

// Read answers a query. Of Answer it sets:
//
//	QueryGet, QueryAccumulator  Found, Null, Value, Version
//	QueryContains               Found, Null, Version
//	QueryIsEmpty                Found: whether there is something
//	QueryPage                   Elements or Entries, Next; Found: whether the
//	                            page has any item
//
// The slices belong to the caller. A result that does not fit its type is
// base.ErrOutOfRange.
func (l Layout) Read(r engine.Reader, d *Declaration, q *Query) (Answer, error) {
	if err := l.ValidateQuery(d, q); err != nil {
		return Answer{}, err
	}
	key, point := l.pointKey(d, q)
	if point {
		raw, ok, err := r.Get(d.ID, key)
		if err != nil || !ok {
			return Answer{}, err
		}
		return answerPoint(d, q, raw)
	}
	if q.Kind == QueryIsEmpty {
		some, err := anyUnder(r, d, key)
		return Answer{Found: some}, err
	}
	return l.readPage(r, d, q, key)
}

// pointKey returns the one engine key that answers q, or the cell and false if
// it takes a scan.
func (l Layout) pointKey(d *Declaration, q *Query) ([]byte, bool) {
	cell := l.cell(q.Group, q.Key, q.Namespace)
	switch {
	case d.Kind == KindMap && (q.Kind == QueryGet || q.Kind == QueryContains):
		return appendPart(cell, q.UserKey), true
	case d.Kind == KindMap || d.Kind == KindList:
		return cell, false
	}
	return cell, true
}

// answerPoint answers a point query from the stored value, which it may keep.
func answerPoint(d *Declaration, q *Query, raw []byte) (Answer, error) {
	s, err := parseStored(d, raw)
	if err != nil {
		return Answer{}, err
	}
	a := Answer{Found: true, Null: s.null, Version: s.version}
	switch {
	case q.Kind == QueryIsEmpty:
		return Answer{Found: true}, nil
	case q.Kind == QueryContains || s.null:
	case q.Kind == QueryGet && (d.Kind == KindReducing || d.Kind == KindAggregating):
		f, err := functionOf(d)
		if err != nil {
			return Answer{}, refuse(err, "function", "")
		}
		if a.Value, err = f.result(s.payload); err != nil {
			return Answer{}, fmt.Errorf("reading state %d: %w", d.ID, err)
		}
	default:
		a.Value = s.payload
	}
	return a, nil
}

// ReadRequest is one query of a ReadMany.
type ReadRequest struct {
	D *Declaration
	Q *Query
}

// ReadMany answers many queries from one reader, those that need one engine key
// by one MultiGet per state. Answers and errors are by position; an error of
// one query does not touch the others.
func (l Layout) ReadMany(r engine.Reader, requests []ReadRequest) ([]Answer, []error) {
	answers, errs := make([]Answer, len(requests)), make([]error, len(requests))
	type batch struct {
		keys [][]byte
		at   []int
	}
	var order []engine.FamilyID
	batches := make(map[engine.FamilyID]*batch)
	for i, req := range requests {
		if errs[i] = l.ValidateQuery(req.D, req.Q); errs[i] != nil {
			continue
		}
		key, point := l.pointKey(req.D, req.Q)
		if !point {
			answers[i], errs[i] = l.Read(r, req.D, req.Q)
			continue
		}
		b := batches[req.D.ID]
		if b == nil {
			b = &batch{}
			batches[req.D.ID] = b
			order = append(order, req.D.ID)
		}
		b.keys, b.at = append(b.keys, key), append(b.at, i)
	}
	for _, id := range order {
		b := batches[id]
		values, err := r.MultiGet(id, b.keys)
		for j, i := range b.at {
			switch {
			case err != nil:
				errs[i] = err
			case values[j] != nil:
				answers[i], errs[i] = answerPoint(requests[i].D, requests[i].Q, values[j])
			}
		}
	}
	return answers, errs
}

// readPage reads a page of the list or map under cell.
func (l Layout) readPage(r engine.Reader, d *Declaration, q *Query, cell []byte) (Answer, error) {
	lo := cell
	if len(q.Cursor) > 0 {
		var err error
		if lo, err = l.pageStart(d, q.Cursor, cell); err != nil {
			return Answer{}, err
		}
	}
	budget := newBudget(q.Limit, q.PageBytes)
	keysOnly := q.KeysOnly && d.Kind == KindMap
	it := r.Scan(d.ID, lo, prefixEnd(cell), engine.ScanOptions{KeysOnly: keysOnly, Limit: budget.limit + 1})
	defer it.Close()
	var a Answer
	for it.Next() {
		e, suffix, err := l.entry(d, it, len(cell), keysOnly)
		if err != nil {
			return Answer{}, err
		}
		if !budget.take(len(e.UserKey) + len(e.Value)) {
			return a, it.Err()
		}
		if d.Kind == KindList {
			a.Elements = append(a.Elements, e.Value)
			a.Next = listCursor(suffix)
		} else {
			a.Entries = append(a.Entries, e)
			a.Next = mapCursor(e.UserKey)
		}
		a.Found = true
	}
	a.Next = nil // the scan ended, not the budget
	return a, it.Err()
}

// entry takes the iterator's item apart: for a map the entry, for a list the
// element as Value. suffix is the engine key behind the cell and aliases it.
func (l Layout) entry(d *Declaration, it engine.Iterator, cellLen int, keysOnly bool) (e Entry, suffix []byte, err error) {
	suffix = it.Key()[cellLen:]
	if d.Kind == KindMap {
		if e.UserKey, _, err = cutPart(suffix); err != nil {
			return e, nil, fmt.Errorf("reading entry of state %d: %w", d.ID, err)
		}
	}
	if keysOnly {
		return e, suffix, nil
	}
	s, err := parseStored(d, it.Value())
	if err != nil {
		return e, nil, err
	}
	e.Null, e.Version = s.null, s.version
	if !s.null {
		e.Value = append(make([]byte, 0, len(s.payload)), s.payload...)
	}
	return e, suffix, nil
}

// budget bounds a page: at most limit items and, beyond the first item, at most
// the given bytes in all.
type budget struct {
	limit, items, bytes, used int
}

func newBudget(limit, pageBytes int) *budget {
	b := &budget{limit: limit, bytes: pageBytes}
	if limit == 0 {
		b.limit = DefaultPageItems
	}
	if pageBytes == 0 {
		b.bytes = DefaultPageBytes
	}
	b.limit, b.bytes = min(b.limit, MaxPageItems), min(b.bytes, MaxPageBytes)
	return b
}

// take accounts for one more item and says whether it belongs to the page. The
// first one always does, so that a page makes progress.
func (b *budget) take(size int) bool {
	if b.items == b.limit || b.items > 0 && b.used+size > b.bytes {
		return false
	}
	b.items++
	b.used += size
	return true
}
