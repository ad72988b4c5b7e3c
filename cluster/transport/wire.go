package transport

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/internal/base"
)

// wireReader reads little-endian fields from a body whose size is known. After
// the first failure every read gives zero, so that decoders check once at the
// end. Byte fields alias the body: nothing is allocated from a stored length.
type wireReader struct {
	b   []byte
	bad bool
}

func (r *wireReader) take(n int) []byte {
	if r.bad || n < 0 || n > len(r.b) {
		r.bad = true
		return nil
	}
	p := r.b[:n:n]
	r.b = r.b[n:]
	return p
}

func (r *wireReader) u8() uint8 {
	if p := r.take(1); p != nil {
		return p[0]
	}
	return 0
}

func (r *wireReader) u16() uint16 {
	if p := r.take(2); p != nil {
		return binary.LittleEndian.Uint16(p)
	}
	return 0
}

func (r *wireReader) u32() uint32 {
	if p := r.take(4); p != nil {
		return binary.LittleEndian.Uint32(p)
	}
	return 0
}

func (r *wireReader) u64() uint64 {
	if p := r.take(8); p != nil {
		return binary.LittleEndian.Uint64(p)
	}
	return 0
}

// boolean accepts 0 and 1 only, so that every message has one encoding.
func (r *wireReader) boolean() bool {
	v := r.u8()
	if v > 1 {
		r.bad = true
	}
	return v == 1
}

// bytes16 reads a field with a 16-bit length; nil where it is empty.
func (r *wireReader) bytes16() []byte { return r.field(int(r.u16())) }

// bytes32 reads a field with a 32-bit length; nil where it is empty.
func (r *wireReader) bytes32() []byte {
	n := r.u32()
	if n > math.MaxInt32 {
		r.bad = true
		return nil
	}
	return r.field(int(n))
}

func (r *wireReader) field(n int) []byte {
	if n == 0 {
		return nil
	}
	return r.take(n)
}

func (r *wireReader) str16() string { return string(r.bytes16()) }

// finish reports damage, bytes left over included.
func (r *wireReader) finish(what string) error {
	if r.bad || len(r.b) != 0 {
		return fmt.Errorf("decoding %s: %w", what, base.ErrCorrupt)
	}
	return nil
}

func putU16(b []byte, v uint16) []byte { return binary.LittleEndian.AppendUint16(b, v) }
func putU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func putU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func putBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// putBytes16 writes a field of at most 65535 bytes. What is longer is cut: the
// callers bound the fields that matter before, the rest is text for people.
func putBytes16[T ~string | ~[]byte](b []byte, v T) []byte {
	if len(v) > math.MaxUint16 {
		v = v[:math.MaxUint16]
	}
	return append(putU16(b, uint16(len(v))), v...)
}

func putBytes32(b []byte, v []byte) []byte {
	return append(putU32(b, uint32(len(v))), v...)
}
