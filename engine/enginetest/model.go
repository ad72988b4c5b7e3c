package enginetest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
)

// modelFamilies are the families of the model tests.
var modelFamilies = map[engine.FamilyID]engine.FamilyOptions{
	1: {Use: engine.UseScanned, GroupWidth: 1},
	2: {Use: engine.UsePoint, Merge: engine.MergeSum128, GroupWidth: 1},
	3: {Use: engine.UseScanned, Merge: engine.MergeMax, GroupWidth: 2},
	4: {Use: engine.UsePoint, Merge: engine.MergeFirst, GroupWidth: 2},
}

// state is the reference of a whole store.
type state map[engine.FamilyID]model

func newState() state {
	s := state{engine.MetaFamily: {}}
	for f := range modelFamilies {
		s[f] = model{}
	}
	return s
}

func (s state) clone() state {
	out := make(state, len(s))
	for f, m := range s {
		out[f] = m.clone()
	}
	return out
}

// writer is what a batch and a transaction have in common.
type writer interface {
	Put(f engine.FamilyID, key, value []byte)
	Delete(f engine.FamilyID, key []byte)
	DeleteRange(f engine.FamilyID, lo, hi []byte)
	Merge(f engine.FamilyID, key, operand []byte)
}

// drawKey draws short keys of few bytes, so that keys meet and prefix each
// other.
func drawKey(t *rapid.T, label string) []byte {
	return rapid.SliceOfN(rapid.SampledFrom([]byte{0x00, 0x01, 'a', 0xff}), 0, 4).Draw(t, label)
}

func drawFamily(t *rapid.T) engine.FamilyID {
	return engine.FamilyID(rapid.IntRange(1, len(modelFamilies)).Draw(t, "family"))
}

// drawOp draws one operation and does it to w and to the model.
func drawOp(t *rapid.T, w writer, s state) {
	f := drawFamily(t)
	kind := modelFamilies[f].Merge
	key := drawKey(t, "key")
	val := rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(t, "value")
	if kind != engine.MergeNone {
		val = operand(kind, rapid.Int64().Draw(t, "operand"), rapid.Uint64().Draw(t, "header"))
	}
	n := rapid.IntRange(0, 9).Draw(t, "op")
	switch {
	case n == 0:
		hi := drawKey(t, "hi")
		w.DeleteRange(f, key, hi)
		s[f].deleteRange(string(key), string(hi))
	case n <= 2:
		w.Delete(f, key)
		delete(s[f], string(key))
	case n <= 5 || kind == engine.MergeNone:
		w.Put(f, key, val)
		s[f][string(key)] = string(val)
	default:
		w.Merge(f, key, val)
		old, ok := s[f][string(key)]
		out, err := engine.Fold(kind, []byte(old), ok, val)
		if err != nil {
			t.Fatal(err)
		}
		s[f][string(key)] = string(out)
	}
}

func drawScan(t *rapid.T) (lo, hi []byte, o engine.ScanOptions) {
	if rapid.Bool().Draw(t, "has lo") {
		lo = drawKey(t, "lo")
	}
	if rapid.Bool().Draw(t, "has hi") {
		hi = append([]byte{}, drawKey(t, "hi")...)
	}
	return lo, hi, engine.ScanOptions{
		Reverse:  rapid.Bool().Draw(t, "reverse"),
		KeysOnly: rapid.Bool().Draw(t, "keys only"),
		Limit:    rapid.SampledFrom([]int{0, 0, 1, 2, 5}).Draw(t, "limit"),
	}
}

// compareSome draws a few reads and compares them with the model.
func compareSome(t *rapid.T, r engine.Reader, s state) {
	f := drawFamily(t)
	keys := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) []byte { return drawKey(t, "key") }), 1, 4).Draw(t, "keys")
	many, err := r.MultiGet(f, keys)
	if err != nil || len(many) != len(keys) {
		t.Fatalf("multi-get of family %d: %d values, %v", f, len(many), err)
	}
	for i, k := range keys {
		want, wantOK := s[f][string(k)]
		got, ok, err := r.Get(f, k)
		if err != nil || ok != wantOK || string(got) != want {
			t.Fatalf("get %q of family %d: %q, %v, %v; want %q, %v", k, f, got, ok, err, want, wantOK)
		}
		if (many[i] != nil) != wantOK || string(many[i]) != want {
			t.Fatalf("multi-get %q of family %d: %q; want %q, %v", k, f, many[i], want, wantOK)
		}
	}
	lo, hi, o := drawScan(t)
	compareScan(t, r, s, f, lo, hi, o)
}

