package rocks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// partFamilies are those of the stores that are put together here.
var partFamilies = map[engine.FamilyID]engine.FamilyOptions{
	1: {Use: engine.UsePoint, GroupWidth: 1},
	2: {Use: engine.UseScanned, GroupWidth: 1},
	3: {Use: engine.UsePoint, Merge: engine.MergeMax, GroupWidth: 1},
}

var partIDs = slices.Sorted(maps.Keys(partFamilies))

// makePart makes a store with keys of the groups [0, 8), each written several
// times, in several files.
func makePart(t testing.TB, d *Driver, dir string, seed uint64) *Store {
	t.Helper()
	es, err := d.Open(dir)
	must(t, err)
	s := es.(*Store)
	for f, o := range partFamilies {
		must(t, s.EnsureFamily(f, o))
	}
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 8 {
		var b engine.Batch
		for range 600 {
			key := fmt.Appendf([]byte{byte(rnd.IntN(8))}, "key%04d", rnd.IntN(1000))
			val := fmt.Appendf(engine.AppendHeader(nil, engine.Header{}), "%020d%0100d", seed, rnd.Uint64())
			b.Put(1, key, val)
			b.Put(2, key, val)
			b.Merge(3, key, val)
		}
		b.DeleteRange(2, []byte{byte(rnd.IntN(8)), 'k'}, []byte{byte(rnd.IntN(8)), 'l'})
		must(t, s.Write(&b))
		must(t, s.Flush())
	}
	return s
}

// entries are those of a family in [lo, hi).
func entries(t testing.TB, s engine.Reader, f engine.FamilyID, lo, hi []byte) map[string]string {
	t.Helper()
	out := map[string]string{}
	it := s.Scan(f, lo, hi, engine.ScanOptions{})
	defer it.Close()
	for it.Next() {
		out[string(it.Key())] = string(it.Value())
	}
	must(t, it.Err())
	return out
}

// inTime fails if do does not end.
func inTime(t testing.TB, what string, do func() error) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- do() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(30 * time.Second):
		t.Fatalf("%s does not end", what)
		return nil
	}
}

// tables are the SST files that a store needs.
func tables(t testing.TB, s *Store) []string {
	t.Helper()
	names, _, err := s.liveFiles()
	must(t, err)
	return slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".sst") })
}

// RO10: after a clip no file has anything outside of the range, nor is on level 0;
// a file that lies inside is the one that was there.
func TestClipLeavesFilesInsideTheRangeAlone(t *testing.T) {
	d := newTestDriver(t, Options{})
	dir := filepath.Join(t.TempDir(), "s")
	es, err := d.Open(dir)
	must(t, err)
	s := es.(*Store)
	must(t, s.EnsureFamily(1, partFamilies[1]))
	for g := range 8 { // a file for each group, all on the last level
		var b engine.Batch
		for k := range 1000 {
			b.Put(1, fmt.Appendf([]byte{byte(g)}, "key%04d", k), fmt.Appendf(nil, "%0200d", k*g))
		}
		must(t, s.Write(&b))
		must(t, s.Flush())
	}
	must(t, s.Compact())
	if n := s.Stats().Level0Files; n != 0 {
		t.Fatalf("%d files of level 0", n)
	}
	want := entries(t, s, 1, []byte{3}, []byte{5})
	v, err := s.NewView()
	must(t, err)
	if err := s.Clip(context.Background(), []engine.FamilyID{1}, []byte{3}, []byte{5}); !errors.Is(err, base.ErrConflict) {
		t.Fatalf("beside a view: %v", err)
	}
	v.Close()
	must(t, s.Clip(context.Background(), []engine.FamilyID{1}, []byte{3}, []byte{5}))
	if got := entries(t, s, 1, nil, nil); !maps.Equal(got, want) {
		t.Fatalf("%d entries, want %d", len(got), len(want))
	}
	before := tables(t, s)
	must(t, s.Clip(context.Background(), []engine.FamilyID{1}, []byte{3}, []byte{5}))
	if after := tables(t, s); !slices.Equal(before, after) {
		t.Errorf("a clip of what is clipped made %q of %q", after, before)
	}
	must(t, s.Clip(context.Background(), []engine.FamilyID{1}, []byte{5}, nil))
	if after := tables(t, s); len(after) != 0 {
		t.Errorf("nothing is left, in %q", after)
	}
	must(t, s.Close())
	must(t, d.Verify(dir))
}

