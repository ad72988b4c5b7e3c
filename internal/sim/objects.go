package sim

import (
	"fmt"
	"sync"
	"time"

	"github.com/keelstate/keelstate/objectstore"
	storefault "github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/objectstore/file"
	"github.com/keelstate/keelstate/objectstore/retry"
)

// objects is the object store of a simulated cluster: files that lose nothing,
// behind calls that fail.
type objects struct {
	w     *world
	files *file.Store

	mu    sync.Mutex // never held while waiting
	share float64    // of the calls that fail now
	slow  time.Duration
}

func newObjects(w *world) (*objects, error) {
	files, err := file.Open(w.t.TempDir())
	if err != nil {
		return nil, err
	}
	return &objects{w: w, files: files}, nil
}

// store is what a node gets, with the retries that real ones have.
func (o *objects) store() objectstore.Store {
	return retry.Wrap(storefault.Wrap(o.files, o.fault), retry.Options{Budget: retry.DefaultBudget()})
}

// fault chooses what happens to one call. No answer lies: bytes that were changed, or
// a short body that is said to be whole, would be damage, which ends a rollback for
// good.
func (o *objects) fault(op storefault.Op, _ string) storefault.Fault {
	o.mu.Lock()
	share, slow := o.share, o.slow
	o.mu.Unlock()
	var f storefault.Fault
	if slow > 0 {
		f.Delay = o.w.jitter(slow)
	}
	if !o.w.chance(share) {
		return f
	}
	switch k := o.w.intN(4); {
	case k == 0:
		f.Err = storefault.Trouble("no connection")
	case k == 1:
		f.Err = storefault.Trouble("SlowDown")
	case op == storefault.OpGet:
		f.Body = storefault.Body{Kind: storefault.BodyBroken, At: int64(o.w.intN(4096))}
	default:
		f.After = storefault.Trouble("the answer was lost")
	}
	return f
}

func (o *objects) set(share float64, slow time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.share, o.slow = share, slow
}

// objectStore makes the object store fail: all calls, or a share, or slowly.
func (n *nemesis) objectStore() (string, func()) {
	share := []float64{1, 0.5, 0.1, 0}[n.rng.IntN(4)]
	slow := n.between(0, 3*time.Second)
	if share == 1 {
		slow = 0
	}
	n.objects.set(share, slow)
	return fmt.Sprintf("fails for %g of the calls, each takes up to %v", share, slow), func() { n.objects.set(0, 0) }
}
