package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/snapshot"
)

const (
	cluster = "00112233445566778899aabbccddeeff"
	kib     = 1 << 10
)

// dirStore is a store of files whose directory is known, so that objects can be
// damaged behind its back.
type dirStore struct {
	objectstore.Store
	dir string
}

func openStore(t testing.TB) dirStore {
	t.Helper()
	dir := t.TempDir()
	s, err := file.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return dirStore{s, dir}
}

func (s dirStore) path(key string) string { return filepath.Join(s.dir, filepath.FromSlash(key)) }

// change gives an object other bytes.
func (s dirStore) change(t testing.TB, key string, f func(b []byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(s.path(key))
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, s.path(key), f(b))
}

// keep remembers an object and puts it back.
func (s dirStore) keep(t testing.TB, key string) (putBack func()) {
	t.Helper()
	b, err := os.ReadFile(s.path(key))
	if err != nil {
		t.Fatal(err)
	}
	return func() { writeFile(t, s.path(key), b) }
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

// checkNames demands that every object has the bytes of its name (SN5).
func checkNames(t testing.TB, s objectstore.Store) {
	t.Helper()
	for _, key := range keysOf(t, s) {
		_, sum, _, ok := snapshot.ParseObjectKey(key)
		if !ok {
			continue
		}
		b, err := objectstore.ReadAll(testCtx(t), s, key, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		if sha256.Sum256(b) != sum {
			t.Fatalf("object %s has other bytes than its name says", key)
		}
	}
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

// mustFail demands that an upload fails and leaves the manifest as it was (SN8).
func mustFail(t testing.TB, ctx context.Context, dir string, m *snapshot.Manifest, o snapshot.UploadOptions) error {
	t.Helper()
	before := slices.Clone(m.Files)
	u, err := snapshot.Upload(ctx, dir, m, o)
	if err == nil || u != nil {
		t.Fatalf("the upload succeeded: %+v", u)
	}
	if !reflect.DeepEqual(m.Files, before) {
		t.Fatal("a failed upload changed the manifest")
	}
	return err
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
	key := snapshot.MetadataKey(c.ClusterID, c.Number)
	if err := s.Put(testCtx(t), key, objectstore.Bytes(mustEncodeCheckpoint(t, c))); err != nil {
		t.Fatal(err)
	}
	return key
}

// readManifest reads a manifest from a store.
func readManifest(t testing.TB, s objectstore.Store, key string) *snapshot.Manifest {
	t.Helper()
	raw, err := objectstore.ReadAll(testCtx(t), s, key, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	m, err := snapshot.Decode(raw)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// restore fetches a snapshot from the store, by its manifest's key.
func restore(t testing.TB, s objectstore.Store, manifestKey string) string {
	t.Helper()
	m := readManifest(t, s, manifestKey)
	dir := filepath.Join(t.TempDir(), "restored")
	if err := snapshot.Fetch(testCtx(t), snapshot.StoreSource(s, m), m, dir, snapshot.FetchOptions{}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// calls counts a store's calls, and lets one of them go wrong.
type calls struct {
	mu   sync.Mutex
	n    int
	seen []string
	// at is the number of the call, from 1 on, that gets the fault.
	at    int
	fault func() fault.Fault
	// on limits it to some methods; empty is all.
	on []fault.Op
}

func (c *calls) hook(op fault.Op, key string) fault.Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.on) > 0 && !slices.Contains(c.on, op) {
		return fault.Fault{}
	}
	c.n++
	c.seen = append(c.seen, fmt.Sprintf("%s %s", op, key))
	if c.n == c.at {
		return c.fault()
	}
	return fault.Fault{}
}

// many is content with so many files of a size each.
func many(files, size int) content {
	c := content{}
	for i := range files {
		b := bytes.Repeat([]byte{byte(i)}, size)
		copy(b, fmt.Sprintf("%08d", i))
		c[fmt.Sprintf("%06d.sst", i)] = b
	}
	return c
}
