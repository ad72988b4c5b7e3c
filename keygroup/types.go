package keygroup

import (
	"fmt"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// kind is the first part of a Type. The zero kind is no type.
type kind byte

const (
	kindInvalid kind = iota
	kindString
	kindInt32
	kindInt64
	kindBool
	kindBytes
	kindFloat64
	kindJSON
	kindTuple
)

// MaxTupleFields is the largest number of fields of a tuple type.
const MaxTupleFields = 32

var kindNames = [...]string{
	kindString:  "string",
	kindInt32:   "int32",
	kindInt64:   "int64",
	kindBool:    "bool",
	kindBytes:   "bytes",
	kindFloat64: "float64",
	kindJSON:    "json",
	kindTuple:   "tuple",
}

// Type is the type of a key, a user key or a value. It is comparable with ==.
// The zero Type is no type and is refused by every function here.
type Type struct {
	kind kind
	// fields holds the kinds of a tuple's fields, one byte each; a string, so
	// that a Type stays comparable.
	fields string
}

// The scalar types. Float64 and JSON are for values only.
var (
	String  = Type{kind: kindString}
	Int32   = Type{kind: kindInt32}
	Int64   = Type{kind: kindInt64}
	Bool    = Type{kind: kindBool}
	Bytes   = Type{kind: kindBytes}
	Float64 = Type{kind: kindFloat64}
	JSON    = Type{kind: kindJSON}
)

// TupleOf builds a tuple type of scalar key types; a nested tuple and the
// value-only types are refused with base.ErrInvalid.
func TupleOf(fields ...Type) (Type, error) {
	if len(fields) == 0 || len(fields) > MaxTupleFields {
		return Type{}, fmt.Errorf("%w: a tuple has 1 to %d fields, not %d", base.ErrInvalid, MaxTupleFields, len(fields))
	}
	kinds := make([]byte, len(fields))
	for i, f := range fields {
		if f.kind == kindTuple {
			return Type{}, fmt.Errorf("%w: field %d: a tuple cannot hold a tuple", base.ErrInvalid, i)
		}
		if !f.IsKey() {
			return Type{}, fmt.Errorf("%w: field %d: %s cannot be part of a tuple", base.ErrInvalid, i, f)
		}
		kinds[i] = byte(f.kind)
	}
	return Type{kind: kindTuple, fields: string(kinds)}, nil
}

// ParseType reads the text of a type: string, int32, int64, bool, bytes,
// float64, json, or tuple(...) with a comma-separated list of key types. Spaces
// around names are ignored. Errors are base.ErrInvalid.
func ParseType(text string) (Type, error) {
	s := strings.TrimSpace(text)
	inner, isTuple := strings.CutPrefix(s, "tuple(")
	if !isTuple {
		return parseScalar(s)
	}
	inner, closed := strings.CutSuffix(inner, ")")
	if !closed {
		return Type{}, fmt.Errorf("%w: type %q lacks its closing parenthesis", base.ErrInvalid, text)
	}
	if strings.Contains(inner, "tuple") {
		return Type{}, fmt.Errorf("%w: type %q: a tuple cannot hold a tuple", base.ErrInvalid, text)
	}
	if strings.Count(inner, ",") >= MaxTupleFields {
		return Type{}, fmt.Errorf("%w: a tuple has at most %d fields", base.ErrInvalid, MaxTupleFields)
	}
	parts := strings.Split(inner, ",")
	fields := make([]Type, len(parts))
	for i, p := range parts {
		f, err := parseScalar(strings.TrimSpace(p))
		if err != nil {
			return Type{}, fmt.Errorf("parsing field %d of %q: %w", i, text, err)
		}
		fields[i] = f
	}
	return TupleOf(fields...)
}

func parseScalar(s string) (Type, error) {
	for k := kindString; k < kindTuple; k++ {
		if kindNames[k] == s {
			return Type{kind: k}, nil
		}
	}
	return Type{}, fmt.Errorf("%w: unknown type %q (known: string, int32, int64, bool, bytes, float64, json, tuple(...))", base.ErrInvalid, s)
}

// String returns the text that ParseType reads back to the same type.
func (t Type) String() string {
	switch {
	case t.kind == kindInvalid || t.kind > kindTuple:
		return "invalid"
	case t.kind != kindTuple:
		return kindNames[t.kind]
	}
	var b strings.Builder
	b.WriteString("tuple(")
	for i := 0; i < len(t.fields); i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(kindNames[t.fields[i]])
	}
	b.WriteByte(')')
	return b.String()
}

// IsValid says that t is a type at all; only the zero Type is not.
func (t Type) IsValid() bool { return t.kind != kindInvalid }

// IsKey says that t can be the type of a key or of a user key. float64 and json
// cannot: they have no canonical equality that every language shares.
func (t Type) IsKey() bool {
	switch t.kind {
	case kindString, kindInt32, kindInt64, kindBool, kindBytes, kindTuple:
		return true
	default:
		return false
	}
}

// IsTuple says that t is a tuple.
func (t Type) IsTuple() bool { return t.kind == kindTuple }

// Equal says that both are the same type; the same as ==.
func (t Type) Equal(u Type) bool { return t == u }

// NumFields returns the number of fields of a tuple, and 0 for other types.
func (t Type) NumFields() int { return len(t.fields) }

// Field returns the type of a tuple's field i, 0 <= i < NumFields().
func (t Type) Field(i int) Type { return Type{kind: kind(t.fields[i])} }

// MarshalText makes a Type a string in JSON and YAML.
func (t Type) MarshalText() ([]byte, error) {
	if !t.IsValid() {
		return nil, fmt.Errorf("%w: marshalling no type", base.ErrInvalid)
	}
	return []byte(t.String()), nil
}

// UnmarshalText is the counterpart of MarshalText.
func (t *Type) UnmarshalText(b []byte) error {
	u, err := ParseType(string(b))
	if err != nil {
		return err
	}
	*t = u
	return nil
}
