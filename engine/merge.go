package engine

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/keelstate/keelstate/internal/base"
)

// Fold folds merge operands, oldest first, onto the value that was there
// before (hasBase false: nothing was). It is the reference of every MergeKind:
// engine/mem and Txn use it, and the native operators of engine/rocks must give
// the same bytes. The result shares no memory with the arguments.
//
// Every kind is associative over these values, headers included, so operands
// may be folded among themselves first: Fold(k, a, true, b) of two operands is
// an operand that stands for both.
//
// The 128-bit sums are not checked for overflow: each operand adds an int64 (or
// a count), so 2^63 operands are needed to leave the range of an int128, that
// is 292 years at a thousand million a second. Whether a sum fits the type of
// the state is decided when it is read.
//
// Errors: base.ErrInvalid for MergeNone, for an unknown kind and for neither
// base nor operand; base.ErrCorrupt or base.ErrFormatVersion for a base or an
// operand that is not a value of the kind.
func Fold(k MergeKind, baseValue []byte, hasBase bool, operands ...[]byte) ([]byte, error) {
	if k == MergeNone || k > MergeSumCount {
		return nil, fmt.Errorf("folding with merge kind %d: %w", k, base.ErrInvalid)
	}
	oldest := operands
	if hasBase {
		oldest = append(make([][]byte, 0, 1+len(operands)), baseValue)
		oldest = append(oldest, operands...)
	}
	if len(oldest) == 0 {
		return nil, fmt.Errorf("folding nothing: %w", base.ErrInvalid)
	}
	var acc folded
	for i, v := range oldest {
		if err := acc.add(k, v, i == 0); err != nil {
			return nil, fmt.Errorf("folding value %d of %d with merge kind %d: %w", i+1, len(oldest), k, err)
		}
	}
	return acc.encode(k), nil
}

// folded is the fold of the values so far. For the kinds that choose a payload,
// payload aliases the chosen value; for the others it is in words.
type folded struct {
	header  Header
	payload []byte
	words   [3]uint64
}

// payloadLen is the exact length of a kind's payload, or -1 where any will do.
func payloadLen(k MergeKind) int {
	switch k {
	case MergeSum128:
		return 16
	case MergeAnd64, MergeOr64:
		return 8
	case MergeSumCount:
		return 24
	default:
		return -1
	}
}

func (a *folded) add(k MergeKind, value []byte, first bool) error {
	h, p, err := ParseHeader(value)
	if err != nil {
		return err
	}
	n := payloadLen(k)
	if n >= 0 && len(p) != n {
		return fmt.Errorf("payload has %d bytes, not %d: %w", len(p), n, base.ErrCorrupt)
	}
	var w [3]uint64
	for i := range n / 8 {
		w[i] = binary.BigEndian.Uint64(p[8*i:])
	}
	if first {
		a.header, a.payload, a.words = h, p, w
		return nil
	}
	a.header = Header{
		Flags:       h.Flags,
		Codec:       h.Codec,
		Sequence:    max(a.header.Sequence, h.Sequence),
		TimestampMs: max(a.header.TimestampMs, h.TimestampMs),
	}
	a.combine(k, p, w)
	return nil
}

// signBit is flipped in the key encoding of an int64.
const signBit = uint64(1) << 63

func (a *folded) combine(k MergeKind, p []byte, w [3]uint64) {
	var carry uint64
	switch k {
	case MergeMin:
		if bytes.Compare(p, a.payload) < 0 {
			a.payload = p
		}
	case MergeMax:
		if bytes.Compare(p, a.payload) > 0 {
			a.payload = p
		}
	case MergeFirst: // the oldest payload stays
	case MergeAnd64:
		a.words[0] = ((a.words[0] ^ signBit) & (w[0] ^ signBit)) ^ signBit
	case MergeOr64:
		a.words[0] = ((a.words[0] ^ signBit) | (w[0] ^ signBit)) ^ signBit
	case MergeSumCount:
		a.words[2] += w[2]
		fallthrough
	case MergeSum128:
		a.words[1], carry = bits.Add64(a.words[1], w[1], 0)
		a.words[0], _ = bits.Add64(a.words[0], w[0], carry)
	}
}

func (a *folded) encode(k MergeKind) []byte {
	n := payloadLen(k)
	out := make([]byte, 0, HeaderLen+max(n, len(a.payload)))
	out = AppendHeader(out, a.header)
	if n < 0 {
		return append(out, a.payload...)
	}
	for i := range n / 8 {
		out = binary.BigEndian.AppendUint64(out, a.words[i])
	}
	return out
}
