package meta

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

func TestDeclareIsIdempotentAndNamesTheFieldThatDiffers(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	decl := Declaration{Keyspace: "ks", Name: "s", Kind: "map", KeyType: "string", UserKeyType: "int64", ValueType: "json", Function: "f", FunctionParams: "p", CodecVersion: 1}
	txn, got, created, err := DeclareTxn(w.view(), decl, nil)
	w.do(txn, err)
	if !created || got.ID != 1 || *w.view().StateByID(1) != *w.view().State("ks", "s") || w.view().Keyspace("ks").KeyType != "string" {
		t.Fatalf("declared %+v, %v", got, created)
	}
	again := decl
	again.ID, again.DroppedMs = 99, 99
	txn, got, created, err = DeclareTxn(w.view(), again, nil)
	if err != nil || created || !Empty(txn) || got.ID != 1 {
		t.Errorf("declared again: %+v, %v, %v, %v", txn, got, created, err)
	}
	for field, change := range map[string]func(*Declaration){
		"kind":            func(d *Declaration) { d.Kind = "value" },
		"key_type":        func(d *Declaration) { d.KeyType = "int64" },
		"user_key_type":   func(d *Declaration) { d.UserKeyType = "string" },
		"value_type":      func(d *Declaration) { d.ValueType = "bytes" },
		"function":        func(d *Declaration) { d.Function = "g" },
		"function_params": func(d *Declaration) { d.FunctionParams = "q" },
		"codec_version":   func(d *Declaration) { d.CodecVersion = 2 },
	} {
		other := decl
		change(&other)
		txn, _, _, err := DeclareTxn(w.view(), other, nil)
		wantField(t, field, err, base.ErrConflict, field)
		if !Empty(txn) {
			t.Errorf("%s: a refused declaration has a transaction", field)
		}
	}
	other := decl
	other.Name, other.KeyType = "s2", "int64"
	_, _, _, err = DeclareTxn(w.view(), other, nil)
	wantField(t, "key type of another state", err, base.ErrConflict, "key_type")
	_, _, _, err = DeclareTxn(w.view(), decl, func(*Declaration) error { return base.Invalid("function", "unknown") })
	wantField(t, "the hook", err, base.ErrInvalid, "function")
}

func TestNamesThatCannotBeKeysAreRefused(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	for _, name := range []string{"", "a/b", "\xff", "tab\t", "zero\x00", strings.Repeat("n", MaxNameBytes+1)} {
		_, _, _, err := DeclareTxn(w.view(), Declaration{Keyspace: name, Name: "s", Kind: "value", KeyType: "string"}, nil)
		wantField(t, fmt.Sprintf("keyspace %q", name), err, base.ErrInvalid, "keyspace")
		_, _, _, err = DeclareTxn(w.view(), Declaration{Keyspace: "k", Name: name, Kind: "value", KeyType: "string"}, nil)
		wantField(t, fmt.Sprintf("name %q", name), err, base.ErrInvalid, "name")
		s := spec("n1")
		s.Nodes[0].ID = base.NodeID(name)
		if _, err := s.Resolve(); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("node %q: %v", name, err)
		}
	}
	_, _, _, err := DeclareTxn(w.view(), Declaration{Keyspace: "ks ü", Name: "a.b-c_d:e", Kind: "value", KeyType: "string", Function: "\xff"}, nil)
	wantField(t, "text that JSON would change", err, base.ErrInvalid, "function")
}

func TestDroppedStateGetsANewNumberAndTheKeyspaceKeepsItsType(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	declare := func(kind, keyType string) (*Declaration, error) {
		txn, d, _, err := DeclareTxn(w.view(), Declaration{Keyspace: "ks", Name: "s", Kind: kind, KeyType: keyType}, nil)
		if err == nil {
			w.do(txn, nil)
		}
		return d, err
	}
	if _, err := declare("value", "string"); err != nil {
		t.Fatal(err)
	}
	w.tick(500)
	w.do(DropTxn(w.view(), "ks", "s"))
	v := w.view()
	if v.State("ks", "s") != nil || v.StateByID(1) != nil || len(v.Dropped()) != 1 || v.Dropped()[0].ID != 1 || v.Dropped()[0].DroppedMs != 500 || v.Dropped()[0].Revision != v.Revision() {
		t.Fatalf("after the drop: %s", dumpView(v))
	}
	_, err := DropTxn(v, "ks", "s")
	wantField(t, "dropping twice", err, base.ErrNotFound, "name")
	if _, err := declare("value", "int64"); !errors.Is(err, base.ErrConflict) {
		t.Errorf("the keyspace forgot its key type: %v", err)
	}
	if d, err := declare("list", "string"); err != nil || d.ID != 2 {
		t.Errorf("declared again: %+v, %v", d, err)
	}
	w.do(PurgeDroppedTxn(w.view(), []uint32{1, 2, 77}), nil)
	if v := w.view(); len(v.Dropped()) != 0 || v.StateByID(2) == nil {
		t.Errorf("after the purge: %s", dumpView(v))
	}
}

