package workload

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/history"
)

// fake is a cluster in memory. It loses requests and answers, says so as the
// product does, and has faults of its own to be caught.
type fake struct {
	mu    sync.Mutex
	rng   *rand.Rand
	lossy int    // one request in so many fails, one is unknown
	fault string // a defect, see the tests
	hits  int    // how often the defect showed
	delay time.Duration

	values map[string]int64
	sums   map[string]int64
	lists  map[string][]int64
	old    map[string][]int64 // lists as they were before the last append
	maps   map[string]map[int64]int64
	late   []func()
}

func newFake(seed uint64, lossy int, fault string) *fake {
	return &fake{rng: rand.New(rand.NewPCG(seed, 3)), lossy: lossy, fault: fault, delay: 200 * time.Microsecond,
		values: map[string]int64{}, sums: map[string]int64{}, lists: map[string][]int64{}, old: map[string][]int64{}, maps: map[string]map[int64]int64{}}
}

func (f *fake) client() Client {
	return Client{fakeRegisters{f}, fakeCounters{f}, fakeLists{f}, fakeMaps{f}, fakeBanks{f}, fakeSessions{f}, fakeBatches{f}}
}

var (
	errRefused = keel.NewError(keel.ErrNotLeader, keel.OutcomeNotApplied, "", "")
	errTimeout = keel.NewError(keel.ErrDeadline, keel.OutcomeUnknown, "", "")
)

// bad says whether a defect shows now: one time in twenty.
func (f *fake) bad(fault string) bool {
	if f.fault != fault || f.rng.IntN(20) > 0 {
		return false
	}
	f.hits++
	return true
}

// run runs one request as a network would have it.
func run[T any](f *fake, apply func() T) (result T, err error) {
	wait := func() {
		f.mu.Lock()
		d := time.Duration(f.rng.Int64N(int64(f.delay)))
		f.mu.Unlock()
		<-time.After(d)
	}
	wait()
	defer wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.late) > 0 && f.rng.IntN(4) == 0 { // what timed out takes effect late
		f.late[0]()
		f.late = f.late[1:]
	}
	if f.lossy > 0 {
		switch f.rng.IntN(f.lossy) {
		case 0:
			return result, errRefused
		case 1:
			switch f.rng.IntN(3) {
			case 0:
				apply() // the answer is lost
			case 1:
				f.late = append(f.late, func() { apply() })
			}
			return result, errTimeout
		}
	}
	return apply(), nil
}

// found is a value that may be absent.
type found struct {
	v  int64
	ok bool
}

func (f found) result(err error) (int64, bool, error) { return f.v, f.ok, err }

type fakeRegisters struct{ *fake }

func (f fakeRegisters) Read(_ context.Context, key string) (int64, bool, error) {
	r, err := run(f.fake, func() (r found) { r.v, r.ok = f.values[key]; return r })
	return r.result(err)
}

func (f fakeRegisters) Write(_ context.Context, key string, v int64) error {
	_, err := run(f.fake, func() bool {
		if !f.bad("a write is lost") {
			f.values[key] = v
		}
		return true
	})
	return err
}

func (f fakeRegisters) CompareAndSet(_ context.Context, key string, old, v int64) (bool, error) {
	return run(f.fake, func() bool {
		now, ok := f.values[key]
		if (!ok || now != old) && !f.bad("a comparison is skipped") {
			return false
		}
		f.values[key] = v
		return true
	})
}

func (f fakeRegisters) Create(_ context.Context, key string, v int64) (bool, error) {
	return run(f.fake, func() bool {
		if _, ok := f.values[key]; ok {
			return false
		}
		f.values[key] = v
		return true
	})
}

func (f fakeRegisters) Clear(_ context.Context, key string) error {
	_, err := run(f.fake, func() bool { delete(f.values, key); return true })
	return err
}

type fakeCounters struct{ *fake }

func (f fakeCounters) Add(_ context.Context, key string, delta int64) error {
	_, err := run(f.fake, func() bool {
		f.sums[key] += delta
		if f.bad("an add is applied twice") {
			f.sums[key] += delta
		}
		return true
	})
	return err
}

func (f fakeCounters) Sum(_ context.Context, key string) (int64, bool, error) {
	r, err := run(f.fake, func() (r found) { r.v, r.ok = f.sums[key]; return r })
	return r.result(err)
}

type fakeLists struct{ *fake }

func (f fakeLists) Append(_ context.Context, parts []history.Part) error {
	_, err := run(f.fake, func() bool {
		some := parts
		if len(parts) > 1 && f.bad("half of an append is lost") {
			some = parts[:1]
		}
		for _, p := range some {
			f.old[p.Key] = f.lists[p.Key]
			f.lists[p.Key] = append(slices.Clone(f.lists[p.Key]), p.Arg...)
		}
		return true
	})
	return err
}

func (f fakeLists) Read(_ context.Context, key string) ([]int64, error) {
	return run(f.fake, func() []int64 {
		if f.bad("a read is stale") {
			return f.old[key]
		}
		return f.lists[key]
	})
}

type fakeMaps struct{ *fake }

