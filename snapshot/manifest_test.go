package snapshot_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

var rewrite = flag.Bool("rewrite", false, "rewrite golden files")

// goldens are manifests that cover every field, with their file's name.
func goldens() map[string]*snapshot.Manifest {
	full := sampleContent().manifest()
	full.Files[1].Object, full.Files[1].Offset, full.Files[1].Length = "prefix/cluster/0a0b.1", 4096, 5
	edge := &snapshot.Manifest{
		Group: ^base.GroupID(0), Birth: ^base.Birth(0), Incarnation: ^base.Incarnation(0), Epoch: ^base.Epoch(0),
		Range: keygroup.Range{Lo: 32767, Hi: 32768}, M: 32768, Engine: strings.Repeat("e", 255),
		Index: ^uint64(0), Term: ^uint64(0), Sequence: ^uint64(0), ClockMs: ^uint64(0),
		Files: []snapshot.File{{Name: strings.Repeat("n", snapshot.MaxNameBytes), Size: 1<<63 - 1,
			Object: strings.Repeat("o", snapshot.MaxObjectBytes), Offset: 1<<63 - 1, Length: 1<<63 - 1}},
	}
	return map[string]*snapshot.Manifest{
		"full": full,
		"edge": edge,
		"empty": {Group: 1, Birth: 1, Range: keygroup.Range{Lo: 0, Hi: 1}, M: 1, Engine: "mem",
			Files: []snapshot.File{}},
	}
}

func mustEncode(t testing.TB, m *snapshot.Manifest) []byte {
	t.Helper()
	b, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenManifests(t *testing.T) {
	for name, m := range goldens() {
		path := filepath.Join("testdata", "golden", "v1", name+".hex")
		b := mustEncode(t, m)
		if *rewrite {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(hex.Dump(b)), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.Dump(b); got != string(want) {
			t.Errorf("%s: the encoding changed:\n%s\nwant\n%s", name, got, want)
		}
		back, err := snapshot.Decode(b)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !reflect.DeepEqual(back, m) {
			t.Errorf("%s: decoded %+v, want %+v", name, back, m)
		}
	}
}

// SN1: a prefix of a manifest is refused, as damage.
func TestManifestCutAnywhereIsCorrupt(t *testing.T) {
	for name, m := range goldens() {
		b := mustEncode(t, m)
		for n := range b {
			if _, err := snapshot.Decode(b[:n]); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s cut to %d of %d bytes: %v", name, n, len(b), err)
			}
		}
		if _, err := snapshot.Decode(append(b, 0)); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("%s with a byte behind it: %v", name, err)
		}
	}
}

