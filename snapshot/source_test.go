package snapshot_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/snapshot"
)

// stored is content in a store, with its manifest.
func stored(t testing.TB, s objectstore.Store, c content) *snapshot.Manifest {
	t.Helper()
	m := c.whole()
	mustUpload(t, c.write(t), m, uploadOptions(s, 1, nil))
	return m
}

// Every file can be read from every offset on, from an object of its own and from
// a pack; nothing else is given.
func TestStoreSourceGivesTheRestOfAFile(t *testing.T) {
	s, c := openStore(t), sampleContent()
	m := stored(t, s, c)
	src := snapshot.StoreSource(s, m)
	for _, name := range c.names() {
		want := c[name]
		for _, at := range []int64{0, 1, int64(len(want)) / 2, int64(len(want)) - 1, int64(len(want))} {
			if at < 0 || at > int64(len(want)) {
				continue
			}
			r, err := src.Open(testCtx(t), name, at)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			if err = errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, want[at:]) {
				t.Errorf("%s from %d: %d bytes, %v", name, at, len(got), err)
			}
		}
		for _, at := range []int64{-1, int64(len(want)) + 1} {
			if _, err := src.Open(testCtx(t), name, at); !errors.Is(err, base.ErrInvalid) {
				t.Errorf("%s from %d: %v", name, at, err)
			}
		}
	}
	if _, err := src.Open(testCtx(t), "stranger", 0); !errors.Is(err, base.ErrNotFound) {
		t.Error(err)
	}
}

// A pack is read once for all its files, however many want it at once, and of many
// packs few are kept; the files come back all the same.
func TestStoreSourceReadsAPackOnce(t *testing.T) {
	inner, c := openStore(t), many(600, 300)
	c["large.sst"] = bytes.Repeat([]byte("large"), 10*kib)
	m := c.whole()
	u := mustUpload(t, c.write(t), m, uploadOptions(inner, 1, nil))
	if len(u.New) < 8 {
		t.Fatalf("%d objects are too few for this test", len(u.New))
	}
	for _, parallel := range []int{1, 8} {
		hook := &calls{}
		dir := filepath.Join(t.TempDir(), "restored")
		src := snapshot.StoreSource(fault.Wrap(inner, hook.hook), m)
		if err := snapshot.Fetch(testCtx(t), src, m, dir, snapshot.FetchOptions{Parallel: parallel}); err != nil {
			t.Fatal(err)
		}
		c.checkDir(t, dir)
		// Of eight, one may be so late that its pack was forgotten meanwhile.
		if objects := len(u.New) - 1; hook.n < objects || hook.n > objects*parallel || parallel == 1 && hook.n != objects {
			t.Errorf("%d requests for %d objects: %v", hook.n, objects, hook.seen)
		}
	}
}

// What was wrong in memory is not given twice: a fetch that fails by a bit that
// flipped on the way goes well the second time, with the same source.
func TestStoreSourceDoesNotGiveWrongBytesTwice(t *testing.T) {
	for _, kind := range []fault.BodyKind{fault.BodyFlip, fault.BodyCut, fault.BodyBroken} {
		inner, c := openStore(t), many(20, 300)
		m := stored(t, inner, c)
		hook := &calls{at: 1, fault: func() fault.Fault { return fault.Fault{Body: fault.Body{Kind: kind, At: 1000}} }}
		src := snapshot.StoreSource(fault.Wrap(inner, hook.hook), m)
		dir := filepath.Join(t.TempDir(), "restored")
		if err := snapshot.Fetch(testCtx(t), src, m, dir, snapshot.FetchOptions{}); err == nil {
			t.Fatalf("%s was not seen", kind)
		}
		if err := snapshot.Fetch(testCtx(t), src, m, dir, snapshot.FetchOptions{}); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		c.checkDir(t, dir)
	}
}

