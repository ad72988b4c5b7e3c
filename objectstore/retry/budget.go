package retry

import "sync"

// Budget bounds the repeats of all calls that share it: each repeat costs one
// unit, each success gives a part of one back, up to the capacity. So a store that
// fails now and then is asked again, one that fails always is asked little more
// often than without retries. (The scheme is that of gRFC A6, retry throttling.)
type Budget struct {
	capacity, perSuccess float64

	mu   sync.Mutex
	left float64
}

// NewBudget returns a full budget of so many repeats; a success gives perSuccess
// back.
func NewBudget(capacity, perSuccess float64) *Budget {
	return &Budget{capacity: capacity, perSuccess: perSuccess, left: capacity}
}

// DefaultBudget allows 40 repeats in a row, and one for every 5 successes.
func DefaultBudget() *Budget { return NewBudget(40, 0.2) }

// take says whether one more repeat is allowed, and pays for it.
func (b *Budget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left < 1 {
		return false
	}
	b.left--
	return true
}

func (b *Budget) success() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = min(b.left+b.perSuccess, b.capacity)
}
