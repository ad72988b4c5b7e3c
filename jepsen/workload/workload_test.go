package workload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// drive runs workloads for a while and returns the history, read again from
// its file.
func drive(t *testing.T, ws []Workload, clients []Client, workers int, d time.Duration, while func()) *history.History {
	t.Helper()
	var file bytes.Buffer
	rec, err := history.NewRecorder(&file, history.Header{Seed: 1}, history.Options{Forget: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range ws {
		if err := w.Setup(t.Context(), clients, rec); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		Drive(ctx, ws, workers)
	}()
	while()
	<-done
	ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, w := range ws {
		if err := w.Final(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	h, err := history.Read(&file, history.ReadOptions{})
	if err != nil || !h.Complete {
		t.Fatalf("complete %v: %v", h != nil && h.Complete, err)
	}
	return h
}

// simulate is drive in simulated time, where as much is done in a while on a busy
// machine as on an idle one. The history is for checkers outside, whose limits are
// of real time.
func simulate(t *testing.T, ws []Workload, clients []Client, workers int, d time.Duration) (h *history.History) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { h = drive(t, ws, clients, workers, d, func() {}) })
	return h
}

func judge(t *testing.T, h *history.History, want check.Verdict) {
	t.Helper()
	for _, res := range check.Judge(h, check.Options{Limit: 30 * time.Second}) {
		if res.Verdict != want {
			t.Errorf("%s: %v, want %v: %s", res.Name, res.Verdict, want, res.Text)
		}
	}
}

func fakeClients(f *fake) []Client { return []Client{f.client(), f.client()} }

// All workloads over an honest cluster that loses requests and answers pass.
func TestHonestCluster(t *testing.T) {
	for _, batch := range []int{0, 12} {
		t.Run(fmt.Sprintf("batches of %d", batch), func(t *testing.T) { testHonest(t, batch) })
	}
}

func testHonest(t *testing.T, batch int) {
	f := newFake(1, 20, "")
	f.delay = time.Millisecond // as long as workers wait for their turn: many calls at once
	var served atomic.Int64
	ws := All(Config{Keys: 5, OpsPerKey: 150, Rate: 3000, Batch: batch, Served: &served})
	h := simulate(t, ws, fakeClients(f), 4, 1500*time.Millisecond)
	judge(t, h, check.Pass)
	if at := time.Duration(served.Load()); at < time.Second {
		t.Errorf("nobody was served after %s", at)
	}
	count := map[string][3]int{}
	for _, op := range h.Ops {
		c := count[op.Workload]
		c[op.Outcome]++
		count[op.Workload] = c
	}
	if len(count) != len(ws) {
		t.Errorf("workloads in the history: %v", count)
	}
	for w, c := range count {
		if c[history.Unknown] == 0 || c[history.OK] < 100 || c[history.Fail] == 0 {
			t.Errorf("%s: %d unknown, %d ok, %d failed", w, c[history.Unknown], c[history.OK], c[history.Fail])
		}
	}
}

// Each defect is caught by the workload that is there for it.
func TestDefects(t *testing.T) {
	for fault, name := range map[string]string{
		"a write is lost":            "register",
		"a comparison is skipped":    "register",
		"an add is applied twice":    "counter",
		"half of an append is lost":  "list",
		"a read is stale":            "list",
		"a scan misses an entry":     "map",
		"half of a transfer is lost": "bank",
		"a retry is applied again":   "session",
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			// What a defect did may be written over before anybody reads it.
			shown := 0
			for range 20 {
				f := newFake(2, 30, fault)
				w, ok := New(name, Config{Keys: 2, Rate: 2000})
				if !ok {
					t.Fatal("no such workload")
				}
				h := simulate(t, []Workload{w}, fakeClients(f), 4, 700*time.Millisecond)
				shown += f.hits
				results := check.Judge(h, check.Options{Limit: 30 * time.Second})
				if len(results) == 1 && results[0].Verdict == check.Fail {
					return
				}
			}
			t.Fatalf("nothing was found; the defect showed %d times", shown)
		})
	}
}

// JW6: what is sent together is judged apart.
func TestDefectsOfBatches(t *testing.T) {
	for _, c := range []struct{ fault, name string }{
		{"a change of a batch is lost", "register"},
		{"a change of a batch is lost", "counter"},
		{"a change of a batch is lost", "list"},
		{"a change of a batch is lost", "map"},
		{"a change of a batch is applied twice", "counter"},
		{"a change of a batch is applied twice", "list"},
		{"answers of a batch are mixed up", "register"},
		{"answers of a batch are mixed up", "counter"},
		{"answers of a batch are mixed up", "map"},
	} {
		t.Run(c.name+", "+c.fault, func(t *testing.T) {
			t.Parallel()
			// What a write lost may be written over before anybody reads it.
			for range 20 {
				f := newFake(2, 30, c.fault)
				w, _ := New(c.name, Config{Keys: 6, Rate: 3000, Batch: 8})
				h := simulate(t, []Workload{w}, fakeClients(f), 4, 700*time.Millisecond)
				results := check.Judge(h, check.Options{Limit: 30 * time.Second})
				if f.hits > 0 && !slices.ContainsFunc(results, func(r check.Result) bool { return r.Verdict != check.Fail }) {
					return
				}
			}
			t.Fatal("nothing showed the defect")
		})
	}
}

