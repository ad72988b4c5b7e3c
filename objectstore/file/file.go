package file

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// uploads is the folder of what is being written. No key has such a part.
const uploads = ".uploads"

// Store keeps objects in a directory. It implements objectstore.Store.
type Store struct {
	dir string

	closed atomic.Bool
	// syncFolder makes the names in a folder durable; tests make it fail.
	syncFolder func(*os.File) error

	mu sync.Mutex
	// root is set by the first call that can open the directory, and stays; who has
	// entered may use it without the lock.
	root *os.Root
}

var _ objectstore.Store = (*Store)(nil)

// New returns the store in dir, which is made when it is first needed: until then
// its disk may be missing, and calls fail.
func New(dir string) *Store { return &Store{dir: dir, syncFolder: (*os.File).Sync} }

// Open opens the store in dir, which is made if it is not there.
func Open(dir string) (*Store, error) {
	s := New(dir)
	if err := s.open(); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Store) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.root != nil || s.closed.Load() {
		return nil
	}
	if err := os.MkdirAll(s.dir, 0o750); err != nil {
		return failed("opening object store "+s.dir, err)
	}
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return failed("opening object store "+s.dir, err)
	}
	s.root = root
	return nil
}

// failed makes an error of the file system one of the store, with what to do.
func failed(doing string, err error) error {
	if errors.Is(err, fs.ErrClosed) {
		return fmt.Errorf("%s: %w", doing, base.ErrClosed)
	}
	hint := "look at the directory's disk and its mount"
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		hint = "free space on the directory's disk, or retain fewer checkpoints"
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		hint = "let the node's user write to the directory"
	}
	return &base.Error{Cause: fmt.Errorf("%s: %w: %w", doing, base.ErrObjectStore, err), Hint: hint, Ordinal: -1}
}

// enter says why a call cannot begin.
func (s *Store) enter(ctx context.Context, keys ...string) error {
	for _, k := range keys {
		if err := objectstore.CheckKey(k); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err := s.open()
	if s.closed.Load() {
		return fmt.Errorf("object store %s: %w", s.dir, base.ErrClosed)
	}
	return err
}

// Close implements objectstore.Store. Calls that are running fail with
// base.ErrClosed where they need the directory again.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed.Swap(true) || s.root == nil {
		return nil
	}
	if err := s.root.Close(); err != nil {
		return failed("closing object store "+s.dir, err)
	}
	return nil
}

// Put implements objectstore.Store.
func (s *Store) Put(ctx context.Context, key string, body objectstore.Body) error {
	if err := s.enter(ctx, key); err != nil {
		return fmt.Errorf("putting object: %w", err)
	}
	if err := body.Check(); err != nil {
		return fmt.Errorf("putting object %s: %w", key, err)
	}
	if err := s.put(ctx, key, body); err != nil {
		return fmt.Errorf("putting object %s: %w", key, err)
	}
	return nil
}

func (s *Store) put(ctx context.Context, key string, body objectstore.Body) error {
	// An object that is there need not be written first to find out.
	if _, err := s.root.Lstat(key); err == nil {
		return s.taken(key)
	}
	if err := s.mkdir(uploads); err != nil {
		return err
	}
	temp := path.Join(uploads, rand.Text())
	if err := s.write(ctx, temp, body); err != nil {
		return errors.Join(err, s.remove(temp))
	}
	return errors.Join(s.publish(temp, key), s.remove(temp))
}

// write makes a file of the body and syncs it.
func (s *Store) write(ctx context.Context, name string, body objectstore.Body) (err error) {
	f, err := s.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o640)
	if err != nil {
		return failed("creating "+name, err)
	}
	defer func() {
		if cerr := f.Close(); cerr != nil && err == nil {
			err = failed("closing "+name, cerr)
		}
	}()
	w := &writer{ctx: ctx, f: f}
	if _, err := io.Copy(w, body.Open()); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return failed("syncing "+name, err)
	}
	return nil
}

// writer ends with its context, and tells the file's errors from the body's.
type writer struct {
	ctx context.Context
	f   *os.File
}

func (w *writer) Write(p []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := w.f.Write(p)
	if err != nil {
		err = failed("writing "+w.f.Name(), err)
	}
	return n, err
}

// publishTries bounds how often a Delete may take the folder away again.
const publishTries = 20

// publish links a whole file to its key (OF1, OF2).
func (s *Store) publish(temp, key string) error {
	folder := path.Dir(key)
	for try := 1; ; try++ {
		if err := s.mkdir(folder); err != nil {
			return err
		}
		err := s.root.Link(temp, key)
		switch {
		case err == nil:
			return s.sync(folder)
		case errors.Is(err, fs.ErrExist):
			return s.taken(key)
		case errors.Is(err, fs.ErrNotExist) && try < publishTries:
			// A Delete has removed the folder, which was empty.
		default:
			return failed("linking "+key, err)
		}
	}
}

// taken is what Put says of a key that has an object. Its caller may take that
// object for its own, whose name may not be durable yet: the Put that made it may
// be under way, or may have failed at that (OF2).
func (s *Store) taken(key string) error {
	if err := s.sync(path.Dir(key)); err != nil {
		return err
	}
	return base.ErrConflict
}

