package state_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

var (
	valueState = decl(1, state.KindValue, keygroup.Bytes, "")
	listState  = decl(2, state.KindList, keygroup.Bytes, "")
	mapState   = decl(3, state.KindMap, keygroup.Bytes, "")
	sumState   = decl(4, state.KindReducing, keygroup.Int64, "sum")
	concat     = decl(5, state.KindReducing, keygroup.Bytes, "concat")
	meanState  = decl(6, state.KindAggregating, keygroup.Int64, "mean")
	floatSum   = decl(7, state.KindReducing, keygroup.Float64, "sum")
	firstState = decl(8, state.KindReducing, keygroup.String, "first")
	lastState  = decl(9, state.KindReducing, keygroup.String, "last")
	countState = decl(10, state.KindAggregating, keygroup.Bytes, "count")
)

// awkward are the byte strings that break naive layouts (B38).
var awkward = map[string][]byte{
	"empty": {}, "comma": []byte(","), "two fields": []byte("a,b"), "zero": {0}, "two zeros": {0, 0},
	"ff": {0xFF}, "escape": {0, 0xFF}, "end": {0, 1}, "end and more": {0, 1, 0, 1, 2}, "text": []byte("text"),
	"1 MB": bytes.Repeat([]byte{0, 0xFF, 1}, 1<<20/3),
}

func TestValueStoresAnyBytesAndNullClears(t *testing.T) {
	e := newEnv(t, 128, valueState)
	for name, v := range awkward {
		at := e.at(valueState, "k")
		if a := at.get(); a.Found {
			t.Fatalf("%s: present before the put", name)
		}
		e.do(valueState, at.put(v))
		a := at.get()
		equal(t, name, a, state.Answer{Found: true, Value: v, Version: e.seq})
		equal(t, name+" is empty", e.read(valueState, at.query(state.QueryIsEmpty)).Found, true)
		at.clear() // update(null)
		equal(t, name+" after clear", at.get(), state.Answer{})
	}
	at := e.at(valueState, "k")
	e.do(valueState, at.put(nil)) // nil is the empty value, not null
	equal(t, "nil value", at.get(), state.Answer{Found: true, Value: []byte{}, Version: e.seq})
}

func TestAnyBytesWorkAsKeyNamespaceAndUserKey(t *testing.T) {
	for _, m := range []int{1, 128, 129, 32768} {
		e := newEnv(t, m, func() *state.Declaration { d := *mapState; d.KeyType = keygroup.Bytes; return &d }())
		d := *mapState
		d.KeyType = keygroup.Bytes
		type cell struct{ key, ns, userKey string }
		want := map[cell]int{}
		for kn, key := range awkward {
			for nn, ns := range awkward {
				for un, uk := range awkward {
					if kn == "1 MB" || nn == "1 MB" || un == "1 MB" {
						continue
					}
					n := len(want)
					want[cell{string(key), string(ns), string(uk)}] = n
					e.do(&d, e.at(&d, key, string(ns)).entries(state.OpMapPut, state.Entry{UserKey: uk, Value: fmt.Append(nil, n)}))
				}
			}
		}
		for c, n := range want {
			q := e.at(&d, []byte(c.key), c.ns).query(state.QueryGet)
			q.UserKey = []byte(c.userKey)
			equal(t, fmt.Sprintf("%q", c), string(e.read(&d, q).Value), fmt.Sprint(n))
		}
		equal(t, "entries in store", e.entriesInStore(&d), len(want))
	}
}

func TestEmptyNamespaceIsNotTheVoidNamespace(t *testing.T) {
	e := newEnv(t, 128, valueState)
	e.do(valueState, e.at(valueState, "k").put([]byte("void")))
	e.do(valueState, e.at(valueState, "k", "").put([]byte("empty")))
	equal(t, "void", string(e.at(valueState, "k").get().Value), "void")
	equal(t, "empty", string(e.at(valueState, "k", "").get().Value), "empty")
	e.at(valueState, "k").clear()
	equal(t, "empty after clearing void", string(e.at(valueState, "k", "").get().Value), "empty")
}

