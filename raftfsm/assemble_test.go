package raftfsm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/fault"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// piece is a replica of a shard that has a part of the key groups.
func piece(t testing.TB, d engine.Driver, group base.GroupID, rng keygroup.Range) *replica {
	t.Helper()
	r := emptyReplica(t, d, raftfsm.Options{})
	r.ok(r.command(raftfsm.AppendInit(nil, raftfsm.Init{
		Group: group, Range: rng, M: groups, Epoch: 1, Birth: base.Birth(100 + group), Incarnation: 1, Sequence: 1000 * uint64(group), ClockMs: 1000 * uint64(group),
	})))
	r.ok(r.command(raftfsm.AppendDeclare(nil, testDeclarations())))
	return r
}

// tiles cuts the key groups into up to n ranges.
func tiles(r *rand.Rand, n int) []keygroup.Range {
	cuts := map[keygroup.Group]bool{0: true, groups: true}
	for range n - 1 {
		cuts[keygroup.Group(1+r.IntN(groups-1))] = true
	}
	at := slices.Sorted(maps.Keys(cuts))
	var out []keygroup.Range
	for i := range at[1:] {
		out = append(out, keygroup.Range{Lo: at[i], Hi: at[i+1]})
	}
	return out
}

// copyOf opens a checkpoint of a replica's store: what a checkpoint of the cluster
// would give back.
func copyOf(t testing.TB, d engine.Driver, r *replica) (engine.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "copy")
	if err := r.store.Checkpoint(dir); err != nil {
		t.Fatal(err)
	}
	s, err := d.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s, dir
}