// JW6: nothing is sent together while nothing is answered.
func TestNoBatchesWithoutAnswers(t *testing.T) { synctest.Test(t, testNoBatchesWithoutAnswers) }

func testNoBatchesWithoutAnswers(t *testing.T) {
	w := NewCounter(Config{Keys: 4, Rate: 2000, Batch: 8})
	rec, err := history.NewRecorder(nil, history.Header{}, history.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Setup(t.Context(), []Client{{Counters: deadCounters{}, Batches: noBatches{t}}}, rec); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	Drive(ctx, []Workload{w}, 2)
	if n := rec.Count(); n < 20 {
		t.Errorf("%d operations", n)
	}
}

// deadCounters answer nothing.
type deadCounters struct{}

func (deadCounters) Add(context.Context, string, int64) error { return errTimeout }

func (deadCounters) Sum(context.Context, string) (int64, bool, error) { return 0, false, errRefused }

type noBatches struct{ t *testing.T }

func (n noBatches) Write(_ context.Context, c []Change) []error {
	n.t.Error("a batch of writes")
	return make([]error, len(c))
}

func (n noBatches) Read(_ context.Context, q []Query) []Answer {
	n.t.Error("a batch of reads")
	return make([]Answer, len(q))
}

// JW1.
func TestDoneOf(t *testing.T) {
	keelError := func(o keel.Outcome) error {
		return fmt.Errorf("wrapped: %w", keel.NewError(keel.ErrUnavailable, o, "", ""))
	}
	one := []int64{1}
	cases := map[string]struct {
		result []int64
		err    error
		write  bool
		want   history.Outcome
	}{
		"ok":                       {one, nil, false, history.OK},
		"write, not applied":       {nil, keelError(keel.OutcomeNotApplied), true, history.Fail},
		"write, unknown":           {nil, keelError(keel.OutcomeUnknown), true, history.Unknown},
		"write, applied":           {nil, keelError(keel.OutcomeApplied), true, history.OK},
		"compare and set, applied": {one, keelError(keel.OutcomeApplied), true, history.Unknown},
		"write, another error":     {nil, errors.New("what"), true, history.Unknown},
		"write, deadline":          {nil, context.DeadlineExceeded, true, history.Unknown},
		"read, unknown":            {one, keelError(keel.OutcomeUnknown), false, history.Fail},
		"read, another error":      {one, errors.New("what"), false, history.Fail},
	}
	for name, c := range cases {
		d := DoneOf(c.result, c.err, c.write)
		if d.Outcome != c.want || (c.err != nil && (d.Result != nil || d.Code == "")) {
			t.Errorf("%s: %+v, want %v", name, d, c.want)
		}
	}
}

// JW3, JW4: the rate holds whatever the errors, and keys give way.
func TestRateAndKeys(t *testing.T) { synctest.Test(t, testRateAndKeys) }

func testRateAndKeys(t *testing.T) {
	f := newFake(3, 2, "") // everything fails or is unknown
	f.delay = time.Nanosecond
	w := NewRegister(Config{Keys: 2, OpsPerKey: 10, Rate: 200})
	rec, err := history.NewRecorder(nil, history.Header{}, history.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Setup(t.Context(), fakeClients(f), rec); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	Drive(ctx, []Workload{w}, 8)
	if n := rec.Count(); n < 95 || n > 105 {
		t.Errorf("%d operations in half a second at 200/s", n)
	}
	per := map[string]int{}
	for _, op := range rec.History().Ops {
		per[op.Key]++
	}
	for key, n := range per {
		if n > 10 {
			t.Errorf("key %s has %d operations", key, n)
		}
	}
	// JW5: what nobody can read is told.
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := w.Final(ctx); !errors.Is(err, keel.ErrUnavailable) {
		t.Errorf("Final: %v", err)
	}
	if err := (NewRegister(Config{})).Setup(t.Context(), nil, rec); !errors.Is(err, keel.ErrInvalid) {
		t.Errorf("Setup without clients: %v", err)
	}
	if _, ok := New("nothing", Config{}); ok {
		t.Error("a workload called nothing")
	}
}