// RO10: files are linked, not copied, and those that the links were made of stay.
func TestAbsorbLinksFiles(t *testing.T) {
	d := newTestDriver(t, Options{})
	root := t.TempDir()
	a, b := makePart(t, d, filepath.Join(root, "a"), 1), makePart(t, d, filepath.Join(root, "b"), 2)
	ctx := context.Background()
	must(t, a.Clip(ctx, partIDs, nil, []byte{4}))
	must(t, b.Clip(ctx, partIDs, []byte{4}, nil))
	var sources []os.FileInfo
	for _, s := range []*Store{a, b} {
		for _, name := range tables(t, s) {
			info, err := os.Stat(filepath.Join(s.dir, name))
			must(t, err)
			sources = append(sources, info)
		}
	}
	must(t, a.Absorb(ctx, partIDs, []engine.Store{b}))
	linked := 0
	for _, name := range tables(t, a) {
		info, err := os.Stat(filepath.Join(a.dir, name))
		must(t, err)
		if slices.ContainsFunc(sources, func(s os.FileInfo) bool { return os.SameFile(s, info) }) {
			linked++
		}
	}
	if linked != len(tables(t, a)) || linked < len(partIDs)+1 {
		t.Errorf("%d of %d files are linked, %d were there", linked, len(tables(t, a)), len(sources))
	}
	if _, err := os.Stat(filepath.Join(a.dir, absorbingDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("links are left: %v", err)
	}
	for _, s := range []*Store{a, b} {
		must(t, s.VerifyFiles(func(int64) error { return nil }))
		must(t, s.Close())
		must(t, d.Verify(s.dir))
	}
}

// RO10: what RocksDB would believe, or fail at with the family half made, is refused
// before anything has changed, in bounded time.
func TestAbsorbOfBadFiles(t *testing.T) {
	d := newTestDriver(t, Options{})
	middle := func(b []byte) []byte { b[len(b)/3] ^= 0x10; return b }
	for name, c := range map[string]struct {
		spoil func(path string) error
		want  error
	}{
		"a flipped bit in a block": {rewrite(middle), base.ErrCorrupt},
		"cut off":                  {rewrite(func(b []byte) []byte { return b[:len(b)/2] }), base.ErrCorrupt},
		"nothing of it":            {rewrite(func(b []byte) []byte { return nil }), base.ErrCorrupt},
		"a footer of something else": {rewrite(func(b []byte) []byte {
			copy(b[len(b)-20:], strings.Repeat("x", 20))
			return b
		}), base.ErrCorrupt},
		"missing": {os.Remove, base.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			a, b := makePart(t, d, filepath.Join(root, "a"), 1), makePart(t, d, filepath.Join(root, "b"), 2)
			ctx := context.Background()
			must(t, a.Clip(ctx, partIDs, nil, []byte{4}))
			must(t, b.Clip(ctx, partIDs, []byte{4}, nil))
			want := entries(t, a, 1, nil, nil)
			for _, name := range tables(t, b) {
				must(t, c.spoil(filepath.Join(b.dir, name)))
			}
			err := inTime(t, "absorbing", func() error { return a.Absorb(ctx, partIDs, []engine.Store{b}) })
			if !errors.Is(err, c.want) {
				t.Errorf("%v", err)
			}
			if got := entries(t, a, 1, nil, nil); !maps.Equal(got, want) {
				t.Errorf("%d entries, %d were there", len(got), len(want))
			}
			if _, err := os.Stat(filepath.Join(a.dir, absorbingDir)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("links are left: %v", err)
			}
			var more engine.Batch
			more.Put(1, []byte{0, 'n'}, []byte("new"))
			must(t, inTime(t, "writing", func() error { return a.Write(&more) }))
			must(t, inTime(t, "flushing", a.Flush))
			must(t, inTime(t, "closing", a.Close))
			must(t, d.Verify(a.dir))
			_ = inTime(t, "closing the source", b.Close)
		})
	}
}

func rewrite(change func([]byte) []byte) func(string) error {
	return func(path string) error {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, change(b), 0o644)
	}
}

