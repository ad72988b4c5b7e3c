package rocks

// #include <stdlib.h>
// #include "native.h"
// #cgo noescape ks_get
// #cgo nocallback ks_get
// #cgo noescape ks_multi_get
// #cgo nocallback ks_multi_get
import "C"

import (
	"encoding/binary"
	"fmt"
	"sync"
	"unsafe"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// chars gives the bytes of p to native code for the duration of a call.
func chars(p []byte) *C.char { return (*C.char)(unsafe.Pointer(unsafe.SliceData(p))) }

// scratch are buffers for packed keys and answers.
var scratch = sync.Pool{New: func() any {
	b := make([]byte, 8<<10)
	return &b
}}

// maxScratch bounds what is kept in scratch.
const maxScratch = 1 << 20

func putScratch(b *[]byte) {
	if cap(*b) <= maxScratch {
		scratch.Put(b)
	}
}

// enterFamily enters the gate of a family of the set.
func (s *Store) enterFamily(fs families, id engine.FamilyID) (*family, error) {
	f := fs[id]
	if f != nil && f.gate.enter() {
		return f, nil
	}
	if !s.gate.enter() {
		return nil, fmt.Errorf("store %s: %w", s.dir, base.ErrClosed)
	}
	s.gate.leave()
	return nil, fmt.Errorf("family %d of store %s: %w", id, s.dir, base.ErrNotFound)
}

// Get implements engine.Reader.
func (s *Store) Get(id engine.FamilyID, key []byte) ([]byte, bool, error) {
	return s.get(*s.families.Load(), id, nil, key, false)
}

// DurableGet implements engine.Store.
func (s *Store) DurableGet(key []byte) ([]byte, bool, error) {
	return s.get(*s.families.Load(), engine.MetaFamily, nil, key, true)
}

func (s *Store) get(fs families, id engine.FamilyID, at *C.ks_snapshot, key []byte, persisted bool) ([]byte, bool, error) {
	f, err := s.enterFamily(fs, id)
	if err != nil {
		return nil, false, fmt.Errorf("getting key: %w", err)
	}
	defer f.gate.leave()
	b := scratch.Get().(*[]byte)
	defer putScratch(b)
	tier := C.int(0)
	if persisted {
		tier = 1
	}
	for {
		buf := (*b)[:cap(*b)]
		var found C.int
		var n C.size_t
		st := C.ks_get(f.ref, at, tier, chars(key), C.size_t(len(key)), chars(buf), C.size_t(len(buf)), &found, &n)
		if err := take(st); err != nil {
			return nil, false, fmt.Errorf("getting key %x of family %d: %w", key, id, err)
		}
		if found == 0 {
			return nil, false, nil
		}
		if int(n) <= len(buf) {
			return append(make([]byte, 0, n), buf[:n]...), true, nil
		}
		*b = make([]byte, n) // the value may have changed by the next turn
	}
}

// MultiGet implements engine.Reader. The values share one backing array.
func (s *Store) MultiGet(id engine.FamilyID, keys [][]byte) ([][]byte, error) {
	return s.multiGet(*s.families.Load(), id, nil, keys)
}

func (s *Store) multiGet(fs families, id engine.FamilyID, at *C.ks_snapshot, keys [][]byte) ([][]byte, error) {
	f, err := s.enterFamily(fs, id)
	if err != nil {
		return nil, fmt.Errorf("getting %d keys: %w", len(keys), err)
	}
	defer f.gate.leave()
	if len(keys) == 0 {
		return [][]byte{}, nil
	}
	in, out := scratch.Get().(*[]byte), scratch.Get().(*[]byte)
	defer putScratch(in)
	defer putScratch(out)
	packed := (*in)[:0]
	for _, k := range keys {
		packed = binary.NativeEndian.AppendUint32(packed, uint32(len(k)))
		packed = append(packed, k...)
	}
	*in = packed
	buf := (*out)[:cap(*out)]
	var big *C.char
	var used C.size_t
	st := C.ks_multi_get(f.ref, at, chars(packed), C.size_t(len(packed)), C.size_t(len(keys)),
		chars(buf), C.size_t(len(buf)), &big, &used)
	if err := take(st); err != nil {
		return nil, fmt.Errorf("getting %d keys of family %d: %w", len(keys), id, err)
	}
	answer := make([]byte, int(used))
	if big != nil {
		copy(answer, unsafe.Slice((*byte)(unsafe.Pointer(big)), int(used)))
		C.free(unsafe.Pointer(big))
	} else {
		copy(answer, buf)
	}
	return unpackAnswer(answer, len(keys)), nil
}

const absent = ^uint32(0)

// unpackAnswer cuts the answer of ks_multi_get, which is this process's own.
func unpackAnswer(p []byte, n int) [][]byte {
	values := make([][]byte, n)
	for i := range values {
		l := binary.NativeEndian.Uint32(p)
		p = p[4:]
		if l != absent {
			values[i] = p[:l:l]
			p = p[l:]
		}
	}
	return values
}
