package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

func TestFetchBringsEverything(t *testing.T) {
	c := sampleContent()
	for _, parallel := range []int{0, 1, 8} {
		dir := filepath.Join(t.TempDir(), "new")
		src := &source{files: c}
		var fetched, here atomic.Int64
		count := func(n int64, asked bool) {
			if asked {
				fetched.Add(n)
			} else {
				here.Add(n)
			}
		}
		err := snapshot.Fetch(testCtx(t), src, c.manifest(), dir, snapshot.FetchOptions{Parallel: parallel, Progress: count})
		if err != nil {
			t.Fatal(err)
		}
		c.checkDir(t, dir)
		if err := snapshot.Verify(testCtx(t), dir, c.manifest()); err != nil {
			t.Fatal(err)
		}
		if all := c.manifest().Bytes(); fetched.Load() != all || here.Load() != 0 {
			t.Errorf("it was told of %d fetched bytes and %d others, of %d", fetched.Load(), here.Load(), all)
		}
		src.asked()
		// Repeated, it asks for nothing.
		if err := snapshot.Fetch(testCtx(t), src, c.manifest(), dir, snapshot.FetchOptions{Progress: count}); err != nil {
			t.Fatal(err)
		}
		if all := c.manifest().Bytes(); fetched.Load() != all || here.Load() != all {
			t.Errorf("the second time it was told of %d fetched bytes and %d others, of %d", fetched.Load()-all, here.Load(), all)
		}
		if asks := src.asked(); len(asks) != 0 {
			t.Errorf("a finished fetch asked again for %v", asks)
		}
	}
}

// B21, SN2: whatever the source does, no file has its name before it is right;
// the next fetch asks from where the body ended and gets it whole.
func TestFetchSurvivesFaultySources(t *testing.T) {
	const victim = "000007.sst"
	c := sampleContent()
	size := int64(len(c[victim]))
	reset := errors.New("connection reset")
	wrong := func(b []byte) []byte { w := bytes.Clone(b); w[len(w)-1] ^= 1; return w }
	cases := []struct {
		name   string
		body   func(rest []byte) (io.ReadCloser, error)
		want   error
		resume int64 // the offset that the next fetch asks for
	}{
		{"error on open", func([]byte) (io.ReadCloser, error) { return nil, reset }, reset, 0},
		{"reset at 10 %", func(b []byte) (io.ReadCloser, error) { return failingBody(b[:size/10], reset), nil }, reset, size / 10},
		{"reset at 50 %", func(b []byte) (io.ReadCloser, error) { return failingBody(b[:size/2], reset), nil }, reset, size / 2},
		{"reset at 90 %", func(b []byte) (io.ReadCloser, error) { return failingBody(b[:size*9/10], reset), nil }, reset, size * 9 / 10},
		{"ends at 10 %", func(b []byte) (io.ReadCloser, error) { return failingBody(b[:size/10], io.EOF), nil }, io.ErrUnexpectedEOF, size / 10},
		{"ends at 50 %", func(b []byte) (io.ReadCloser, error) { return failingBody(b[:size/2], io.EOF), nil }, io.ErrUnexpectedEOF, size / 2},
		{"ends a byte early", func(b []byte) (io.ReadCloser, error) { return failingBody(b[:size-1], io.EOF), nil }, io.ErrUnexpectedEOF, size - 1},
		{"empty body", func(b []byte) (io.ReadCloser, error) { return failingBody(nil, io.EOF), nil }, io.ErrUnexpectedEOF, 0},
		{"a byte too much", func(b []byte) (io.ReadCloser, error) { return failingBody(append(bytes.Clone(b), 0), io.EOF), nil }, base.ErrCorrupt, -1},
		{"reset behind the last byte", func(b []byte) (io.ReadCloser, error) { return failingBody(b, reset), nil }, reset, -1},
		{"wrong bytes", func(b []byte) (io.ReadCloser, error) { return failingBody(wrong(b), io.EOF), nil }, base.ErrCorrupt, 0},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			bad := &source{files: c, fault: func(_ context.Context, name string, rest []byte) (io.ReadCloser, error) {
				if name == victim {
					return tc.body(rest)
				}
				return nil, nil
			}}
			o := snapshot.FetchOptions{Parallel: 1}
			err := snapshot.Fetch(testCtx(t), bad, c.manifest(), dir, o)
			if !errors.Is(err, tc.want) || !bytes.Contains([]byte(err.Error()), []byte(victim)) {
				t.Fatalf("the fault came back as %v, want %v of %s", err, tc.want, victim)
			}
			c.checkNamed(t, dir)
			good := &source{files: c}
			if err := snapshot.Fetch(testCtx(t), good, c.manifest(), dir, o); err != nil {
				t.Fatalf("the next fetch: %v", err)
			}
			c.checkDir(t, dir)
			asks := slices.DeleteFunc(good.asked(), func(a opened) bool { return a.name != victim })
			want := []opened{{victim, tc.resume}}
			if tc.resume < 0 { // the part was whole already
				want = nil
			}
			if !slices.Equal(asks, want) {
				t.Errorf("the next fetch asked for %v, want %v", asks, want)
			}
		})
	}
}

