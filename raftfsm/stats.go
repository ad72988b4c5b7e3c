package raftfsm

import (
	"sync"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// Counters are totals since the machine was opened.
type Counters struct {
	Entries, Skipped, Requests, Replayed, Mutations, Batches, BatchBytes, BatchOps uint64
	// Refused counts refused requests by reason.
	Refused map[base.Reason]uint64
}

// counts collects on the apply goroutine between commits.
type counts struct {
	entries, skipped, requests, replayed, mutations uint64
	refused                                         map[base.Reason]uint64
}

func (c *counts) result(r *Result) {
	c.requests++
	if r.Replayed {
		c.replayed++
	}
	if r.Err != nil {
		if c.refused == nil {
			c.refused = make(map[base.Reason]uint64)
		}
		c.refused[base.SentinelOf(r.Err.Cause).Reason]++
	}
}

// totals guards the totals.
type totals struct {
	mu    sync.Mutex
	total Counters
}

func (s *totals) add(c *counts, b *engine.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &s.total
	t.Entries += c.entries
	t.Skipped += c.skipped
	t.Requests += c.requests
	t.Replayed += c.replayed
	t.Mutations += c.mutations
	t.Batches++
	t.BatchBytes += uint64(len(b.Bytes()))
	t.BatchOps += uint64(b.Len())
	if len(c.refused) > 0 {
		if t.Refused == nil {
			t.Refused = make(map[base.Reason]uint64)
		}
		for reason, n := range c.refused { // sums do not depend on the order
			t.Refused[reason] += n
		}
	}
	*c = counts{}
}

// Counters returns a copy of the totals.
func (m *Machine) Counters() Counters {
	m.stats.mu.Lock()
	defer m.stats.mu.Unlock()
	c := m.stats.total
	c.Refused = make(map[base.Reason]uint64, len(m.stats.total.Refused))
	for reason, n := range m.stats.total.Refused {
		c.Refused[reason] = n
	}
	return c
}
