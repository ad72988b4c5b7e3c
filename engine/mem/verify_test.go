package mem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// A flipped byte anywhere in the manifest or the image is found while the store
// is in use, with the file's name.
func TestVerifyFilesFindsAFlippedByteOfAnOpenStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s, err := open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	b := &engine.Batch{}
	for i := range 200 {
		b.Put(engine.MetaFamily, []byte(fmt.Sprintf("key %06d", i)), []byte(strings.Repeat(fmt.Sprint(i), 20)))
	}
	if err := errors.Join(s.Write(b), s.Flush()); err != nil {
		t.Fatal(err)
	}
	pace := func(int64) error { return nil }
	if err := s.VerifyFiles(pace); err != nil {
		t.Fatalf("a sound store: %v", err)
	}
	stop := errors.New("enough")
	for calls := range 2 {
		left := calls
		err := s.VerifyFiles(func(int64) error {
			if left--; left < 0 {
				return stop
			}
			return nil
		})
		if !errors.Is(err, stop) || errors.Is(err, base.ErrCorrupt) {
			t.Errorf("pace ended it after %d calls: %v", calls, err)
		}
	}
	for _, pattern := range []string{"MANIFEST", "image-*"} {
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(names) != 1 {
			t.Fatalf("%s: %q %v", pattern, names, err)
		}
		raw, err := os.ReadFile(names[0])
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < len(raw); at += max(1, len(raw)/50) {
			raw[at] ^= 4
			if err := os.WriteFile(names[0], raw, 0o644); err != nil {
				t.Fatal(err)
			}
			err := s.VerifyFiles(pace)
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) || !strings.Contains(err.Error(), filepath.Base(names[0])) {
				t.Errorf("%s, byte %d of %d: %v", pattern, at, len(raw), err)
			}
			raw[at] ^= 4
		}
		if err := os.WriteFile(names[0], raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.VerifyFiles(pace); err != nil {
		t.Errorf("mended: %v", err)
	}
}
