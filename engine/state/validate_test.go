package state_test

import (
	"bytes"
	"errors"
	"math"
	"testing"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

func TestDeclarationsAreRefusedByField(t *testing.T) {
	for _, c := range []struct {
		field string
		want  error
		edit  func(*state.Declaration)
	}{
		{"", nil, func(d *state.Declaration) {}},
		{"keyspace", base.ErrInvalid, func(d *state.Declaration) { d.Keyspace = "" }},
		{"keyspace", base.ErrInvalid, func(d *state.Declaration) { d.Keyspace = "a/b" }},
		{"name", base.ErrInvalid, func(d *state.Declaration) { d.Name = "a\nb" }},
		{"name", base.ErrInvalid, func(d *state.Declaration) { d.Name = "\xFF" }},
		{"name", base.ErrInvalid, func(d *state.Declaration) { d.Name = string(bytes.Repeat([]byte("n"), 129)) }},
		{"kind", base.ErrInvalid, func(d *state.Declaration) { d.Kind = 0 }},
		{"kind", base.ErrInvalid, func(d *state.Declaration) { d.Kind = 6 }},
		{"key_type", base.ErrInvalid, func(d *state.Declaration) { d.KeyType = keygroup.Float64 }},
		{"key_type", base.ErrInvalid, func(d *state.Declaration) { d.KeyType = keygroup.Type{} }},
		{"user_key_type", base.ErrInvalid, func(d *state.Declaration) { d.UserKeyType = keygroup.String }},
		{"user_key_type", base.ErrInvalid, func(d *state.Declaration) { d.Kind = state.KindMap }},
		{"user_key_type", base.ErrInvalid, func(d *state.Declaration) { d.Kind, d.UserKeyType = state.KindMap, keygroup.JSON }},
		{"value_type", base.ErrInvalid, func(d *state.Declaration) { d.ValueType = keygroup.Type{} }},
		{"codec_version", base.ErrUnsupported, func(d *state.Declaration) { d.CodecVersion = 2 }},
		{"function", base.ErrInvalid, func(d *state.Declaration) { d.Function = "sum" }},
		{"function", base.ErrInvalid, func(d *state.Declaration) { d.Kind = state.KindReducing }},
		{"function", base.ErrInvalid, func(d *state.Declaration) { d.Kind, d.Function = state.KindReducing, "count" }},
		{"function", base.ErrUnsupported, func(d *state.Declaration) { d.Kind, d.Function = state.KindAggregating, "client" }},
		{"", nil, func(d *state.Declaration) { d.Kind, d.Function = state.KindAggregating, "topk(3)" }},
	} {
		d := decl(0, state.KindValue, keygroup.Int64, "")
		c.edit(d)
		err := state.ValidateDeclaration(d)
		if c.want == nil && err != nil {
			t.Errorf("%+v: %v", d, err)
		} else if c.want != nil {
			wantRefusal(t, err, c.want, c.field)
		}
	}
}

func TestRedeclarationNamesWhatDiffers(t *testing.T) {
	old := decl(1, state.KindAggregating, keygroup.Int64, "quantiles(0.5)")
	for _, c := range []struct {
		field string
		edit  func(*state.Declaration)
	}{
		{"", func(d *state.Declaration) { d.ID = 9 }},
		{"", func(d *state.Declaration) { d.Function = " quantiles( 0.50 )" }},
		{"key_type", func(d *state.Declaration) { d.KeyType = keygroup.Int64 }},
		{"kind", func(d *state.Declaration) { d.Kind, d.Function = state.KindReducing, "sum" }},
		{"value_type", func(d *state.Declaration) { d.ValueType = keygroup.Float64 }},
		{"codec_version", func(d *state.Declaration) { d.CodecVersion = 2 }},
		{"function", func(d *state.Declaration) { d.Function = "quantiles(0.9)" }},
	} {
		next := *old
		c.edit(&next)
		err := state.CheckRedeclaration(old, &next)
		if c.field == "" && err != nil {
			t.Errorf("%+v: %v", next, err)
		} else if c.field != "" {
			wantRefusal(t, err, base.ErrConflict, c.field)
		}
	}
}

func TestKindNamesReadBack(t *testing.T) {
	for k := state.KindValue; k <= state.KindAggregating; k++ {
		if back, err := state.ParseKind(k.String()); err != nil || back != k {
			t.Errorf("%s: %v, %v", k, back, err)
		}
	}
	if _, err := state.ParseKind("kind(0)"); !errors.Is(err, base.ErrInvalid) {
		t.Error(err)
	}
}

func TestMutationsAreRefusedByField(t *testing.T) {
	jsonState := decl(20, state.KindValue, keygroup.JSON, "")
	topK := decl(21, state.KindAggregating, keygroup.Bytes, "topk(1)")
	e := newEnv(t, 128, valueState, listState, mapState, sumState, concat, jsonState, topK)
	big := make([]byte, state.MaxValueBytes+1)
	many := make([][]byte, state.MaxElements+1)
	for i := range many {
		many[i] = []byte{}
	}
	three := [][]byte{big[1:], big[1:], big[1:]}
	value, l, m, sum := e.at(valueState, "k"), e.at(listState, "k"), e.at(mapState, "k"), e.at(sumState, "k")
	edit := func(mu *state.Mutation, f func(*state.Mutation)) *state.Mutation { f(mu); return mu }
	uk := func(n int) []byte { return make([]byte, n) }
	for _, c := range []struct {
		d     *state.Declaration
		m     *state.Mutation
		want  error
		field string
	}{
		{valueState, value.mutation(0), base.ErrInvalid, "op"},
		{valueState, value.mutation(9), base.ErrInvalid, "op"},
		{valueState, value.mutation(state.OpListAdd), base.ErrWrongKind, "op"},
		{listState, l.mutation(state.OpValuePut), base.ErrWrongKind, "op"},
		{mapState, m.mutation(state.OpAdd), base.ErrWrongKind, "op"},
		{sumState, sum.mutation(state.OpMapPut), base.ErrWrongKind, "op"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.State = 2 }), base.ErrInvalid, "state"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Group++ }), base.ErrInvalid, "group"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Key = []byte("\xFF") }), base.ErrInvalid, "key"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Key = uk(state.MaxKeyBytes + 1) }), base.ErrTooLarge, "key"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Namespace = state.Namespace{Bytes: []byte("n")} }), base.ErrInvalid, "namespace"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Namespace = named(string(uk(state.MaxNamespaceBytes + 1))) }), base.ErrTooLarge, "namespace"},
		{valueState, value.put(big), base.ErrTooLarge, "value"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Elements = [][]byte{{}} }), base.ErrInvalid, "elements"},
		{valueState, edit(value.mutation(state.OpClear), func(m *state.Mutation) { m.Value = []byte{1} }), base.ErrInvalid, "value"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Entries = make([]state.Entry, 1) }), base.ErrInvalid, "entries"},
		{valueState, edit(value.put(nil), func(m *state.Mutation) { m.Sources = make([]state.Namespace, 1) }), base.ErrInvalid, "sources"},
		{jsonState, e.at(jsonState, "k").put([]byte("{")), base.ErrInvalid, "value"},
		{listState, l.elements(state.OpListAdd, []byte{}, big), base.ErrTooLarge, "elements[1]"},
		{listState, l.elements(state.OpListAdd, many...), base.ErrTooLarge, "elements"},
		{listState, l.elements(state.OpListAdd, three...), base.ErrTooLarge, "elements"},
		{sumState, sum.elements(state.OpAdd, enc(t, keygroup.Int64, int64(1)), []byte{1}), base.ErrInvalid, "elements[1]"},
		{topK, e.at(topK, "k").elements(state.OpAdd, uk(1025)), base.ErrTooLarge, "elements[0]"},
		{mapState, m.entries(state.OpMapPut, state.Entry{}, state.Entry{UserKey: uk(state.MaxUserKeyBytes + 1)}), base.ErrTooLarge, "entries[1].user_key"},
		{mapState, m.entries(state.OpMapPut, state.Entry{Value: big}), base.ErrTooLarge, "entries[0].value"},
		{mapState, m.entries(state.OpMapPut, state.Entry{Null: true, Value: []byte{1}}), base.ErrInvalid, "entries[0].value"},
		{mapState, m.entries(state.OpMapRemove, state.Entry{Value: []byte{1}}), base.ErrInvalid, "entries[0].value"},
		{mapState, m.entries(state.OpMapRemove, state.Entry{Null: true}), base.ErrInvalid, "entries[0].null"},
		{mapState, m.entries(state.OpMapPut, make([]state.Entry, state.MaxElements+1)...), base.ErrTooLarge, "entries"},
		{sumState, sum.merge(make([]state.Namespace, state.MaxElements+1)...), base.ErrTooLarge, "sources"},
		{sumState, sum.merge(named("a"), state.Namespace{Bytes: []byte("x")}), base.ErrInvalid, "sources[1]"},
	} {
		e.refused(c.want, c.field, c.d, c.m)
	}
	for _, d := range []*state.Declaration{valueState, listState, mapState, sumState, jsonState, topK} {
		equal(t, "entries after refusals", e.entriesInStore(d), 0)
	}
}

