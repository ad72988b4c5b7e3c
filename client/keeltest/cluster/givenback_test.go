package cluster

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// taken makes a checkpoint or a savepoint and returns it with its uri.
func taken(ctx context.Context, t *testing.T, k *keel.Client, savepoint bool) (last *keelstatepb.Checkpoint) {
	t.Helper()
	err := k.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		s, err := keelstatepb.NewCheckpointsClient(conn).CreateCheckpoint(ctx, &keelstatepb.CreateCheckpointRequest{Savepoint: savepoint})
		for err == nil {
			var c *keelstatepb.Checkpoint
			if c, err = s.Recv(); err == nil {
				last = c
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}, keel.AttemptTimeout(0))
	if err != nil || last.GetPhase() != "completed" {
		t.Fatalf("%v, %v", last, err)
	}
	return last
}

// B09, B38: what a careless encoding mistakes for something else is the same after a
// rollback, and in a cluster of another number of shards that begins with the
// checkpoint or the savepoint, for every kind.
func TestB38EmptyNullSeparatorsAfterRollbackAndRestore(t *testing.T) {
	for _, engine := range []string{"mem", "rocks"} {
		t.Run(engine, func(t *testing.T) {
			c := New(t, Options{Nodes: 1, Shards: 2, Engine: engine})
			k := c.Client()
			x := newOddCells(t, c)
			x.write(odd[:4])
			first := taken(x.ctx, t, k, false)
			x.write(odd[4:])
			whole := taken(x.ctx, t, k, true)
			x.write([][]byte{[]byte("in neither"), {}})
			if err := k.RollBack(x.ctx, whole.GetNumber()); err != nil {
				t.Fatal(err)
			}
			x.check("rolled back to the savepoint", odd)
			if err := k.RollBack(x.ctx, first.GetNumber()); err != nil {
				t.Fatal(err)
			}
			x.check("rolled back to the checkpoint", odd[:4])
			x.write(odd[4:])
			x.check("gone on behind the rollback", odd)
			for _, from := range []*keelstatepb.Checkpoint{first, whole} {
				values := odd
				if from == first {
					values = odd[:4]
				}
				next := New(t, Options{Nodes: 1, Shards: 3, Engine: engine, Beside: c, Restore: from.GetUri()})
				y := newOddCells(t, next)
				y.check("restored from "+from.GetUri(), values)
				y.write([][]byte{{}})
				y.check("gone on behind the restore", append(append([][]byte(nil), values...), []byte{}))
			}
		})
	}
}

// A participant is given back what it gave: by a rollback to a checkpoint and to a
// savepoint, and in a new cluster that began with either. Only checkpoints are ones
// that it can go back to by itself; a new cluster has none yet.
func TestPositionsAreGivenBackByRollbackAndRestore(t *testing.T) {
	c := New(t, Options{Nodes: 1, Shards: 2})
	ctx := testContext(t, 2*time.Minute)
	k := c.Client()
	counters, err := keel.DeclareReducing(ctx, k.Keyspace("k", keel.String.Type()), "n", "sum", keel.Int64)
	if err != nil {
		t.Fatal(err)
	}
	positions := map[uint64][]byte{}
	var points []*keelstatepb.Checkpoint
	for i, position := range [][]byte{{0, 0xff, ','}, []byte("second"), {}} {
		p, err := k.Participate(ctx, "job")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := counters.Add(ctx, "x", 1); err != nil {
			t.Fatal(err)
		}
		given := make(chan error, 1)
		go func() {
			number, err := p.Next(ctx)
			if err == nil {
				err = p.Ack(ctx, number, position)
			}
			given <- err
		}()
		point := taken(ctx, t, c.Client(), i == 1)
		if err := <-given; err != nil {
			t.Fatal(err)
		}
		points, positions[point.GetNumber()] = append(points, point), position
	}
	topology, err := k.Topology(ctx)
	if err != nil {
		t.Fatal(err)
	}
	check := func(where string, k *keel.Client, from *keelstatepb.Checkpoint, cluster string, last uint64) {
		t.Helper()
		l, r, err := k.Positions(ctx, "job")
		if err != nil || r == nil || r.Checkpoint != from.GetNumber() || r.Cluster != cluster || !bytes.Equal(r.Bytes, positions[from.GetNumber()]) {
			t.Fatalf("%s: restored %+v, %v", where, r, err)
		}
		if (l == nil) != (last == 0) || l != nil && (l.Checkpoint != last || !bytes.Equal(l.Bytes, positions[last])) {
			t.Errorf("%s: the last one is %+v, want that in %d", where, l, last)
		}
		p, err := k.Participate(ctx, "job")
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Restored(); got == nil || got.Checkpoint != from.GetNumber() || got.Incarnation != r.Incarnation || !bytes.Equal(got.Bytes, r.Bytes) {
			t.Errorf("%s: registered, it is given %+v", where, got)
		}
		n, err := keel.DeclareReducing(ctx, k.Keyspace("k", keel.String.Type()), "n", "sum", keel.Int64)
		if err != nil {
			t.Fatal(err)
		}
		if sum, _, err := n.Get(ctx, "x"); err != nil || sum != int64(from.GetNumber()) {
			t.Errorf("%s: the state holds %d, %v", where, sum, err)
		}
		if token, err := n.Add(ctx, "y", 1); err != nil || token.Incarnation != r.Incarnation {
			t.Errorf("%s: written in incarnation %d, %v; the position is of %d", where, token.Incarnation, err, r.Incarnation)
		}
	}
	for _, point := range points {
		last := point.GetNumber()
		if point.GetSavepoint() {
			last = 0
		}
		if err := k.RollBack(ctx, point.GetNumber()); err != nil {
			t.Fatal(err)
		}
		check("after a rollback to "+point.GetUri(), k, point, "", last)
	}
	for _, point := range points {
		next := New(t, Options{Nodes: 1, Shards: 3, Beside: c, Restore: point.GetUri()})
		check("restored from "+point.GetUri(), next.Client(), point, topology.GetClusterId(), 0)
	}
}