// SN2: a part that a crash left with other bytes, or longer than the file, is
// not believed; one fetch may fail for it, the next succeeds.
func TestFetchRecoversFromDamagedParts(t *testing.T) {
	const victim = "000007.sst"
	c := sampleContent()
	size := len(c[victim])
	for name, part := range map[string][]byte{
		"zeros at the end":    append(bytes.Clone(c[victim][:size/2]), make([]byte, 100)...),
		"zeros, full length":  make([]byte, size),
		"longer than allowed": make([]byte, size+1),
		"other bytes":         []byte("something else"),
	} {
		dir := t.TempDir()
		writeFile(t, filepath.Join(dir, victim+".part"), part)
		src := &source{files: c}
		if err := snapshot.Fetch(testCtx(t), src, c.manifest(), dir, snapshot.FetchOptions{}); err != nil {
			if !errors.Is(err, base.ErrCorrupt) {
				t.Errorf("%s: %v", name, err)
			}
			c.checkNamed(t, dir)
			if err := snapshot.Fetch(testCtx(t), src, c.manifest(), dir, snapshot.FetchOptions{}); err != nil {
				t.Errorf("%s: the second fetch: %v", name, err)
			}
		}
		c.checkDir(t, dir)
	}
}

// A file under its name that is not right, as only a fault outside makes it, is
// fetched again; strangers go.
func TestFetchReplacesWrongFilesAndRemovesStrangers(t *testing.T) {
	c := sampleContent()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "000009.sst"), []byte("Small"))
	writeFile(t, filepath.Join(dir, "CURRENT"), []byte("short"))
	writeFile(t, filepath.Join(dir, "stranger"), []byte("x"))
	writeFile(t, filepath.Join(dir, "999.sst.part"), []byte("of another manifest"))
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := snapshot.Fetch(testCtx(t), &source{files: c}, c.manifest(), dir, snapshot.FetchOptions{}); err != nil {
		t.Fatal(err)
	}
	c.checkDir(t, dir)
}

// Files that a node has already are linked, not fetched, if they are the same;
// those that an engine writes to are never shared (SN4).
func TestFetchReusesOnlyRightImmutableFiles(t *testing.T) {
	c := sampleContent()
	have := content{
		"000007.sst":      c["000007.sst"],               // the same
		"000009.sst":      []byte("Small"),               // same size, other bytes: a reused file number
		"000010.blob":     append(c["000010.blob"], 1),   // another size
		"CURRENT":         c["CURRENT"],                  // the same, but it changes
		"MANIFEST-000005": c["MANIFEST-000005"],          // the same, but it changes
		"000099.sst":      []byte("nobody asked for it"), // a stranger
	}.write(t)
	src, dir := &source{files: c}, t.TempDir()
	o := snapshot.FetchOptions{ReuseDirs: []string{filepath.Join(have, "none"), have}}
	if err := snapshot.Fetch(testCtx(t), src, c.manifest(), dir, o); err != nil {
		t.Fatal(err)
	}
	c.checkDir(t, dir)
	want := []opened{{"000009.sst", 0}, {"000010.blob", 0}, {"CURRENT", 0}, {"MANIFEST-000005", 0}}
	if asks := src.asked(); !slices.Equal(asks, want) {
		t.Errorf("asked for %v, want %v", asks, want)
	}
	for n, same := range map[string]bool{"000007.sst": true, "CURRENT": false, "MANIFEST-000005": false} {
		a, err := os.Stat(filepath.Join(have, n))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.Stat(filepath.Join(dir, n))
		if err != nil {
			t.Fatal(err)
		}
		if os.SameFile(a, b) != same {
			t.Errorf("%s is shared: %v", n, !same)
		}
	}
}

