package raftfsm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Seed says what a shard is that is made of what other shards had.
type Seed struct {
	Group       base.GroupID
	Birth       base.Birth
	Range       keygroup.Range
	Epoch       base.Epoch
	Incarnation base.Incarnation
	// Index and Term are those of the snapshot that the new group begins with.
	Index, Term uint64
	// Barrier is the newest checkpoint that counts as passed.
	Barrier uint64
	// ClockMs is what the shard's clock is at least.
	ClockMs uint64
	// States, if not nil, are all ids that the cluster knows, declared or dropped.
	// What a source holds of any other, even that it was dropped, is left out: the
	// cluster gives such an id again.
	States map[engine.FamilyID]bool
}

// knows says whether the cluster knows a state.
func (s *Seed) knows(id engine.FamilyID) bool { return s.States == nil || s.States[id] }

// The bounds of a batch while a store is assembled.
const (
	assembleBytes = 4 << 20
	assembleOps   = 20_000
)

// Assemble makes target, which holds a shard as a checkpoint had it, the store of
// the shard that s describes: it is clipped to the part of the range that it has
// (target's own range and s.Range), and takes in what others have of the rest.
// Together they must cover s.Range, no key group twice; they are of the same
// number of key groups. Nobody else may know any of the stores: where the engine
// can, others are clipped too and taken in by their files (engine.Absorber), else
// their keys are copied.
//
// Data, declarations, tombstones and op hashes go over; the sequence is the
// largest of all plus one, so that versions and list order go on (W6); the clock
// is the largest (W5). Sessions do not: they are those of another incarnation. A
// state that is declared in one source and dropped in another is dropped. At the
// end the content hash of every key group is compared with its source.
//
// Target is written in many batches. If Assemble fails, it is neither the old
// shard nor the new one: remove it (W7). The errors are base.ErrInvalid and
// base.ErrConflict for sources that do not fit, base.ErrCorrupt if a hash differs,
// and those of the stores.
func Assemble(ctx context.Context, target engine.Store, others []engine.Store, s Seed) error {
	a := &assembly{ctx: ctx, target: target, seed: s}
	for i, store := range append([]engine.Store{target}, others...) {
		l, err := loadMeta(store)
		if err != nil {
			return fmt.Errorf("assembling %s: source %d: %w", s.Group, i, err)
		}
		a.sources = append(a.sources, source{store: store, loaded: l})
	}
	for _, step := range []func() error{a.check, a.unite, a.hashSources, a.clearMeta, a.takeIn, a.seal, a.compare} {
		if err := step(); err != nil {
			return fmt.Errorf("assembling %s of %d shards: %w", s.Group, len(a.sources), err)
		}
	}
	return nil
}

// source is a store that the new shard is made of.
type source struct {
	store engine.Store
	*loaded
	part keygroup.Range // what is taken from it
}

// assembly is the state of one call of Assemble; sources[0] is the target.
type assembly struct {
	ctx     context.Context
	target  engine.Store
	seed    Seed
	sources []source
	layout  state.Layout
	decls   []*state.Declaration // of the new shard, by id
	dropped map[engine.FamilyID]dropped
	unknown map[engine.FamilyID]bool // states that the cluster does not know
	content []state.Hash128          // by key group of the range
	ops     []OpHash
	batch   engine.Batch
}

// check finds out which part of the range each source has.
func (a *assembly) check() error {
	m := a.sources[0].core.m
	if !validRange(a.seed.Range, m) || a.seed.Index == 0 || a.seed.Term == 0 {
		return base.Invalid("seed", fmt.Sprintf("range %s of %d key groups from index %d of term %d", a.seed.Range, m, a.seed.Index, a.seed.Term))
	}
	a.layout = state.Layout{M: m}
	var parts []keygroup.Range
	for i := range a.sources {
		src := &a.sources[i]
		if !src.core.initialised || src.core.m != m {
			return base.Invalid("sources", fmt.Sprintf("source %d is no shard of %d key groups", i, m))
		}
		src.part = keygroup.Range{Lo: max(src.core.rng.Lo, a.seed.Range.Lo), Hi: min(src.core.rng.Hi, a.seed.Range.Hi)}
		if src.part.Empty() {
			return base.Invalid("sources", fmt.Sprintf("source %d has %s, nothing of %s", i, src.core.rng, a.seed.Range))
		}
		parts = append(parts, src.part)
	}
	slices.SortFunc(parts, func(x, y keygroup.Range) int { return int(x.Lo) - int(y.Lo) })
	next := a.seed.Range.Lo
	for _, p := range parts {
		if p.Lo != next {
			return base.Invalid("sources", fmt.Sprintf("%s follows on %d: key groups are missing or there twice", p, next))
		}
		next = p.Hi
	}
	if next != a.seed.Range.Hi {
		return base.Invalid("sources", fmt.Sprintf("they end at %d, before %s does", next, a.seed.Range))
	}
	return nil
}

