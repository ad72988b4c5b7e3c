package rocks

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// fewerChecks bounds the properties over a store on disk, where each step may be
// an fsync, unless -rapid.checks or KEELSTATE_LONG asks for more.
func fewerChecks() {
	flag.Parse()
	chosen := os.Getenv("KEELSTATE_LONG") != ""
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "rapid.checks" })
	if chosen {
		return
	}
	if err := flag.Set("rapid.checks", "25"); err != nil {
		panic(err)
	}
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDirEnv); dir != "" {
		crashChild(dir)
		return
	}
	fewerChecks()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if n := LiveObjects(); code == 0 && n != 0 {
			fmt.Fprintf(os.Stderr, "%d native objects were not freed (RO6)\n", n)
			code = 1
		}
		os.Exit(code)
	}))
}

// newTestDriver returns a small driver that is closed with the test.
func newTestDriver(t testing.TB, o Options) *Driver {
	t.Helper()
	if o.MemoryBytes == 0 {
		o.MemoryBytes = 32 << 20
	}
	d, err := NewDriver(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// openTest opens a store that is closed with the test.
func openTest(t testing.TB, d *Driver, dir string) *Store {
	t.Helper()
	s, err := d.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s.(*Store)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t testing.TB, s engine.Store, f engine.FamilyID, kv ...string) {
	t.Helper()
	var b engine.Batch
	for i := 0; i < len(kv); i += 2 {
		b.Put(f, []byte(kv[i]), []byte(kv[i+1]))
	}
	must(t, s.Write(&b))
}

func get(t testing.TB, r engine.Reader, f engine.FamilyID, key string) string {
	t.Helper()
	v, ok, err := r.Get(f, []byte(key))
	must(t, err)
	if !ok {
		return "-"
	}
	return string(v)
}

// collect returns "key=value" of every entry of a scan.
func collect(t testing.TB, r engine.Reader, f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) []string {
	t.Helper()
	it := r.Scan(f, lo, hi, o)
	defer it.Close()
	var out []string
	for it.Next() {
		out = append(out, string(it.Key())+"="+string(it.Value()))
	}
	must(t, it.Err())
	return out
}

var scanned = engine.FamilyOptions{Use: engine.UseScanned, GroupWidth: 1}

func TestFamilyNamesKeepOptions(t *testing.T) {
	for use := range useWords {
		for merge := range mergeWords {
			for width := 1; width <= 2; width++ {
				o := engine.FamilyOptions{Use: use, Merge: merge, GroupWidth: width}
				id, got, err := parseFamilyName(familyName(7, o))
				if err != nil || id != 7 || got != o {
					t.Errorf("%s: %d %+v %v", familyName(7, o), id, got, err)
				}
			}
		}
	}
	for _, name := range []string{"", "f", "f7", "f7.point.none", "f0.point.none.w1", "f07.point.none.w1", "f7.point.none.w3",
		"f7.point.none.w1.", "f7.hash.none.w1", "f7.point.mul.w1", "f4294967296.point.none.w1", "g7.point.none.w1", "f-7.point.none.w1"} {
		if _, _, err := parseFamilyName(name); !errors.Is(err, base.ErrFormatVersion) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestOptionsOutOfRangeAreRefused(t *testing.T) {
	for _, o := range []Options{
		{MemoryBytes: 1}, {WriteBufferShare: 1}, {WriteBufferShare: -0.1}, {FamilyBufferBytes: 1},
		{MaxOpenFiles: 1}, {BackgroundJobs: 65}, {MaxSuccessiveMerges: -2},
	} {
		if _, err := NewDriver(o); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	d := newTestDriver(t, Options{
		FilterOf: func(f engine.FamilyID, _ engine.FamilyOptions) FilterMode {
			if f == 1 {
				return 9
			}
			return FilterNone
		},
		BufferOf: func(f engine.FamilyID) int64 { return int64(f & 2) },
	})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	for f := engine.FamilyID(1); f <= 2; f++ {
		if err := s.EnsureFamily(f, scanned); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("family %d: %v", f, err)
		}
	}
	if err := s.SetFilter(engine.MetaFamily, FilterPrefix); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("prefix filter without a prefix: %v", err)
	}
}

func TestDroppedFamilyStaysReadableInOpenViews(t *testing.T) {
	d := newTestDriver(t, Options{})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	must(t, s.EnsureFamily(1, scanned))
	for i := range 2000 {
		put(t, s, 1, fmt.Sprintf("k%04d", i), "old value of some length")
	}
	v, err := s.NewView()
	must(t, err)
	it := s.Scan(1, nil, nil, engine.ScanOptions{})
	if !it.Next() {
		t.Fatal("no entry")
	}
	before := s.Stats().NativeObjects
	must(t, s.DropFamily(1))
	if _, _, err := s.Get(1, []byte("k0001")); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("reading a dropped family: %v", err)
	}
	must(t, s.EnsureFamily(1, engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 2}))
	if got := get(t, s, 1, "k0001"); got != "-" {
		t.Errorf("the new family has %q of the old one", got)
	}
	if got := get(t, v, 1, "k0001"); got != "old value of some length" {
		t.Errorf("view: %q", got)
	}
	n := 1
	for it.Next() {
		n++
	}
	if n != 2000 || it.Err() != nil {
		t.Errorf("iterator: %d entries, %v", n, it.Err())
	}
	it.Close()
	v.Close()
	// The new family is there, the old one, the view and the iterator are not.
	if after := s.Stats().NativeObjects; after != before-2 {
		t.Errorf("%d native objects after, %d before", after, before)
	}
}

func TestCloseFreesWhatIsOpenAndSaysSo(t *testing.T) {
	d := newTestDriver(t, Options{})
	s, err := d.Open(filepath.Join(t.TempDir(), "s"))
	must(t, err)
	must(t, s.EnsureFamily(1, scanned))
	for i := range 2000 {
		put(t, s, 1, fmt.Sprintf("k%04d", i), "some value")
	}
	v, err := s.NewView()
	must(t, err)
	it := v.Scan(1, nil, nil, engine.ScanOptions{})
	if !it.Next() {
		t.Fatal("no entry")
	}
	key := it.Key()
	if err := s.Close(); !errors.Is(err, base.ErrConflict) {
		t.Errorf("closing with a view and an iterator: %v", err)
	}
	if string(key) != "k0000" {
		t.Errorf("key after close: %q", key)
	}
	for it.Next() {
	}
	if !errors.Is(it.Err(), base.ErrClosed) {
		t.Errorf("iterator: %v", it.Err())
	}
	if _, _, err := v.Get(1, nil); !errors.Is(err, base.ErrClosed) {
		t.Errorf("view: %v", err)
	}
	it.Close()
	v.Close()
	must(t, s.Close())
	if n := LiveObjects(); n != 1 {
		t.Errorf("%d native objects, want the driver alone", n)
	}
}

func TestForeignOrDamagedDirectoriesAreRefused(t *testing.T) {
	d := newTestDriver(t, Options{})
	refused := func(dir string, want error) {
		t.Helper()
		if s, err := d.Open(dir); !errors.Is(err, want) {
			t.Errorf("opening %s: %v, want %v", filepath.Base(dir), err, want)
			if err == nil {
				_ = s.Close()
			}
		}
	}
	foreign := filepath.Join(t.TempDir(), "foreign")
	must(t, os.MkdirAll(foreign, 0o755))
	must(t, os.WriteFile(filepath.Join(foreign, "notes.txt"), nil, 0o644))
	refused(foreign, base.ErrIdentity)
	other := filepath.Join(t.TempDir(), "mem")
	must(t, engine.ClaimDirectory(other, engine.Marker{Engine: "mem", Layout: 1}))
	refused(other, base.ErrIdentity)
	newer := filepath.Join(t.TempDir(), "newer")
	must(t, engine.ClaimDirectory(newer, engine.Marker{Engine: Name, Layout: layoutVersion + 1}))
	refused(newer, base.ErrFormatVersion)

	lost := filepath.Join(t.TempDir(), "lost")
	s, err := d.Open(lost)
	must(t, err)
	put(t, s, engine.MetaFamily, "a", "1")
	must(t, s.Flush())
	if _, err := d.Open(lost); !errors.Is(err, base.ErrConflict) {
		t.Errorf("opening twice: %v", err)
	}
	must(t, s.Close())
	must(t, os.Remove(filepath.Join(lost, currentFile)))
	refused(lost, base.ErrCorrupt)
	if err := d.Verify(lost); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("verifying: %v", err)
	}
}

