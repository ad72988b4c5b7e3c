//go:build linux

package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/report"
)

// run is a run in progress.
type run struct {
	Options
	start    time.Time
	fleet    *host.Fleet
	env      *nemesis.Env
	faults   []nemesis.Fault
	shards   []shard
	report   *report.Run
	timeline *report.Writer
	samples  *report.Writer
	files    []*os.File
	logs     *logWatch
	clock    *clock
	deaths   int // that episodes have judged
	// hits are the faults of the running episode, and damage of those before.
	hits hits
}

// Run runs episodes until the time is over, one fails, or ctx ends. Its error
// says what kept the harness from judging; what the product did is in the
// report, which is also returned with an error if there is one.
func Run(ctx context.Context, o Options) (rep *report.Run, err error) {
	o.ensureDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return nil, err
	}
	if err := emptyDir(o.Dir); err != nil {
		return nil, err
	}
	r := &run{Options: o, start: time.Now(), hits: hits{}}
	r.report = &report.Run{Seed: o.Seed, Started: r.start.UTC().Format(time.RFC3339), Repeat: o.Repeat, Options: o.texts(),
		Nodes: o.Nodes, Shards: o.Shards, Disk: string(o.Disk), Verdict: check.Unknown}
	defer func() {
		if errors.Is(err, ErrUsage) {
			err = errors.Join(err, r.close(), os.RemoveAll(o.Dir))
			return
		}
		if err != nil && r.report.Text == "" {
			r.report.Text = err.Error()
		}
		err = errors.Join(err, r.finish(ctx))
	}()
	if err := r.open(); err != nil {
		return r.report, err
	}
	if err := r.found(ctx); err != nil {
		return r.report, fmt.Errorf("founding the cluster: %w", err)
	}
	return r.report, r.episodes(ctx)
}

// emptyDir makes a directory that has nothing in it.
func emptyDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = usage("the directory %s is not empty", dir)
	}
	return err
}

// now is the time of the run.
func (r *run) now() int64 { return int64(time.Since(r.start)) }

func (r *run) note(format string, args ...any) { r.Note(fmt.Sprintf(format, args...)) }

// open makes the files of the folder and the places of the nodes.
func (r *run) open() error {
	swept, err := host.Sweep()
	for _, s := range swept {
		r.note("removed what a dead harness had left: %s", s)
	}
	if err != nil { // what is left of others is in nobody's way
		r.note("not all that dead harnesses left could be removed: %v", err)
	}
	nodes := filepath.Join(r.Dir, report.NodesDir)
	for _, dir := range []string{nodes, filepath.Join(r.Dir, report.EpisodesDir)} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	for _, l := range []struct {
		to          **report.Writer
		file, magic string
	}{{&r.timeline, report.TimelineFile, report.TimelineMagic}, {&r.samples, report.MetricsFile, report.MetricsMagic}} {
		f, err := os.Create(filepath.Join(r.Dir, l.file))
		if err != nil {
			return err
		}
		r.files = append(r.files, f)
		*l.to = report.NewWriter(f, l.magic)
	}
	store, err := r.storeFlags()
	if err != nil {
		return err
	}
	flags := append([]string{"--fault-injection", "--log-size", r.LogSize}, store...)
	if !r.Checkpoints {
		r.StoreBinary = ""
	}
	r.fleet, err = host.NewFleet(host.Options{Nodes: r.Nodes, StoreBinary: r.StoreBinary, Dir: nodes, NodeBinary: r.NodeBinary, CtlBinary: r.CtlBinary, Net: r.Net,
		Disk: r.Disk, DiskBytes: r.DiskBytes, Groups: os.Geteuid() == 0, Engine: r.Engine, Memory: r.Memory,
		// Only so have the nodes a clock that can be set.
		Flags: append(flags, r.NodeFlags...)})
	if err != nil {
		return fmt.Errorf("making the fleet: %w", err)
	}
	return r.chooseFaults()
}

// chooseFaults draws up the catalogue, and says loudly what is not in it (RU5).
func (r *run) chooseFaults() error {
	r.env = nemesis.NewEnv(r.fleet, r.Seed)
	r.clock = newClock(nemesis.NewHTTPClock(clockLimit))
	r.env.Clock = r.clock
	r.env.StoreLacks = r.storeLacks()
	// A node that is paused or hangs, too, does not hold the schedule up for long.
	r.env.StopLimit = 15 * time.Second
	all, missing := nemesis.Catalogue(r.env)
	r.report.Missing = missing
	r.report.Victims = r.env.Victims()
	r.report.Net = string(host.NetNamespaces)
	if r.fleet.Net == nil {
		r.report.Net = string(host.NetLoopback)
	}
	if len(missing) > 0 {
		r.note("NOT INJECTED HERE: %d faults of %d", len(missing), len(missing)+len(all))
		for _, m := range missing {
			r.note("  %s", m)
		}
	}
	if err := nemesis.CheckNames(r.env, slices.Concat(r.Faults, r.Without)); err != nil {
		return usage("%v", err)
	}
	for _, w := range r.Faults {
		if err := nemesis.Lacks(r.env, w); err != nil {
			return usage("%s cannot be injected here: %v", w, err)
		}
	}
	chosen, err := nemesis.Select(all, r.Faults)
	if err != nil {
		return usage("%v", err)
	}
	for _, w := range r.Without {
		left, err := nemesis.Select(all, []string{w})
		if err != nil {
			continue // it is missing here, which was said above
		}
		chosen = slices.DeleteFunc(slices.Clone(chosen), func(f nemesis.Fault) bool { return slices.Contains(left, f) })
	}
	if len(chosen) == 0 {
		return usage("no fault is left")
	}
	r.faults = chosen
	return nil
}