// A file that was read lately is linked unread; one that was written to since, or that
// was read too long ago, is read, and fetched if it is wrong.
func TestFetchBelievesWhatWasReadLately(t *testing.T) {
	for _, c := range []struct {
		name   string
		within time.Duration
		touch  bool
		linked bool
	}{
		{"lately", time.Hour, false, true},
		{"long ago", 0, false, false},
		{"written to since", time.Hour, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			content := sampleContent()
			have := content.write(t)
			hashes := snapshot.NewHashCache()
			if _, err := snapshot.HashFiles(testCtx(t), have, hashes); err != nil {
				t.Fatal(err)
			}
			rotten := filepath.Join(have, "000007.sst")
			st, err := os.Stat(rotten)
			if err != nil {
				t.Fatal(err)
			}
			raw := bytes.Clone(content["000007.sst"])
			raw[100] ^= 4
			if err := os.WriteFile(rotten, raw, 0o640); err != nil {
				t.Fatal(err)
			}
			at := st.ModTime() // rot of the disk leaves it as it was
			if c.touch {
				at = at.Add(time.Second)
			}
			if err := os.Chtimes(rotten, at, at); err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			o := snapshot.FetchOptions{ReuseDirs: []string{have}, Read: hashes, ReadWithin: c.within}
			if err := snapshot.Fetch(testCtx(t), &source{files: content}, content.manifest(), dir, o); err != nil {
				t.Fatal(err)
			}
			got, err := os.Stat(filepath.Join(dir, "000007.sst"))
			if err != nil {
				t.Fatal(err)
			}
			if os.SameFile(st, got) != c.linked {
				t.Errorf("linked: %t, want %t", !c.linked, c.linked)
			}
		})
	}
}

// Who hashes the files after a fetch need not read again what never changes; what
// may change is read.
func TestFetchTellsAHashCacheOfImmutableFiles(t *testing.T) {
	c := sampleContent()
	ctx, dir, cache := testCtx(t), t.TempDir(), snapshot.NewHashCache()
	m := c.manifest()
	if err := snapshot.Fetch(ctx, &source{files: c}, m, dir, snapshot.FetchOptions{Hashes: cache}); err != nil {
		t.Fatal(err)
	}
	// Other bytes in place, with the old time of change: whoever reads them sees
	// them, and who knows the file by its identity does not.
	for name, body := range c {
		path := filepath.Join(dir, name)
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, bytes.Repeat([]byte{0xa5}, len(body)))
		if err := os.Chtimes(path, st.ModTime(), st.ModTime()); err != nil {
			t.Fatal(err)
		}
	}
	got, err := snapshot.HashFiles(ctx, dir, cache)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range got {
		known := f.SHA256 == sha256.Sum256(c[f.Name])
		if f.Size > 0 && known != snapshot.Immutable(f.Name) {
			t.Errorf("%s is taken from the cache: %v", f.Name, known)
		}
	}
}

// A peer that hangs in the middle of a body does not hold a fetch whose context
// ends; what has come is kept.
func TestFetchOfAStalledBodyEndsWithItsContext(t *testing.T) {
	const victim = "000007.sst"
	c := sampleContent()
	body := newStalledBody(c[victim][:1000])
	src := &source{files: c, fault: func(_ context.Context, name string, _ []byte) (io.ReadCloser, error) {
		if name == victim {
			return body, nil
		}
		return nil, nil
	}}
	ctx, cancel := context.WithCancel(testCtx(t))
	go func() {
		<-body.stalled
		cancel()
	}()
	dir := t.TempDir()
	if err := snapshot.Fetch(ctx, src, c.manifest(), dir, snapshot.FetchOptions{Parallel: 1}); !errors.Is(err, context.Canceled) {
		t.Fatalf("fetch of a stalled body: %v", err)
	}
	c.checkNamed(t, dir)
	good := &source{files: c}
	if err := snapshot.Fetch(testCtx(t), good, c.manifest(), dir, snapshot.FetchOptions{}); err != nil {
		t.Fatal(err)
	}
	if asks := good.asked(); !slices.Contains(asks, opened{victim, 1000}) {
		t.Errorf("asked for %v, want %s from 1000", asks, victim)
	}
	c.checkDir(t, dir)
}

