package state_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// rawKeys returns the engine keys that a mutation puts.
func rawKeys(t tb, l state.Layout, d *state.Declaration, m *state.Mutation, seq uint64) [][]byte {
	t.Helper()
	tx := engine.NewTxn(noStore{}, func(engine.FamilyID) engine.MergeKind { return engine.MergeNone })
	if err := l.Apply(tx, d, m, state.Stamp{Sequence: seq}); err != nil {
		t.Fatalf("apply: %v", err)
	}
	var keys [][]byte
	_ = tx.Batch().Each(func(_ engine.OpKind, _ engine.FamilyID, key, _ []byte) error {
		keys = append(keys, bytes.Clone(key))
		return nil
	})
	return keys
}

// noStore is an empty Reader.
type noStore struct{}

func (noStore) Get(engine.FamilyID, []byte) ([]byte, bool, error) { return nil, false, nil }
func (noStore) MultiGet(_ engine.FamilyID, k [][]byte) ([][]byte, error) {
	return make([][]byte, len(k)), nil
}
func (noStore) Scan(engine.FamilyID, []byte, []byte, engine.ScanOptions) engine.Iterator {
	return noItems{}
}

type noItems struct{}

func (noItems) Next() bool    { return false }
func (noItems) Key() []byte   { return nil }
func (noItems) Value() []byte { return nil }
func (noItems) Err() error    { return nil }
func (noItems) Close()        {}

type triple struct {
	key, ns, userKey string
	set              bool
	seq              uint64
}

func drawTriple(t *rapid.T, kind state.Kind) triple {
	part := func(name string) string {
		return string(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 2, 0xFE, 0xFF}), 0, 4).Draw(t, name))
	}
	x := triple{key: part("key"), set: rapid.Bool().Draw(t, "set")}
	if x.set {
		x.ns = part("namespace")
	}
	if kind == state.KindMap {
		x.userKey = part("user key")
	}
	if kind == state.KindList {
		x.seq = rapid.SampledFrom([]uint64{0, 1, 255, 256, 1 << 63, 1<<64 - 1}).Draw(t, "sequence")
	}
	return x
}

func (x triple) encode(t tb, l state.Layout, d *state.Declaration) []byte {
	e := &env{tb: t, l: l}
	at := target{e: e, d: d, key: []byte(x.key), ns: state.Namespace{Set: x.set, Bytes: []byte(x.ns)}}
	switch d.Kind {
	case state.KindMap:
		return rawKeys(t, l, d, at.entries(state.OpMapPut, state.Entry{UserKey: []byte(x.userKey), Value: []byte{}}), 1)[0]
	case state.KindList:
		return rawKeys(t, l, d, at.elements(state.OpListAdd, []byte{}), x.seq)[0]
	}
	return rawKeys(t, l, d, at.put(nil), 1)[0]
}

func (x triple) compare(o triple, group func(string) keygroup.Group) int {
	if g, h := group(x.key), group(o.key); g != h {
		return int(g) - int(h)
	}
	if c := strings.Compare(x.key, o.key); c != 0 {
		return c
	}
	if x.set != o.set {
		return map[bool]int{true: 1, false: -1}[x.set]
	}
	if c := strings.Compare(x.ns, o.ns); c != 0 {
		return c
	}
	if c := strings.Compare(x.userKey, o.userKey); c != 0 {
		return c
	}
	return map[bool]int{true: 1, false: -1}[x.seq > o.seq] * map[bool]int{true: 0, false: 1}[x.seq == o.seq]
}

