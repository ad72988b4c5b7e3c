package state

import (
	"context"
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
	sums, err := l.HashGroups(context.Background(), r, decls, keygroup.Range{Lo: g, Hi: g + 1})
	if err != nil {
		return Hash128{}, err
	}
	return sums[0], nil
}

// hashCheck is after how many entries HashGroups looks at its context.
const hashCheck = 1024

// HashGroups returns the content hash of each key group of a range over the given
// states, with one scan of each state: where a table in memory is not sorted, to
// begin a scan costs as much as the whole table.
func (l Layout) HashGroups(ctx context.Context, r engine.Reader, decls []*Declaration, groups keygroup.Range) ([]Hash128, error) {
	if int(groups.Hi) > l.M || groups.Lo > groups.Hi {
		return nil, base.Invalid("groups", fmt.Sprintf("there are %d key groups", l.M))
	}
	sums := make([]Hash128, int(groups.Hi)-int(groups.Lo))
	for _, d := range decls {
		if err := l.hashState(ctx, r, d, groups, sums); err != nil {
			return nil, fmt.Errorf("hashing the key groups %s of state %d: %w", groups, d.ID, err)
		}
	}
	return sums, nil
}

// hashState adds the entries of one state to the sums of their groups.
func (l Layout) hashState(ctx context.Context, r engine.Reader, d *Declaration, groups keygroup.Range, sums []Hash128) error {
	lo, hi := l.GroupBounds(groups)
	it := r.Scan(d.ID, lo, hi, engine.ScanOptions{})
	defer it.Close()
	var scratch []byte
	for n := 0; it.Next(); n++ {
		if n%hashCheck == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		g, _, err := keygroup.CutGroup(it.Key(), l.M)
		if err != nil {
			return err
		}
		var h Hash128
		h, scratch = HashEntry(d.ID, it.Key(), it.Value(), scratch)
		sums[g-groups.Lo] = sums[g-groups.Lo].Plus(h)
	}
	return it.Err()
}