func TestFetchOfACancelledContextFetchesNothing(t *testing.T) {
	c := sampleContent()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	src := &source{files: c, fault: func(ctx context.Context, _ string, _ []byte) (io.ReadCloser, error) { return nil, ctx.Err() }}
	if err := snapshot.Fetch(ctx, src, c.manifest(), t.TempDir(), snapshot.FetchOptions{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("a cancelled fetch: %v", err)
	}
}

// One file that fails stops the others soon, and the error names it.
func TestFetchNamesTheFileThatFails(t *testing.T) {
	c := sampleContent()
	delete(c, "CURRENT")
	m := sampleContent().manifest()
	err := snapshot.Fetch(testCtx(t), &source{files: c}, m, t.TempDir(), snapshot.FetchOptions{})
	if !errors.Is(err, base.ErrNotFound) || !bytes.Contains([]byte(err.Error()), []byte("CURRENT")) {
		t.Fatalf("a file that the source does not have: %v", err)
	}
}

// SN1: a manifest that was not decoded but made up does not lead out either.
func TestFetchRefusesNamesThatEscape(t *testing.T) {
	for _, name := range badNames {
		outer := t.TempDir()
		m := content{"ok.sst": []byte("x")}.manifest()
		m.Files[0].Name = name
		src := &source{files: content{name: []byte("x")}}
		if err := snapshot.Fetch(testCtx(t), src, m, filepath.Join(outer, "in"), snapshot.FetchOptions{}); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("name %q: %v", name, err)
		}
		if got := listDir(t, outer); !slices.Equal(got, []string{"in"}) {
			t.Errorf("name %q left %v outside", name, got)
		}
	}
}

// The longest name that a manifest may have can be fetched.
func TestFetchOfTheLongestName(t *testing.T) {
	c := content{string(bytes.Repeat([]byte("n"), snapshot.MaxNameBytes)): []byte("x")}
	dir := t.TempDir()
	if err := snapshot.Fetch(testCtx(t), &source{files: c}, c.manifest(), dir, snapshot.FetchOptions{}); err != nil {
		t.Fatal(err)
	}
	c.checkDir(t, dir)
}

// However often and wherever it is interrupted, a fetch that goes on ends with
// the right files, never gives a wrong one its name, and never asks again for
// bytes that it has.
func TestFetchInterruptedAnywhereProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := content{}
		for i := range rapid.IntRange(1, 4).Draw(rt, "files") {
			ext := rapid.SampledFrom([]string{".sst", ""}).Draw(rt, "ext")
			c[fmt.Sprintf("f%d%s", i, ext)] = rapid.SliceOfN(rapid.Byte(), 0, 50).Draw(rt, "bytes")
		}
		dir, err := os.MkdirTemp(t.TempDir(), "fetch")
		if err != nil {
			rt.Fatal(err)
		}
		cut := errors.New("cut")
		var served atomic.Int64
		budget := int64(0) // bytes until the next cut
		src := &source{files: c, fault: func(_ context.Context, _ string, rest []byte) (io.ReadCloser, error) {
			n := min(int64(len(rest)), budget)
			budget -= n
			served.Add(n)
			if n < int64(len(rest)) {
				return failingBody(rest[:n], cut), nil
			}
			return nil, nil
		}}
		for {
			budget = int64(rapid.IntRange(1, 60).Draw(rt, "budget"))
			err := snapshot.Fetch(context.Background(), src, c.manifest(), dir, snapshot.FetchOptions{Parallel: 1})
			c.checkNamed(t, dir)
			if err == nil {
				break
			}
			if !errors.Is(err, cut) {
				rt.Fatalf("fetch: %v", err)
			}
		}
		c.checkDir(t, dir)
		if total := c.manifest().Bytes(); served.Load() != total {
			rt.Fatalf("%d bytes were sent for %d", served.Load(), total)
		}
	})
}
