package mem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/keelstate/keelstate/engine"
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
		t.Fatalf("%s differs from what is written now", path)
	}
}

func testFamily(id engine.FamilyID, birth uint64, o engine.FamilyOptions, pairs ...string) *family {
	f := &family{id: id, options: o, birth: birth, tree: newTree()}
	for i := 0; i < len(pairs); i += 2 {
		f.tree.Set(newItem([]byte(pairs[i]), []byte(pairs[i+1])))
	}
	return f
}

func testRoot() *root {
	return &root{families: map[engine.FamilyID]*family{
		0: testFamily(0, 0, metaOptions, "applied", "\x00\x07"),
		7: testFamily(7, 1, engine.FamilyOptions{Use: engine.UseScanned, GroupWidth: 1}),
		9: testFamily(9, 4, engine.FamilyOptions{Use: engine.UsePoint, Merge: engine.MergeSum128, GroupWidth: 2},
			"\x00\x00a", "1", "\x00\x01a", "", "\xff\xff", "3", "", "empty key"),
	}}
}

func encodeImage(t testing.TB, r *root, n uint64) ([]byte, uint64) {
	t.Helper()
	var b bytes.Buffer
	sum, err := writeImage(&b, r, n)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), sum
}

// dumper writes an image as text.
type dumper struct{ strings.Builder }

func (d *dumper) startFamily(f *family) {
	fmt.Fprintf(d, "family %d use %d merge %d width %d birth %d\n", f.id, f.options.Use, f.options.Merge, f.options.GroupWidth, f.birth)
}

func (d *dumper) entry(key, value []byte) { fmt.Fprintf(d, "  %q = %q\n", key, value) }

func dumpImage(b []byte) (string, error) {
	var d dumper
	n, sum, err := readImage(bytes.NewReader(b), int64(len(b)), &d)
	return fmt.Sprintf("image %d checksum %016x\n%s", n, sum, d.String()), err
}

func testManifest(t testing.TB) *manifest {
	r := testRoot()
	_, sum := encodeImage(t, r, 12)
	return &manifest{image: 12, imageSum: sum, births: 5, families: r.families}
}

func dumpManifest(m *manifest) string {
	var d dumper
	fmt.Fprintf(&d, "image %d checksum %016x births %d\n", m.image, m.imageSum, m.births)
	for _, f := range sortedFamilies(m.families) {
		d.startFamily(f)
	}
	return d.String()
}

func TestGolden(t *testing.T) {
	b, sum := encodeImage(t, testRoot(), 12)
	text, err := dumpImage(b)
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("image 12 checksum %016x\n", sum); !strings.HasPrefix(text, want) {
		t.Fatalf("%q does not start with %q", text, want)
	}
	golden(t, "image", b)
	golden(t, "image.txt", []byte(text))

	b = encodeManifest(testManifest(t))
	m, err := decodeManifest(b)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "manifest", b)
	golden(t, "manifest.txt", []byte(dumpManifest(m)))
}

// decoders are both formats with a good file of each.
func decoders(t testing.TB) map[string]struct {
	good   []byte
	decode func(b []byte) error
} {
	image, _ := encodeImage(t, testRoot(), 3)
	return map[string]struct {
		good   []byte
		decode func(b []byte) error
	}{
		"image":    {image, func(b []byte) error { _, err := dumpImage(b); return err }},
		"manifest": {encodeManifest(testManifest(t)), func(b []byte) error { _, err := decodeManifest(b); return err }},
	}
}

func TestDamageIsFound(t *testing.T) {
	for name, c := range decoders(t) {
		t.Run(name, func(t *testing.T) {
			if err := c.decode(c.good); err != nil {
				t.Fatal(err)
			}
			for n := range c.good {
				if err := c.decode(c.good[:n]); !errors.Is(err, base.ErrCorrupt) {
					t.Fatalf("cut to %d bytes: %v", n, err)
				}
			}
			if err := c.decode(append(bytes.Clone(c.good), 0)); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("one byte more: %v", err)
			}
			for bit := range 8 * len(c.good) {
				b := bytes.Clone(c.good)
				b[bit/8] ^= 1 << (bit % 8)
				want := base.ErrCorrupt
				if at := bit / 8; at == 8 || at == 9 {
					want = base.ErrFormatVersion
				}
				if err := c.decode(b); !errors.Is(err, want) {
					t.Fatalf("bit %d of byte %d flipped: %v, want %v", bit%8, bit/8, err, want)
				}
			}
		})
	}
}

// handmade builds an image from blocks, with right checksums.
func handmade(blocks ...[]byte) []byte {
	h := binary.BigEndian.AppendUint16([]byte(imageMagic), imageVersion)
	h = binary.BigEndian.AppendUint64(append(h, 0, 0), 1)
	chain := xxh3.Hash(h)
	out := binary.BigEndian.AppendUint64(h, chain)
	for _, b := range blocks {
		whole := append(binary.BigEndian.AppendUint32([]byte{b[0]}, uint32(len(b)-1)), b[1:]...)
		chain = xxh3.HashSeed(whole, chain)
		out = binary.BigEndian.AppendUint64(append(out, whole...), chain)
	}
	return out
}

