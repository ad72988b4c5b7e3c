package rocks

// #cgo CFLAGS: -std=c11
// #cgo CXXFLAGS: -std=c++17 -O2 -fno-rtti -Wall
// #cgo LDFLAGS: -lrocksdb -lstdc++ -lzstd -llz4 -lz -lsnappy -ldl -lm -pthread
// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// Name is the name of the implementation, in markers and statistics.
const Name = "rocks"

// layoutVersion is the version of a store's directory.
const layoutVersion = 1

var marker = engine.Marker{Engine: Name, Layout: layoutVersion}

// FilterMode says what the filters of a family's SST files hold. The numbers
// are shared with the native code.
type FilterMode uint8

const (
	// FilterNone: no filters.
	FilterNone FilterMode = 0
	// FilterWholeKey: whole keys, and prefixes for scans of one key.
	FilterWholeKey FilterMode = 1
	// FilterPrefix: prefixes only; smaller, but blind to what is below a key.
	FilterPrefix FilterMode = 2
)

// Options tune a Driver. The zero value means the documented defaults.
type Options struct {
	// MemoryBytes is the block cache of all stores, memtables included; default
	// 1 GiB, at least 1 MiB.
	MemoryBytes int64
	// WriteBufferShare is the part of MemoryBytes that memtables may take before
	// stores that are written to flush; default 0.4, in (0, 1).
	WriteBufferShare float64
	// FamilyBufferBytes is the size at which one family's memtable makes its
	// store flush; default 8 MiB, at least 64 KiB.
	FamilyBufferBytes int64
	// BufferOf overrides FamilyBufferBytes for single families; 0 keeps it.
	BufferOf func(engine.FamilyID) int64
	// FilterOf overrides the filters of single families; default FilterWholeKey.
	FilterOf func(engine.FamilyID, engine.FamilyOptions) FilterMode
	// MaxOpenFiles bounds the open SST files of one store; default 256.
	MaxOpenFiles int
	// BackgroundJobs bounds the flushes and compactions at one time; default 2.
	BackgroundJobs int
	// MaxSuccessiveMerges bounds the operands of one key in a memtable: one more
	// is folded at the write, so that reading a hot key stays cheap. Default 64
	// (DESIGN.md has the figures); -1 is no bound.
	MaxSuccessiveMerges int
}

// EnsureDefaults fills what is zero.
func (o *Options) EnsureDefaults() {
	if o.MemoryBytes == 0 {
		o.MemoryBytes = 1 << 30
	}
	if o.WriteBufferShare == 0 {
		o.WriteBufferShare = 0.4
	}
	if o.FamilyBufferBytes == 0 {
		o.FamilyBufferBytes = 8 << 20
	}
	if o.MaxOpenFiles == 0 {
		o.MaxOpenFiles = 256
	}
	if o.BackgroundJobs == 0 {
		o.BackgroundJobs = 2
	}
	if o.MaxSuccessiveMerges == 0 {
		o.MaxSuccessiveMerges = 64
	}
}

// Validate returns all problems of filled options.
func (o *Options) Validate() error {
	var problems []error
	check := func(ok bool, field, hint string) {
		if !ok {
			problems = append(problems, base.Invalid(field, hint))
		}
	}
	check(o.MemoryBytes >= 1<<20, "MemoryBytes", "at least 1 MiB")
	check(o.WriteBufferShare > 0 && o.WriteBufferShare < 1, "WriteBufferShare", "between 0 and 1")
	check(o.FamilyBufferBytes >= minBufferBytes, "FamilyBufferBytes", "at least 64 KiB")
	check(o.MaxOpenFiles >= 16, "MaxOpenFiles", "at least 16")
	check(o.BackgroundJobs >= 1 && o.BackgroundJobs <= 64, "BackgroundJobs", "1 to 64")
	check(o.MaxSuccessiveMerges >= -1 && o.MaxSuccessiveMerges < 1<<20, "MaxSuccessiveMerges", "-1 or more, below 1048576")
	return errors.Join(problems...)
}

const minBufferBytes = 64 << 10

