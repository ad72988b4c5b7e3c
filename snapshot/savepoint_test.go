package snapshot_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/snapshot"
)

// storeSavepoint uploads a shard as savepoint number and returns its `_metadata`'s key.
func storeSavepoint(t *testing.T, s dirStore, dir string, m *snapshot.Manifest, number uint64) string {
	t.Helper()
	u := mustUpload(t, dir, m, snapshot.UploadOptions{Store: s, Prefix: cluster, Attempt: number + 100, Savepoint: number, PackBelow: 4 * kib, PackTarget: 16 * kib})
	folder := snapshot.SavepointFolder(cluster, number)
	for _, o := range u.New {
		if filepath.Dir(o.Key) != folder {
			t.Errorf("object %s lies outside of %s", o.Key, folder)
		}
	}
	for _, f := range m.Files {
		if strings.Contains(f.Object, "/") {
			t.Errorf("file %s lies in %s, which names a place", f.Name, f.Object)
		}
	}
	c := checkpointOf(number, m, u)
	c.Savepoint = true
	c.Shards[0].ManifestKey = filepath.Base(u.ManifestKey)
	if _, _, err := snapshot.StoreMetadata(testCtx(t), s, c); err != nil {
		t.Fatal(err)
	}
	return folder + "/_metadata"
}

// A savepoint can be read where it was stored, and as a copy in any folder of any
// store, also in the root; the copy needs nothing but itself.
func TestSavepointIsWholeWhereverItsFolderIsCopied(t *testing.T) {
	s := openStore(t)
	content := sampleContent()
	from := content.write(t)
	m := content.whole()
	key := storeSavepoint(t, s, from, m, 7)
	for _, folder := range []string{filepath.Dir(key), "elsewhere/of/mine", "ffffffffffffffffffffffffffffffff/savepoints/0000000001", ""} {
		dir := t.TempDir()
		target := filepath.Join(dir, filepath.FromSlash(folder))
		if err := os.MkdirAll(target, 0o750); err != nil {
			t.Fatal(err)
		}
		copyFiles(t, s.path(filepath.Dir(key)), target)
		other, err := file.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		at := strings.TrimPrefix(folder+"/_metadata", "/")
		if v, err := snapshot.VerifyCheckpoint(testCtx(t), other, at, snapshot.VerifyOptions{Full: true}); err != nil || v.Files != len(m.Files) {
			t.Errorf("%s: %v", at, err)
		}
		c, _, err := snapshot.ReadCheckpoint(testCtx(t), other, at, [sha256.Size]byte{})
		if err != nil {
			t.Fatal(err)
		}
		man, err := c.ReadManifest(testCtx(t), other, &c.Shards[0])
		if err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(t.TempDir(), "restored")
		if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(other, man), man, out, snapshot.FetchOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, f := range man.Files {
			a, err1 := os.ReadFile(filepath.Join(from, f.Name))
			b, err2 := os.ReadFile(filepath.Join(out, f.Name))
			if err := errors.Join(err1, err2); err != nil || !bytes.Equal(a, b) {
				t.Errorf("file %s of %s differs: %v", f.Name, at, err)
			}
		}
		if err := os.Remove(filepath.Join(target, filepath.Base(c.Shards[0].ManifestKey))); err != nil {
			t.Fatal(err)
		}
		if _, err := snapshot.VerifyCheckpoint(testCtx(t), other, at, snapshot.VerifyOptions{}); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s without its manifest: %v", at, err)
		}
		if err := other.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func copyFiles(t *testing.T, from, to string) {
	t.Helper()
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, d.Name()), b, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A checkpoint that is no savepoint cannot be read elsewhere; a savepoint is the
// user's, so it is not deleted as claimed, and its upload reuses nothing.
func TestSavepointsAndOtherCheckpointsAreNotMistaken(t *testing.T) {
	s := openStore(t)
	content := sampleContent()
	dir := content.write(t)
	m := content.whole()
	u := mustUpload(t, dir, m, uploadOptions(s, 1, registry{}))
	c := checkpointOf(1, m, u)
	if err := s.Put(testCtx(t), "copy/_metadata", objectstore.Bytes(mustEncodeCheckpoint(t, c))); err != nil {
		t.Fatal(err)
	}
	if _, _, err := snapshot.ReadCheckpoint(testCtx(t), s, "copy/_metadata", [sha256.Size]byte{}); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("a copy of a checkpoint: %v", err)
	}
	key := storeSavepoint(t, s, dir, content.whole(), 2)
	before := keysOf(t, s)
	if _, err := snapshot.DeleteClaimed(testCtx(t), s, key, [sha256.Size]byte{}); !errors.Is(err, base.ErrInvalid) || !slices.Equal(keysOf(t, s), before) {
		t.Errorf("claiming a savepoint: %v", err)
	}
	o := uploadOptions(s, 5, registry{})
	o.Savepoint = 3
	if err := mustFail(t, testCtx(t), dir, content.whole(), o); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a savepoint that reuses: %v", err)
	}
	outside := savepoint()
	outside.Shards[0].ManifestKey = "../" + outside.Shards[0].ManifestKey
	if _, err := outside.Encode(); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a manifest outside of the folder: %v", err)
	}
	// The flag without the version, and the version without the flag.
	for _, c := range []*snapshot.Checkpoint{fullCheckpoint(), savepoint()} {
		b := mustEncodeCheckpoint(t, c)
		b[4] ^= 3
		if _, err := snapshot.DecodeCheckpoint(reseal(b)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("version and flag disagree: %v", err)
		}
	}
}