func TestCrashWhileCreatingLeavesAnOpenableDirectory(t *testing.T) {
	d := newTestDriver(t, Options{})
	dir := filepath.Join(t.TempDir(), "s")
	must(t, engine.ClaimDirectory(dir, marker))
	must(t, d.Verify(dir)) // nothing there yet, nothing damaged
	must(t, os.WriteFile(filepath.Join(dir, firstManifest), []byte("cut"), 0o644))
	s := openTest(t, d, dir)
	put(t, s, engine.MetaFamily, "a", "1")
}

func TestVerifyFindsEveryDamagedTableFile(t *testing.T) {
	d := newTestDriver(t, Options{})
	dir := filepath.Join(t.TempDir(), "s")
	s, err := d.Open(dir)
	must(t, err)
	must(t, s.EnsureFamily(1, scanned))
	for i := range 300 {
		put(t, s, 1, fmt.Sprintf("k%04d", i), "some value")
	}
	must(t, s.Flush())
	must(t, s.Close())
	must(t, d.Verify(dir))
	files, err := filepath.Glob(filepath.Join(dir, "*.sst"))
	must(t, err)
	if len(files) == 0 {
		t.Fatal("no table files")
	}
	good, err := os.ReadFile(files[0])
	must(t, err)
	for at := 0; at < len(good); at += 1 + len(good)/40 {
		bad := bytes.Clone(good)
		bad[at] ^= 0x10
		must(t, os.WriteFile(files[0], bad, 0o644))
		if err := d.Verify(dir); !errors.Is(err, base.ErrCorrupt) || !bytes.Contains([]byte(err.Error()), []byte(filepath.Base(files[0]))) {
			t.Errorf("bit flipped at %d of %d: %v", at, len(good), err)
		}
	}
	must(t, os.WriteFile(files[0], good[:len(good)-1], 0o644))
	if err := d.Verify(dir); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("cut by one byte: %v", err)
	}
	must(t, os.Remove(files[0]))
	if err := d.Verify(dir); err == nil {
		t.Error("missing file not noticed")
	}
}

