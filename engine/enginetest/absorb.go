package enginetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// pieceGroups is the number of groups that pieces divide among themselves: the
// first byte of a key is its group.
const pieceGroups = 8

// piece is a store that has keys of all groups, of which it will keep a part.
type piece struct {
	h      *harness
	dir    string
	store  engine.Store
	now    state // of the families that it has
	lo, hi []byte
}

// newPiece makes a store with some of the families of the model.
func newPiece(h *harness, dir string, families []engine.FamilyID) *piece {
	h.Helper()
	p := &piece{h: h, dir: dir, now: state{engine.MetaFamily: {}}}
	for _, f := range families {
		p.now[f] = model{}
	}
	p.open()
	return p
}

func (p *piece) open() {
	p.h.Helper()
	s, err := p.h.driver.Open(p.dir)
	p.h.must(err, "opening %s", p.dir)
	p.store = s
	for f := range p.now {
		if f != engine.MetaFamily {
			p.h.must(s.EnsureFamily(f, modelFamilies[f]), "creating family %d", f)
		}
	}
}

func (p *piece) absorber() engine.Absorber {
	p.h.Helper()
	a, ok := p.store.(engine.Absorber)
	if !ok {
		p.h.Fatalf("%T is no engine.Absorber", p.store)
	}
	return a
}

// families are those that it has, without the metadata.
func (p *piece) families() []engine.FamilyID {
	var out []engine.FamilyID
	for f := range p.now {
		if f != engine.MetaFamily {
			out = append(out, f)
		}
	}
	return out
}

// pieceKey draws a key; few, so that they are written again and again.
func pieceKey(rnd *rand.Rand) []byte {
	return fmt.Appendf([]byte{byte(rnd.IntN(pieceGroups))}, "key%03d", rnd.IntN(120))
}

// batch writes random operations, with the same effect on the model.
func (p *piece) batch(rnd *rand.Rand) {
	p.h.Helper()
	var b engine.Batch
	families := p.families()
	for range 1 + rnd.IntN(40) {
		if len(families) == 0 {
			break
		}
		f := families[rnd.IntN(len(families))]
		kind, key := modelFamilies[f].Merge, pieceKey(rnd)
		val := fmt.Appendf(nil, "%0*d", rnd.IntN(300), rnd.Uint64())
		if kind != engine.MergeNone {
			val = operand(kind, int64(rnd.Uint64()), rnd.Uint64())
		}
		switch n := rnd.IntN(20); {
		case n == 0:
			hi := pieceKey(rnd)
			b.DeleteRange(f, key, hi)
			p.now[f].deleteRange(string(key), string(hi))
		case n <= 3:
			b.Delete(f, key)
			delete(p.now[f], string(key))
		case n <= 9 || kind == engine.MergeNone:
			b.Put(f, key, val)
			p.now[f][string(key)] = string(val)
		default:
			b.Merge(f, key, val)
			old, ok := p.now[f][string(key)]
			p.now[f][string(key)] = string(fold(p.h, kind, baseOf(old, ok), val))
		}
	}
	b.Put(engine.MetaFamily, []byte("n"), []byte("v"))
	p.now[engine.MetaFamily]["n"] = "v"
	p.h.must(p.store.Write(&b), "writing")
}

func baseOf(v string, ok bool) []byte {
	if !ok {
		return nil
	}
	return []byte(v)
}

// fill writes many batches, with flushes and now and then a compaction.
func (p *piece) fill(rnd *rand.Rand, batches int) {
	p.h.Helper()
	for range batches {
		p.batch(rnd)
		if rnd.IntN(12) == 0 {
			p.h.must(p.store.Flush(), "flushing")
		}
		if rnd.IntN(60) == 0 {
			p.h.must(p.store.Compact(), "compacting")
		}
	}
}