func TestListKeepsOrderAndEveryElement(t *testing.T) {
	e := newEnv(t, 128, listState)
	at := e.at(listState, "k")
	equal(t, "absent list", at.list(), [][]byte(nil))
	e.do(listState, at.elements(state.OpListAdd)) // addAll([])
	equal(t, "after addAll([])", e.entriesInStore(listState), 0)
	var want [][]byte
	for _, name := range []string{"empty", "comma", "two fields", "zero", "two zeros", "ff", "end", "1 MB", "empty"} {
		want = append(want, awkward[name])
		e.do(listState, at.elements(state.OpListAdd, awkward[name]))
	}
	more := list("x", "", "x", "\x00")
	e.do(listState, at.elements(state.OpListAdd, more...))
	want = append(want, more...)
	equal(t, "elements", at.list(), want)
	e.do(listState, at.elements(state.OpListUpdate, list("b", "a")...))
	equal(t, "after update", at.list(), list("b", "a"))
	e.do(listState, at.elements(state.OpListUpdate)) // update([]) = clear
	equal(t, "after update([])", e.read(listState, at.query(state.QueryIsEmpty)).Found, false)
	equal(t, "store", e.entriesInStore(listState), 0)
	e.do(listState, at.elements(state.OpListAdd, list("n")...))
	equal(t, "add on a list that was cleared", at.list(), list("n"))
}

func TestNullElementIsRefusedAndHarmless(t *testing.T) {
	e := newEnv(t, 128, listState, sumState, countState)
	for _, d := range []*state.Declaration{listState, sumState, countState} {
		at := e.at(d, "k")
		one := enc(t, d.ValueType, map[bool]any{true: int64(5), false: []byte{}}[d == sumState])
		ops := []state.Op{state.OpAdd}
		if d == listState {
			ops = []state.Op{state.OpListAdd, state.OpListUpdate}
		}
		e.do(d, at.elements(ops[0], one))
		before := e.scanAll(d, state.ScanQuery{})
		for _, op := range ops {
			e.refused(base.ErrInvalid, "elements[1]", d, at.elements(op, one, nil, one))
		}
		equal(t, "after the refusal", e.scanAll(d, state.ScanQuery{}), before)
	}
}

func TestMapTellsNullFromAbsent(t *testing.T) {
	e := newEnv(t, 128, mapState)
	at := e.at(mapState, "k")
	get := func(k state.QueryKind, uk []byte) state.Answer {
		q := at.query(k)
		q.UserKey = uk
		return e.read(mapState, q)
	}
	equal(t, "empty map", e.read(mapState, at.query(state.QueryIsEmpty)).Found, false)
	e.do(mapState, at.entries(state.OpMapPut,
		state.Entry{UserKey: []byte{}, Null: true}, state.Entry{UserKey: []byte("b"), Value: []byte{}},
		state.Entry{UserKey: []byte("a"), Value: []byte("old")}, state.Entry{UserKey: []byte("a"), Value: []byte("new")}))
	v := e.seq
	equal(t, "null", get(state.QueryGet, []byte{}), state.Answer{Found: true, Null: true, Version: v})
	equal(t, "contains null", get(state.QueryContains, []byte{}), state.Answer{Found: true, Null: true, Version: v})
	equal(t, "empty value", get(state.QueryGet, []byte("b")), state.Answer{Found: true, Value: []byte{}, Version: v})
	equal(t, "last of equals", string(get(state.QueryGet, []byte("a")).Value), "new")
	equal(t, "absent", get(state.QueryGet, []byte("c")), state.Answer{})
	equal(t, "not contained", get(state.QueryContains, []byte("c")), state.Answer{})
	e.do(mapState, at.entries(state.OpMapRemove, state.Entry{UserKey: []byte("c")})) // absent: nothing
	_, entries := at.all(0, 0)
	equal(t, "order", []string{string(entries[0].UserKey), string(entries[1].UserKey), string(entries[2].UserKey)}, []string{"", "a", "b"})
	e.do(mapState, at.entries(state.OpMapRemove, state.Entry{}, state.Entry{UserKey: []byte("a")}, state.Entry{UserKey: []byte("b")}))
	equal(t, "removed", e.read(mapState, at.query(state.QueryIsEmpty)).Found, false)
}