// SN1: every flipped bit is found. Only in the version byte it may look like a
// newer version.
func TestManifestWithAFlippedBitIsRefused(t *testing.T) {
	for name, m := range goldens() {
		b := mustEncode(t, m)
		for bit := range 8 * len(b) {
			b[bit/8] ^= 1 << (bit % 8)
			want := base.ErrCorrupt
			if bit/8 == 4 {
				want = base.ErrFormatVersion
			}
			if _, err := snapshot.Decode(b); !errors.Is(err, want) {
				t.Fatalf("%s with bit %d flipped: %v, want %v", name, bit, err, want)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
}

// A version that this build does not know is not damage, whatever follows it.
func TestUnknownManifestVersionIsNotDamage(t *testing.T) {
	b := mustEncode(t, sampleContent().manifest())
	for v := range 256 {
		if v == 1 || v == 2 {
			continue
		}
		c := bytes.Clone(b)
		c[4] = byte(v)
		for _, in := range [][]byte{c, reseal(c), c[:5]} {
			_, err := snapshot.Decode(in)
			if !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("version %d in %d bytes: %v", v, len(in), err)
			}
		}
	}
}

// reseal gives a damaged manifest a right checksum, as a faulty writer would.
func reseal(b []byte) []byte {
	body := bytes.Clone(b[:len(b)-sha256.Size])
	sum := sha256.Sum256(body)
	return append(body, sum[:]...)
}

// firstNameAt is where the first file's name begins, of a manifest of "rocks".
const firstNameAt = 5 + 11*8 + 2 + len("rocks") + 4 + 2

// SN1: behind a right checksum, what cannot be is refused all the same.
func TestSealedNonsenseIsRefused(t *testing.T) {
	b := mustEncode(t, sampleContent().manifest())
	const rangeAt, mAt = 5 + 4*8, 5 + 6*8
	cases := map[string]func(b []byte){
		"lo beyond hi":            func(b []byte) { b[rangeAt+1] = 0x7f },
		"lo beyond 16 bits":       func(b []byte) { b[rangeAt+2] = 1; b[rangeAt] = 0 },
		"hi beyond M":             func(b []byte) { b[rangeAt+9] = 0x70 },
		"M of 2^63":               func(b []byte) { b[mAt+7] = 0x80 },
		"M of 65536":              func(b []byte) { copy(b[mAt:], []byte{0, 0, 1}) },
		"M of 0":                  func(b []byte) { clear(b[mAt : mAt+8]) },
		"a count of 2^32-1 files": func(b []byte) { at := 5 + 11*8 + 2 + 5; copy(b[at:], []byte{255, 255, 255, 255}) },
		"one file less":           func(b []byte) { b[5+11*8+2+5]-- },
		"a negative size":         func(b []byte) { b[5+11*8+2+5+4+2+10+7] = 0x80 },
		"a name that is too long": func(b []byte) { b[5+11*8+2+5+4+1] = 0xff },
	}
	for name, spoil := range cases {
		c := bytes.Clone(b)
		spoil(c)
		if bytes.Equal(b, c) {
			t.Fatalf("%s: the case changes nothing", name)
		}
		if m, err := snapshot.Decode(reseal(c)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s: %v, %+v", name, err, m)
		}
	}
}

// badNames leave the directory, or clash with what a fetch makes in it.
var badNames = []string{"", ".", "..", "/", "/etc/passwd", "../x", "a/b", "a/../../b", `..\x`, `a\b`, "a\x00b", "x.part", ".part",
	strings.Repeat("n", snapshot.MaxNameBytes+1)}

// SN1: a name that could leave the directory is neither written nor believed.
func TestManifestNamesStayInside(t *testing.T) {
	for _, name := range badNames {
		m := content{"ok.sst": nil}.manifest()
		m.Files[0].Name = name
		if _, err := m.Encode(); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("encoding name %q: %v", name, err)
		}
	}
	// The same through the decoder: a name of the same length is put into the
	// bytes of a good manifest, under a right checksum.
	for _, name := range badNames {
		if name == "" || len(name) > snapshot.MaxNameBytes {
			continue
		}
		good := strings.Repeat("g", len(name))
		b := mustEncode(t, content{good: nil}.manifest())
		copy(b[firstNameAt:], name)
		if _, err := snapshot.Decode(reseal(b)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("decoding name %q: %v", name, err)
		}
	}
}

// SN1: what cannot be is refused by Encode too, naming the field.
func TestEncodeRefusesImpossibleManifests(t *testing.T) {
	cases := []struct {
		field string
		want  error
		spoil func(m *snapshot.Manifest)
	}{
		{"range", base.ErrInvalid, func(m *snapshot.Manifest) { m.M = 0 }},
		{"range", base.ErrInvalid, func(m *snapshot.Manifest) { m.M = 32769 }},
		{"range", base.ErrInvalid, func(m *snapshot.Manifest) { m.Range = keygroup.Range{} }},
		{"range", base.ErrInvalid, func(m *snapshot.Manifest) { m.Range.Hi = keygroup.Group(m.M + 1) }},
		{"engine", base.ErrInvalid, func(m *snapshot.Manifest) { m.Engine = "" }},
		{"engine", base.ErrInvalid, func(m *snapshot.Manifest) { m.Engine = strings.Repeat("e", 256) }},
		{"files", base.ErrInvalid, func(m *snapshot.Manifest) { m.Files[1].Name = m.Files[0].Name }},
		{"files", base.ErrInvalid, func(m *snapshot.Manifest) { m.Files[0].Size = -1 }},
		{"files", base.ErrInvalid, func(m *snapshot.Manifest) { m.Files[0].Offset = -1 }},
		{"files", base.ErrInvalid, func(m *snapshot.Manifest) { m.Files[0].Length = -1 }},
		{"files", base.ErrInvalid, func(m *snapshot.Manifest) { m.Files[0].Object = strings.Repeat("o", snapshot.MaxObjectBytes+1) }},
		{"files", base.ErrTooLarge, func(m *snapshot.Manifest) { m.Files = make([]snapshot.File, snapshot.MaxFiles+1) }},
	}
	for i, c := range cases {
		m := sampleContent().manifest()
		c.spoil(m)
		_, err := m.Encode()
		var e *base.Error
		if !errors.Is(err, c.want) || !errors.As(err, &e) || e.Field != c.field {
			t.Errorf("case %d: %v, want %v of %s", i, err, c.want, c.field)
		}
	}
}

// A large store fits into what the cluster lets through Raft's sink, 16 MiB.
func TestManifestOfTenThousandFilesFits(t *testing.T) {
	m := content{}.manifest()
	for i := range 10_000 {
		m.Files = append(m.Files, snapshot.File{Name: fmt.Sprintf("%06d.sst", i), Size: int64(i),
			Object: "prefix/" + strings.Repeat("c", 32) + "/" + strings.Repeat("s", 64) + ".1"})
	}
	rand.Shuffle(len(m.Files), func(i, j int) { m.Files[i], m.Files[j] = m.Files[j], m.Files[i] })
	b := mustEncode(t, m)
	if len(b) > 2<<20 {
		t.Errorf("10,000 files take %d bytes", len(b))
	}
	back, err := snapshot.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, m) {
		t.Error("the files came back otherwise")
	}
	if got, want := back.Bytes(), int64(10_000*9_999/2); got != want {
		t.Errorf("Bytes is %d, want %d", got, want)
	}
}

