package sim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/workload"
	"github.com/keelstate/keelstate/raftfsm"
)

// Report is what one run showed.
type Report struct {
	Config    Config
	Simulated time.Duration
	Wall      time.Duration
	CPU       time.Duration // of the process meanwhile
	Faults    map[string]int
	Ops       int64
	Rounds    int // times that everything was healed and judged to be alive
	Results   []check.Result
	Findings  []string
	Late      int    // orders of an operator that outlasted their time
	Dir       string // where the trace and the history are
	Rollbacks int    // of the cluster, to a checkpoint

	histories []judged
}

// judged is a history that is to be judged when the run is over. One that is not
// whole is that of an era which a rollback ended: nobody read what it left, so that
// only what it shows counts.
type judged struct {
	name    string
	history *history.History
	whole   bool
}

// Verdict is that of all results; a finding fails.
func (r *Report) Verdict() check.Verdict {
	vs := []check.Verdict{}
	for _, x := range r.Results {
		vs = append(vs, x.Verdict)
	}
	if len(r.Findings) > 0 {
		vs = append(vs, check.Fail)
	}
	return check.Combine(vs...)
}

// String is the run's line for the ledger.
func (r *Report) String() string {
	total := 0
	for _, n := range r.Faults {
		total += n
	}
	return fmt.Sprintf("sim seed=%d nodes=%d shards=%d hours=%.2f speedup=%.0f of-a-core=%.0f ops=%d heals=%d faults=%d (%s) late-orders=%d verdict=%s",
		r.Config.Seed, r.Config.Nodes, r.Config.Shards, r.Simulated.Hours(), r.Simulated.Seconds()/max(r.Wall.Seconds(), 1e-3), r.Simulated.Seconds()/max(r.CPU.Seconds(), 1e-3), r.Ops, r.Rounds, total,
		sortedCounts(r.Faults), r.Late, r.Verdict())
}

// Run simulates one cluster in a bubble of its own. Trace and history are in
// dir, which must exist.
func Run(t *testing.T, cfg Config, dir string) (r *Report) {
	t.Helper()
	r = &Report{Config: cfg, Dir: dir}
	traceFile, err := os.Create(filepath.Join(dir, "trace.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer traceFile.Close()
	tr := newTrace(traceFile)
	tr.note("%+v", cfg)
	stop := watch(tr, dir)
	began, used := time.Now(), cpu()
	bubble(t, r, func(t *testing.T) { simulate(t, r, tr) })
	stop()
	r.Wall, r.CPU = time.Since(began), cpu()-used
	r.judge()
	for _, x := range r.Results {
		tr.note("%s: %s %s %+v", x.Name, x.Verdict, x.Text, x.Details)
	}
	tr.note("%s", r)
	if err := tr.flush(); err != nil {
		t.Error(err)
	}
	return r
}

// judge has the histories judged. An era that ended soon after it had begun may have
// no operation of a workload that succeeded: another one must have then.
func (r *Report) judge() {
	var all []check.Result
	proved := map[string]bool{}
	nothing := map[string]check.Result{}
	for _, j := range r.histories {
		for _, x := range check.Judge(j.history, check.Options{Limit: 30 * time.Second, Parallel: 1}) {
			workload := x.Name
			if j.name != "" {
				x.Name = j.name + ": " + x.Name
			}
			switch {
			case x.OK > 0:
				proved[workload] = true
			case x.Verdict == check.Unknown:
				nothing[workload] = x
				continue
			}
			if x.Verdict == check.Unknown && !j.whole {
				continue
			}
			all = append(all, x)
		}
	}
	for workload, x := range nothing {
		if !proved[workload] {
			all = append(all, x)
		}
	}
	r.Results = append(all, r.Results...)
}

// cpu is the processor time that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// bubble runs f in a bubble. At its end no goroutine may be left (SM4): for one
// that is, synctest panics, which is caught here.
func bubble(t *testing.T, r *Report, f func(t *testing.T)) {
	defer func() {
		if p := recover(); p != nil {
			if text := fmt.Sprint(p); !strings.Contains(text, "blocked goroutines remain") {
				panic(p)
			}
			left := strangers(stacks())
			if len(left) == 0 {
				left = []string{fmt.Sprintf("at the end of the run: %v", p)}
			}
			r.Findings = append(r.Findings, left...)
		}
	}()
	synctest.Test(t, f)
}

func stacks() string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			return string(buf[:n])
		}
		buf = make([]byte, 2*len(buf))
	}
}

