package sim

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// world is one simulated cluster with its clients.
type world struct {
	*seeded // of the clients
	cfg     Config
	t       *testing.T
	c       *testcluster.Cluster
	hosts   []*host
	fams    families
	start   time.Time
	trace   *trace
	faults  map[string]int
	// revision is the newest revision of the metadata that a client has seen.
	revision atomic.Uint64
	// eras are the incarnations so far; incarnation and epochs are what clients of
	// now know. All are the main goroutine's.
	eras        []*era
	incarnation base.Incarnation
	epochs      []base.Epoch // of shard 1, 2, ...
	// objects is nil without an object store.
	objects *objects
	// checkpoints are those that were asked for and have a number.
	checkpoints struct {
		sync.Mutex
		list []*taken
	}
	// background are the goroutines of the clients' lanes.
	background sync.WaitGroup
	// findings are what went wrong beside the histories; owned by the main
	// goroutine of the bubble.
	findings []string
	// looks are of the same goroutine.
	looks looks
	// lapses are findings of clients.
	lapses struct {
		sync.Mutex
		list []string
	}
}

// host is a machine: its disk stays when its process dies.
type host struct {
	// life is odd while a process lives, and another number for each.
	life   atomic.Uint64
	disk   *disk
	offset atomic.Int64 // of the wall clock, in nanoseconds
}

func nodeID(i int) base.NodeID { return testcluster.ID(i) }

func name(i int) string { return string(nodeID(i)) }

func newWorld(t *testing.T, cfg Config, tr *trace) *world {
	w := &world{seeded: newSeeded(cfg.Seed), cfg: cfg, t: t, start: time.Now(), trace: tr, faults: map[string]int{}}
	tr.clock = func() time.Duration { return time.Since(w.start) }
	for i := range cfg.Nodes {
		w.hosts = append(w.hosts, &host{disk: newDisk(cfg.Seed<<8 | uint64(i))})
	}
	for range cfg.Shards {
		w.epochs = append(w.epochs, 1)
	}
	if cfg.Rollbacks {
		var err error
		if w.objects, err = newObjects(w); err != nil {
			t.Fatal(err)
		}
	}
	w.c = testcluster.New(t, testcluster.Options{Nodes: cfg.Nodes, Shards: cfg.Shards, KeyGroups: cfg.KeyGroups, Replication: cfg.Replication,
		Seed: cfg.Seed, Unfounded: true, Configure: w.configure})
	for _, h := range w.hosts {
		h.life.Add(1)
	}
	w.calm()
	w.c.Found()
	ctx, cancel := context.WithTimeout(context.Background(), testcluster.Wait)
	defer cancel()
	ids := []*engine.FamilyID{&w.fams.register, &w.fams.counter, &w.fams.list, &w.fams.entries, &w.fams.bank, &w.fams.session}
	for k, d := range w.declarations() {
		got, _, rev, err := w.c.Node(0).Declare(ctx, d)
		if err != nil {
			t.Fatalf("declaring %s: %v", d.Name, err)
		}
		*ids[k] = got.ID
		w.sawRevision(rev)
	}
	return w
}

// configure gives a process of a host its options.
func (w *world) configure(i int, o *cluster.Options) {
	h := w.hosts[i]
	o.Log = raftlog.Options{FS: h.disk.begin(), SegmentBytes: w.cfg.SegmentBytes, PreallocateBytes: 16 << 10, CacheBytes: 1 << 20,
		GarbageBytes: 2 * w.cfg.SegmentBytes}
	o.CommitTimeout, o.SyncLimit = w.cfg.CommitTimeout, w.cfg.SyncLimit
	o.ElectionTimeout, o.CheckInterval, o.BalanceDelay = w.cfg.ElectionTimeout, w.cfg.CheckInterval, w.cfg.BalanceDelay
	o.LogMaxBytes, o.LogKeepBytes, o.LogHardBytes = w.cfg.LogMaxBytes, w.cfg.LogMaxBytes/4, 4*w.cfg.LogMaxBytes
	o.DiskSpace = func(string) (cluster.DiskSpace, error) { return cluster.DiskSpace{Free: 1 << 30}, nil }
	o.WallClock = func() time.Time { return time.Now().Add(time.Duration(h.offset.Load())) }
	o.Logger = w.trace.logger()
	if w.objects != nil {
		o.Objects, o.ObjectsURI = w.objects.store(), "file:///objects"
		o.CheckpointRetain, o.CheckpointTimeout = 3, 20*time.Second
		o.CheckpointLocalLinks, o.CheckpointChangelog = w.cfg.LocalLinks, w.cfg.Changelog
		// Little is written here: what comes between two checkpoints is to be stored.
		o.ChangelogSegmentBytes, o.ChangelogSegmentAge = 2<<10, time.Second
	}
}

