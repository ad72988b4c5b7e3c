package engine

import (
	"encoding/binary"
	"errors"
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

func value(h Header, payload ...byte) []byte { return append(AppendHeader(nil, h), payload...) }

func int128(v *big.Int) []byte {
	m := new(big.Int).And(v, new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 128), big.NewInt(1)))
	return m.FillBytes(make([]byte, 16))
}

func int64Key(v int64) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(v)^signBit)
}

func TestFoldPayloads(t *testing.T) {
	big1 := func(v int64) []byte { return int128(big.NewInt(v)) }
	count := func(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }
	over := new(big.Int).Add(big.NewInt(math.MaxInt64), big.NewInt(math.MaxInt64))
	under := new(big.Int).Add(big.NewInt(math.MinInt64), big.NewInt(math.MinInt64))
	for name, c := range map[string]struct {
		kind MergeKind
		in   [][]byte
		want []byte
	}{
		"sum small":             {MergeSum128, [][]byte{big1(1), big1(2), big1(-5)}, big1(-2)},
		"sum beyond int64":      {MergeSum128, [][]byte{big1(math.MaxInt64), big1(math.MaxInt64)}, int128(over)},
		"sum below int64":       {MergeSum128, [][]byte{big1(math.MinInt64), big1(math.MinInt64)}, int128(under)},
		"sum carries and back":  {MergeSum128, [][]byte{big1(-1), big1(1)}, big1(0)},
		"sum alone":             {MergeSum128, [][]byte{big1(7)}, big1(7)},
		"min":                   {MergeMin, [][]byte{{5}, {3, 0}, {3}, {4}}, []byte{3}},
		"min of empty":          {MergeMin, [][]byte{{5}, {}}, []byte{}},
		"min unsigned":          {MergeMin, [][]byte{{0x80}, {0x7f}}, []byte{0x7f}},
		"max":                   {MergeMax, [][]byte{{5}, {3}, {5, 0}}, []byte{5, 0}},
		"max unsigned":          {MergeMax, [][]byte{{0x80}, {0x7f}}, []byte{0x80}},
		"first":                 {MergeFirst, [][]byte{{9}, {1}, {2}}, []byte{9}},
		"first empty":           {MergeFirst, [][]byte{{}, {1}}, []byte{}},
		"and":                   {MergeAnd64, [][]byte{int64Key(-1), int64Key(12), int64Key(10)}, int64Key(8)},
		"and of negative":       {MergeAnd64, [][]byte{int64Key(-2), int64Key(-3)}, int64Key(-4)},
		"or":                    {MergeOr64, [][]byte{int64Key(8), int64Key(1)}, int64Key(9)},
		"or with negative":      {MergeOr64, [][]byte{int64Key(1), int64Key(math.MinInt64)}, int64Key(math.MinInt64 + 1)},
		"sum and count":         {MergeSumCount, [][]byte{append(big1(5), count(1)...), append(big1(-7), count(2)...)}, append(big1(-2), count(3)...)},
		"sum and count carries": {MergeSumCount, [][]byte{append(int128(over), count(2)...), append(big1(2), count(1)...)}, append(int128(new(big.Int).Add(over, big.NewInt(2))), count(3)...)},
	} {
		t.Run(name, func(t *testing.T) {
			var vs [][]byte
			for _, p := range c.in {
				vs = append(vs, value(Header{}, p...))
			}
			want := value(Header{}, c.want...)
			got, err := Fold(c.kind, nil, false, vs...)
			if err != nil || string(got) != string(want) {
				t.Fatalf("without base: %x, %v; want %x", got, err, want)
			}
			got, err = Fold(c.kind, vs[0], true, vs[1:]...)
			if err != nil || string(got) != string(want) {
				t.Fatalf("with base: %x, %v; want %x", got, err, want)
			}
		})
	}
}

func TestFoldHeader(t *testing.T) {
	got, err := Fold(MergeFirst, value(Header{Flags: FlagNull, Codec: 3, Sequence: 9, TimestampMs: 100}, 1), true,
		value(Header{Codec: 4, Sequence: 12, TimestampMs: 50}, 2),
		value(Header{Flags: 2, Codec: 2, Sequence: 10, TimestampMs: 0}, 3))
	want := value(Header{Flags: 2, Codec: 2, Sequence: 12, TimestampMs: 100}, 1)
	if err != nil || string(got) != string(want) {
		t.Fatalf("got %x, %v; want %x", got, err, want)
	}
}

