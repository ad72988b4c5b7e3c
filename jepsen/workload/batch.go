package workload

import (
	"context"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/history"
)

// State is what a change or a query of a batch is about.
type State uint8

// The states that have batches.
const (
	StateRegister State = iota
	StateCounter
	StateList
	StateMap
)

// Change is one change of a batch: a register is set to Value, Value is added to
// a counter, Elements are appended to a list, an entry of a map is put or removed.
type Change struct {
	State    State
	Key      string
	UserKey  int64
	Value    int64
	Elements []int64
	Remove   bool
}

// Query asks for a register, a sum, or an entry of a map.
type Query struct {
	State   State
	Key     string
	UserKey int64
}

// Answer is what became of a query.
type Answer struct {
	Value int64
	Found bool
	Err   error
}

// Batches do many independent things in few requests.
type Batches interface {
	// Write applies changes, in order at each shard; each has an error of its own.
	Write(ctx context.Context, changes []Change) []error
	// Read answers queries, each on its own.
	Read(ctx context.Context, queries []Query) []Answer
}

// recorded is an operation of a batch: what is recorded, and what is done.
type recorded struct {
	op     history.Op
	change Change
	query  Query
}

// writeAll does the changes of operations together. Each is recorded and judged
// as an operation of its own, with a process of its own, for all are open at once.
func (w *worker) writeAll(ctx context.Context, ops []recorded) {
	changes := make([]Change, len(ops))
	for i := range ops {
		changes[i] = ops[i].change
	}
	w.together(ctx, ops, true, func(ctx context.Context) []history.Done {
		done := make([]history.Done, len(ops))
		for i, err := range w.client.Batches.Write(ctx, changes) {
			done[i] = DoneOf(nil, err, true)
		}
		return done
	})
}

// readAll does the queries of operations together.
func (w *worker) readAll(ctx context.Context, ops []recorded) {
	queries := make([]Query, len(ops))
	for i := range ops {
		queries[i] = ops[i].query
	}
	w.together(ctx, ops, false, func(ctx context.Context) []history.Done {
		done := make([]history.Done, len(ops))
		for i, a := range w.client.Batches.Read(ctx, queries) {
			done[i] = DoneOf(maybe(a.Value, a.Found), a.Err, false)
		}
		return done
	})
}

// together records operations around one call, which says for each how it ended.
func (w *worker) together(ctx context.Context, ops []recorded, write bool, f func(ctx context.Context) []history.Done) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.cfg.Timeout) // JW4
	defer cancel()
	calls, began := make([]history.Call, len(ops)), w.rec.Now()
	for i := range ops {
		if i == len(w.processes) {
			w.processes = append(w.processes, w.rec.NewProcess())
		}
		op := ops[i].op
		op.Process, op.Workload = w.processes[i], w.name
		calls[i] = w.rec.Invoke(op)
	}
	w.answered = true
	for i, done := range f(ctx) {
		w.rec.Complete(calls[i], done)
		if done.Outcome == history.Unknown {
			w.processes[i] = w.rec.NewProcess() // JW2
		}
		w.answered = w.answered && done.Outcome == history.OK
		w.served(done, write, began)
	}
}

// batches are the batches over the product's client.
type batches struct {
	client *keel.Client
	value  *keel.Value[int64]
	sum    *keel.Reducing[int64]
	lists  lists
	m      *keel.Map[int64, int64]
}

func (s batches) Write(ctx context.Context, changes []Change) []error {
	b := s.client.Batch()
	for _, c := range changes {
		switch {
		case c.State == StateRegister:
			b.Add(s.value.SetOp(c.Key, c.Value))
		case c.State == StateCounter:
			b.Add(s.sum.AddOp(c.Key, c.Value))
		case c.State == StateList:
			list, group := s.lists.of(c.Key)
			b.Add(list.AddAllOp(group, c.Elements...))
		case c.Remove:
			b.Add(s.m.RemoveOp(c.Key, c.UserKey))
		default:
			b.Add(s.m.PutOp(c.Key, c.UserKey, c.Value))
		}
	}
	r, err := b.Commit(ctx)
	errs := make([]error, len(changes))
	for i := range errs {
		errs[i] = err // of all, if there are no parts
	}
	for _, p := range r.Parts {
		for _, i := range p.Ordinals {
			if errs[i] = nil; p.Err != nil {
				errs[i] = p.Err
			}
		}
	}
	return errs
}

func (s batches) Read(ctx context.Context, queries []Query) []Answer {
	b := s.client.ReadBatch()
	futures := make([]*keel.Future[int64], len(queries))
	for i, q := range queries {
		switch q.State {
		case StateRegister:
			futures[i] = s.value.Queue(b, q.Key)
		case StateCounter:
			futures[i] = s.sum.Queue(b, q.Key)
		default:
			futures[i] = s.m.Queue(b, q.Key, q.UserKey)
		}
	}
	_ = b.Do(ctx) // each future has its own error
	answers := make([]Answer, len(queries))
	for i, f := range futures {
		it, err := f.Get()
		answers[i] = Answer{Value: it.Value, Found: it.Found, Err: err}
	}
	return answers
}