// check compares all that there is with the model, in one scan each way.
func (p *piece) check(r engine.Reader, doing string) {
	p.h.Helper()
	for f := range p.now {
		for _, o := range []engine.ScanOptions{{}, {Reverse: true}} {
			got, err := drain(r.Scan(f, nil, nil, o))
			if want := p.now[f].scan(nil, nil, o); err != nil || !samePairs(got, want) {
				p.h.Fatalf("%s: family %d of %s (%+v) has %d entries, want %d; %v; first difference %s",
					doing, f, filepath.Base(p.dir), o, len(got), len(want), err, difference(got, want))
			}
		}
	}
}

func difference(got, want []pair) string {
	for i := range got {
		if i >= len(want) || got[i] != want[i] {
			return fmt.Sprintf("%.80q, want %.80q", got[i], want[i:min(i+1, len(want))])
		}
	}
	return fmt.Sprintf("%.80q is missing", want[len(got):min(len(got)+1, len(want))])
}

// copied returns a checkpoint of the piece, opened.
func (p *piece) copied(dir string) *piece {
	p.h.Helper()
	p.h.must(p.store.Checkpoint(dir), "checkpointing")
	out := &piece{h: p.h, dir: dir, now: p.now.clone(), lo: p.lo, hi: p.hi}
	out.open()
	return out
}

// clip clips the store and the model.
func (p *piece) clip() {
	p.h.Helper()
	p.h.must(p.absorber().Clip(context.Background(), p.families(), p.lo, p.hi), "clipping to [%x, %x)", p.lo, p.hi)
	for f, m := range p.now {
		for key := range m {
			if f != engine.MetaFamily && (key < string(p.lo) || p.hi != nil && key >= string(p.hi)) {
				delete(m, key)
			}
		}
	}
	p.check(p.store, "after a clip")
}

func (p *piece) close() {
	p.h.Helper()
	p.h.must(p.store.Close(), "closing %s", p.dir)
}

// makePieces makes stores with random families, of which each will keep a part of
// the groups; the first has all families.
func makePieces(h *harness, dir string, rnd *rand.Rand, n, batches int) []*piece {
	h.Helper()
	cuts := []int{0, pieceGroups}
	for len(cuts) < n+1 {
		cuts = append(cuts[:len(cuts)-1], cuts[len(cuts)-2]+1+rnd.IntN(2), pieceGroups)
	}
	var out []*piece
	for i := range n {
		var families []engine.FamilyID
		for f := range modelFamilies {
			if i == 0 || rnd.IntN(4) > 0 {
				families = append(families, f)
			}
		}
		p := newPiece(h, filepath.Join(dir, fmt.Sprint("piece", i)), families)
		p.lo, p.hi = []byte{byte(cuts[i])}, []byte{byte(cuts[i+1])}
		if i == 0 {
			p.lo = nil
		}
		if i == n-1 {
			p.hi = nil
		}
		if rnd.IntN(5) > 0 { // else it is empty
			p.fill(rnd, batches)
		}
		out = append(out, p)
	}
	return out
}

// absorbAll clips the pieces and makes the first one hold what all of them hold.
func absorbAll(h *harness, pieces []*piece) {
	h.Helper()
	var others []engine.Store
	for i, p := range pieces {
		p.clip()
		if i > 0 {
			others = append(others, p.store)
		}
	}
	into := pieces[0]
	it := into.store.Scan(1, nil, nil, engine.ScanOptions{})
	before := into.now[1].scan(nil, nil, engine.ScanOptions{})
	h.must(into.absorber().Absorb(context.Background(), into.families(), others), "absorbing")
	if got, err := drain(it); err != nil || !samePairs(got, before) {
		h.Fatalf("an iterator from before has %d entries, want %d; %v", len(got), len(before), err)
	}
	for _, p := range pieces[1:] {
		p.check(p.store, "a source after it was absorbed")
		for f, m := range p.now {
			for key, v := range m {
				into.now[f][key] = v
			}
		}
	}
	into.check(into.store, "after absorbing")
}

