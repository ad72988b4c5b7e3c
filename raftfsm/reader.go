package raftfsm

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/internal/base"
)

// reader consumes a byte string. The first failure sticks; after it every
// method returns zero. Results alias the input.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("reading %s: %w", what, base.ErrCorrupt)
	}
	r.b = nil
}

func (r *reader) unknown(what string, v uint64) {
	if r.err == nil {
		r.err = fmt.Errorf("reading %s %d: %w", what, v, base.ErrFormatVersion)
	}
	r.b = nil
}

func (r *reader) u8(what string) byte {
	if len(r.b) < 1 {
		r.fail(what)
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) u64(what string) uint64 {
	if len(r.b) < 8 {
		r.fail(what)
		return 0
	}
	v := binary.LittleEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// uvarint accepts only the shortest form, so that every value has one encoding.
func (r *reader) uvarint(what string) uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || n > 1 && r.b[n-1] == 0 {
		r.fail(what)
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) u32(what string) uint32 {
	v := r.uvarint(what)
	if v > math.MaxUint32 {
		r.fail(what)
		return 0
	}
	return uint32(v)
}

// count reads a number of things of which each takes at least one byte.
func (r *reader) count(what string, limit int) int {
	v := r.uvarint(what)
	if v > uint64(limit) || v > uint64(len(r.b)) {
		r.fail(what)
		return 0
	}
	return int(v)
}

func (r *reader) take(what string, n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.fail(what)
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// bytes reads a length and that many bytes; never nil unless failed.
func (r *reader) bytes(what string) []byte { return r.take(what, r.uvarint(what)) }

// optional reads bytes that may be absent: length plus one, 0 for nil.
func (r *reader) optional(what string) []byte {
	n := r.uvarint(what)
	if n == 0 {
		return nil
	}
	return r.take(what, n-1)
}

func (r *reader) text(what string, limit int) string {
	b := r.bytes(what)
	if len(b) > limit {
		r.fail(what)
		return ""
	}
	return string(b)
}

// end fails if anything is left.
func (r *reader) end(what string) error {
	if r.err == nil && len(r.b) > 0 {
		r.fail("end of " + what)
	}
	return r.err
}

func appendBytes(dst, b []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(b)))
	return append(dst, b...)
}

func appendText(dst []byte, s string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(s)))
	return append(dst, s...)
}

func appendOptional(dst, b []byte, present bool) []byte {
	if !present {
		return append(dst, 0)
	}
	dst = binary.AppendUvarint(dst, uint64(len(b))+1)
	return append(dst, b...)
}
