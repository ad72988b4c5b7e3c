package rocks

// #include "native.h"
import "C"

import (
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// view is a RocksDB snapshot with the families of its instant.
type view struct {
	store    *Store
	c        *C.ks_snapshot
	families families
	number   uint64
	gate     *gate // entered by reads, shut by Close
}

// NewView implements engine.Store.
func (s *Store) NewView() (engine.View, error) {
	if err := s.enter("making view"); err != nil {
		return nil, err
	}
	defer s.gate.leave()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.newest++
	v := &view{store: s, families: *s.families.Load(), number: s.mu.newest, gate: newGate()}
	v.c = C.ks_snapshot_new(s.c)
	s.mu.views[v] = struct{}{}
	return v, nil
}

// Close implements engine.View. A second Close does nothing. Iterators of the
// view stay usable.
func (v *view) Close() {
	s := v.store
	if !s.gate.enter() {
		return // the store's Close frees the snapshot
	}
	defer s.gate.leave()
	s.mu.Lock()
	_, open := s.mu.views[v]
	delete(s.mu.views, v)
	s.mu.Unlock()
	if !open {
		return
	}
	v.gate.shut()
	C.ks_snapshot_release(v.c)
	s.reapDropped()
}

func (v *view) enter() error {
	if !v.gate.enter() {
		return fmt.Errorf("reading view of store %s: %w", v.store.dir, base.ErrClosed)
	}
	return nil
}

// Get implements engine.Reader.
func (v *view) Get(id engine.FamilyID, key []byte) ([]byte, bool, error) {
	if err := v.enter(); err != nil {
		return nil, false, err
	}
	defer v.gate.leave()
	return v.store.get(v.families, id, v.c, key, false)
}

// MultiGet implements engine.Reader.
func (v *view) MultiGet(id engine.FamilyID, keys [][]byte) ([][]byte, error) {
	if err := v.enter(); err != nil {
		return nil, err
	}
	defer v.gate.leave()
	return v.store.multiGet(v.families, id, v.c, keys)
}

// Scan implements engine.Reader.
func (v *view) Scan(id engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	if err := v.enter(); err != nil {
		return engine.FailedIterator(err)
	}
	defer v.gate.leave()
	return v.store.scan(v.families, id, v.c, lo, hi, o)
}
