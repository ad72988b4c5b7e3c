package mem

import (
	"fmt"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// store implements engine.Store.
type store struct {
	dir  string
	lock *os.File

	// current is what readers see; nil once the store is closed.
	current atomic.Pointer[root]
	// flushed is the root of the image that the manifest names (ME3).
	flushed   atomic.Pointer[root]
	lastFlush atomic.Int64 // duration of the last Flush in ns
	diskBytes atomic.Int64 // of the image that the manifest names

	// disk serialises Flush, Checkpoint and Close; nextImage is the number of
	// the next image to write, and is never used twice.
	disk      sync.Mutex
	nextImage uint64

	// mu serialises what changes current: the one writer, and Close. work holds
	// each family's tree as the next Write starts from it; these trees are
	// never read by anyone else.
	mu   sync.Mutex
	work map[engine.FamilyID]*tree

	manifest struct {
		mu      sync.Mutex
		durable *manifest
		// failed is set when it is not known any more what is durable; nothing
		// is written from then on.
		failed error
	}
}

func (s *store) root(doing string) (*root, error) {
	r := s.current.Load()
	if r == nil {
		return nil, fmt.Errorf("%s in store %s: %w", doing, s.dir, base.ErrClosed)
	}
	return r, nil
}

// Get implements engine.Reader.
func (s *store) Get(f engine.FamilyID, key []byte) ([]byte, bool, error) {
	r, err := s.root("reading")
	if err != nil {
		return nil, false, err
	}
	return r.get(f, key)
}

// MultiGet implements engine.Reader.
func (s *store) MultiGet(f engine.FamilyID, keys [][]byte) ([][]byte, error) {
	r, err := s.root("reading")
	if err != nil {
		return nil, err
	}
	return r.multiGet(f, keys)
}

// Scan implements engine.Reader.
func (s *store) Scan(f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	r, err := s.root("scanning")
	if err != nil {
		return engine.FailedIterator(err)
	}
	return r.scan(f, lo, hi, o)
}

// NewView implements engine.Store. Views stay readable after Close.
func (s *store) NewView() (engine.View, error) {
	r, err := s.root("taking a view")
	if err != nil {
		return nil, err
	}
	v := &view{}
	v.root.Store(r)
	return v, nil
}

// view is a published root; nil once it is closed.
type view struct{ root atomic.Pointer[root] }

func (v *view) get() (*root, error) {
	r := v.root.Load()
	if r == nil {
		return nil, fmt.Errorf("reading a view: %w", base.ErrClosed)
	}
	return r, nil
}

func (v *view) Get(f engine.FamilyID, key []byte) ([]byte, bool, error) {
	r, err := v.get()
	if err != nil {
		return nil, false, err
	}
	return r.get(f, key)
}

func (v *view) MultiGet(f engine.FamilyID, keys [][]byte) ([][]byte, error) {
	r, err := v.get()
	if err != nil {
		return nil, err
	}
	return r.multiGet(f, keys)
}

func (v *view) Scan(f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	r, err := v.get()
	if err != nil {
		return engine.FailedIterator(err)
	}
	return r.scan(f, lo, hi, o)
}

func (v *view) Close() { v.root.Store(nil) }

// DurableGet implements engine.Store.
func (s *store) DurableGet(key []byte) ([]byte, bool, error) {
	if _, err := s.root("reading durable metadata"); err != nil {
		return nil, false, err
	}
	return s.flushed.Load().get(engine.MetaFamily, key)
}

// Families implements engine.Store. The metadata family is among them. A closed
// store has none.
func (s *store) Families() map[engine.FamilyID]engine.FamilyOptions {
	out := make(map[engine.FamilyID]engine.FamilyOptions)
	if r := s.current.Load(); r != nil {
		for id, f := range r.families {
			out[id] = f.options
		}
	}
	return out
}

// EnsureFamily implements engine.Store.
func (s *store) EnsureFamily(f engine.FamilyID, o engine.FamilyOptions) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.root("creating a family")
	if err != nil {
		return err
	}
	if err := checkOptions(f, o); err != nil {
		return fmt.Errorf("creating a family: %w", err)
	}
	if fam := r.families[f]; fam != nil {
		if fam.options != o {
			return fmt.Errorf("creating family %d with options %v: it exists with %v: %w", f, o, fam.options, base.ErrConflict)
		}
		return nil
	}
	fam := &family{id: f, options: o, tree: newTree()}
	err = s.changeManifest(func(m *manifest) {
		m.births++
		fam.birth = m.births
		m.families[f] = fam
	})
	if err != nil {
		return fmt.Errorf("creating family %d: %w", f, err)
	}
	s.work[f] = newTree()
	next := &root{families: maps.Clone(r.families)}
	next.families[f] = fam
	s.current.Store(next)
	return nil
}

// DropFamily implements engine.Store.
func (s *store) DropFamily(f engine.FamilyID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.root("dropping a family")
	if err != nil {
		return err
	}
	if f == engine.MetaFamily {
		return fmt.Errorf("dropping the metadata family: %w", base.ErrInvalid)
	}
	if r.families[f] == nil {
		return nil
	}
	if err := s.changeManifest(func(m *manifest) { delete(m.families, f) }); err != nil {
		return fmt.Errorf("dropping family %d: %w", f, err)
	}
	delete(s.work, f)
	next := &root{families: maps.Clone(r.families)}
	delete(next.families, f)
	s.current.Store(next)
	return nil
}

// Compact implements engine.Store; there is nothing to compact.
func (s *store) Compact() error {
	_, err := s.root("compacting")
	return err
}

// Stats implements engine.Store.
func (s *store) Stats() engine.Stats {
	st := engine.Stats{
		Implementation: Name,
		DiskBytes:      uint64(s.diskBytes.Load()),
		LastFlush:      time.Duration(s.lastFlush.Load()),
		ByFamilyBytes:  make(map[engine.FamilyID]uint64),
	}
	if r := s.current.Load(); r != nil {
		for id, f := range r.families {
			st.Keys += uint64(f.tree.Len())
			st.MemtableBytes += f.bytes
			st.ByFamilyBytes[id] = f.bytes
		}
	}
	return st
}

// Close implements engine.Store. It waits for a Flush or Checkpoint that runs.
func (s *store) Close() error {
	s.disk.Lock()
	defer s.disk.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current.Swap(nil) == nil {
		return fmt.Errorf("closing store %s: %w", s.dir, base.ErrClosed)
	}
	s.work = nil
	// Closing the file gives the lock back.
	if err := s.lock.Close(); err != nil {
		return fmt.Errorf("closing store %s: %w", s.dir, err)
	}
	return nil
}