// found starts the nodes and makes them a cluster.
func (r *run) found(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	r.logs = newLogWatch(r.fleet.Nodes)
	if err := r.fleet.StartAll(); err != nil {
		return err
	}
	founding, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		until(founding, 50*time.Millisecond, func() bool {
			ended := firstEnded(r.fleet.Nodes)
			if ended != nil {
				stop(ended) // it would be waited for in vain
			}
			return ended != nil
		})
	})
	err := r.fleet.Found(founding, r.Shards)
	if cause := context.Cause(founding); err != nil && cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
		err = cause
	}
	stop(nil)
	wg.Wait()
	if err != nil {
		return err
	}
	if r.shards, err = listShards(ctx, r.fleet); err != nil {
		return err
	}
	r.report.Product = product(ctx, r.fleet)
	if r.Revision != "" {
		r.report.Product["revision"] = r.Revision
	}
	return r.report.Save(r.Dir)
}

// firstEnded says how a node ended that should run, and what it said last.
func firstEnded(nodes []*host.Node) error {
	for _, n := range nodes {
		if code, ended := n.Ended(); ended {
			return fmt.Errorf("%s ended by itself with code %d; the end of %s: %s", n.ID, code, n.LogFile, lastLines(n.LogFile, 3))
		}
	}
	return nil
}

// lastLines are the last lines of a log that say something, as one.
func lastLines(file string, most int) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	var lines []string
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-most):], "; ")
}

// product asks keelctl for the versions; what is not known is left out.
func product(ctx context.Context, f *host.Fleet) map[string]string {
	var v map[string]any
	all := map[string]string{}
	out, err := f.Ctl(ctx, "version", "-o", "json")
	if err != nil || json.Unmarshal(out, &v) != nil {
		return all
	}
	for _, k := range []string{"version", "revision", "go", "platform"} {
		if s, ok := v[k].(string); ok && s != "" {
			all[k] = s
		}
	}
	return all
}

// episodes runs them one after the other.
func (r *run) episodes(ctx context.Context) error {
	sampling, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { r.sample(sampling) })
	defer wg.Wait()
	defer stop()
	for n := r.First; ; n++ {
		e, err := r.episode(ctx, n)
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the run was interrupted: %w", ctx.Err())
		}
		r.report.Episodes = append(r.report.Episodes, *e)
		r.report.ElapsedNs = r.now()
		r.report.Done = e.Verdict == check.Fail || time.Since(r.start) >= r.Duration
		r.report.Judge()
		if err := r.report.Save(r.Dir); err != nil {
			return err
		}
		r.noteEpisode(e)
		if r.report.Done {
			return errors.Join(r.timeline.Err(), r.samples.Err())
		}
	}
}

func (r *run) noteEpisode(e *report.Episode) {
	faults := 0
	for _, n := range e.Faults {
		faults += n
	}
	r.note("episode %d (%s): %s; %d operations (%d ok, %d failed, %d unknown), %d faults", e.Number, e.Style, e.Verdict, e.Operations(),
		e.OK, e.Failed, e.Unknown, faults)
	for _, res := range e.Results {
		if res.Verdict != check.Pass {
			r.note("  %s: %s: %s", res.Name, res.Verdict, res.Text)
		}
	}
}

// close ends everything that the run started (RU1).
func (r *run) close() error {
	var failed error
	if r.fleet != nil {
		if err := r.fleet.Close(); err != nil {
			failed = fmt.Errorf("ending the fleet: %w", err)
		}
	}
	for _, f := range r.files {
		failed = errors.Join(failed, f.Close())
	}
	return failed
}

// finish closes the run and completes its folder.
func (r *run) finish(ctx context.Context) error {
	failed := r.close()
	r.report.ElapsedNs = r.now()
	r.report.Judge()
	if ctx.Err() != nil && r.report.Verdict == check.Pass {
		r.report.Verdict = check.Unknown
	}
	failed = errors.Join(failed, r.report.Save(r.Dir))
	if r.report.Verdict == check.Pass && !r.KeepData {
		failed = errors.Join(failed, r.removeData())
	}
	return errors.Join(failed, report.WritePage(r.Dir))
}

// removeData leaves of the nodes' directory the logs (RU3).
func (r *run) removeData() error {
	dir := filepath.Join(r.Dir, report.NodesDir)
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// style is how an episode's faults come.
type style struct {
	name    string
	options nemesis.Options
}

// styles are equally likely. The first has one fault at a time; of the steps of
// the others about half have more, up to three.
var styles = []style{
	{"single faults", nemesis.Options{MinHold: 500 * time.Millisecond, MaxHold: 7 * time.Second, MinGap: 300 * time.Millisecond, MaxGap: 3 * time.Second, Composed: -1}},
	{"mixed", nemesis.Options{MinHold: time.Second, MaxHold: 7 * time.Second, MinGap: 300 * time.Millisecond, MaxGap: 2 * time.Second, Composed: 0.4}},
	{"cascade", nemesis.Options{MinHold: 200 * time.Millisecond, MaxHold: 3 * time.Second, MinGap: 50 * time.Millisecond, MaxGap: 700 * time.Millisecond, Composed: 0.6}},
}

// derive is the seed of an episode, and its style.
func (r *run) derive(n int) (seed uint64, s style) {
	rnd := rand.New(rand.NewPCG(r.Seed, uint64(n)))
	seed, s = rnd.Uint64()>>1, styles[rnd.IntN(len(styles))]
	s.options.Seed = seed
	return seed, s
}

// newDeaths are the deaths since the last call.
func (r *run) newDeaths() []host.Death {
	all := r.env.Deaths()
	slices.SortFunc(all, func(a, b host.Death) int { return a.Time.Compare(b.Time) })
	fresh := all[min(r.deaths, len(all)):]
	r.deaths = len(all)
	return fresh
}
