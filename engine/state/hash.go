package state

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"

	"github.com/zeebo/xxh3"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Hash128 is a content hash: a sum modulo 2^128 over entries, so that it does
// not depend on their order and that hashes of disjoint parts add up to the
// hash of the whole. The zero value is the hash of nothing.
// docs/formats/content-hash.md describes it.
type Hash128 struct{ Hi, Lo uint64 }

// Plus returns the hash of two disjoint parts together.
func (h Hash128) Plus(o Hash128) Hash128 {
	lo, carry := bits.Add64(h.Lo, o.Lo, 0)
	hi, _ := bits.Add64(h.Hi, o.Hi, carry)
	return Hash128{hi, lo}
}

// String returns 32 hexadecimal digits, most significant first.
func (h Hash128) String() string { return fmt.Sprintf("%016x%016x", h.Hi, h.Lo) }

// Append appends the 16 bytes of h, big-endian.
func (h Hash128) Append(dst []byte) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(dst, h.Hi), h.Lo)
}

// ParseHash128 reads what String wrote; errors are base.ErrInvalid.
func ParseHash128(text string) (Hash128, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != 16 {
		return Hash128{}, fmt.Errorf("%w: %.40q is not a hash of 32 hexadecimal digits", base.ErrInvalid, text)
	}
	return Hash128{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, nil
}

// HashEntry returns the hash of one entry: the xxh3-128 (seed 0) of the
// declaration id (u32 BE), the length of the engine key (u32 BE), the engine
// key, and the folded value with its header. Scratch, if not nil, is reused.
func HashEntry(id engine.FamilyID, key, value []byte, scratch []byte) (Hash128, []byte) {
	b := binary.BigEndian.AppendUint32(scratch[:0], uint32(id))
	b = binary.BigEndian.AppendUint32(b, uint32(len(key)))
	b = append(append(b, key...), value...)
	u := xxh3.Hash128(b)
	return Hash128{u.Hi, u.Lo}, b
}

// HashGroup returns the content hash of one key group over the given states.
// Use a View as the reader, so that all of it is of one instant.
func (l Layout) HashGroup(r engine.Reader, decls []*Declaration, g keygroup.Group) (Hash128, error) {
	var sum Hash128
	if int(g) >= l.M {
		return sum, base.Invalid("group", fmt.Sprintf("there are %d key groups", l.M))
	}
	lo, hi := l.groupBounds(keygroup.Range{Lo: g, Hi: g + 1})
	var scratch []byte
	for _, d := range decls {
		it := r.Scan(d.ID, lo, hi, engine.ScanOptions{})
		for it.Next() {
			var h Hash128
			h, scratch = HashEntry(d.ID, it.Key(), it.Value(), scratch)
			sum = sum.Plus(h)
		}
		err := it.Err()
		it.Close()
		if err != nil {
			return Hash128{}, fmt.Errorf("hashing key group %d of state %d: %w", g, d.ID, err)
		}
	}
	return sum, nil
}