// unite decides which states the new shard has, and makes their families.
func (a *assembly) unite() error {
	all := make(map[engine.FamilyID]*state.Declaration)
	a.dropped, a.unknown = make(map[engine.FamilyID]dropped), make(map[engine.FamilyID]bool)
	for i := range a.sources {
		for id, d := range a.sources[i].decls {
			if !a.seed.knows(id) {
				a.unknown[id] = true
				continue
			}
			if old := all[id]; old != nil && *old != *d {
				return &base.Error{Cause: base.ErrConflict, Field: "declarations", Ordinal: -1,
					Hint: fmt.Sprintf("state %d is %s/%s in one source and %s/%s in another", id, old.Keyspace, old.Name, d.Keyspace, d.Name)}
			}
			all[id] = d
		}
		for id := range a.sources[i].dropped {
			if a.seed.knows(id) {
				a.dropped[id] = dropped{gone: true}
			} else {
				a.unknown[id] = true
			}
		}
	}
	families := a.target.Families()
	for _, id := range append(sortedIDs(a.dropped), sortedIDs(a.unknown)...) {
		delete(all, id)
		if _, there := families[id]; there {
			if err := a.target.DropFamily(id); err != nil {
				return fmt.Errorf("dropping family %d: %w", id, err)
			}
		}
	}
	for _, id := range sortedIDs(all) {
		if err := a.target.EnsureFamily(id, a.layout.FamilyOptions(all[id])); err != nil {
			return fmt.Errorf("creating family %d: %w", id, err)
		}
		a.decls = append(a.decls, all[id])
	}
	return nil
}

// declaredIn are the states of the new shard that a source has.
func (a *assembly) declaredIn(src *source) []*state.Declaration {
	return slices.DeleteFunc(slices.Clone(a.decls), func(d *state.Declaration) bool { return src.decls[d.ID] == nil })
}

// hashSources notes what each key group holds.
func (a *assembly) hashSources() error {
	a.content = make([]state.Hash128, a.seed.Range.Len())
	a.ops = make([]OpHash, a.seed.Range.Len())
	for i := range a.sources {
		src := &a.sources[i]
		sums, err := a.layout.HashGroups(a.ctx, src.store, a.declaredIn(src), src.part)
		if err != nil {
			return fmt.Errorf("hashing source %d: %w", i, err)
		}
		copy(a.content[src.part.Lo-a.seed.Range.Lo:], sums)
		from := src.part.Lo - src.core.rng.Lo
		copy(a.ops[src.part.Lo-a.seed.Range.Lo:], src.hashes.hash[from:int(from)+src.part.Len()])
	}
	return nil
}

// outside are the parts of the target's range that the new shard does not have.
func (a *assembly) outside() []keygroup.Range {
	own := &a.sources[0]
	return slices.DeleteFunc([]keygroup.Range{{Lo: own.core.rng.Lo, Hi: own.part.Lo}, {Lo: own.part.Hi, Hi: own.core.rng.Hi}}, keygroup.Range.Empty)
}

// clearMeta removes the metadata that the new shard does not have of the target.
func (a *assembly) clearMeta() error {
	for _, gone := range a.outside() {
		a.batch.DeleteRange(engine.MetaFamily, appendOpHashKey(nil, gone.Lo), appendOpHashKey(nil, gone.Hi))
	}
	a.batch.DeleteRange(engine.MetaFamily, []byte{metaSession}, []byte{metaSession + 1})
	a.batch.Delete(engine.MetaFamily, configurationKey)
	return a.write(true)
}

// takeIn takes over what the other sources have, and nothing of the target that
// the new shard does not have: by files where there are others and the engine can.
func (a *assembly) takeIn() error {
	if len(a.sources) > 1 {
		if err := a.absorb(); !errors.Is(err, base.ErrUnsupported) {
			return err
		}
	}
	if err := a.clip(); err != nil {
		return err
	}
	for i := range a.sources[1:] {
		src := &a.sources[1+i]
		lo, hi := a.layout.GroupBounds(src.part)
		for _, d := range a.declaredIn(src) {
			if err := a.copyState(src, d.ID, lo, hi); err != nil {
				return fmt.Errorf("taking in state %d of source %d: %w", d.ID, 1+i, err)
			}
		}
	}
	return nil
}

