package sim

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// families are the states that the workloads use.
type families struct {
	register, counter, list, entries, bank, session engine.FamilyID
}

func (w *world) declarations() []state.Declaration {
	d := func(name string, kind state.Kind) state.Declaration {
		out := state.Declaration{Keyspace: "sim", Name: name, Kind: kind, KeyType: keygroup.String, ValueType: keygroup.Int64}
		if kind == state.KindMap {
			out.UserKeyType = keygroup.Int64
		}
		if kind == state.KindReducing {
			out.Function = "sum"
		}
		return out
	}
	return []state.Declaration{d("register", state.KindValue), d("counter", state.KindReducing), d("list", state.KindList),
		d("map", state.KindMap), d("bank", state.KindMap), d("session", state.KindList)}
}

func encode(v int64) []byte {
	b, err := keygroup.Encode(keygroup.Int64, v)
	if err != nil {
		panic(err) // an int64 has a code
	}
	return b
}

func decode(b []byte) (int64, error) {
	v, err := keygroup.Decode(keygroup.Int64, b)
	if err != nil {
		return 0, err
	}
	return v.(int64), nil
}

// value is the answer to a QueryGet.
func value(as []state.Answer, err error) (int64, bool, error) {
	if err != nil || !as[0].Found {
		return 0, false, failure(err)
	}
	v, err := decode(as[0].Value)
	return v, true, err
}

type registers struct{ *client }

func (s registers) Read(ctx context.Context, key string) (int64, bool, error) {
	return value(s.read(ctx, state.Query{State: s.w.fams.register, Kind: state.QueryGet, Key: []byte(key)}))
}

func (s registers) put(key string, v int64) state.Mutation {
	return state.Mutation{State: s.w.fams.register, Op: state.OpValuePut, Key: []byte(key), Value: encode(v)}
}

func (s registers) Write(ctx context.Context, key string, v int64) error {
	return failure(s.write(ctx, raftfsm.Request{}, s.put(key, v)))
}

// onlyIf writes if a precondition holds.
func (s registers) onlyIf(ctx context.Context, key string, v int64, p state.Precondition) (bool, error) {
	p.State, p.Key = s.w.fams.register, []byte(key)
	err := s.write(ctx, raftfsm.Request{Preconditions: []state.Precondition{p}}, s.put(key, v))
	if errors.Is(err, base.ErrPrecondition) {
		return false, nil
	}
	return err == nil, failure(err)
}

func (s registers) CompareAndSet(ctx context.Context, key string, old, v int64) (bool, error) {
	return s.onlyIf(ctx, key, v, state.Precondition{Kind: state.PreEqual, Bytes: encode(old)})
}

func (s registers) Create(ctx context.Context, key string, v int64) (bool, error) {
	return s.onlyIf(ctx, key, v, state.Precondition{Kind: state.PreAbsent})
}

func (s registers) Clear(ctx context.Context, key string) error {
	return failure(s.write(ctx, raftfsm.Request{}, state.Mutation{State: s.w.fams.register, Op: state.OpClear, Key: []byte(key)}))
}

type counters struct{ *client }

func (s counters) Add(ctx context.Context, key string, delta int64) error {
	return failure(s.write(ctx, raftfsm.Request{}, state.Mutation{State: s.w.fams.counter, Op: state.OpAdd, Key: []byte(key), Elements: [][]byte{encode(delta)}}))
}

func (s counters) Sum(ctx context.Context, key string) (int64, bool, error) {
	return value(s.read(ctx, state.Query{State: s.w.fams.counter, Kind: state.QueryGet, Key: []byte(key)}))
}

type lists struct{ *client }

// of is where a list is: the group is its key, so that the group shares a shard,
// and the name its namespace.
func of(key string) ([]byte, state.Namespace) {
	group, name, _ := strings.Cut(key, "/")
	return []byte(group), state.Namespace{Set: true, Bytes: []byte(name)}
}

func (s lists) Append(ctx context.Context, parts []history.Part) error {
	var ms []state.Mutation
	for _, p := range parts {
		m := state.Mutation{State: s.w.fams.list, Op: state.OpListAdd}
		m.Key, m.Namespace = of(p.Key)
		for _, e := range p.Arg {
			m.Elements = append(m.Elements, encode(e))
		}
		ms = append(ms, m)
	}
	return failure(s.write(ctx, raftfsm.Request{Atomic: true}, ms...))
}

func (s lists) Read(ctx context.Context, key string) ([]int64, error) {
	q := state.Query{State: s.w.fams.list}
	q.Key, q.Namespace = of(key)
	return values(s.page(ctx, q))
}