// ST1 and ST2: engine keys are as different as what they stand for, none is a
// prefix of another, and their order is that of (group, key, namespace, rest).
func TestEngineKeysAreInjectivePrefixFreeAndOrdered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := state.Layout{M: rapid.SampledFrom([]int{1, 128, 129, 32768}).Draw(t, "m")}
		kind := rapid.SampledFrom([]state.Kind{state.KindValue, state.KindList, state.KindMap}).Draw(t, "kind")
		d := decl(7, kind, keygroup.Bytes, "")
		d.KeyType = keygroup.Bytes
		group := func(key string) keygroup.Group {
			g, err := keygroup.GroupOfKey(d.KeyType, []byte(key), l.M)
			if err != nil {
				t.Fatal(err)
			}
			return g
		}
		x, y := drawTriple(t, kind), drawTriple(t, kind)
		if rapid.Bool().Draw(t, "same key") {
			y.key = x.key
		}
		a, b := x.encode(t, l, d), y.encode(t, l, d)
		if got, want := bytes.Compare(a, b), x.compare(y, group); sign(got) != sign(want) {
			t.Fatalf("%+v and %+v: order %d, want %d", x, y, got, want)
		}
		if x != y && (bytes.HasPrefix(a, b) || bytes.HasPrefix(b, a)) {
			t.Fatalf("%x and %x: one is a prefix of the other", a, b)
		}
		k, err := l.ParseKey(kind, a)
		if err != nil {
			t.Fatalf("parsing: %v", err)
		}
		back := triple{string(k.Key), string(k.Namespace.Bytes), string(k.UserKey), k.Namespace.Set, k.Sequence}
		if back != x || k.Group != group(x.key) || k.Index != 0 {
			t.Fatalf("parsed %+v from %+v", k, x)
		}
		// The native extractor's prefix: group, escaped key, end.
		end := bytes.Index(a[keygroup.PrefixLen(l.M):], []byte{0, 1})
		if x.key == y.key && !bytes.HasPrefix(b, a[:keygroup.PrefixLen(l.M)+end+2]) {
			t.Fatalf("%x and %x do not share their key's prefix", a, b)
		}
	})
}

func sign(n int) int {
	switch {
	case n < 0:
		return -1
	case n > 0:
		return 1
	}
	return 0
}

