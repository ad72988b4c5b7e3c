package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/big"
	"math/bits"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// The exact folds over integers and over bytes. Their accumulators are the
// payloads that the engine's merges fold, so combine here and Fold of package
// engine must agree.

func corruptAccumulator(name string, acc []byte) error {
	return fmt.Errorf("reading accumulator of %s: %d bytes: %w", name, len(acc), base.ErrCorrupt)
}

func int64Of(element []byte) int64 { return int64(binary.BigEndian.Uint64(element) ^ (1 << 63)) }

func appendInt64(dst []byte, n int64) []byte {
	return binary.BigEndian.AppendUint64(dst, uint64(n)^(1<<63))
}

// int128 is a two's complement integer. 2^64 additions of an int64 fit, so the
// additions below cannot overflow.
type int128 struct {
	hi int64
	lo uint64
}

func (a int128) plus(b int128) int128 {
	lo, carry := bits.Add64(a.lo, b.lo, 0)
	hi, _ := bits.Add64(uint64(a.hi), uint64(b.hi), carry)
	return int128{int64(hi), lo}
}

func wide(n int64) int128 { return int128{n >> 63, uint64(n)} }

func (a int128) append(dst []byte) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(dst, uint64(a.hi)), a.lo)
}

func int128Of(b []byte) int128 {
	return int128{int64(binary.BigEndian.Uint64(b)), binary.BigEndian.Uint64(b[8:])}
}

func (a int128) fits64() bool { return a.hi == int64(a.lo)>>63 }

func (a int128) big() *big.Int {
	n := new(big.Int).SetInt64(a.hi)
	return n.Lsh(n, 64).Add(n, new(big.Int).SetUint64(a.lo))
}

// sumInt is the exact sum of int64 elements, or their count: 16 bytes,
// big-endian two's complement.
type sumInt struct{ count bool }

func (s sumInt) name() string {
	if s.count {
		return "count"
	}
	return "sum"
}

func (s sumInt) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var n int128
	if acc != nil {
		if err := s.verify(acc); err != nil {
			return nil, err
		}
		n = int128Of(acc)
	}
	if s.count {
		n = n.plus(wide(int64(len(elements))))
	} else {
		for _, e := range elements {
			n = n.plus(wide(int64Of(e)))
		}
	}
	return n.append(make([]byte, 0, 16)), nil
}

func (s sumInt) combine(a, b []byte) ([]byte, error) {
	if err := verifyBoth(s, a, b); err != nil {
		return nil, err
	}
	return int128Of(a).plus(int128Of(b)).append(make([]byte, 0, 16)), nil
}

func (s sumInt) result(acc []byte) ([]byte, error) {
	if err := s.verify(acc); err != nil {
		return nil, err
	}
	n := int128Of(acc)
	if !n.fits64() {
		return nil, fmt.Errorf("%w: the %s is %s, which is no int64", base.ErrOutOfRange, s.name(), n.big())
	}
	return appendInt64(nil, int64(n.lo)), nil
}

func (s sumInt) verify(acc []byte) error {
	if len(acc) != 16 {
		return corruptAccumulator(s.name(), acc)
	}
	return nil
}

func (sumInt) checkElement([]byte) error { return nil }

func verifyBoth(v interface{ verify([]byte) error }, a, b []byte) error {
	if err := v.verify(a); err != nil {
		return err
	}
	return v.verify(b)
}

// verifyElement checks an accumulator that is an element of type t.
func verifyElement(name string, t keygroup.Type, acc []byte) error {
	if err := keygroup.Validate(t, acc); err != nil {
		return fmt.Errorf("reading accumulator of %s: %w: %v", name, base.ErrCorrupt, err)
	}
	return nil
}

// extreme is the minimum or maximum by the order-preserving encoding; the
// accumulator is the element.
type extreme struct {
	t   keygroup.Type
	max bool
}

func (x extreme) fold(acc []byte, elements [][]byte) ([]byte, error) {
	for _, e := range elements {
		if acc == nil || x.max == (bytes.Compare(e, acc) > 0) && !bytes.Equal(e, acc) {
			acc = e
		}
	}
	return acc, nil
}

