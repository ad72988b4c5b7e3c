package keygroup

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

func mustType(t testing.TB, text string) Type {
	t.Helper()
	typ, err := ParseType(text)
	if err != nil {
		t.Fatalf("ParseType(%q): %v", text, err)
	}
	return typ
}

func TestParseType(t *testing.T) {
	for _, tc := range []struct{ in, out string }{
		{"string", "string"}, {" int32 ", "int32"}, {"int64", "int64"}, {"bool", "bool"}, {"bytes", "bytes"},
		{"float64", "float64"}, {"json", "json"},
		{"tuple(string)", "tuple(string)"}, {"tuple( string , int64,bytes )", "tuple(string,int64,bytes)"},
	} {
		got := mustType(t, tc.in)
		if got.String() != tc.out {
			t.Errorf("ParseType(%q) = %s, want %s", tc.in, got, tc.out)
		}
		if again := mustType(t, got.String()); again != got || !again.Equal(got) {
			t.Errorf("%s does not survive its own text", got)
		}
		if want := tc.out != "float64" && tc.out != "json"; got.IsKey() != want {
			t.Errorf("%s.IsKey() = %v", got, got.IsKey())
		}
	}
	long := "tuple(" + strings.Repeat("bool,", MaxTupleFields) + "bool)"
	for _, bad := range []string{"", "String", "int", "tuple", "tuple(", "tuple()", "tuple(string", "tuple(string,)",
		"tuple(tuple(string))", "tuple(float64)", "tuple(string,json)", "tuple(string))", "bool,bool", long} {
		if got, err := ParseType(bad); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("ParseType(%q) = %s, %v; want ErrInvalid", bad, got, err)
		}
	}
	if (Type{}).IsKey() || (Type{}).IsValid() {
		t.Error("the zero type counts as a type")
	}
}

func TestTypeAsJSON(t *testing.T) {
	in := map[string]Type{"a": mustType(t, "tuple(int32,string)"), "b": Float64}
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]Type
	if err := json.Unmarshal(b, &out); err != nil || out["a"] != in["a"] || out["b"] != in["b"] {
		t.Errorf("%s read back as %v, %v", b, out, err)
	}
	if _, err := json.Marshal(Type{}); err == nil {
		t.Error("the zero type was marshalled")
	}
	if err := json.Unmarshal([]byte(`{"a":"tuple()"}`), &out); err == nil {
		t.Error("a bad type was unmarshalled")
	}
}

// javaHash is an independent reference for KG4: over decoded values and the
// standard library's UTF-16.
func javaHash(v any) int32 {
	switch x := v.(type) {
	case string:
		h := int32(0)
		for _, u := range utf16.Encode([]rune(x)) {
			h = h*31 + int32(u)
		}
		return h
	case int32:
		return x
	case int64:
		return int32(x) ^ int32(x>>32)
	case bool:
		if x {
			return 1231
		}
		return 1237
	case []byte:
		h := int32(1)
		for _, b := range x {
			h = h*31 + int32(int8(b))
		}
		return h
	case []any:
		h := int32(1)
		for _, f := range x {
			h = h*31 + javaHash(f)
		}
		return h
	}
	panic("not a key")
}

// genType draws a type; genValue draws a value of a type, often near the edges.
func genType(keysOnly bool) *rapid.Generator[Type] {
	return rapid.Custom(func(t *rapid.T) Type {
		scalars := []Type{String, Int32, Int64, Bool, Bytes}
		if rapid.IntRange(0, 2).Draw(t, "shape") == 0 {
			typ, err := TupleOf(rapid.SliceOfN(rapid.SampledFrom(scalars), 1, 4).Draw(t, "fields")...)
			if err != nil {
				t.Fatal(err)
			}
			return typ
		}
		if !keysOnly {
			scalars = append(scalars, Float64, JSON)
		}
		return rapid.SampledFrom(scalars).Draw(t, "scalar")
	})
}

func genValue(typ Type) *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		if !typ.IsTuple() {
			return drawScalar(t, typ)
		}
		fields := make([]any, typ.NumFields())
		for i := range fields {
			fields[i] = drawScalar(t, typ.Field(i))
		}
		return fields
	})
}

