package raftfsm

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// OpHash chains the mutations that were applied to one key group, in order:
//
//	next = xxh3-128(previous | sequence u64 LE | xxh3-128(encoded mutation))
//
// It starts as zeros. Replicas with equal op hashes have applied the same
// mutations under the same sequence numbers.
type OpHash [16]byte

func (h OpHash) chain(sequence uint64, encoded []byte) OpHash {
	var b [40]byte
	copy(b[:], h[:])
	binary.LittleEndian.PutUint64(b[16:], sequence)
	inner := xxh3.Hash128(encoded).Bytes()
	copy(b[24:], inner[:])
	return xxh3.Hash128(b[:]).Bytes()
}

// opHashes holds the op hash of every key group of a range.
type opHashes struct {
	rng   keygroup.Range
	hash  []OpHash
	dirty []keygroup.Group // in the order of first change
	mark  []bool           // by group - rng.Lo: is in dirty
}

func newOpHashes(r keygroup.Range) opHashes {
	if r.Empty() {
		return opHashes{}
	}
	return opHashes{rng: r, hash: make([]OpHash, r.Len()), mark: make([]bool, r.Len())}
}

func (o *opHashes) load(g keygroup.Group, value []byte) error {
	if !o.rng.Contains(g) {
		return fmt.Errorf("op hash of group %d outside %s: %w", g, o.rng, base.ErrCorrupt)
	}
	var err error
	o.hash[g-o.rng.Lo], err = parseOpHash(value)
	return err
}

func (o *opHashes) apply(g keygroup.Group, sequence uint64, encoded []byte) {
	i := g - o.rng.Lo
	o.hash[i] = o.hash[i].chain(sequence, encoded)
	if !o.mark[i] {
		o.mark[i] = true
		o.dirty = append(o.dirty, g)
	}
}

// flush calls put for every hash that changed since the last call.
func (o *opHashes) flush(put func(g keygroup.Group, h OpHash)) {
	for _, g := range o.dirty {
		o.mark[g-o.rng.Lo] = false
		put(g, o.hash[g-o.rng.Lo])
	}
	o.dirty = o.dirty[:0]
}

func (o *opHashes) copy() []OpHash { return slices.Clone(o.hash) }
