package engine

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	path := filepath.Join("testdata", "golden", "v1", name)
	if *rewrite {
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Fatalf("%s: got %x, want %x", name, b, want)
	}
}

func TestMarkerGolden(t *testing.T) {
	for file, m := range map[string]Marker{
		"marker-mem":   {Engine: "mem", Layout: 1},
		"marker-rocks": {Engine: "rocks", Layout: 2},
	} {
		b, err := EncodeMarker(m)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, file, b)
		if got, err := DecodeMarker(b); err != nil || got != m {
			t.Fatalf("got %v, %v; want %v", got, err, m)
		}
	}
}

func TestMarkerRefusesDamage(t *testing.T) {
	good, err := EncodeMarker(Marker{Engine: "rocks", Layout: 1})
	if err != nil {
		t.Fatal(err)
	}
	for n := range good {
		if _, err := DecodeMarker(good[:n]); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
	if _, err := DecodeMarker(append(append([]byte(nil), good...), 0)); !errors.Is(err, base.ErrCorrupt) {
		t.Fatalf("one byte more: %v", err)
	}
	for bit := range 8 * len(good) {
		b := append([]byte(nil), good...)
		b[bit/8] ^= 1 << (bit % 8)
		want := base.ErrCorrupt
		if at := bit / 8; at == 8 || at == 9 {
			want = base.ErrFormatVersion
		}
		if _, err := DecodeMarker(b); !errors.Is(err, want) {
			t.Fatalf("bit %d flipped: %v, want %v", bit, err, want)
		}
	}
	for _, m := range []Marker{{}, {Engine: "x"}, {Layout: 1}, {Engine: string(make([]byte, 33)), Layout: 1}} {
		if _, err := EncodeMarker(m); !errors.Is(err, base.ErrInvalid) {
			t.Fatalf("%v: %v", m, err)
		}
	}
}

func FuzzDecodeMarker(f *testing.F) {
	good, _ := EncodeMarker(Marker{Engine: "mem", Layout: 1})
	f.Add(good)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeMarker(b)
		if err != nil {
			return
		}
		if again, err := EncodeMarker(m); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x decodes to %v, which encodes to %x, %v", b, m, again, err)
		}
	})
}

func TestClaimDirectory(t *testing.T) {
	mem := Marker{Engine: "mem", Layout: 1}
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := CheckDirectory(dir, mem); !errors.Is(err, base.ErrNotFound) {
		t.Fatalf("checking an absent directory: %v", err)
	}
	for range 2 {
		if err := ClaimDirectory(dir, mem); err != nil {
			t.Fatal(err)
		}
	}
	if err := CheckDirectory(dir, mem); err != nil {
		t.Fatal(err)
	}
	if err := ClaimDirectory(dir, Marker{Engine: "rocks", Layout: 1}); !errors.Is(err, base.ErrIdentity) {
		t.Fatalf("another engine: %v", err)
	}
	if err := ClaimDirectory(dir, Marker{Engine: "mem", Layout: 2}); !errors.Is(err, base.ErrFormatVersion) {
		t.Fatalf("another layout: %v", err)
	}

	left := t.TempDir() // what a crash before the rename leaves
	if err := os.WriteFile(filepath.Join(left, MarkerFile+".tmp"), []byte("KS"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := ClaimDirectory(left, mem); err != nil {
		t.Fatal(err)
	}
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "notes"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := ClaimDirectory(foreign, mem); !errors.Is(err, base.ErrIdentity) {
		t.Fatalf("files without a marker: %v", err)
	}
}
