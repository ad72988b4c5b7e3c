package workload

import (
	"context"
	"sync"

	"github.com/keelstate/keelstate/jepsen/history"
)

func yes(done bool) []int64 {
	if done {
		return []int64{1}
	}
	return []int64{0}
}

func maybe(v int64, found bool) []int64 {
	if found {
		return []int64{v}
	}
	return nil
}

// Register reads, writes and compares and sets values of single keys.
type Register struct {
	driver
	recent []int64 // of each slot, a value that was written lately
	mu     sync.Mutex
}

// NewRegister makes the workload.
func NewRegister(c Config) *Register {
	r := &Register{driver: newDriver("register", c)}
	r.recent = make([]int64, len(r.keys.slots))
	return r
}

// Run works until ctx ends.
func (r *Register) Run(ctx context.Context, n int) {
	r.loop(ctx, n, func(w *worker) { r.step(ctx, w) }, func(w *worker, size int) { r.batch(ctx, w, size) })
}

// batch writes or reads many registers.
func (r *Register) batch(ctx context.Context, w *worker, size int) {
	ops := make([]recorded, size)
	reads := w.rng.IntN(100) < 45
	for i := range ops {
		slot := w.rng.IntN(len(r.recent))
		key, _ := r.keys.take(slot)
		if reads {
			ops[i] = recorded{op: history.Op{F: "read", Key: key}, query: Query{State: StateRegister, Key: key}}
			continue
		}
		v := r.unique()
		ops[i] = recorded{op: history.Op{F: "write", Key: key, Arg: []int64{v}}, change: Change{State: StateRegister, Key: key, Value: v}}
		r.swap(slot, v)
	}
	if reads {
		w.readAll(ctx, ops)
		return
	}
	w.writeAll(ctx, ops)
}

func (r *Register) swap(slot int, v int64) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.recent[slot]
	r.recent[slot] = v
	return old
}

func (r *Register) step(ctx context.Context, w *worker) {
	slot := w.rng.IntN(len(r.recent))
	key, _ := r.keys.take(slot)
	op := history.Op{Key: key}
	s := w.client.Registers
	switch p := w.rng.IntN(100); {
	case p < 40:
		r.read(ctx, w, key)
	case p < 72:
		v := r.unique()
		op.F, op.Arg = "write", []int64{v}
		w.do(ctx, op, true, func(ctx context.Context) ([]int64, error) { return nil, s.Write(ctx, key, v) })
		r.swap(slot, v)
	case p < 94:
		v := r.unique()
		old := r.swap(slot, v)
		op.F, op.Arg = "cas", []int64{old, v}
		w.do(ctx, op, true, func(ctx context.Context) ([]int64, error) {
			done, err := s.CompareAndSet(ctx, key, old, v)
			return yes(done), err
		})
	case p < 98:
		v := r.unique()
		op.F, op.Arg = "create", []int64{v}
		w.do(ctx, op, true, func(ctx context.Context) ([]int64, error) {
			done, err := s.Create(ctx, key, v)
			return yes(done), err
		})
	default:
		op.F = "clear"
		w.do(ctx, op, true, func(ctx context.Context) ([]int64, error) { return nil, s.Clear(ctx, key) })
	}
}

func (r *Register) read(ctx context.Context, w *worker, key string) history.Outcome {
	return w.do(ctx, history.Op{F: "read", Key: key}, false, func(ctx context.Context) ([]int64, error) {
		v, found, err := w.client.Registers.Read(ctx, key)
		return maybe(v, found), err
	})
}

// Final reads every register.
func (r *Register) Final(ctx context.Context) error { return r.finally(ctx, r.keys.used(), r.read) }

// Counter adds to sums.
type Counter struct{ driver }

// NewCounter makes the workload.
func NewCounter(c Config) *Counter { return &Counter{newDriver("counter", c)} }