func (f fakeMaps) change(key string, do func(m map[int64]int64)) error {
	_, err := run(f.fake, func() bool {
		if f.maps[key] == nil {
			f.maps[key] = map[int64]int64{}
		}
		do(f.maps[key])
		return true
	})
	return err
}

func (f fakeMaps) Put(_ context.Context, key string, userKey, v int64) error {
	return f.change(key, func(m map[int64]int64) { m[userKey] = v })
}

func (f fakeMaps) Remove(_ context.Context, key string, userKey int64) error {
	return f.change(key, func(m map[int64]int64) { delete(m, userKey) })
}

func (f fakeMaps) Get(_ context.Context, key string, userKey int64) (int64, bool, error) {
	r, err := run(f.fake, func() (r found) { r.v, r.ok = f.maps[key][userKey]; return r })
	return r.result(err)
}

func (f fakeMaps) Scan(_ context.Context, key string) ([]int64, error) {
	return run(f.fake, func() (out []int64) {
		skip := f.bad("a scan misses an entry")
		for k, v := range f.maps[key] {
			if skip {
				skip = false
				continue
			}
			out = append(out, k, v)
		}
		return out
	})
}

type fakeBanks struct{ *fake }

func (f fakeBanks) Open(_ context.Context, key string, accounts, balance int64) error {
	_, err := run(f.fake, func() bool {
		f.lists[key] = append([]int64{0}, slices.Repeat([]int64{balance}, int(accounts))...)
		return true
	})
	return err
}

func (f fakeBanks) Transfer(_ context.Context, key string, id, from, to, amount int64) error {
	done, err := run(f.fake, func() bool {
		b := slices.Clone(f.lists[key])
		if b[1+from] < amount {
			return false
		}
		b[0] = id
		b[1+from] -= amount
		if !f.bad("half of a transfer is lost") {
			b[1+to] += amount
		}
		f.lists[key] = b
		return true
	})
	if err == nil && !done {
		return keel.NewError(keel.ErrPrecondition, keel.OutcomeNotApplied, "", "")
	}
	return err
}

func (f fakeBanks) Read(_ context.Context, key string) ([]int64, error) {
	return run(f.fake, func() []int64 { return f.lists[key] })
}

type fakeSessions struct{ *fake }

// Append takes effect at once, so that the order is that of the starts; only
// the answer is waited for.
func (f fakeSessions) Append(_ context.Context, key string, session, n int64) func() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	apply := func() { f.lists[key] = append(slices.Clone(f.lists[key]), session, n) }
	if f.lossy > 0 {
		switch f.rng.IntN(f.lossy) {
		case 0:
			return func() error { return errRefused }
		case 1:
			if f.rng.IntN(2) == 0 {
				apply()
			}
			return func() error { return errTimeout }
		}
	}
	if apply(); f.bad("a retry is applied again") {
		apply()
	}
	d := time.Duration(f.rng.Int64N(int64(f.delay)))
	return func() error {
		<-time.After(d)
		return nil
	}
}

func (f fakeSessions) Read(_ context.Context, key string) ([]int64, error) {
	return run(f.fake, func() []int64 { return f.lists[key] })
}

// fakeBatches are two requests, as if there were two shards.
type fakeBatches struct{ *fake }

func (f fakeBatches) Write(_ context.Context, changes []Change) []error {
	errs := make([]error, len(changes))
	for shard := range 2 {
		_, err := run(f.fake, func() bool {
			for i, c := range changes {
				if int(c.Key[len(c.Key)-1])%2 == shard && !f.bad("a change of a batch is lost") {
					f.change(c)
					if i > 0 && f.bad("a change of a batch is applied twice") {
						f.change(c)
					}
				}
			}
			return true
		})
		for i, c := range changes {
			if int(c.Key[len(c.Key)-1])%2 == shard {
				errs[i] = err
			}
		}
	}
	return errs
}

func (f fakeBatches) change(c Change) {
	switch {
	case c.State == StateRegister:
		f.values[c.Key] = c.Value
	case c.State == StateCounter:
		f.sums[c.Key] += c.Value
	case c.State == StateList:
		f.old[c.Key] = f.lists[c.Key]
		f.lists[c.Key] = append(slices.Clone(f.lists[c.Key]), c.Elements...)
	case c.Remove:
		delete(f.maps[c.Key], c.UserKey)
	default:
		if f.maps[c.Key] == nil {
			f.maps[c.Key] = map[int64]int64{}
		}
		f.maps[c.Key][c.UserKey] = c.Value
	}
}

func (f fakeBatches) Read(_ context.Context, queries []Query) []Answer {
	answers, err := run(f.fake, func() []Answer {
		out := make([]Answer, len(queries))
		for i, q := range queries {
			a := &out[i]
			switch q.State {
			case StateRegister:
				a.Value, a.Found = f.values[q.Key]
			case StateCounter:
				a.Value, a.Found = f.sums[q.Key]
			default:
				a.Value, a.Found = f.maps[q.Key][q.UserKey]
			}
			if i > 0 && f.bad("answers of a batch are mixed up") {
				out[i-1].Value, a.Value = a.Value, out[i-1].Value
			}
		}
		return out
	})
	if err != nil {
		answers = make([]Answer, len(queries))
		for i := range answers {
			answers[i].Err = err
		}
	}
	return answers
}
