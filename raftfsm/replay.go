package raftfsm

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"iter"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// Position is a place in a shard's log, and what the shard is there.
type Position struct {
	Index, Term       uint64
	Sequence, ClockMs uint64
	// Digest is Machine.Digest there.
	Digest [sha256.Size]byte
}

// digestMagic begins what a digest is made of. Frozen.
const digestMagic = "KSPD\x01"

// Digest condenses what the entries have made of the shard: its identity, its
// counters, and the op hash of every key group. Machines that have applied the same
// entries to the same shard have the same digest. It is called on the apply
// goroutine, as from Options.OnBarrier.
func (m *Machine) Digest() [sha256.Size]byte {
	h := sha256.New()
	c := &m.core
	b := append(make([]byte, 0, 128), digestMagic...)
	for _, v := range [...]uint64{
		uint64(c.group), uint64(c.birth), uint64(c.rng.Lo), uint64(c.rng.Hi), uint64(c.m), uint64(c.epoch), uint64(c.incarnation),
		c.appliedIndex, c.appliedTerm, c.sequence, c.clockMs, c.barrier, c.generation, uint64(c.forgotten),
	} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	h.Write(b)
	for i := range m.hashes.hash {
		h.Write(m.hashes.hash[i][:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// Replay applies entries to a store that holds the shard as it was before them, and
// demands that it is then what want says. The entries follow one by one on those
// that the store holds, and none of them is a rollback. What comes out is durable.
//
// If it fails the store is neither what it was nor what it was to become: remove it.
// base.ErrCorrupt if the entries do not lead from the store to want.
func Replay(ctx context.Context, store engine.Store, batches iter.Seq2[[]Entry, error], want Position) error {
	opts := Options{HashMarks: 1}
	opts.OnRollback = func(Rollback, func(engine.Store) error) (engine.Store, func(engine.Store), error) {
		return nil, nil, fmt.Errorf("a rollback is among the entries: %w", base.ErrCorrupt)
	}
	opts.EnsureDefaults()
	m := &Machine{opts: opts}
	m.waits.init()
	if err := m.adopt(store, func(engine.Store) {}); err != nil { // it stays the caller's
		return fmt.Errorf("replaying: %w", err)
	}
	err := m.applyAll(ctx, batches)
	if err == nil {
		err = m.compare(want)
	}
	if cerr := m.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = store.Flush()
	}
	if err != nil {
		return fmt.Errorf("replaying %s up to index %d: %w", m.core.group, want.Index, err)
	}
	return nil
}

func (m *Machine) applyAll(ctx context.Context, batches iter.Seq2[[]Entry, error]) error {
	next := m.core.appliedIndex + 1
	for entries, err := range batches {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		for i := range entries {
			if entries[i].Index != next {
				return fmt.Errorf("entry %d where %d is next: %w", entries[i].Index, next, base.ErrCorrupt)
			}
			next++
		}
		m.ApplyBatch(entries)
		if err := m.failed(); err != nil {
			return err
		}
	}
	return nil
}

// compare looks whether the shard is what it is to be.
func (m *Machine) compare(want Position) error {
	c := &m.core
	got := Position{Index: c.appliedIndex, Term: c.appliedTerm, Sequence: c.sequence, ClockMs: c.clockMs, Digest: m.Digest()}
	if got != want {
		return fmt.Errorf("the replay ends at index %d term %d sequence %d clock %d digest %x, it must be %d, %d, %d, %d, %x: %w",
			got.Index, got.Term, got.Sequence, got.ClockMs, got.Digest, want.Index, want.Term, want.Sequence, want.ClockMs, want.Digest, base.ErrCorrupt)
	}
	return nil
}