// ST5: what is just within the limits is accepted and read back.
func TestTheLargestOfEverythingIsReadBack(t *testing.T) {
	d := *mapState
	d.KeyType = keygroup.Bytes
	e := newEnv(t, 128, &d, listState)
	key := make([]byte, state.MaxKeyBytes) // zeros: every byte is escaped
	at := e.at(&d, key, string(make([]byte, state.MaxNamespaceBytes)))
	entry := state.Entry{UserKey: make([]byte, state.MaxUserKeyBytes), Value: bytes.Repeat([]byte{9}, state.MaxValueBytes)}
	second := state.Entry{UserKey: bytes.Repeat([]byte{0xFF}, state.MaxUserKeyBytes), Null: true}
	e.do(&d, at.entries(state.OpMapPut, entry, second))
	_, entries := at.all(0, 0)
	if len(entries) != 2 || !bytes.Equal(entries[0].Value, entry.Value) || !bytes.Equal(entries[1].UserKey, second.UserKey) {
		t.Fatal("entries differ")
	}
	items := e.scanAll(&d, state.ScanQuery{})
	if len(items) != 2 || !bytes.Equal(items[1].Entry.UserKey, second.UserKey) {
		t.Fatal("scan differs")
	}
	equal(t, "keys", len(e.scanAll(&d, state.ScanQuery{KeysOnly: true, Limit: 1})), 1)
}

