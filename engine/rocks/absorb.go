package rocks

// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

var _ engine.Absorber = (*Store)(nil)

// absorbingDir, in the store's directory, has links to files that are about to be
// absorbed. RocksDB looks at no directory.
const absorbingDir = "absorbing"

// Clip implements engine.Absorber: whole files are dropped, the rest is deleted by
// range, and then compacted until neither it, nor a range tombstone, nor a file of
// level 0 is left (RO10).
func (s *Store) Clip(ctx context.Context, ids []engine.FamilyID, lo, hi []byte) error {
	if err := s.clip(ctx, ids, lo, hi); err != nil {
		return fmt.Errorf("clipping store %s: %w", s.dir, err)
	}
	return nil
}

func (s *Store) clip(ctx context.Context, ids []engine.FamilyID, lo, hi []byte) error {
	if err := s.enter("clipping"); err != nil {
		return err
	}
	defer s.gate.leave()
	if err := s.noViews(); err != nil {
		return err
	}
	defer s.cancelWith(ctx)()
	// nil and empty are not the same for the end.
	var end *C.char
	if hi != nil {
		end = (*C.char)(C.CBytes(append(hi[:len(hi):len(hi)], 0)))
		defer C.free(unsafe.Pointer(end))
	}
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.orReopen(take(C.ks_clip(s.c, C.uint32_t(id), chars(lo), C.size_t(len(lo)), end, C.size_t(len(hi))))); err != nil {
			return fmt.Errorf("family %d: %w", id, err)
		}
		failpoint.Hit("rocks.clip.family")
	}
	return nil
}

// noViews fails while there is a view: a compaction keeps what it may read.
func (s *Store) noViews() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.mu.views); n > 0 {
		return fmt.Errorf("%d views are open: %w", n, base.ErrConflict)
	}
	return nil
}

// cancelWith lets native work end early with ctx until the function that it
// returns is called.
func (s *Store) cancelWith(ctx context.Context) (done func()) {
	stop := context.AfterFunc(ctx, func() {
		if s.gate.enter() {
			C.ks_set_cancelled(s.c, 1)
			s.gate.leave()
		}
	})
	return func() {
		stop()
		C.ks_set_cancelled(s.c, 0)
	}
}

// Absorb implements engine.Absorber by hard links (RO10): each family is made anew
// of its own files and those of the others. The others must be on the store's
// volume, else it fails with base.ErrUnsupported.
func (s *Store) Absorb(ctx context.Context, ids []engine.FamilyID, others []engine.Store) error {
	if err := s.absorb(ctx, ids, others); err != nil {
		return fmt.Errorf("absorbing %d stores into store %s: %w", len(others), s.dir, err)
	}
	return nil
}

func (s *Store) absorb(ctx context.Context, ids []engine.FamilyID, others []engine.Store) error {
	sources := make([]*Store, len(others))
	for i, other := range others {
		o, ok := other.(*Store)
		if !ok {
			return fmt.Errorf("source %d is no store of this package: %w", i, base.ErrUnsupported)
		}
		if o == s {
			return fmt.Errorf("source %d is the store itself: %w", i, base.ErrInvalid)
		}
		sources[i] = o
	}
	for _, o := range append(sources, s) {
		if err := o.enter("absorbing"); err != nil {
			return err
		}
		defer o.gate.leave()
	}
	if err := s.absorbable(ids, sources); err != nil {
		return err
	}
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.absorbFamily(id, sources); err != nil {
			return fmt.Errorf("family %d: %w", id, err)
		}
		failpoint.Hit("rocks.absorb.family")
	}
	return nil
}

// absorbable looks whether the families are the same everywhere, before anything
// is changed.
func (s *Store) absorbable(ids []engine.FamilyID, sources []*Store) error {
	own := *s.families.Load()
	for _, id := range ids {
		f := own[id]
		if f == nil {
			return fmt.Errorf("family %d: %w", id, base.ErrNotFound)
		}
		if id == engine.MetaFamily {
			return fmt.Errorf("the metadata family is not absorbed: %w", base.ErrInvalid)
		}
		for i, o := range sources {
			if other := (*o.families.Load())[id]; other != nil && other.options != f.options {
				return fmt.Errorf("family %d has options %+v, and %+v in source %d: %w", id, f.options, other.options, i, base.ErrConflict)
			}
		}
	}
	return s.room(familyRoom)
}

// absorbFamily makes one family anew. The caller is inside the gates of all stores.
func (s *Store) absorbFamily(id engine.FamilyID, sources []*Store) (err error) {
	old := (*s.families.Load())[id]
	native, err := s.driver.nativeOptions(id, old.options)
	if err != nil {
		return err
	}
	dir := filepath.Join(s.dir, absorbingDir)
	if err := os.RemoveAll(dir); err != nil { // what a crash left
		return fmt.Errorf("%w: %w", base.ErrDiskFailed, err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("%w: %w", base.ErrDiskFailed, err)
	}
	defer func() {
		if rerr := os.RemoveAll(dir); err == nil && rerr != nil {
			err = fmt.Errorf("%w: %w", base.ErrDiskFailed, rerr)
		}
	}()
	cname, cdir := C.CString(familyName(id, old.options)), C.CString(dir)
	defer C.free(unsafe.Pointer(cname))
	defer C.free(unsafe.Pointer(cdir))
	stores := make([]*C.ks_store, len(sources)+1) // never empty: its first element is asked for
	for i, o := range sources {
		stores[i] = o.c
	}
	var ref *C.ks_family
	var dropped C.int
	failed := s.orReopen(take(C.ks_absorb(s.c, &native, cname, &stores[0], C.size_t(len(sources)), cdir, &dropped, &ref)))
	if dropped != 0 {
		s.replace(old, ref)
	}
	return failed
}

// replace puts what was made in a family's place, or nothing if that failed.
func (s *Store) replace(old *family, ref *C.ks_family) {
	next := s.families.Load().without(old.id)
	if ref != nil {
		next = next.with(newFamily(old.id, old.options, ref))
	}
	s.families.Store(&next)
	s.retire(old)
}