func TestMapIteratesInByteOrderOfEncodedUserKeys(t *testing.T) {
	d := decl(3, state.KindMap, keygroup.String, "")
	d.UserKeyType = keygroup.Int64
	e := newEnv(t, 128, d)
	at := e.at(d, "k")
	var want []int64
	for _, n := range []int64{0, -1, 1, math.MinInt64, math.MaxInt64, 256, 255, -256} {
		e.do(d, at.entries(state.OpMapPut, state.Entry{UserKey: enc(t, keygroup.Int64, n), Value: []byte{}}))
		want = append(want, n)
	}
	slices.Sort(want)
	_, entries := at.all(3, 0)
	var got []int64
	for _, en := range entries {
		v, err := keygroup.Decode(keygroup.Int64, en.UserKey)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, v.(int64))
	}
	equal(t, "order", got, want)
}

func TestHundredThousandElementsAreReadBackInOrder(t *testing.T) {
	e := newEnv(t, 128, listState, mapState, countState)
	elements := make([][]byte, state.MaxElements)
	entries := make([]state.Entry, state.MaxElements)
	for i := range elements {
		elements[i] = fmt.Appendf(nil, "%06d", i)
		entries[i] = state.Entry{UserKey: elements[i], Value: []byte{}}
	}
	at := e.at(listState, "k")
	e.do(listState, at.elements(state.OpListAdd, elements...))
	got, _ := at.all(state.MaxPageItems, 0)
	equal(t, "list", got, elements)
	e.do(mapState, e.at(mapState, "k").entries(state.OpMapPut, entries...))
	_, gotEntries := e.at(mapState, "k").all(state.MaxPageItems, 0)
	equal(t, "map length", len(gotEntries), len(entries))
	for i := range entries {
		if !bytes.Equal(gotEntries[i].UserKey, entries[i].UserKey) {
			t.Fatalf("entry %d is %q", i, gotEntries[i].UserKey)
		}
	}
	e.do(countState, e.at(countState, "k").elements(state.OpAdd, elements...))
	equal(t, "count", e.at(countState, "k").result(), any(int64(state.MaxElements)))
	at.clear()
	e.at(mapState, "k").clear()
	equal(t, "list entries after clear", e.entriesInStore(listState), 0)
	equal(t, "map entries after clear", e.entriesInStore(mapState), 0)
}

// Small clears must leave no range tombstones, large ones no pile of point
// tombstones (B60).
func TestClearDeletesFewEntriesByPointAndManyByRange(t *testing.T) {
	e := newEnv(t, 128, listState, mapState)
	for _, n := range []int{0, 1, 127, 128, 129, 1000} {
		var elements [][]byte
		var entries []state.Entry
		for i := range n {
			elements = append(elements, fmt.Append(nil, i))
			entries = append(entries, state.Entry{UserKey: fmt.Append(nil, i), Value: []byte{}})
		}
		list, byKey := e.at(listState, "k"), e.at(mapState, "k")
		e.do(listState, list.elements(state.OpListAdd, elements...))
		e.do(mapState, byKey.entries(state.OpMapPut, entries...))
		for _, at := range []target{list, byKey} {
			tx := e.txn()
			if err := e.l.Apply(tx, at.d, at.mutation(state.OpClear), state.Stamp{Sequence: 1 << 40}); err != nil {
				t.Fatal(err)
			}
			ops := map[engine.OpKind]int{}
			_ = tx.Batch().Each(func(k engine.OpKind, _ engine.FamilyID, _, _ []byte) error { ops[k]++; return nil })
			want := map[engine.OpKind]int{engine.OpDelete: n}
			if n > 128 {
				want = map[engine.OpKind]int{engine.OpDeleteRange: 1}
			} else if n == 0 {
				want = map[engine.OpKind]int{}
			}
			equal(t, fmt.Sprintf("operations for %d", n), ops, want)
			if err := e.store.Write(tx.Batch()); err != nil {
				t.Fatal(err)
			}
			equal(t, "left", e.entriesInStore(at.d), 0)
		}
	}
}

