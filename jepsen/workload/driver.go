package workload

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/history"
)

// Config is what all workloads have in common. The zero value has the defaults.
type Config struct {
	// Prefix of all keys, so that runs on one cluster do not meet; "run" if
	// empty.
	Prefix string
	// Seed of what is chosen. A run is not replayed by it, only its choices.
	Seed uint64
	// Keys is how many keys are in use at a time; 0 is 16.
	Keys int
	// OpsPerKey is how many operations a key gets before another takes its
	// place (JW3); 0 is 400.
	OpsPerKey int
	// Rate bounds the operations a second of all workers; 0 is 1000.
	Rate float64
	// Timeout is the limit of one operation; 0 is 2 s.
	Timeout time.Duration
	// Batch is how many operations a worker sends in one call at most, where a
	// client has Batches; 0 and 1 are for none. Two workers of three use them, for
	// every second call while calls are answered; after one that was not, single
	// operations follow, so that few are unknown (JW6).
	Batch int
	// Served, if not nil, is set to the recorder's time whenever an operation
	// succeeds. Wrote, if not nil, is when the newest of those that change something
	// began that have succeeded.
	Served, Wrote *atomic.Int64
}

func (c Config) withDefaults() Config {
	if c.Prefix == "" {
		c.Prefix = "run"
	}
	if c.Keys <= 0 {
		c.Keys = 16
	}
	if c.OpsPerKey <= 0 {
		c.OpsPerKey = 400
	}
	if c.Rate <= 0 {
		c.Rate = 1000
	}
	if c.Timeout <= 0 {
		c.Timeout = 2 * time.Second
	}
	return c
}

// Workload is one kind of use.
type Workload interface {
	// Name is also the checker's.
	Name() string
	// Setup prepares what must be there; once, before Run.
	Setup(ctx context.Context, clients []Client, rec *history.Recorder) error
	// Run is one worker's work until ctx ends. It waits for what it has begun.
	Run(ctx context.Context, worker int)
	// Final reads every key that was used, after all is healed and every Run
	// has returned. It tries until ctx ends; an error says what nobody could
	// read.
	Final(ctx context.Context) error
}

// All returns one workload of each kind.
func All(c Config) []Workload {
	return []Workload{NewRegister(c), NewCounter(c), NewList(c), NewMap(c), NewBank(c), NewSession(c)}
}

// New returns the workload of a name, false if there is none.
func New(name string, c Config) (Workload, bool) {
	for _, w := range All(c) {
		if w.Name() == name {
			return w, true
		}
	}
	return nil, false
}

// Drive runs workloads with workers each until ctx ends, and returns when all
// workers have ended. Setup comes before, Final after.
func Drive(ctx context.Context, ws []Workload, workers int) {
	var all sync.WaitGroup
	for _, w := range ws {
		for n := range workers {
			all.Add(1)
			go func() {
				defer all.Done()
				w.Run(ctx, n)
			}()
		}
	}
	all.Wait()
}

// driver is the common part of the workloads.
type driver struct {
	name    string
	cfg     Config
	clients []Client
	rec     *history.Recorder
	values  atomic.Int64 // the last unique value (JW3)
	pace    pacer        // of what is not below
	// together and alone share the rate where there are batches: of what is not
	// sent in one, compare-and-set and the like, hardly anything would be left.
	together, alone pacer
	keys            keyring
}

func newDriver(name string, c Config) driver {
	c = c.withDefaults()
	return driver{name: name, cfg: c, keys: keyring{prefix: c.Prefix + "-" + name, slots: make([]slot, c.Keys), limit: c.OpsPerKey}}
}

// Name is the workload's name.
func (d *driver) Name() string { return d.name }

// Setup notes the clients; a workload with more to prepare has its own.
func (d *driver) Setup(_ context.Context, clients []Client, rec *history.Recorder) error {
	if len(clients) == 0 {
		return fmt.Errorf("setting up workload %s: there is no client: %w", d.name, keel.ErrInvalid)
	}
	d.clients, d.rec = clients, rec
	d.pace.interval = time.Duration(float64(time.Second) / d.cfg.Rate)
	d.alone.interval = aloneShare * d.pace.interval
	d.together.interval = d.pace.interval * aloneShare / (aloneShare - 1)
	return nil
}

func (d *driver) unique() int64 { return d.values.Add(1) }

// worker is a logical client.
type worker struct {
	*driver
	client  Client
	process int64
	rng     *rand.Rand
	// processes are those of the operations of a batch.
	processes []int64
	// answered says that the last call succeeded.
	answered bool
}

func (d *driver) worker(n int) *worker {
	return &worker{
		driver: d, client: d.clients[n%len(d.clients)], process: d.rec.NewProcess(),
		rng: rand.New(rand.NewPCG(d.cfg.Seed, uint64(n)<<32|uint64(len(d.name)))),
	}
}

// loop calls one, or all with the size of a batch, at the rate until ctx ends.
// Where all is nil there are no batches.
func (d *driver) loop(ctx context.Context, n int, one func(w *worker), all func(w *worker, size int)) {
	w := d.worker(n)
	if all == nil || d.cfg.Batch < 2 || w.client.Batches == nil {
		for d.pace.wait(ctx, 1) {
			one(w)
		}
		return
	}
	for ctx.Err() == nil {
		if n%3 == 2 || !w.answered || w.rng.IntN(2) == 0 {
			if d.alone.wait(ctx, 1) {
				one(w)
			}
			continue
		}
		size := 2 + w.rng.IntN(d.cfg.Batch-1)
		if d.together.wait(ctx, size) {
			all(w, size)
		}
	}
}