func drawScalar(t *rapid.T, typ Type) any {
	switch typ {
	case String:
		return rapid.OneOf(rapid.String(), rapid.StringOf(rapid.SampledFrom([]rune("a\x00\x01ÿ,(\"\\ \U0001F600\uFFFD\uFFFF)")))).Draw(t, "string")
	case Int32:
		return rapid.Int32().Draw(t, "int32")
	case Int64:
		return rapid.Int64().Draw(t, "int64")
	case Bool:
		return rapid.Bool().Draw(t, "bool")
	case Bytes:
		return rapid.OneOf(rapid.SliceOf(rapid.Byte()), rapid.SliceOf(rapid.SampledFrom([]byte{0, 1, 0xFF, 'a', '\\'}))).Draw(t, "bytes")
	case Float64:
		return rapid.OneOf(rapid.Float64(), rapid.SampledFrom([]float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), math.SmallestNonzeroFloat64})).Draw(t, "float64")
	case JSON:
		b, err := json.Marshal(rapid.OneOf(rapid.Map(rapid.String(), func(s string) any { return s }), rapid.Map(rapid.Int(), func(n int) any { return n })).Draw(t, "json"))
		if err != nil {
			t.Fatal(err)
		}
		return json.RawMessage(b)
	}
	panic("no such type")
}

// compareValues is the order that KG3 promises, written over values.
func compareValues(a, b any) int {
	switch x := a.(type) {
	case string:
		return strings.Compare(x, b.(string))
	case []byte:
		return bytes.Compare(x, b.([]byte))
	case json.RawMessage:
		return bytes.Compare(x, b.(json.RawMessage))
	case int32:
		return cmpOrdered(x, b.(int32))
	case int64:
		return cmpOrdered(x, b.(int64))
	case bool:
		return cmpOrdered(javaFalseFirst(x), javaFalseFirst(b.(bool)))
	case float64:
		return compareFloats(x, b.(float64))
	case []any:
		for i := range x {
			if c := compareValues(x[i], b.([]any)[i]); c != 0 {
				return c
			}
		}
		return 0
	}
	panic("not a value")
}

func cmpOrdered[T int | int32 | int64 | float64](a, b T) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func javaFalseFirst(b bool) int {
	if b {
		return 1
	}
	return 0
}

// compareFloats: -0 below +0, NaN above everything and equal to itself.
func compareFloats(a, b float64) int {
	switch {
	case a != a || b != b:
		return cmpOrdered(javaFalseFirst(a != a), javaFalseFirst(b != b))
	case a == 0 && b == 0:
		return cmpOrdered(javaFalseFirst(math.Signbit(b)), javaFalseFirst(math.Signbit(a)))
	}
	return cmpOrdered(a, b)
}

// KG1, KG2, KG3.
func TestEncodingIsInjectiveOrderedAndReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		typ := genType(false).Draw(t, "type")
		a := genValue(typ).Draw(t, "a")
		b := genValue(typ).Draw(t, "b")
		ea, err := Encode(typ, a)
		if err != nil {
			t.Fatalf("Encode(%s, %v): %v", typ, a, err)
		}
		eb, err := Encode(typ, b)
		if err != nil {
			t.Fatalf("Encode(%s, %v): %v", typ, b, err)
		}
		if got, want := bytes.Compare(ea, eb), compareValues(a, b); got != want {
			t.Fatalf("%s: bytes order %v and %v as %d, values as %d", typ, a, b, got, want)
		}
		if err := Validate(typ, ea); err != nil {
			t.Fatalf("Validate(%s, %x): %v", typ, ea, err)
		}
		back, err := Decode(typ, ea)
		if err != nil || compareValues(a, back) != 0 {
			t.Fatalf("Decode(%s, %x) = %v, %v; want %v", typ, ea, back, err, a)
		}
		prefix := []byte("prefix")
		ap, err := AppendEncode(slices.Clone(prefix), typ, a)
		if err != nil || !bytes.Equal(ap, append(prefix, ea...)) {
			t.Fatalf("AppendEncode differs from Encode: %x", ap)
		}
	})
}

