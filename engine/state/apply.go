package state

import (
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

const (
	// clearPointLimit is the largest number of entries that a clear deletes one by
	// one. Above it one DeleteRange is written: many small range tombstones make
	// every later seek slow, and many point tombstones in one place do too, so
	// each is used where it is the lesser evil. A clear therefore reads at most
	// clearPointLimit+1 keys, however large the list or map is.
	clearPointLimit = 128

	// MaxMergeElements and MaxMergeBytes bound what one mergeNamespaces of lists
	// copies, and with it the size of its batch; beyond them it is refused.
	MaxMergeElements = 1_000_000
	MaxMergeBytes    = 64 << 20
)

// Apply does one mutation on tx. A mutation that is refused has written nothing
// (ST4); the error names the field. It repeats ValidateMutation, because a
// declaration may have changed between proposal and apply (rule W1).
//
// st.Sequence must be larger than that of every earlier mutation of the shard,
// also within one request: it is the version of what is written, and the order
// of list elements.
func (l Layout) Apply(tx *engine.Txn, d *Declaration, m *Mutation, st Stamp) error {
	if err := l.ValidateMutation(d, m); err != nil {
		return err
	}
	mark := tx.Mark()
	if err := l.apply(tx, d, m, st); err != nil {
		tx.Rollback(mark)
		return err
	}
	return nil
}

func (l Layout) apply(tx *engine.Txn, d *Declaration, m *Mutation, st Stamp) error {
	cell := l.cell(m.Group, m.Key, m.Namespace)
	switch m.Op {
	case OpValuePut:
		tx.Put(d.ID, cell, appendValue(nil, d, st, 0, m.Value))
	case OpClear:
		return l.clear(tx, d, cell)
	case OpListUpdate:
		if err := l.clear(tx, d, cell); err != nil {
			return err
		}
		appendElements(tx, d, cell, m.Elements, st)
	case OpListAdd:
		appendElements(tx, d, cell, m.Elements, st)
	case OpMapPut, OpMapRemove:
		applyEntries(tx, d, cell, m, st)
	case OpAdd:
		return applyAdd(tx, d, cell, m.Elements, st)
	case OpMergeNamespaces:
		if d.Kind == KindList {
			return l.mergeLists(tx, d, cell, m, st)
		}
		return l.mergeAccumulators(tx, d, cell, m, st)
	}
	return nil
}

// header builds the header of a value that is written now. No state has a TTL
// yet, so the timestamp says "written without TTL" and st.ClockMs is not used.
func header(d *Declaration, st Stamp, flags byte) engine.Header {
	return engine.Header{Flags: flags, Codec: d.CodecVersion, Sequence: st.Sequence}
}

func appendValue(dst []byte, d *Declaration, st Stamp, flags byte, payload []byte) []byte {
	if dst == nil {
		dst = make([]byte, 0, engine.HeaderLen+len(payload))
	}
	return append(engine.AppendHeader(dst, header(d, st, flags)), payload...)
}

// clear removes all that is under a cell.
func (l Layout) clear(tx *engine.Txn, d *Declaration, cell []byte) error {
	if d.Kind != KindList && d.Kind != KindMap {
		tx.Delete(d.ID, cell)
		return nil
	}
	hi := prefixEnd(cell)
	it := tx.Scan(d.ID, cell, hi, engine.ScanOptions{KeysOnly: true, Limit: clearPointLimit + 1})
	defer it.Close()
	var keys [][]byte
	for it.Next() {
		if len(keys) == clearPointLimit {
			tx.DeleteRange(d.ID, cell, hi)
			return nil
		}
		keys = append(keys, append([]byte(nil), it.Key()...))
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("clearing state %d: %w", d.ID, err)
	}
	for _, k := range keys {
		tx.Delete(d.ID, k)
	}
	return nil
}

func appendElements(tx *engine.Txn, d *Declaration, cell []byte, elements [][]byte, st Stamp) {
	var value []byte
	for i, e := range elements {
		value = appendValue(value[:0], d, st, 0, e)
		// Txn copies keys, so the cell's spare room serves every element.
		tx.Put(d.ID, appendElement(cell, st.Sequence, uint32(i)), value)
	}
}

// applyEntries puts or removes in order: of equal user keys the last one counts.
func applyEntries(tx *engine.Txn, d *Declaration, cell []byte, m *Mutation, st Stamp) {
	var value []byte
	for i := range m.Entries {
		e := &m.Entries[i]
		key := appendPart(cell, e.UserKey)
		if m.Op == OpMapRemove {
			tx.Delete(d.ID, key)
			continue
		}
		var flags byte
		if e.Null {
			flags = engine.FlagNull
		}
		value = appendValue(value[:0], d, st, flags, e.Value)
		tx.Put(d.ID, key, value)
	}
}

func applyAdd(tx *engine.Txn, d *Declaration, cell []byte, elements [][]byte, st Stamp) error {
	if len(elements) == 0 {
		return nil
	}
	f, err := functionOf(d)
	if err != nil {
		return refuse(err, "function", "")
	}
	if f.mode != foldRead {
		operand, err := f.fold(nil, elements)
		if err != nil {
			return err
		}
		if f.mode == foldMerge {
			tx.Merge(d.ID, cell, appendValue(nil, d, st, 0, operand))
		} else {
			tx.Put(d.ID, cell, appendValue(nil, d, st, 0, operand))
		}
		return nil
	}
	_, acc, err := getAccumulator(tx, d, cell)
	if err != nil {
		return err
	}
	if acc, err = f.fold(acc, elements); err != nil {
		return err
	}
	return putAccumulator(tx, d, cell, header(d, st, 0), acc)
}

// getAccumulator returns the accumulator under cell, nil if absent.
func getAccumulator(r engine.Reader, d *Declaration, cell []byte) (engine.Header, []byte, error) {
	raw, ok, err := r.Get(d.ID, cell)
	if err != nil || !ok {
		return engine.Header{}, nil, err
	}
	h, acc, err := engine.ParseHeader(raw)
	if err != nil {
		return h, nil, fmt.Errorf("reading accumulator of state %d: %w", d.ID, err)
	}
	return h, acc, nil
}

func putAccumulator(tx *engine.Txn, d *Declaration, cell []byte, h engine.Header, acc []byte) error {
	if len(acc) > MaxValueBytes {
		return refuse(fmt.Errorf("%w: the accumulator would have %d bytes, at most %d", base.ErrTooLarge, len(acc), MaxValueBytes),
			"elements", "clear the state or use another function")
	}
	value := engine.AppendHeader(make([]byte, 0, engine.HeaderLen+len(acc)), h)
	tx.Put(d.ID, cell, append(value, acc...))
	return nil
}

// mergeAccumulators folds the sources left to right, then f(folded, target). A
// source named twice is absent the second time, since the first removed it.
func (l Layout) mergeAccumulators(tx *engine.Txn, d *Declaration, target []byte, m *Mutation, st Stamp) error {
	f, err := functionOf(d)
	if err != nil {
		return refuse(err, "function", "")
	}
	var folded []byte
	h := header(d, st, 0)
	for i, s := range m.Sources {
		cell := l.cell(m.Group, m.Key, s)
		from, acc, err := getAccumulator(tx, d, cell)
		if err != nil {
			return err
		}
		if acc == nil {
			continue
		}
		if folded, err = f.Combine(folded, acc); err != nil {
			return at("sources", i, err)
		}
		h.TimestampMs = max(h.TimestampMs, from.TimestampMs)
		tx.Delete(d.ID, cell)
	}
	if folded == nil {
		return nil
	}
	from, acc, err := getAccumulator(tx, d, target)
	if err != nil {
		return err
	}
	if folded, err = f.Combine(folded, acc); err != nil {
		return err
	}
	h.TimestampMs = max(h.TimestampMs, from.TimestampMs)
	return putAccumulator(tx, d, target, h, folded)
}

// mergeLists appends the elements of each source, in order, behind the target's
// own, and removes the sources. Each element keeps its timestamp.
func (l Layout) mergeLists(tx *engine.Txn, d *Declaration, target []byte, m *Mutation, st Stamp) error {
	var index uint32
	total := 0
	for i, s := range m.Sources {
		source := l.cell(m.Group, m.Key, s)
		copied := false
		it := tx.Scan(d.ID, source, prefixEnd(source), engine.ScanOptions{})
		for it.Next() {
			h, payload, err := engine.ParseHeader(it.Value())
			if err != nil {
				it.Close()
				return fmt.Errorf("merging lists of state %d: %w", d.ID, err)
			}
			if total += len(payload); index == MaxMergeElements || total > MaxMergeBytes {
				it.Close()
				return at("sources", i, refuse(base.ErrTooLarge, "",
					fmt.Sprintf("a merge copies at most %d elements and %d bytes", MaxMergeElements, MaxMergeBytes)))
			}
			h.Sequence = st.Sequence
			value := engine.AppendHeader(make([]byte, 0, engine.HeaderLen+len(payload)), h)
			tx.Put(d.ID, appendElement(target, st.Sequence, index), append(value, payload...))
			index++
			copied = true
		}
		err := it.Err()
		it.Close()
		if err != nil {
			return fmt.Errorf("merging lists of state %d: %w", d.ID, err)
		}
		if copied {
			if err := l.clear(tx, d, source); err != nil {
				return err
			}
		}
	}
	return nil
}
