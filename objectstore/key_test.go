package objectstore

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// FuzzCheckKey: what passes never leads out of a folder, and is a path in its
// only form.
func FuzzCheckKey(f *testing.F) {
	for _, k := range []string{"a", "a/b", "../a", "a/./b", "a//b", ".x", "", "a\x00b", "ä"} {
		f.Add(k)
	}
	f.Fuzz(func(t *testing.T, key string) {
		err := CheckKey(key)
		if err != nil {
			if !errors.Is(err, base.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		for part := range strings.SplitSeq(key, "/") {
			if part == "" || part[0] == '.' || len(part) > MaxPartBytes {
				t.Fatalf("%q passed", key)
			}
		}
		if err := CheckPrefix(key + "/"); err != nil {
			t.Fatalf("%q is no prefix: %v", key, err)
		}
	})
}

// OS3 for bodies of every length beside the one that is wanted.
func TestExactly(t *testing.T) {
	for have := range 6 {
		for want := range 6 {
			r := Exactly("k", int64(want), io.NopCloser(strings.NewReader("abcdef"[:have])))
			b, err := io.ReadAll(r)
			switch {
			case have == want && (err != nil || len(b) != want):
				t.Errorf("%d of %d: %d bytes, %v", have, want, len(b), err)
			case have != want && !errors.Is(err, base.ErrCorrupt):
				t.Errorf("%d of %d: %v", have, want, err)
			}
		}
	}
	broken := errors.New("broken")
	for _, at := range []int{0, 2, 3} {
		body := io.MultiReader(strings.NewReader("abc"[:at]), failing{broken})
		if _, err := io.ReadAll(Exactly("k", 3, io.NopCloser(body))); !errors.Is(err, broken) {
			t.Errorf("broken after %d: %v", at, err)
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