// absorb clips all sources and gives the target the files of the others. It fails
// with base.ErrUnsupported if one of the stores cannot, or two do not fit together;
// what has been clipped by then is what would have been read.
func (a *assembly) absorb() error {
	var others []engine.Store
	var absorber engine.Absorber
	for i := range a.sources {
		src := &a.sources[i]
		clipper, ok := src.store.(engine.Absorber)
		if !ok {
			return fmt.Errorf("source %d has no files to give: %w", i, base.ErrUnsupported)
		}
		lo, hi := a.layout.GroupBounds(src.part)
		if err := clipper.Clip(a.ctx, idsOf(a.declaredIn(src)), lo, hi); err != nil {
			return fmt.Errorf("clipping source %d to %s: %w", i, src.part, err)
		}
		if i == 0 {
			absorber = clipper
		} else {
			others = append(others, src.store)
		}
	}
	return absorber.Absorb(a.ctx, idsOf(a.decls), others)
}

func idsOf(decls []*state.Declaration) []engine.FamilyID {
	ids := make([]engine.FamilyID, len(decls))
	for i, d := range decls {
		ids[i] = d.ID
	}
	return ids
}

// clip removes from the target's states what the new shard does not have of them.
func (a *assembly) clip() error {
	for _, gone := range a.outside() {
		lo, hi := a.layout.GroupBounds(gone)
		for _, d := range a.declaredIn(&a.sources[0]) {
			a.batch.DeleteRange(d.ID, lo, hi)
		}
	}
	return a.write(true)
}

// copyState copies the keys [lo, hi) of a family.
func (a *assembly) copyState(src *source, id engine.FamilyID, lo, hi []byte) error {
	it := src.store.Scan(id, lo, hi, engine.ScanOptions{})
	defer it.Close()
	for it.Next() {
		a.batch.Put(id, it.Key(), it.Value())
		if err := a.write(false); err != nil {
			return err
		}
	}
	return it.Err()
}

// write writes the batch if it is full, or at all events.
func (a *assembly) write(now bool) error {
	if n := a.batch.Len(); n == 0 || !now && n < assembleOps && len(a.batch.Bytes()) < assembleBytes {
		return nil
	}
	if err := a.ctx.Err(); err != nil {
		return err
	}
	if err := a.target.Write(&a.batch); err != nil {
		return err
	}
	a.batch.Reset()
	return nil
}

// seal writes what the new shard is, with the last of the data, and makes all of
// it durable.
func (a *assembly) seal() error {
	c := core{initialised: true, appliedIndex: a.seed.Index, appliedTerm: a.seed.Term, group: a.seed.Group, birth: a.seed.Birth,
		rng: a.seed.Range, m: a.layout.M, epoch: a.seed.Epoch, incarnation: a.seed.Incarnation, clockMs: a.seed.ClockMs, barrier: a.seed.Barrier}
	for i := range a.sources {
		from := &a.sources[i].core
		c.sequence, c.clockMs = max(c.sequence, from.sequence), max(c.clockMs, from.clockMs)
		c.generation = max(c.generation, from.generation)
	}
	c.sequence++
	c.generation++
	own := &a.sources[0]
	for _, d := range a.decls {
		if own.decls[d.ID] == nil {
			a.batch.Put(engine.MetaFamily, declarationKey(d.ID), encodeDeclaration(d))
		}
	}
	for _, id := range sortedIDs(a.dropped) {
		a.batch.Delete(engine.MetaFamily, declarationKey(id))
		a.batch.Put(engine.MetaFamily, droppedKey(id), encodeDropped(a.dropped[id]))
	}
	for _, id := range sortedIDs(a.unknown) {
		a.batch.Delete(engine.MetaFamily, declarationKey(id))
		a.batch.Delete(engine.MetaFamily, droppedKey(id))
	}
	for i, h := range a.ops {
		if h != (OpHash{}) {
			a.batch.Put(engine.MetaFamily, appendOpHashKey(nil, a.seed.Range.Lo+keygroup.Group(i)), appendOpHash(nil, h))
		}
	}
	a.batch.Put(engine.MetaFamily, coreKey, c.appendTo(nil))
	if err := a.write(true); err != nil {
		return err
	}
	return a.target.Flush()
}

// compare looks whether every key group holds what its source had.
func (a *assembly) compare() error {
	l, err := loadMeta(a.target)
	if err != nil {
		return err
	}
	sums, err := a.layout.HashGroups(a.ctx, a.target, a.decls, a.seed.Range)
	if err != nil {
		return fmt.Errorf("hashing what was assembled: %w", err)
	}
	for i := range sums {
		if sums[i] != a.content[i] || l.hashes.hash[i] != a.ops[i] {
			return fmt.Errorf("key group %d holds something else than its source: %w", int(a.seed.Range.Lo)+i, base.ErrCorrupt)
		}
	}
	return nil
}
