package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// hashParallel bounds the files that are hashed at once.
const hashParallel = 2

// HashCache remembers the SHA-256 of files by identity (inode, size and time of
// change of content), so that an immutable file that is hard-linked into many
// checkpoints is read once.
type HashCache struct {
	mu sync.Mutex
	m  map[fileIdentity]knownHash
}

// knownHash is the hash of a file, and when it was computed of the file's bytes.
type knownHash struct {
	sum [sha256.Size]byte
	at  time.Time
}

type fileIdentity struct {
	name  string
	dev   uint64
	inode uint64
	size  int64
	mtime time.Time
}

// maxCached bounds the cache; beyond it, it starts anew.
const maxCached = 200_000

// NewHashCache returns an empty cache.
func NewHashCache() *HashCache { return &HashCache{m: map[fileIdentity]knownHash{}} }

func (c *HashCache) get(id fileIdentity) (sum [sha256.Size]byte, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, ok := c.m[id]
	return k.sum, ok
}

// read says whether the file of that name in dir was read within the time given, was
// not written to since, and has the content that is wanted.
func (c *HashCache) read(dir string, want *File, within time.Duration) bool {
	if c == nil || !Immutable(want.Name) {
		return false
	}
	st, err := os.Lstat(filepath.Join(dir, want.Name))
	if err != nil || !st.Mode().IsRegular() {
		return false
	}
	id, ok := identityOf(want.Name, st)
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k, ok := c.m[id]
	return ok && k.sum == want.SHA256 && id.size == want.Size && time.Since(k.at) < within
}

func (c *HashCache) put(id fileIdentity, sum [sha256.Size]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.m) >= maxCached {
		clear(c.m)
	}
	c.m[id] = knownHash{sum: sum, at: time.Now()}
}

// note remembers the hash of a file that was just compared with it; what changes,
// or is not there, is left out, and nothing is done without a cache.
func (c *HashCache) note(dir string, f *File) {
	if c == nil || !Immutable(f.Name) {
		return
	}
	st, err := os.Lstat(filepath.Join(dir, f.Name))
	if err != nil || st.Size() != f.Size || !st.Mode().IsRegular() {
		return
	}
	if id, ok := identityOf(f.Name, st); ok {
		c.put(id, f.SHA256)
	}
}

func identityOf(name string, st fs.FileInfo) (fileIdentity, bool) {
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return fileIdentity{}, false
	}
	return fileIdentity{name: name, dev: uint64(sys.Dev), inode: sys.Ino, size: st.Size(), mtime: st.ModTime()}, true
}

// HashFiles returns the regular files of a directory with size and SHA-256, in
// the order of their names. Only files that never change are taken from the
// cache.
func HashFiles(ctx context.Context, dir string, cache *HashCache) ([]File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("hashing files: %w", err)
	}
	for _, e := range entries { // before any goroutine reads
		if !e.Type().IsRegular() {
			return nil, fmt.Errorf("hashing files: %s is no regular file: %w", e.Name(), base.ErrInvalid)
		}
	}
	files := make([]File, len(entries))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(hashParallel)
	for i, e := range entries {
		g.Go(func() error {
			f, err := hashFile(ctx, dir, e.Name(), cache)
			files[i] = f
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return files, nil
}

func hashFile(ctx context.Context, dir, name string, cache *HashCache) (File, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return File{}, fmt.Errorf("hashing %s: %w", name, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return File{}, fmt.Errorf("hashing %s: %w", name, err)
	}
	out := File{Name: name, Size: st.Size()}
	id, known := identityOf(name, st)
	known = known && cache != nil && Immutable(name)
	if known {
		if sum, ok := cache.get(id); ok {
			out.SHA256 = sum
			return out, nil
		}
	}
	h := sha256.New()
	n, err := io.CopyBuffer(h, &contextReader{ctx: ctx, r: f}, make([]byte, min(fetchBuffer, st.Size()+1)))
	if err != nil {
		return File{}, fmt.Errorf("hashing %s: %w", name, err)
	}
	if n != st.Size() {
		return File{}, fmt.Errorf("hashing %s: it changed from %d to %d bytes: %w", name, st.Size(), n, base.ErrConflict)
	}
	h.Sum(out.SHA256[:0])
	if known {
		cache.put(id, out.SHA256)
	}
	return out, nil
}

type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// Immutable says whether an engine never writes to a file of that name again:
// it may be hard-linked, and its hash kept.
func Immutable(name string) bool {
	return strings.HasSuffix(name, ".sst") || strings.HasSuffix(name, ".blob")
}

// Verify reads every file of the manifest in dir and names the first that is
// missing, extra, or not what the manifest says (SN3).
func Verify(ctx context.Context, dir string, m *Manifest) error {
	files, err := HashFiles(ctx, dir, nil)
	if err != nil {
		return err
	}
	have := make(map[string]File, len(files))
	for _, f := range files {
		have[f.Name] = f
	}
	for i := range m.Files {
		want := &m.Files[i]
		got, ok := have[want.Name]
		switch {
		case !ok:
			return fmt.Errorf("verifying file %s: it is missing: %w", want.Name, base.ErrCorrupt)
		case got.Size != want.Size:
			return fmt.Errorf("verifying file %s: %d bytes, the manifest says %d: %w", want.Name, got.Size, want.Size, base.ErrCorrupt)
		case got.SHA256 != want.SHA256:
			return fmt.Errorf("verifying file %s: wrong content: %w", want.Name, base.ErrCorrupt)
		}
		delete(have, want.Name)
	}
	for name := range have {
		return fmt.Errorf("verifying file %s: the manifest does not know it: %w", name, base.ErrCorrupt)
	}
	return nil
}

// Link makes dst, which must not exist, a directory with the files of the
// manifest from src: immutable ones hard-linked (copied where links are not
// possible), the others copied (SN4). Everything is durable when it returns.
func Link(dst, src string, m *Manifest) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o750); err != nil {
		return fmt.Errorf("linking snapshot: %w", err)
	}
	if err := os.Mkdir(dst, 0o750); err != nil {
		return fmt.Errorf("linking snapshot: %w", err)
	}
	from, err := os.OpenRoot(src)
	if err != nil {
		return fmt.Errorf("linking snapshot: %w", err)
	}
	defer from.Close()
	for i := range m.Files {
		failpoint.Hit("snapshot.link.before-file")
		f := &m.Files[i]
		if err := checkName(f.Name); err != nil {
			return err
		}
		to := filepath.Join(dst, f.Name)
		if Immutable(f.Name) && os.Link(filepath.Join(src, f.Name), to) == nil {
			continue
		}
		if err := copyFile(from, f.Name, to); err != nil {
			return fmt.Errorf("linking file %s: %w", f.Name, err)
		}
	}
	failpoint.Hit("snapshot.link.before-sync")
	return errors.Join(syncDir(dst), syncDir(filepath.Dir(dst)))
}

func copyFile(from *os.Root, name, to string) error {
	in, err := from.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
	if err != nil {
		return err
	}
	if _, err = io.Copy(out, in); err == nil {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
