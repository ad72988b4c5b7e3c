package keygroup

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"unicode/utf8"

	"github.com/keelstate/keelstate/internal/base"
)

// HashCode returns the Java-style hash code of the typed key whose canonical
// bytes are given, without decoding it and, for keys whose tuple fields are at
// most 64 bytes, without allocating. Bytes that are no encoding of a t and types
// that cannot be keys are base.ErrInvalid.
func HashCode(t Type, encoded []byte) (int32, error) {
	if t.kind != kindTuple {
		return hashScalar(t.kind, encoded)
	}
	var stack [64]byte
	scratch := stack[:0]
	h, rest := int32(1), encoded
	for i := 0; i < len(t.fields); i++ {
		enc, after, err := cutTupleField(scratch[:0], rest)
		if err != nil {
			return 0, fmt.Errorf("hashing field %d: %w", i, err)
		}
		fh, err := hashScalar(kind(t.fields[i]), enc)
		if err != nil {
			return 0, fmt.Errorf("hashing field %d: %w", i, err)
		}
		h = 31*h + fh
		scratch, rest = enc, after
	}
	if len(rest) != 0 {
		return 0, fmt.Errorf("%w: %d bytes after the last field of %s", base.ErrInvalid, len(rest), t)
	}
	return h, nil
}

func hashScalar(k kind, b []byte) (int32, error) {
	switch k {
	case kindString:
		return hashUTF8(b)
	case kindInt32:
		if len(b) == 4 {
			return int32(binary.BigEndian.Uint32(b) ^ (1 << 31)), nil
		}
	case kindInt64:
		if len(b) == 8 {
			return hashInt64(int64(binary.BigEndian.Uint64(b) ^ (1 << 63))), nil
		}
	case kindBool:
		if len(b) == 1 && b[0] <= 1 {
			return hashBool(b[0] == 1), nil
		}
	case kindBytes:
		return hashBytes(b), nil
	case kindFloat64, kindJSON:
		return 0, fmt.Errorf("%w: type %s cannot be a key", base.ErrInvalid, Type{kind: k})
	}
	return 0, fmt.Errorf("%w: %d bytes are not the encoding of a %s", base.ErrInvalid, len(b), Type{kind: k})
}

// HashCodeOf returns the hash code of a key given as a value. It is for keys
// built by the program; a value that cannot be a key is a bug of the caller and
// panics. Use Encode and HashCode for what came from outside.
func HashCodeOf(key any) int32 {
	switch v := key.(type) {
	case string:
		var h int32
		for _, r := range v {
			h = hashRune(h, r)
		}
		return h
	case int32:
		return v
	case int64:
		return hashInt64(v)
	case bool:
		return hashBool(v)
	case []byte:
		return hashBytes(v)
	case []any:
		h := int32(1)
		for _, f := range v {
			h = 31*h + HashCodeOf(f)
		}
		return h
	}
	panic(fmt.Sprintf("keygroup: a %T cannot be a key", key))
}

// hashUTF8 hashes the UTF-16 code units of a UTF-8 string: a rune beyond the
// basic plane counts as its two surrogates.
func hashUTF8(b []byte) (int32, error) {
	var h int32
	for i := 0; i < len(b); {
		if c := b[i]; c < utf8.RuneSelf {
			h = 31*h + int32(c)
			i++
			continue
		}
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n == 1 {
			return 0, fmt.Errorf("%w: a string must be valid UTF-8", base.ErrInvalid)
		}
		h = hashRune(h, r)
		i += n
	}
	return h, nil
}

func hashRune(h int32, r rune) int32 {
	if r < 0x10000 {
		return 31*h + r
	}
	r -= 0x10000
	h = 31*h + (0xD800 + r>>10)
	return 31*h + (0xDC00 + r&0x3FF)
}

func hashInt64(n int64) int32 { return int32(uint32(n) ^ uint32(uint64(n)>>32)) }

func hashBool(b bool) int32 {
	if b {
		return 1231
	}
	return 1237
}

func hashBytes(b []byte) int32 {
	h := int32(1)
	for _, c := range b {
		h = 31*h + int32(int8(c))
	}
	return h
}

// Mix spreads a hash code: MurmurHash3 (32 bits, seed 0) of the one integer,
// made non-negative. Similar hash codes land in unrelated key groups.
func Mix(hash int32) int32 {
	k := uint32(hash) * 0xcc9e2d51
	k = bits.RotateLeft32(k, 15) * 0x1b873593
	k = bits.RotateLeft32(k, 13)*5 + 0xe6546b64
	k ^= 4 // the length of the input in bytes
	k ^= k >> 16
	k *= 0x85ebca6b
	k ^= k >> 13
	k *= 0xc2b2ae35
	k ^= k >> 16
	switch m := int32(k); {
	case m >= 0:
		return m
	case m == -m: // the minimum has no positive counterpart
		return 0
	default:
		return -m
	}
}