// calm makes the network whole, with the delays of an ordinary day.
func (w *world) calm() {
	w.c.Net.HealAll()
	if w.cfg.LinkDelay == 0 {
		return
	}
	for a := range w.cfg.Nodes {
		for b := range w.cfg.Nodes {
			if a != b {
				w.c.Net.SetDelay(name(a), name(b), w.cfg.LinkDelay, w.cfg.LinkDelay)
			}
		}
	}
}

func (w *world) sawRevision(rev base.Revision) {
	for {
		old := w.revision.Load()
		if uint64(rev) <= old || w.revision.CompareAndSwap(old, uint64(rev)) {
			return
		}
	}
}

func (w *world) up(i int) bool { return w.hosts[i].life.Load()%2 == 1 }

// crash kills the process of a host: nobody hears of it any more, and of its log
// there is what was synced and a part of the rest.
func (w *world) crash(i int) {
	if !w.up(i) {
		return
	}
	w.lookAt(i) // what it has promised so far
	w.c.Net.Crash(name(i))
	w.hosts[i].life.Add(1)
	w.hosts[i].disk.end()
	w.c.Stop(i)
}

// restart gives a host a process, if it has none.
func (w *world) restart(i int) {
	if w.up(i) {
		return
	}
	if err := w.c.TryStart(i); err != nil {
		w.finding("node %s does not start: %v", name(i), err)
		return
	}
	w.hosts[i].life.Add(1)
	w.lookAt(i) // before anybody has told it a term
}

// finding notes what went wrong.
func (w *world) finding(format string, args ...any) {
	w.findings = append(w.findings, fmt.Sprintf(format, args...))
	w.trace.note("FINDING %s", w.findings[len(w.findings)-1])
}

// lapse notes what a client found wrong, a few times.
func (w *world) lapse(format string, args ...any) {
	w.lapses.Lock()
	defer w.lapses.Unlock()
	if len(w.lapses.list) < 10 {
		w.lapses.list = append(w.lapses.list, fmt.Sprintf(format, args...))
		w.trace.note("FINDING %s", w.lapses.list[len(w.lapses.list)-1])
	}
}

// supervise restarts the processes that asked to end, as their supervisor does.
func (w *world) supervise() {
	for i := range w.hosts {
		if err := w.c.Fatal(i); err != nil && w.up(i) {
			w.finding("node %s ended itself, and its disk never failed: %v", name(i), err)
			w.crash(i)
			w.restart(i)
		}
	}
}

// sleep lets simulated time pass; processes that end themselves are restarted.
func (w *world) sleep(d time.Duration) {
	for end := time.Now().Add(d); ; {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		time.Sleep(min(left, cmp.Or(w.cfg.Look, max(w.cfg.CheckInterval/2, 500*time.Millisecond))))
		w.trace.progress.Store(int64(time.Since(w.start)))
		w.supervise()
		w.look()
	}
}

// leaders says who leads what, for the trace.
func (w *world) leaders() string {
	var out []string
	for g := base.GroupID(0); int(g) <= w.cfg.Shards; g++ {
		who := "-"
		for i := range w.hosts {
			if n := w.c.Get(i); n != nil && n.Leads(g) {
				who += name(i)
			}
		}
		out = append(out, strings.TrimPrefix(who, "-"))
	}
	return strings.Join(out, ",")
}

// shards are the ids of all shards.
func (w *world) shards() []uint64 {
	var out []uint64
	for s := range w.cfg.Shards {
		out = append(out, uint64(s+1))
	}
	return out
}

// others are all hosts but one.
func (w *world) others(not int) []int {
	var out []int
	for i := range w.hosts {
		if i != not {
			out = append(out, i)
		}
	}
	return out
}

// trace is what happened, in simulated time, for people.
type trace struct {
	clock    func() time.Duration
	progress atomic.Int64 // newest simulated time, for the watchdog outside

	mu    sync.Mutex
	out   *bufio.Writer
	left  int // bytes that may still be written
	kinds []string
}

// maxTrace bounds a trace in bytes.
const maxTrace = 256 << 20

func newTrace(w io.Writer) *trace {
	return &trace{out: bufio.NewWriterSize(w, 1<<16), left: maxTrace, clock: func() time.Duration { return 0 }}
}

func (t *trace) note(format string, args ...any) {
	line := fmt.Sprintf("%12.6f %s\n", t.clock().Seconds(), fmt.Sprintf(format, args...))
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.left -= len(line); t.left > 0 {
		_, _ = t.out.WriteString(line)
	}
}

func (t *trace) flush() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.out.Flush()
}

// Write takes a line of a logger.
func (t *trace) Write(p []byte) (int, error) {
	t.note("%s", strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

func (t *trace) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(t, &slog.HandlerOptions{Level: slog.LevelWarn, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// sortedCounts are counts as text.
func sortedCounts(m map[string]int) string {
	var out []string
	for k, v := range m {
		out = append(out, fmt.Sprintf("%s=%d", k, v))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}