func TestConcatIsRefusedBeyondTheLimitAndUnchanged(t *testing.T) {
	e := newEnv(t, 128, concat)
	at := e.at(concat, "k")
	half := bytes.Repeat([]byte{1}, state.MaxValueBytes/2)
	at.add(half)
	at.add(half)
	e.refused(base.ErrTooLarge, "elements", concat, at.elements(state.OpAdd, []byte{1}))
	equal(t, "length", len(at.get().Value), state.MaxValueBytes)
	e.at(concat, "k", "n").add([]byte{2})
	e.refused(base.ErrTooLarge, "", concat, e.at(concat, "k", "n").merge(state.Namespace{}))
	equal(t, "length after a refused merge", len(at.get().Value), state.MaxValueBytes)
	equal(t, "target after a refused merge", len(e.at(concat, "k", "n").get().Value), 1)
}

func TestQueriesAreRefusedByField(t *testing.T) {
	e := newEnv(t, 128, valueState, listState, mapState, sumState)
	edit := func(q *state.Query, f func(*state.Query)) *state.Query { f(q); return q }
	for _, c := range []struct {
		d     *state.Declaration
		q     *state.Query
		want  error
		field string
	}{
		{valueState, e.at(valueState, "k").query(0), base.ErrInvalid, "kind"},
		{valueState, e.at(valueState, "k").query(6), base.ErrInvalid, "kind"},
		{listState, e.at(listState, "k").query(state.QueryGet), base.ErrWrongKind, "kind"},
		{valueState, e.at(valueState, "k").query(state.QueryPage), base.ErrWrongKind, "kind"},
		{sumState, e.at(sumState, "k").query(state.QueryContains), base.ErrWrongKind, "kind"},
		{mapState, e.at(mapState, "k").query(state.QueryAccumulator), base.ErrWrongKind, "kind"},
		{valueState, edit(e.at(valueState, "k").query(state.QueryGet), func(q *state.Query) { q.UserKey = []byte("u") }), base.ErrInvalid, "user_key"},
		{valueState, edit(e.at(valueState, "k").query(state.QueryGet), func(q *state.Query) { q.Group++ }), base.ErrInvalid, "group"},
		{listState, edit(e.at(listState, "k").query(state.QueryPage), func(q *state.Query) { q.Limit = -1 }), base.ErrInvalid, "limit"},
		{listState, edit(e.at(listState, "k").query(state.QueryPage), func(q *state.Query) { q.PageBytes = math.MinInt }), base.ErrInvalid, "page_bytes"},
	} {
		_, err := e.l.Read(e.store, c.d, c.q)
		wantRefusal(t, err, c.want, c.field)
	}
	for _, c := range []struct {
		q     state.ScanQuery
		field string
	}{
		{state.ScanQuery{State: 9}, "state"},
		{state.ScanQuery{State: 1, Range: keygroup.Range{Lo: 2, Hi: 1}}, "range"},
		{state.ScanQuery{State: 1, Range: keygroup.Range{Hi: 129}}, "range"},
		{state.ScanQuery{State: 1, Limit: -1}, "limit"},
		{state.ScanQuery{State: 1, Namespace: state.Namespace{Bytes: []byte("x")}}, "namespace"},
	} {
		_, _, err := e.l.Scan(e.store, valueState, &c.q)
		wantRefusal(t, err, base.ErrInvalid, c.field)
	}
}
