package workload

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/history"
)

// The stores over the product's client.

type registers struct{ *keel.Value[int64] }

func (s registers) Read(ctx context.Context, key string) (int64, bool, error) { return s.Get(ctx, key) }

func (s registers) Write(ctx context.Context, key string, v int64) error {
	_, err := s.Set(ctx, key, v)
	return err
}

func (s registers) CompareAndSet(ctx context.Context, key string, old, v int64) (bool, error) {
	done, _, err := s.Value.CompareAndSet(ctx, key, v, s.IfEqual(key, old))
	return done, err
}

func (s registers) Create(ctx context.Context, key string, v int64) (bool, error) {
	done, _, err := s.Value.CompareAndSet(ctx, key, v, s.IfAbsent(key))
	return done, err
}

func (s registers) Clear(ctx context.Context, key string) error {
	_, err := s.Value.Clear(ctx, key)
	return err
}

type counters struct{ sum *keel.Reducing[int64] }

func (s counters) Add(ctx context.Context, key string, delta int64) error {
	_, err := s.sum.Add(ctx, key, delta)
	return err
}

func (s counters) Sum(ctx context.Context, key string) (int64, bool, error) {
	return s.sum.Get(ctx, key)
}

type lists struct {
	client *keel.Client
	list   *keel.List[int64]
}

// of is a list: the group is its key, so that the group shares a shard, and the
// name its namespace.
func (s lists) of(key string) (*keel.List[int64], string) {
	group, name, _ := strings.Cut(key, "/")
	return s.list.In(name), group
}

func (s lists) Append(ctx context.Context, parts []history.Part) error {
	b := s.client.Batch().Atomic()
	for _, p := range parts {
		list, group := s.of(p.Key)
		b.Add(list.AddAllOp(group, p.Arg...))
	}
	_, err := b.Commit(ctx)
	return err
}

func (s lists) Read(ctx context.Context, key string) ([]int64, error) {
	list, group := s.of(key)
	return list.Get(ctx, group)
}

type maps struct{ m *keel.Map[int64, int64] }

func (s maps) Put(ctx context.Context, key string, userKey, v int64) error {
	_, err := s.m.Put(ctx, key, userKey, v)
	return err
}

func (s maps) Remove(ctx context.Context, key string, userKey int64) error {
	_, err := s.m.Remove(ctx, key, userKey)
	return err
}

func (s maps) Get(ctx context.Context, key string, userKey int64) (int64, bool, error) {
	it, err := s.m.Get(ctx, key, userKey)
	return it.Value, it.Found, err
}

func (s maps) Scan(ctx context.Context, key string) ([]int64, error) {
	var out []int64
	for e, err := range s.m.Entries(ctx, key) {
		if err != nil {
			return nil, err
		}
		out = append(out, e.Key, e.Value)
	}
	return out, nil
}

// banks keep the balances in a map, with the last transfer's id beside them.
type banks struct {
	client *keel.Client
	m      *keel.Map[int64, int64]
}

// lastTransfer is the user key of the last transfer's id.
const lastTransfer = -1

func (s banks) Open(ctx context.Context, key string, accounts, balance int64) error {
	all := []keel.Entry[int64, int64]{{Key: lastTransfer}}
	for n := range accounts {
		all = append(all, keel.Entry[int64, int64]{Key: n, Value: balance})
	}
	_, err := s.m.PutAll(ctx, key, all...)
	return err
}

func (s banks) Transfer(ctx context.Context, key string, id, from, to, amount int64) error {
	a, err := s.m.Get(ctx, key, from)
	if err != nil {
		return notApplied(err)
	}
	b, err := s.m.Get(ctx, key, to)
	if err != nil {
		return notApplied(err)
	}
	if !a.Found || !b.Found || a.Value < amount {
		return keel.NewError(keel.ErrPrecondition, keel.OutcomeNotApplied, "amount", "the account has too little")
	}
	// The two may be from different instants; the versions make it safe.
	_, err = s.client.Batch().
		Require(s.m.IfEntryVersion(key, from, a.Version), s.m.IfEntryVersion(key, to, b.Version)).
		Add(s.m.PutOp(key, from, a.Value-amount), s.m.PutOp(key, to, b.Value+amount), s.m.PutOp(key, lastTransfer, id)).
		Commit(ctx)
	return err
}

// notApplied is the error of a read that a write depends on.
func notApplied(err error) error {
	var e *keel.Error
	if errors.As(err, &e) && e.Outcome != keel.OutcomeNotApplied {
		c := *e
		c.Outcome = keel.OutcomeNotApplied
		return &c
	}
	return err
}

func (s banks) Read(ctx context.Context, key string) ([]int64, error) {
	var all []keel.Entry[int64, int64]
	for e, err := range s.m.Entries(ctx, key) {
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	// In the order of the user keys: the id, then the accounts.
	slices.SortFunc(all, func(a, b keel.Entry[int64, int64]) int { return cmp.Compare(a.Key, b.Key) })
	var out []int64
	for _, e := range all {
		out = append(out, e.Value)
	}
	return out, nil
}

// sessions keep session and number in one element.
type sessions struct {
	client *keel.Client
	list   *keel.List[int64]
}

// numberBits is the width of a session's numbers in an element.
const numberBits = 24

func (s sessions) Append(ctx context.Context, key string, session, n int64) func() error {
	p := s.client.Batch().Add(s.list.AddOp(key, session<<numberBits|n)).Start(ctx)
	return func() error {
		_, err := p.Wait(ctx)
		return err
	}
}

func (s sessions) Read(ctx context.Context, key string) ([]int64, error) {
	elements, err := s.list.Get(ctx, key)
	var out []int64
	for _, e := range elements {
		out = append(out, e>>numberBits, e&(1<<numberBits-1))
	}
	return out, err
}