// testAbsorb: what stores hold of their ranges is in one store then, whatever
// they have been through; later writes lie above it, and it is durable.
func testAbsorb(h *harness) {
	for round := range 6 {
		rnd := rand.New(rand.NewPCG(uint64(round), 17))
		dir := filepath.Join(h.TempDir(), fmt.Sprint(round))
		originals := makePieces(h, dir, rnd, 2+rnd.IntN(3), 60)
		var pieces []*piece
		for i, p := range originals {
			pieces = append(pieces, p.copied(filepath.Join(dir, fmt.Sprint("copy", i))))
		}
		absorbAll(h, pieces)
		for i, p := range originals {
			p.check(p.store, "the original of a clipped copy")
			p.close()
			if i > 0 {
				pieces[i].close()
				h.must(os.RemoveAll(pieces[i].dir), "removing a source")
			}
		}
		p := pieces[0]
		p.fill(rnd, 30)
		p.check(p.store, "after writing on")
		c := p.copied(filepath.Join(dir, "later"))
		c.check(c.store, "a checkpoint")
		h.must(c.store.Compact(), "compacting")
		c.check(c.store, "a compacted checkpoint")
		c.close()
		h.must(p.store.Flush(), "flushing")
		p.close()
		h.must(h.driver.Verify(p.dir), "verifying")
		p.open()
		p.check(p.store, "opened again")
		// And once more: what was absorbed is a source as any other.
		p.lo, p.hi = []byte{2}, []byte{5}
		p.clip()
		into := newPiece(h, filepath.Join(dir, "again"), p.families())
		into.lo, into.hi = []byte{5}, nil
		into.fill(rnd, 10)
		absorbAll(h, []*piece{into, p})
		into.close()
		p.close()
	}
}

// testAbsorbRefuses: what does not fit is refused before anything has changed.
func testAbsorbRefuses(h *harness) {
	dir, ctx := h.TempDir(), context.Background()
	make := func(name string, families ...engine.FamilyID) *piece {
		h.Helper()
		p := newPiece(h, filepath.Join(dir, name), families)
		p.lo, p.hi = []byte{0}, []byte{4}
		p.fill(rand.New(rand.NewPCG(1, 2)), 20)
		p.clip()
		return p
	}
	p, same := make("target", 1, 2), make("same", 1, 2)
	defer p.close()
	defer same.close()
	otherwise, err := h.driver.Open(filepath.Join(dir, "otherwise"))
	h.must(err, "opening")
	defer func() { h.must(otherwise.Close(), "closing") }()
	h.must(otherwise.EnsureFamily(2, modelFamilies[1]), "creating a family")
	gone := make("gone", 1)
	gone.close()
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for name, c := range map[string]struct {
		ctx      context.Context
		families []engine.FamilyID
		source   engine.Store
		want     error
	}{
		"keys in one range":   {ctx, []engine.FamilyID{1, 2}, same.store, base.ErrConflict},
		"other options":       {ctx, []engine.FamilyID{2}, otherwise, base.ErrConflict},
		"no such family":      {ctx, []engine.FamilyID{3}, same.store, base.ErrNotFound},
		"the metadata":        {ctx, []engine.FamilyID{engine.MetaFamily}, same.store, base.ErrInvalid},
		"itself":              {ctx, []engine.FamilyID{1}, p.store, base.ErrInvalid},
		"another's store":     {ctx, []engine.FamilyID{1}, struct{ engine.Store }{same.store}, base.ErrUnsupported},
		"a closed store":      {ctx, []engine.FamilyID{1}, gone.store, base.ErrClosed},
		"a context that ends": {ended, []engine.FamilyID{1}, same.store, context.Canceled},
	} {
		h.wantErr(p.absorber().Absorb(c.ctx, c.families, []engine.Store{c.source}), c.want, "absorbing: %s", name)
		p.check(p.store, name)
	}
	h.wantErr(p.absorber().Clip(ctx, []engine.FamilyID{3}, nil, nil), base.ErrNotFound, "clipping an unknown family")
	h.wantErr(p.absorber().Clip(ended, []engine.FamilyID{1}, []byte{3}, nil), context.Canceled, "clipping with a context that has ended")
	h.must(p.absorber().Absorb(ctx, nil, nil), "absorbing nothing")
	p.batch(rand.New(rand.NewPCG(3, 4)))
	p.check(p.store, "after all refusals")
}
