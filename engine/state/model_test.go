package state_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/engine/state/statemodel"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// modelDecls is one state of every kind and function.
func modelDecls() []*state.Declaration {
	decls := []*state.Declaration{
		decl(1, state.KindValue, keygroup.Bytes, ""),
		decl(2, state.KindList, keygroup.Bytes, ""),
		decl(3, state.KindMap, keygroup.Bytes, ""),
	}
	add := func(kind state.Kind, t keygroup.Type, functions ...string) {
		for _, f := range functions {
			decls = append(decls, decl(engine.FamilyID(len(decls)+1), kind, t, f))
		}
	}
	add(state.KindReducing, keygroup.Int64, "sum", "min", "max", "first", "last", "bit-and", "bit-or")
	add(state.KindReducing, keygroup.Float64, "sum", "min", "max")
	add(state.KindReducing, keygroup.Bytes, "concat", "first", "last", "min", "max")
	add(state.KindAggregating, keygroup.Int64, "count", "sum", "mean", "variance", "quantiles(0,0.5,1)", "topk(2)", "distinct")
	add(state.KindAggregating, keygroup.Float64, "sum", "mean", "variance", "quantiles(0.25,0.75)")
	add(state.KindAggregating, keygroup.Bytes, "count", "distinct", "topk(1)", "max")
	return decls
}

var (
	genBytes = rapid.OneOf(
		rapid.SampledFrom([][]byte{{}, {0}, {0, 0}, {0, 1}, {0, 0xFF}, {0xFF}, {1}, []byte("a"), []byte("b")}),
		rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 2, 0xFE, 0xFF}), 0, 4))
	genInt64   = rapid.OneOf(rapid.Int64(), rapid.Int64Range(-3, 3))
	genFloat64 = rapid.OneOf(rapid.Float64(), rapid.SampledFrom([]float64{0, -1, 1, 1e16, -1e16, 0.1}))
)

func drawNamespace(t *rapid.T) state.Namespace {
	return rapid.SampledFrom([]state.Namespace{{}, named(""), named("a"), named("b"), named("\x00"), named("\x01")}).Draw(t, "namespace")
}

func drawElement(t *rapid.T, typ keygroup.Type) []byte {
	switch typ {
	case keygroup.Int64:
		return enc(t, typ, genInt64.Draw(t, "int64"))
	case keygroup.Float64:
		return enc(t, typ, genFloat64.Draw(t, "float64"))
	}
	return genBytes.Draw(t, "bytes")
}

func drawMutation(t *rapid.T, at target) *state.Mutation {
	ops := map[state.Kind][]state.Op{
		state.KindValue:       {state.OpValuePut, state.OpValuePut, state.OpClear},
		state.KindList:        {state.OpListAdd, state.OpListAdd, state.OpListUpdate, state.OpMergeNamespaces, state.OpClear},
		state.KindMap:         {state.OpMapPut, state.OpMapPut, state.OpMapRemove, state.OpClear},
		state.KindReducing:    {state.OpAdd, state.OpAdd, state.OpMergeNamespaces, state.OpClear},
		state.KindAggregating: {state.OpAdd, state.OpAdd, state.OpMergeNamespaces, state.OpClear},
	}[at.d.Kind]
	m := at.mutation(rapid.SampledFrom(ops).Draw(t, "op"))
	n := rapid.IntRange(0, 4).Draw(t, "n")
	if rapid.IntRange(0, 20).Draw(t, "many") == 0 {
		n = 140 // above the limit of point deletes
	}
	for i := range n {
		switch m.Op {
		case state.OpListAdd, state.OpListUpdate, state.OpAdd:
			e := drawElement(t, at.d.ValueType)
			if rapid.IntRange(0, 30).Draw(t, "null") == 0 {
				e = nil
			}
			m.Elements = append(m.Elements, e)
		case state.OpMapPut, state.OpMapRemove:
			e := state.Entry{UserKey: genBytes.Draw(t, "user key")}
			if n > 4 {
				e.UserKey = fmt.Append(nil, i)
			}
			if m.Op == state.OpMapPut {
				if e.Null = rapid.Bool().Draw(t, "null"); !e.Null {
					e.Value = genBytes.Draw(t, "value")
				}
			}
			m.Entries = append(m.Entries, e)
		case state.OpMergeNamespaces:
			m.Sources = append(m.Sources, drawNamespace(t))
		}
	}
	if m.Op == state.OpValuePut {
		m.Value = genBytes.Draw(t, "value")
	}
	return m
}