// TestNonsenseIsRefused: bytes with right checksums that no writer makes.
func TestNonsenseIsRefused(t *testing.T) {
	fam := func(id engine.FamilyID) []byte {
		return appendFamily([]byte{blockFamily}, testFamily(id, 1, engine.FamilyOptions{GroupWidth: 1}))
	}
	entries := func(keys ...string) []byte {
		b := []byte{blockEntries}
		for _, k := range keys {
			b = binary.BigEndian.AppendUint32(b, uint32(len(k)))
			b = append(binary.BigEndian.AppendUint32(b, 0), k...)
		}
		return b
	}
	end := func(families uint32, entries uint64) []byte {
		return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32([]byte{blockEnd}, families), entries)
	}
	if _, err := dumpImage(handmade(fam(1), entries("a", "b"), entries("c"), fam(2), entries("a"), end(2, 4))); err != nil {
		t.Fatalf("a good image: %v", err)
	}
	huge := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32([]byte{blockEntries}, 0xffffffff), 0xffffffff)
	badOptions := fam(1)
	badOptions[6] = 99
	for name, b := range map[string][]byte{
		"entries before a family":   handmade(entries("a"), end(0, 1)),
		"families out of order":     handmade(fam(2), fam(1), end(2, 0)),
		"family twice":              handmade(fam(1), fam(1), end(2, 0)),
		"keys out of order":         handmade(fam(1), entries("b", "a"), end(1, 2)),
		"key twice over two blocks": handmade(fam(1), entries("a"), entries("a"), end(1, 2)),
		"empty block":               handmade(fam(1), entries(), end(1, 0)),
		"huge entry":                handmade(fam(1), huge, end(1, 1)),
		"entry header cut":          handmade(fam(1), entries("a")[:5], end(1, 1)),
		"unknown options":           handmade(badOptions, end(1, 0)),
		"short family":              handmade(fam(1)[:10], end(1, 0)),
		"unknown block":             handmade([]byte{9, 1}, end(0, 0)),
		"wrong family count":        handmade(fam(1), end(2, 0)),
		"wrong entry count":         handmade(fam(1), entries("a"), end(1, 2)),
		"short end":                 handmade(end(0, 0)[:5]),
		"no end":                    handmade(fam(1)),
		"after the end":             handmade(end(0, 0), fam(1)),
	} {
		if _, err := dumpImage(b); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestBlocksStayInPlace: blocks of one file cannot be exchanged, repeated or
// left out, even where each is intact.
func TestBlocksStayInPlace(t *testing.T) {
	f := testFamily(1, 1, engine.FamilyOptions{GroupWidth: 1})
	value := make([]byte, blockTarget/2)
	for i := range 8 {
		f.tree.Set(newItem([]byte{byte(i)}, value))
	}
	b, _ := encodeImage(t, &root{families: map[engine.FamilyID]*family{1: f}}, 1)
	var cuts []int
	for at := imageHeaderLen; at < len(b); {
		cuts = append(cuts, at)
		at += blockHeaderLen + int(binary.BigEndian.Uint32(b[at+1:])) + checksumLen
	}
	if len(cuts) < 8 {
		t.Fatalf("%d blocks", len(cuts))
	}
	part := func(i int) []byte { return b[cuts[i]:cuts[i+1]] }
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, damaged := range map[string][]byte{
		"left out":  join(b[:cuts[3]], b[cuts[4]:]),
		"repeated":  join(b[:cuts[3]], part(3), b[cuts[3]:]),
		"exchanged": join(b[:cuts[3]], part(4), part(3), b[cuts[5]:]),
	} {
		if _, err := dumpImage(damaged); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("block %s: %v", name, err)
		}
	}
}

func FuzzImage(f *testing.F) {
	good, _ := encodeImage(f, testRoot(), 3)
	f.Add(good)
	f.Add(handmade([]byte{blockEnd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}))
	f.Fuzz(func(t *testing.T, b []byte) {
		l := &rebuild{families: make(map[engine.FamilyID]*family)}
		n, _, err := readImage(bytes.NewReader(b), int64(len(b)), l)
		if err != nil {
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatal(err)
			}
			return
		}
		// Blocks may be cut elsewhere, so compare what is in them.
		again, _ := encodeImage(t, &root{families: l.families}, n)
		one, err1 := dumpImage(b)
		two, err2 := dumpImage(again)
		_, one, _ = strings.Cut(one, "\n")
		_, two, _ = strings.Cut(two, "\n")
		if err1 != nil || err2 != nil || one != two {
			t.Fatalf("%q, %v\n%q, %v", one, err1, two, err2)
		}
	})
}

type rebuild struct {
	families map[engine.FamilyID]*family
	into     *family
}

func (r *rebuild) startFamily(f *family) {
	f.tree = newTree()
	r.families[f.id], r.into = f, f
}

func (r *rebuild) entry(key, value []byte) { r.into.tree.Set(newItem(key, value)) }

func FuzzManifest(f *testing.F) {
	f.Add(encodeManifest(testManifest(f)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeManifest(b)
		if err != nil {
			return
		}
		if !bytes.Equal(encodeManifest(m), b) {
			t.Fatalf("%x is another manifest when it is written again", b)
		}
	})
}
