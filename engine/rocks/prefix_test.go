package rocks

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
)

// escaped is the key part of engine/state's layout.
func escaped(key string) string {
	var b []byte
	for _, c := range []byte(key) {
		b = append(b, c)
		if c == 0 {
			b = append(b, 0xff)
		}
	}
	return string(append(b, 0, 1))
}

func TestPrefixIsGroupAndTerminatedKey(t *testing.T) {
	for _, c := range []struct {
		width int
		key   string
		want  int
	}{
		{1, "", 0}, {1, "\x07", 1}, {2, "\x07", 1}, {1, "\x07abc", 4},
		{1, "\x07" + escaped("") + "n", 3}, {1, "\x07" + escaped("abc") + "ns", 6},
		{2, "\x00\x01" + escaped("abc") + "ns", 7}, // the group is no terminator
		{1, "\x00\x01", 2}, {1, "\x07" + escaped("\x00\x01") + "ns", 6},
		{1, "\x07" + escaped("\x00\x00") + "\x00\x01", 7}, {1, "\x07\x00\x00\x01x", 4}, {1, "\x07\x00", 2},
	} {
		if got := nativePrefixLen(c.width, []byte(c.key)); got != c.want {
			t.Errorf("width %d key %q: %d, want %d", c.width, c.key, got, c.want)
		}
	}
}

// RO3: total, a function of the prefix alone, and contiguous.
func TestPrefixIsTotalAndContiguous(t *testing.T) {
	key := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 2, 0xff}), 0, 10)
	rapid.Check(t, func(t *rapid.T) {
		w := rapid.IntRange(1, 2).Draw(t, "width")
		keys := rapid.SliceOfN(key, 3, 3).Draw(t, "keys")
		slices.SortFunc(keys, bytes.Compare)
		prefix := func(k []byte) string { return string(k[:nativePrefixLen(w, k)]) }
		for _, k := range keys {
			if p := prefix(k); prefix([]byte(p)) != p {
				t.Fatalf("prefix %x of %x has another prefix", p, k)
			}
		}
		if prefix(keys[0]) == prefix(keys[2]) && prefix(keys[1]) != prefix(keys[0]) {
			t.Fatalf("%x lies between keys of another prefix", keys)
		}
	})
}

// B57 keys: short ones without a terminator, and entries under shared keys.
func prefixKeys() []string {
	keys := []string{"", "\x03", "\x03abc", "\x04"}
	for n := range 11 {
		keys = append(keys, "\x03abcdefghijk"[:n], "\x05"+"abcdefghij"[:n])
		for _, ns := range []string{"", "\x01", "\x01a", "\x01b", "\x02zz", "\xff", "\xff\xff"} {
			keys = append(keys, "\x03"+escaped("abcdefghij"[:n])+ns, "\x04"+escaped("abc\x00\x01defghi"[:n])+ns)
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// where the keys are when they are read.
var places = []string{"memtable", "flushed", "half flushed", "compacted"}

func fillPlace(t *testing.T, s *Store, f engine.FamilyID, place string, keys []string) {
	t.Helper()
	for i, k := range keys {
		put(t, s, f, k, fmt.Sprint(i))
		if place == "half flushed" && i == len(keys)/2 || place == "compacted" && i%40 == 39 {
			must(t, s.Flush())
		}
	}
	// Deleted entries must not show, nor hide others.
	var b engine.Batch
	b.Put(f, []byte("\x03gone"), nil)
	b.Delete(f, []byte("\x03gone"))
	must(t, s.Write(&b))
	switch place {
	case "flushed":
		must(t, s.Flush())
	case "compacted":
		must(t, s.Flush())
		must(t, s.Compact())
	}
}

func within(keys []string, lo, hi []byte, reverse bool) []string {
	var out []string
	for i, k := range keys {
		if k >= string(lo) && (hi == nil || k < string(hi)) {
			out = append(out, fmt.Sprintf("%s=%d", k, i))
		}
	}
	if reverse {
		slices.Reverse(out)
	}
	return out
}

func TestScansAreTheSameWhateverFilterAndMemtable(t *testing.T) {
	keys := prefixKeys()
	bounds := [][]byte{nil, {}, []byte("\x03abc"), []byte("\x03abc\x00\x01\xff\xff\xff"), []byte("\x09")}
	for i := 0; i < len(keys); i += 17 {
		bounds = append(bounds, []byte(keys[i]), []byte(keys[i]+"\x00"))
	}
	for _, use := range []engine.Use{engine.UseScanned, engine.UsePoint} {
		for _, mode := range []FilterMode{FilterNone, FilterWholeKey, FilterPrefix} {
			for _, place := range places {
				t.Run(fmt.Sprintf("use %d filter %d %s", use, mode, place), func(t *testing.T) {
					d := newTestDriver(t, Options{FilterOf: func(f engine.FamilyID, _ engine.FamilyOptions) FilterMode {
						if f == engine.MetaFamily {
							return FilterWholeKey
						}
						return mode
					}})
					s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
					must(t, s.EnsureFamily(1, engine.FamilyOptions{Use: use, GroupWidth: 1}))
					fillPlace(t, s, 1, place, keys)
					checkScans(t, s, keys, bounds)
				})
			}
		}
	}
}

func checkScans(t *testing.T, s *Store, keys []string, bounds [][]byte) {
	t.Helper()
	for _, lo := range bounds {
		for _, hi := range bounds {
			for _, reverse := range []bool{false, true} {
				got := collect(t, s, 1, lo, hi, engine.ScanOptions{Reverse: reverse})
				if want := within(keys, lo, hi, reverse); !slices.Equal(got, want) {
					t.Fatalf("scan [%q, %q) reverse %v: %d entries, want %d", lo, hi, reverse, len(got), len(want))
				}
			}
		}
	}
	for i, k := range keys {
		if got := get(t, s, 1, k); got != fmt.Sprint(i) {
			t.Fatalf("get %q: %s, want %d", k, got, i)
		}
	}
	for _, k := range []string{"\x03gone", "\x03abc\x00\x01\x07", "\x06", "\x03ab\x00"} {
		if got := get(t, s, 1, k); got != "-" {
			t.Fatalf("get %q: %s", k, got)
		}
	}
}

// Switching the memtable and the filter of a live family mixes all kinds.
func TestSwitchingMemtablesAndFiltersKeepsAnswers(t *testing.T) {
	d := newTestDriver(t, Options{})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	must(t, s.EnsureFamily(1, engine.FamilyOptions{Use: engine.UseScanned, GroupWidth: 1}))
	keys := prefixKeys()
	for i, k := range keys {
		if i%15 == 0 {
			must(t, s.SetUse(1, engine.Use(i/15%2)))
			must(t, s.SetFilter(1, FilterMode(i/15%3)))
			must(t, s.Flush())
		}
		put(t, s, 1, k, fmt.Sprint(i))
	}
	bounds := [][]byte{nil, []byte(keys[20]), []byte(keys[21]), []byte(keys[60]), []byte(keys[61]), []byte("\x04")}
	for _, k := range []string{"\x03gone"} {
		if got := get(t, s, 1, k); got != "-" {
			t.Fatalf("get %q: %s", k, got)
		}
	}
	checkScans(t, s, keys, bounds)
	must(t, s.Compact())
	checkScans(t, s, keys, bounds)
}