// strangers are the goroutines of any bubble that should not be left.
func strangers(dump string) []string {
	var out []string
	for _, g := range strings.Split(dump, "\n\n") {
		head, _, _ := strings.Cut(g, "\n")
		if strings.Contains(head, "synctest bubble") {
			out = append(out, "a goroutine is left: "+g)
		}
	}
	return out
}

// watchdogLimit is how long a run may stand still in real time.
const watchdogLimit = 2 * time.Minute

// watch ends the process, with all stacks in dir, if simulated time stands still:
// then a goroutine waits for a mutex whose holder waits for time to pass, or
// something spins.
func watch(tr *trace, dir string) (stop func()) {
	done := make(chan struct{})
	go func() {
		last, since := int64(-1), time.Now()
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if now := tr.progress.Load(); now != last {
				last, since = now, time.Now()
			} else if time.Since(since) > watchdogLimit {
				path := filepath.Join(dir, "stacks.txt")
				_ = os.WriteFile(path, []byte(stacks()), 0o644)
				_ = tr.flush()
				panic(fmt.Sprintf("sim: simulated time stands still at %v; stacks are in %s", time.Duration(last), path))
			}
		}
	}()
	return func() { close(done) }
}

// simulate is the run within its bubble.
func simulate(t *testing.T, r *Report, tr *trace) {
	w := newWorld(t, r.Config, tr)
	w.begin(r.Dir)
	n := newNemesis(w)
	for time.Since(w.start) < r.Config.Time {
		for end := time.Now().Add(r.Config.Round); time.Now().Before(end) && len(w.findings) == 0; {
			n.step()
		}
		n.heal()
		r.Rounds++
		if !w.alive(r) || len(w.findings) > 0 { // what has failed need not go on
			break
		}
		n.lost = n.lost && !w.whole()
		if r.Config.Rollbacks && !n.rollBack(r) {
			break
		}
	}
	e := w.present()
	e.stop()
	w.final(e.work)
	if r.Config.Rollbacks && len(w.findings) == 0 {
		w.stays()
		w.verify()
	}
	if !w.becomesWhole() {
		w.finding("a node is not ready %v after the last healing: %s", wholeLimit, w.dump())
	}
	r.Results = append(r.Results, w.hashes())
	r.Simulated = time.Since(w.start)
	r.Faults, r.Findings, r.Late = w.faults, w.findings, n.late
	w.background.Wait()
	r.Findings = append(r.Findings, w.lapses.list...)
	h := e.close(w)
	r.Ops += int64(len(h.Ops))
	r.histories = append([]judged{{history: h, whole: true}}, r.histories...)
}

// final reads what the workloads left.
func (w *world) final(ws []workload.Workload) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for _, x := range ws {
		if err := x.Final(ctx); err != nil {
			w.finding("%v", err)
		}
		w.trace.progress.Store(int64(time.Since(w.start)))
	}
}

// whole says that every node is ready.
func (w *world) whole() bool {
	for i := range w.hosts {
		n := w.c.Get(i)
		if n == nil {
			return false
		}
		if ok, why := n.Ready(); !ok {
			w.trace.note("node %s is not ready: %s", name(i), why)
			return false
		}
	}
	return true
}

// wholeLimit is how long nodes may take until all are ready again, those that
// lost their logs too.
const wholeLimit = 2 * time.Minute