// KG4.
func TestHashOfBytesIsHashOfValue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		typ := genType(true).Draw(t, "type")
		v := genValue(typ).Draw(t, "value")
		enc, err := Encode(typ, v)
		if err != nil {
			t.Fatal(err)
		}
		h, err := HashCode(typ, enc)
		if err != nil || h != javaHash(v) || HashCodeOf(v) != h {
			t.Fatalf("%s %v: HashCode = %d, %v; HashCodeOf = %d; want %d", typ, v, h, err, HashCodeOf(v), javaHash(v))
		}
	})
}

func TestTextIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		typ := genType(false).Draw(t, "type")
		v := genValue(typ).Draw(t, "value")
		text := FormatText(typ, v)
		back, err := ParseText(typ, text)
		if err != nil || compareValues(v, back) != 0 {
			t.Fatalf("%s: text %q of %v read back as %v, %v", typ, text, v, back, err)
		}
	})
}

func TestText(t *testing.T) {
	pair := mustType(t, "tuple(string,int32)")
	for _, tc := range []struct {
		typ  Type
		text string
		want any
		form string // FormatText(want)
	}{
		{String, "a,b", "a,b", "a,b"},
		{String, "", "", ""},
		{Int32, "-7", int32(-7), "-7"},
		{Bytes, `a\x00\\ü`, []byte("a\x00\\ü"), `a\x00\\ü`},
		{Bytes, "", []byte{}, ""},
		{Float64, "1e3", 1000.0, "1000"},
		{JSON, `{"a": 1}`, json.RawMessage(`{"a": 1}`), `{"a": 1}`},
		{pair, "(a,1)", []any{"a", int32(1)}, "(a,1)"},
		{pair, ` ( a b , 1 ) `, []any{"a b", int32(1)}, "(a b,1)"},
		{pair, `("",1)`, []any{"", int32(1)}, `("",1)`},
		{pair, `("a,\"(<" , 1)`, []any{`a,"(<`, int32(1)}, `("a,\"(<",1)`},
		{pair, `("\ud83d\ude00\t",1)`, []any{"\U0001F600\t", int32(1)}, "(\"\U0001F600\\t\",1)"},
	} {
		got, err := ParseText(tc.typ, tc.text)
		if err != nil || compareValues(got, tc.want) != 0 {
			t.Errorf("ParseText(%s, %q) = %v, %v", tc.typ, tc.text, got, err)
		}
		if form := FormatText(tc.typ, tc.want); form != tc.form {
			t.Errorf("FormatText(%s, %v) = %q, want %q", tc.typ, tc.want, form, tc.form)
		}
	}
	for _, tc := range []struct {
		typ  Type
		text string
	}{
		{Type{}, "a"}, {String, "\xff"}, {Int32, "2147483648"}, {Int32, ""}, {Int32, "1.0"}, {Int64, "x"}, {Bool, "True"},
		{Bytes, `\`}, {Bytes, `\x1`}, {Bytes, `\xzz`}, {Float64, "one"}, {JSON, "{"}, {JSON, ""},
		{pair, "a,1"}, {pair, "(a)"}, {pair, "(a,1,2)"}, {pair, "(a,x)"}, {pair, "(,1)"}, {pair, `("a,1)`}, {pair, `("a"b,1)`},
		{pair, `(a"b,1)`}, {pair, `("\ud83d",1)`}, {pair, `("\q",1)`}, {pair, "()"}, {pair, "(a,1"},
	} {
		if got, err := ParseText(tc.typ, tc.text); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("ParseText(%s, %q) = %v, %v; want ErrInvalid", tc.typ, tc.text, got, err)
		}
	}
	if got := FormatText(Int32, "x"); got != "<string x>" {
		t.Errorf("a wrong value is printed as %q", got)
	}
	if got := FormatText(pair, []any{"x"}); got != "<[]interface {} [x]>" {
		t.Errorf("a wrong tuple is printed as %q", got)
	}
}

func TestEncodeRefusesWrongValues(t *testing.T) {
	pair := mustType(t, "tuple(string,int32)")
	for _, tc := range []struct {
		typ Type
		v   any
	}{
		{String, 1}, {String, "\xff"}, {String, nil}, {Int32, int64(1)}, {Int32, 1}, {Int64, int32(1)}, {Bool, 1},
		{Bytes, "a"}, {Float64, float32(1)}, {JSON, []byte("{}")}, {JSON, json.RawMessage("{")}, {JSON, json.RawMessage("\"\xff\"")},
		{Type{}, "a"}, {pair, "a"}, {pair, []any{"a"}}, {pair, []any{"a", int32(1), int32(1)}}, {pair, []any{"a", nil}},
		{pair, []any{[]any{"a"}, int32(1)}},
	} {
		dst, err := AppendEncode([]byte("dst"), tc.typ, tc.v)
		if !errors.Is(err, base.ErrInvalid) || string(dst) != "dst" {
			t.Errorf("AppendEncode(%s, %v) = %q, %v; want ErrInvalid and dst as it was", tc.typ, tc.v, dst, err)
		}
	}
}

// KG2, with the interesting non-canonical bytes spelled out.
func TestDecodeRefusesWhatEncodeCannotMake(t *testing.T) {
	pair := mustType(t, "tuple(string,bool)")
	nan := []byte{0xFF, 0xF8, 0, 0, 0, 0, 0, 1}
	for _, tc := range []struct {
		typ Type
		b   string
	}{
		{String, "\xff"}, {String, "\xed\xa0\x80"}, {Int32, ""}, {Int32, "abc"}, {Int32, "abcde"}, {Int64, "abcd"},
		{Bool, ""}, {Bool, "\x02"}, {Bool, "\x00\x00"}, {Float64, "a"}, {Float64, string(nan)}, {JSON, ""}, {JSON, "1 2"},
		{Float64, "\x00\x07\xff\xff\xff\xff\xff\xff"}, // a negative NaN
		{pair, ""}, {pair, "a"}, {pair, "a\x00"}, {pair, "a\x00\x01"}, {pair, "a\x00\x02\x01\x00\x01"},
		{pair, "a\x00\x01\x01\x00\x01x"}, {pair, "a\x00\x01\x02\x00\x01"}, {pair, "a\x00\x01\x00\x00\x01"},
		{pair, "\xff\x00\x01\x01\x00\x01"}, {Type{}, "a"}, {Type{}, ""},
	} {
		v, err := Decode(tc.typ, []byte(tc.b))
		if !errors.Is(err, base.ErrInvalid) {
			t.Errorf("Decode(%s, %q) = %v, %v; want ErrInvalid", tc.typ, tc.b, v, err)
		}
		if err := Validate(tc.typ, []byte(tc.b)); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("Validate(%s, %q) = %v; want ErrInvalid", tc.typ, tc.b, err)
		}
		if tc.typ.IsKey() {
			if h, err := HashCode(tc.typ, []byte(tc.b)); !errors.Is(err, base.ErrInvalid) {
				t.Errorf("HashCode(%s, %q) = %d, %v; want ErrInvalid", tc.typ, tc.b, h, err)
			}
		}
	}
	for _, typ := range []Type{Float64, JSON, {}} {
		if _, err := HashCode(typ, []byte("12345678")); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("HashCode of a %s: %v; want ErrInvalid", typ, err)
		}
	}
}