func compareScan(t *rapid.T, r engine.Reader, s state, f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) {
	got, err := drain(r.Scan(f, lo, hi, o))
	if want := s[f].scan(lo, hi, o); err != nil || !samePairs(got, want) {
		t.Fatalf("scan of family %d in [%q, %q) (hi nil: %v) with %+v:\n got %q, %v\nwant %q", f, lo, hi, hi == nil, o, got, err, want)
	}
}

func compareAll(t *rapid.T, r engine.Reader, s state) {
	for f := range s {
		compareScan(t, r, s, f, nil, nil, engine.ScanOptions{})
		compareScan(t, r, s, f, nil, nil, engine.ScanOptions{Reverse: true})
	}
}

// machine drives a store and its model. Batch n also sets "applied" to n, so
// that after a close without a flush the model knows where the store is.
type machine struct {
	h       *harness
	dir     string
	store   engine.Store
	now     state
	history []state // the states after each batch, from the last flush on
	first   int     // number of history[0]
	view    engine.View
	viewed  state
	extra   int // checkpoints taken
}

func (m *machine) open(t *rapid.T) {
	s, err := m.h.driver.Open(m.dir)
	if err != nil {
		t.Fatalf("opening: %v", err)
	}
	m.store = s
	for f, o := range modelFamilies {
		if err := s.EnsureFamily(f, o); err != nil {
			t.Fatalf("creating family %d: %v", f, err)
		}
	}
}

func (m *machine) write(t *rapid.T) {
	var b engine.Batch
	for range rapid.IntRange(1, 6).Draw(t, "ops") {
		drawOp(t, &b, m.now)
	}
	n := m.first + len(m.history)
	b.Put(engine.MetaFamily, []byte("applied"), number(uint64(n)))
	m.now[engine.MetaFamily]["applied"] = string(number(uint64(n)))
	if err := m.store.Write(&b); err != nil {
		t.Fatalf("writing: %v", err)
	}
	m.history = append(m.history, m.now.clone())
}

func (m *machine) flush(t *rapid.T) {
	if err := m.store.Flush(); err != nil {
		t.Fatalf("flushing: %v", err)
	}
	m.first += len(m.history) - 1
	m.history = m.history[len(m.history)-1:]
	v, ok, err := m.store.DurableGet([]byte("applied"))
	if want, has := m.now[engine.MetaFamily]["applied"]; err != nil || ok != has || string(v) != want {
		t.Fatalf("durable after a flush: %x, %v, %v; want %x", v, ok, err, want)
	}
}

func (m *machine) closeView() {
	if m.view != nil {
		m.view.Close()
		m.view = nil
	}
}

// reopen closes without a flush; the store must be at one of the batches since
// the last flush.
func (m *machine) reopen(t *rapid.T) {
	m.closeView()
	if err := m.store.Close(); err != nil {
		t.Fatalf("closing: %v", err)
	}
	m.open(t)
	v, ok, err := m.store.Get(engine.MetaFamily, []byte("applied"))
	if err != nil {
		t.Fatalf("reading the applied number: %v", err)
	}
	n := 0
	if ok {
		n = int(numberOf(v))
	}
	if n < m.first || n >= m.first+len(m.history) {
		t.Fatalf("at batch %d after reopening, want %d to %d", n, m.first, m.first+len(m.history)-1)
	}
	m.history = m.history[n-m.first : n-m.first+1]
	m.first, m.now = n, m.history[0].clone()
	compareAll(t, m.store, m.now)
}

// maxModelCheckpoints bounds the checkpoints of one run, which are slow.
const maxModelCheckpoints = 2

func (m *machine) checkpoint(t *rapid.T) {
	if m.extra >= maxModelCheckpoints {
		return
	}
	m.extra++
	dir := fmt.Sprint(m.dir, "-checkpoint", m.extra)
	if err := m.store.Checkpoint(dir); err != nil {
		t.Fatalf("checkpointing: %v", err)
	}
	c, err := m.h.driver.Open(dir)
	if err != nil {
		t.Fatalf("opening the checkpoint: %v", err)
	}
	compareAll(t, c, m.now)
	if err := c.Close(); err != nil {
		t.Fatalf("closing the checkpoint: %v", err)
	}
}

func (m *machine) takeView(t *rapid.T) {
	m.closeView()
	v, err := m.store.NewView()
	if err != nil {
		t.Fatalf("taking a view: %v", err)
	}
	m.view, m.viewed = v, m.now.clone()
}

