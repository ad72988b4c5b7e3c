package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/internal/base"
)

// participantRounds is how many checkpoints the test of participants goes back to.
const participantRounds = 20

// counting is a participant that counts what it adds to counters of every shard.
type counting struct {
	client   *keel.Client
	counters *keel.Reducing[int64]
	added    int64
}

const countingKeys = 12

// burst adds to many keys at once, and returns when all is acknowledged.
func (c *counting) burst(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for i := range countingKeys {
		g.Go(func() error {
			_, err := c.counters.Add(ctx, fmt.Sprint("k", i), 1)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	c.added += countingKeys
	return nil
}

func (c *counting) sum(ctx context.Context) (sum int64, err error) {
	for i := range countingKeys {
		n, _, err := c.counters.Get(ctx, fmt.Sprint("k", i))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// What a participant has given to a checkpoint is exactly what the state holds once
// the cluster is back there, though it goes on writing to all shards as soon as it
// has acknowledged, and leaders change meanwhile.
func TestParticipantsPositionIsExact(t *testing.T) {
	c := New(t, Options{Shards: 3})
	ctx := testContext(t, 4*time.Minute)
	k := c.Client()
	counters, err := keel.DeclareReducing(ctx, k.Keyspace("k", keel.String.Type()), "counters", "sum", keel.Int64)
	if err != nil {
		t.Fatal(err)
	}
	work := &counting{client: k, counters: counters}
	for round := range participantRounds {
		number, given := work.round(ctx, t, c, round)
		if err := k.RollBack(ctx, number); err != nil {
			t.Fatalf("round %d: rolling back to %d: %v", round, number, err)
		}
		held, err := work.sum(ctx)
		if err != nil {
			t.Fatal(err)
		}
		last, restored, err := k.Positions(ctx, "counting")
		if err != nil || restored == nil || last == nil || last.Checkpoint != number || restored.Checkpoint != number || !bytes.Equal(restored.Bytes, last.Bytes) {
			t.Fatalf("round %d: last %+v, restored %+v, %v", round, last, restored, err)
		}
		if back := int64(binary.BigEndian.Uint64(restored.Bytes)); back != given || held != given {
			t.Fatalf("round %d: gave %d to checkpoint %d, got %d back, the state holds %d", round, given, number, back, held)
		}
		work.added = held // the source is rewound
	}
}

// round takes a checkpoint amid writes, and returns what was given to it.
func (c *counting) round(ctx context.Context, t *testing.T, cl *Cluster, round int) (number uint64, given int64) {
	t.Helper()
	p, err := c.client.Participate(ctx, "counting")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.burst(ctx); err != nil {
		t.Fatal(err)
	}
	other := cl.Client()
	taken := make(chan error, 1)
	go func() {
		_, err := other.Checkpoint(ctx)
		taken <- err
	}()
	if number, err = p.Next(ctx); err != nil {
		t.Fatal(err)
	}
	moved := make(chan struct{})
	defer func() { <-moved }()
	go func() { // one that is refused is no matter
		defer close(moved)
		shard := base.GroupID(1 + round%3)
		_, _ = cl.Nodes().Node(cl.Nodes().Leader(shard)).TransferLeader(ctx, shard, "")
	}()
	given = c.added
	if err := p.Ack(ctx, number, binary.BigEndian.AppendUint64(nil, uint64(given))); err != nil {
		t.Fatalf("round %d: acknowledging: %v", round, err)
	}
	for done := false; !done; {
		if err := c.burst(ctx); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-taken:
			if err != nil {
				t.Fatalf("round %d: checkpoint %d: %v", round, number, err)
			}
			done = true
		default:
		}
	}
	if err := p.Done(ctx, number); err != nil {
		t.Fatal(err)
	}
	return number, given
}
