package keygroup

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files of testdata")

// The shape of testdata/vectors.json; docs/formats/key-types.md explains it.
type vectorFile struct {
	Format   string          `json:"format"`
	Version  int             `json:"version"`
	Keys     []keyVector     `json:"keys"`
	Values   []valueVector   `json:"values"`
	Ranges   []rangeVector   `json:"ranges"`
	DefaultM []defaultVector `json:"default_m"`
	Prefixes []prefixVector  `json:"group_prefixes"`
	Invalid  []invalidVector `json:"invalid_encodings"`
}

type keyVector struct {
	Type     string `json:"type"`
	Text     string `json:"text"`
	Encoded  string `json:"encoded_hex"`
	HashCode int32  `json:"hash_code"`
	Mix      int32  `json:"mix"`
	Group128 Group  `json:"group_m128"`
	GroupMax Group  `json:"group_m32768"`
}

type valueVector struct {
	Type    string `json:"type"`
	Text    string `json:"text"`
	Encoded string `json:"encoded_hex"`
}

type rangeVector struct {
	M      int     `json:"m"`
	P      int     `json:"p"`
	Ranges []Range `json:"ranges"`
}

type defaultVector struct {
	P int `json:"p"`
	M int `json:"m"`
}

type prefixVector struct {
	M      int    `json:"m"`
	Group  Group  `json:"group"`
	Prefix string `json:"prefix_hex"`
}

type invalidVector struct {
	Type    string `json:"type"`
	Encoded string `json:"encoded_hex"`
	Why     string `json:"why"`
}

// vectorKeys are the keys of the file, by type.
var vectorKeys = []struct {
	typ  string
	keys []any
}{
	{"int32", []any{int32(0), int32(1), int32(-1), int32(42), int32(math.MaxInt32), int32(math.MinInt32)}},
	{"int64", []any{int64(0), int64(1), int64(-1), int64(123456789012345), int64(math.MaxInt64), int64(math.MinInt64), int64(1) << 32}},
	{"string", []any{
		"", "a", "user_123", "key-1", "zh:\u4e2d\u6587", "caf\u00e9", "\U0001F600", "a\U0001F600b\U00010000\U0010FFFF",
		"\uFFFD\uFFFF", "\x00", "a\x00b", strings.Repeat("long key ", 10),
	}},
	{"bool", []any{false, true}},
	{"bytes", []any{[]byte{}, []byte{0}, []byte{0xFF}, []byte{0, 0}, []byte("abc"), []byte{0x7F, 0x80, 0x00, 0x01, 0xFF}}},
	{"tuple(string)", []any{[]any{""}, []any{"a"}, []any{"a\x00"}}},
	{"tuple(string,int32)", []any{[]any{"", int32(0)}, []any{"a", int32(1)}, []any{"\U0001F600", int32(-1)}}},
	{"tuple(bytes,string,int64,bool,int32)", []any{
		[]any{[]byte{0, 1, 0xFF}, "a,(\"b\")", int64(math.MinInt64), true, int32(256)},
		[]any{[]byte{}, "", int64(0), false, int32(0)},
	}},
}

var vectorValues = []struct {
	typ    string
	values []any
}{
	{"float64", []any{
		math.Inf(-1), -math.MaxFloat64, -1.5, -math.SmallestNonzeroFloat64, math.Copysign(0, -1), 0.0,
		math.SmallestNonzeroFloat64, 1.0, 1.5, math.MaxFloat64, math.Inf(1), math.NaN(),
	}},
	{"json", []any{json.RawMessage("null"), json.RawMessage(`{"b": 1, "a": [true, "x"]}`)}},
}

var vectorInvalid = []invalidVector{
	{"string", "ff", "not UTF-8"},
	{"string", "eda080", "half of a surrogate pair"},
	{"int32", "000000", "3 bytes"},
	{"int64", "000000000000000000", "9 bytes"},
	{"bool", "02", "neither 0 nor 1"},
	{"tuple(string)", "61", "the field does not end"},
	{"tuple(string)", "6100010001", "bytes after the last field"},
	{"tuple(string)", "61000200", "0x00 0x02 is neither an escape nor an end"},
	{"tuple(string,int32)", "610001", "the second field is missing"},
	{"float64", "fff8000000000001", "a NaN other than the canonical one"},
	{"json", "7b", "not JSON"},
}

