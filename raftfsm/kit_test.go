package raftfsm_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The states of the tests.
const (
	valueID engine.FamilyID = iota + 1
	listID
	mapID
	sumID
	minID
	firstID
	orID
	concatID
	meanID
	countID
	distinctID
	topkID
)

const groups = 8

func testDeclarations() []state.Declaration {
	d := func(id engine.FamilyID, name string, k state.Kind, v keygroup.Type, f string) state.Declaration {
		return state.Declaration{ID: id, Keyspace: "ks", Name: name, Kind: k, KeyType: keygroup.String, ValueType: v, Function: f, CodecVersion: 1}
	}
	ds := []state.Declaration{
		d(valueID, "value", state.KindValue, keygroup.Bytes, ""),
		d(listID, "list", state.KindList, keygroup.Bytes, ""),
		d(mapID, "map", state.KindMap, keygroup.Bytes, ""),
		d(sumID, "sum", state.KindReducing, keygroup.Int64, "sum"),
		d(minID, "min", state.KindReducing, keygroup.Int64, "min"),
		d(firstID, "first", state.KindReducing, keygroup.Bytes, "first"),
		d(orID, "or", state.KindReducing, keygroup.Int64, "bit-or"),
		d(concatID, "concat", state.KindReducing, keygroup.Bytes, "concat"),
		d(meanID, "mean", state.KindAggregating, keygroup.Int64, "mean"),
		d(countID, "count", state.KindAggregating, keygroup.Int64, "count"),
		d(distinctID, "distinct", state.KindAggregating, keygroup.Bytes, "distinct"),
		d(topkID, "topk", state.KindAggregating, keygroup.Bytes, "topk(3)"),
	}
	ds[2].UserKeyType = keygroup.String
	return ds
}

func i64(v int64) []byte {
	b, err := keygroup.Encode(keygroup.Int64, v)
	if err != nil {
		panic(err)
	}
	return b
}

func groupOf(key string) keygroup.Group {
	g, err := keygroup.GroupOfKey(keygroup.String, []byte(key), groups)
	if err != nil {
		panic(err)
	}
	return g
}

func mut(id engine.FamilyID, op state.Op, key string, fill func(*state.Mutation)) state.Mutation {
	m := state.Mutation{State: id, Op: op, Group: groupOf(key), Key: []byte(key)}
	if fill != nil {
		fill(&m)
	}
	return m
}

func put(key, value string) state.Mutation {
	return mut(valueID, state.OpValuePut, key, func(m *state.Mutation) { m.Value = []byte(value) })
}

func listAdd(key string, elements ...string) state.Mutation {
	return mut(listID, state.OpListAdd, key, func(m *state.Mutation) {
		for _, e := range elements {
			m.Elements = append(m.Elements, []byte(e))
		}
	})
}

func mapPut(key, user, value string) state.Mutation {
	return mut(mapID, state.OpMapPut, key, func(m *state.Mutation) {
		m.Entries = []state.Entry{{UserKey: []byte(user), Value: []byte(value)}}
	})
}

func add(id engine.FamilyID, key string, elements ...[]byte) state.Mutation {
	return mut(id, state.OpAdd, key, func(m *state.Mutation) { m.Elements = elements })
}

// request numbers the mutations from 0.
func request(ms ...state.Mutation) *raftfsm.Request {
	r := &raftfsm.Request{Epoch: 1, Incarnation: 1}
	for i, m := range ms {
		r.Mutations = append(r.Mutations, raftfsm.Mutation{Ordinal: uint32(i), Mutation: m})
	}
	return r
}

func inSession(id base.SessionID, seq uint64, ms ...state.Mutation) *raftfsm.Request {
	r := request(ms...)
	r.Session, r.Seq, r.Prev = id, seq, seq-1
	return r
}

// replica is a machine with its log, to be restarted.
type replica struct {
	t      testing.TB
	driver engine.Driver
	dir    string
	store  engine.Store
	opts   raftfsm.Options
	m      *raftfsm.Machine
	log    []raftfsm.Entry
	rev    base.Revision
	stamp  uint64
	fatal  error
}

func newReplica(t testing.TB, opts raftfsm.Options) *replica {
	t.Helper()
	r := emptyReplica(t, mem.NewDriver(), opts)
	r.found()
	return r
}

// found applies the first two entries of every log here.
func (r *replica) found() {
	r.t.Helper()
	r.ok(r.command(raftfsm.AppendInit(nil, raftfsm.Init{
		Group: 7, Range: keygroup.FullRange(groups), M: groups, Epoch: 1, Birth: 99, Incarnation: 1, ClockMs: 1000,
	})))
	r.ok(r.command(raftfsm.AppendDeclare(nil, testDeclarations())))
}

