package state_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

var rewrite = flag.Bool("rewrite", false, "rewrite golden files")

// tb is what tests, benchmarks and rapid have in common.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

// env is a store with declared states, to which mutations are applied one batch
// each.
type env struct {
	tb
	l     state.Layout
	store engine.Store
	seq   uint64
}

func openStore(t tb, dir string) engine.Store {
	t.Helper()
	s, err := mem.NewDriver().Open(dir)
	if err != nil {
		t.Fatalf("opening store: %v", err)
	}
	return s
}

func newEnv(t testing.TB, m int, decls ...*state.Declaration) *env {
	t.Helper()
	e := &env{tb: t, l: state.Layout{M: m}, store: openStore(t, filepath.Join(t.TempDir(), "store"))}
	t.Cleanup(func() { _ = e.store.Close() })
	e.declare(decls...)
	return e
}

func (e *env) declare(decls ...*state.Declaration) {
	e.Helper()
	for _, d := range decls {
		if err := state.ValidateDeclaration(d); err != nil {
			e.Fatalf("declaration %s: %v", d.Name, err)
		}
		if err := e.store.EnsureFamily(d.ID, e.l.FamilyOptions(d)); err != nil {
			e.Fatalf("family: %v", err)
		}
	}
}

func (e *env) txn() *engine.Txn {
	families := e.store.Families()
	return engine.NewTxn(e.store, func(f engine.FamilyID) engine.MergeKind { return families[f].Merge })
}

// try applies one mutation in its own batch and returns its refusal.
func (e *env) try(d *state.Declaration, m *state.Mutation) error {
	e.Helper()
	e.seq++
	tx := e.txn()
	err := e.l.Apply(tx, d, m, state.Stamp{Sequence: e.seq, ClockMs: 1000 + e.seq})
	if err != nil {
		if n := tx.Batch().Len(); n != 0 {
			e.Fatalf("a refused mutation has written %d operations (ST4)", n)
		}
		return err
	}
	if err := e.store.Write(tx.Batch()); err != nil {
		e.Fatalf("writing: %v", err)
	}
	return nil
}

func (e *env) do(d *state.Declaration, m *state.Mutation) {
	e.Helper()
	if err := e.try(d, m); err != nil {
		e.Fatalf("op %d: %v", m.Op, err)
	}
}

func (e *env) refused(want error, field string, d *state.Declaration, m *state.Mutation) {
	e.Helper()
	wantRefusal(e, e.try(d, m), want, field)
}

func wantRefusal(t tb, err, want error, field string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
	var named *base.Error
	if field != "" && (!errors.As(err, &named) || named.Field != field) {
		t.Fatalf("error %v does not name field %s", err, field)
	}
}

func (e *env) read(d *state.Declaration, q *state.Query) state.Answer {
	e.Helper()
	a, err := e.l.Read(e.store, d, q)
	if err != nil {
		e.Fatalf("query %d: %v", q.Kind, err)
	}
	return a
}

// entriesInStore counts the raw entries of a family.
func (e *env) entriesInStore(d *state.Declaration) int {
	e.Helper()
	it := e.store.Scan(d.ID, nil, nil, engine.ScanOptions{})
	defer it.Close()
	n := 0
	for it.Next() {
		n++
	}
	if err := it.Err(); err != nil {
		e.Fatalf("raw scan: %v", err)
	}
	return n
}

// target names one (state, key, namespace).
type target struct {
	e   *env
	d   *state.Declaration
	key []byte
	ns  state.Namespace
}

func (e *env) at(d *state.Declaration, key any, ns ...string) target {
	e.Helper()
	t := target{e: e, d: d, key: enc(e, d.KeyType, key)}
	if len(ns) > 0 {
		t.ns = named(ns[0])
	}
	return t
}

func named(ns string) state.Namespace { return state.Namespace{Set: true, Bytes: []byte(ns)} }

func enc(t tb, typ keygroup.Type, v any) []byte {
	t.Helper()
	b, err := keygroup.Encode(typ, v)
	if err != nil {
		t.Fatalf("encoding %v: %v", v, err)
	}
	if b == nil {
		b = []byte{}
	}
	return b
}

func (t target) group() keygroup.Group {
	g, err := keygroup.GroupOfKey(t.d.KeyType, t.key, t.e.l.M)
	if err != nil {
		t.e.Fatalf("group: %v", err)
	}
	return g
}

func (t target) mutation(op state.Op) *state.Mutation {
	return &state.Mutation{State: t.d.ID, Op: op, Group: t.group(), Key: t.key, Namespace: t.ns}
}

func (t target) query(k state.QueryKind) *state.Query {
	return &state.Query{State: t.d.ID, Kind: k, Group: t.group(), Key: t.key, Namespace: t.ns}
}