func buildVectors(t *testing.T) vectorFile {
	t.Helper()
	f := vectorFile{Format: "keelstate-key-vectors", Version: 1, Invalid: vectorInvalid}
	encode := func(typ Type, v any) string {
		enc, err := Encode(typ, v)
		if err != nil {
			t.Fatal(err)
		}
		return hex.EncodeToString(enc)
	}
	for _, group := range vectorKeys {
		typ := mustType(t, group.typ)
		for _, key := range group.keys {
			h := HashCodeOf(key)
			f.Keys = append(f.Keys, keyVector{
				Type: group.typ, Text: FormatText(typ, key), Encoded: encode(typ, key),
				HashCode: h, Mix: Mix(h), Group128: GroupOf(h, 128), GroupMax: GroupOf(h, MaxM),
			})
		}
	}
	for _, group := range vectorValues {
		typ := mustType(t, group.typ)
		for _, v := range group.values {
			f.Values = append(f.Values, valueVector{Type: group.typ, Text: FormatText(typ, v), Encoded: encode(typ, v)})
		}
	}
	for _, mp := range [][2]int{{128, 1}, {128, 3}, {128, 4}, {10, 4}, {128, 128}, {32768, 5}, {7, 7}} {
		rv := rangeVector{M: mp[0], P: mp[1]}
		for i := range rv.P {
			rv.Ranges = append(rv.Ranges, RangeOf(i, rv.M, rv.P))
		}
		f.Ranges = append(f.Ranges, rv)
	}
	for _, p := range []int{1, 2, 4, 85, 86, 170, 171, 172, 1000, 21845, 21846, 32768} {
		f.DefaultM = append(f.DefaultM, defaultVector{p, DefaultM(p)})
	}
	for _, mg := range [][2]int{{128, 0}, {128, 127}, {129, 0}, {129, 128}, {32768, 32767}} {
		f.Prefixes = append(f.Prefixes, prefixVector{mg[0], Group(mg[1]), hex.EncodeToString(AppendGroup(nil, mg[0], Group(mg[1])))})
	}
	return f
}