func TestClearTouchesNoNeighbour(t *testing.T) {
	e := newEnv(t, 1, listState, mapState)
	keys := []string{"", "a", "a\x00", "a\x00\x00", "a\x00\x01", "a\x01", "b"}
	spaces := []string{"", "\x00", "n", "n\x00", "n\x01", "o"}
	fill := func(at target) {
		var elements [][]byte
		var entries []state.Entry
		for i := range 200 {
			elements = append(elements, fmt.Append(nil, i))
			entries = append(entries, state.Entry{UserKey: fmt.Append(nil, i), Value: []byte{}})
		}
		if at.d == listState {
			e.do(at.d, at.elements(state.OpListAdd, elements...))
		} else {
			e.do(at.d, at.entries(state.OpMapPut, entries...))
		}
	}
	for _, d := range []*state.Declaration{listState, mapState} {
		cells := 0
		for _, k := range keys {
			fill(e.at(d, k))
			cells++
			for _, ns := range spaces {
				fill(e.at(d, k, ns))
				cells++
			}
		}
		e.at(d, "a").clear()
		e.at(d, "a", "n").clear()
		e.at(d, "a\x00", "").clear()
		equal(t, "entries left", e.entriesInStore(d), (cells-3)*200)
		equal(t, "keys left", len(e.scanAll(d, state.ScanQuery{KeysOnly: true})), cells-3)
	}
}

