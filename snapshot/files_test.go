package snapshot_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

func TestHashFilesListsWhatIsThere(t *testing.T) {
	c := sampleContent()
	for _, cache := range []*snapshot.HashCache{nil, snapshot.NewHashCache()} {
		dir := c.write(t)
		for range 2 {
			files, err := snapshot.HashFiles(testCtx(t), dir, cache)
			if err != nil {
				t.Fatal(err)
			}
			if want := c.manifest().Files; !reflect.DeepEqual(files, want) {
				t.Fatalf("got %+v, want %+v", files, want)
			}
		}
	}
	if files, err := snapshot.HashFiles(testCtx(t), t.TempDir(), nil); err != nil || len(files) != 0 {
		t.Fatalf("an empty directory: %v, %v", files, err)
	}
}

// Only files that never change are taken from the cache, by identity: an inode
// that got other content, size or time is read again.
func TestHashCacheKnowsOnlyImmutableFilesByIdentity(t *testing.T) {
	ctx, dir, cache := testCtx(t), t.TempDir(), snapshot.NewHashCache()
	sst, other := filepath.Join(dir, "1.sst"), filepath.Join(dir, "CURRENT")
	writeFile(t, sst, []byte("aaaa"))
	writeFile(t, other, []byte("aaaa"))
	sumOf := func(name string) [sha256.Size]byte {
		t.Helper()
		files, err := snapshot.HashFiles(ctx, dir, cache)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if f.Name == name {
				return f.SHA256
			}
		}
		t.Fatalf("no file %s in %+v", name, files)
		return [sha256.Size]byte{}
	}
	a, b := sha256.Sum256([]byte("aaaa")), sha256.Sum256([]byte("bbbb"))
	if sumOf("1.sst") != a || sumOf("CURRENT") != a {
		t.Fatal("wrong first hashes")
	}
	// Rewritten in place with the old time of change: the inode, size and time
	// are the same, so the immutable name is taken from the cache, which shows
	// that it is used; the other one is read.
	for _, p := range []string{sst, other} {
		st, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, p, []byte("bbbb"))
		if err := os.Chtimes(p, st.ModTime(), st.ModTime()); err != nil {
			t.Fatal(err)
		}
	}
	if sumOf("1.sst") != a {
		t.Fatal("the cache is not used")
	}
	if sumOf("CURRENT") != b {
		t.Fatal("a file that an engine writes to was taken from the cache")
	}
	// Another time of change, another inode, another size: read again.
	if err := os.Chtimes(sst, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if sumOf("1.sst") != b {
		t.Fatal("a file of another time was taken from the cache")
	}
	tmp := filepath.Join(t.TempDir(), "new")
	writeFile(t, tmp, []byte("aaaa"))
	if err := os.Chtimes(tmp, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, sst); err != nil {
		t.Fatal(err)
	}
	if sumOf("1.sst") != a {
		t.Fatal("a file of another inode was taken from the cache")
	}
	// A hard link under the same name in another directory is the same file.
	linked := t.TempDir()
	if err := os.Link(sst, filepath.Join(linked, "1.sst")); err != nil {
		t.Fatal(err)
	}
	files, err := snapshot.HashFiles(ctx, linked, cache)
	if err != nil || len(files) != 1 || files[0].SHA256 != a {
		t.Fatalf("hard link: %+v, %v", files, err)
	}
}

