package rocks

// #include "native.h"
// #cgo noescape ks_scan
// #cgo nocallback ks_scan
// #cgo noescape ks_iter_fill
// #cgo nocallback ks_iter_fill
import "C"

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/engine"
)

// A scan fetches blocks of entries, small at first and doubling.
const (
	firstBlockBytes = 8 << 10
	maxBlockBytes   = 256 << 10
)

// iterator walks a scan block by block. It belongs to one goroutine; only the
// store's Close touches it from another, behind the family's gate.
type iterator struct {
	store  *Store
	family *family
	// c is the native iterator, nil when the scan is over; it is in
	// family.iters while it is not nil.
	c          *C.ks_iter
	buf        *[]byte
	block      []byte // entries not yet returned
	key, value []byte
	keysOnly   bool
	left       int // entries that may still be fetched
	err        error
	closed     bool
}

// Scan implements engine.Reader.
func (s *Store) Scan(id engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	return s.scan(*s.families.Load(), id, nil, lo, hi, o)
}

func (s *Store) scan(fs families, id engine.FamilyID, at *C.ks_snapshot, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	f, err := s.enterFamily(fs, id)
	if err != nil {
		return engine.FailedIterator(fmt.Errorf("scanning: %w", err))
	}
	defer f.gate.leave()
	it := &iterator{store: s, family: f, keysOnly: o.KeysOnly, left: math.MaxInt}
	if hi != nil && bytes.Compare(lo, hi) >= 0 {
		return it
	}
	if o.Limit > 0 {
		it.left = o.Limit
	}
	flags := C.int(0)
	if o.Reverse {
		flags |= C.KS_SCAN_REVERSE
	}
	if o.KeysOnly {
		flags |= C.KS_SCAN_KEYS_ONLY
	}
	if hi != nil {
		flags |= C.KS_SCAN_HAS_HI
	}
	it.buf = scratch.Get().(*[]byte)
	it.resize(firstBlockBytes)
	var b C.ks_block
	var c *C.ks_iter
	st := C.ks_scan(f.ref, at, chars(lo), C.size_t(len(lo)), chars(hi), C.size_t(len(hi)), flags,
		chars(*it.buf), C.size_t(len(*it.buf)), C.size_t(it.left), &b, &c)
	if err := take(st); err != nil {
		it.err = fmt.Errorf("scanning family %d: %w", id, err)
		return it
	}
	it.take(b)
	if c == nil {
		return it
	}
	it.c = c
	s.mu.Lock()
	f.iters[it] = struct{}{}
	s.mu.Unlock()
	if it.left == 0 {
		it.free()
	}
	return it
}

func (it *iterator) resize(size int) {
	if cap(*it.buf) < size {
		*it.buf = make([]byte, size)
	}
	*it.buf = (*it.buf)[:size]
}

func (it *iterator) take(b C.ks_block) {
	it.block = (*it.buf)[:b.used]
	it.left -= int(b.count)
}

// free gives the native iterator back. The caller is inside the family's gate,
// and calls reapDropped after it has left it.
func (it *iterator) free() {
	it.store.mu.Lock()
	delete(it.family.iters, it)
	it.store.mu.Unlock()
	C.ks_iter_free(it.c)
	it.c = nil
}

// fill fetches the next block; afterwards it.c is nil if the scan is over.
func (it *iterator) fill() error {
	if !it.family.gate.enter() {
		it.c = nil // freed by whoever shut the gate
		_, err := it.store.enterFamily(nil, it.family.id)
		return err
	}
	err := it.fillInside(min(2*len(*it.buf), maxBlockBytes))
	if err != nil || it.left == 0 {
		if it.c != nil {
			it.free()
		}
	}
	it.family.gate.leave()
	if it.c == nil {
		it.store.reapDropped()
	}
	return err
}

func (it *iterator) fillInside(size int) error {
	for {
		it.resize(size)
		var b C.ks_block
		var done C.int
		st := C.ks_iter_fill(it.c, chars(*it.buf), C.size_t(len(*it.buf)), C.size_t(it.left), &b, &done)
		if err := take(st); err != nil {
			return err
		}
		if b.need > 0 {
			size = int(b.need)
			continue
		}
		it.take(b)
		if done != 0 {
			it.free()
		}
		return nil
	}
}

// Next implements engine.Iterator.
func (it *iterator) Next() bool {
	it.key, it.value = nil, nil
	if it.closed || it.err != nil {
		return false
	}
	for len(it.block) == 0 {
		if it.c == nil {
			return false
		}
		if err := it.fill(); err != nil {
			it.err = fmt.Errorf("scanning family %d: %w", it.family.id, err)
			return false
		}
	}
	k := binary.NativeEndian.Uint32(it.block)
	v := binary.NativeEndian.Uint32(it.block[4:])
	p := it.block[8:]
	it.key, it.value, it.block = p[:k:k], p[k:k+v:k+v], p[k+v:]
	if it.keysOnly {
		it.value = nil
	}
	return true
}

func (it *iterator) Key() []byte   { return it.key }
func (it *iterator) Value() []byte { return it.value }
func (it *iterator) Err() error    { return it.err }

// Close implements engine.Iterator. A second Close does nothing.
func (it *iterator) Close() {
	if it.closed {
		return
	}
	it.closed = true
	it.key, it.value, it.block = nil, nil, nil
	if it.c != nil && it.family.gate.enter() {
		it.free()
		it.family.gate.leave()
		it.store.reapDropped()
	}
	it.c = nil
	if it.buf != nil {
		putScratch(it.buf)
		it.buf = nil
	}
}