// RO10: a store that was written since it was clipped has files of level 0, with
// which an import would bring back what was deleted.
func TestAbsorbRefusesLevel0(t *testing.T) {
	d := newTestDriver(t, Options{})
	root := t.TempDir()
	a, b := makePart(t, d, filepath.Join(root, "a"), 1), makePart(t, d, filepath.Join(root, "b"), 2)
	ctx := context.Background()
	must(t, a.Clip(ctx, partIDs, nil, []byte{4}))
	must(t, b.Clip(ctx, partIDs, []byte{4}, nil))
	var more engine.Batch
	more.DeleteRange(1, []byte{4}, []byte{6})
	must(t, b.Write(&more))
	if err := a.Absorb(ctx, partIDs, []engine.Store{b}); !errors.Is(err, base.ErrConflict) || !strings.Contains(fmt.Sprint(err), "level 0") {
		t.Errorf("%v", err)
	}
	must(t, b.Clip(ctx, partIDs, []byte{4}, nil))
	must(t, a.Absorb(ctx, partIDs, []engine.Store{b}))
	if got := entries(t, a, 1, []byte{4}, []byte{6}); len(got) != 0 {
		t.Errorf("%d deleted entries are back", len(got))
	}
	must(t, a.Close())
	must(t, b.Close())
}

const crashAbsorb = "absorb"

// absorbChild puts copies of two stores together, over and over, until it is
// killed, and tells each step.
func absorbChild(dir string) error {
	d, err := crashDriver(crashAbsorb)
	if err != nil {
		return err
	}
	for n := 0; ; n++ {
		if _, err := assembleParts(d, dir, os.Stdout); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "d", n)
	}
}

// assembleParts makes dir/target of copies of dir/a and dir/b, whatever an earlier
// attempt has left, tells its steps, and returns what it holds.
func assembleParts(d *Driver, dir string, tell io.Writer) (held map[engine.FamilyID]map[string]string, err error) {
	var copies []*Store
	defer func() {
		for _, c := range copies {
			err = errors.Join(err, c.Close())
		}
	}()
	for from, to := range map[string]string{"a": "target", "b": "source"} {
		if err := os.RemoveAll(filepath.Join(dir, to)); err != nil {
			return nil, err
		}
		s, err := d.Open(filepath.Join(dir, from))
		if err != nil {
			return nil, err
		}
		if err := errors.Join(s.Checkpoint(filepath.Join(dir, to)), s.Close()); err != nil {
			return nil, err
		}
	}
	ctx := context.Background()
	for i, name := range []string{"target", "source"} {
		s, err := d.Open(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		c := s.(*Store)
		copies = append(copies, c)
		lo, hi := [][]byte{nil, {4}}[i], [][]byte{{4}, nil}[i]
		fmt.Fprintln(tell, "w", 2*i)
		if err := c.Clip(ctx, partIDs, lo, hi); err != nil {
			return nil, err
		}
		fmt.Fprintln(tell, "w", 2*i+1)
	}
	if err := copies[0].Absorb(ctx, partIDs, []engine.Store{copies[1]}); err != nil {
		return nil, err
	}
	held = map[engine.FamilyID]map[string]string{}
	for _, f := range partIDs {
		held[f] = map[string]string{}
		it := copies[0].Scan(f, nil, nil, engine.ScanOptions{})
		for it.Next() {
			held[f][string(it.Key())] = string(it.Value())
		}
		err = errors.Join(err, it.Err())
		it.Close()
	}
	return held, errors.Join(err, copies[0].Flush())
}

// Whenever it is killed, what the copies were made of is whole, and to begin again
// from it gives the same (W7).
func TestCrashAbsorb(t *testing.T) {
	dir := t.TempDir()
	d, err := crashDriver(crashAbsorb)
	must(t, err)
	defer func() { must(t, d.Close()) }()
	want := map[engine.FamilyID]map[string]string{}
	for i, name := range []string{"a", "b"} {
		s := makePart(t, d, filepath.Join(dir, name), uint64(i+1))
		for _, f := range partIDs {
			if want[f] == nil {
				want[f] = map[string]string{}
			}
			maps.Copy(want[f], entries(t, s, f, [][]byte{nil, {4}}[i], [][]byte{{4}, nil}[i]))
		}
		must(t, s.Close())
	}
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	for round := range 6 {
		killAfter(t, dir, crashAbsorb, 1+rnd.IntN(12), false)
		for _, name := range []string{"a", "b"} {
			must(t, d.Verify(filepath.Join(dir, name)))
		}
		if round%3 != 2 {
			continue
		}
		got, err := assembleParts(d, dir, io.Discard)
		must(t, err)
		for f := range want {
			if !maps.Equal(got[f], want[f]) {
				t.Fatalf("family %d has %d entries, want %d", f, len(got[f]), len(want[f]))
			}
		}
		must(t, d.Verify(filepath.Join(dir, "target")))
	}
}