// What lies beside a `_metadata` that is no orphan is none; a folder without one is
// swept.
func TestOrphansOfSavepointFolders(t *testing.T) {
	s := openStore(t)
	sum := sha256.Sum256(nil)
	failed := []string{snapshot.SavepointObjectKey(cluster, 3, sum, 7), snapshot.SavepointObjectKey(cluster, 5, sum, 9), snapshot.SavepointKey(cluster, 5)}
	kept := []string{snapshot.SavepointObjectKey(cluster, 4, sum, 8), snapshot.SavepointKey(cluster, 4), snapshot.SavepointFolder(cluster, 4) + "/notes.txt",
		snapshot.SavepointObjectKey("another", 4, sum, 8)}
	put(t, s, slices.Concat(failed, kept, []string{snapshot.ObjectKey(cluster, sum, 1)})...)
	got, err := snapshot.FindOrphans(testCtx(t), s, cluster, snapshot.OrphanOptions{Before: later(), IsOrphan: func(key string) bool { return key != snapshot.SavepointKey(cluster, 4) }})
	want := append([]string{snapshot.ObjectKey(cluster, sum, 1)}, failed...)
	slices.Sort(want)
	if err != nil || !slices.Equal(got.Keys, want) || got.Foreign != 1 {
		t.Errorf("%q, want %q: %v", got.Keys, want, err)
	}
	if err := snapshot.ExecutePlan(testCtx(t), s, cluster, failed); err != nil {
		t.Fatal(err)
	}
	if left := keysOf(t, s); len(left) != len(kept)+1 {
		t.Errorf("left %q", left)
	}
}

func TestNamesOfCheckpoints(t *testing.T) {
	for name, want := range map[string]string{
		"c/7": "c/checkpoints/0000000007/_metadata", "c/checkpoints/7": "c/checkpoints/0000000007/_metadata", "c/latest": "c/latest",
		"c/checkpoints/0000000007/_metadata": "c/checkpoints/0000000007/_metadata", "c/savepoints/0000000007": "c/savepoints/0000000007/_metadata",
		"c/savepoints/0000000007/_metadata": "c/savepoints/0000000007/_metadata", "my/copy/of/it": "my/copy/of/it/_metadata", "copy/": "copy/_metadata",
		"backup/7/_metadata": "backup/7/_metadata", "_metadata": "_metadata",
		"": "", "c/0": "", "c/checkpoints/x": "", "c/savepoints/0": "", "../x": "", "a//b": "", "/_metadata": "", "s3://x/y": "", "/": "",
	} {
		if got, err := snapshot.ParseName(name); got != want || (err == nil) != (want != "") || err != nil && !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %q, %v, want %q", name, got, err, want)
		}
	}
}