func values(es []state.Entry, err error) ([]int64, error) {
	if err != nil {
		return nil, failure(err)
	}
	var out []int64
	for _, e := range es {
		v, err := decode(e.Value)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

type maps struct{ *client }

func (s maps) change(ctx context.Context, op state.Op, key string, e state.Entry) error {
	return failure(s.write(ctx, raftfsm.Request{}, state.Mutation{State: s.w.fams.entries, Op: op, Key: []byte(key), Entries: []state.Entry{e}}))
}

func (s maps) Put(ctx context.Context, key string, userKey, v int64) error {
	return s.change(ctx, state.OpMapPut, key, state.Entry{UserKey: encode(userKey), Value: encode(v)})
}

func (s maps) Remove(ctx context.Context, key string, userKey int64) error {
	return s.change(ctx, state.OpMapRemove, key, state.Entry{UserKey: encode(userKey)})
}

func (s maps) Get(ctx context.Context, key string, userKey int64) (int64, bool, error) {
	return value(s.read(ctx, state.Query{State: s.w.fams.entries, Kind: state.QueryGet, Key: []byte(key), UserKey: encode(userKey)}))
}

func (s maps) Scan(ctx context.Context, key string) ([]int64, error) {
	return pairs(s.page(ctx, state.Query{State: s.w.fams.entries, Key: []byte(key)}))
}

// pairs are user key, value, user key, value.
func pairs(es []state.Entry, err error) ([]int64, error) {
	if err != nil {
		return nil, failure(err)
	}
	var out []int64
	for _, e := range es {
		k, err := decode(e.UserKey)
		if err != nil {
			return nil, err
		}
		v, err := decode(e.Value)
		if err != nil {
			return nil, err
		}
		out = append(out, k, v)
	}
	return out, nil
}

// banks keep the balances in a map, with the last transfer's id beside them.
type banks struct{ *client }

const lastTransfer = -1

func (s banks) Open(ctx context.Context, key string, accounts, balance int64) error {
	m := state.Mutation{State: s.w.fams.bank, Op: state.OpMapPut, Key: []byte(key),
		Entries: []state.Entry{{UserKey: encode(lastTransfer), Value: encode(0)}}}
	for n := range accounts {
		m.Entries = append(m.Entries, state.Entry{UserKey: encode(n), Value: encode(balance)})
	}
	return failure(s.write(ctx, raftfsm.Request{}, m))
}

func (s banks) Transfer(ctx context.Context, key string, id, from, to, amount int64) error {
	q := state.Query{State: s.w.fams.bank, Kind: state.QueryGet, Key: []byte(key), UserKey: encode(from)}
	q2 := q
	q2.UserKey = encode(to)
	as, err := s.read(ctx, q, q2)
	if err != nil {
		return failure(&base.Error{Cause: base.ErrNotReady, Ordinal: -1, Hint: err.Error()}) // nothing was written
	}
	var have [2]int64
	for i, a := range as {
		if !a.Found {
			return failure(base.ErrPrecondition)
		}
		if have[i], err = decode(a.Value); err != nil {
			return failure(&base.Error{Cause: base.ErrInvalid, Ordinal: -1, Hint: err.Error()})
		}
	}
	if have[0] < amount {
		return failure(base.ErrPrecondition)
	}
	pre := func(i int, user int64) state.Precondition {
		return state.Precondition{State: s.w.fams.bank, Kind: state.PreVersion, Key: []byte(key), HasUserKey: true, UserKey: encode(user), Version: as[i].Version}
	}
	put := func(user, v int64) state.Mutation {
		return state.Mutation{State: s.w.fams.bank, Op: state.OpMapPut, Key: []byte(key), Entries: []state.Entry{{UserKey: encode(user), Value: encode(v)}}}
	}
	return failure(s.write(ctx, raftfsm.Request{Preconditions: []state.Precondition{pre(0, from), pre(1, to)}},
		put(from, have[0]-amount), put(to, have[1]+amount), put(lastTransfer, id)))
}

func (s banks) Read(ctx context.Context, key string) ([]int64, error) {
	es, err := s.page(ctx, state.Query{State: s.w.fams.bank, Key: []byte(key)})
	slices.SortFunc(es, func(a, b state.Entry) int { return cmp.Compare(string(a.UserKey), string(b.UserKey)) })
	return values(es, err)
}

// numbered keep session and number in one element.
type numbered struct{ *client }

const numberBits = 24

func (s numbered) Append(ctx context.Context, key string, session, n int64) func() error {
	m := state.Mutation{State: s.w.fams.session, Op: state.OpListAdd, Key: []byte(key), Elements: [][]byte{encode(session<<numberBits | n)}}
	req := raftfsm.Request{Mutations: []raftfsm.Mutation{{Mutation: m}}}
	wait := s.lanes[s.shardOf(m.Key)-1].start(ctx, req)
	return func() error { return failure(wait()) }
}

func (s numbered) Read(ctx context.Context, key string) ([]int64, error) {
	elements, err := values(s.page(ctx, state.Query{State: s.w.fams.session, Key: []byte(key)}))
	var out []int64
	for _, e := range elements {
		out = append(out, e>>numberBits, e&(1<<numberBits-1))
	}
	return out, err
}
