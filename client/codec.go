package keel

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/keygroup"
)

// Type is the declared type of a key, user key or value.
type Type = keygroup.Type

// ParseType reads the text of a type, for example "int64" or
// "tuple(string,int32)".
func ParseType(text string) (Type, error) {
	t, err := keygroup.ParseType(text)
	if err != nil {
		return t, invalid("type", err.Error())
	}
	return t, nil
}

// Tuple is a key made of several fields: string, int32, int64, bool or []byte.
type Tuple = []any

// Codec turns values of a Go type into the canonical bytes of a declared type
// and back. Both directions refuse what the type does not have.
type Codec[T any] interface {
	// Type is the declared type.
	Type() Type
	// Encode returns the canonical bytes of v.
	Encode(v T) ([]byte, error)
	// Decode is the inverse; the result shares no memory with b.
	Decode(b []byte) (T, error)
}

type scalar[T any] struct{ t Type }

func (s scalar[T]) Type() Type { return s.t }

func (s scalar[T]) Encode(v T) ([]byte, error) { return keygroup.Encode(s.t, v) }

func (s scalar[T]) Decode(b []byte) (T, error) {
	var none T
	v, err := keygroup.Decode(s.t, b)
	if err != nil {
		return none, err
	}
	out, ok := v.(T)
	if !ok {
		return none, fmt.Errorf("decoding a %s into a %T: %w", s.t, none, ErrInvalid)
	}
	return out, nil
}

// The codecs of the scalar types.
var (
	String  Codec[string]          = scalar[string]{keygroup.String}
	Int32   Codec[int32]           = scalar[int32]{keygroup.Int32}
	Int64   Codec[int64]           = scalar[int64]{keygroup.Int64}
	Bool    Codec[bool]            = scalar[bool]{keygroup.Bool}
	Bytes   Codec[[]byte]          = scalar[[]byte]{keygroup.Bytes}
	Float64 Codec[float64]         = scalar[float64]{keygroup.Float64}
	RawJSON Codec[json.RawMessage] = scalar[json.RawMessage]{keygroup.JSON}
)

// TupleOf is the codec of tuples with fields of the given types; a list of
// fields that is no tuple type is ErrInvalid.
func TupleOf(fields ...Type) (Codec[Tuple], error) {
	t, err := keygroup.TupleOf(fields...)
	if err != nil {
		return nil, invalid("type", err.Error())
	}
	return scalar[Tuple]{t}, nil
}

// Dynamic is the codec of any type by its Go values: string, int32, int64,
// bool, []byte, float64, json.RawMessage, Tuple.
func Dynamic(t Type) Codec[any] { return dynamic{t} }

type dynamic struct{ t Type }

func (d dynamic) Type() Type                       { return d.t }
func (d dynamic) Encode(v any) ([]byte, error)     { return keygroup.Encode(d.t, v) }
func (d dynamic) Decode(b []byte) (v any, e error) { return keygroup.Decode(d.t, b) }

// JSON is the codec of a Go type by encoding/json, declared as json.
func JSON[T any]() Codec[T] { return jsonCodec[T]{} }

type jsonCodec[T any] struct{}

func (jsonCodec[T]) Type() Type { return keygroup.JSON }

func (jsonCodec[T]) Encode(v T) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding a %T as JSON: %w: %w", v, ErrInvalid, err)
	}
	return b, nil
}

func (jsonCodec[T]) Decode(b []byte) (T, error) {
	var v T
	if err := json.Unmarshal(b, &v); err != nil {
		return v, fmt.Errorf("decoding JSON into a %T: %w: %w", v, ErrInvalid, err)
	}
	return v, nil
}

// encodeKey encodes a key of a keyspace. An int stands for an int32 or int64
// key if it fits.
func encodeKey(t Type, key any) ([]byte, error) {
	if n, ok := key.(int); ok {
		switch t {
		case keygroup.Int64:
			key = int64(n)
		case keygroup.Int32:
			if n >= math.MinInt32 && n <= math.MaxInt32 {
				key = int32(n)
			}
		}
	}
	b, err := keygroup.Encode(t, key)
	if err != nil {
		return nil, invalid("key", err.Error())
	}
	return nonNil(b), nil
}

// nonNil: an empty byte string is a value, nil would be none.
func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
