package mem

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/internal/durable"
	"github.com/keelstate/keelstate/internal/base"
)

// Name is the name of the implementation.
const Name = "mem"

// layout is the version of the directory as a whole.
const layout = 1

var marker = engine.Marker{Engine: Name, Layout: layout}

// Driver opens stores in memory. Its stores share nothing.
type Driver struct{ closed atomic.Bool }

var _ engine.Driver = (*Driver)(nil)

// NewDriver returns a driver.
func NewDriver() *Driver { return &Driver{} }

// Name implements engine.Driver.
func (*Driver) Name() string { return Name }

// Close implements engine.Driver. Open stores stay open.
func (d *Driver) Close() error {
	d.closed.Store(true)
	return nil
}

// Open implements engine.Driver. It loads the image that the manifest names and
// fails with base.ErrCorrupt if anything is missing or damaged, never falling
// back to an older state (ME5). A directory that is open already is refused
// with base.ErrConflict.
func (d *Driver) Open(dir string) (engine.Store, error) {
	if d.closed.Load() {
		return nil, fmt.Errorf("opening store %s: driver: %w", dir, base.ErrClosed)
	}
	s, err := open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening store %s: %w", dir, err)
	}
	return s, nil
}

func open(dir string) (_ *store, err error) {
	if err := engine.ClaimDirectory(dir, marker); err != nil {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = lock.Close() // the error of the open counts
		}
	}()
	m, err := readManifest(dir)
	if errors.Is(err, os.ErrNotExist) {
		m, err = createManifest(dir)
	}
	if err != nil {
		return nil, err
	}
	newest, err := removeLeftovers(dir, m.image)
	if err != nil {
		return nil, err
	}
	s := &store{dir: dir, lock: lock, nextImage: newest + 1, work: make(map[engine.FamilyID]*tree)}
	s.manifest.durable = m
	r, size, err := loadImage(dir, m)
	if err != nil {
		return nil, err
	}
	for id, f := range r.families {
		s.work[id] = f.tree
		published := *f
		published.tree = f.tree.Copy()
		r.families[id] = &published
	}
	s.current.Store(r)
	s.flushed.Store(r)
	s.diskBytes.Store(size)
	return s, nil
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("locking: %w: %w", base.ErrDiskFailed, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("locking: it is in use: %w: %w", base.ErrConflict, err)
	}
	return f, nil
}

// readManifest fails with os.ErrNotExist if there is none.
func readManifest(dir string) (*manifest, error) {
	f, err := os.Open(filepath.Join(dir, manifestFile))
	if err != nil {
		return nil, fmt.Errorf("reading manifest: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxManifestLen+1))
	if err != nil {
		return nil, fmt.Errorf("reading manifest: %w: %w", base.ErrDiskFailed, err)
	}
	return decodeManifest(b)
}

// createManifest starts a new store. An image is only ever written after the
// first manifest, so an image without one means that the manifest was lost.
func createManifest(dir string) (*manifest, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing: %w: %w", base.ErrDiskFailed, err)
	}
	for _, e := range entries {
		if _, ok := imageNumber(e.Name()); ok {
			return nil, corrupt("%s without a manifest", e.Name())
		}
	}
	m := &manifest{families: map[engine.FamilyID]*family{
		engine.MetaFamily: {id: engine.MetaFamily, options: metaOptions},
	}}
	return m, writeManifest(dir, m)
}

// removeLeftovers removes what a crash in a Flush left: temporary files and
// images that the manifest does not name. It returns the newest image number
// that was ever seen.
func removeLeftovers(dir string, keep uint64) (uint64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("listing: %w: %w", base.ErrDiskFailed, err)
	}
	newest := keep
	for _, e := range entries {
		n, image := imageNumber(e.Name())
		newest = max(newest, n)
		if image && n != keep || strings.HasSuffix(e.Name(), durable.TempSuffix) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return 0, fmt.Errorf("removing %s: %w: %w", e.Name(), base.ErrDiskFailed, err)
			}
		}
	}
	return newest, nil
}

