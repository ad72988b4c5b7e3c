package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// checkpoint makes a checkpoint and returns its number.
func checkpoint(t *testing.T, ctx context.Context, k *keel.Client) (number uint64) {
	t.Helper()
	err := k.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		s, err := keelstatepb.NewCheckpointsClient(conn).CreateCheckpoint(ctx, &keelstatepb.CreateCheckpointRequest{})
		var last *keelstatepb.Checkpoint
		for err == nil {
			var c *keelstatepb.Checkpoint
			if c, err = s.Recv(); err == nil {
				last = c
			}
		}
		if number = last.GetNumber(); errors.Is(err, io.EOF) && last.GetPhase() == "completed" {
			return nil
		}
		return fmt.Errorf("%w, %v", err, last)
	}, keel.AttemptTimeout(0))
	if err != nil {
		t.Fatal(err)
	}
	return number
}

// rollBack takes the cluster back to a checkpoint.
func rollBack(t *testing.T, ctx context.Context, k *keel.Client, number uint64) {
	t.Helper()
	err := k.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		s, err := keelstatepb.NewCheckpointsClient(conn).RollBack(ctx, &keelstatepb.RollBackRequest{Number: number})
		var last *keelstatepb.Rollback
		for err == nil {
			var r *keelstatepb.Rollback
			if r, err = s.Recv(); err == nil {
				last = r
			}
		}
		if errors.Is(err, io.EOF) && last.GetPhase() == "done" {
			return nil
		}
		return fmt.Errorf("%w, %v", err, last)
	}, keel.AttemptTimeout(0))
	if err != nil {
		t.Fatal(err)
	}
}

// Clients that write while the cluster is rolled back, twice, go on by themselves.
// What they are told is true: of every number that was acknowledged in the last
// incarnation there is one, of others none, unless they are in the checkpoint or
// their outcome is unknown, and nothing is counted twice.
func TestClientsGoOnThroughRollbacks(t *testing.T) {
	c := New(t, Options{Shards: 2})
	ctx := testContext(t, 90*time.Second)
	setup := c.Client()
	if _, err := keel.DeclareList(ctx, setup.Keyspace("r", keel.String.Type()), "l", keel.Int64); err != nil {
		t.Fatal(err)
	}
	const writers, lists = 6, 4
	var mu sync.Mutex
	acked, unknown := map[int64]uint64{}, map[int64]bool{} // by number: its incarnation
	rolledBack, next := 0, int64(0)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range writers {
		k := c.Client(keel.WithAttemptTimeout(2 * time.Second))
		wg.Go(func() {
			list, err := keel.OpenList(ctx, k.Keyspace("r", keel.String.Type()), "l", keel.Int64)
			if err != nil {
				t.Errorf("client %d: %v", i, err)
				return
			}
			for {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				next++
				n := next
				mu.Unlock()
				token, err := list.Add(ctx, fmt.Sprint(n%lists), n)
				mu.Lock()
				var e *keel.Error
				switch {
				case err == nil:
					acked[n] = token.Incarnation
				case errors.Is(err, keel.ErrIncarnation):
					rolledBack++
					if !errors.As(err, &e) || !strings.Contains(e.Hint, "rolled back to checkpoint") {
						t.Errorf("number %d: %v", n, err)
					}
					unknown[n] = e.Outcome == keel.OutcomeUnknown
				default:
					if errors.As(err, &e); e == nil || e.Outcome == keel.OutcomeUnknown {
						unknown[n] = true
					}
				}
				mu.Unlock()
			}
		})
	}
	progress := func(of uint64) {
		t.Helper()
		c.Nodes().Eventually("writes are acknowledged", func() error {
			mu.Lock()
			defer mu.Unlock()
			count := 0
			for _, i := range acked {
				if i == of {
					count++
				}
			}
			if count < 100 {
				return fmt.Errorf("%d in incarnation %d", count, of)
			}
			return nil
		})
	}
	progress(0)
	number := checkpoint(t, ctx, setup)
	progress(0)
	first := holding(t, ctx, setup, lists)
	for i := range uint64(2) {
		rollBack(t, ctx, setup, number)
		progress(i + 1)
	}
	close(stop)
	wg.Wait()
	held := holding(t, ctx, c.Client(), lists)
	mu.Lock()
	defer mu.Unlock()
	kept := 0
	for n, count := range held {
		incarnation, known := acked[n]
		switch {
		case count > 1:
			t.Errorf("number %d is there %d times", n, count)
		case known && incarnation == 0 && first[n] == 1: // in the checkpoint, or not
			kept++
		case known && incarnation == 2 || unknown[n]:
		default:
			t.Errorf("number %d is there; acknowledged: %t in incarnation %d, unknown: %t", n, known, incarnation, unknown[n])
		}
	}
	for n, incarnation := range acked {
		if incarnation == 2 && held[n] != 1 {
			t.Errorf("number %d was acknowledged in the last incarnation and is there %d times", n, held[n])
		}
	}
	if kept < 100 {
		t.Errorf("%d numbers of the checkpoint are there", kept)
	}
	t.Logf("%d acknowledged, %d rolled back, %d there", len(acked), rolledBack, len(held))
}

// holding counts what the lists hold.
func holding(t *testing.T, ctx context.Context, k *keel.Client, lists int) map[int64]int {
	t.Helper()
	l, err := keel.OpenList(ctx, k.Keyspace("r", keel.String.Type()), "l", keel.Int64)
	if err != nil {
		t.Fatal(err)
	}
	out := map[int64]int{}
	for i := range lists {
		all, err := l.Get(ctx, fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range all {
			out[n]++
		}
	}
	return out
}
