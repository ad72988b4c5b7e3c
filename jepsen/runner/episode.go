//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/report"
	"github.com/keelstate/keelstate/jepsen/workload"
)

// Limits of the parts of an episode.
const (
	// setupLimit is how long a healthy cluster may take to be ready for clients.
	setupLimit = time.Minute
	// lookLimit is how long a healed cluster is looked at; more than the limit
	// that is judged, so that a report can say how late it was.
	lookLimit = 2 * time.Minute
	// finalLimit is how long the final reads may take, after that.
	finalLimit = time.Minute
	// breathAfter and breathFor: see breathe.
	breathAfter = 6 * time.Second
	breathFor   = 12 * time.Second
	// farewellLimit is how long a client may take to end its session.
	farewellLimit = 5 * time.Second
)

// episode is one episode in progress.
type episode struct {
	*run
	*report.Episode
	style     style
	clients   []*keel.Client
	stores    []workload.Client // of the clients
	workloads []workload.Workload
	rec       *history.Recorder
	file      *os.File
	// served is when an operation succeeded last, in the time of the run, wrote when
	// one did that changes something.
	served, wrote atomic.Int64
	// watch and restored are nil without checkpoints, rolledBack without rollbacks.
	watch      *storeWatch
	restored   *restored
	rolledBack *rolledBack
	// outdated is what a client had before the checkpoint; nil without checkpoints.
	outdated *outdated
	// finalNs is when the final reads began.
	finalNs int64
}

// episode runs one; with an error the harness failed, or ctx ended.
func (r *run) episode(ctx context.Context, n int) (*report.Episode, error) {
	e := &episode{run: r, Episode: &report.Episode{Number: n}}
	if r.Checkpoints {
		e.watch = &storeWatch{now: r.now, limit: withoutStoreLimit}
	}
	e.Seed, e.style = r.derive(n)
	e.Style, e.History = e.style.name, filepath.Join(report.EpisodesDir, fmt.Sprintf("%05d.jsonl", n))
	err := e.work(ctx)
	// The file is whole before it is judged, and closed whatever happened.
	if e.rec != nil {
		err = errors.Join(err, e.rec.Close())
	}
	if e.file != nil {
		err = errors.Join(err, e.file.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("episode %d: %w", n, err)
	}
	if ctx.Err() != nil {
		return e.Episode, nil
	}
	if err := e.judge(); err != nil {
		return nil, fmt.Errorf("judging episode %d: %w", n, err)
	}
	return e.Episode, nil
}

// work is everything up to the verdict.
func (e *episode) work(ctx context.Context) error {
	defer e.leave()
	if err := e.prepare(ctx); err != nil {
		return fmt.Errorf("preparing: %w", err)
	}
	e.phase("faults")
	faults := e.hurt(ctx)
	e.HealedNs = e.now()
	if ctx.Err() != nil {
		return nil
	}
	e.phase("healed")
	h := e.heal(ctx)
	e.Results = append(e.Results, faults...)
	e.Results = append(e.Results, h.results(e.shards)...)
	e.phase("final reads")
	e.finalNs = e.now()
	e.final(ctx)
	if e.Checkpoints {
		e.phase("checkpoints")
		e.Results = append(e.Results, lookAtCheckpoints(ctx, e.fleet))
		e.phase("restore")
		e.restored = e.restore(ctx)
	}
	if e.Rollback {
		e.phase("rollback")
		e.rolledBack = e.rollBack(ctx)
	}
	e.EndNs = e.now()
	e.phase(report.LastPhase)
	return nil
}

// phase notes the next part of the episode.
func (e *episode) phase(name string) {
	e.timeline.Write(report.Event{Type: report.EventPhase, Episode: e.Number, At: e.now(), Text: fmt.Sprintf("episode %d (%s): %s", e.Number, e.Style, name)})
}

// prepare opens history, clients and workloads.
func (e *episode) prepare(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, setupLimit)
	defer cancel()
	if e.file, err = os.Create(filepath.Join(e.Dir, e.History)); err != nil {
		return err
	}
	header := history.Header{Seed: int64(e.Seed), Start: e.start.UTC().Format(time.RFC3339), Note: fmt.Sprintf("run of seed %d, episode %d", e.run.Seed, e.Number)}
	if e.rec, err = history.NewRecorder(e.file, header, history.Options{Clock: e.now, Forget: true}); err != nil {
		return err
	}
	if e.Checkpoints {
		if e.outdated, err = remember(ctx, e.fleet.Endpoints()); err != nil {
			return fmt.Errorf("asking as a client that names no cluster: %w", err)
		}
	}
	for n := range e.Clients {
		opts := []keel.Option{keel.WithAttemptTimeout(time.Second), keel.WithCallTimeout(5 * time.Second)}
		if n%2 == 1 {
			opts = append(opts, keel.WithDialer(workload.Flaky(e.Seed+uint64(n), 2000)))
		}
		c, err := keel.Open(ctx, e.fleet.Endpoints(), opts...)
		if err != nil {
			return fmt.Errorf("opening client %d: %w", n, err)
		}
		e.clients = append(e.clients, c)
		s, err := workload.NewClient(ctx, c)
		if err != nil {
			return fmt.Errorf("opening client %d: %w", n, err)
		}
		e.stores = append(e.stores, s)
	}
	for n, name := range e.Workloads {
		w, _ := workload.New(name, workload.Config{Prefix: fmt.Sprintf("e%d", e.Number), Seed: e.Seed + uint64(n), Rate: e.Rate, Keys: e.Keys, Batch: e.Batch, Served: &e.served, Wrote: &e.wrote})
		// Each workload begins with another client, so that all are used alike.
		if err := w.Setup(ctx, append(append([]workload.Client(nil), e.stores[n%len(e.stores):]...), e.stores[:n%len(e.stores)]...), e.rec); err != nil {
			return fmt.Errorf("workload %s: %w", name, err)
		}
		e.workloads = append(e.workloads, w)
	}
	return nil
}

