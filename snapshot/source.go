package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

const (
	// keptPacks and maxKeptPack bound what a source keeps in memory. Packs and
	// Fetch go by the names of files, so that few packs are wanted at a time.
	keptPacks   = 4
	maxKeptPack = 16 << 20
)

// StoreSource gives the files of a manifest from where it says that they lie in a
// store. What it gives is as long as the file, or ends with an error (OS3); Fetch
// compares the content. A file without a place is base.ErrCorrupt, one whose
// object is gone base.ErrNotFound.
//
// A pack is read once and its files are given from memory, at most 64 MiB in all.
// A file that is opened again is read from the store again: what was in memory may
// have been wrong.
func StoreSource(store objectstore.Store, m *Manifest) Source {
	s := &storeSource{store: store, files: make(map[string]File, len(m.Files)), packs: map[string]*pack{}, given: map[string]bool{}}
	for _, f := range m.Files {
		s.files[f.Name] = f
		if f.Object == "" || !f.placed() {
			continue
		}
		p := s.packs[f.Object]
		if p == nil {
			p = &pack{key: f.Object, lo: f.Offset, hi: f.Offset, turn: make(chan struct{}, 1)}
			s.packs[f.Object] = p
		}
		p.lo, p.hi, p.files = min(p.lo, f.Offset), max(p.hi, f.Offset+f.Length), p.files+1
	}
	for key, p := range s.packs {
		if p.files == 1 || p.hi-p.lo > maxKeptPack {
			delete(s.packs, key)
		}
	}
	return s
}

type storeSource struct {
	store objectstore.Store
	files map[string]File
	packs map[string]*pack

	mu    sync.Mutex
	given map[string]bool // files that were given from memory
	kept  []*pack         // that have bytes, the one used last at the end
}

// pack is an object in which several files of the manifest lie, between lo and hi.
type pack struct {
	key    string
	lo, hi int64
	files  int
	// turn is held by who reads the object.
	turn chan struct{}
	// bytes are guarded by the source's mutex; nil if they are not in memory.
	bytes []byte
}

// Open implements Source.
func (s *storeSource) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	f, ok := s.files[name]
	switch {
	case !ok:
		return nil, fmt.Errorf("opening %s: the manifest does not know it: %w", name, base.ErrNotFound)
	case offset < 0 || offset > f.Size:
		return nil, fmt.Errorf("opening %s: %w", name, base.Invalid("offset", fmt.Sprintf("0 to %d", f.Size)))
	case !f.placed():
		return nil, fmt.Errorf("opening %s: it has no place in an object store: %w", name, base.ErrCorrupt)
	case offset == f.Size:
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	r, err := s.open(ctx, &f, offset)
	if err != nil {
		return nil, fmt.Errorf("opening %s in object %s: %w", name, f.Object, err)
	}
	return r, nil
}

func (s *storeSource) open(ctx context.Context, f *File, offset int64) (io.ReadCloser, error) {
	p := s.packs[f.Object]
	if p == nil || !s.give(f.Name) {
		return s.store.Get(ctx, f.Object, f.Offset+offset, f.Length-offset)
	}
	all, err := s.read(ctx, p)
	if err != nil {
		return nil, err
	}
	at := f.Offset - p.lo
	return io.NopCloser(bytes.NewReader(all[at+offset : at+f.Length])), nil
}

// give says whether a file may be given from memory: once.
func (s *storeSource) give(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.given[name]
	s.given[name] = true
	return !before
}

// read returns the bytes of a pack; of those who want them at once, one asks the
// store.
func (s *storeSource) read(ctx context.Context, p *pack) ([]byte, error) {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if b := s.use(p, nil); b != nil {
		return b, nil
	}
	r, err := s.store.Get(ctx, p.key, p.lo, p.hi-p.lo)
	if err != nil {
		return nil, err
	}
	// A body that stalls is closed when the context ends: Read then returns.
	stop := context.AfterFunc(ctx, func() { r.Close() })
	defer stop()
	b := make([]byte, p.hi-p.lo)
	_, err = io.ReadFull(r, b)
	if err == nil {
		var extra [1]byte
		if _, err = r.Read(extra[:]); errors.Is(err, io.EOF) {
			err = nil // the whole is what was asked for (OS3)
		}
	}
	if err = errors.Join(err, r.Close(), ctx.Err()); err != nil {
		return nil, err
	}
	return s.use(p, b), nil
}

// use notes that a pack is used, with the bytes that were read for it, and forgets
// those not used for longest.
func (s *storeSource) use(p *pack, read []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if read != nil {
		p.bytes = read
	}
	if p.bytes == nil {
		return nil
	}
	s.kept = append(slices.DeleteFunc(s.kept, func(q *pack) bool { return q == p }), p)
	if len(s.kept) > keptPacks {
		s.kept[0].bytes = nil
		s.kept = slices.Delete(s.kept, 0, 1)
	}
	return p.bytes
}