func TestDurableGetIsWhatACrashLeaves(t *testing.T) {
	d := newTestDriver(t, Options{})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	durable := func(want string) {
		t.Helper()
		v, ok, err := s.DurableGet([]byte("index"))
		must(t, err)
		if !ok {
			v = []byte("-")
		}
		if string(v) != want {
			t.Errorf("durable %q, want %q", v, want)
		}
	}
	durable("-")
	put(t, s, engine.MetaFamily, "index", "1")
	durable("-")
	must(t, s.Flush())
	durable("1")
	put(t, s, engine.MetaFamily, "index", "2")
	durable("1")
	must(t, s.Checkpoint(filepath.Join(t.TempDir(), "c")))
	durable("2")
	var b engine.Batch
	b.Delete(engine.MetaFamily, []byte("index"))
	must(t, s.Write(&b))
	durable("2")
	must(t, s.Compact())
	durable("-")
}

func TestCheckpointReplacesWhatACrashLeft(t *testing.T) {
	d := newTestDriver(t, Options{})
	s := openTest(t, d, filepath.Join(t.TempDir(), "s"))
	put(t, s, engine.MetaFamily, "a", "1")
	to := filepath.Join(t.TempDir(), "deep", "c")
	for _, left := range []string{to + makingSuffix, to + makingSuffix + ".tmp"} {
		must(t, os.MkdirAll(left, 0o755))
		must(t, os.WriteFile(filepath.Join(left, "000001.sst"), []byte("cut"), 0o644))
	}
	must(t, s.Checkpoint(to))
	if err := s.Checkpoint(to); !errors.Is(err, base.ErrConflict) {
		t.Errorf("second checkpoint into one directory: %v", err)
	}
	must(t, d.Verify(to))
	c := openTest(t, d, to)
	put(t, s, engine.MetaFamily, "a", "2")
	if got := get(t, c, engine.MetaFamily, "a"); got != "1" {
		t.Errorf("checkpoint has %q", got)
	}
	entries, err := os.ReadDir(filepath.Dir(to))
	must(t, err)
	if len(entries) != 1 {
		t.Errorf("left beside the checkpoint: %v", entries)
	}
}

// The LOG of a store is there to be read, at once, and is small: what was opened
// before is beside it, and no more.
func TestLogIsOfThisOpeningAndTheOneBefore(t *testing.T) {
	d := newTestDriver(t, Options{})
	dir := filepath.Join(t.TempDir(), "s")
	for opening := range 4 {
		s, err := d.Open(dir)
		must(t, err)
		must(t, s.EnsureFamily(engine.FamilyID(10+opening), engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}))
		names, err := filepath.Glob(filepath.Join(dir, "LOG*"))
		must(t, err)
		want := []string{filepath.Join(dir, "LOG"), filepath.Join(dir, "LOG.old.1")}
		if opening == 0 {
			want = want[:1]
		}
		if !slices.Equal(names, want) {
			t.Fatalf("opening %d: %v", opening, names)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			must(t, err)
			if n := strings.Count(string(text), "RocksDB version"); n != 1 {
				t.Fatalf("opening %d: %s has the head of %d openings", opening, name, n)
			}
			if !strings.HasSuffix(string(text), "\n") || len(text) > 1<<20 {
				t.Fatalf("opening %d: %s has %d bytes", opening, name, len(text))
			}
		}
		must(t, s.Close())
	}
}