func TestReducingFoldsInOrderAndAbsentIsAbsent(t *testing.T) {
	cases := []struct {
		typ      keygroup.Type
		function string
		adds     []any
		want     any
	}{
		{keygroup.Int64, "sum", []any{int64(1), int64(-2), int64(40)}, int64(39)},
		{keygroup.Int64, "sum", []any{int64(math.MaxInt64), int64(1), int64(-1)}, int64(math.MaxInt64)},
		{keygroup.Int64, "min", []any{int64(3), int64(-7), int64(0)}, int64(-7)},
		{keygroup.Int64, "max", []any{int64(-3), int64(-7)}, int64(-3)},
		{keygroup.Int64, "first", []any{int64(3), int64(-7)}, int64(3)},
		{keygroup.Int64, "last", []any{int64(3), int64(-7)}, int64(-7)},
		{keygroup.Int64, "bit-and", []any{int64(-1), int64(12), int64(10)}, int64(8)},
		{keygroup.Int64, "bit-or", []any{int64(12), int64(10), int64(math.MinInt64)}, int64(14 + math.MinInt64)},
		{keygroup.Float64, "sum", []any{1e16, 1.0, 1.0, -1e16}, 0.0}, // strictly left to right
		{keygroup.Float64, "sum", []any{1.0, 1.0, 1e16, -1e16}, 2.0},
		{keygroup.Float64, "min", []any{1.5, math.Inf(-1), 0.0}, math.Inf(-1)},
		{keygroup.Float64, "max", []any{1.5, -2.0}, 1.5},
		{keygroup.Float64, "first", []any{1.5, -2.0}, 1.5},
		{keygroup.Float64, "last", []any{1.5, -2.0}, -2.0},
		{keygroup.String, "concat", []any{"a", "", "b,"}, "ab,"},
		{keygroup.String, "min", []any{"b", "a", "a\x00"}, "a"},
		{keygroup.String, "max", []any{"b", "ba", ""}, "ba"},
		{keygroup.String, "first", []any{"", "x"}, ""},
		{keygroup.String, "last", []any{"x", ""}, ""},
		{keygroup.Bytes, "concat", []any{[]byte{0}, []byte{}, []byte{0, 1}}, []byte{0, 0, 1}},
		{keygroup.Bytes, "min", []any{[]byte{0xFF}, []byte{0, 0}, []byte{0}}, []byte{0}},
		{keygroup.Bytes, "max", []any{[]byte{0xFE}, []byte{0xFF}, []byte{}}, []byte{0xFF}},
		{keygroup.Bool, "max", []any{false, true}, true},
		{keygroup.Int32, "min", []any{int32(4), int32(-4)}, int32(-4)},
	}
	for i, c := range cases {
		t.Run(c.typ.String()+" "+c.function, func(t *testing.T) {
			d := decl(engine.FamilyID(i+1), state.KindReducing, c.typ, c.function)
			e := newEnv(t, 128, d)
			single, batch := e.at(d, "single"), e.at(d, "batch")
			equal(t, "absent", single.result(), nil)
			batch.add() // nothing
			equal(t, "after adding nothing", batch.result(), nil)
			for j, v := range c.adds {
				single.add(v)
				if j == 0 { // the first add stores the element as it is
					equal(t, "first", single.result(), v)
				}
			}
			batch.add(c.adds...)
			equal(t, "one by one", single.result(), c.want)
			equal(t, "in one add", batch.result(), c.want)
			a := e.read(d, single.query(state.QueryAccumulator))
			b := e.read(d, batch.query(state.QueryAccumulator))
			equal(t, "accumulator", a.Value, b.Value)
			equal(t, "version", single.get().Version, a.Version)
			single.clear()
			equal(t, "after clear", single.result(), nil)
			single.add(c.adds[0])
			equal(t, "first after clear", single.result(), c.adds[0])
		})
	}
}

func TestInt64SumOutOfRangeIsAnErrorAndNothingWraps(t *testing.T) {
	e := newEnv(t, 128, sumState)
	at := e.at(sumState, "k")
	for range 3 {
		at.add(int64(math.MaxInt64))
	}
	if _, err := e.l.Read(e.store, sumState, at.query(state.QueryGet)); !errors.Is(err, base.ErrOutOfRange) {
		t.Fatalf("got %v", err)
	}
	e.do(sumState, e.at(sumState, "other").elements(state.OpAdd, enc(t, keygroup.Int64, int64(1))))
	equal(t, "keys are still listed", len(e.scanAll(sumState, state.ScanQuery{KeysOnly: true})), 2)
	at.add(int64(-math.MaxInt64))
	at.add(int64(-math.MaxInt64))
	equal(t, "back in range", at.result(), any(int64(math.MaxInt64)))
	at.add(int64(1))
	if _, err := e.l.Read(e.store, sumState, at.query(state.QueryGet)); !errors.Is(err, base.ErrOutOfRange) {
		t.Fatalf("one above: got %v", err)
	}
	for range 4 {
		at.add(int64(math.MinInt64))
	}
	at.add(int64(math.MaxInt64))
	at.add(int64(math.MaxInt64))
	at.add(int64(2))
	equal(t, "minimum", at.result(), any(int64(math.MinInt64)))
	at.add(int64(-1))
	if _, err := e.l.Read(e.store, sumState, at.query(state.QueryGet)); !errors.Is(err, base.ErrOutOfRange) {
		t.Fatalf("one below: got %v", err)
	}
}