func TestFoldRefuses(t *testing.T) {
	good := value(Header{}, make([]byte, 16)...)
	future := append([]byte(nil), good...)
	future[0] = 0x20
	for name, c := range map[string]struct {
		kind MergeKind
		base []byte
		ops  [][]byte
		want error
	}{
		"no merges":          {MergeNone, nil, [][]byte{good}, base.ErrInvalid},
		"unknown kind":       {99, nil, [][]byte{good}, base.ErrInvalid},
		"nothing":            {MergeSum128, nil, nil, base.ErrInvalid},
		"short operand":      {MergeSum128, nil, [][]byte{good, good[:len(good)-1]}, base.ErrCorrupt},
		"long operand":       {MergeSum128, nil, [][]byte{append(append([]byte(nil), good...), 0)}, base.ErrCorrupt},
		"no header":          {MergeMin, nil, [][]byte{{1, 2}}, base.ErrCorrupt},
		"short base":         {MergeSum128, good[:20], [][]byte{good}, base.ErrCorrupt},
		"newer layout":       {MergeSum128, nil, [][]byte{future}, base.ErrFormatVersion},
		"newer base layout":  {MergeMax, future, [][]byte{good}, base.ErrFormatVersion},
		"bits of a sum":      {MergeAnd64, nil, [][]byte{good}, base.ErrCorrupt},
		"sum of sumcount":    {MergeSumCount, nil, [][]byte{good}, base.ErrCorrupt},
		"empty operand":      {MergeFirst, nil, [][]byte{{}}, base.ErrCorrupt},
		"empty base present": {MergeFirst, []byte{}, [][]byte{good}, base.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := Fold(c.kind, c.base, c.base != nil, c.ops...); !errors.Is(err, c.want) {
				t.Fatalf("got %x, %v; want %v", got, err, c.want)
			}
		})
	}
}

// TestFoldAssociative: any grouping of operands, with or without a base, gives
// the same bytes (EN5), and sums agree with exact arithmetic.
func TestFoldAssociative(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kind := MergeKind(rapid.IntRange(1, int(MergeSumCount)).Draw(t, "kind"))
		n := rapid.IntRange(2, 8).Draw(t, "n")
		sum := new(big.Int)
		var vs [][]byte
		for range n {
			h := Header{
				Flags: byte(rapid.IntRange(0, 15).Draw(t, "flags")), Codec: rapid.Uint16().Draw(t, "codec"),
				Sequence: rapid.Uint64().Draw(t, "sequence"), TimestampMs: rapid.Uint64().Draw(t, "timestamp"),
			}
			v := rapid.Int64().Draw(t, "v")
			var p []byte
			switch kind {
			case MergeSum128:
				p = int128(big.NewInt(v))
			case MergeSumCount:
				p = binary.BigEndian.AppendUint64(int128(big.NewInt(v)), 1)
			case MergeAnd64, MergeOr64:
				p = int64Key(v)
			default:
				p = rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(t, "payload")
			}
			sum.Add(sum, big.NewInt(v))
			vs = append(vs, value(h, p...))
		}
		want, err := Fold(kind, nil, false, vs...)
		if err != nil {
			t.Fatal(err)
		}
		if kind == MergeSum128 && string(want[HeaderLen:]) != string(int128(sum)) {
			t.Fatalf("sum %x, want %x", want[HeaderLen:], int128(sum))
		}
		cut := rapid.IntRange(1, n-1).Draw(t, "cut")
		left, err := Fold(kind, vs[0], true, vs[1:cut]...)
		if err != nil {
			t.Fatal(err)
		}
		right, err := Fold(kind, nil, false, vs[cut:]...)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Fold(kind, left, true, right); err != nil || string(got) != string(want) {
			t.Fatalf("grouped at %d: %x, %v; want %x", cut, got, err, want)
		}
	})
}

func FuzzFold(f *testing.F) {
	f.Add(byte(1), value(Header{}, make([]byte, 16)...), value(Header{}, make([]byte, 16)...))
	f.Add(byte(2), []byte{0x10}, []byte{})
	f.Fuzz(func(t *testing.T, kind byte, a, b []byte) {
		got, err := Fold(MergeKind(kind), a, true, b)
		if err != nil {
			return
		}
		if _, _, err := ParseHeader(got); err != nil {
			t.Fatalf("fold of %x and %x is no value: %v", a, b, err)
		}
	})
}