func TestParseKeyRefusesWhatNoLayoutWrites(t *testing.T) {
	l := state.Layout{M: 128}
	for name, raw := range map[string]string{
		"empty": "", "group only": "\x05", "group too large": "\x80a\x00\x01\x01", "key does not end": "\x05abc",
		"bad escape": "\x05a\x00\x02\x00\x01\x01", "ends in an escape": "\x05a\x00", "no namespace": "\x05a\x00\x01",
		"bad tag": "\x05a\x00\x01\x03", "namespace does not end": "\x05a\x00\x01\x02n", "tail": "\x05a\x00\x01\x01x",
	} {
		if _, err := l.ParseKey(state.KindValue, []byte(raw)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := l.ParseKey(state.KindList, []byte("\x05a\x00\x01\x0112345678901")); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("short element: %v", err)
	}
	if _, err := l.ParseKey(9, []byte("\x05a\x00\x01\x01")); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("unknown kind: %v", err)
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add(uint16(128), uint8(1), []byte("\x05a\x00\x01\x01"))
	f.Add(uint16(129), uint8(3), []byte("\x00\x05a\x00\xff\x00\x01\x02n\x00\x01u\x00\x01"))
	f.Add(uint16(1), uint8(2), []byte("\x00\x00\x01\x01123456789012"))
	f.Fuzz(func(t *testing.T, m uint16, kind uint8, raw []byte) {
		l := state.Layout{M: max(1, int(m))}
		k, err := l.ParseKey(state.Kind(kind), raw)
		if err != nil {
			return
		}
		// What parses is exactly what the layout would write for its parts.
		d := decl(7, state.Kind(kind), keygroup.Bytes, "")
		d.KeyType = keygroup.Bytes
		if kind > 3 {
			d = decl(7, state.KindValue, keygroup.Bytes, "")
			d.KeyType = keygroup.Bytes
		}
		g, err := keygroup.GroupOfKey(d.KeyType, k.Key, l.M)
		if err != nil || g != k.Group || k.Index != 0 || len(raw) > state.MaxKeyBytes {
			return // the key does not hash to its group, or is beyond the limits
		}
		x := triple{string(k.Key), string(k.Namespace.Bytes), string(k.UserKey), k.Namespace.Set, k.Sequence}
		if again := x.encode(t, l, d); !bytes.Equal(again, raw) {
			t.Fatalf("%x parses as %+v, which is written %x", raw, k, again)
		}
	})
}

// Frozen: the bytes of engine keys and values.
func TestGoldenKeysAndValues(t *testing.T) {
	var out bytes.Buffer
	for _, m := range []int{128, 32768} {
		l := state.Layout{M: m}
		for i, kind := range []state.Kind{state.KindValue, state.KindList, state.KindMap, state.KindReducing, state.KindAggregating} {
			function := []string{"", "", "", "sum", "mean"}[i]
			d := decl(engine.FamilyID(i+1), kind, keygroup.Int64, function)
			e := &env{tb: t, l: l}
			fmt.Fprintf(&out, "M=%d %s options %+v\n", m, kind, l.FamilyOptions(d))
			for _, at := range []target{e.at(d, "user_123"), e.at(d, "", ""), e.at(d, "a\x00b", "w\x00\xff")} {
				tx := engine.NewTxn(noStore{}, func(engine.FamilyID) engine.MergeKind { return l.FamilyOptions(d).Merge })
				one := enc(t, keygroup.Int64, int64(1))
				var mut *state.Mutation
				switch kind {
				case state.KindValue:
					mut = at.put(one)
				case state.KindMap:
					mut = at.entries(state.OpMapPut, state.Entry{UserKey: []byte("u\x00"), Value: one}, state.Entry{UserKey: []byte{}, Null: true})
				case state.KindList:
					mut = at.elements(state.OpListAdd, one, one)
				default:
					mut = at.elements(state.OpAdd, one, one)
				}
				if err := l.Apply(tx, d, mut, state.Stamp{Sequence: 0x0102030405060708, ClockMs: 9}); err != nil {
					t.Fatal(err)
				}
				_ = tx.Batch().Each(func(k engine.OpKind, f engine.FamilyID, key, value []byte) error {
					fmt.Fprintf(&out, "  op %d family %d\n    key   %x\n    value %x\n", k, f, key, value)
					return nil
				})
			}
		}
	}
	golden(t, "layout.txt", out.Bytes())
}

func TestScanSeeksPastWhatItDoesNotWant(t *testing.T) {
	d := decl(3, state.KindMap, keygroup.Bytes, "")
	e := newEnv(t, 4, d)
	var wantKeys, wantN int
	for k := range 30 {
		for _, ns := range []string{"a", "m", "z"} {
			var entries []state.Entry
			for i := range 3 + 40*(k%2) { // fewer and more than a scan steps over
				entries = append(entries, state.Entry{UserKey: fmt.Append(nil, i), Value: []byte("v")})
			}
			if k%7 == 3 && ns == "m" {
				continue
			}
			e.do(d, e.at(d, fmt.Sprint(k), ns).entries(state.OpMapPut, entries...))
			wantKeys++
			if ns == "m" {
				wantN += len(entries)
			}
		}
	}
	for _, limit := range []int{0, 1, 2, 7, 1000} {
		equal(t, "keys", len(e.scanAll(d, state.ScanQuery{KeysOnly: true, Limit: limit})), wantKeys)
		equal(t, "entries of m", len(e.scanAll(d, state.ScanQuery{Filter: true, Namespace: named("m"), Limit: limit})), wantN)
		for _, ns := range []string{"", "b", "zz"} {
			equal(t, "entries of none", len(e.scanAll(d, state.ScanQuery{Filter: true, Namespace: named(ns), Limit: limit})), 0)
		}
		equal(t, "entries of void", len(e.scanAll(d, state.ScanQuery{Filter: true, Limit: limit})), 0)
		keys := e.scanAll(d, state.ScanQuery{Filter: true, Namespace: named("m"), KeysOnly: true, Limit: limit})
		equal(t, "keys of m", len(keys), 30-4)
	}
	full := keygroup.FullRange(4)
	if n, err := e.l.Count(e.store, d, full); err != nil || n != uint64(wantKeys) {
		t.Fatalf("count %d, %v, want %d", n, err, wantKeys)
	}
}

func TestScanStopsBeforeAResultThatDoesNotFit(t *testing.T) {
	d := sumState
	e := newEnv(t, 1, d)
	for _, k := range []string{"a", "b", "c"} {
		e.at(d, k).add(int64(1))
	}
	e.at(d, "b").add(int64(1<<63 - 1))
	q := &state.ScanQuery{State: d.ID, Range: keygroup.FullRange(1)}
	items, next, err := e.l.Scan(e.store, d, q)
	if err != nil || len(items) != 1 || next == nil {
		t.Fatalf("first page: %d items, next %x, %v", len(items), next, err)
	}
	q.Cursor = next
	_, _, err = e.l.Scan(e.store, d, q)
	wantRefusal(t, err, base.ErrOutOfRange, "")
	q.Cursor, q.KeysOnly = nil, true
	items, _, err = e.l.Scan(e.store, d, q)
	if err != nil || len(items) != 3 {
		t.Fatalf("keys: %d, %v", len(items), err)
	}
}

func TestBadCursorsAreRefused(t *testing.T) {
	e := newEnv(t, 128, listState, mapState, valueState)
	e.do(listState, e.at(listState, "k").elements(state.OpListAdd, list("a", "b")...))
	e.do(mapState, e.at(mapState, "k").entries(state.OpMapPut, state.Entry{UserKey: []byte("a"), Value: []byte{}}))
	bad := [][]byte{{1}, {0}, {1, 'X'}, {1, 'L'}, {1, 'L', 1, 2, 3}, append([]byte{1, 'L'}, make([]byte, 13)...),
		append([]byte{1, 'M'}, make([]byte, state.MaxUserKeyBytes+1)...), append([]byte{1, 'S'}, make([]byte, 1<<18)...),
		{1, 'S', 0x85}, {1, 'K', 5, 'a', 0, 1}, {1, 'S', 5, 'a', 0, 1, 1, 'x'}}
	for _, c := range bad {
		for _, d := range []*state.Declaration{listState, mapState} {
			q := e.at(d, "k").query(state.QueryPage)
			q.Cursor = c
			_, err := e.l.Read(e.store, d, q)
			wantRefusal(t, err, base.ErrInvalid, "cursor")
		}
		for _, keysOnly := range []bool{false, true} {
			_, _, err := e.l.Scan(e.store, valueState, &state.ScanQuery{State: 1, Range: keygroup.Range{Lo: 0, Hi: 4}, Cursor: c, KeysOnly: keysOnly})
			wantRefusal(t, err, base.ErrInvalid, "cursor")
		}
	}
	q := e.at(listState, "k").query(state.QueryPage)
	q.Cursor = []byte{2, 'L'}
	_, err := e.l.Read(e.store, listState, q)
	wantRefusal(t, err, base.ErrUnsupported, "cursor")
}

func FuzzCursor(f *testing.F) {
	dir := f.TempDir()
	e := &env{tb: f, l: state.Layout{M: 128}, store: openStore(f, dir+"/s")}
	f.Cleanup(func() { _ = e.store.Close() })
	e.declare(listState, mapState, valueState)
	for _, k := range []string{"", "a", "b\x00"} {
		e.do(listState, e.at(listState, k).elements(state.OpListAdd, list("x", "y", "z")...))
		e.do(mapState, e.at(mapState, k).entries(state.OpMapPut, state.Entry{UserKey: []byte("u"), Null: true}, state.Entry{UserKey: []byte("v"), Value: []byte("w")}))
		e.do(valueState, e.at(valueState, k).put([]byte("v")))
	}
	f.Add([]byte{1, 'L', 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0})
	f.Add([]byte{1, 'M', 'u'})
	f.Add([]byte{1, 'S', 5, 'a', 0, 1, 1})
	f.Add([]byte{1, 'K', 5, 'a', 0, 1, 2, 0, 1})
	shared := e
	f.Fuzz(func(t *testing.T, cursor []byte) {
		e := &env{tb: t, l: shared.l, store: shared.store}
		for _, d := range []*state.Declaration{listState, mapState} {
			q := e.at(d, "a").query(state.QueryPage)
			q.Cursor = cursor
			if a, err := e.l.Read(e.store, d, q); err == nil && (len(a.Elements) > 3 || len(a.Entries) > 2) {
				t.Fatalf("a cursor leads outside the cell: %+v", a)
			}
		}
		for _, d := range []*state.Declaration{listState, mapState, valueState} {
			for _, keysOnly := range []bool{false, true} {
				r := keygroup.Range{Lo: 3, Hi: 90}
				items, _, _ := e.l.Scan(e.store, d, &state.ScanQuery{State: d.ID, Range: r, Cursor: cursor, KeysOnly: keysOnly})
				for _, it := range items {
					if !r.Contains(it.Group) {
						t.Fatalf("a cursor leads outside the range: %+v", it)
					}
				}
			}
		}
	})
}

func TestContentHashIsASumOverEntries(t *testing.T) {
	decls := []*state.Declaration{valueState, listState, mapState, sumState}
	fill := func(e *env, order []int) {
		for _, i := range order {
			e.seq = uint64(100 + 10*i) // the same sequence whatever the order
			key := fmt.Sprint(i)
			e.do(valueState, e.at(valueState, key).put([]byte(key)))
			e.at(listState, key).add([]byte(key))
			e.do(mapState, e.at(mapState, key).entries(state.OpMapPut, state.Entry{UserKey: []byte{}, Null: true}))
			e.at(sumState, key).add(int64(i))
		}
	}
	hashes := func(e *env, decls []*state.Declaration) []state.Hash128 {
		var out []state.Hash128
		for g := range e.l.M {
			h, err := e.l.HashGroup(e.store, decls, keygroup.Group(g))
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, h)
		}
		return out
	}
	// All at once, and some, are the same as one by one.
	ranges := func(e *env) {
		t.Helper()
		all := hashes(e, decls)
		for _, r := range []keygroup.Range{{Lo: 0, Hi: 8}, {Lo: 3, Hi: 6}, {Lo: 5, Hi: 5}} {
			got, err := e.l.HashGroups(t.Context(), e.store, decls, r)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, r.String(), got, append([]state.Hash128{}, all[r.Lo:r.Hi]...))
		}
	}
	a, b := newEnv(t, 8, decls...), newEnv(t, 8, decls...)
	ranges(a)
	for _, h := range hashes(a, decls) {
		equal(t, "hash of nothing", h, state.Hash128{})
	}
	order := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}
	fill(a, order)
	slices.Reverse(order)
	fill(b, order)
	ranges(a)
	equal(t, "another order", hashes(b, decls), hashes(a, decls))
	var sum, parts, single state.Hash128
	for _, h := range hashes(a, decls) {
		sum = sum.Plus(h)
	}
	for i := range decls {
		for _, h := range hashes(a, decls[i:i+1]) {
			parts = parts.Plus(h)
		}
		it := a.store.Scan(decls[i].ID, nil, nil, engine.ScanOptions{})
		for it.Next() {
			h, _ := state.HashEntry(decls[i].ID, it.Key(), it.Value(), nil)
			single = single.Plus(h)
		}
		it.Close()
	}
	equal(t, "sum of parts", parts, sum)
	equal(t, "sum of entries", single, sum)
	back, err := state.ParseHash128(sum.String())
	if err != nil || back != sum || len(sum.Append(nil)) != 16 {
		t.Fatalf("%s reads back as %s, %v", sum, back, err)
	}
	b.do(valueState, b.at(valueState, "3").put([]byte("4")))
	if slices.Equal(hashes(b, decls), hashes(a, decls)) {
		t.Fatal("a changed value does not show")
	}
	if _, err := a.l.HashGroup(a.store, decls, 8); !errors.Is(err, base.ErrInvalid) {
		t.Fatalf("group 8 of 8: %v", err)
	}
	if _, err := a.l.HashGroups(t.Context(), a.store, decls, keygroup.Range{Lo: 2, Hi: 1}); !errors.Is(err, base.ErrInvalid) {
		t.Fatalf("a range backwards: %v", err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.l.HashGroups(gone, a.store, decls, keygroup.Range{Lo: 0, Hi: 8}); !errors.Is(err, context.Canceled) {
		t.Fatalf("a caller that is gone: %v", err)
	}
	golden(t, "content-hash.txt", []byte(fmt.Sprintln(sum)+fmt.Sprintln(hashes(a, decls))))
	if _, err := state.ParseHash128("xyz"); !errors.Is(err, base.ErrInvalid) {
		t.Fatal(err)
	}
	top := state.Hash128{Hi: 1<<64 - 1, Lo: 1<<64 - 1}
	equal(t, "wraps", top.Plus(state.Hash128{Lo: 1}), state.Hash128{})
}
