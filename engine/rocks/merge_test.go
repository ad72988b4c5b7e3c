package rocks

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

var mergeKinds = []engine.MergeKind{
	engine.MergeSum128, engine.MergeMin, engine.MergeMax, engine.MergeFirst,
	engine.MergeAnd64, engine.MergeOr64, engine.MergeSumCount,
}

// payloadOf draws a payload of the kind; min, max and first take any length.
func payloadOf(t *rapid.T, k engine.MergeKind) []byte {
	n := map[engine.MergeKind]int{
		engine.MergeSum128: 16, engine.MergeAnd64: 8, engine.MergeOr64: 8, engine.MergeSumCount: 24,
	}[k]
	b := rapid.OneOf(rapid.Byte(), rapid.SampledFrom([]byte{0, 0xff, 0x80, 0x7f}))
	if n == 0 {
		return rapid.SliceOfN(b, 0, 40).Draw(t, "payload")
	}
	return rapid.SliceOfN(b, n, n).Draw(t, "payload")
}

func valueOf(t *rapid.T, k engine.MergeKind) []byte {
	h := engine.Header{
		Flags:       rapid.Byte().Draw(t, "flags") & 0xf,
		Codec:       rapid.Uint16().Draw(t, "codec"),
		Sequence:    rapid.Uint64().Draw(t, "sequence"),
		TimestampMs: rapid.Uint64().Draw(t, "timestamp"),
	}
	return append(engine.AppendHeader(nil, h), payloadOf(t, k)...)
}

// RO4.
func TestNativeMergesGiveTheBytesOfFold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.SampledFrom(mergeKinds).Draw(t, "kind")
		values := make([][]byte, rapid.IntRange(1, 8).Draw(t, "n"))
		for i := range values {
			values[i] = valueOf(t, k)
		}
		want, err := engine.Fold(k, nil, false, values...)
		if err != nil {
			t.Fatal(err)
		}
		check := func(how string, got []byte, ok bool) {
			if !ok || !bytes.Equal(got, want) {
				t.Fatalf("%s: %x %v, want %x", how, got, ok, want)
			}
		}
		got, ok := nativeFold(k, false, false, values)
		check("operands", got, ok)
		got, ok = nativeFold(k, true, false, values)
		check("base and operands", got, ok)
		got, ok = nativeFold(k, false, true, values)
		check("partial merge", got, ok)
		// Any grouping: a partial merge of a middle part stands for it.
		a := rapid.IntRange(0, len(values)-1).Draw(t, "from")
		b := rapid.IntRange(a+1, len(values)).Draw(t, "to")
		part, ok := nativeFold(k, false, true, values[a:b])
		if !ok {
			t.Fatal("partial merge refused")
		}
		grouped := append(append(append([][]byte(nil), values[:a]...), part), values[b:]...)
		got, ok = nativeFold(k, true, false, grouped)
		check("grouped", got, ok)
	})
}

// Whatever the bytes, the native operators agree with Fold on what is refused.
func TestNativeMergesRefuseWhatFoldRefuses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.SampledFrom(mergeKinds).Draw(t, "kind")
		values := make([][]byte, rapid.IntRange(1, 4).Draw(t, "n"))
		for i := range values {
			v := valueOf(t, k)
			switch rapid.IntRange(0, 5).Draw(t, "damage") {
			case 0:
				v = v[:rapid.IntRange(0, len(v)).Draw(t, "cut")]
			case 1:
				v = append(v, 1)
			case 2:
				v[0] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
			}
			values[i] = v
		}
		want, err := engine.Fold(k, nil, false, values...)
		for _, partial := range []bool{false, true} {
			got, ok := nativeFold(k, false, partial, values)
			if ok != (err == nil) || ok && !bytes.Equal(got, want) {
				t.Fatalf("partial %v: %x %v; Fold: %x %v", partial, got, ok, want, err)
			}
		}
	})
}