func (x extreme) combine(a, b []byte) ([]byte, error) { return x.fold(a, [][]byte{b}) }

func (x extreme) result(acc []byte) ([]byte, error) { return acc, nil }
func (x extreme) verify(acc []byte) error           { return verifyElement("min or max", x.t, acc) }
func (x extreme) checkElement([]byte) error         { return nil }

// pick keeps the first or the last element; the accumulator is the element.
type pick struct {
	t    keygroup.Type
	last bool
}

func (p pick) fold(acc []byte, elements [][]byte) ([]byte, error) {
	if p.last {
		return elements[len(elements)-1], nil
	}
	if acc == nil {
		return elements[0], nil
	}
	return acc, nil
}

func (p pick) combine(a, b []byte) ([]byte, error) { return p.fold(a, [][]byte{b}) }
func (p pick) result(acc []byte) ([]byte, error)   { return acc, nil }
func (p pick) verify(acc []byte) error             { return verifyElement("first or last", p.t, acc) }
func (p pick) checkElement([]byte) error           { return nil }

// concat joins strings or bytes without any separator; the accumulator is the
// joined value. Joined valid UTF-8 is valid UTF-8.
type concat struct{ t keygroup.Type }

func (c concat) fold(acc []byte, elements [][]byte) ([]byte, error) {
	n := len(acc)
	for _, e := range elements {
		n += len(e)
	}
	out := append(make([]byte, 0, n), acc...)
	for _, e := range elements {
		out = append(out, e...)
	}
	return out, nil
}

func (c concat) combine(a, b []byte) ([]byte, error) { return c.fold(a, [][]byte{b}) }
func (c concat) result(acc []byte) ([]byte, error)   { return acc, nil }
func (c concat) verify(acc []byte) error             { return verifyElement("concat", c.t, acc) }
func (c concat) checkElement([]byte) error           { return nil }

// bitwise is the AND or OR of int64 elements; the accumulator is the element's
// encoding, which has the sign bit flipped.
type bitwise struct{ or bool }

func (w bitwise) fold(acc []byte, elements [][]byte) ([]byte, error) {
	if acc == nil {
		acc, elements = elements[0], elements[1:]
	}
	if err := w.verify(acc); err != nil {
		return nil, err
	}
	n := int64Of(acc)
	for _, e := range elements {
		if w.or {
			n |= int64Of(e)
		} else {
			n &= int64Of(e)
		}
	}
	return appendInt64(make([]byte, 0, 8), n), nil
}

func (w bitwise) combine(a, b []byte) ([]byte, error) {
	if err := verifyBoth(w, a, b); err != nil {
		return nil, err
	}
	return w.fold(a, [][]byte{b})
}

func (w bitwise) result(acc []byte) ([]byte, error) { return acc, nil }
func (w bitwise) verify(acc []byte) error {
	return verifyElement("bit-and or bit-or", keygroup.Int64, acc)
}
func (w bitwise) checkElement([]byte) error { return nil }

// meanInt is the exact mean of int64 elements: a 16-byte sum and an 8-byte
// count, both big-endian two's complement.
type meanInt struct{}

func (m meanInt) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var sum int128
	var count uint64
	if acc != nil {
		if err := m.verify(acc); err != nil {
			return nil, err
		}
		sum, count = int128Of(acc), binary.BigEndian.Uint64(acc[16:])
	}
	for _, e := range elements {
		sum = sum.plus(wide(int64Of(e)))
	}
	count += uint64(len(elements))
	return binary.BigEndian.AppendUint64(sum.append(make([]byte, 0, 24)), count), nil
}

func (m meanInt) combine(a, b []byte) ([]byte, error) {
	if err := verifyBoth(m, a, b); err != nil {
		return nil, err
	}
	sum := int128Of(a).plus(int128Of(b))
	count := binary.BigEndian.Uint64(a[16:]) + binary.BigEndian.Uint64(b[16:])
	return binary.BigEndian.AppendUint64(sum.append(make([]byte, 0, 24)), count), nil
}

