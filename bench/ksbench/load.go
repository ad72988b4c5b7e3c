package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"
)

// target is a way to reach the cluster. Its methods may be called by any number
// of clients at once.
type target interface {
	// write puts one value, durably.
	write(ctx context.Context, key string) error
	// batch puts values under keys of any shards.
	batch(ctx context.Context, keys []string) error
	// atomic puts values under keys that share a shard, as a whole.
	atomic(ctx context.Context, keys []string) error
	// read reads one value, linearizably; errMissing if it is not there.
	read(ctx context.Context, key string) error
	// multiget reads many values, linearizably.
	multiget(ctx context.Context, keys []string) error
	// shardOf says which shard a key belongs to.
	shardOf(key string) (uint64, error)
	shards() []uint64
	close() error
}

var errMissing = errors.New("a key that was written is missing")

// loadOptions describe a series of measurements.
type loadOptions struct {
	common
	modes, works, clients, pids string
	seconds, warmup             time.Duration
	maxOps                      int64
	keys, per, valueBytes       int
}

// result is one measurement.
type result struct {
	Mode    string  `json:"mode"` // client or grpc
	Work    string  `json:"work"`
	Clients int     `json:"clients"`
	Per     int     `json:"keys_per_call"`
	Shards  int     `json:"shards"`
	Seconds float64 `json:"seconds"`
	Calls   int64   `json:"calls"`
	Errors  int64   `json:"errors"`
	// CallsPerSecond and KeysPerSecond differ by Per.
	CallsPerSecond float64 `json:"calls_per_s"`
	KeysPerSecond  float64 `json:"keys_per_s"`
	// NodeCPUus and ClientCPUus are the processor time per call, of all nodes
	// given by --pids and of this process: they depend less than the rest on what
	// else runs on the machine. 0 is not measured.
	NodeCPUus   float64 `json:"node_cpu_us_per_call"`
	ClientCPUus float64 `json:"client_cpu_us_per_call"`
	P50us       int64   `json:"p50_us"`
	P99us       int64   `json:"p99_us"`
	MaxUs       int64   `json:"max_us"`
	FirstError  string  `json:"first_error,omitempty"`
}

func loadCommand() *cobra.Command {
	o := &loadOptions{}
	cmd := &cobra.Command{Use: "load", Short: "Measure operations per second and latencies", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) }}
	o.register(cmd)
	f := cmd.Flags()
	f.StringVar(&o.modes, "modes", "client,grpc", "client (streams, sessions) and grpc (unary calls, no session)")
	f.StringVar(&o.works, "works", "write,batch,atomic,read,multiget", "what the calls do")
	f.StringVar(&o.clients, "clients", "1,64,256", "numbers of clients")
	f.StringVar(&o.pids, "pids", "", "node=pid of the nodes on this machine, separated by commas: gives their processor time")
	f.DurationVar(&o.seconds, "time", 5*time.Second, "how long each measurement takes")
	f.DurationVar(&o.warmup, "warmup", time.Second, "how long each runs before it counts")
	f.Int64Var(&o.maxOps, "max-calls", 5_000_000, "a measurement ends early after so many calls")
	f.IntVar(&o.keys, "keys", 100_000, "number of keys that calls choose from")
	f.IntVar(&o.per, "per", 100, "keys of a batch or multi-get")
	f.IntVar(&o.valueBytes, "value-bytes", 100, "size of a value")
	return cmd
}