func TestHashFilesRefusesWhatIsNoFile(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"directory": func(dir string) error { return os.Mkdir(filepath.Join(dir, "zz"), 0o750) },
		"symlink":   func(dir string) error { return os.Symlink("/etc/hostname", filepath.Join(dir, "zz")) },
	} {
		dir := sampleContent().write(t)
		if err := spoil(dir); err != nil {
			t.Fatal(err)
		}
		_, err := snapshot.HashFiles(testCtx(t), dir, nil)
		if !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "zz") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := snapshot.HashFiles(testCtx(t), filepath.Join(t.TempDir(), "none"), nil); err == nil {
		t.Error("a missing directory was hashed")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := snapshot.HashFiles(ctx, sampleContent().write(t), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// SN3: whatever is wrong, Verify names the file and says what.
func TestVerifyNamesTheWrongFile(t *testing.T) {
	cases := []struct {
		name, file, says string
		spoil            func(t *testing.T, dir string)
	}{
		{"missing", "000009.sst", "missing", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, "000009.sst")); err != nil {
				t.Fatal(err)
			}
		}},
		{"extra", "000011.sst", "does not know", func(t *testing.T, dir string) { writeFile(t, filepath.Join(dir, "000011.sst"), nil) }},
		{"extra part", "CURRENT.part", "does not know", func(t *testing.T, dir string) { writeFile(t, filepath.Join(dir, "CURRENT.part"), nil) }},
		{"short", "000007.sst", "104999 bytes", func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, "000007.sst"), 104999); err != nil {
				t.Fatal(err)
			}
		}},
		{"long", "CURRENT", "17 bytes", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, "CURRENT"), []byte("MANIFEST-000005\n\n"))
		}},
		{"wrong", "CURRENT", "wrong content", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, "CURRENT"), []byte("MANIFEST-000006\n"))
		}},
		{"empty no more", "keelstate-engine", "1 bytes", func(t *testing.T, dir string) {
			writeFile(t, filepath.Join(dir, "keelstate-engine"), []byte{0})
		}},
	}
	c := sampleContent()
	if err := snapshot.Verify(testCtx(t), c.write(t), c.manifest()); err != nil {
		t.Fatalf("a right directory: %v", err)
	}
	for _, tc := range cases {
		dir := c.write(t)
		tc.spoil(t, dir)
		err := snapshot.Verify(testCtx(t), dir, c.manifest())
		if !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), tc.file+":") || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// Verify reads the bytes: any flipped bit of a small file is found.
func TestVerifyFindsEveryFlippedBit(t *testing.T) {
	c := content{"1.sst": []byte("a block"), "2.sst": nil}
	dir := c.write(t)
	for bit := range 8 * len(c["1.sst"]) {
		b := append([]byte(nil), c["1.sst"]...)
		b[bit/8] ^= 1 << (bit % 8)
		writeFile(t, filepath.Join(dir, "1.sst"), b)
		if err := snapshot.Verify(testCtx(t), dir, c.manifest()); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("bit %d: %v", bit, err)
		}
	}
}

// SN4: immutable files share their inode, the others do not: writing to one
// leaves the snapshot as it is.
func TestLinkCopiesWhatMayBeWrittenAgain(t *testing.T) {
	c := sampleContent()
	src := c.write(t)
	dst := filepath.Join(t.TempDir(), "below", "store-2")
	if err := snapshot.Link(dst, src, c.manifest()); err != nil {
		t.Fatal(err)
	}
	c.checkDir(t, dst)
	for n := range c {
		a, err := os.Stat(filepath.Join(src, n))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.Stat(filepath.Join(dst, n))
		if err != nil {
			t.Fatal(err)
		}
		if same := os.SameFile(a, b); same != snapshot.Immutable(n) {
			t.Errorf("%s is the same file: %v", n, same)
		}
		if snapshot.Immutable(n) {
			continue
		}
		f, err := os.OpenFile(filepath.Join(dst, n), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("more"); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	c.checkDir(t, src)
	for n, want := range map[string]bool{"1.sst": true, "1.blob": true, "CURRENT": false, "MANIFEST-1": false, "OPTIONS-1": false,
		"1.log": false, "sst": false, "1.sst.trash": false} {
		if snapshot.Immutable(n) != want {
			t.Errorf("Immutable(%q) is not %v", n, want)
		}
	}
}

func TestLinkRefusesToMixOrEscape(t *testing.T) {
	c := sampleContent()
	src, dst := c.write(t), t.TempDir()
	if err := snapshot.Link(dst, src, c.manifest()); !errors.Is(err, os.ErrExist) {
		t.Errorf("linking into a directory that exists: %v", err)
	}
	m := c.manifest()
	m.Files[0].Name = "../escaped.sst"
	to := filepath.Join(t.TempDir(), "new")
	if err := snapshot.Link(to, src, m); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("an escaping name: %v", err)
	}
	m = c.manifest()
	m.Files = append(m.Files, snapshot.File{Name: "zz"})
	if err := snapshot.Link(filepath.Join(t.TempDir(), "new"), src, m); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "zz") {
		t.Errorf("a missing file: %v", err)
	}
}