// Run works until ctx ends.
func (c *Counter) Run(ctx context.Context, n int) {
	c.loop(ctx, n, func(w *worker) {
		key, _ := c.keys.take(w.rng.IntN(c.cfg.Keys))
		if w.rng.IntN(100) < 35 {
			c.read(ctx, w, key)
			return
		}
		// Different amounts tell which add is missing or counted twice.
		d := 1 + w.rng.Int64N(1000)
		w.do(ctx, history.Op{F: "add", Key: key, Arg: []int64{d}}, true, func(ctx context.Context) ([]int64, error) {
			return nil, w.client.Counters.Add(ctx, key, d)
		})
	}, func(w *worker, size int) { c.batch(ctx, w, size) })
}

// batch adds to many sums, or reads them.
func (c *Counter) batch(ctx context.Context, w *worker, size int) {
	ops := make([]recorded, size)
	reads := w.rng.IntN(100) < 40
	for i := range ops {
		key, _ := c.keys.take(w.rng.IntN(c.cfg.Keys))
		if reads {
			ops[i] = recorded{op: history.Op{F: "read", Key: key}, query: Query{State: StateCounter, Key: key}}
			continue
		}
		d := 1 + w.rng.Int64N(1000)
		ops[i] = recorded{op: history.Op{F: "add", Key: key, Arg: []int64{d}}, change: Change{State: StateCounter, Key: key, Value: d}}
	}
	if reads {
		w.readAll(ctx, ops)
		return
	}
	w.writeAll(ctx, ops)
}

func (c *Counter) read(ctx context.Context, w *worker, key string) history.Outcome {
	return w.do(ctx, history.Op{F: "read", Key: key}, false, func(ctx context.Context) ([]int64, error) {
		v, found, err := w.client.Counters.Sum(ctx, key)
		return maybe(v, found), err
	})
}

// Final reads every counter.
func (c *Counter) Final(ctx context.Context) error { return c.finally(ctx, c.keys.used(), c.read) }

// List appends unique elements, also to several lists of a group at once.
type List struct {
	driver
	mu    sync.Mutex
	lists []string // every list of every group that was used
}

// groupNames are the lists of a group.
var groupNames = []string{"a", "b", "c"}

// NewList makes the workload.
func NewList(c Config) *List {
	if c.OpsPerKey <= 0 {
		c.OpsPerKey = 300 // of a group: about 60 elements in each list
	}
	return &List{driver: newDriver("list", c)}
}

// Run works until ctx ends.
func (l *List) Run(ctx context.Context, n int) {
	l.loop(ctx, n, func(w *worker) { l.step(ctx, w, l.group(w)) }, func(w *worker, size int) { l.batch(ctx, w, size) })
}

// group takes a group of lists.
func (l *List) group(w *worker) string {
	group, fresh := l.keys.take(w.rng.IntN(l.cfg.Keys))
	if fresh {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, n := range groupNames {
			l.lists = append(l.lists, group+"/"+n)
		}
	}
	return group
}

// batch appends to many lists. Two appends to one list in a batch are open at
// once, so any order of them is right.
func (l *List) batch(ctx context.Context, w *worker, size int) {
	ops := make([]recorded, size)
	for i := range ops {
		key, elements := l.group(w)+"/"+groupNames[w.rng.IntN(len(groupNames))], l.elements(w)
		ops[i] = recorded{op: history.Op{F: "append", Key: key, Arg: elements}, change: Change{State: StateList, Key: key, Elements: elements}}
	}
	w.writeAll(ctx, ops)
}

func (l *List) step(ctx context.Context, w *worker, group string) {
	key := group + "/" + groupNames[w.rng.IntN(len(groupNames))]
	p := w.rng.IntN(100)
	if p < 45 {
		l.read(ctx, w, key)
		return
	}
	op := history.Op{F: "append"}
	if p < 80 {
		op.Key, op.Arg = key, l.elements(w)
		w.do(ctx, op, true, func(ctx context.Context) ([]int64, error) {
			return nil, w.client.Lists.Append(ctx, []history.Part{{Key: key, Arg: op.Arg}})
		})
		return
	}
	for _, n := range w.rng.Perm(len(groupNames))[:2] {
		op.Parts = append(op.Parts, history.Part{Key: group + "/" + groupNames[n], Arg: l.elements(w)})
	}
	w.do(ctx, op, true, func(ctx context.Context) ([]int64, error) { return nil, w.client.Lists.Append(ctx, op.Parts) })
}

