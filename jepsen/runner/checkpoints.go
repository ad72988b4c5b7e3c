//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/report"
)

// How a cluster with --checkpoints makes them.
const (
	checkpointInterval = 3 * time.Second
	checkpointRetain   = 3
	checkpointTimeout  = 20 * time.Second
)

// Limits of what is judged of checkpoints.
const (
	// createLimit is how long a healed cluster may take to complete a checkpoint:
	// one that hangs in what the faults left may have to end at its timeout first.
	createLimit = time.Minute
	// verifyLimit bounds looking at all that are retained.
	verifyLimit = time.Minute
	// withoutStoreLimit is how long no write may be acknowledged while nothing but
	// the object store is at fault.
	withoutStoreLimit = 5 * time.Second
)

// storeFlags are those of nodes that make checkpoints. The store itself is the
// fleet's own, or a directory that all nodes share if there is no service.
func (r *run) storeFlags() ([]string, error) {
	if !r.Checkpoints {
		return nil, nil
	}
	flags := []string{"--checkpoint-interval", checkpointInterval.String(), "--checkpoint-retain", strconv.Itoa(checkpointRetain),
		"--checkpoint-timeout", checkpointTimeout.String()}
	if r.StoreBinary != "" {
		return flags, nil
	}
	if err := os.Mkdir(filepath.Join(r.Dir, report.NodesDir, storeDir), 0o755); err != nil {
		return nil, err
	}
	return append(flags, "--object-store", r.directory()), nil
}

// storeDir is the name of a store that is a directory, and directory its address.
const storeDir = "store"

func (r *run) directory() string { return "file://" + filepath.Join(r.Dir, report.NodesDir, storeDir) }

// storeLacks is why no fault of the object store is possible, if so.
func (r *run) storeLacks() error {
	switch {
	case !r.Checkpoints:
		return errors.New("the run makes no checkpoints (--checkpoints)")
	case r.StoreBinary == "":
		return errors.New("there is no versitygw (make tools), so checkpoints go to a directory")
	}
	return nil
}

// storeWatch notes what is at fault, and for how long nobody's write was
// acknowledged while that was the object store alone.
type storeWatch struct {
	now   func() int64
	limit time.Duration

	mu sync.Mutex
	// store and others are how many faults of the store, and of anything else, are
	// in force, being injected or being healed; healed is when others became 0.
	store, others int
	healed        int64
	// storeSteps counts the beginnings and ends of faults of the store.
	storeSteps int
	// longest is the longest time without a write, and when it ended.
	longest, at int64
	// whole and unsound tell of the checkpoints that were read beside the faults.
	whole   int
	unsound string
}

// watched is a fault that a watch knows of, from before it is injected until it is
// healed.
type watched struct {
	nemesis.Fault
	watch *storeWatch
}

func (w *storeWatch) all(faults []nemesis.Fault) []nemesis.Fault {
	var all []nemesis.Fault
	for _, f := range faults {
		all = append(all, watched{f, w})
	}
	return all
}

// Inject implements nemesis.Fault.
func (f watched) Inject(ctx context.Context, rnd *rand.Rand) (*nemesis.Injection, error) {
	f.watch.count(f.Kind(), 1)
	in, err := f.Fault.Inject(ctx, rnd)
	if err != nil {
		f.watch.count(f.Kind(), -1)
		return nil, err
	}
	heal := in.Heal
	var once sync.Once
	in.Heal = func(ctx context.Context) error {
		err := heal(ctx)
		if err == nil {
			once.Do(func() { f.watch.count(f.Kind(), -1) })
		}
		return err
	}
	return in, nil
}

func (w *storeWatch) count(kind nemesis.Kind, by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if nemesis.OfStore(kind) {
		w.store += by
		w.storeSteps++
		return
	}
	if w.others += by; w.others == 0 {
		w.healed = w.now()
	}
}

// look notes for how long no write was acknowledged, if nothing but the store is at
// fault, and what was at fault before is over: a write that began since has succeeded.
// wrote is when the newest write began that has; an answer to an older one proves
// nothing.
func (w *storeWatch) look(wrote int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.others > 0 || w.store == 0 || wrote == 0 || wrote < w.healed {
		return
	}
	if gap := w.now() - wrote; gap > w.longest {
		w.longest, w.at = gap, w.now()
	}
}

// run looks until ctx ends.
func (w *storeWatch) run(ctx context.Context, wrote func() int64) {
	until(ctx, 100*time.Millisecond, func() bool {
		w.look(wrote())
		return false
	})
}

// sane says whether the store has had no fault since it had steps, and what they are
// now.
func (w *storeWatch) sane(steps int) (now int, sane bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.storeSteps, w.store == 0 && w.storeSteps == steps
}

// readPause is between two readings of a checkpoint beside faults.
const readPause = time.Second

// read reads the newest checkpoint again and again until ctx ends: faults of answers
// have something to hit, and a retained checkpoint is whole whatever happens to
// nodes. What is found while the store lies does not count.
func (w *storeWatch) read(ctx context.Context, c checkpointer) {
	until(ctx, readPause, func() bool {
		steps, _ := w.sane(0)
		n, err := newest(ctx, c)
		if err != nil {
			return false
		}
		_, err = c.VerifyCheckpoint(ctx, n.Number, verifyLimit)
		_, sane := w.sane(steps)
		switch {
		case err == nil:
			w.mu.Lock()
			w.whole++
			w.mu.Unlock()
		case sane && errors.Is(err, host.ErrUnsound):
			if retained, listErr := retainedOf(ctx, c); listErr == nil && slices.Contains(retained, n.Number) {
				w.mu.Lock()
				w.unsound = fmt.Sprintf("checkpoint %d, which is retained, beside faults of others than the store: %v", n.Number, err)
				w.mu.Unlock()
			}
		}
		return false
	})
}

