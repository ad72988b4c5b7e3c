package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// quantiles is a DDSketch: bins of bounded relative width and a count for each.
// A bin is the top 19 bits of the float64's order-preserving encoding: sign,
// exponent and 7 bits of the mantissa. This mapping is linear inside a power of
// two, so a bin is at most 1/128 wide relative to its values, and the middle of
// a bin is off by at most 1/256 (0.4 %). It needs no logarithm, whose last bit
// differs between processors, and it covers every float64: subnormal numbers
// have coarser bins, infinities and NaN have bins of their own, in the order
// -Inf < ... < -0 < 0 < ... < +Inf < NaN.
//
//	0   u8      version, 1
//	1   8 bytes smallest element, float64 encoding
//	9   8 bytes largest element
//	17          per bin, ascending: uvarint bin minus the previous bin (the
//	            first: minus -1), at least 1; uvarint count, at least 1
//
// Sketches merge by adding counts, so any grouping gives the same bytes.
type quantiles struct {
	qs       []float64
	integers bool // elements are int64 and are converted to the nearest float64
}

const (
	quantileShift  = 64 - 19
	quantileBins   = 1 << 19
	quantileHeader = 17
)

type quantileBin struct {
	bin   uint32
	count uint64
}

type quantileSketch struct {
	min, max uint64 // order-preserving encodings as integers
	bins     []quantileBin
}

func (q quantiles) decode(acc []byte) (s quantileSketch, err error) {
	if len(acc) == 0 {
		return s, corruptAccumulator("quantiles", acc)
	}
	if acc[0] != sketchVersion {
		return s, fmt.Errorf("reading accumulator of quantiles: version %d: %w", acc[0], base.ErrFormatVersion)
	}
	if len(acc) <= quantileHeader {
		return s, corruptAccumulator("quantiles", acc)
	}
	s.min, s.max = binary.BigEndian.Uint64(acc[1:]), binary.BigEndian.Uint64(acc[9:])
	for _, edge := range [][]byte{acc[1:9], acc[9:17]} {
		if _, err := floatOf(edge); err != nil {
			return s, err
		}
	}
	s.bins = make([]quantileBin, 0, (len(acc)-quantileHeader)/2)
	last, total := int64(-1), uint64(0)
	for p := acc[quantileHeader:]; len(p) > 0; {
		var step, count uint64
		if step, p, err = cutUvarint(p); err == nil {
			count, p, err = cutUvarint(p)
		}
		if err != nil || step == 0 || step > quantileBins || count == 0 || total+count < total {
			return s, corruptAccumulator("quantiles", acc)
		}
		last += int64(step)
		total += count
		if last >= quantileBins {
			return s, corruptAccumulator("quantiles", acc)
		}
		s.bins = append(s.bins, quantileBin{uint32(last), count})
	}
	first := s.bins[0].bin
	if uint32(s.min>>quantileShift) != first || int64(s.max>>quantileShift) != last || s.min > s.max {
		return s, corruptAccumulator("quantiles", acc)
	}
	return s, nil
}

func (s *quantileSketch) encode() []byte {
	out := append(make([]byte, 0, quantileHeader+4*len(s.bins)), sketchVersion)
	out = binary.BigEndian.AppendUint64(out, s.min)
	out = binary.BigEndian.AppendUint64(out, s.max)
	last := int64(-1)
	for _, b := range s.bins {
		out = binary.AppendUvarint(out, uint64(int64(b.bin)-last))
		out = binary.AppendUvarint(out, b.count)
		last = int64(b.bin)
	}
	return out
}

// add merges another sketch, which holds at least one element, into s.
func (s *quantileSketch) add(o quantileSketch) {
	if len(s.bins) == 0 {
		*s = o
		return
	}
	s.min, s.max = min(s.min, o.min), max(s.max, o.max)
	merged := make([]quantileBin, 0, len(s.bins)+len(o.bins))
	a, b := s.bins, o.bins
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0].bin < b[0].bin:
			merged, a = append(merged, a[0]), a[1:]
		case a[0].bin > b[0].bin:
			merged, b = append(merged, b[0]), b[1:]
		default:
			merged = append(merged, quantileBin{a[0].bin, a[0].count + b[0].count})
			a, b = a[1:], b[1:]
		}
	}
	s.bins = append(append(merged, a...), b...)
}

