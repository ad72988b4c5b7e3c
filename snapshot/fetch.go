package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// Source opens files of a snapshot elsewhere, from an offset on. Close of what
// Open returns may come while a Read waits, and must end it.
type Source interface {
	Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error)
}

// FetchOptions tune a Fetch.
type FetchOptions struct {
	// Parallel bounds the files fetched at once. Default 2.
	Parallel int
	// ReuseDirs are directories whose immutable files are hard-linked if name,
	// size and hash are right.
	ReuseDirs []string
	// Read, if set, knows files of ReuseDirs that were read not longer than ReadWithin
	// ago: these are linked without being read again.
	Read       *HashCache
	ReadWithin time.Duration
	// Hashes, if set, is told of the files that never change: whoever hashes them,
	// or links to them, later need not read them.
	Hashes *HashCache
	// Progress is told of bytes that are there by now, n more each time: fetched from
	// the source, or here before. Several goroutines may call it at once; may be nil.
	Progress func(n int64, fetched bool)
}

const (
	partSuffix = ".part"
	// fetchBuffer is what is read and written at once: a call of the system costs
	// more than moving some KiB does.
	fetchBuffer = 256 << 10
)

// Fetch brings all files of the manifest into dir, which may hold what an
// earlier, interrupted Fetch of the same manifest left. When it returns nil the
// files are whole, verified and durable (SN2).
func Fetch(ctx context.Context, src Source, m *Manifest, dir string, o FetchOptions) error {
	if o.Parallel <= 0 {
		o.Parallel = 2
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("fetching snapshot: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("fetching snapshot: %w", err)
	}
	defer root.Close()
	f := &fetch{src: src, root: root, dir: dir, opts: o}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(o.Parallel)
	for i := range m.Files {
		g.Go(func() error {
			if err := f.file(gctx, &m.Files[i]); err != nil {
				return fmt.Errorf("fetching file %s: %w", m.Files[i].where(), err)
			}
			o.Hashes.note(dir, &m.Files[i])
			failpoint.Hit("snapshot.fetch.file-done")
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := removeStrangers(root, dir, m); err != nil {
		return fmt.Errorf("fetching snapshot: %w", err)
	}
	failpoint.Hit("snapshot.fetch.before-sync")
	return errors.Join(syncDir(dir), syncDir(filepath.Dir(dir)))
}

// removeStrangers removes what no manifest names: parts of an earlier attempt.
func removeStrangers(root *os.Root, dir string, m *Manifest) error {
	wanted := make(map[string]bool, len(m.Files))
	for i := range m.Files {
		wanted[m.Files[i].Name] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !wanted[e.Name()] {
			if err := root.RemoveAll(e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

type fetch struct {
	src  Source
	root *os.Root
	dir  string
	opts FetchOptions
}

func (f *fetch) progress(n int64, fetched bool) {
	if f.opts.Progress != nil && n > 0 {
		f.opts.Progress(n, fetched)
	}
}

// file makes one file be there.
func (f *fetch) file(ctx context.Context, want *File) error {
	if err := checkName(want.Name); err != nil {
		return err
	}
	switch ok, err := f.isRight(ctx, f.dir, want); {
	case err != nil:
		return err
	case ok:
		f.progress(want.Size, false)
		return nil
	}
	if Immutable(want.Name) {
		for _, d := range f.opts.ReuseDirs {
			// A file that vanished meanwhile, or that is another, is fetched.
			if !f.opts.Read.read(d, want, f.opts.ReadWithin) {
				if ok, err := f.isRight(ctx, d, want); err != nil || !ok {
					continue
				}
			}
			if f.replaceByLink(d, want.Name) == nil {
				f.progress(want.Size, false)
				return nil
			}
		}
	}
	return f.download(ctx, want)
}

func (f *fetch) replaceByLink(from, name string) error {
	if err := f.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Link(filepath.Join(from, name), filepath.Join(f.dir, name))
}

// isRight says whether dir has the file with the right size and content.
func (f *fetch) isRight(ctx context.Context, dir string, want *File) (bool, error) {
	st, err := os.Stat(filepath.Join(dir, want.Name))
	if err != nil || !st.Mode().IsRegular() || st.Size() != want.Size {
		return false, nil // absent or another: it is fetched
	}
	got, err := hashFile(ctx, dir, want.Name, nil)
	if err != nil {
		return false, err
	}
	return got.SHA256 == want.SHA256, nil
}

// download fetches a file into its part file, going on where an earlier
// attempt stopped, and gives it its name when it is verified and durable.
func (f *fetch) download(ctx context.Context, want *File) error {
	part := want.Name + partSuffix
	out, err := f.root.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return err
	}
	failpoint.Hit("snapshot.fetch.part-made")
	h := sha256.New()
	have, err := f.resume(out, want, h)
	if err == nil {
		err = f.body(ctx, out, want, have, h)
	}
	if err == nil {
		err = out.Sync()
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	var sum [sha256.Size]byte
	if h.Sum(sum[:0]); sum != want.SHA256 {
		// Nothing of it can be trusted: start anew the next time.
		return errors.Join(fmt.Errorf("wrong content: %w", base.ErrCorrupt), f.root.Remove(part))
	}
	if err := failpoint.Err("snapshot.fetch.before-rename"); err != nil {
		return err
	}
	return f.root.Rename(part, want.Name)
}

// resume hashes what is there of a part and returns its length.
func (f *fetch) resume(out *os.File, want *File, h hash.Hash) (int64, error) {
	n, err := io.Copy(h, out)
	if err != nil {
		return 0, err
	}
	if n <= want.Size {
		f.progress(n, false)
		return n, nil
	}
	h.Reset()
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	return 0, out.Truncate(0)
}

func (f *fetch) body(ctx context.Context, out *os.File, want *File, have int64, h hash.Hash) error {
	if have == want.Size {
		return nil
	}
	in, err := f.src.Open(ctx, want.Name, have)
	if err != nil {
		return err
	}
	defer in.Close()
	// A body that stalls is closed when the context ends: Read then returns.
	stop := context.AfterFunc(ctx, func() { in.Close() })
	defer stop()
	// One byte more than wanted tells a body that is too long.
	w := io.MultiWriter(out, h, progressWriter{f})
	n, err := io.CopyBuffer(w, io.LimitReader(&contextReader{ctx: ctx, r: in}, want.Size-have), make([]byte, min(fetchBuffer, want.Size-have+1)))
	if err != nil {
		return errors.Join(ctx.Err(), err)
	}
	if have+n != want.Size {
		return fmt.Errorf("the body ended at %d of %d bytes: %w", have+n, want.Size, io.ErrUnexpectedEOF)
	}
	var extra [1]byte
	if k, err := in.Read(extra[:]); k > 0 {
		return fmt.Errorf("the body is longer than %d bytes: %w", want.Size, base.ErrCorrupt)
	} else if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

type progressWriter struct{ f *fetch }

func (p progressWriter) Write(b []byte) (int, error) {
	p.f.progress(int64(len(b)), true)
	return len(b), nil
}
