package rocks

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

// A flipped byte in any file that has a checksum is found while the store is in
// use, with the file's name.
func TestVerifyFilesFindsAFlippedByteOfAnOpenStore(t *testing.T) {
	for _, pattern := range []string{"*.sst", "MANIFEST-*", "CURRENT"} {
		d, err := NewDriver(Options{MemoryBytes: 16 << 20})
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "store")
		s, err := d.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		b := &engine.Batch{}
		for i := range 2000 {
			b.Put(engine.MetaFamily, []byte(fmt.Sprintf("key %06d", i)), []byte(strings.Repeat(fmt.Sprint(i), 20)))
		}
		if err := errors.Join(s.Write(b), s.Flush()); err != nil {
			t.Fatal(err)
		}
		var read int64
		pace := func(n int64) error { read += n; return nil }
		if err := s.(engine.Verifier).VerifyFiles(pace); err != nil || read < 10_000 {
			t.Fatalf("a sound store: %d bytes, %v", read, err)
		}
		stop := errors.New("enough")
		if err := s.(engine.Verifier).VerifyFiles(func(int64) error { return stop }); !errors.Is(err, stop) {
			t.Errorf("pace ended it: %v", err)
		}
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(names) != 1 {
			t.Fatalf("%s: %q %v", pattern, names, err)
		}
		raw, err := os.ReadFile(names[0])
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < len(raw); at += max(1, len(raw)/7) {
			f, err := os.OpenFile(names[0], os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteAt([]byte{raw[at] ^ 4}, int64(at))
			}
			if err != nil {
				t.Fatal(err)
			}
			err = s.(engine.Verifier).VerifyFiles(pace)
			if !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), filepath.Base(names[0])) {
				t.Errorf("%s, byte %d of %d: %v", pattern, at, len(raw), err)
			}
			if _, err := f.WriteAt(raw[at:at+1], int64(at)); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.(engine.Verifier).VerifyFiles(pace); err != nil {
			t.Errorf("mended: %v", err)
		}
		if err := errors.Join(s.Close(), d.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// A flipped bit of CURRENT makes it name a file that is not there, as easily as
// none at all. Either is damage of this store, from which its replica is rebuilt,
// and not a failure of the disk, after which it would be tried again for ever.
func TestOpenOfAStoreThatLacksAFileIsDamage(t *testing.T) {
	d, err := NewDriver(Options{MemoryBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	dir := filepath.Join(t.TempDir(), "store")
	s, err := d.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	b := &engine.Batch{}
	b.Put(engine.MetaFamily, []byte("key"), []byte("value"))
	if err := errors.Join(s.Write(b), s.Flush(), s.Close()); err != nil {
		t.Fatal(err)
	}
	// open says whether the store still has its key.
	open := func() error {
		s, err := d.Open(dir)
		if err != nil {
			return err
		}
		v, ok, err := s.Get(engine.MetaFamily, []byte("key"))
		if err == nil && (!ok || string(v) != "value") {
			t.Errorf("it opens, and the key is %q, %t", v, ok)
		}
		return errors.Join(err, s.Close())
	}
	current := filepath.Join(dir, "CURRENT")
	raw, err := os.ReadFile(current)
	if err != nil {
		t.Fatal(err)
	}
	for bit := range len(raw) * 8 {
		flipped := append([]byte(nil), raw...)
		flipped[bit/8] ^= 1 << (bit % 8)
		if err := os.WriteFile(current, flipped, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := open(); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("bit %d of CURRENT, %q: %v", bit, flipped, err)
		}
	}
	if err := os.WriteFile(current, raw, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"CURRENT", "MANIFEST-*", "*.sst"} {
		names, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(names) == 0 {
			t.Fatalf("%s: %q %v", pattern, names, err)
		}
		for _, name := range names {
			if err := os.Rename(name, name+".away"); err != nil {
				t.Fatal(err)
			}
			if err := open(); !errors.Is(err, base.ErrCorrupt) {
				t.Errorf("without %s: %v", filepath.Base(name), err)
			}
			if err := os.Rename(name+".away", name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := open(); err != nil {
		t.Errorf("with all its files: %v", err)
	}
}
