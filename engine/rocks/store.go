package rocks

// #include <stdlib.h>
// #include "native.h"
// #cgo noescape ks_write
// #cgo nocallback ks_write
import "C"

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/internal/durable"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// Store is one RocksDB database. It implements engine.Store.
type Store struct {
	driver *Driver
	dir    string
	abs    string // the driver's claim; empty in Verify
	c      *C.ks_store
	gate   *gate
	// closing is closed when Close begins: a write waits for space no longer.
	closing chan struct{}
	// families are the live ones; replaced by EnsureFamily and DropFamily, which
	// belong to the one writer.
	families atomic.Pointer[families]

	mu struct {
		sync.Mutex
		closed bool
		// newest is the number of the newest view ever made.
		newest uint64
		views  map[*view]struct{}
		// dropped families are freed when no view and no iterator can read them.
		dropped []*family
	}
}

var _ engine.Store = (*Store)(nil)

// enter fails with base.ErrClosed once the store is closing; else call
// s.gate.leave.
func (s *Store) enter(doing string) error {
	if !s.gate.enter() {
		return fmt.Errorf("%s: store %s: %w", doing, s.dir, base.ErrClosed)
	}
	return nil
}

// EnsureFamily implements engine.Store. It fails with base.ErrInvalid for bad
// options and base.ErrConflict if the family exists with other options.
func (s *Store) EnsureFamily(id engine.FamilyID, o engine.FamilyOptions) error {
	if err := s.enter("ensuring family"); err != nil {
		return err
	}
	defer s.gate.leave()
	if err := checkOptions(id, o); err != nil {
		return fmt.Errorf("ensuring family: %w", err)
	}
	fs := *s.families.Load()
	if f := fs[id]; f != nil {
		if f.options != o {
			return fmt.Errorf("ensuring family %d with options %+v: it has %+v: %w", id, o, f.options, base.ErrConflict)
		}
		return nil
	}
	native, err := s.driver.nativeOptions(id, o)
	if err != nil {
		return fmt.Errorf("ensuring family %d: %w", id, err)
	}
	name := C.CString(familyName(id, o))
	defer C.free(unsafe.Pointer(name))
	var ref *C.ks_family
	create := func() error {
		// Not even tried where it could meet the end of the disk: RocksDB with its
		// assertions, which is Debian's, aborts the process when the MANIFEST does.
		if err := s.room(familyRoom); err != nil {
			return err
		}
		return take(C.ks_create_family(s.c, &native, name, &ref))
	}
	if err := s.waitForSpace(create); err != nil {
		return fmt.Errorf("creating family %d: %w", id, err)
	}
	failpoint.Hit("rocks.create-family.end")
	next := fs.with(newFamily(id, o, ref))
	s.families.Store(&next)
	return nil
}

// Families implements engine.Store. A closed store has none.
func (s *Store) Families() map[engine.FamilyID]engine.FamilyOptions {
	if !s.gate.enter() {
		return nil
	}
	defer s.gate.leave()
	m := make(map[engine.FamilyID]engine.FamilyOptions)
	for id, f := range *s.families.Load() {
		m[id] = f.options
	}
	return m
}

// DropFamily implements engine.Store. The metadata family cannot be dropped.
// Views and iterators that are open go on reading the family.
func (s *Store) DropFamily(id engine.FamilyID) error {
	if err := s.enter("dropping family"); err != nil {
		return err
	}
	defer s.gate.leave()
	if id == engine.MetaFamily {
		return fmt.Errorf("dropping the metadata family: %w", base.ErrInvalid)
	}
	fs := *s.families.Load()
	f := fs[id]
	if f == nil {
		return nil
	}
	if err := s.orReopen(take(C.ks_drop_family(s.c, C.uint32_t(id)))); err != nil {
		return fmt.Errorf("dropping family %d: %w", id, err)
	}
	next := fs.without(id)
	s.families.Store(&next)
	s.retire(f)
	return nil
}

// retire keeps a family that is not among the families any more for those who
// still read it. The caller is inside the store's gate.
func (s *Store) retire(f *family) {
	s.mu.Lock()
	f.droppedAt = s.mu.newest
	s.mu.dropped = append(s.mu.dropped, f)
	s.mu.Unlock()
	s.reap()
}