func TestFloatsFollowOneTotalOrder(t *testing.T) {
	negZero, nan := math.Copysign(0, -1), math.Float64frombits(0x7FF8000000000000) // the canonical one
	oddNaN := math.Float64frombits(0xFFF8000000000123)                             // negative, with a payload
	e := newEnv(t, 128)
	bits := func(v any) string { return fmt.Sprintf("%x", math.Float64bits(v.(float64))) }
	for i, c := range []struct {
		function string
		adds     []any
		want     float64
	}{
		{"max", []any{1.0, oddNaN, math.Inf(1)}, nan}, // NaN is above +Inf
		{"min", []any{oddNaN, 1.0}, 1},
		{"min", []any{0.0, negZero}, negZero},
		{"max", []any{negZero, 0.0}, 0},
		{"sum", []any{negZero}, negZero},
		{"sum", []any{negZero, negZero}, negZero},
		{"sum", []any{negZero, 0.0}, 0},
		{"sum", []any{math.Inf(1), math.Inf(-1)}, nan},
		{"sum", []any{oddNaN, 1.0}, nan},
		{"last", []any{1.0, oddNaN}, nan},
	} {
		d := decl(engine.FamilyID(i+1), state.KindReducing, keygroup.Float64, c.function)
		e.declare(d)
		at := e.at(d, "k")
		for _, v := range c.adds {
			at.add(v)
		}
		equal(t, fmt.Sprint(c.function, c.adds), bits(at.result()), bits(c.want))
	}
	d := decl(100, state.KindAggregating, keygroup.Float64, "mean")
	e.declare(d)
	e.at(d, "k").add(negZero, negZero)
	equal(t, "mean of minus zeros", bits(e.at(d, "k").result()), bits(negZero))
}

// B42: overlapping namespaces, merged, leave their own values and no leftovers.
func TestMergedNamespacesLeaveNothingBehind(t *testing.T) {
	for _, d := range []*state.Declaration{sumState, concat, meanState, floatSum, firstState, lastState, listState} {
		t.Run(d.Name+" "+d.Function, func(t *testing.T) {
			e := newEnv(t, 128, d)
			val := func(n int) any {
				switch d.ValueType {
				case keygroup.Int64:
					return int64(n)
				case keygroup.Float64:
					return float64(n)
				case keygroup.String:
					return fmt.Sprint(n)
				}
				return fmt.Append(nil, n)
			}
			show := func(at target) string {
				if d.Kind == state.KindList {
					return string(bytes.Join(at.list(), []byte(",")))
				}
				switch v := at.result().(type) {
				case nil:
					return "absent"
				case []byte:
					return string(v)
				default:
					return fmt.Sprint(v)
				}
			}
			a, b, c := e.at(d, "k", "a"), e.at(d, "k", "b"), e.at(d, "k", "c")
			for n := 1; n <= 3; n++ {
				a.add(val(n))
				b.add(val(n * 10))
			}
			c.add(val(7))
			e.at(d, "other", "b").add(val(9))
			want := map[string][4]string{ // a, b, then a merged from (c, b), then c merged from a
				"sum":    {"6", "60", "73", "73"},
				"concat": {"123", "102030", "7102030123", "7102030123"}, // target last
				"mean":   {"2", "20", "10.428571428571429", "10.428571428571429"},
				"first":  {"1", "10", "7", "7"},
				"last":   {"3", "30", "3", "3"},
				"":       {"1,2,3", "10,20,30", "1,2,3,7,10,20,30", "1,2,3,7,10,20,30"}, // target first
			}[d.Function]
			equal(t, "a", show(a), want[0])
			equal(t, "b", show(b), want[1])
			// c twice: it is absent the second time. The empty sources do nothing.
			e.do(d, a.merge(named("c"), named("b"), named("c"), named("nothing"), state.Namespace{}))
			equal(t, "merged", show(a), want[2])
			absent := map[bool]string{true: "", false: "absent"}[d.Kind == state.KindList]
			equal(t, "source b", show(b), absent)
			equal(t, "source c", show(c), absent)
			e.do(d, c.merge(named("a")))
			equal(t, "merged into an absent target", show(c), want[3])
			c.clear()
			e.at(d, "other", "b").clear()
			equal(t, "store at the end", e.entriesInStore(d), 0)
		})
	}
}

