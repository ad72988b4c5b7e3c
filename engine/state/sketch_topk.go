package state

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// topK finds the most frequent elements by the space-saving algorithm with
// 10*k counters. Counts are exact as long as at most 10*k different elements
// were added; beyond that a count is too high by at most its error. With all
// counters taken, a new element replaces the one with the smallest count and,
// among equal counts, the largest bytes, and inherits its count as error.
//
//	0  u8   version, 1
//	1       per counter, ascending by element: uvarint length, element, uvarint
//	        count (at least 1), uvarint error (below the count)
type topK struct {
	k int
	t keygroup.Type
}

// MaxTopKElementBytes bounds an element of topk, so that all counters fit in
// one accumulator.
const MaxTopKElementBytes = 1024

type topKCounter struct {
	element      []byte
	count, error uint64
}

func (k topK) capacity() int { return 10 * k.k }

func (k topK) decode(acc []byte) ([]topKCounter, error) {
	if len(acc) == 0 {
		return nil, corruptAccumulator("topk", acc)
	}
	if acc[0] != sketchVersion {
		return nil, fmt.Errorf("reading accumulator of topk: version %d: %w", acc[0], base.ErrFormatVersion)
	}
	var out []topKCounter
	for p := acc[1:]; len(p) > 0; {
		n, rest, err := cutUvarint(p)
		if err != nil || n > MaxTopKElementBytes || uint64(len(rest)) < n {
			return nil, corruptAccumulator("topk", acc)
		}
		c := topKCounter{element: rest[:n:n]}
		if c.count, rest, err = cutUvarint(rest[n:]); err == nil {
			c.error, rest, err = cutUvarint(rest)
		}
		disordered := len(out) > 0 && bytes.Compare(out[len(out)-1].element, c.element) >= 0
		if err != nil || c.count <= c.error || disordered || len(out) == k.capacity() {
			return nil, corruptAccumulator("topk", acc)
		}
		out, p = append(out, c), rest
	}
	if len(out) == 0 {
		return nil, corruptAccumulator("topk", acc)
	}
	return out, nil
}

func (k topK) encode(counters []topKCounter) []byte {
	out := []byte{sketchVersion}
	for _, c := range counters {
		out = binary.AppendUvarint(out, uint64(len(c.element)))
		out = append(out, c.element...)
		out = binary.AppendUvarint(out, c.count)
		out = binary.AppendUvarint(out, c.error)
	}
	return out
}

func findCounter(counters []topKCounter, element []byte) (int, bool) {
	return slices.BinarySearchFunc(counters, element, func(c topKCounter, e []byte) int {
		return bytes.Compare(c.element, e)
	})
}

func (k topK) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var counters []topKCounter
	if acc != nil {
		var err error
		if counters, err = k.decode(acc); err != nil {
			return nil, err
		}
	}
	for _, e := range elements {
		i, found := findCounter(counters, e)
		if found {
			counters[i].count++
			continue
		}
		c := topKCounter{element: e, count: 1}
		if len(counters) == k.capacity() {
			victim := 0
			for j := range counters { // the last of equals has the largest bytes
				if counters[j].count <= counters[victim].count {
					victim = j
				}
			}
			c.error = counters[victim].count
			c.count = c.error + 1
			counters = slices.Delete(counters, victim, victim+1)
			if victim < i {
				i--
			}
		}
		counters = slices.Insert(counters, i, c)
	}
	return k.encode(counters), nil
}