// reap frees dropped families that nothing can read any more. The caller is
// inside the store's gate.
func (s *Store) reap() {
	s.mu.Lock()
	oldest := s.mu.newest + 1
	for v := range s.mu.views {
		oldest = min(oldest, v.number)
	}
	var free, keep []*family
	for _, f := range s.mu.dropped {
		if f.droppedAt < oldest && len(f.iters) == 0 {
			free = append(free, f)
		} else {
			keep = append(keep, f)
		}
	}
	s.mu.dropped = keep
	s.mu.Unlock()
	for _, f := range free {
		f.gate.shut() // a read of the store that began before the drop
		// Such a read may have left an iterator behind.
		s.mu.Lock()
		iters := f.iters
		f.iters = nil
		s.mu.Unlock()
		for it := range iters {
			C.ks_iter_free(it.c)
		}
		C.ks_family_release(f.ref)
	}
}

// reapDropped reaps if there is something to reap. The caller is inside no
// gate of a family.
func (s *Store) reapDropped() {
	s.mu.Lock()
	drops := len(s.mu.dropped) > 0
	s.mu.Unlock()
	if drops && s.gate.enter() {
		s.reap()
		s.gate.leave()
	}
}

// Write implements engine.Store. Nothing is applied if it fails with
// base.ErrNotFound (no such family), base.ErrInvalid, or base.ErrCorrupt or
// base.ErrFormatVersion for a merge operand that the family's kind does not
// take (RO5). While a background error stands, it is returned and nothing is
// applied; but on a full disk Write waits until there is space, or until Close
// (RO8).
func (s *Store) Write(b *engine.Batch) error {
	if err := s.enter("writing batch"); err != nil {
		return err
	}
	defer s.gate.leave()
	p := b.Bytes()
	if len(p) == 0 {
		return nil
	}
	write := func() error { return take(C.ks_write(s.c, chars(p), C.size_t(len(p)))) }
	if err := s.waitForSpace(write); err != nil {
		return fmt.Errorf("writing batch of %d operations: %w", b.Len(), err)
	}
	return nil
}

// Flush implements engine.Store; it names all families (RO1).
func (s *Store) Flush() error {
	if err := s.enter("flushing"); err != nil {
		return err
	}
	defer s.gate.leave()
	if err := failpoint.Err("rocks.flush.begin"); err != nil {
		return fmt.Errorf("flushing store %s: %w", s.dir, err)
	}
	if err := s.orReopen(take(C.ks_flush(s.c))); err != nil {
		return fmt.Errorf("flushing store %s: %w", s.dir, err)
	}
	failpoint.Hit("rocks.flush.end")
	return nil
}

// BeginCheckpoint implements engine.Store: hard links are quick, so the whole
// checkpoint is made at once.
func (s *Store) BeginCheckpoint(dir string) (func() error, error) {
	if err := s.Checkpoint(dir); err != nil {
		return nil, err
	}
	return func() error { return nil }, nil
}

// Checkpoint implements engine.Store. SST files are hard-linked, so dir must be
// on the store's volume.
func (s *Store) Checkpoint(dir string) error {
	if err := s.enter("making checkpoint"); err != nil {
		return err
	}
	defer s.gate.leave()
	if err := s.checkpoint(dir); err != nil {
		return fmt.Errorf("making checkpoint %s of store %s: %w", dir, s.dir, err)
	}
	return nil
}

// makingSuffix ends the name of a checkpoint that is not complete.
const makingSuffix = ".making"

func (s *Store) checkpoint(dir string) error {
	if _, err := os.Lstat(dir); err == nil {
		return fmt.Errorf("it exists: %w", base.ErrConflict)
	} else if !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %w", base.ErrDiskFailed, err)
	}
	parent := filepath.Dir(dir)
	if err := durable.Mkdir(parent); err != nil {
		return err
	}
	if err := failpoint.Err("rocks.checkpoint.begin"); err != nil {
		return err
	}
	making := dir + makingSuffix
	// RocksDB itself works in a directory with a further suffix.
	for _, left := range []string{making, making + ".tmp"} {
		if err := os.RemoveAll(left); err != nil {
			return fmt.Errorf("removing what a crash left: %w: %w", base.ErrDiskFailed, err)
		}
	}
	if err := s.makeCheckpoint(making); err != nil {
		return errors.Join(err, os.RemoveAll(making))
	}
	failpoint.Hit("rocks.checkpoint.before-rename")
	if err := os.Rename(making, dir); err != nil {
		return errors.Join(fmt.Errorf("%w: %w", base.ErrDiskFailed, err), os.RemoveAll(making))
	}
	return durable.SyncDir(parent)
}