func TestMalformedOperandsAreRefusedWithTheirBatch(t *testing.T) {
	d := newTestDriver(t, Options{})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	good := append(engine.AppendHeader(nil, engine.Header{Sequence: 1}), make([]byte, 24)...)
	for _, k := range mergeKinds {
		f := engine.FamilyID(k)
		must(t, s.EnsureFamily(f, engine.FamilyOptions{Use: engine.UsePoint, Merge: k, GroupWidth: 1}))
		newer := bytes.Clone(good)
		newer[0] = 0x20
		for _, c := range []struct {
			operand []byte
			want    error
		}{{nil, base.ErrCorrupt}, {good[:18], base.ErrCorrupt}, {newer, base.ErrFormatVersion}} {
			var b engine.Batch
			b.Put(engine.MetaFamily, []byte("a"), []byte("1"))
			b.Merge(f, []byte("k"), c.operand)
			if err := s.Write(&b); !errors.Is(err, c.want) {
				t.Errorf("kind %d, operand %x: %v, want %v", k, c.operand, err, c.want)
			}
			if got := get(t, s, engine.MetaFamily, "a"); got != "-" {
				t.Errorf("half of the batch was applied: %q", got)
			}
		}
	}
	var b engine.Batch
	b.Merge(engine.MetaFamily, []byte("k"), good)
	if err := s.Write(&b); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("merge without a kind: %v", err)
	}
}

// A damaged base value is reported where it is read, by every way to read.
func TestMergeOntoADamagedValueIsCorrupt(t *testing.T) {
	d := newTestDriver(t, Options{})
	for _, use := range []engine.Use{engine.UsePoint, engine.UseScanned} {
		s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
		must(t, s.EnsureFamily(1, engine.FamilyOptions{Use: use, Merge: engine.MergeSum128, GroupWidth: 1}))
		var b engine.Batch
		b.Put(1, []byte("k"), []byte("short"))
		b.Merge(1, []byte("k"), append(engine.AppendHeader(nil, engine.Header{}), make([]byte, 16)...))
		must(t, s.Write(&b))
		if _, _, err := s.Get(1, []byte("k")); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("get: %v", err)
		}
		if _, err := s.MultiGet(1, [][]byte{[]byte("k"), []byte("l")}); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("multi-get: %v", err)
		}
		it := s.Scan(1, nil, nil, engine.ScanOptions{})
		for it.Next() {
		}
		if !errors.Is(it.Err(), base.ErrCorrupt) {
			t.Errorf("scan: %v", it.Err())
		}
		it.Close()
	}
}

// Operands spread over memtables, files and views fold as Fold does.
func TestMergesFoldAcrossFlushesAndCompactions(t *testing.T) {
	for _, successive := range []int{-1, 3} {
		d := newTestDriver(t, Options{MaxSuccessiveMerges: successive})
		s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
		for _, k := range mergeKinds {
			must(t, s.EnsureFamily(engine.FamilyID(k), engine.FamilyOptions{Use: engine.Use(k % 2), Merge: k, GroupWidth: 1}))
		}
		n := 0
		rapid.Check(t, func(rt *rapid.T) {
			n++
			checkMergeHistory(t, rt, s, fmt.Sprintf("\x01%06d\x00\x01", n))
		})
	}
}

func checkMergeHistory(t *testing.T, rt *rapid.T, s *Store, name string) {
	type seen struct {
		view engine.View
		want []byte
	}
	k := rapid.SampledFrom(mergeKinds).Draw(rt, "kind")
	f, key := engine.FamilyID(k), []byte(name)
	var views []seen
	var model []byte
	for i := range rapid.IntRange(1, 12).Draw(rt, "steps") {
		var b engine.Batch
		switch step := rapid.IntRange(0, 19).Draw(rt, "step"); step {
		case 0, 1:
			must(t, s.Flush())
		case 2:
			must(t, s.Compact())
		case 3, 4:
			b.Delete(f, key)
			model = nil
		case 5, 6:
			model = valueOf(rt, k)
			b.Put(f, key, model)
		case 7, 8, 9:
			v, err := s.NewView()
			must(t, err)
			views = append(views, seen{v, model})
		default:
			v := valueOf(rt, k)
			b.Merge(f, key, v)
			var err error
			model, err = engine.Fold(k, model, model != nil, v)
			must(t, err)
		}
		must(t, s.Write(&b))
		got, ok, err := s.Get(f, key)
		must(t, err)
		if ok != (model != nil) || !bytes.Equal(got, model) {
			rt.Fatalf("step %d: %x, want %x", i, got, model)
		}
	}
	for i, v := range views {
		got := collect(t, v.view, f, key, append(bytes.Clone(key), 0), engine.ScanOptions{})
		want := []string(nil)
		if v.want != nil {
			want = []string{name + "=" + string(v.want)}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			rt.Fatalf("view %d: %x, want %x", i, got, want)
		}
		v.view.Close()
	}
}