func TestMergeNamespacesWritesNothingWithoutASource(t *testing.T) {
	e := newEnv(t, 128, sumState, listState, valueState, mapState, meanState)
	for _, d := range []*state.Declaration{sumState, listState, meanState} {
		at := e.at(d, "k", "t")
		if d == listState {
			at.add([]byte("x"))
		} else {
			at.add(int64(1))
		}
		for _, m := range []*state.Mutation{at.merge(), at.merge(named("none"), state.Namespace{})} {
			tx := e.txn()
			if err := e.l.Apply(tx, d, m, state.Stamp{Sequence: 99}); err != nil {
				t.Fatal(err)
			}
			equal(t, "operations", tx.Batch().Len(), 0)
		}
		e.refused(base.ErrInvalid, "sources[1]", d, at.merge(named("none"), named("t")))
		e.refused(base.ErrInvalid, "sources[0]", d, e.at(d, "k").merge(state.Namespace{}))
	}
	e.refused(base.ErrWrongKind, "op", valueState, e.at(valueState, "k").merge(named("a")))
	e.refused(base.ErrWrongKind, "op", mapState, e.at(mapState, "k").merge(named("a")))
}

// B42: what the caller does to its slices afterwards changes nothing, neither
// those it passed nor those it got.
func TestCallersSlicesAreNeverShared(t *testing.T) {
	e := newEnv(t, 128, valueState, listState, mapState, concat, countState)
	scribble := func(bs ...[]byte) {
		for _, b := range bs {
			for i := range b {
				b[i] ^= 0xAA
			}
		}
	}
	muts := func(key, ns, uk, v []byte) []*state.Mutation {
		name := state.Namespace{Set: true, Bytes: ns}
		g, err := keygroup.GroupOfKey(keygroup.String, key, 128)
		if err != nil {
			t.Fatal(err)
		}
		mk := func(id engine.FamilyID, op state.Op) *state.Mutation {
			return &state.Mutation{State: id, Op: op, Group: g, Key: key, Namespace: name}
		}
		value, list, byKey, cat := mk(1, state.OpValuePut), mk(2, state.OpListAdd), mk(3, state.OpMapPut), mk(5, state.OpAdd)
		value.Value, list.Elements, cat.Elements = v, [][]byte{v}, [][]byte{v}
		byKey.Entries = []state.Entry{{UserKey: uk, Value: v}}
		return []*state.Mutation{value, list, byKey, cat}
	}
	decls := []*state.Declaration{valueState, listState, mapState, concat}
	tx := e.txn()
	for i := range decls {
		key, ns, uk, v := []byte("key"), []byte("ns"), []byte("uk"), []byte("value")
		m := muts(key, ns, uk, v)[i]
		if err := e.l.Apply(tx, decls[i], m, state.Stamp{Sequence: uint64(i + 1)}); err != nil {
			t.Fatal(err)
		}
		scribble(key, ns, uk, v)
	}
	if err := e.store.Write(tx.Batch()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second round reads again after the first scribbled
		for _, d := range decls {
			items := e.scanAll(d, state.ScanQuery{})
			equal(t, d.Name, len(items), 1)
			it := items[0]
			equal(t, d.Name, []string{string(it.Key), string(it.Namespace.Bytes), string(it.Entry.Value)}, []string{"key", "ns", "value"})
			scribble(it.Key, it.Namespace.Bytes, it.Entry.UserKey, it.Entry.Value)
			at := e.at(d, "key", "ns")
			if d == listState || d == mapState {
				elements, entries := at.all(0, 0)
				for _, el := range elements {
					scribble(el)
				}
				for _, en := range entries {
					scribble(en.UserKey, en.Value)
				}
			} else {
				scribble(at.get().Value)
			}
		}
	}
}
