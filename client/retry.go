package keel

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// budget bounds retries: every call earns a part of one, and a floor per
// second is always earned. It is full at first. What is spent beyond it is owed
// up to one second's floor, so that after a long outage nobody waits longer.
type budget struct {
	ratio, perSecond, capacity float64

	mu struct {
		sync.Mutex
		tokens float64
		at     time.Time
	}
}

func newBudget(ratio, perSecond float64) *budget {
	b := &budget{ratio: ratio, perSecond: max(perSecond, 0.1), capacity: max(10, 10*perSecond)}
	b.mu.tokens, b.mu.at = b.capacity, time.Now()
	return b
}

// called earns what one call earns.
func (b *budget) called() {
	b.mu.Lock()
	b.mu.tokens = min(b.capacity, b.mu.tokens+b.ratio)
	b.mu.Unlock()
}

// take spends one retry and returns how long it has to wait for it, at most a
// second.
func (b *budget) take() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.mu.tokens = min(b.capacity, b.mu.tokens+now.Sub(b.mu.at).Seconds()*b.perSecond)
	b.mu.at = now
	b.mu.tokens = max(b.mu.tokens-1, -b.perSecond)
	if b.mu.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.mu.tokens / b.perSecond * float64(time.Second))
}

// backoff is the pause before retry number n (from 0), with jitter of a half.
func (o *options) backoff(n int) time.Duration {
	d := o.backoffMax
	if n < 16 {
		d = min(d, o.backoffMin<<n)
	}
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// pause waits, and is false if the context ended first.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
