package keygroup

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/keelstate/keelstate/internal/base"
)

// Frozen: bytes inside a tuple. A zero byte of a field is escaped, and a field
// ends with a pair that sorts before every continuation of the field.
const (
	tupleZero    = 0x00
	tupleEscaped = 0xFF // 0x00 0xFF is a zero byte of the field
	tupleEnd     = 0x01 // 0x00 0x01 ends the field
)

// canonicalNaN is the only NaN in an encoding: all NaNs are one value. It sorts
// above plus infinity.
const canonicalNaN = 0x7FF8000000000000

// Encode returns the canonical bytes of v, which must be of type t: string,
// int32, int64, bool, []byte, []any (one element per field) for keys, and
// float64 and json.RawMessage for values. See KG1 to KG3. A value of another
// Go type, a string that is not UTF-8 and invalid JSON are base.ErrInvalid.
func Encode(t Type, v any) ([]byte, error) { return AppendEncode(nil, t, v) }

// AppendEncode appends the canonical bytes of v to dst. On an error it returns
// dst with its contents up to its length unchanged.
func AppendEncode(dst []byte, t Type, v any) ([]byte, error) {
	if t.kind == kindTuple {
		return appendTuple(dst, t, v)
	}
	return appendScalar(dst, t.kind, v)
}

func appendScalar(dst []byte, k kind, v any) ([]byte, error) {
	switch k {
	case kindString:
		if s, ok := v.(string); ok {
			if !utf8.ValidString(s) {
				return dst, fmt.Errorf("%w: a string must be valid UTF-8", base.ErrInvalid)
			}
			return append(dst, s...), nil
		}
	case kindInt32:
		if n, ok := v.(int32); ok {
			return binary.BigEndian.AppendUint32(dst, uint32(n)^(1<<31)), nil
		}
	case kindInt64:
		if n, ok := v.(int64); ok {
			return binary.BigEndian.AppendUint64(dst, uint64(n)^(1<<63)), nil
		}
	case kindBool:
		if b, ok := v.(bool); ok {
			if b {
				return append(dst, 1), nil
			}
			return append(dst, 0), nil
		}
	case kindBytes:
		if b, ok := v.([]byte); ok {
			return append(dst, b...), nil
		}
	case kindFloat64:
		if f, ok := v.(float64); ok {
			return binary.BigEndian.AppendUint64(dst, orderedFloatBits(f)), nil
		}
	case kindJSON:
		if raw, ok := v.(json.RawMessage); ok {
			if err := checkJSON(raw); err != nil {
				return dst, err
			}
			return append(dst, raw...), nil
		}
	}
	return dst, fmt.Errorf("%w: a value of type %s cannot be a %T", base.ErrInvalid, Type{kind: k}, v)
}

func checkJSON(b []byte) error {
	if !utf8.Valid(b) || !json.Valid(b) {
		return fmt.Errorf("%w: not valid JSON", base.ErrInvalid)
	}
	return nil
}

// orderedFloatBits maps IEEE bits to an integer with the same order: a positive
// number gets its sign bit set, a negative one has all its bits flipped.
// Minus zero sorts just below plus zero and stays distinct from it.
func orderedFloatBits(f float64) uint64 {
	bits := math.Float64bits(f)
	if f != f {
		bits = canonicalNaN
	}
	if bits>>63 != 0 {
		return ^bits
	}
	return bits | 1<<63
}

func appendTuple(dst []byte, t Type, v any) ([]byte, error) {
	fields, ok := v.([]any)
	if !ok {
		return dst, fmt.Errorf("%w: a value of type %s cannot be a %T", base.ErrInvalid, t, v)
	}
	if len(fields) != len(t.fields) {
		return dst, fmt.Errorf("%w: a value of type %s has %d fields, not %d", base.ErrInvalid, t, len(t.fields), len(fields))
	}
	start := len(dst)
	var stack [64]byte
	scratch := stack[:0]
	for i, f := range fields {
		enc, err := appendScalar(scratch[:0], kind(t.fields[i]), f)
		if err != nil {
			return dst[:start], fmt.Errorf("encoding field %d: %w", i, err)
		}
		scratch = enc
		dst = appendTupleField(dst, enc)
	}
	return dst, nil
}