// result is the verdict on the watch, and on what clients were told: no operation
// fails because of the object store.
func (w *storeWatch) result(ops []history.Op) check.Result {
	w.mu.Lock()
	defer w.mu.Unlock()
	longest := time.Duration(w.longest).Round(time.Millisecond)
	res := check.Result{Name: "without the store", Verdict: check.Pass,
		Text: fmt.Sprintf("while only the object store was at fault a write was acknowledged every %s at the latest; a checkpoint was read whole %d times beside the faults", longest, w.whole)}
	if w.unsound != "" {
		res.Verdict, res.Text = check.Fail, w.unsound
	}
	if longest > w.limit {
		res.Verdict, res.Text = check.Fail, fmt.Sprintf("no write was acknowledged for %s, until %s of the run, while nothing but the object store was at fault",
			longest, time.Duration(w.at).Round(time.Millisecond))
	}
	for i := range ops {
		if op := &ops[i]; op.Code == "object_store" || op.Code == "checkpoint_failed" {
			res.Verdict, res.Text = check.Fail, fmt.Sprintf("an operation failed because of the object store (%s): %s", op.Code, op)
			res.Details = append(res.Details, check.Detail{Verdict: check.Fail, Key: op.Key, Text: res.Text, Ops: []int64{op.ID}})
			break
		}
	}
	return res
}

// checkpointer is what is asked of a cluster about its checkpoints.
type checkpointer interface {
	CreateCheckpoint(ctx context.Context, limit time.Duration) (host.Checkpoint, error)
	Checkpoints(ctx context.Context) ([]host.Checkpoint, error)
	VerifyCheckpoint(ctx context.Context, number uint64, limit time.Duration) (host.Verification, error)
}

// lookAtCheckpoints makes a checkpoint of a healed cluster and reads all that are
// retained. Whether the store holds more than these need is not looked at: which
// object may be there a little longer is no business of a black box.
func lookAtCheckpoints(ctx context.Context, c checkpointer) check.Result {
	res := check.Result{Name: "checkpoints", Verdict: check.Pass}
	began := time.Now()
	var made host.Checkpoint
	created, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	err := errors.New("nobody was asked")
	until(created, 300*time.Millisecond, func() bool {
		// Another may be running, which is refused; or it fails with what is left of
		// the faults.
		made, err = c.CreateCheckpoint(created, createLimit)
		return err == nil
	})
	if err != nil {
		res.Verdict, res.Text = check.Fail, fmt.Sprintf("%s after healing no checkpoint has completed: %v", createLimit, err)
		return res
	}
	took := time.Since(began).Round(time.Millisecond)
	ctx, cancel = context.WithTimeout(ctx, verifyLimit)
	defer cancel()
	retained, err := retainedOf(ctx, c)
	switch {
	case err != nil:
		res.Verdict, res.Text = check.Unknown, err.Error()
		return res
	case len(retained) > checkpointRetain:
		res.Verdict, res.Text = check.Fail, fmt.Sprintf("%d checkpoints are retained, not %d: %v", len(retained), checkpointRetain, retained)
		return res
	}
	verified, gone := 0, 0
	var objects, bytes int64
	for _, number := range slices.Backward(retained) { // the oldest may go at any time
		v, err := verifyRetained(ctx, c, number)
		switch {
		case errors.Is(err, errRetired):
			gone++
		case err != nil:
			v := check.Fail
			if ctx.Err() != nil && !errors.Is(err, host.ErrUnsound) {
				v = check.Unknown
			}
			res.Verdict = check.Combine(res.Verdict, v)
			res.Text = fmt.Sprintf("checkpoint %d, which is retained: %v", number, err)
			res.Details = append(res.Details, check.Detail{Verdict: v, Key: strconv.FormatUint(number, 10), Text: res.Text})
		default:
			verified, objects, bytes = verified+1, objects+v.Objects, bytes+v.Bytes
		}
	}
	if res.Verdict != check.Pass {
		return res
	}
	res.Text = fmt.Sprintf("checkpoint %d completed %s after healing; %d are retained, %d of them read whole (%d objects, %d bytes), %d retired meanwhile",
		made.Number, took, len(retained), verified, objects, bytes, gone)
	if verified == 0 {
		res.Verdict = check.Unknown
	}
	return res
}

// retainedOf lists the completed checkpoints, the oldest first.
func retainedOf(ctx context.Context, c checkpointer) (numbers []uint64, err error) {
	var all []host.Checkpoint
	until(ctx, 300*time.Millisecond, func() bool {
		all, err = c.Checkpoints(ctx)
		return err == nil
	})
	for _, one := range all {
		if one.Phase == host.CheckpointCompleted {
			numbers = append(numbers, one.Number)
		}
	}
	slices.Sort(numbers)
	return numbers, err
}

// errRetired says that a checkpoint is no longer retained.
var errRetired = errors.New("it was retired")

// verifyRetained reads a checkpoint, again if it could not be read. What it finds
// does not count if the checkpoint was retired meanwhile.
func verifyRetained(ctx context.Context, c checkpointer, number uint64) (v host.Verification, err error) {
	until(ctx, 300*time.Millisecond, func() bool {
		if v, err = c.VerifyCheckpoint(ctx, number, verifyLimit); err == nil {
			return true
		}
		retained, listErr := retainedOf(ctx, c)
		if listErr == nil && !slices.Contains(retained, number) {
			err = errRetired
			return true
		}
		return errors.Is(err, host.ErrUnsound)
	})
	return v, err
}