// Whatever is encoded decodes to the same, and the order in which files were
// given does not show.
func TestManifestRoundTripProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		M := rapid.IntRange(1, 32768).Draw(t, "M")
		lo := rapid.IntRange(0, M-1).Draw(t, "lo")
		m := &snapshot.Manifest{
			Group: base.GroupID(rapid.Uint64().Draw(t, "group")), Birth: base.Birth(rapid.Uint64().Draw(t, "birth")),
			Incarnation: base.Incarnation(rapid.Uint64().Draw(t, "incarnation")), Epoch: base.Epoch(rapid.Uint64().Draw(t, "epoch")),
			Range: keygroup.Range{Lo: keygroup.Group(lo), Hi: keygroup.Group(rapid.IntRange(lo+1, M).Draw(t, "hi"))}, M: M,
			Engine: rapid.StringN(1, 10, 255).Draw(t, "engine"), Index: rapid.Uint64().Draw(t, "index"), Term: rapid.Uint64().Draw(t, "term"),
			Sequence: rapid.Uint64().Draw(t, "sequence"), ClockMs: rapid.Uint64().Draw(t, "clock"), Files: []snapshot.File{},
		}
		for _, n := range rapid.SliceOfDistinct(rapid.StringMatching(`[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,30}\.sst`), rapid.ID).Draw(t, "names") {
			f := snapshot.File{Name: n, Size: rapid.Int64Min(0).Draw(t, "size"), Object: rapid.StringN(0, 20, 1024).Draw(t, "object"),
				Offset: rapid.Int64Min(0).Draw(t, "offset"), Length: rapid.Int64Min(0).Draw(t, "length")}
			copy(f.SHA256[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "sum"))
			m.Files = append(m.Files, f)
		}
		b, err := m.Encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := snapshot.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(back, m) {
			t.Fatalf("decoded %+v, want %+v", back, m)
		}
	})
}

// FuzzDecode: no bytes make Decode panic or allocate out of proportion, and what
// it takes has one encoding only.
func FuzzDecode(f *testing.F) {
	for _, m := range goldens() {
		b := mustEncode(f, m)
		f.Add(b)
		f.Add(b[:len(b)/2])
	}
	check := func(t *testing.T, b []byte) {
		m, err := snapshot.Decode(b)
		if err != nil {
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("%v is neither damage nor a version", err)
			}
			return
		}
		if again := mustEncode(t, m); !bytes.Equal(again, b) {
			t.Fatalf("two encodings of one manifest:\n%x\n%x", b, again)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		check(t, b)
		if len(b) > sha256.Size {
			check(t, reseal(b)) // past the checksum
		}
	})
}