// Two leaders' transactions from the same view: the second one fails and, built
// again, gives the first one's answer.
func TestConcurrentDeclarationsGiveOneState(t *testing.T) {
	w := newWorld(t, broadcast.Options{})
	old := w.view()
	decl := Declaration{Keyspace: "ks", Name: "s", Kind: "value", KeyType: "string"}
	other := Declaration{Keyspace: "ks", Name: "t", Kind: "value", KeyType: "int64"}
	first, _, _, err := DeclareTxn(old, decl, nil)
	w.do(first, err)
	for _, d := range []Declaration{decl, other} {
		late, _, _, err := DeclareTxn(old, d, nil)
		if err != nil || !errors.Is(w.try(late), base.ErrPrecondition) {
			t.Errorf("%s from an old view: %v", d.Name, err)
		}
	}
	if _, d, created, err := DeclareTxn(w.view(), decl, nil); err != nil || created || d.ID != 1 {
		t.Errorf("built again: %+v, %v, %v", d, created, err)
	}
	_, _, _, err = DeclareTxn(w.view(), other, nil)
	wantField(t, "built again", err, base.ErrConflict, "key_type")
}

// ME1, ME4: random declarations and drops from views of any age against a map.
func TestDeclarationRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, broadcast.Options{HistoryEvents: 30})
		have := map[string]Declaration{}
		keyTypes := map[string]string{}
		given := map[uint32]bool{}
		old := w.view()
		pick := func(t *rapid.T, what string, from ...string) string { return rapid.SampledFrom(from).Draw(t, what) }
		t.Repeat(map[string]func(*rapid.T){
			"declare": func(t *rapid.T) {
				d := Declaration{
					Keyspace: pick(t, "keyspace", "a", "b"), Name: pick(t, "name", "x", "y", "z"), Kind: pick(t, "kind", "value", "map"),
					KeyType: pick(t, "key type", "string", "int64"), Function: pick(t, "function", "", "sum"),
				}
				v := w.view()
				stale := rapid.IntRange(0, 3).Draw(t, "stale") == 0
				if stale {
					v = old
				}
				txn, got, created, err := DeclareTxn(v, d, nil)
				if err == nil && !Empty(txn) && w.try(txn) != nil {
					if !stale || v.Revision() == w.store.Snapshot().Revision() {
						t.Fatalf("a transaction from the newest view failed")
					}
					return
				}
				if stale {
					// What an old view answers without a write was true then.
					if err != nil || !created {
						return
					}
				}
				name := d.Keyspace + "/" + d.Name
				was, exists := have[name]
				kt, hasKs := keyTypes[d.Keyspace]
				switch {
				case hasKs && kt != d.KeyType, exists && (was.Kind != d.Kind || was.Function != d.Function):
					if !errors.Is(err, base.ErrConflict) {
						t.Fatalf("%+v over %+v, key type %q: %v", d, was, kt, err)
					}
				case exists:
					if err != nil || created || got.ID != was.ID {
						t.Fatalf("%+v again: %+v, %v, %v", was, got, created, err)
					}
				default:
					if err != nil || !created || given[got.ID] || got.ID == 0 {
						t.Fatalf("%+v: %+v, %v, %v", d, got, created, err)
					}
					given[got.ID] = true
					d.ID = got.ID
					have[name], keyTypes[d.Keyspace] = d, d.KeyType
				}
			},
			"drop": func(t *rapid.T) {
				ks, name := pick(t, "keyspace", "a", "b"), pick(t, "name", "x", "y", "z")
				txn, err := DropTxn(w.view(), ks, name)
				_, exists := have[ks+"/"+name]
				if exists != (err == nil) {
					t.Fatalf("drop of %s/%s, which exists: %v, gave %v", ks, name, exists, err)
				}
				if exists {
					w.do(txn, nil)
					delete(have, ks+"/"+name)
				}
			},
			"purge": func(t *rapid.T) {
				for _, d := range w.view().Dropped() {
					w.do(PurgeDroppedTxn(w.view(), []uint32{d.ID}), nil)
				}
			},
			"keep view": func(t *rapid.T) { old = w.view() },
			"": func(t *rapid.T) {
				v := w.view()
				if len(v.States()) != len(have) {
					t.Fatalf("%d states, the model has %d", len(v.States()), len(have))
				}
				for _, want := range have {
					got := v.State(want.Keyspace, want.Name)
					want.Revision = got.Revision
					if *got != want || v.StateByID(want.ID) != got {
						t.Fatalf("got %+v, want %+v", got, want)
					}
				}
			},
		})
	})
}