func (s *Store) makeCheckpoint(dir string) error {
	cdir := C.CString(dir)
	defer C.free(unsafe.Pointer(cdir))
	if err := s.orReopen(take(C.ks_checkpoint(s.c, cdir))); err != nil {
		return err
	}
	failpoint.Hit("rocks.checkpoint.files-linked")
	return engine.WriteMarker(dir, marker)
}

// Compact implements engine.Store. Close ends it early with base.ErrClosed.
func (s *Store) Compact() error {
	if err := s.enter("compacting"); err != nil {
		return err
	}
	defer s.gate.leave()
	if err := s.orReopen(take(C.ks_compact(s.c))); err != nil {
		return fmt.Errorf("compacting store %s: %w", s.dir, err)
	}
	return nil
}

// SetUse switches the kind of memtable of a family from its next memtable on.
// The family's options stay what they are.
func (s *Store) SetUse(id engine.FamilyID, use engine.Use) error {
	if _, ok := useWords[use]; !ok {
		return base.Invalid("use", "scanned or point")
	}
	return s.inFamily(id, "switching memtable", func(f *family) error {
		C.ks_family_set_use(f.ref, C.uint8_t(use))
		return nil
	})
}

// SetFilter switches the filters of a family from its next SST file on.
func (s *Store) SetFilter(id engine.FamilyID, mode FilterMode) error {
	return s.inFamily(id, "switching filter", func(f *family) error {
		if mode > FilterPrefix || mode == FilterPrefix && f.options.GroupWidth == 0 {
			return base.Invalid("mode", "none, whole key, or prefix where the family has one")
		}
		C.ks_family_set_filter(f.ref, C.uint8_t(mode))
		return nil
	})
}

func (s *Store) inFamily(id engine.FamilyID, doing string, fn func(*family) error) error {
	f, err := s.enterFamily(*s.families.Load(), id)
	if err == nil {
		defer f.gate.leave()
		err = fn(f)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// Stats implements engine.Store. A closed store has no figures.
func (s *Store) Stats() engine.Stats {
	st := engine.Stats{Implementation: Name}
	if !s.gate.enter() {
		return st
	}
	defer s.gate.leave()
	st.ByFamilyBytes = make(map[engine.FamilyID]uint64)
	for id := range *s.families.Load() {
		_ = s.inFamily(id, "reading figures", func(f *family) error {
			var c C.ks_family_stats
			if err := take(C.ks_stats(f.ref, &c)); err != nil {
				return err
			}
			st.Keys += uint64(c.keys)
			st.DiskBytes += uint64(c.disk_bytes)
			st.MemtableBytes += uint64(c.memtable_bytes)
			st.PendingCompact += uint64(c.pending_compaction)
			st.Level0Files += int(c.level0_files)
			st.WriteStalled = st.WriteStalled || c.write_stopped != 0 || c.delayed_rate != 0
			st.ByFamilyBytes[id] = uint64(c.disk_bytes)
			return nil
		}) // a family that was dropped just now has no figures
	}
	st.CacheBytes = uint64(C.ks_driver_cache_usage(s.driver.c))
	st.LastFlush = time.Duration(C.ks_last_flush_micros(s.c)) * time.Microsecond
	if err := s.failed(); err != nil {
		st.Failed = err.Error()
		st.Reopen = errors.Is(err, syscall.ENOSPC) && s.roomToFlush() == nil
	}
	st.NativeObjects = s.nativeObjects()
	return st
}

func (s *Store) nativeObjects() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := int64(1 + len(s.mu.views))
	for _, f := range *s.families.Load() {
		n += int64(2 + len(f.iters))
	}
	for _, f := range s.mu.dropped {
		n += int64(2 + len(f.iters))
	}
	return n
}
