package sim

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/workload"
)

// era is one incarnation of the cluster and what clients did in it: each has
// workloads, keys and a history of its own. A run without rollbacks has one.
type era struct {
	n           int
	incarnation base.Incarnation
	rec         *history.Recorder
	file        *os.File
	work        []workload.Workload
	// stop ends the workloads and waits for them.
	stop func()
	// known is what the keys hold, as read when the era had ended; nil until then.
	known contents
}

// contents is what was read, by what it was about.
type contents map[string]*history.Op

// what says what an operation was about.
func what(op *history.Op) string { return op.Workload + " " + op.F + " " + op.Key }

func contentsOf(ops []history.Op) contents {
	c := contents{}
	for i := range ops {
		if op := &ops[i]; op.Outcome == history.OK {
			c[what(op)] = op
		}
	}
	return c
}

func (c contents) names() []string {
	var all []string
	for name := range c {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}

// differs says where two readings of the same keys differ, "" if nowhere. What only
// one of them has is empty there.
func (c contents) differs(o contents) string {
	for _, name := range c.names() {
		a, b := c[name], o[name]
		if b == nil {
			b = &history.Op{}
		}
		if !slices.Equal(a.Result, b.Result) || !reflect.DeepEqual(a.Parts, b.Parts) && b.F != "" {
			return fmt.Sprintf("%v, and it was %v", a, b)
		}
	}
	for _, name := range o.names() {
		if c[name] == nil && len(o[name].Result) > 0 {
			return fmt.Sprintf("nobody read %v", o[name])
		}
	}
	return ""
}

// present is the era of now.
func (w *world) present() *era { return w.eras[len(w.eras)-1] }

// begin begins the next era: its clients know the incarnation that the world has
// learnt last.
func (w *world) begin(dir string) *era {
	e := &era{n: len(w.eras), incarnation: w.incarnation}
	name, prefix := "history.jsonl", ""
	if e.n > 0 {
		name, prefix = fmt.Sprintf("history-%d.jsonl", e.n), fmt.Sprintf("era%d", e.n)
	}
	var err error
	if e.file, err = os.Create(filepath.Join(dir, name)); err != nil {
		w.t.Fatal(err)
	}
	if e.rec, err = history.NewRecorder(e.file, history.Header{Seed: int64(w.cfg.Seed), Note: fmt.Sprintf("%+v", w.cfg)},
		history.Options{Clock: w.now, FlushEvery: time.Hour}); err != nil {
		w.t.Fatal(err)
	}
	var clients []workload.Client
	for k := range w.cfg.Workers {
		clients = append(clients, newClient(w, k%2 == 1).stores())
	}
	e.work = workload.All(workload.Config{Prefix: prefix, Seed: w.cfg.Seed + uint64(e.n)<<32, Keys: 4, OpsPerKey: 200, Rate: w.cfg.Rate, Timeout: 5 * time.Second})
	w.setup(e.work, clients, e.rec)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		workload.Drive(ctx, e.work, w.cfg.Workers)
	}()
	e.stop = func() {
		cancel()
		<-ended
	}
	w.eras = append(w.eras, e)
	return e
}

func (w *world) setup(ws []workload.Workload, clients []workload.Client, rec *history.Recorder) {
	for _, x := range ws {
		if err := x.Setup(context.Background(), clients, rec); err != nil {
			w.t.Fatal(err)
		}
	}
}

// now is the time of the run in nanoseconds.
func (w *world) now() int64 { return int64(time.Since(w.start)) }

// close ends the recording of an era, and returns its history.
func (e *era) close(w *world) *history.History {
	if err := e.rec.Close(); err != nil {
		w.t.Error(err)
	}
	if err := e.file.Close(); err != nil {
		w.t.Error(err)
	}
	return e.rec.History()
}

// readAgain reads what the workloads of an era left, as clients of now do.
func (w *world) readAgain(e *era) []history.Op {
	rec, err := history.NewRecorder(nil, history.Header{}, history.Options{Clock: w.now})
	if err != nil {
		w.t.Fatal(err)
	}
	w.setup(e.work, []workload.Client{newClient(w, false).stores()}, rec)
	w.final(e.work)
	if err := rec.Close(); err != nil {
		w.t.Error(err)
	}
	return rec.History().Ops
}