func (l *List) elements(w *worker) []int64 {
	out := []int64{l.unique()}
	if w.rng.IntN(5) == 0 {
		out = append(out, l.unique())
	}
	return out
}

func (l *List) read(ctx context.Context, w *worker, key string) history.Outcome {
	return w.do(ctx, history.Op{F: "read", Key: key}, false, func(ctx context.Context) ([]int64, error) {
		return w.client.Lists.Read(ctx, key)
	})
}

// Final reads every list.
func (l *List) Final(ctx context.Context) error {
	l.mu.Lock()
	lists := append([]string(nil), l.lists...)
	l.mu.Unlock()
	return l.finally(ctx, lists, l.read)
}

// Map puts, removes, gets and scans entries of small maps.
type Map struct{ driver }

// userKeys is how many entries a map has at most: as many as a search holds.
const userKeys = 12

// NewMap makes the workload.
func NewMap(c Config) *Map { return &Map{newDriver("map", c)} }

// Run works until ctx ends.
func (m *Map) Run(ctx context.Context, n int) {
	m.loop(ctx, n, func(w *worker) {
		key, _ := m.keys.take(w.rng.IntN(m.cfg.Keys))
		k := w.rng.Int64N(userKeys)
		s := w.client.Maps
		switch p := w.rng.IntN(100); {
		case p < 45:
			v := m.unique()
			w.do(ctx, history.Op{F: "put", Key: key, Arg: []int64{k, v}}, true, func(ctx context.Context) ([]int64, error) {
				return nil, s.Put(ctx, key, k, v)
			})
		case p < 55:
			w.do(ctx, history.Op{F: "remove", Key: key, Arg: []int64{k}}, true, func(ctx context.Context) ([]int64, error) {
				return nil, s.Remove(ctx, key, k)
			})
		case p < 70:
			w.do(ctx, history.Op{F: "get", Key: key, Arg: []int64{k}}, false, func(ctx context.Context) ([]int64, error) {
				v, found, err := s.Get(ctx, key, k)
				return maybe(v, found), err
			})
		default:
			m.scan(ctx, w, key)
		}
	}, func(w *worker, size int) { m.batch(ctx, w, size) })
}

// batch changes entries of many maps, or gets them.
func (m *Map) batch(ctx context.Context, w *worker, size int) {
	ops := make([]recorded, size)
	reads := w.rng.IntN(100) < 35
	for i := range ops {
		key, _ := m.keys.take(w.rng.IntN(m.cfg.Keys))
		k := w.rng.Int64N(userKeys)
		switch {
		case reads:
			ops[i] = recorded{op: history.Op{F: "get", Key: key, Arg: []int64{k}}, query: Query{State: StateMap, Key: key, UserKey: k}}
		case w.rng.IntN(5) == 0:
			ops[i] = recorded{op: history.Op{F: "remove", Key: key, Arg: []int64{k}}, change: Change{State: StateMap, Key: key, UserKey: k, Remove: true}}
		default:
			v := m.unique()
			ops[i] = recorded{op: history.Op{F: "put", Key: key, Arg: []int64{k, v}}, change: Change{State: StateMap, Key: key, UserKey: k, Value: v}}
		}
	}
	if reads {
		w.readAll(ctx, ops)
		return
	}
	w.writeAll(ctx, ops)
}

func (m *Map) scan(ctx context.Context, w *worker, key string) history.Outcome {
	return w.do(ctx, history.Op{F: "scan", Key: key}, false, func(ctx context.Context) ([]int64, error) {
		return w.client.Maps.Scan(ctx, key)
	})
}

// Final scans every map.
func (m *Map) Final(ctx context.Context) error { return m.finally(ctx, m.keys.used(), m.scan) }
