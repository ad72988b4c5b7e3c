package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/keelstate/keelstate/internal/base"
)

// OpKind is the kind of one operation in a Batch.
type OpKind uint8

// The numbers are shared with the native code of engine/rocks.
const (
	OpPut         OpKind = 1
	OpDelete      OpKind = 2
	OpDeleteRange OpKind = 3
	OpMerge       OpKind = 4
)

// Batch is an ordered list of writes in one packed buffer, so that it crosses
// to native code at once. Each operation is
//
//	kind u8 | family u32 LE | key length u32 LE | value length u32 LE | key | value
//
// where a DeleteRange carries the exclusive end in place of the value. The
// buffer never leaves the process; it is no format on disk.
type Batch struct {
	buf   []byte
	count int
}

const opHeader = 1 + 4 + 4 + 4

func (b *Batch) add(kind OpKind, f FamilyID, key, value []byte) {
	b.buf = append(b.buf, byte(kind))
	b.buf = binary.LittleEndian.AppendUint32(b.buf, uint32(f))
	b.buf = binary.LittleEndian.AppendUint32(b.buf, uint32(len(key)))
	b.buf = binary.LittleEndian.AppendUint32(b.buf, uint32(len(value)))
	b.buf = append(b.buf, key...)
	b.buf = append(b.buf, value...)
	b.count++
}

// Put sets key to value.
func (b *Batch) Put(f FamilyID, key, value []byte) { b.add(OpPut, f, key, value) }

// Delete removes key; an absent key is no error.
func (b *Batch) Delete(f FamilyID, key []byte) { b.add(OpDelete, f, key, nil) }

// DeleteRange removes all keys in [lo, hi).
func (b *Batch) DeleteRange(f FamilyID, lo, hi []byte) { b.add(OpDeleteRange, f, lo, hi) }

// Merge folds operand into key with the family's MergeKind.
func (b *Batch) Merge(f FamilyID, key, operand []byte) { b.add(OpMerge, f, key, operand) }

// Len is the number of operations; Bytes is the packed size.
func (b *Batch) Len() int { return b.count }

// Bytes is the packed buffer, valid until the next change of the batch.
func (b *Batch) Bytes() []byte { return b.buf }

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() { b.buf, b.count = b.buf[:0], 0 }

// truncate drops the operations after the given position, which an earlier
// call of position returned.
func (b *Batch) truncate(bytes, count int) { b.buf, b.count = b.buf[:bytes], count }

func (b *Batch) position() (bytes, count int) { return len(b.buf), b.count }

// Each calls fn for every operation in order. The slices alias the batch.
func (b *Batch) Each(fn func(kind OpKind, f FamilyID, key, value []byte) error) error {
	for p := b.buf; len(p) > 0; {
		if len(p) < opHeader {
			return fmt.Errorf("reading packed batch: %w", base.ErrCorrupt)
		}
		kind, f := OpKind(p[0]), FamilyID(binary.LittleEndian.Uint32(p[1:]))
		kl, vl := int(binary.LittleEndian.Uint32(p[5:])), int(binary.LittleEndian.Uint32(p[9:]))
		p = p[opHeader:]
		if kl < 0 || vl < 0 || len(p)-kl < vl {
			return fmt.Errorf("reading packed batch: %w", base.ErrCorrupt)
		}
		if err := fn(kind, f, p[:kl:kl], p[kl:kl+vl:kl+vl]); err != nil {
			return err
		}
		p = p[kl+vl:]
	}
	return nil
}