// newDriver returns the driver of an engine, mem or rocks.
func newDriver(t testing.TB, name string) engine.Driver {
	t.Helper()
	if name == "mem" {
		return mem.NewDriver()
	}
	d, err := rocks.NewDriver(rocks.Options{MemoryBytes: 256 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func emptyReplica(t testing.TB, d engine.Driver, opts raftfsm.Options) *replica {
	t.Helper()
	r := &replica{t: t, driver: d, dir: filepath.Join(t.TempDir(), "store"), opts: opts, stamp: 1000}
	r.opts.OnFatal = func(err error) { r.fatal = err }
	r.open()
	t.Cleanup(func() { r.m.Close() })
	return r
}

func (r *replica) open() {
	r.t.Helper()
	store, err := r.driver.Open(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	r.store = store
	if r.m, err = raftfsm.Open(store, r.opts); err != nil {
		r.t.Fatal(err)
	}
}

// restart loses what was not flushed and replays the whole log.
func (r *replica) restart(flush bool) {
	r.t.Helper()
	if flush {
		if err := r.store.Flush(); err != nil {
			r.t.Fatal(err)
		}
	}
	if err := r.m.Close(); err != nil {
		r.t.Fatal(err)
	}
	r.open()
	r.m.ApplyBatch(r.log)
	if err := r.m.Err(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *replica) entry(command []byte) raftfsm.Entry {
	e := raftfsm.Entry{Index: uint64(len(r.log)) + 1, Term: 1, Command: command}
	r.log = append(r.log, e)
	return e
}

func (r *replica) command(command []byte) raftfsm.Outcome {
	r.t.Helper()
	return r.m.ApplyBatch([]raftfsm.Entry{r.entry(command)})[0]
}

func (r *replica) ok(o raftfsm.Outcome) {
	r.t.Helper()
	if o.Err != nil {
		r.t.Fatal(o.Err)
	}
	for i := range o.Results {
		if err := o.Results[i].Failure(); err != nil {
			r.t.Fatalf("request %d: %v", i, err)
		}
	}
}

func (r *replica) encode(qs ...*raftfsm.Request) []byte {
	r.t.Helper()
	return encodeWrite(r.t, r.stamp, r.rev, qs...)
}

// failer is what testing.TB and rapid.T share.
type failer interface {
	Helper()
	Fatal(...any)
}

func encodeWrite(t failer, stamp uint64, rev base.Revision, qs ...*raftfsm.Request) []byte {
	t.Helper()
	var encoded [][]byte
	for _, q := range qs {
		b, err := raftfsm.AppendRequest(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		encoded = append(encoded, b)
	}
	return raftfsm.AppendWrite(nil, stamp, rev, encoded...)
}

// write applies one entry with one request.
func (r *replica) write(q *raftfsm.Request) raftfsm.Result {
	r.t.Helper()
	o := r.command(r.encode(q))
	if o.Err != nil {
		r.t.Fatal(o.Err)
	}
	return o.Results[0]
}

func (r *replica) view() *raftfsm.ReadView {
	r.t.Helper()
	h := r.m.Header()
	v, err := r.m.ReadView(h.Epoch, h.Incarnation)
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

func (r *replica) read(id engine.FamilyID, key string) state.Answer {
	r.t.Helper()
	v := r.view()
	defer v.Close()
	kind := state.QueryGet
	if id == listID || id == mapID {
		kind = state.QueryPage
	}
	a, err := v.Read(&state.Query{State: id, Kind: kind, Group: groupOf(key), Key: []byte(key)})
	if err != nil {
		r.t.Fatalf("reading state %d: %v", id, err)
	}
	return a
}

func (r *replica) value(key string) string { return string(r.read(valueID, key).Value) }

func (r *replica) list(key string) []string {
	var out []string
	for _, e := range r.read(listID, key).Elements {
		out = append(out, string(e))
	}
	return out
}

func (r *replica) sum(key string) int64 {
	r.t.Helper()
	a := r.read(sumID, key)
	if !a.Found {
		return 0
	}
	v, err := keygroup.Decode(keygroup.Int64, a.Value)
	if err != nil {
		r.t.Fatal(err)
	}
	return v.(int64)
}

// dump is everything that must be equal on replicas: content hashes and op
// hashes per group, and the header.
func (r *replica) dump() string {
	r.t.Helper()
	id := uint64(len(r.log)) + 1
	r.ok(r.command(raftfsm.AppendHashMark(nil, id)))
	h, err := r.m.HashAt(r.t.Context(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	return fmt.Sprintf("%+v", *h)
}
