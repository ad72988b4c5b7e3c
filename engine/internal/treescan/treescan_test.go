package treescan

import (
	"slices"
	"testing"

	"github.com/tidwall/btree"
	"pgregory.net/rapid"
)

// TestCursor compares every kind of walk with a sorted slice.
func TestCursor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		items := rapid.SliceOfNDistinct(rapid.IntRange(0, 300), 0, 200, rapid.ID[int]).Draw(t, "items")
		tree := btree.NewBTreeGOptions(func(a, b int) bool { return a < b }, btree.Options{NoLocks: true, Degree: 2})
		for _, v := range items {
			tree.Set(v)
		}
		bound := func(label string) *int {
			if rapid.Bool().Draw(t, "no "+label) {
				return nil
			}
			v := rapid.IntRange(-1, 301).Draw(t, label)
			return &v
		}
		lo, hi := bound("lo"), bound("hi")
		var want []int
		for _, v := range items {
			if (lo == nil || v >= *lo) && (hi == nil || v < *hi) {
				want = append(want, v)
			}
		}
		slices.Sort(want)
		reverse := rapid.Bool().Draw(t, "reverse")
		if reverse {
			slices.Reverse(want)
		}
		var got []int
		c := New(tree, lo, hi, reverse)
		for c.Next() {
			got = append(got, c.Item())
		}
		if !slices.Equal(got, want) || c.Next() {
			t.Fatalf("got %v, want %v", got, want)
		}
	})
}