func (t target) precondition(k state.PreKind) *state.Precondition {
	return &state.Precondition{State: t.d.ID, Kind: k, Group: t.group(), Key: t.key, Namespace: t.ns}
}

func (t target) put(v []byte) *state.Mutation {
	m := t.mutation(state.OpValuePut)
	m.Value = v
	return m
}

func (t target) clear() { t.e.Helper(); t.e.do(t.d, t.mutation(state.OpClear)) }

func (t target) elements(op state.Op, elements ...[]byte) *state.Mutation {
	m := t.mutation(op)
	m.Elements = elements
	return m
}

// add folds or appends values of the state's value type.
func (t target) add(values ...any) {
	t.e.Helper()
	op := state.OpAdd
	if t.d.Kind == state.KindList {
		op = state.OpListAdd
	}
	t.e.do(t.d, t.elements(op, t.encoded(values)...))
}

func (t target) encoded(values []any) [][]byte {
	out := [][]byte{}
	for _, v := range values {
		out = append(out, enc(t.e, t.d.ValueType, v))
	}
	return out
}

func (t target) entries(op state.Op, entries ...state.Entry) *state.Mutation {
	m := t.mutation(op)
	m.Entries = entries
	return m
}

func (t target) merge(sources ...state.Namespace) *state.Mutation {
	m := t.mutation(state.OpMergeNamespaces)
	m.Sources = sources
	return m
}

func (t target) get() state.Answer { t.e.Helper(); return t.e.read(t.d, t.query(state.QueryGet)) }

// result decodes the result of a folded state, nil if absent.
func (t target) result() any {
	t.e.Helper()
	a := t.get()
	if !a.Found {
		return nil
	}
	f, err := state.ParseFunction(t.d.Kind, t.d.ValueType, t.d.Function)
	if err != nil {
		t.e.Fatalf("function: %v", err)
	}
	v, err := keygroup.Decode(f.ResultType(), a.Value)
	if err != nil {
		t.e.Fatalf("decoding result %x: %v", a.Value, err)
	}
	return v
}

// all walks the pages of a list or map to the end.
func (t target) all(limit, pageBytes int) (elements [][]byte, entries []state.Entry) {
	t.e.Helper()
	q := t.query(state.QueryPage)
	q.Limit, q.PageBytes = limit, pageBytes
	for {
		a := t.e.read(t.d, q)
		if len(a.Elements)+len(a.Entries) == 0 && a.Next != nil {
			t.e.Fatalf("an empty page with a next")
		}
		elements, entries = append(elements, a.Elements...), append(entries, a.Entries...)
		if a.Next == nil {
			return elements, entries
		}
		q.Cursor = a.Next
	}
}

func (t target) list() [][]byte { t.e.Helper(); l, _ := t.all(0, 0); return l }

func (e *env) scanAll(d *state.Declaration, q state.ScanQuery) []state.ScanItem {
	e.Helper()
	q.State = d.ID
	if q.Range == (keygroup.Range{}) {
		q.Range = keygroup.FullRange(e.l.M)
	}
	var out []state.ScanItem
	for {
		items, next, err := e.l.Scan(e.store, d, &q)
		if err != nil {
			e.Fatalf("scanning: %v", err)
		}
		if len(items) == 0 && next != nil && !q.Filter {
			e.Fatalf("an empty page with a next")
		}
		out = append(out, items...)
		if next == nil {
			return out
		}
		q.Cursor = next
	}
}

func decl(id engine.FamilyID, kind state.Kind, valueType keygroup.Type, function string) *state.Declaration {
	d := &state.Declaration{
		ID: id, Keyspace: "ks", Name: fmt.Sprintf("s%d", id), Kind: kind, KeyType: keygroup.String,
		ValueType: valueType, Function: function, CodecVersion: state.CodecVersion,
	}
	if kind == state.KindMap {
		d.UserKeyType = keygroup.Bytes
	}
	return d
}

func equal(t tb, what string, got, want any) {
	t.Helper()
	if g, ok := got.([][]byte); ok && len(g) == 0 {
		if w, ok := want.([][]byte); ok && len(w) == 0 {
			return
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%s: got %s, want %s", what, short(got), short(want))
	}
}

func short(v any) string {
	s := fmt.Sprintf("%#v", v)
	if len(s) > 600 {
		s = s[:600] + "..."
	}
	return s
}

func list(elements ...string) [][]byte {
	out := [][]byte{}
	for _, e := range elements {
		out = append(out, []byte(e))
	}
	return out
}

// golden compares data with a golden file, or rewrites it under -rewrite.
func golden(t *testing.T, name string, data []byte) {
	t.Helper()
	path := filepath.Join("testdata", "golden", "v1", name)
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(data, want) {
		t.Fatalf("%s differs from the golden file; got:\n%s", name, data)
	}
}