// leave closes the clients.
func (e *episode) leave() {
	var wg sync.WaitGroup
	for _, c := range e.clients {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), farewellLimit)
			defer cancel()
			_ = c.Close(ctx) // a session that is not ended runs out by its lease
		})
	}
	wg.Wait()
}

// hurt runs the schedule beside the workloads, and heals. Its results are those
// of the harness and of the processes.
func (e *episode) hurt(ctx context.Context) []check.Result {
	working, cancel := context.WithTimeout(ctx, e.run.Episode)
	defer cancel()
	e.BeginNs = e.now()
	var wg sync.WaitGroup
	wg.Go(func() { workload.Drive(working, e.workloads, e.Workers) })
	faults := e.faults
	if e.watch != nil {
		faults = e.watch.all(faults)
		wg.Go(func() { e.watch.run(working, e.wrote.Load) })
		wg.Go(func() { e.watch.read(working, e.fleet) })
	}
	o := e.style.options
	o.OnRecord = e.record
	o.Settle = func(ctx context.Context) error {
		err := e.clock.settle(ctx, e.fleet.Nodes)
		e.breathe(ctx)
		return err
	}
	s, err := nemesis.NewScheduler(e.env, faults, o)
	if err == nil {
		err = errors.Join(s.Run(working), e.clock.settle(context.WithoutCancel(ctx), e.fleet.Nodes))
	}
	if e.fleet.Store != nil {
		err = errors.Join(err, e.fleet.Store.Err())
	}
	wg.Wait()
	if s != nil {
		e.count(s.Records())
	}
	var results []check.Result
	switch {
	case err == nil && len(e.Faults) == 0:
		results = append(results, check.Result{Name: "harness", Verdict: check.Unknown, Text: "no fault had an effect: nothing is proved"})
	case err != nil:
		// What the harness could not do may hide what the product did.
		results = append(results, check.Result{Name: "harness", Verdict: check.Unknown, Text: err.Error()})
		e.healHarder(ctx)
	}
	return results
}