func (w *world) becomesWhole() bool {
	for end := time.Now().Add(wholeLimit); !w.whole(); w.sleep(time.Second) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// alive judges that every shard, within 30 s of being healed, has a leader, takes
// a write, answers a read, and that its replicas agree. It adds a result only
// where that is not so.
func (w *world) alive(r *Report) bool {
	healed := time.Now()
	var seen []check.Healed
	for _, s := range w.shards() {
		seen = append(seen, check.Healed{Shard: s, Led: -1, Wrote: -1, Read: -1, Replicas: -1})
	}
	note := func(at *time.Duration, ok bool) bool {
		if ok && *at < 0 {
			*at = time.Since(healed)
		}
		return *at >= 0
	}
	c := newClient(w, false)
	ctx, cancel := context.WithTimeout(context.Background(), 2*check.HealLimit)
	defer cancel()
	for left := true; left && ctx.Err() == nil; {
		left = false
		for k := range seen {
			h, g := &seen[k], base.GroupID(seen[k].Shard)
			ok := note(&h.Led, strings.Contains(strings.Split(w.leaders(), ",")[g], "n"))
			ok = ok && note(&h.Wrote, h.Wrote >= 0 || c.probe(ctx, g, true) == nil)
			ok = ok && note(&h.Read, h.Read >= 0 || c.probe(ctx, g, false) == nil)
			ok = ok && note(&h.Replicas, h.Replicas >= 0 || w.agree(ctx, g) == nil)
			left = left || !ok
		}
		if left {
			w.sleep(200 * time.Millisecond)
		}
	}
	x := check.Liveness(seen, 0)
	w.trace.note("healed: %+v; leaders %s", seen, w.leaders())
	if x.Verdict != check.Pass {
		x.Text += "; " + w.dump()
		r.Results = append(r.Results, x)
	}
	return x.Verdict == check.Pass
}

// probe writes to or reads from a shard once.
func (c *client) probe(ctx context.Context, g base.GroupID, write bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	key := c.w.keyOf(g)
	if write {
		return c.write(ctx, raftfsm.Request{}, state.Mutation{State: c.w.fams.register, Op: state.OpValuePut, Key: key, Value: encode(1)})
	}
	_, err := c.read(ctx, state.Query{State: c.w.fams.register, Kind: state.QueryGet, Key: key})
	return err
}

// keyOf is a key of a shard that no workload uses.
func (w *world) keyOf(g base.GroupID) []byte {
	c := &client{w: w}
	for k := 0; ; k++ {
		if key := []byte(fmt.Sprintf("probe-%d", k)); c.shardOf(key) == g {
			return key
		}
	}
}

// replicaHashes asks any node for the hashes of all replicas of a shard.
func (w *world) replicaHashes(ctx context.Context, g base.GroupID) ([]cluster.ReplicaHash, error) {
	err := error(errRefused)
	for _, i := range w.c.Running() {
		n := w.c.Get(i)
		if n == nil {
			continue
		}
		var hs []cluster.ReplicaHash
		if hs, err = n.HashShard(ctx, g); err == nil {
			return hs, nil
		}
	}
	return nil, err
}

// agree says whether all replicas of a shard answered with equal hashes.
func (w *world) agree(ctx context.Context, g base.GroupID) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	hs, err := w.replicaHashes(ctx, g)
	if err != nil {
		return err
	}
	for _, h := range hs {
		if h.Error != "" {
			return errors.New(h.Error)
		}
		if h.Index == hs[0].Index && (string(h.Content) != string(hs[0].Content) || string(h.Ops) != string(hs[0].Ops)) {
			w.finding("replicas of %s differ: %+v", g, hs)
		}
	}
	return nil
}

// hashes judges the replicas at the end.
func (w *world) hashes() check.Result {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var seen []check.ReplicaHash
	for _, s := range w.shards() {
		var hs []cluster.ReplicaHash
		for ctx.Err() == nil && w.agree(ctx, base.GroupID(s)) != nil {
			w.sleep(200 * time.Millisecond)
		}
		hs, err := w.replicaHashes(ctx, base.GroupID(s))
		if err != nil {
			w.trace.note("hashing shard %d: %v", s, err)
		}
		for _, h := range hs {
			if h.Error == "" {
				seen = append(seen, check.ReplicaHash{Shard: s, Node: string(h.Node), Applied: h.Index, Hash: fmt.Sprintf("%x/%x", h.Content, h.Ops)})
			}
		}
	}
	return check.Hashes(w.shards(), w.cfg.Replication, seen)
}

// dump traces the state of every node, and returns what they say is wrong.
func (w *world) dump() string {
	var wrong []string
	for i := range w.hosts {
		n := w.c.Get(i)
		if n == nil {
			w.trace.note("node %s is stopped", name(i))
			wrong = append(wrong, name(i)+" is stopped")
			continue
		}
		st, err := n.NodeStatus(context.Background())
		w.trace.note("node %s ready=%v %s revision=%d %v", name(i), st.Ready, st.NotReadyReason, st.Revision, err)
		if !st.Ready {
			wrong = append(wrong, fmt.Sprintf("%s is not ready: %s", name(i), st.NotReadyReason))
		}
		for _, g := range st.Groups {
			w.trace.note("  %+v", g)
			if g.Damage != "" {
				wrong = append(wrong, fmt.Sprintf("%s of %s is damaged: %s", g.Group, name(i), g.Damage))
			}
		}
	}
	return strings.Join(wrong, "; ")
}
