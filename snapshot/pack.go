package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// content is what at least one file of a manifest holds.
type content struct {
	sum  [sha256.Size]byte
	size int64
}

// load is what becomes one object: the files' bytes one after another. Files
// have different contents.
type load struct {
	files []File
	size  int64
}

// offsets are where each file begins.
func (l *load) offsets() []int64 {
	at := make([]int64, len(l.files))
	var n int64
	for i := range l.files {
		at[i] = n
		n += l.files[i].Size
	}
	return at
}

// maxPackFiles bounds the files of one pack, and so what the registry has to keep
// of an object.
const maxPackFiles = 4096

// packing says how files become objects.
type packing struct {
	below, target int64
	objects       int
}

// loads puts files into loads: those below a size together, up to the target and
// at least the target where there is that much, but never more than maxPackFiles.
// If there were more objects than the bound, files are packed to larger ones,
// until they are few enough, or all packs are full (SN7).
func (p packing) loads(files []File) []load {
	for {
		out := p.once(files)
		if len(out) <= p.objects || len(out) <= 1 || p.below > math.MaxInt64/4 {
			return out
		}
		p.target *= 2
		p.below = p.target
	}
}

func (p packing) once(files []File) []load {
	var out, packs []load
	var open load
	for _, f := range files {
		if f.Size >= p.below {
			out = append(out, load{files: []File{f}, size: f.Size})
			continue
		}
		open.files = append(open.files, f)
		open.size += f.Size
		if open.size >= p.target || len(open.files) == maxPackFiles {
			packs = append(packs, open)
			open = load{}
		}
	}
	switch {
	case len(open.files) == 0:
	case len(packs) == 0, len(packs[len(packs)-1].files)+len(open.files) > maxPackFiles:
		packs = append(packs, open)
	default: // the rest is too small to stand alone
		last := &packs[len(packs)-1]
		last.files = append(last.files, open.files...)
		last.size += open.size
	}
	return append(out, packs...)
}

// openFile opens a file of the manifest and compares its size.
func openFile(root *os.Root, want *File) (_ *os.File, err error) {
	f, err := root.Open(want.Name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("it is no regular file: %w", base.ErrInvalid)
	case st.Size() != want.Size:
		return nil, fmt.Errorf("it has %d bytes, the manifest says %d: %w", st.Size(), want.Size, base.ErrCorrupt)
	}
	return f, nil
}

// body opens what a load holds. A load of one file is read once, while it is
// uploaded: the store compares its hash. The hash of a pack must be known before
// (it is the key), so that its files are read twice; they are compared the first
// time, and the pack the second (SN5, B51).
func (l *load) body(ctx context.Context, root *os.Root) (objectstore.Body, io.Closer, error) {
	if len(l.files) == 1 {
		f, err := openFile(root, &l.files[0])
		if err != nil {
			return objectstore.Body{}, nil, fmt.Errorf("file %s: %w", l.files[0].Name, err)
		}
		return objectstore.Body{Reader: &contextReaderAt{ctx: ctx, r: f}, Size: l.size, SHA256: l.files[0].SHA256}, f, nil
	}
	whole := sha256.New()
	for i := range l.files {
		if err := hashInto(ctx, root, &l.files[i], whole); err != nil {
			return objectstore.Body{}, nil, fmt.Errorf("file %s: %w", l.files[i].Name, err)
		}
	}
	r := &packReader{root: root, load: l, at: l.offsets(), index: -1}
	b := objectstore.Body{Reader: &contextReaderAt{ctx: ctx, r: r}, Size: l.size}
	whole.Sum(b.SHA256[:0])
	return b, r, nil
}

// hashInto reads a file to w and compares it with the manifest.
func hashInto(ctx context.Context, root *os.Root, want *File, w io.Writer) (err error) {
	f, err := openFile(root, want)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(w, h), &contextReader{ctx: ctx, r: f})
	if err != nil {
		return err
	}
	if n != want.Size || [sha256.Size]byte(h.Sum(nil)) != want.SHA256 {
		return fmt.Errorf("it is not what the manifest says: %w", base.ErrCorrupt)
	}
	return nil
}

// packReader reads the files of a load as if they were one. It has one of them
// open at a time, however many there are.
type packReader struct {
	root *os.Root
	load *load
	at   []int64 // where each file begins

	mu    sync.Mutex
	index int // of the open file, -1 if none is
	file  *os.File
}

// ReadAt implements io.ReaderAt.
func (r *packReader) ReadAt(p []byte, off int64) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if off < 0 {
		return 0, base.Invalid("offset", "0 or more")
	}
	n := 0
	for n < len(p) && off < r.load.size {
		k, err := r.readLocked(p[n:], off)
		n += k
		off += int64(k)
		if err != nil {
			return n, err
		}
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// readLocked reads from the one file that holds the offset; it gives one byte at
// least, or an error.
func (r *packReader) readLocked(p []byte, off int64) (int, error) {
	// The last that begins at the offset or before; none are empty.
	i, found := slices.BinarySearch(r.at, off)
	if !found {
		i--
	}
	want := &r.load.files[i]
	if r.index != i {
		if err := r.closeLocked(); err != nil {
			return 0, err
		}
		f, err := openFile(r.root, want)
		if err != nil {
			return 0, fmt.Errorf("file %s: %w", want.Name, err)
		}
		r.file, r.index = f, i
	}
	inside := off - r.at[i]
	p = p[:min(int64(len(p)), want.Size-inside)]
	n, err := r.file.ReadAt(p, inside)
	if n == len(p) {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("it ends after %d of %d bytes: %w", inside+int64(n), want.Size, base.ErrCorrupt)
	}
	return n, fmt.Errorf("file %s: %w", want.Name, err)
}

func (r *packReader) closeLocked() error {
	if r.index < 0 {
		return nil
	}
	r.index = -1
	return r.file.Close()
}

// Close closes the file that is open.
func (r *packReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.closeLocked()
}

// contextReaderAt ends with its context, so that a Put does.
type contextReaderAt struct {
	ctx context.Context
	r   io.ReaderAt
}

func (c *contextReaderAt) ReadAt(p []byte, off int64) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.ReadAt(p, off)
}