// A file without a place, or with one that cannot be, is damage of the manifest,
// and named.
func TestStoreSourceRefusesFilesWithoutAPlace(t *testing.T) {
	s, c := openStore(t), sampleContent()
	for i, spoil := range []func(f *snapshot.File){
		func(f *snapshot.File) { f.Object = "" },
		func(f *snapshot.File) { f.Object, f.Offset, f.Length = "", 0, 0 },
		func(f *snapshot.File) { f.Length-- },
		func(f *snapshot.File) { f.Offset = -1 },
		func(f *snapshot.File) { f.Offset = 1<<63 - 1 },
		func(f *snapshot.File) { f.Object = "../../etc/passwd" },
	} {
		m := stored(t, s, c)
		s = openStore(t)
		spoil(&m.Files[0])
		err := m.CheckPlaces()
		if !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), m.Files[0].Name) {
			t.Errorf("case %d: %v", i, err)
		}
		if _, err := snapshot.StoreSource(s, m).Open(testCtx(t), m.Files[0].Name, 0); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("case %d: %v", i, err)
		}
		if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, m), m, filepath.Join(t.TempDir(), "x"), snapshot.FetchOptions{}); err == nil {
			t.Errorf("case %d: it was fetched", i)
		}
	}
	m := stored(t, openStore(t), c)
	for i := range m.Files { // an empty file has no object
		if m.Files[i].Size == 0 {
			m.Files[i].Object = "x"
		}
	}
	if err := m.CheckPlaces(); !errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
}

// B52: a body that is cut, breaks, lies or stalls never becomes a file; when the
// store is well again, the fetch goes on to the end.
func TestFetchFromAStoreThatFails(t *testing.T) {
	c := sampleContent()
	inner := openStore(t)
	m := stored(t, inner, c)
	for _, kind := range []fault.BodyKind{fault.BodyCut, fault.BodyBroken, fault.BodyFlip, fault.BodyStall} {
		for _, at := range []int64{0, 1, 3, 60_000} {
			t.Run(string(kind), func(t *testing.T) {
				sick := true
				s := fault.Wrap(inner, func(op fault.Op, _ string) fault.Fault {
					if sick && op == fault.OpGet {
						return fault.Fault{Body: fault.Body{Kind: kind, At: at}}
					}
					return fault.Fault{}
				})
				ctx, cancel := context.WithCancel(testCtx(t))
				defer cancel()
				o := snapshot.FetchOptions{Parallel: 1}
				if kind == fault.BodyStall {
					var there int64 // of one file at a time
					o.Progress = func(n int64, _ bool) {
						if there += n; there >= at {
							cancel()
						}
					}
					if at == 0 {
						cancel()
					}
				}
				dir := filepath.Join(t.TempDir(), "restored")
				if err := snapshot.Fetch(ctx, snapshot.StoreSource(s, m), m, dir, o); err == nil {
					t.Fatal("the fetch did not notice")
				}
				c.checkNamed(t, dir)
				sick = false
				// A part with a lie in it is found wrong once, and removed.
				if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, m), m, dir, snapshot.FetchOptions{}); err != nil {
					if !errors.Is(err, base.ErrCorrupt) {
						t.Fatal(err)
					}
					if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, m), m, dir, snapshot.FetchOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				c.checkDir(t, dir)
			})
		}
	}
}

// Damaged, missing and short objects fail a restore, by name, and no wrong file
// gets its name.
func TestFetchNamesTheBadObject(t *testing.T) {
	c := sampleContent()
	s := openStore(t)
	m := stored(t, s, c)
	var keys []string
	for i := range m.Files {
		if m.Files[i].Object != "" {
			keys = append(keys, m.Files[i].Object)
		}
	}
	slices.Sort(keys)
	for _, key := range slices.Compact(keys) {
		for how, spoil := range map[string]func(){
			"missing": func() {
				if err := os.Remove(s.path(key)); err != nil {
					t.Fatal(err)
				}
			},
			"short":   func() { s.change(t, key, func(b []byte) []byte { return b[:len(b)-1] }) },
			"damaged": func() { s.change(t, key, func(b []byte) []byte { b[1] ^= 4; return b }) },
		} {
			putBack := s.keep(t, key)
			spoil()
			dir := filepath.Join(t.TempDir(), "restored")
			err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, m), m, dir, snapshot.FetchOptions{})
			switch {
			case err == nil:
				t.Errorf("%s %s: it was restored", how, key)
			case how == "missing" && !errors.Is(err, base.ErrNotFound), how != "missing" && !errors.Is(err, base.ErrCorrupt):
				t.Errorf("%s %s: %v", how, key, err)
			case how != "damaged" && !strings.Contains(err.Error(), key):
				t.Errorf("%s %s: not named: %v", how, key, err)
			}
			c.checkNamed(t, dir)
			putBack()
		}
	}
}