func TestNaNIsOneValue(t *testing.T) {
	a, errA := Encode(Float64, math.NaN())
	b, errB := Encode(Float64, math.Float64frombits(0xFFF8DEADBEEF0001))
	if errA != nil || errB != nil || !bytes.Equal(a, b) {
		t.Errorf("two NaNs encode as %x and %x (%v, %v)", a, b, errA, errB)
	}
}

func TestHashCodeDoesNotAllocate(t *testing.T) {
	typ := mustType(t, "tuple(string,int64,bool)")
	cases := map[Type]any{String: "user_123 \U0001F600", Int32: int32(1), Int64: int64(1), Bool: true, Bytes: []byte("abc"),
		typ: []any{"user_123", int64(5), true}}
	for typ, v := range cases {
		enc, err := Encode(typ, v)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(100, func() { _, _ = GroupOfKey(typ, enc, 128) }); n != 0 {
			t.Errorf("hashing a %s allocates %v times", typ, n)
		}
	}
}

func TestHashCodeOfWrongValuePanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a float64 was hashed")
		}
	}()
	HashCodeOf(1.5)
}

// FuzzDecode: no bytes make Decode panic, and what it accepts is canonical.
func FuzzDecode(f *testing.F) {
	types := []string{"string", "int32", "int64", "bool", "bytes", "float64", "json", "tuple(string,int32)", "tuple(bytes,bytes,bool)", "tuple(int64)"}
	for i := range types {
		f.Add(byte(i), []byte("a\x00\x01\x80\x00\xff\x00\xff\x00\xff\x01\x00\x01"))
		f.Add(byte(i), []byte{})
	}
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		typ := mustType(t, types[int(which)%len(types)])
		v, err := Decode(typ, b)
		if valid := Validate(typ, b) == nil; valid != (err == nil) {
			t.Fatalf("Validate says %v, Decode says %v", valid, err)
		}
		h, hashErr := int32(0), error(nil)
		if typ.IsKey() {
			if h, hashErr = HashCode(typ, b); (hashErr == nil) != (err == nil) {
				t.Fatalf("HashCode says %v, Decode says %v", hashErr, err)
			}
		}
		if err != nil {
			if !errors.Is(err, base.ErrInvalid) {
				t.Fatalf("error %v is not ErrInvalid", err)
			}
			return
		}
		enc, err := Encode(typ, v)
		if err != nil || !bytes.Equal(enc, b) {
			t.Fatalf("%s: Encode(Decode(%x)) = %x, %v", typ, b, enc, err)
		}
		if typ.IsKey() && h != javaHash(v) {
			t.Fatalf("%s %v: hash %d, want %d", typ, v, h, javaHash(v))
		}
		back, err := ParseText(typ, FormatText(typ, v))
		if err != nil || compareValues(back, v) != 0 {
			t.Fatalf("%s: text %q of %v read back as %v, %v", typ, FormatText(typ, v), v, back, err)
		}
	})
}

