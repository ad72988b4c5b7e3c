package workload

import (
	"context"
	"sync"

	"github.com/keelstate/keelstate/jepsen/history"
)

// Bank moves money between the accounts of banks.
type Bank struct {
	driver
	mu     sync.Mutex
	opened map[string]bool // absent while it is being opened
}

// Accounts and Balance are what a bank has from the start.
const (
	Accounts = 8
	Balance  = 100
)

// NewBank makes the workload.
func NewBank(c Config) *Bank { return &Bank{driver: newDriver("bank", c), opened: map[string]bool{}} }

// Run works until ctx ends.
func (b *Bank) Run(ctx context.Context, n int) {
	b.loop(ctx, n, func(w *worker) {
		slot := w.rng.IntN(b.cfg.Keys)
		key, fresh := b.keys.take(slot)
		if fresh {
			b.open(ctx, w, slot, key)
			return
		}
		b.mu.Lock()
		ready := b.opened[key]
		b.mu.Unlock()
		switch {
		case !ready: // another one is opening it
		case w.rng.IntN(100) < 40:
			b.read(ctx, w, key)
		default:
			b.transfer(ctx, w, key)
		}
	}, nil)
}

// open opens a bank. One that may or may not be open is left alone.
func (b *Bank) open(ctx context.Context, w *worker, slot int, key string) {
	outcome := w.do(ctx, history.Op{F: "open", Key: key, Arg: []int64{Accounts, Balance}}, true, func(ctx context.Context) ([]int64, error) {
		return nil, w.client.Banks.Open(ctx, key, Accounts, Balance)
	})
	if outcome != history.OK {
		b.keys.drop(slot, key)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.opened[key] = true
}

func (b *Bank) transfer(ctx context.Context, w *worker, key string) {
	from := w.rng.Int64N(Accounts)
	to := (from + 1 + w.rng.Int64N(Accounts-1)) % Accounts
	id, amount := b.unique(), 1+w.rng.Int64N(30)
	w.do(ctx, history.Op{F: "transfer", Key: key, Arg: []int64{id, from, to, amount}}, true, func(ctx context.Context) ([]int64, error) {
		return nil, w.client.Banks.Transfer(ctx, key, id, from, to, amount)
	})
}

func (b *Bank) read(ctx context.Context, w *worker, key string) history.Outcome {
	return w.do(ctx, history.Op{F: "read", Key: key}, false, func(ctx context.Context) ([]int64, error) {
		return w.client.Banks.Read(ctx, key)
	})
}

// Final reads every bank that was opened.
func (b *Bank) Final(ctx context.Context) error {
	return b.finally(ctx, b.keys.used(), func(ctx context.Context, w *worker, key string) history.Outcome {
		b.mu.Lock()
		ready := b.opened[key]
		b.mu.Unlock()
		if !ready {
			return history.OK
		}
		return b.read(ctx, w, key)
	})
}
