//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/report"
	"github.com/keelstate/keelstate/jepsen/workload"
)

// restoreLimit bounds founding another cluster with a checkpoint and reading it.
const restoreLimit = 90 * time.Second

// restored is what was read from a cluster that has what a checkpoint holds.
type restored struct {
	// name is that of the result.
	name string
	ops  []history.Op
	text string
	err  error
	// late says that the time was over; then err says nothing of the product.
	late bool
	// looks are other looks at that cluster.
	looks []check.Result
}

// restore founds another cluster with the newest checkpoint, which was made after
// the final reads, and does these reads there. The nodes that made it are paused
// meanwhile: they would retire it before the other cluster has what it needs, and a
// restore needs nothing of them.
func (e *episode) restore(ctx context.Context) *restored {
	ctx, cancel := context.WithTimeout(ctx, restoreLimit)
	defer cancel()
	res := &restored{name: "restore"}
	var from host.Checkpoint
	until(ctx, 300*time.Millisecond, func() bool {
		from, res.err = newest(ctx, e.fleet)
		return res.err == nil
	})
	for _, n := range e.fleet.Nodes {
		if res.err == nil {
			res.err = n.Pause()
		}
	}
	if res.err == nil {
		res.err = e.restoreFrom(ctx, from, res)
	}
	for _, n := range e.fleet.Nodes {
		res.err = errors.Join(res.err, n.Resume())
	}
	res.late = res.err != nil && ctx.Err() != nil
	return res
}

// newest is the newest checkpoint that is retained.
func newest(ctx context.Context, c checkpointer) (best host.Checkpoint, err error) {
	all, err := c.Checkpoints(ctx)
	for _, one := range all {
		if one.Phase == host.CheckpointCompleted && one.Number > best.Number {
			best = one
		}
	}
	if err == nil && best.Number == 0 {
		err = errors.New("no checkpoint is retained")
	}
	return best, err
}

// restoreFrom founds a cluster of another size, with another number of shards, from
// a checkpoint, reads what the workloads left, and ends the cluster.
func (e *episode) restoreFrom(ctx context.Context, from host.Checkpoint, res *restored) (err error) {
	dir, err := os.MkdirTemp(filepath.Join(e.Dir, report.NodesDir), "restore-")
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(e.Seed, from.Number))
	nodes, shards := 1+2*rnd.IntN(2), 1+rnd.IntN(4)
	flags := e.NodeFlags
	if e.fleet.Store == nil {
		flags = append([]string{"--object-store", e.directory()}, flags...)
	}
	began := time.Now()
	f, err := host.NewFleet(host.Options{Nodes: nodes, Dir: dir, NodeBinary: e.NodeBinary, CtlBinary: e.CtlBinary, Net: host.NetLoopback,
		Store: e.fleet.Store, Engine: e.Engine, Memory: e.Memory, Flags: flags})
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err == nil {
			err = os.RemoveAll(dir) // else the logs tell more
		}
	}()
	if err := f.StartAll(); err != nil {
		return err
	}
	if err := f.Restore(ctx, shards, from.URI); err != nil {
		return fmt.Errorf("founding a cluster of %d nodes and %d shards with checkpoint %d: %w", nodes, shards, from.Number, err)
	}
	took := time.Since(began).Round(time.Millisecond)
	if res.ops, err = e.readAgain(ctx, f); err == nil {
		var look check.Result
		look, err = e.outdated.refusedBy(ctx, f.Endpoints())
		res.looks = append(res.looks, look)
	}
	res.text = fmt.Sprintf("checkpoint %d in a cluster of %d nodes and %d shards, which served after %s", from.Number, nodes, shards, took)
	return err
}

// readAgain does the final reads in another cluster.
func (e *episode) readAgain(ctx context.Context, f *host.Fleet) ([]history.Op, error) {
	c, err := keel.Open(ctx, f.Endpoints(), keel.WithAttemptTimeout(5*time.Second))
	if err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), farewellLimit)
		defer cancel()
		_ = c.Close(ctx) // the cluster ends anyway
	}()
	store, err := workload.NewClient(ctx, c)
	if err != nil {
		return nil, err
	}
	rec, err := history.NewRecorder(nil, history.Header{}, history.Options{Clock: e.now})
	if err != nil {
		return nil, err
	}
	errs := make([]error, len(e.workloads))
	var wg sync.WaitGroup
	for i, w := range e.workloads {
		if err := w.Setup(ctx, []workload.Client{store}, rec); err != nil {
			return nil, err
		}
		wg.Go(func() { errs[i] = w.Final(ctx) })
	}
	wg.Wait()
	return rec.History().Ops, errors.Join(append(errs, rec.Close())...)
}

// reads are the results of the reads of a history that succeeded, from a time on,
// by what was read; of several the last.
func reads(ops []history.Op, from int64) map[string]*history.Op {
	all := map[string]*history.Op{}
	for i := range ops {
		if op := &ops[i]; op.Outcome == history.OK && op.Invoke >= from {
			all[what(op)] = op
		}
	}
	return all
}

// what says what an operation was about.
func what(op *history.Op) string { return op.Workload + " " + op.F + " " + op.Key }

// judge compares what was read with the final reads in the cluster that made the
// checkpoint.
func (r *restored) judge(ops []history.Op, from int64) check.Result {
	res := check.Result{Name: r.name, Verdict: check.Pass}
	if r.err != nil {
		res.Verdict, res.Text = check.Fail, r.err.Error()
		if r.late {
			res.Verdict = check.Unknown
		}
		return res
	}
	want, got := reads(ops, from), reads(r.ops, 0)
	for name, w := range want {
		g := got[name]
		if g != nil && reflect.DeepEqual(w.Result, g.Result) && reflect.DeepEqual(w.Parts, g.Parts) {
			res.OK++
			continue
		}
		res.Failed++
		if res.Verdict = check.Fail; len(res.Details) < 20 {
			text := fmt.Sprintf("the checkpoint has %v, and it was %v", g, w)
			res.Details = append(res.Details, check.Detail{Verdict: check.Fail, Key: w.Key, Text: text, Ops: []int64{w.ID}})
		}
	}
	switch {
	case res.Verdict == check.Fail:
		res.Text = fmt.Sprintf("%s: %d of %d keys differ from what was read before it was made; %s", r.text, res.Failed, len(want), res.Details[0].Text)
	case len(want) == 0:
		res.Verdict, res.Text = check.Unknown, "there was nothing to compare"
	default:
		res.Text = fmt.Sprintf("%s: %d keys are as they were", r.text, res.OK)
	}
	return res
}