// The published file must be what this code computes, byte for byte.
func TestPublishedVectors(t *testing.T) {
	var want bytes.Buffer
	enc := json.NewEncoder(&want)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(buildVectors(t)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "vectors.json")
	if *rewrite {
		if err := os.WriteFile(path, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want.Bytes()) {
		t.Errorf("%s differs from what the code computes. These bytes are frozen: stored data and other clients depend on them", path)
	}
}

// A client that only reads the file must come to the same results.
func TestVectorsCanBeFollowedFromTheFileAlone(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("testdata", "vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var f vectorFile
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	if len(f.Keys) < 30 || len(f.Values) == 0 || len(f.Invalid) == 0 {
		t.Fatalf("the file has only %d keys, %d values, %d invalid encodings", len(f.Keys), len(f.Values), len(f.Invalid))
	}
	for _, k := range f.Keys {
		typ := mustType(t, k.Type)
		v, err := ParseText(typ, k.Text)
		if err != nil {
			t.Fatal(err)
		}
		enc, err := Encode(typ, v)
		if err != nil || hex.EncodeToString(enc) != k.Encoded {
			t.Errorf("%s %q encodes as %x, %v; want %s", k.Type, k.Text, enc, err, k.Encoded)
		}
		h, err := HashCode(typ, enc)
		if err != nil || h != k.HashCode || h != javaHash(v) || Mix(h) != k.Mix || GroupOf(h, 128) != k.Group128 || GroupOf(h, MaxM) != k.GroupMax {
			t.Errorf("%s %q: hash %d, %v; want %+v", k.Type, k.Text, h, err, k)
		}
	}
	for _, v := range f.Values {
		typ := mustType(t, v.Type)
		enc, err := hex.DecodeString(v.Encoded)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Decode(typ, enc); err != nil || FormatText(typ, got) != v.Text {
			t.Errorf("%s %s decodes to %v, %v; want %s", v.Type, v.Encoded, got, err, v.Text)
		}
	}
	for _, bad := range f.Invalid {
		enc, err := hex.DecodeString(bad.Encoded)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := Decode(mustType(t, bad.Type), enc); err == nil {
			t.Errorf("%s %s (%s) decodes to %v", bad.Type, bad.Encoded, bad.Why, v)
		}
	}
}

// The rows that the product's semantics state, written out by hand. GroupMax -1
// is a cell that they leave open.
func TestStatedKeyGroups(t *testing.T) {
	for _, row := range []struct {
		key                any
		hash, mix          int32
		group128, groupMax int
	}{
		{int32(0), 0, 593689054, 94, 31198},
		{"", 0, 593689054, 94, 31198},
		{int32(1), 1, 68075478, 86, 16342},
		{int32(-1), -1, 1982413648, 80, 15184},
		{int32(42), 42, 1134849565, 29, 28189},
		{int32(math.MaxInt32), 2147483647, 1653689534, 62, 19646},
		{int32(math.MinInt32), -2147483648, 1718298732, 108, 10348},
		{"a", 97, 1455541201, 81, 19409},
		{"user_123", -266208322, 1276393253, 37, 14117},
		{"key-1", 101943363, 23124534, 54, 23094},
		{int64(123456789012345), -2045923535, 1706327101, 61, -1},
	} {
		h := HashCodeOf(row.key)
		if h != row.hash || Mix(h) != row.mix {
			t.Errorf("%v: hash code %d, m %d; want %d, %d", row.key, h, Mix(h), row.hash, row.mix)
		}
		if got := GroupOf(h, 128); int(got) != row.group128 {
			t.Errorf("%v: group %d at M=128, want %d", row.key, got, row.group128)
		}
		if got := GroupOf(h, MaxM); row.groupMax >= 0 && int(got) != row.groupMax {
			t.Errorf("%v: group %d at M=%d, want %d", row.key, got, MaxM, row.groupMax)
		}
	}
	// Known results of the Java library for kinds that the table leaves out.
	for _, row := range []struct {
		key  any
		hash int32
	}{
		{true, 1231}, {false, 1237}, {[]byte{}, 1}, {[]byte{1}, 32}, {[]byte{0xFF}, 30}, {[]byte{1, 2, 3}, 30817},
		{[]any{}, 1}, {[]any{int32(1), int32(2), int32(3)}, 30817}, {[]any{"a", int32(1)}, 31*(31+97) + 1},
		{int64(-1), 0}, {int64(1) << 32, 1}, {"\U0001F600", 0xD83D*31 + 0xDE00}, {"hello", 99162322},
	} {
		if h := HashCodeOf(row.key); h != row.hash {
			t.Errorf("%v: hash code %d, want %d", row.key, h, row.hash)
		}
	}
}

func TestStatedRangesAndDefaults(t *testing.T) {
	for _, tc := range []struct {
		m, p int
		want []Range
	}{
		{128, 3, []Range{{0, 43}, {43, 86}, {86, 128}}},
		{10, 4, []Range{{0, 3}, {3, 5}, {5, 8}, {8, 10}}},
	} {
		var got []Range
		for i := range tc.p {
			got = append(got, RangeOf(i, tc.m, tc.p))
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("m=%d p=%d: %v, want %v", tc.m, tc.p, got, tc.want)
		}
	}
	for p, want := range map[int]int{85: 128, 86: 256, 171: 256, 21845: 32768} {
		if got := DefaultM(p); got != want {
			t.Errorf("DefaultM(%d) = %d, want %d", p, got, want)
		}
	}
}

// The example of docs/formats/key-types.md.
func TestDocumentedTupleExample(t *testing.T) {
	enc, err := Encode(mustType(t, "tuple(string,int32)"), []any{"a", int32(1)})
	if want := "610001" + "8000ff00ff010001"; err != nil || hex.EncodeToString(enc) != want {
		t.Errorf("encoded as %x, %v; the page says %s", enc, err, want)
	}
}