// healHarder heals what could not be healed, again.
func (e *episode) healHarder(ctx context.Context) {
	for range 3 {
		if err := e.env.HealAll(context.WithoutCancel(ctx)); err == nil {
			return
		}
	}
}

// count adds what a schedule injected.
func (e *episode) count(records []nemesis.Record) {
	if e.Faults == nil {
		e.Faults = map[string]int{}
	}
	for kind, n := range nemesis.Count(records) {
		e.Faults[string(kind)] += n
	}
	for _, rec := range records {
		if rec.Skipped != "" || rec.Idle {
			e.Skipped++
		}
	}
	e.hits.add(records)
}

// breathe gives a cluster that has served nobody for breathAfter up to breathFor
// without faults: what hits it then shows little. Cascades do so first.
func (e *episode) breathe(ctx context.Context) {
	last := max(e.served.Load(), e.BeginNs)
	if time.Duration(e.now()-last) < breathAfter {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, breathFor)
	defer cancel()
	until(ctx, 50*time.Millisecond, func() bool { return e.served.Load() > last })
}

// record puts an injection on the timeline.
func (e *episode) record(r nemesis.Record) {
	v := report.Event{Type: report.EventFault, Episode: e.Number, At: int64(r.Begin.Sub(e.start)), Step: r.Step, Name: r.Name, Kind: string(r.Kind),
		Targets: r.Targets, Text: r.Description}
	if !r.End.IsZero() {
		v.End = int64(r.End.Sub(e.start))
	}
	switch {
	case r.Skipped != "":
		v.Type, v.Text = report.EventSkipped, r.Skipped
	case r.Error != "":
		e.timeline.Write(report.Event{Type: report.EventError, Episode: e.Number, At: v.At, End: v.End, Name: v.Name, Kind: v.Kind, Text: r.Error})
	case r.End.IsZero():
		v.Type = report.EventBegun
	}
	e.timeline.Write(v)
}

// final reads every key that was used.
func (e *episode) final(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, finalLimit)
	defer cancel()
	began := time.Now()
	errs := make([]error, len(e.workloads))
	var wg sync.WaitGroup
	for i, w := range e.workloads {
		wg.Go(func() { errs[i] = w.Final(ctx) })
	}
	wg.Wait()
	res := check.Result{Name: "final reads", Verdict: check.Pass, Text: "every key was read", Elapsed: time.Since(began)}
	for _, err := range errs {
		if err != nil {
			res.Verdict, res.Text = check.Fail, fmt.Sprintf("%v after all was healed: %v", finalLimit, err)
		}
	}
	e.Results = append(e.Results, res)
}

// judge reads the history again and has it checked.
func (e *episode) judge() error {
	deaths := e.newDeaths()
	for _, d := range deaths {
		e.timeline.Write(report.Event{Type: report.EventDeath, Episode: e.Number, At: int64(d.Time.Sub(e.start)), Targets: []string{d.Node}, Text: deathText(d)})
	}
	e.Results = append(e.Results, judgeDeaths(deaths, e.hits), e.logs.judge(e.hits))
	e.hits = e.hits.next()
	h, err := report.LoadHistory(e.Dir, e.Episode)
	if err != nil {
		return err
	}
	results := check.Judge(h, check.Options{Limit: e.CheckLimit}, e.Workloads...)
	for _, res := range results {
		e.OK, e.Failed, e.Unknown = e.OK+res.OK, e.Failed+res.Failed, e.Unknown+res.Unknown
	}
	if e.watch != nil {
		e.Results = append(e.Results, e.watch.result(h.Ops))
	}
	if e.restored != nil {
		e.Results = append(append(e.Results, e.restored.judge(h.Ops, e.finalNs)), e.restored.looks...)
	}
	if e.rolledBack != nil {
		e.Results = append(e.Results, e.rolledBack.judge(h.Ops, e.finalNs))
	}
	// The workloads come first: theirs is what people look for.
	e.Results = append(results, e.Results...)
	e.Judge()
	if e.Verdict == check.Pass {
		return report.Pack(e.Dir, e.Episode)
	}
	return nil
}

func trim(b []byte) string { return strings.TrimSpace(string(b)) }