// One operation of aloneShare is not sent in a batch, as far as the rate allows.
const aloneShare = 5

// do runs one operation and records it; write says that it has effects. It
// returns its outcome.
func (w *worker) do(ctx context.Context, op history.Op, write bool, f func(ctx context.Context) ([]int64, error)) history.Outcome {
	op.Process, op.Workload = w.process, w.name
	// JW4: the end of the run does not make the last operations unknown.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.cfg.Timeout)
	defer cancel()
	began, call := w.rec.Now(), w.rec.Invoke(op)
	result, err := f(ctx)
	done := DoneOf(result, err, write)
	w.rec.Complete(call, done)
	w.answered = done.Outcome == history.OK
	w.served(done, write, began)
	if done.Outcome == history.Unknown {
		w.process = w.rec.NewProcess() // JW2
	}
	return done.Outcome
}

// served notes that somebody is served, if so, by an operation that began then.
func (d *driver) served(done history.Done, write bool, began int64) {
	if done.Outcome != history.OK {
		return
	}
	if d.cfg.Served != nil {
		d.cfg.Served.Store(d.rec.Now())
	}
	if d.cfg.Wrote != nil && write {
		for last := d.cfg.Wrote.Load(); last < began && !d.cfg.Wrote.CompareAndSwap(last, began); {
			last = d.cfg.Wrote.Load()
		}
	}
}

// DoneOf says what is known of an operation that returned err (JW1).
func DoneOf(result []int64, err error, write bool) history.Done {
	if err == nil {
		return history.Done{Outcome: history.OK, Result: result}
	}
	d := history.Done{Outcome: history.Unknown, Code: "other"}
	var e *keel.Error
	if errors.As(err, &e) {
		d.Code, d.Shard = string(e.Code), e.Shard
		if e.Outcome == keel.OutcomeNotApplied {
			d.Outcome = history.Fail
		}
		// Applied, and the answer is lost: where there is none to judge that
		// is success, else it is as good as unknown.
		if e.Outcome == keel.OutcomeApplied && write && result == nil {
			d.Outcome = history.OK
		}
	}
	if !write {
		d.Outcome = history.Fail
	}
	return d
}

// finally reads each key until it succeeds (JW5), with some workers.
func (d *driver) finally(ctx context.Context, names []string, read func(ctx context.Context, w *worker, key string) history.Outcome) error {
	keys := make(chan string)
	var missed atomic.Int64
	var all sync.WaitGroup
	for n := range 8 {
		all.Add(1)
		go func() {
			defer all.Done()
			w := d.worker(n)
			for key := range keys {
				if !w.insist(ctx, key, read) {
					missed.Add(1)
				}
			}
		}()
	}
	for _, key := range names {
		keys <- key
	}
	close(keys)
	all.Wait()
	if n := missed.Load(); n > 0 {
		return fmt.Errorf("reading what workload %s left: %d keys could not be read: %w", d.name, n, keel.ErrUnavailable)
	}
	return nil
}

// finalPause is between two tries of a final read.
const finalPause = 100 * time.Millisecond

func (w *worker) insist(ctx context.Context, key string, read func(ctx context.Context, w *worker, key string) history.Outcome) bool {
	for ctx.Err() == nil {
		if read(ctx, w, key) == history.OK {
			return true
		}
		select {
		case <-ctx.Done():
		case <-time.After(finalPause):
		}
	}
	return false
}

// pacer hands out moments at a rate.
type pacer struct {
	interval time.Duration

	mu   sync.Mutex
	next time.Time
}

// wait waits for the next moment and takes n of them, false if ctx ends first.
// Moments that nobody took are not made up for.
func (p *pacer) wait(ctx context.Context, n int) bool {
	p.mu.Lock()
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	at := p.next
	p.next = p.next.Add(time.Duration(n) * p.interval)
	p.mu.Unlock()
	if at.After(now) {
		timer := time.NewTimer(at.Sub(now))
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
		}
	}
	return ctx.Err() == nil
}

// keyring hands out keys: a number of slots, each with a key that gives way to
// a new one after limit operations (JW3).
type keyring struct {
	prefix string
	limit  int

	mu    sync.Mutex
	slots []slot
	all   []string
}

type slot struct {
	key  string
	left int
	gen  int
}

// take counts an operation on the key of a slot and returns it; fresh says that
// it is the key's first.
func (k *keyring) take(n int) (key string, fresh bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := &k.slots[n]
	if s.left == 0 {
		s.key, s.left = fmt.Sprintf("%s-%d-%d", k.prefix, n, s.gen), k.limit
		s.gen++
		k.all = append(k.all, s.key)
		fresh = true
	}
	s.left--
	return s.key, fresh
}

// drop gives up the key of a slot.
func (k *keyring) drop(n int, key string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.slots[n].key == key {
		k.slots[n].left = 0
	}
}

func (k *keyring) used() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]string(nil), k.all...)
}