func appendTupleField(dst, enc []byte) []byte {
	for _, c := range enc {
		dst = append(dst, c)
		if c == tupleZero {
			dst = append(dst, tupleEscaped)
		}
	}
	return append(dst, tupleZero, tupleEnd)
}

// Decode is the inverse of Encode. It refuses, with base.ErrInvalid, every
// string of bytes that Encode(t, ...) cannot make (KG2). The result shares no
// memory with b.
func Decode(t Type, b []byte) (any, error) {
	if t.kind != kindTuple {
		return decodeScalar(t.kind, b)
	}
	fields := make([]any, len(t.fields))
	var stack [64]byte
	scratch := stack[:0]
	rest := b
	for i := range fields {
		enc, after, err := cutTupleField(scratch[:0], rest)
		if err != nil {
			return nil, fmt.Errorf("decoding field %d of %s: %w", i, t, err)
		}
		fields[i], err = decodeScalar(kind(t.fields[i]), enc)
		if err != nil {
			return nil, fmt.Errorf("decoding field %d of %s: %w", i, t, err)
		}
		scratch, rest = enc, after
	}
	if len(rest) != 0 {
		return nil, fmt.Errorf("%w: %d bytes after the last field of %s", base.ErrInvalid, len(rest), t)
	}
	return fields, nil
}

// Validate says whether Decode would accept b, without building the value.
func Validate(t Type, b []byte) error {
	if t.kind == kindString { // the common case, without an allocation
		if !utf8.Valid(b) {
			return fmt.Errorf("%w: a string must be valid UTF-8", base.ErrInvalid)
		}
		return nil
	}
	if t.kind == kindBytes {
		return nil
	}
	if t.kind == kindJSON {
		return checkJSON(b)
	}
	_, err := Decode(t, b)
	return err
}

func decodeScalar(k kind, b []byte) (any, error) {
	switch k {
	case kindString:
		if !utf8.Valid(b) {
			return nil, fmt.Errorf("%w: a string must be valid UTF-8", base.ErrInvalid)
		}
		return string(b), nil
	case kindInt32:
		if len(b) == 4 {
			return int32(binary.BigEndian.Uint32(b) ^ (1 << 31)), nil
		}
	case kindInt64:
		if len(b) == 8 {
			return int64(binary.BigEndian.Uint64(b) ^ (1 << 63)), nil
		}
	case kindBool:
		if len(b) == 1 && b[0] <= 1 {
			return b[0] == 1, nil
		}
	case kindBytes:
		return append([]byte{}, b...), nil
	case kindFloat64:
		if len(b) == 8 {
			return decodeFloat(binary.BigEndian.Uint64(b))
		}
	case kindJSON:
		if err := checkJSON(b); err != nil {
			return nil, err
		}
		return append(json.RawMessage{}, b...), nil
	}
	return nil, fmt.Errorf("%w: %d bytes are not the encoding of a %s", base.ErrInvalid, len(b), Type{kind: k})
}

func decodeFloat(ordered uint64) (any, error) {
	bits := ^ordered
	if ordered>>63 != 0 {
		bits = ordered &^ (1 << 63)
	}
	f := math.Float64frombits(bits)
	if f != f && bits != canonicalNaN {
		return nil, fmt.Errorf("%w: a NaN other than the canonical one", base.ErrInvalid)
	}
	return f, nil
}

// cutTupleField appends the unescaped bytes of the first field of b to dst, and
// returns what follows the field in b.
func cutTupleField(dst, b []byte) (field, rest []byte, err error) {
	for i := 0; i < len(b); i++ {
		if b[i] != tupleZero {
			dst = append(dst, b[i])
			continue
		}
		if i+1 == len(b) {
			break
		}
		switch i++; b[i] {
		case tupleEscaped:
			dst = append(dst, tupleZero)
		case tupleEnd:
			return dst, b[i+1:], nil
		default:
			return nil, nil, fmt.Errorf("%w: 0x00 0x%02x at offset %d is neither an escape nor an end", base.ErrInvalid, b[i], i-1)
		}
	}
	return nil, nil, fmt.Errorf("%w: the field does not end", base.ErrInvalid)
}
