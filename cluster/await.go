package cluster

import (
	"context"
	"fmt"
	"reflect"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// A future of raft answers nothing while an fsync hangs, and never if raft had
// taken it when it was shut down. Whoever waits must be able to go, and leave
// nothing behind: a goroutine per wait would pile up for as long as a disk hangs.
// raft's futures have a channel that ends a wait, ShutdownCh; for some kinds raft
// sets it, for proposals and transfers of the office it does not, and we do.

// await waits for a future of raft. What raft leaves unanswered at its shutdown
// is of unknown outcome.
func (g *group) await(f raft.Future) error { return g.awaitIn(context.Background(), f) }

// awaitIn is await for a caller who may not wait longer than ctx. The outcome is
// then unknown. A future is waited for once.
func (g *group) awaitIn(ctx context.Context, f raft.Future) error {
	over := make(chan struct{})
	if !endBy(f, over) {
		return f.Error() // it was answered when it was made
	}
	var once sync.Once
	end := func() { once.Do(func() { close(over) }) }
	defer context.AfterFunc(ctx, end)()
	defer context.AfterFunc(g.ended, end)()
	err := f.Error()
	if err != nil && ctx.Err() != nil && err == raft.ErrRaftShutdown { //nolint:errorlint // as raft returns it
		return fmt.Errorf("waiting for %s: %w: %w", g.id, base.ErrOutcomeUnknown, ctx.Err())
	}
	return err
}

// endFields are the indices of ShutdownCh by the type of a future, nil where it
// has none.
var endFields sync.Map

// endBy makes the Error of a future return raft.ErrRaftShutdown once over is
// closed; false for a future that has its answer from the first.
func endBy(f raft.Future, over chan struct{}) bool {
	v := reflect.ValueOf(f)
	if v.Kind() != reflect.Pointer {
		return false
	}
	index, known := endFields.Load(v.Type())
	if !known {
		var path []int
		if field, ok := v.Type().Elem().FieldByName("ShutdownCh"); ok && field.Type == reflect.TypeFor[chan struct{}]() {
			path = field.Index
		}
		index, _ = endFields.LoadOrStore(v.Type(), path)
	}
	path := index.([]int)
	if path == nil {
		return false
	}
	v.Elem().FieldByIndex(path).Set(reflect.ValueOf(over))
	return true
}