// FuzzOrder: byte order of accepted encodings is the order of their values.
func FuzzOrder(f *testing.F) {
	f.Add("a", "a\x00", []byte{0}, []byte{0, 0xFF}, int32(1), int32(-1))
	f.Add("", "", []byte{}, []byte{1}, int32(math.MinInt32), int32(math.MaxInt32))
	typ := mustType(f, "tuple(string,bytes,int32)")
	f.Fuzz(func(t *testing.T, s1, s2 string, b1, b2 []byte, n1, n2 int32) {
		v1, v2 := []any{s1, b1, n1}, []any{s2, b2, n2}
		e1, err1 := Encode(typ, v1)
		e2, err2 := Encode(typ, v2)
		if err1 != nil || err2 != nil {
			return
		}
		if got, want := bytes.Compare(e1, e2), compareValues(v1, v2); got != want {
			t.Fatalf("%v and %v: bytes say %d, values say %d", v1, v2, got, want)
		}
	})
}

// FuzzParseText: no text makes ParseText panic, and what it accepts survives.
func FuzzParseText(f *testing.F) {
	f.Add("tuple(string,bytes)", `("a\"",\x00)`)
	f.Add("bytes", `\`)
	f.Add("tuple(bool,bool)", `(true,"false" )`)
	f.Fuzz(func(t *testing.T, typeText, text string) {
		typ, err := ParseType(typeText)
		if err != nil {
			return
		}
		v, err := ParseText(typ, text)
		if err != nil {
			return
		}
		back, err := ParseText(typ, FormatText(typ, v))
		if err != nil || compareValues(back, v) != 0 {
			t.Fatalf("%s %q: %v formatted as %q, read back as %v, %v", typ, text, v, FormatText(typ, v), back, err)
		}
	})
}

func BenchmarkGroupOfString(b *testing.B) {
	key := []byte("customer/0000012345")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := GroupOfKey(String, key, 128); err != nil {
			b.Fatal(err)
		}
	}
}