// testModel drives the store against a naive model.
func testModel(h *harness) {
	rapid.Check(h.T, func(t *rapid.T) {
		base, err := os.MkdirTemp(h.TempDir(), "model")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(base)
		m := &machine{h: h, dir: filepath.Join(base, "store"), now: newState()}
		m.history = []state{m.now.clone()}
		m.open(t)
		defer func() {
			m.closeView()
			_ = m.store.Close() // also after a failure
		}()
		t.Repeat(map[string]func(*rapid.T){
			"write":      m.write,
			"write more": m.write,
			"write most": m.write,
			"read":       func(t *rapid.T) { compareSome(t, m.store, m.now) },
			"flush":      m.flush,
			"reopen":     m.reopen,
			"checkpoint": m.checkpoint,
			"take view":  m.takeView,
			"read view": func(t *rapid.T) {
				if m.view != nil {
					compareSome(t, m.view, m.viewed)
				}
			},
			"compact": func(t *rapid.T) {
				if err := m.store.Compact(); err != nil {
					t.Fatalf("compacting: %v", err)
				}
			},
		})
		compareAll(t, m.store, m.now)
	})
}

// marked is a mark with what the model and the batch were there.
type marked struct {
	mark  engine.Mark
	state state
	batch []byte
}

// testTxnModel drives a transaction over the store: reads in it give what the
// store gives once its batch is written (TX1), an iterator keeps its instant
// (TX2), and a rollback restores reads and batch (TX3).
func testTxnModel(h *harness) {
	store := h.open()
	for f, o := range modelFamilies {
		h.must(store.EnsureFamily(f, o), "creating family %d", f)
	}
	rapid.Check(h.T, func(t *rapid.T) {
		m := &machine{h: h, store: store, now: newState()}
		var below engine.Batch
		for f := range modelFamilies {
			below.DeleteRange(f, nil, bytes.Repeat([]byte{0xff}, 8))
		}
		// What is below the transaction from the start.
		for range rapid.IntRange(0, 20).Draw(t, "ops below") {
			drawOp(t, &below, m.now)
		}
		if err := store.Write(&below); err != nil {
			t.Fatalf("preparing the store: %v", err)
		}
		txn := engine.NewTxn(m.store, func(f engine.FamilyID) engine.MergeKind { return modelFamilies[f].Merge })
		var marks []marked
		op := func(t *rapid.T) { drawOp(t, txn, m.now) }
		t.Repeat(map[string]func(*rapid.T){
			"op": op, "op 2": op, "op 3": op,
			"read": func(t *rapid.T) { compareSome(t, txn, m.now) },
			"mark": func(*rapid.T) {
				marks = append(marks, marked{txn.Mark(), m.now.clone(), bytes.Clone(txn.Batch().Bytes())})
			},
			"rollback": func(t *rapid.T) {
				if len(marks) == 0 {
					return
				}
				i := rapid.IntRange(0, len(marks)-1).Draw(t, "mark")
				txn.Rollback(marks[i].mark)
				m.now = marks[i].state.clone()
				if !bytes.Equal(txn.Batch().Bytes(), marks[i].batch) {
					t.Fatalf("batch %x after a rollback, want %x", txn.Batch().Bytes(), marks[i].batch)
				}
				marks = marks[:i+1]
				compareAll(t, txn, m.now)
			},
			"scan with writes": func(t *rapid.T) { scanWithWrites(t, txn, m, op) },
			"commit": func(t *rapid.T) {
				if err := m.store.Write(txn.Batch()); err != nil {
					t.Fatalf("writing: %v", err)
				}
				txn.Reset(m.store)
				marks = nil
				compareAll(t, m.store, m.now)
			},
		})
		compareAll(t, txn, m.now)
	})
}

// scanWithWrites writes to the transaction while an iterator is open.
func scanWithWrites(t *rapid.T, txn *engine.Txn, m *machine, op func(*rapid.T)) {
	f := drawFamily(t)
	lo, hi, o := drawScan(t)
	want := m.now[f].scan(lo, hi, o)
	it := txn.Scan(f, lo, hi, o)
	defer it.Close()
	var got []pair
	for it.Next() {
		got = append(got, pair{string(it.Key()), string(it.Value())})
		if len(got) < 4 {
			op(t)
		}
	}
	if it.Err() != nil || !samePairs(got, want) {
		t.Fatalf("scan of family %d with writes in between, [%q, %q) %+v:\n got %q, %v\nwant %q", f, lo, hi, o, got, it.Err(), want)
	}
}
