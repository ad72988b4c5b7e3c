package mutants

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestHunkAppliesWhereItsLinesAreProperty: lines put before a hunk's place do
// not matter, a changed line in it is refused (MU1).
func TestHunkAppliesWhereItsLinesAreProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.SampledFrom([]string{"a", "b", "c", ""})
		before := rapid.SliceOfN(word, 0, 20).Draw(t, "before")
		after := rapid.SliceOfN(word, 0, 5).Draw(t, "after")
		claimed := rapid.IntRange(0, 30).Draw(t, "claimed")
		f := filePatch{path: "f", hunks: []hunk{{at: claimed, old: []string{"x", "y"}, new: []string{"x", "z", "z"}}}}
		text := func(middle ...string) string {
			return strings.Join(append(append(before[:len(before):len(before)], middle...), after...), "\n")
		}
		got, err := f.apply(text("x", "y"))
		if err != nil || got != text("x", "z", "z") {
			t.Fatalf("%q: %v", got, err)
		}
		if got, err := f.apply(text("x", "Y")); err == nil {
			t.Fatalf("applied to other lines: %q", got)
		}
	})
}

// TestNearestOfEqualPlaces: of equal places the one that the patch names counts,
// and the hunks before it are reckoned with.
func TestNearestOfEqualPlaces(t *testing.T) {
	f := filePatch{path: "f", hunks: []hunk{
		{at: 0, old: []string{"top"}, new: []string{"top", "more", "more"}},
		{at: 4, old: []string{"same"}, new: []string{"changed"}},
	}}
	got, err := f.apply("top\nsame\n-\n-\nsame\n-\n-\nsame")
	if want := "top\nmore\nmore\nsame\n-\n-\nchanged\n-\n-\nsame"; err != nil || got != want {
		t.Fatalf("%q: %v", got, err)
	}
}

func TestOverlayOfTheControlIsEmpty(t *testing.T) {
	dir := t.TempDir()
	for name, m := range map[string]*Mutant{"control": nil, "one": {files: []filePatch{{path: "d/f.go", hunks: []hunk{{old: []string{"a"}, new: []string{"b"}}}}}}} {
		to := t.TempDir()
		if err := os.MkdirAll(filepath.Join(dir, "d"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "d", "f.go"), []byte("a\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		file, err := m.Overlay(dir, to)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var o struct{ Replace map[string]string }
		if err := json.Unmarshal(raw, &o); err != nil {
			t.Fatal(err)
		}
		if m == nil {
			if len(o.Replace) != 0 {
				t.Errorf("%s: %v", name, o.Replace)
			}
			continue
		}
		text, err := os.ReadFile(o.Replace[filepath.Join(dir, "d", "f.go")])
		if err != nil || string(text) != "b\n" {
			t.Errorf("%s: %q %v", name, text, err)
		}
	}
}
