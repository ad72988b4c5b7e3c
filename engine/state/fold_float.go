package state

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// The folds over float64. Each step is one IEEE operation whose result is
// rounded at once: the explicit float64 conversions forbid the compiler to fuse
// a multiplication with an addition, which some processors would do and others
// not, and replicas would diverge. All NaNs become one by their encoding.

func floatBytes(f float64) []byte { return appendFloat(nil, f) }

func appendFloat(dst []byte, f float64) []byte {
	out, err := keygroup.AppendEncode(dst, keygroup.Float64, f)
	if err != nil { // a float64 always has an encoding
		panic(err)
	}
	return out
}

// floatOf decodes a canonical float64; other bytes are base.ErrCorrupt.
func floatOf(b []byte) (float64, error) {
	v, err := keygroup.Decode(keygroup.Float64, b)
	if err != nil {
		return 0, fmt.Errorf("reading float64: %w: %v", base.ErrCorrupt, err)
	}
	return v.(float64), nil
}

// sumFloat adds strictly left to right. The accumulator is the sum's encoding;
// the first element is stored as it is, so minus zero stays minus zero.
type sumFloat struct{}

func (s sumFloat) fold(acc []byte, elements [][]byte) ([]byte, error) {
	if acc == nil {
		acc, elements = elements[0], elements[1:]
	}
	sum, err := floatOf(acc)
	if err != nil {
		return nil, err
	}
	for _, e := range elements {
		x, err := floatOf(e)
		if err != nil {
			return nil, err
		}
		sum += x
	}
	return floatBytes(sum), nil
}

func (s sumFloat) combine(a, b []byte) ([]byte, error) { return s.fold(a, [][]byte{b}) }
func (s sumFloat) result(acc []byte) ([]byte, error)   { return acc, nil }
func (s sumFloat) verify(acc []byte) error             { return verifyElement("sum", keygroup.Float64, acc) }
func (s sumFloat) checkElement([]byte) error           { return nil }

// meanFloat is a sum, strictly left to right, and a count u64 BE.
type meanFloat struct{}

func (m meanFloat) decode(acc []byte) (sum float64, count uint64, err error) {
	if len(acc) != 16 || binary.BigEndian.Uint64(acc[8:]) == 0 {
		return 0, 0, corruptAccumulator("mean", acc)
	}
	sum, err = floatOf(acc[:8])
	return sum, binary.BigEndian.Uint64(acc[8:]), err
}

func (m meanFloat) encode(sum float64, count uint64) []byte {
	return binary.BigEndian.AppendUint64(appendFloat(make([]byte, 0, 16), sum), count)
}

func (m meanFloat) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var sum float64
	var count uint64
	var err error
	if acc == nil {
		// The sum starts at the first element, not at zero: 0 + -0 would be 0.
		if sum, err = floatOf(elements[0]); err != nil {
			return nil, err
		}
		count, elements = 1, elements[1:]
	} else if sum, count, err = m.decode(acc); err != nil {
		return nil, err
	}
	for _, e := range elements {
		x, err := floatOf(e)
		if err != nil {
			return nil, err
		}
		sum += x
		count++
	}
	return m.encode(sum, count), nil
}

func (m meanFloat) combine(a, b []byte) ([]byte, error) {
	sum, count, err := m.decode(a)
	if err != nil {
		return nil, err
	}
	sumB, countB, err := m.decode(b)
	if err != nil {
		return nil, err
	}
	return m.encode(sum+sumB, count+countB), nil
}

func (m meanFloat) result(acc []byte) ([]byte, error) {
	sum, count, err := m.decode(acc)
	if err != nil {
		return nil, err
	}
	return floatBytes(sum / float64(count)), nil
}

func (m meanFloat) verify(acc []byte) error {
	_, _, err := m.decode(acc)
	return err
}

func (m meanFloat) checkElement([]byte) error { return nil }

// varianceFloat is the population variance by Welford's method, left to right:
// count u64 BE, mean, and the sum of squared differences from the mean. Two of
// them are combined by Chan's formula.
type varianceFloat struct{}

type momentsFloat struct {
	count    uint64
	mean, m2 float64
}

func (v varianceFloat) decode(acc []byte) (m momentsFloat, err error) {
	if len(acc) != 24 || binary.BigEndian.Uint64(acc) == 0 {
		return m, corruptAccumulator("variance", acc)
	}
	m.count = binary.BigEndian.Uint64(acc)
	if m.mean, err = floatOf(acc[8:16]); err != nil {
		return m, err
	}
	m.m2, err = floatOf(acc[16:])
	return m, err
}

func (m momentsFloat) encode() []byte {
	out := binary.BigEndian.AppendUint64(make([]byte, 0, 24), m.count)
	return appendFloat(appendFloat(out, m.mean), m.m2)
}

func (v varianceFloat) fold(acc []byte, elements [][]byte) ([]byte, error) {
	var m momentsFloat
	if acc != nil {
		var err error
		if m, err = v.decode(acc); err != nil {
			return nil, err
		}
	}
	for _, e := range elements {
		x, err := floatOf(e)
		if err != nil {
			return nil, err
		}
		m.count++
		delta := float64(x - m.mean)
		step := float64(delta / float64(m.count))
		m.mean = float64(m.mean + step)
		rest := float64(x - m.mean)
		square := float64(delta * rest)
		m.m2 = float64(m.m2 + square)
	}
	return m.encode(), nil
}

func (v varianceFloat) combine(a, b []byte) ([]byte, error) {
	x, err := v.decode(a)
	if err != nil {
		return nil, err
	}
	y, err := v.decode(b)
	if err != nil {
		return nil, err
	}
	n := x.count + y.count
	delta := float64(y.mean - x.mean)
	share := float64(float64(y.count) / float64(n))
	shift := float64(delta * share)
	square := float64(delta * delta)
	between := float64(float64(square*float64(x.count)) * share)
	m2 := float64(x.m2 + y.m2)
	out := momentsFloat{count: n, mean: float64(x.mean + shift), m2: float64(m2 + between)}
	return out.encode(), nil
}

func (v varianceFloat) result(acc []byte) ([]byte, error) {
	m, err := v.decode(acc)
	if err != nil {
		return nil, err
	}
	return floatBytes(m.m2 / float64(m.count)), nil
}

func (v varianceFloat) verify(acc []byte) error {
	_, err := v.decode(acc)
	return err
}

func (v varianceFloat) checkElement([]byte) error { return nil }

// isSpecial says that f has no JSON number.
func isSpecial(f float64) bool { return math.IsNaN(f) || math.IsInf(f, 0) }
