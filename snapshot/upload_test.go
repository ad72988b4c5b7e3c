package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"path/filepath"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/snapshot"
)

const (
	cluster = "00112233445566778899aabbccddeeff"
	kib     = 1 << 10
)

// openStore opens an empty store.
func openStore(t testing.TB) objectstore.Store {
	t.Helper()
	s, err := file.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// registry is what a cluster knows of its objects.
type registry map[[sha256.Size]byte]snapshot.Place

// add registers what an upload reported.
func (r registry) add(u *snapshot.Uploaded) {
	for _, o := range u.New {
		for _, p := range o.Parts {
			r[p.SHA256] = snapshot.Place{Object: o.Key, Offset: p.Offset, Length: p.Length}
		}
	}
}

func (r registry) known(sum [sha256.Size]byte, size int64) (snapshot.Place, bool) {
	p, ok := r[sum]
	return p, ok && p.Length == size
}

func uploadOptions(s objectstore.Store, attempt uint64, known registry) snapshot.UploadOptions {
	return snapshot.UploadOptions{Store: s, Prefix: cluster, Attempt: attempt, Known: known.known, PackBelow: 4 * kib, PackTarget: 16 * kib}
}

func mustUpload(t testing.TB, dir string, m *snapshot.Manifest, o snapshot.UploadOptions) *snapshot.Uploaded {
	t.Helper()
	u, err := snapshot.Upload(testCtx(t), dir, m, o)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// checkpointOf makes a checkpoint of one shard, which is all of the cluster.
func checkpointOf(number uint64, m *snapshot.Manifest, u *snapshot.Uploaded) *snapshot.Checkpoint {
	return &snapshot.Checkpoint{
		ClusterID: cluster, Number: number, Incarnation: m.Incarnation, FormatVersion: 1, M: m.M, Engine: m.Engine, CreatedMs: 1_700_000_000_123,
		Shards: []snapshot.Shard{{
			Group: m.Group, Birth: m.Birth, Epoch: m.Epoch, Range: m.Range, Index: m.Index, Term: m.Term, Sequence: m.Sequence, ClockMs: m.ClockMs,
			ManifestKey: u.ManifestKey, ManifestSHA256: u.ManifestSHA256, ManifestSize: u.ManifestSize, FullBytes: u.FullBytes, NewBytes: u.NewBytes,
		}},
	}
}

// whole is a manifest of all key groups.
func (c content) whole() *snapshot.Manifest {
	m := c.manifest()
	m.Range.Lo, m.Range.Hi = 0, 1024
	return m
}

// putCheckpoint stores `_metadata` and returns its key.
func putCheckpoint(t testing.TB, s objectstore.Store, c *snapshot.Checkpoint) string {
	t.Helper()
	raw, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	key := snapshot.MetadataKey(c.ClusterID, c.Number)
	if err := s.Put(testCtx(t), key, objectstore.Bytes(raw)); err != nil {
		t.Fatal(err)
	}
	return key
}

// restore fetches a snapshot from the store, by its manifest's key.
func restore(t testing.TB, s objectstore.Store, manifestKey string) string {
	t.Helper()
	raw, err := objectstore.ReadAll(testCtx(t), s, manifestKey, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	m, err := snapshot.Decode(raw)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "restored")
	if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, m), m, dir, snapshot.FetchOptions{}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func keysOf(t testing.TB, s objectstore.Store) (keys []string) {
	t.Helper()
	for o, err := range s.List(context.Background(), "", "") {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, o.Key)
	}
	return keys
}

// What is uploaded comes back, and a second checkpoint uploads what is new only.
func TestUploadAndRestore(t *testing.T) {
	s, reg := openStore(t), registry{}
	first := sampleContent()
	m := first.whole()
	u := mustUpload(t, first.write(t), m, uploadOptions(s, 1, reg))
	reg.add(u)
	var all int64
	for _, b := range first {
		all += int64(len(b))
	}
	if u.FullBytes != all || u.NewBytes != all || u.Files != len(first) || u.NewFiles != len(first)-1 || len(u.Reused) != 0 {
		t.Errorf("the first upload: %+v", u)
	}
	var stored []string
	for _, o := range u.New {
		stored = append(stored, o.Key)
	}
	slices.Sort(stored)
	if have := keysOf(t, s); !slices.Equal(have, stored) {
		t.Errorf("the store has %v, the report says %v", have, stored)
	}
	if err := m.CheckPlaces(); err != nil {
		t.Error(err)
	}
	first.checkDir(t, restore(t, s, u.ManifestKey))

	second := sampleContent()
	second["000011.sst"] = bytes.Repeat([]byte("new"), 5000)
	second["CURRENT"] = []byte("MANIFEST-000012\n")
	delete(second, "000009.sst")
	m2 := second.whole()
	u2 := mustUpload(t, second.write(t), m2, uploadOptions(s, 2, reg))
	if u2.NewBytes != 15_000+16 || u2.NewFiles != 2 || len(u2.New) != 3 || len(u2.Reused) != 2 {
		t.Errorf("the second upload: %+v", u2)
	}
	second.checkDir(t, restore(t, s, u2.ManifestKey))
	first.checkDir(t, restore(t, s, u.ManifestKey))

	for i, up := range []*snapshot.Uploaded{u, u2} {
		c := checkpointOf(uint64(i+1), []*snapshot.Manifest{m, m2}[i], up)
		key := putCheckpoint(t, s, c)
		for _, full := range []bool{false, true} {
			v, err := snapshot.VerifyCheckpoint(testCtx(t), s, key, snapshot.VerifyOptions{Full: full})
			if err != nil || v.Objects != 1+len(up.New)+len(up.Reused) || v.Files != len(first) {
				t.Errorf("checkpoint %d, full %v: %v %+v", c.Number, full, err, v)
			}
		}
	}
}