// loadImage returns the root that the manifest describes.
func loadImage(dir string, m *manifest) (*root, int64, error) {
	l := &loader{families: make(map[engine.FamilyID]*family, len(m.families))}
	for id, f := range m.families {
		fam := *f
		fam.tree = newTree()
		l.families[id] = &fam
	}
	size, err := scanImage(dir, m, l)
	if err != nil {
		return nil, 0, err
	}
	if l.mismatch != nil {
		return nil, 0, l.mismatch
	}
	return &root{families: l.families}, size, nil
}

// scanImage reads the image that the manifest names and checks it.
func scanImage(dir string, m *manifest, v imageVisitor) (size int64, err error) {
	return scanImageThrough(dir, m, v, func(f *os.File) io.Reader { return f })
}

// scanImageThrough is scanImage on what through makes of the file.
func scanImageThrough(dir string, m *manifest, v imageVisitor, through func(*os.File) io.Reader) (size int64, err error) {
	if m.image == 0 {
		return 0, nil
	}
	name := imageName(m.image)
	f, err := os.Open(filepath.Join(dir, name))
	if errors.Is(err, os.ErrNotExist) {
		return 0, corrupt("%s is missing", name)
	}
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w: %w", name, base.ErrDiskFailed, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w: %w", name, base.ErrDiskFailed, err)
	}
	number, sum, err := readImage(bufio.NewReaderSize(through(f), 256<<10), info.Size(), v)
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", name, err)
	}
	if number != m.image || sum != m.imageSum {
		return 0, corrupt("%s is image %d with checksum %x, not the one with checksum %x", name, number, sum, m.imageSum)
	}
	return info.Size(), nil
}

// loader builds the trees of the families that still exist (ME4).
type loader struct {
	families map[engine.FamilyID]*family
	into     *family
	mismatch error
}

func (l *loader) startFamily(f *family) {
	l.into = l.families[f.id]
	if l.into == nil || l.into.birth != f.birth {
		l.into = nil // dropped since
		return
	}
	if l.into.options != f.options {
		l.mismatch = corrupt("family %d has options %v in the manifest and %v in the image", f.id, l.into.options, f.options)
	}
}

func (l *loader) entry(key, value []byte) {
	if l.into == nil {
		return
	}
	l.into.tree.Load(newItem(key, value))
	l.into.bytes += uint64(len(key) + len(value))
}

// Verify implements engine.Driver. A store that is open is refused with
// base.ErrConflict.
func (d *Driver) Verify(dir string) error {
	if err := verify(dir); err != nil {
		return fmt.Errorf("verifying store %s: %w", dir, err)
	}
	return nil
}

func verify(dir string) error {
	if err := engine.CheckDirectory(dir, marker); err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	m, err := readManifest(dir)
	if errors.Is(err, os.ErrNotExist) {
		return corrupt("no manifest")
	}
	if err != nil {
		return err
	}
	_, err = scanImage(dir, m, &discard{})
	return err
}

// discard is for reading that only wants the checks of readImage.
type discard struct{}

func (*discard) startFamily(*family) {}
func (*discard) entry(_, _ []byte)   {}

// ReadImage reads the image in r, which has the given size, and calls fn for
// every entry in order; it is meant for dumps of files offline. It fails with
// base.ErrFormatVersion or base.ErrCorrupt, possibly after calls of fn.
func ReadImage(r io.Reader, size int64, fn func(f engine.FamilyID, key, value []byte)) error {
	_, _, err := readImage(r, size, &visitFunc{fn: fn})
	return err
}

type visitFunc struct {
	id engine.FamilyID
	fn func(f engine.FamilyID, key, value []byte)
}

func (v *visitFunc) startFamily(f *family) { v.id = f.id }
func (v *visitFunc) entry(key, value []byte) {
	v.fn(v.id, bytes.Clone(key), bytes.Clone(value))
}