func (m meanInt) result(acc []byte) ([]byte, error) {
	if err := m.verify(acc); err != nil {
		return nil, err
	}
	count := new(big.Int).SetUint64(binary.BigEndian.Uint64(acc[16:]))
	f, _ := new(big.Rat).SetFrac(int128Of(acc).big(), count).Float64()
	return floatBytes(f), nil
}

func (m meanInt) verify(acc []byte) error {
	// The count is at least 1 and below 2^63: an absent accumulator is not stored.
	if len(acc) != 24 || int64(binary.BigEndian.Uint64(acc[16:])) <= 0 {
		return corruptAccumulator("mean", acc)
	}
	return nil
}

func (m meanInt) checkElement([]byte) error { return nil }

// varianceInt is the exact population variance of int64 elements: count u64,
// sum int128, sum of squares u192, all big-endian. 2^64 squares fit in 192 bits.
type varianceInt struct{}

type momentsInt struct {
	count   uint64
	sum     int128
	squares [3]uint64 // most significant first
}

const varianceIntLen = 8 + 16 + 24

func (v varianceInt) decode(acc []byte) (m momentsInt, err error) {
	if len(acc) != varianceIntLen || binary.BigEndian.Uint64(acc) == 0 {
		return m, corruptAccumulator("variance", acc)
	}
	m.count, m.sum = binary.BigEndian.Uint64(acc), int128Of(acc[8:])
	for i := range m.squares {
		m.squares[i] = binary.BigEndian.Uint64(acc[24+8*i:])
	}
	return m, nil
}

func (m *momentsInt) encode() []byte {
	out := binary.BigEndian.AppendUint64(make([]byte, 0, varianceIntLen), m.count)
	out = m.sum.append(out)
	for _, w := range m.squares {
		out = binary.BigEndian.AppendUint64(out, w)
	}
	return out
}

func (m *momentsInt) addSquares(s [3]uint64) {
	var carry uint64
	for i := 2; i >= 0; i-- {
		m.squares[i], carry = bits.Add64(m.squares[i], s[i], carry)
	}
}

func (v varianceInt) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var m momentsInt
	if acc != nil {
		var err error
		if m, err = v.decode(acc); err != nil {
			return nil, err
		}
	}
	for _, e := range elements {
		n := int64Of(e)
		m.count++
		m.sum = m.sum.plus(wide(n))
		abs := uint64(n)
		if n < 0 {
			abs = -abs
		}
		hi, lo := bits.Mul64(abs, abs)
		m.addSquares([3]uint64{0, hi, lo})
	}
	return m.encode(), nil
}

func (v varianceInt) combine(a, b []byte) ([]byte, error) {
	m, err := v.decode(a)
	if err != nil {
		return nil, err
	}
	o, err := v.decode(b)
	if err != nil {
		return nil, err
	}
	m.count += o.count
	m.sum = m.sum.plus(o.sum)
	m.addSquares(o.squares)
	return m.encode(), nil
}

// result is (n*squares - sum^2) / n^2, rounded once to the nearest float64.
func (v varianceInt) result(acc []byte) ([]byte, error) {
	m, err := v.decode(acc)
	if err != nil {
		return nil, err
	}
	n, sum := new(big.Int).SetUint64(m.count), m.sum.big()
	squares := new(big.Int)
	for _, w := range m.squares {
		squares.Lsh(squares, 64).Or(squares, new(big.Int).SetUint64(w))
	}
	top := new(big.Int).Sub(new(big.Int).Mul(n, squares), new(big.Int).Mul(sum, sum))
	f, _ := new(big.Rat).SetFrac(top, new(big.Int).Mul(n, n)).Float64()
	return floatBytes(f), nil
}

func (v varianceInt) verify(acc []byte) error {
	_, err := v.decode(acc)
	return err
}

func (v varianceInt) checkElement([]byte) error { return nil }