func drawPrecondition(t *rapid.T, at target) *state.Precondition {
	p := at.precondition(rapid.SampledFrom([]state.PreKind{
		state.PreAbsent, state.PrePresent, state.PreEqual, state.PreVersion, state.PreNull}).Draw(t, "precondition"))
	p.Version = uint64(rapid.IntRange(1, 40).Draw(t, "version"))
	if at.d.Kind == state.KindMap && rapid.Bool().Draw(t, "entry") {
		p.HasUserKey, p.UserKey = true, genBytes.Draw(t, "user key")
	}
	if p.Kind == state.PreEqual {
		p.Bytes = genBytes.Draw(t, "equal")
		if a, err := at.e.l.Read(at.e.store, at.d, at.query(state.QueryAccumulator)); err == nil && rapid.Bool().Draw(t, "really") {
			p.Bytes = a.Value
		}
	}
	return p
}

func sameError(t tb, what string, got, want error) {
	t.Helper()
	if (got == nil) != (want == nil) || got != nil && base.SentinelOf(got) != base.SentinelOf(want) {
		t.Fatalf("%s: got error %v, the model %v", what, got, want)
	}
}

// ST1 to ST5 at once: whatever is done, reads and scans are the model's.
func TestLayoutAgreesWithTheModel(t *testing.T) { checkModel(t, mem.NewDriver()) }

// The same over RocksDB: its merge operators, prefix extractor and memtables
// see the real keys of every kind.
func TestLayoutAgreesWithTheModelOnRocks(t *testing.T) {
	driver, err := rocks.NewDriver(rocks.Options{MemoryBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := driver.Close(); err != nil {
			t.Error(err)
		}
	}()
	fewerChecks(t, 25) // a run opens a data base
	checkModel(t, driver)
}

// fewerChecks lowers rapid's default number of runs for one test, unless the
// command line asks for another number.
func fewerChecks(t *testing.T, n int) {
	f := flag.Lookup("rapid.checks")
	if before := f.Value.String(); before == f.DefValue {
		if err := f.Value.Set(strconv.Itoa(n)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Value.Set(before) })
	}
}

func checkModel(t *testing.T, driver engine.Driver) {
	dir := t.TempDir()
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		path := filepath.Join(dir, fmt.Sprint(run))
		store, err := driver.Open(path)
		if err != nil {
			t.Fatalf("opening store: %v", err)
		}
		e := &env{tb: t, l: state.Layout{M: rapid.SampledFrom([]int{1, 4, 128, 300}).Draw(t, "m")}, store: store}
		defer func() {
			if err := e.store.Close(); err != nil {
				t.Errorf("closing store: %v", err)
			}
			if err := os.RemoveAll(path); err != nil {
				t.Errorf("removing store: %v", err)
			}
		}()
		all := modelDecls()
		decls := []*state.Declaration{all[1], all[2]} // a list and a map, and some others
		for range 3 {
			d := rapid.SampledFrom(all).Draw(t, "state")
			if d.ID != 2 && d.ID != 3 {
				decls = append(decls, d)
			}
		}
		e.declare(decls...)
		model := statemodel.New(e.l.M)
		drawTarget := func() target {
			d := rapid.SampledFrom(decls).Draw(t, "state")
			at := e.at(d, rapid.SampledFrom([]string{"", "a", "a\x00", "b"}).Draw(t, "key"))
			at.ns = drawNamespace(t)
			return at
		}
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) { stepRequest(t, e, model, drawTarget) },
			"flush": func(t *rapid.T) {
				if err := e.store.Flush(); err != nil {
					t.Fatalf("flushing: %v", err)
				}
				if rapid.Bool().Draw(t, "compact") {
					if err := e.store.Compact(); err != nil {
						t.Fatalf("compacting: %v", err)
					}
				}
			},
			"":     func(t *rapid.T) {},
			"read": func(t *rapid.T) { compareReads(t, e, model, drawTarget()) },
			"scan": func(t *rapid.T) {
				compareScans(t, e, model, rapid.SampledFrom(decls).Draw(t, "scanned"))
			},
		})
		for _, d := range decls {
			compareScans(t, e, model, d)
		}
	})
}

// stepRequest applies several mutations behind a precondition in one batch, as
// a state machine would: all or nothing.
func stepRequest(t *rapid.T, e *env, model *statemodel.Model, drawTarget func() target) {
	tx := e.txn()
	for range rapid.IntRange(1, 3).Draw(t, "requests") {
		var conditions []statemodel.Condition
		if rapid.IntRange(0, 2).Draw(t, "conditional") == 0 {
			at := drawTarget()
			conditions = append(conditions, statemodel.Condition{D: at.d, P: drawPrecondition(t, at)})
		}
		var changes []statemodel.Change
		for range rapid.IntRange(1, 3).Draw(t, "mutations") {
			at := drawTarget()
			e.seq++
			changes = append(changes, statemodel.Change{D: at.d, M: drawMutation(t, at), St: state.Stamp{Sequence: e.seq}})
		}
		_, want := model.Request(conditions, changes)
		sameError(t, "request", applyRequest(e, tx, conditions, changes), want)
	}
	if err := e.store.Write(tx.Batch()); err != nil {
		t.Fatalf("writing: %v", err)
	}
}

