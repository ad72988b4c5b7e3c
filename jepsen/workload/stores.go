package workload

import (
	"context"
	"fmt"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/history"
)

// Registers are values by key. Errors of all stores are *keel.Error where
// anything is known about the outcome.
type Registers interface {
	Read(ctx context.Context, key string) (v int64, found bool, err error)
	Write(ctx context.Context, key string, v int64) error
	// CompareAndSet sets the value if it is old, Create if there is none; done
	// is false, without an error, if not.
	CompareAndSet(ctx context.Context, key string, old, v int64) (done bool, err error)
	Create(ctx context.Context, key string, v int64) (done bool, err error)
	Clear(ctx context.Context, key string) error
}

// Counters are sums by key.
type Counters interface {
	Add(ctx context.Context, key string, delta int64) error
	Sum(ctx context.Context, key string) (v int64, found bool, err error)
}

// Lists are lists by key. A key has the form "group/name": lists of one group
// share a shard.
type Lists interface {
	// Append appends to lists of one group, all or none. Results are not used.
	Append(ctx context.Context, parts []history.Part) error
	Read(ctx context.Context, key string) ([]int64, error)
}

// Maps are maps by key.
type Maps interface {
	Put(ctx context.Context, key string, userKey, v int64) error
	Remove(ctx context.Context, key string, userKey int64) error
	Get(ctx context.Context, key string, userKey int64) (v int64, found bool, err error)
	// Scan returns user key, value, user key, value, from one instant.
	Scan(ctx context.Context, key string) ([]int64, error)
}

// Banks are accounts of one shard, with the id of the last transfer.
type Banks interface {
	Open(ctx context.Context, key string, accounts, balance int64) error
	// Transfer fails, not applied, if the account has too little or another
	// transfer came between.
	Transfer(ctx context.Context, key string, id, from, to, amount int64) error
	// Read returns the id of the last transfer and all balances, from one
	// instant.
	Read(ctx context.Context, key string) ([]int64, error)
}

// Sessions are lists of numbered operations.
type Sessions interface {
	// Append starts an append and returns at once; those of one goroutine take
	// effect in the order in which they were started. The client sends each
	// until its outcome is known or ctx ends; wait returns it.
	Append(ctx context.Context, key string, session, n int64) (wait func() error)
	// Read returns session, number, session, number, in order.
	Read(ctx context.Context, key string) ([]int64, error)
}

// Client is one client's stores.
type Client struct {
	Registers Registers
	Counters  Counters
	Lists     Lists
	Maps      Maps
	Banks     Banks
	Sessions  Sessions
	// Batches is nil where there are none.
	Batches Batches
}

// Keyspace is where the workloads' states are.
const Keyspace = "jepsen"

// NewClient declares the workloads' states, where they do not exist, and
// returns a client's stores. It waits for the cluster until ctx ends.
func NewClient(ctx context.Context, c *keel.Client) (Client, error) {
	k := c.Keyspace(Keyspace, keel.String.Type())
	var d declarer
	value := declare(&d, func() (*keel.Value[int64], error) { return keel.DeclareValue(ctx, k, "register", keel.Int64) })
	sum := declare(&d, func() (*keel.Reducing[int64], error) {
		return keel.DeclareReducing(ctx, k, "counter", "sum", keel.Int64)
	})
	list := declare(&d, func() (*keel.List[int64], error) { return keel.DeclareList(ctx, k, "list", keel.Int64) })
	entries := declare(&d, func() (*keel.Map[int64, int64], error) {
		return keel.DeclareMap(ctx, k, "map", keel.Int64, keel.Int64)
	})
	accounts := declare(&d, func() (*keel.Map[int64, int64], error) {
		return keel.DeclareMap(ctx, k, "bank", keel.Int64, keel.Int64)
	})
	numbers := declare(&d, func() (*keel.List[int64], error) { return keel.DeclareList(ctx, k, "session", keel.Int64) })
	if d.err != nil {
		return Client{}, fmt.Errorf("declaring the workloads' states: %w", d.err)
	}
	return Client{
		Registers: registers{value}, Counters: counters{sum}, Lists: lists{c, list},
		Maps: maps{entries}, Banks: banks{c, accounts}, Sessions: sessions{c, numbers},
		Batches: batches{c, value, sum, lists{c, list}, entries},
	}, nil
}

// declarer keeps the first error.
type declarer struct{ err error }

func declare[T any](d *declarer, f func() (T, error)) (t T) {
	if d.err == nil {
		t, d.err = f()
	}
	return t
}