func (o *loadOptions) run(ctx context.Context) error {
	clients, err := numbers(o.clients)
	if err != nil {
		return err
	}
	if o.keys < 1 || o.per < 1 || o.valueBytes < 0 || o.seconds <= 0 || o.warmup < 0 || o.maxOps < 1 {
		return fmt.Errorf("keys, per, time and max-calls must be positive, value-bytes and warmup not negative")
	}
	fmt.Printf("%-7s %-9s %8s %12s %12s %10s %10s %10s %9s %9s %7s %6s\n", "mode", "work", "clients", "calls/s", "keys/s", "p50 us",
		"p99 us", "max us", "node cpu", "own cpu", "errors", "load")
	for _, mode := range strings.Split(o.modes, ",") {
		t, err := o.target(ctx, mode)
		if err != nil {
			return err
		}
		err = o.measureAll(ctx, t, mode, clients)
		if e := t.close(); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *loadOptions) target(ctx context.Context, mode string) (target, error) {
	switch mode {
	case "client":
		return newClientTarget(ctx, &o.common, o.valueBytes)
	case "grpc":
		return newUnaryTarget(ctx, &o.common, o.valueBytes)
	}
	return nil, fmt.Errorf("mode %q is not client or grpc", mode)
}

func (o *loadOptions) measureAll(ctx context.Context, t target, mode string, clients []int) error {
	g, err := newKeyring(t, o.keys)
	if err != nil {
		return err
	}
	prepared := false
	for _, work := range strings.Split(o.works, ",") {
		if (work == "read" || work == "multiget") && !prepared {
			if err := prepare(ctx, t, g); err != nil {
				return err
			}
			prepared = true
		}
		for _, n := range clients {
			load := loadAverage()
			r, err := o.measure(ctx, t, g, work, n)
			if err != nil {
				return err
			}
			r.Mode = mode
			fmt.Printf("%-7s %-9s %8d %12.0f %12.0f %10d %10d %10d %9.0f %9.0f %7d %6s\n", r.Mode, r.Work, r.Clients, r.CallsPerSecond,
				r.KeysPerSecond, r.P50us, r.P99us, r.MaxUs, r.NodeCPUus, r.ClientCPUus, r.Errors, load)
			if r.FirstError != "" {
				fmt.Printf("        first error: %s\n", r.FirstError)
			}
			if err := o.save(record{What: "load", At: time.Now().UTC(), LoadAvg: load, Load: r}); err != nil {
				return err
			}
			if r.Calls == 0 {
				return fmt.Errorf("no call of %s succeeded: %s", work, r.FirstError)
			}
		}
	}
	return nil
}

// keyring gives keys, as such and by shard.
type keyring struct {
	all     []string
	byShard [][]string
}

func newKeyring(t target, n int) (*keyring, error) {
	g := &keyring{all: make([]string, n)}
	of := make(map[uint64]int)
	for _, id := range t.shards() {
		of[id] = len(g.byShard)
		g.byShard = append(g.byShard, nil)
	}
	for i := range g.all {
		g.all[i] = "key-" + strconv.Itoa(i)
		id, err := t.shardOf(g.all[i])
		if err != nil {
			return nil, err
		}
		at, known := of[id]
		if !known {
			return nil, fmt.Errorf("%s belongs to shard %d, which is not in the topology", g.all[i], id)
		}
		g.byShard[at] = append(g.byShard[at], g.all[i])
	}
	for i, keys := range g.byShard {
		if len(keys) == 0 {
			return nil, fmt.Errorf("no key for shard %d among %d; use more", t.shards()[i], n)
		}
	}
	return g, nil
}

// some fills buf with random keys of the list.
func some(r *rand.Rand, list, buf []string) []string {
	for i := range buf {
		buf[i] = list[r.IntN(len(list))]
	}
	return buf
}

// prepare writes every key once, so that reads find them.
func prepare(ctx context.Context, t target, g *keyring) error {
	const per, writers = 500, 4
	errs := make(chan error, writers)
	var next atomic.Int64
	for range writers {
		go func() {
			for {
				lo := int(next.Add(per)) - per
				if lo >= len(g.all) {
					errs <- nil
					return
				}
				if err := t.batch(ctx, g.all[lo:min(lo+per, len(g.all))]); err != nil {
					errs <- fmt.Errorf("writing the keys to read: %w", err)
					return
				}
			}
		}()
	}
	var first error
	for range writers {
		if err := <-errs; first == nil {
			first = err
		}
	}
	return first
}

// call makes the function that a client repeats.
func (o *loadOptions) call(t target, g *keyring, work string, r *rand.Rand) (func(context.Context) error, int, error) {
	buf := make([]string, o.per)
	switch work {
	case "write":
		return func(ctx context.Context) error { return t.write(ctx, g.all[r.IntN(len(g.all))]) }, 1, nil
	case "read":
		return func(ctx context.Context) error { return t.read(ctx, g.all[r.IntN(len(g.all))]) }, 1, nil
	case "batch":
		return func(ctx context.Context) error { return t.batch(ctx, some(r, g.all, buf)) }, o.per, nil
	case "atomic":
		return func(ctx context.Context) error {
			return t.atomic(ctx, some(r, g.byShard[r.IntN(len(g.byShard))], buf))
		}, o.per, nil
	case "multiget":
		return func(ctx context.Context) error { return t.multiget(ctx, some(r, g.all, buf)) }, o.per, nil
	}
	return nil, 0, fmt.Errorf("work %q is not write, batch, atomic, read or multiget", work)
}

// tally is what one client found.
type tally struct {
	latency *hdrhistogram.Histogram // in microseconds
	errors  int64
	first   error
}

const maxLatency = 60 * time.Second

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, maxLatency.Microseconds(), 3)
}