func applyRequest(e *env, tx *engine.Txn, conditions []statemodel.Condition, changes []statemodel.Change) error {
	for _, c := range conditions {
		if err := e.l.Check(tx, c.D, c.P); err != nil {
			return err
		}
	}
	mark := tx.Mark()
	for _, c := range changes {
		if err := e.l.Apply(tx, c.D, c.M, c.St); err != nil {
			tx.Rollback(mark)
			return err
		}
	}
	return nil
}

func compareReads(t *rapid.T, e *env, model *statemodel.Model, at target) {
	for _, k := range []state.QueryKind{state.QueryGet, state.QueryContains, state.QueryIsEmpty, state.QueryAccumulator} {
		q := at.query(k)
		if at.d.Kind == state.KindMap && (k == state.QueryGet || k == state.QueryContains) {
			q.UserKey = genBytes.Draw(t, "user key")
		}
		got, err := e.l.Read(e.store, at.d, q)
		want, wantErr := model.Read(at.d, q)
		sameError(t, "read", err, wantErr)
		equal(t, fmt.Sprintf("query %d of %s %q", k, at.d.Kind, at.d.Function), got, want)
		many, errs := e.l.ReadMany(e.store, []state.ReadRequest{{D: at.d, Q: q}})
		sameError(t, "read many", errs[0], wantErr)
		equal(t, "read many", many[0], want)
	}
	a, b := at.query(state.QueryPage), at.query(state.QueryPage)
	a.Limit, a.PageBytes = rapid.IntRange(0, 5).Draw(t, "limit"), rapid.IntRange(0, 12).Draw(t, "page bytes")
	a.KeysOnly = rapid.Bool().Draw(t, "keys only")
	b.Limit, b.PageBytes, b.KeysOnly = a.Limit, a.PageBytes, a.KeysOnly
	for {
		got, err := e.l.Read(e.store, at.d, a)
		want, wantErr := model.Read(at.d, b)
		sameError(t, "page", err, wantErr)
		equal(t, "elements", got.Elements, want.Elements)
		equal(t, "entries", got.Entries, want.Entries)
		equal(t, "has next", got.Next != nil, want.Next != nil)
		if got.Next == nil {
			return
		}
		a.Cursor, b.Cursor = got.Next, want.Next
	}
}

func compareScans(t *rapid.T, e *env, model *statemodel.Model, d *state.Declaration) {
	q := state.ScanQuery{
		Range:    keygroup.FullRange(e.l.M),
		KeysOnly: rapid.Bool().Draw(t, "keys only"),
		Filter:   rapid.Bool().Draw(t, "filter"),
		Limit:    rapid.IntRange(0, 4).Draw(t, "limit"),
	}
	q.PageBytes = rapid.SampledFrom([]int{0, 1, 10}).Draw(t, "page bytes")
	if rapid.Bool().Draw(t, "part") {
		q.Range.Hi = keygroup.Group(rapid.IntRange(0, e.l.M).Draw(t, "hi"))
		q.Range.Lo = keygroup.Group(rapid.IntRange(0, int(q.Range.Hi)).Draw(t, "lo"))
	}
	var filter *state.Namespace
	if q.Filter {
		q.Namespace = drawNamespace(t)
		filter = &q.Namespace
	}
	want, wantErr := model.Items(d, q.Range, q.KeysOnly, filter)
	q.State = d.ID
	var got []state.ScanItem
	for {
		items, next, err := e.l.Scan(e.store, d, &q)
		if err != nil {
			if !errors.Is(err, base.ErrOutOfRange) || wantErr == nil {
				t.Fatalf("scan: %v, the model %v", err, wantErr)
			}
			return
		}
		got = append(got, items...)
		if next == nil {
			break
		}
		q.Cursor = next
	}
	if wantErr != nil {
		t.Fatalf("scan: no error, the model %v", wantErr)
	}
	equal(t, fmt.Sprintf("scan of %s %q", d.Kind, d.Function), got, want)
	if q.KeysOnly && !q.Filter {
		n, err := e.l.Count(e.store, d, q.Range)
		if err != nil || n != uint64(len(want)) {
			t.Fatalf("count is %d, %v, want %d", n, err, len(want))
		}
	}
}