func closeAll(t testing.TB, stores ...engine.Store) {
	t.Helper()
	for _, s := range stores {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Whatever ranges the shards had and have then, each key reads the same, hashes
// the same, and goes on from there.
func TestAssembledShardsHoldWhatTheirSourcesHeld(t *testing.T) {
	for _, engineName := range []string{"mem", "rocks"} {
		rounds := 30
		if engineName == "rocks" {
			rounds = 6
		}
		for round := range rounds {
			seed := uint64(round + 1)
			t.Run(fmt.Sprintf("%s-%d", engineName, seed), func(t *testing.T) {
				assembleRandomly(t, newDriver(t, engineName), rand.New(rand.NewPCG(seed, 1)))
			})
		}
	}
}

func assembleRandomly(t *testing.T, d engine.Driver, rnd *rand.Rand) {
	from := tiles(rnd, 1+rnd.IntN(4))
	var sources []*replica
	for i, rng := range from {
		sources = append(sources, piece(t, d, base.GroupID(i+1), rng))
	}
	var keys []string
	for i := range 60 {
		keys = append(keys, fmt.Sprint("key-", i))
	}
	home := func(all []*replica, key string) *replica {
		for _, r := range all {
			if r.m.Header().Range.Contains(groupOf(key)) {
				return r
			}
		}
		t.Fatalf("no shard for %s", key)
		return nil
	}
	for i := range 300 {
		key := keys[rnd.IntN(len(keys))]
		r := home(sources, key)
		q := request(put(key, fmt.Sprint("v", i)), listAdd(key, fmt.Sprint("e", i)), mapPut(key, fmt.Sprint("u", rnd.IntN(3)), fmt.Sprint("m", i)), add(sumID, key, i64(int64(i))))
		q.Mutations = q.Mutations[:1+rnd.IntN(len(q.Mutations))]
		if rnd.IntN(4) == 0 {
			q.Session, q.Seq, q.Prev = 5, uint64(i+1), 0
		}
		r.write(q)
		if rnd.IntN(40) == 0 {
			if err := r.store.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	var made []*replica
	for i, rng := range tiles(rnd, 1+rnd.IntN(4)) {
		seed := raftfsm.Seed{Group: base.GroupID(50 + i), Birth: base.Birth(500 + i), Range: rng, Epoch: 3, Incarnation: 2, Index: 10, Term: 4, Barrier: 6}
		byFiles := assembled(t, d, sources, seed)
		sameContent(t, byFiles, assembledOf(t, d, sources, seed, func(s engine.Store) engine.Store { return keysOnly{s} }))
		made = append(made, byFiles)
	}
	for _, key := range keys {
		was, is := home(sources, key), home(made, key)
		if was.value(key) != is.value(key) || was.sum(key) != is.sum(key) || !slices.Equal(was.list(key), is.list(key)) {
			t.Errorf("%s was %q %d %q and is %q %d %q", key, was.value(key), was.sum(key), was.list(key), is.value(key), is.sum(key), is.list(key))
		}
	}
	for _, r := range made {
		h := r.m.Header()
		if h.AppliedIndex != 10 || h.AppliedTerm != 4 || h.Epoch != 3 || h.Incarnation != 2 || h.Barrier != 6 || h.Sessions != 0 {
			t.Errorf("the header is %+v", h)
		}
		for _, s := range sources {
			if s.m.Header().Range.Lo < h.Range.Hi && h.Range.Lo < s.m.Header().Range.Hi && (h.Sequence <= s.m.Header().Sequence || h.ClockMs < s.m.Header().ClockMs) {
				t.Errorf("sequence %d and clock %d, of a source %d and %d", h.Sequence, h.ClockMs, s.m.Header().Sequence, s.m.Header().ClockMs)
			}
		}
	}
	// Lists go on behind what they hold.
	for _, key := range keys[:5] {
		r := home(made, key)
		before := r.list(key)
		q := request(listAdd(key, "next"))
		q.Epoch, q.Incarnation = 3, 2
		if got := r.write(q); got.Err != nil {
			t.Fatal(got.Err)
		}
		if got := r.list(key); !slices.Equal(got, append(before, "next")) {
			t.Errorf("%s was %q and is %q", key, before, got)
		}
	}
}

// keysOnly hides that a store can take over files.
type keysOnly struct{ engine.Store }

// assembled makes the shard that a seed describes of copies of those sources that
// have a part of it, and opens it from its files.
func assembled(t *testing.T, d engine.Driver, sources []*replica, s raftfsm.Seed) *replica {
	t.Helper()
	return assembledOf(t, d, sources, s, func(s engine.Store) engine.Store { return s })
}

// assembledOf is assembled with the copies as the function gives them.
func assembledOf(t *testing.T, d engine.Driver, sources []*replica, s raftfsm.Seed, as func(engine.Store) engine.Store) *replica {
	t.Helper()
	var stores []engine.Store
	dir := ""
	for _, src := range sources {
		if h := src.m.Header(); h.Range.Lo < s.Range.Hi && s.Range.Lo < h.Range.Hi {
			store, at := copyOf(t, d, src)
			stores = append(stores, as(store))
			if dir == "" {
				dir = at
			}
		}
	}
	if err := raftfsm.Assemble(context.Background(), stores[0], stores[1:], s); err != nil {
		t.Fatal(err)
	}
	closeAll(t, stores...)
	r := &replica{t: t, driver: d, dir: dir, stamp: 1000}
	r.opts.OnFatal = func(err error) { r.fatal = err }
	r.open()
	t.Cleanup(func() { r.m.Close() })
	for range s.Index { // as the log of a group that begins behind a snapshot
		r.log = append(r.log, raftfsm.Entry{})
	}
	return r
}

// sameContent looks whether two replicas hold the same, to the last byte of every
// family.
func sameContent(t *testing.T, a, b *replica) {
	t.Helper()
	if af, bf := a.store.Families(), b.store.Families(); !maps.Equal(af, bf) {
		t.Fatalf("families %v and %v", af, bf)
	}
	for f := range a.store.Families() {
		x, y := a.store.Scan(f, nil, nil, engine.ScanOptions{}), b.store.Scan(f, nil, nil, engine.ScanOptions{})
		for n := 0; ; n++ {
			more := x.Next()
			if more != y.Next() || more && (!bytes.Equal(x.Key(), y.Key()) || !bytes.Equal(x.Value(), y.Value())) {
				t.Fatalf("entry %d of family %d: %x %x and %x %x", n, f, x.Key(), x.Value(), y.Key(), y.Value())
			}
			if !more {
				break
			}
		}
		if err := errors.Join(x.Err(), y.Err()); err != nil {
			t.Fatal(err)
		}
		x.Close()
		y.Close()
	}
}

// Files are taken over where the engine can; where it cannot, from whatever step on,
// keys are copied, with the same outcome. Any other failure is one.
func TestAssembleCopiesWhereFilesCannotBeTakenOver(t *testing.T) {
	for _, name := range []string{"mem", "rocks"} {
		t.Run(name, func(t *testing.T) {
			d := newDriver(t, name)
			var sources []*replica
			for i, rng := range []keygroup.Range{{Lo: 0, Hi: 3}, {Lo: 3, Hi: 5}, {Lo: 5, Hi: 8}} {
				r := piece(t, d, base.GroupID(i+1), rng)
				for k := range 200 {
					if key := fmt.Sprint("key-", k); rng.Contains(groupOf(key)) {
						r.write(request(put(key, fmt.Sprint("v", k)), add(sumID, key, i64(int64(k)))))
					}
				}
				sources = append(sources, r)
			}
			seed := raftfsm.Seed{Group: 9, Birth: 9, Range: keygroup.Range{Lo: 1, Hi: 7}, Epoch: 1, Incarnation: 2, Index: 5, Term: 1}
			var files *replica
			for i, c := range []struct {
				rule   fault.Rule
				absorb int // calls
			}{
				{fault.Rule{Ops: []fault.Op{fault.OpGet}, Times: 1}, 1},
				{fault.Rule{Ops: []fault.Op{fault.OpClip}, Error: base.ErrUnsupported}, 0},
				{fault.Rule{Ops: []fault.Op{fault.OpClip}, Skip: 2, Error: base.ErrUnsupported}, 0},
				{fault.Rule{Ops: []fault.Op{fault.OpAbsorb}, Error: base.ErrUnsupported}, 1},
				{fault.Rule{Ops: []fault.Op{fault.OpAbsorb}, After: base.ErrUnsupported}, 1},
			} {
				plan := &fault.Plan{}
				plan.Add(c.rule)
				r := assembledOf(t, d, sources, seed, func(s engine.Store) engine.Store { return fault.NewStore(s, "", plan) })
				if got := plan.Count(fault.OpAbsorb); got != c.absorb {
					t.Errorf("%+v: %d calls of Absorb", c.rule, got)
				}
				if i == 0 {
					files = r
				}
				sameContent(t, files, r)
			}
			broken := errors.New("broken")
			for _, rule := range []fault.Rule{{Ops: []fault.Op{fault.OpClip}, Error: broken}, {Ops: []fault.Op{fault.OpClip}, Skip: 1, After: broken}, {Ops: []fault.Op{fault.OpAbsorb}, After: broken}} {
				plan := &fault.Plan{}
				plan.Add(rule)
				var stores []engine.Store
				for _, src := range sources {
					s, _ := copyOf(t, d, src)
					stores = append(stores, fault.NewStore(s, "", plan))
				}
				if err := raftfsm.Assemble(context.Background(), stores[0], stores[1:], seed); !errors.Is(err, broken) {
					t.Errorf("%+v: %v", rule, err)
				}
				closeAll(t, stores...)
			}
		})
	}
}

// BenchmarkAssemble makes one shard of four that have a quarter of the key groups
// each: by files, and by copying keys. The time of opening the copies is not in it.
func BenchmarkAssemble(b *testing.B) {
	const perSource, valueBytes = 64 << 20, 1000
	d, err := rocks.NewDriver(rocks.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	for _, how := range []string{"flushed", "compacted"} {
		var sources []*replica
		for i := range 4 {
			rng := keygroup.Range{Lo: keygroup.Group(2 * i), Hi: keygroup.Group(2*i + 2)}
			r := piece(b, d, base.GroupID(i+1), rng)
			fillPiece(b, r, perSource, valueBytes)
			if err := r.store.Flush(); err != nil {
				b.Fatal(err)
			}
			if how == "compacted" {
				if err := r.store.Compact(); err != nil {
					b.Fatal(err)
				}
			}
			sources = append(sources, r)
		}
		for _, shard := range []struct {
			name string
			rng  keygroup.Range
		}{{"whole", keygroup.FullRange(groups)}, {"clipped", keygroup.Range{Lo: 1, Hi: 7}}} {
			for _, way := range []string{"files", "copy"} {
				b.Run(fmt.Sprintf("%s-%s-%s", how, shard.name, way), func(b *testing.B) {
					for b.Loop() {
						b.StopTimer()
						var stores []engine.Store
						for _, src := range sources {
							s, _ := copyOf(b, d, src)
							if way == "copy" {
								s = keysOnly{s}
							}
							stores = append(stores, s)
						}
						b.StartTimer()
						err := raftfsm.Assemble(context.Background(), stores[0], stores[1:], raftfsm.Seed{Group: 9, Birth: 9, Range: shard.rng, Epoch: 1, Incarnation: 2, Index: 5, Term: 1})
						b.StopTimer()
						if err != nil {
							b.Fatal(err)
						}
						closeAll(b, stores...)
						b.StartTimer()
					}
				})
			}
		}
	}
}

// fillPiece writes so many bytes of random values under keys that a shard has.
func fillPiece(b *testing.B, r *replica, bytes, valueBytes int) {
	b.Helper()
	rnd := rand.New(rand.NewPCG(uint64(r.m.Header().Group), 3))
	value := make([]byte, valueBytes)
	for written := 0; written < bytes; {
		var q []state.Mutation
		for len(q) < 200 {
			key := fmt.Sprint("key-", rnd.IntN(1<<30))
			if !r.m.Header().Range.Contains(groupOf(key)) {
				continue
			}
			for i := range value {
				value[i] = byte(rnd.Uint32() % 64) // compresses a little
			}
			q = append(q, put(key, string(value)))
			written += valueBytes
		}
		r.write(request(q...))
	}
}

func TestAssembleRefusesSourcesThatDoNotFit(t *testing.T) {
	d := newDriver(t, "mem")
	left, right := piece(t, d, 1, keygroup.Range{Lo: 0, Hi: 4}), piece(t, d, 2, keygroup.Range{Lo: 4, Hi: 8})
	seed := raftfsm.Seed{Group: 9, Birth: 9, Range: keygroup.FullRange(groups), Epoch: 1, Incarnation: 2, Index: 1, Term: 1}
	for name, c := range map[string]struct {
		sources []*replica
		change  func(*raftfsm.Seed)
		want    error
		says    string
	}{
		"a part is missing":  {[]*replica{left}, nil, base.ErrInvalid, "end at 4"},
		"twice":              {[]*replica{left, left, right}, nil, base.ErrInvalid, "twice"},
		"nothing of it":      {[]*replica{left, right}, func(s *raftfsm.Seed) { s.Range.Hi = 4 }, base.ErrInvalid, "nothing of"},
		"no index":           {[]*replica{left, right}, func(s *raftfsm.Seed) { s.Index = 0 }, base.ErrInvalid, "index 0"},
		"range beyond all":   {[]*replica{left, right}, func(s *raftfsm.Seed) { s.Range.Hi = 9 }, base.ErrInvalid, "seed"},
		"declared otherwise": {[]*replica{left, other(t, d)}, nil, base.ErrConflict, "state 1"},
	} {
		s := seed
		if c.change != nil {
			c.change(&s)
		}
		var stores []engine.Store
		for _, r := range c.sources {
			store, _ := copyOf(t, d, r)
			stores = append(stores, store)
		}
		err := raftfsm.Assemble(context.Background(), stores[0], stores[1:], s)
		if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		closeAll(t, stores...)
	}
}

// other is the right half with another declaration under the first id.
func other(t *testing.T, d engine.Driver) *replica {
	r := emptyReplica(t, d, raftfsm.Options{})
	r.ok(r.command(raftfsm.AppendInit(nil, raftfsm.Init{Group: 3, Range: keygroup.Range{Lo: 4, Hi: 8}, M: groups, Epoch: 1, Birth: 3, Incarnation: 1})))
	ds := testDeclarations()[:1]
	ds[0].Name = "another"
	r.ok(r.command(raftfsm.AppendDeclare(nil, ds)))
	return r
}

// A state that one source has dropped is gone, and stays so.
func TestAssembleKeepsDropsAndUnitesDeclarations(t *testing.T) {
	d := newDriver(t, "mem")
	left, right := piece(t, d, 1, keygroup.Range{Lo: 0, Hi: 4}), emptyReplica(t, d, raftfsm.Options{})
	right.ok(right.command(raftfsm.AppendInit(nil, raftfsm.Init{Group: 2, Range: keygroup.Range{Lo: 4, Hi: 8}, M: groups, Epoch: 1, Birth: 2, Incarnation: 1})))
	right.ok(right.command(raftfsm.AppendDeclare(nil, testDeclarations()[:2]))) // value and list alone
	right.ok(right.command(raftfsm.AppendDrop(nil, []engine.FamilyID{listID})))
	r := assembled(t, d, []*replica{left, right}, raftfsm.Seed{Group: 9, Birth: 9, Range: keygroup.FullRange(groups), Epoch: 1, Incarnation: 2, Index: 5, Term: 1})
	h := r.m.Header()
	if h.Declaration(valueID) == nil || h.Declaration(sumID) == nil || h.Declaration(listID) != nil {
		t.Errorf("declared: %v", h.Declarations())
	}
	if o := r.command(raftfsm.AppendDeclare(nil, testDeclarations()[1:2])); !errors.Is(o.Err, base.ErrConflict) {
		t.Errorf("declaring a dropped state: %v", o.Err)
	}
	if _, there := r.store.Families()[listID]; there {
		t.Error("the family of the dropped state is there")
	}
}

// What the cluster does not know any more is gone without a trace: its id may be
// given to another state.
func TestAssembleLeavesOutWhatTheClusterDoesNotKnow(t *testing.T) {
	d := newDriver(t, "mem")
	left, right := piece(t, d, 1, keygroup.Range{Lo: 0, Hi: 4}), piece(t, d, 2, keygroup.Range{Lo: 4, Hi: 8})
	for _, r := range []*replica{left, right} {
		for i := range 20 {
			if key := fmt.Sprint("key-", i); r.m.Header().Range.Contains(groupOf(key)) {
				r.write(request(put(key, "v"), add(sumID, key, i64(1))))
			}
		}
	}
	right.ok(right.command(raftfsm.AppendDrop(nil, []engine.FamilyID{listID})))
	states := map[engine.FamilyID]bool{}
	for _, decl := range testDeclarations() {
		states[decl.ID] = decl.ID != listID && decl.ID != sumID
	}
	r := assembled(t, d, []*replica{left, right}, raftfsm.Seed{Group: 9, Birth: 9, Range: keygroup.FullRange(groups), Epoch: 1, Incarnation: 2, Index: 5, Term: 1, States: states})
	for _, id := range []engine.FamilyID{listID, sumID} {
		if _, there := r.store.Families()[id]; there || r.m.Header().Declaration(id) != nil {
			t.Errorf("state %d is there", id)
		}
	}
	if r.value("key-3") != "v" {
		t.Error("a value has gone with other states")
	}
	decls := testDeclarations()
	again := decls[slices.IndexFunc(decls, func(decl state.Declaration) bool { return decl.ID == listID })]
	again.Name = "another"
	if o := r.command(raftfsm.AppendDeclare(nil, []state.Declaration{again})); o.Err != nil {
		t.Errorf("declaring another state under the id: %v", o.Err)
	}
}

// A source that gives something else than it held is found out, and a target that
// cannot be written fails.
func TestAssembleFailsWithItsStores(t *testing.T) {
	d := newDriver(t, "mem")
	r := piece(t, d, 1, keygroup.FullRange(groups))
	r.write(request(put("a", "1")))
	store, _ := copyOf(t, d, r)
	defer closeAll(t, store)
	broken := errors.New("broken")
	plan := &fault.Plan{}
	plan.Add(fault.Rule{Ops: []fault.Op{fault.OpWrite}, Error: broken})
	s := fault.NewStore(store, "target", plan)
	err := raftfsm.Assemble(context.Background(), s, nil, raftfsm.Seed{Group: 9, Birth: 9, Range: keygroup.FullRange(groups), Epoch: 1, Incarnation: 2, Index: 5, Term: 1})
	if !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := raftfsm.Assemble(ctx, store, nil, raftfsm.Seed{Group: 9, Birth: 9, Range: keygroup.FullRange(groups), Epoch: 1, Incarnation: 2, Index: 5, Term: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