// Driver opens RocksDB stores that share one block cache and one write-buffer
// budget. It implements engine.Driver.
type Driver struct {
	options Options
	c       *C.ks_driver

	mu struct {
		sync.Mutex
		closed bool
		// inUse are the directories of open stores and running verifications.
		inUse map[string]bool
	}
}

var _ engine.Driver = (*Driver)(nil)

// NewDriver returns a driver; it fails with base.ErrInvalid for bad options.
func NewDriver(o Options) (*Driver, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("making rocks driver: %w", err)
	}
	c := C.ks_driver_options{
		cache_bytes:           C.size_t(o.MemoryBytes),
		write_buffer_bytes:    C.size_t(float64(o.MemoryBytes) * o.WriteBufferShare),
		family_buffer_bytes:   C.size_t(o.FamilyBufferBytes),
		max_open_files:        C.int(o.MaxOpenFiles),
		background_jobs:       C.int(o.BackgroundJobs),
		max_successive_merges: C.int(max(o.MaxSuccessiveMerges, 0)),
	}
	d := &Driver{options: o, c: C.ks_driver_new(&c)}
	d.mu.inUse = make(map[string]bool)
	return d, nil
}

// LiveObjects is the number of native objects of the process that are not
// freed: drivers, stores, families, snapshots, iterators. For leak tests.
func LiveObjects() int64 { return int64(C.ks_live_objects()) }

// Name is "rocks".
func (d *Driver) Name() string { return Name }

// MemtableBytes is what the memtables of all stores take now.
func (d *Driver) MemtableBytes() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return 0
	}
	return uint64(C.ks_driver_memtable_usage(d.c))
}

// claim reserves a directory, by its absolute path.
func (d *Driver) claim(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("resolving %s: %w: %w", dir, base.ErrInvalid, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return "", fmt.Errorf("rocks driver: %w", base.ErrClosed)
	}
	if d.mu.inUse[abs] {
		return "", fmt.Errorf("store %s is in use: %w", dir, base.ErrConflict)
	}
	d.mu.inUse[abs] = true
	return abs, nil
}

func (d *Driver) release(abs string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.mu.inUse, abs)
}

// Open opens or creates the store in dir. It fails with base.ErrIdentity for a
// directory that is not a rocks store's, base.ErrFormatVersion for one of
// another version, base.ErrConflict if the store is open already.
func (d *Driver) Open(dir string) (engine.Store, error) {
	abs, err := d.claim(dir)
	if err != nil {
		return nil, fmt.Errorf("opening store: %w", err)
	}
	s, err := d.open(dir, abs)
	if err != nil {
		d.release(abs)
		return nil, fmt.Errorf("opening store %s: %w", dir, err)
	}
	return s, nil
}

func (d *Driver) open(dir, abs string) (*Store, error) {
	if err := engine.ClaimDirectory(dir, marker); err != nil {
		return nil, err
	}
	fresh, err := isFresh(dir)
	if err != nil {
		return nil, err
	}
	names := []string{metaName}
	if !fresh {
		if names, err = listFamilies(dir); err != nil {
			return nil, err
		}
	}
	return d.openFamilies(dir, abs, names, false)
}

// Verify reads every file of a closed store and checks its checksums. Damage
// is base.ErrCorrupt, with the file's name.
func (d *Driver) Verify(dir string) (err error) {
	abs, err := d.claim(dir)
	if err != nil {
		return fmt.Errorf("verifying store: %w", err)
	}
	defer d.release(abs)
	defer func() {
		if err != nil {
			err = fmt.Errorf("verifying store %s: %w", dir, err)
		}
	}()
	if err := engine.CheckDirectory(dir, marker); err != nil {
		return err
	}
	fresh, err := isFresh(dir)
	if err != nil || fresh {
		return err
	}
	names, err := listFamilies(dir)
	if err != nil {
		return err
	}
	s, err := d.openFamilies(dir, "", names, true)
	if err != nil {
		return err
	}
	return errors.Join(take(C.ks_verify(s.c)), s.Close())
}

// Close frees the cache. It fails with base.ErrConflict while stores are open.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil
	}
	if n := len(d.mu.inUse); n > 0 {
		return fmt.Errorf("closing rocks driver with %d open stores: %w", n, base.ErrConflict)
	}
	d.mu.closed = true
	C.ks_driver_free(d.c)
	return nil
}