func (q quantiles) ordered(element []byte) uint64 {
	if q.integers {
		element = floatBytes(float64(int64Of(element)))
	}
	return binary.BigEndian.Uint64(element)
}

func (q quantiles) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var s quantileSketch
	if acc != nil {
		var err error
		if s, err = q.decode(acc); err != nil {
			return nil, err
		}
	}
	values := make([]uint64, len(elements))
	for i, e := range elements {
		values[i] = q.ordered(e)
	}
	slices.Sort(values)
	add := quantileSketch{min: values[0], max: values[len(values)-1]}
	for _, v := range values {
		bin := uint32(v >> quantileShift)
		if n := len(add.bins); n > 0 && add.bins[n-1].bin == bin {
			add.bins[n-1].count++
		} else {
			add.bins = append(add.bins, quantileBin{bin, 1})
		}
	}
	s.add(add)
	return s.encode(), nil
}

func (q quantiles) combine(a, b []byte) ([]byte, error) {
	x, err := q.decode(a)
	if err != nil {
		return nil, err
	}
	y, err := q.decode(b)
	if err != nil {
		return nil, err
	}
	x.add(y)
	return x.encode(), nil
}

// result is a JSON array with one number per quantile. The q-quantile of n
// elements is the element at rank floor(q*(n-1)), ranks from 0, taken as the
// middle of its bin but never outside [smallest, largest].
func (q quantiles) result(acc []byte) ([]byte, error) {
	s, err := q.decode(acc)
	if err != nil {
		return nil, err
	}
	var n uint64
	for _, b := range s.bins {
		n += b.count
	}
	out := []byte{'['}
	for i, at := range q.qs {
		if i > 0 {
			out = append(out, ',')
		}
		rank := n - 1
		if r := math.Floor(float64(at * float64(n-1))); r < float64(n-1) {
			rank = uint64(r)
		}
		f, err := s.valueAt(rank, n)
		if err != nil {
			return nil, err
		}
		out = appendJSONFloat(out, f)
	}
	return append(out, ']'), nil
}

// valueAt returns the element at a rank below n. The ends are exact.
func (s *quantileSketch) valueAt(rank, n uint64) (float64, error) {
	var buf [8]byte
	ordered := s.max
	switch {
	case rank == 0:
		ordered = s.min
	case rank < n-1:
		for _, b := range s.bins {
			if rank < b.count {
				ordered = min(max(middleOf(b.bin), s.min), s.max)
				break
			}
			rank -= b.count
		}
	}
	binary.BigEndian.PutUint64(buf[:], ordered)
	return floatOf(buf[:])
}

// middleOf returns the encoding of the middle of a bin.
func middleOf(bin uint32) uint64 {
	const (
		minusZero = 1<<63 - 1 // encodings
		plusZero  = 1 << 63
		plusInf   = 0xFFF << 52
		minusInf  = 1<<52 - 1
		nan       = 0xFFF8 << 48
	)
	lo := uint64(bin) << quantileShift
	hi := lo | (1<<quantileShift - 1)
	switch {
	case lo == plusZero || hi == minusZero:
		return plusZero
	case lo == plusInf:
		return plusInf
	case hi == minusInf:
		return minusInf
	case lo > plusInf:
		return nan
	}
	// Inside a bin the exponent is the same, so the middle of the encodings is
	// the middle of the numbers.
	return lo + (hi-lo)/2 + 1
}

func (q quantiles) verify(acc []byte) error {
	s, err := q.decode(acc)
	if err == nil && !bytes.Equal(s.encode(), acc) {
		return corruptAccumulator("quantiles", acc)
	}
	return err
}

func (q quantiles) checkElement([]byte) error { return nil }

// cutUvarint reads a minimal unsigned varint.
func cutUvarint(b []byte) (uint64, []byte, error) {
	n, size := binary.Uvarint(b)
	if size <= 0 || size > 1 && b[size-1] == 0 {
		return 0, nil, base.ErrCorrupt
	}
	return n, b[size:], nil
}

// appendJSONFloat appends the shortest text that reads back to f. JSON has no
// number for infinities and NaN; they become strings.
func appendJSONFloat(dst []byte, f float64) []byte {
	if isSpecial(f) {
		text := keygroup.FormatText(keygroup.Float64, f)
		return append(append(append(dst, '"'), text...), '"')
	}
	return strconv.AppendFloat(dst, f, 'g', -1, 64)
}