// mkdir makes a folder and those above it, each durable.
func (s *Store) mkdir(folder string) error {
	if folder == "." {
		return nil
	}
	if info, err := s.root.Lstat(folder); err == nil {
		if info.IsDir() {
			return nil
		}
		return fmt.Errorf("%s is an object, not a folder: %w", folder, base.ErrConflict)
	}
	if err := s.mkdir(path.Dir(folder)); err != nil {
		return err
	}
	switch err := s.root.Mkdir(folder, 0o750); {
	case err == nil, errors.Is(err, fs.ErrExist):
		err := s.sync(path.Dir(folder))
		if err != nil {
			_ = s.root.Remove(folder) // if it is empty: the next try has to sync it
		}
		return err
	case errors.Is(err, fs.ErrNotExist):
		return nil // a Delete has removed the one above: the caller tries again
	default:
		return failed("making folder "+folder, err)
	}
}

func (s *Store) sync(folder string) error {
	f, err := s.root.Open(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed again, being empty
	}
	if err != nil {
		return failed("opening folder "+folder, err)
	}
	if err := errors.Join(s.syncFolder(f), f.Close()); err != nil {
		return failed("syncing folder "+folder, err)
	}
	return nil
}

// remove removes a file that may be absent.
func (s *Store) remove(name string) error {
	if err := s.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return failed("removing "+name, err)
	}
	return nil
}

// Get implements objectstore.Store.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := s.enter(ctx, key); err != nil {
		return nil, fmt.Errorf("getting object: %w", err)
	}
	r, err := s.get(key, offset, length)
	if err != nil {
		return nil, fmt.Errorf("getting object %s: %w", key, err)
	}
	return r, nil
}

func (s *Store) get(key string, offset, length int64) (_ io.ReadCloser, err error) {
	if err := objectstore.CheckRange(offset, length); err != nil {
		return nil, err
	}
	f, err := s.root.Open(key)
	if err != nil {
		return nil, absent("opening", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, failed("looking at "+key, err)
	}
	if !info.Mode().IsRegular() {
		return nil, base.ErrNotFound
	}
	n, err := objectstore.Length(key, info.Size(), offset, length)
	if err != nil {
		return nil, err
	}
	r := &reader{Reader: io.NewSectionReader(f, offset, n), f: f}
	return objectstore.Exactly(key, n, r), nil
}

// absent tells a missing file, or one whose folder is an object, from trouble.
func absent(doing string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return base.ErrNotFound
	}
	return failed(doing, err)
}

type reader struct {
	io.Reader
	f *os.File
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = failed("reading "+r.f.Name(), err)
	}
	return n, err
}

func (r *reader) Close() error { return r.f.Close() }

// Stat implements objectstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (objectstore.Object, error) {
	if err := s.enter(ctx, key); err != nil {
		return objectstore.Object{}, fmt.Errorf("looking at object: %w", err)
	}
	info, err := s.root.Lstat(key)
	switch {
	case err != nil:
		err = absent("looking", err)
	case !info.Mode().IsRegular():
		err = base.ErrNotFound
	default:
		return objectstore.Object{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil
	}
	return objectstore.Object{}, fmt.Errorf("looking at object %s: %w", key, err)
}

// Delete implements objectstore.Store.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	if err := s.enter(ctx, keys...); err != nil {
		return fmt.Errorf("deleting objects: %w", err)
	}
	folders := make(map[string]bool)
	for _, key := range keys {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("deleting objects: %w", err)
		}
		info, err := s.root.Lstat(key)
		if err == nil && info.IsDir() {
			continue // no object
		}
		if err == nil {
			err = s.root.Remove(key)
		}
		if err != nil {
			if err = absent("removing", err); errors.Is(err, base.ErrNotFound) {
				continue
			}
			return fmt.Errorf("deleting object %s: %w", key, err)
		}
		folders[path.Dir(key)] = true
	}
	for folder := range folders {
		if err := s.tidy(folder); err != nil {
			return fmt.Errorf("deleting objects: %w", err)
		}
	}
	return nil
}

// tidy makes removals in a folder durable, and removes folders that are empty.
func (s *Store) tidy(folder string) error {
	for folder != "." {
		if s.root.Remove(folder) != nil {
			break // not empty, or being filled
		}
		folder = path.Dir(folder)
	}
	return s.sync(folder)
}

// Sweep implements objectstore.Store. An unfinished upload does not know its key,
// so that a prefix of some keys only sweeps nothing away unless it is empty.
func (s *Store) Sweep(ctx context.Context, prefix string, before time.Time) (int, error) {
	if err := s.enter(ctx); err != nil {
		return 0, fmt.Errorf("sweeping uploads: %w", err)
	}
	if err := objectstore.CheckPrefix(prefix); err != nil {
		return 0, fmt.Errorf("sweeping uploads: %w", err)
	}
	entries, err := fs.ReadDir(s.root.FS(), uploads)
	if err != nil {
		if err = absent("listing "+uploads, err); errors.Is(err, base.ErrNotFound) {
			return 0, nil
		}
		return 0, fmt.Errorf("sweeping uploads: %w", err)
	}
	n := 0
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.ModTime().Before(before) {
			continue // it has just ended, or is young
		}
		if err := s.remove(path.Join(uploads, e.Name())); err != nil {
			return n, fmt.Errorf("sweeping uploads: %w", err)
		}
		n++
	}
	return n, nil
}

// hidden says of a file's name that no object has it.
func hidden(name string) bool { return strings.HasPrefix(name, ".") }