// measure runs one measurement (KB1 to KB3).
func (o *loadOptions) measure(ctx context.Context, t target, g *keyring, work string, clients int) (*result, error) {
	begin := time.Now().Add(o.warmup)
	end := begin.Add(o.seconds)
	// A call may outlast the end, but not for ever.
	ctx, cancel := context.WithDeadline(ctx, end.Add(maxLatency))
	defer cancel()
	pids, err := o.nodes()
	if err != nil {
		return nil, err
	}
	var left atomic.Int64
	left.Store(o.maxOps)
	watching, stop := context.WithCancel(ctx)
	defer stop()
	used := watchCPU(watching, pids, begin, end)
	tallies := make([]tally, clients)
	last := make([]time.Time, clients)
	per := 1
	var wg sync.WaitGroup
	for i := range tallies {
		call, n, err := o.call(t, g, work, rand.New(rand.NewPCG(uint64(i), uint64(clients))))
		if err != nil {
			return nil, err
		}
		per = n
		wg.Go(func() { last[i] = repeat(ctx, call, &tallies[i], &left, begin, end) })
	}
	wg.Wait()
	r := &result{Work: work, Clients: clients, Per: per, Shards: len(t.shards())}
	sum := newHistogram()
	until := begin
	for i := range tallies {
		sum.Merge(tallies[i].latency)
		r.Errors += tallies[i].errors
		if err := tallies[i].first; err != nil && r.FirstError == "" {
			r.FirstError = err.Error()
		}
		if last[i].After(until) {
			until = last[i]
		}
	}
	if left.Load() > 0 {
		until = end
	}
	r.Seconds = until.Sub(begin).Seconds()
	r.Calls = sum.TotalCount()
	if r.Seconds > 0 {
		r.CallsPerSecond = float64(r.Calls) / r.Seconds
		r.KeysPerSecond = r.CallsPerSecond * float64(per)
	}
	if left.Load() <= 0 {
		stop() // what was used until the end is not for these calls alone
	}
	if nodes, own := used(); r.Calls > 0 {
		r.NodeCPUus = float64(nodes.Microseconds()) / float64(r.Calls)
		r.ClientCPUus = float64(own.Microseconds()) / float64(r.Calls)
	}
	r.P50us, r.P99us, r.MaxUs = sum.ValueAtQuantile(50), sum.ValueAtQuantile(99), sum.Max()
	return r, ctx.Err()
}

// repeat calls until the end and returns when the last call that counted ended.
func repeat(ctx context.Context, call func(context.Context) error, t *tally, left *atomic.Int64, begin, end time.Time) time.Time {
	t.latency = newHistogram()
	last := begin
	for {
		start := time.Now()
		if !start.Before(end) || ctx.Err() != nil || left.Add(-1) < 0 {
			return last
		}
		err := call(ctx)
		now := time.Now()
		switch {
		case start.Before(begin) || now.After(end):
		case err != nil:
			t.errors++
			if t.first == nil {
				t.first = err
			}
		default:
			last = now
			// Longer ones than the histogram can hold end with an error.
			if t.latency.RecordValue(max(now.Sub(start).Microseconds(), 1)) != nil {
				t.errors++
			}
		}
	}
}

// nodes are the processes whose processor time is wanted.
func (o *loadOptions) nodes() ([]int, error) {
	if o.pids == "" {
		return nil, nil
	}
	byNode, err := parsePids(o.pids)
	return slices.Collect(maps.Values(byNode)), err
}

func numbers(list string) ([]int, error) {
	var out []int
	for _, s := range strings.Split(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is not a list of positive numbers", list)
		}
		out = append(out, n)
	}
	return out, nil
}
