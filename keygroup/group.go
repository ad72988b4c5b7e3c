package keygroup

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/keelstate/keelstate/internal/base"
)

// Group is a key group: a hash bucket, 0 <= group < M.
type Group uint32

const (
	// MaxM is the largest number of key groups of a cluster.
	MaxM = 32768
	// minDefaultM is the smallest M that DefaultM proposes.
	minDefaultM = 128
	// maxOneByteM is the largest M whose groups are stored in one byte.
	maxOneByteM = 128
)

// CheckM returns base.ErrInvalid unless 1 <= m <= MaxM.
func CheckM(m int) error {
	if m < 1 || m > MaxM {
		return fmt.Errorf("%w: the number of key groups must be 1 to %d, not %d", base.ErrInvalid, MaxM, m)
	}
	return nil
}

// GroupOf returns the key group of a hash code among m groups, 1 <= m <= MaxM.
func GroupOf(hash int32, m int) Group { return Group(int(Mix(hash)) % m) }

// GroupOfKey returns the key group of a key given by its type and canonical
// bytes. Errors are those of HashCode.
func GroupOfKey(t Type, encoded []byte, m int) (Group, error) {
	h, err := HashCode(t, encoded)
	if err != nil {
		return 0, err
	}
	return GroupOf(h, m), nil
}

// OwnerOf returns which of p owners holds a group when [0, m) is cut into p
// parts; 1 <= p <= m.
func OwnerOf(g Group, m, p int) int { return int(g) * p / m }

// RangeOf returns the groups of owner i of p, 0 <= i < p <= m (KG5).
func RangeOf(owner, m, p int) Range {
	return Range{
		Lo: Group((owner*m + p - 1) / p),
		Hi: Group(((owner+1)*m-1)/p + 1),
	}
}

// DefaultM returns the number of key groups proposed for parallelism p: one and
// a half times p rounded up to a power of two, within [128, MaxM].
func DefaultM(p int) int {
	if p < 1 {
		return minDefaultM
	}
	if p >= MaxM {
		return MaxM
	}
	return min(max(1<<bits.Len(uint(p+p/2-1)), minDefaultM), MaxM)
}

// Range is the half-open range [Lo, Hi) of key groups; empty when Hi <= Lo.
type Range struct {
	Lo Group `json:"lo"`
	Hi Group `json:"hi"`
}

// FullRange returns [0, m).
func FullRange(m int) Range { return Range{Hi: Group(m)} }

// Empty says that no group is in the range.
func (r Range) Empty() bool { return r.Hi <= r.Lo }

// Len returns the number of groups in the range.
func (r Range) Len() int {
	if r.Empty() {
		return 0
	}
	return int(r.Hi - r.Lo)
}

// Contains says whether g is in the range.
func (r Range) Contains(g Group) bool { return r.Lo <= g && g < r.Hi }

// ContainsRange says whether every group of s is in r.
func (r Range) ContainsRange(s Range) bool { return s.Empty() || r.Lo <= s.Lo && s.Hi <= r.Hi }

// Overlaps says whether some group is in both ranges.
func (r Range) Overlaps(s Range) bool { return max(r.Lo, s.Lo) < min(r.Hi, s.Hi) }

// String prints the range as [lo,hi).
func (r Range) String() string { return fmt.Sprintf("[%d,%d)", r.Lo, r.Hi) }

// PrefixLen returns how many bytes the key group takes at the start of a stored
// key: 1 when m <= 128, else 2.
func PrefixLen(m int) int {
	if m <= maxOneByteM {
		return 1
	}
	return 2
}

// AppendGroup appends the stored form of g: PrefixLen(m) bytes, big-endian.
func AppendGroup(dst []byte, m int, g Group) []byte {
	if m <= maxOneByteM {
		return append(dst, byte(g))
	}
	return binary.BigEndian.AppendUint16(dst, uint16(g))
}

// CutGroup reads the group at the start of a stored key and returns what
// follows it. Too few bytes and a group >= m are base.ErrCorrupt.
func CutGroup(b []byte, m int) (Group, []byte, error) {
	n := PrefixLen(m)
	if len(b) < n {
		return 0, nil, fmt.Errorf("%w: a stored key of %d bytes has no key group", base.ErrCorrupt, len(b))
	}
	g := Group(b[0])
	if n == 2 {
		g = Group(binary.BigEndian.Uint16(b))
	}
	if int(g) >= m {
		return 0, nil, fmt.Errorf("%w: key group %d in a store of %d key groups", base.ErrCorrupt, g, m)
	}
	return g, b[n:], nil
}