// combine adds the counts of both. An element that only one side holds may have
// been dropped by the other, if that is full, with at most its smallest count.
func (k topK) combine(a, b []byte) ([]byte, error) {
	x, err := k.decode(a)
	if err != nil {
		return nil, err
	}
	y, err := k.decode(b)
	if err != nil {
		return nil, err
	}
	missX, missY := k.dropped(x), k.dropped(y)
	var out []topKCounter
	for len(x) > 0 || len(y) > 0 {
		order := -1
		if len(x) == 0 {
			order = 1
		} else if len(y) > 0 {
			order = bytes.Compare(x[0].element, y[0].element)
		}
		var c topKCounter
		switch {
		case order < 0:
			c, x = topKCounter{x[0].element, x[0].count + missY, x[0].error + missY}, x[1:]
		case order > 0:
			c, y = topKCounter{y[0].element, y[0].count + missX, y[0].error + missX}, y[1:]
		default:
			c = topKCounter{x[0].element, x[0].count + y[0].count, x[0].error + y[0].error}
			x, y = x[1:], y[1:]
		}
		out = append(out, c)
	}
	if len(out) > k.capacity() {
		slices.SortFunc(out, byCount)
		out = out[:k.capacity()]
		slices.SortFunc(out, func(a, b topKCounter) int { return bytes.Compare(a.element, b.element) })
	}
	return k.encode(out), nil
}

// dropped is the largest count that an element without a counter can have.
func (k topK) dropped(counters []topKCounter) uint64 {
	if len(counters) < k.capacity() {
		return 0
	}
	least := counters[0].count
	for _, c := range counters {
		least = min(least, c.count)
	}
	return least
}

// byCount orders by count, largest first, then by bytes.
func byCount(a, b topKCounter) int {
	switch {
	case a.count > b.count:
		return -1
	case a.count < b.count:
		return 1
	}
	return bytes.Compare(a.element, b.element)
}

// result is a JSON array of the k largest counters, by count and then by
// bytes: [{"element":...,"count":n,"error":e},...].
func (k topK) result(acc []byte) ([]byte, error) {
	counters, err := k.decode(acc)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(counters, byCount)
	out := []byte{'['}
	for i, c := range counters[:min(k.k, len(counters))] {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, `{"element":`...)
		if out, err = appendJSONElement(out, k.t, c.element); err != nil {
			return nil, err
		}
		out = strconv.AppendUint(append(out, `,"count":`...), c.count, 10)
		out = strconv.AppendUint(append(out, `,"error":`...), c.error, 10)
		out = append(out, '}')
	}
	return append(out, ']'), nil
}

// appendJSONElement appends an element as JSON: numbers and booleans as such,
// strings and documents as such, bytes in standard base64, tuples as arrays.
func appendJSONElement(dst []byte, t keygroup.Type, element []byte) ([]byte, error) {
	v, err := keygroup.Decode(t, element)
	if err != nil {
		return nil, fmt.Errorf("reading element of topk: %w: %v", base.ErrCorrupt, err)
	}
	if fields, ok := v.([]any); ok {
		dst = append(dst, '[')
		for i, f := range fields {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendJSONScalar(dst, f)
		}
		return append(dst, ']'), nil
	}
	return appendJSONScalar(dst, v), nil
}

func appendJSONScalar(dst []byte, v any) []byte {
	switch x := v.(type) {
	case string:
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		_ = enc.Encode(x) // a string always has a JSON form
		return append(dst, bytes.TrimSuffix(b.Bytes(), []byte{'\n'})...)
	case int32:
		return strconv.AppendInt(dst, int64(x), 10)
	case int64:
		return strconv.AppendInt(dst, x, 10)
	case bool:
		return strconv.AppendBool(dst, x)
	case float64:
		return appendJSONFloat(dst, x)
	case json.RawMessage:
		return append(dst, x...)
	case []byte:
		dst = append(dst, '"')
		dst = base64.StdEncoding.AppendEncode(dst, x)
		return append(dst, '"')
	}
	return append(dst, "null"...) // keygroup has no other types
}

func (k topK) verify(acc []byte) error {
	counters, err := k.decode(acc)
	if err != nil {
		return err
	}
	for _, c := range counters {
		if err := verifyElement("topk", k.t, c.element); err != nil {
			return err
		}
	}
	return nil
}

func (k topK) checkElement(element []byte) error {
	if len(element) > MaxTopKElementBytes {
		return fmt.Errorf("%w: an element of topk has at most %d bytes, not %d", base.ErrTooLarge, MaxTopKElementBytes, len(element))
	}
	return nil
}
