package crashtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

// TestCrashStalledLeaderServesNothingStale stops the leader while readers ask
// every node for a counter: what they send to the stopped one waits in its
// sockets and is answered when it goes on, after others led (B01).
func TestCrashStalledLeaderServesNothingStale(t *testing.T) {
	r := seeded(t)
	c := newNodes(t, "rocks")
	c.found(1)
	cl := c.client(keel.WithAttemptTimeout(500 * time.Millisecond))
	s := declare(t, cl)
	topo, err := cl.Topology(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	key, err := keel.String.Encode("counter")
	if err != nil {
		t.Fatal(err)
	}
	request := &keelstatepb.ReadRequest{Shard: topo.GetShards()[0].GetId(), Epoch: topo.GetShards()[0].GetEpoch(),
		Queries: []*keelstatepb.Query{{State: s.probe.Declaration().ID, Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: key}}}

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var acked, reads, written atomic.Int64
	wg.Add(1)
	go func() {
		defer wg.Done()
		for i := int64(1); ctx.Err() == nil; i++ {
			if _, err := s.probe.Set(ctx, "counter", i); err == nil {
				acked.Store(i)
				written.Add(1)
			}
		}
	}()
	for i := range 24 {
		conn, err := grpc.NewClient(c.n[i%3].grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer conn.Close()
			for ctx.Err() == nil {
				low := acked.Load()
				got, err := readCounter(ctx, conn, request)
				if err != nil {
					pause(ctx, 2*time.Millisecond) // not the leader
					continue
				}
				if got < low {
					t.Errorf("%s read %d after %d was acknowledged", c.n[i%3].id, got, low)
				}
				reads.Add(1)
			}
		}()
	}
	rounds := 5
	if *long {
		rounds = 40
	}
	for range rounds {
		pause(t.Context(), time.Duration(r.IntN(500))*time.Millisecond)
		if l := c.leader(1); l >= 0 {
			c.signal(l, syscall.SIGSTOP)
			pause(t.Context(), time.Duration(200+r.IntN(2800))*time.Millisecond)
			c.signal(l, syscall.SIGCONT)
		}
	}
	eventually(t, "reads and writes go on", func() error {
		if reads.Load() == 0 || written.Load() < int64(rounds) {
			return fmt.Errorf("%d reads, %d writes", reads.Load(), written.Load())
		}
		return nil
	})
	cancel()
	wg.Wait()
	t.Logf("%d rounds, %d reads, %d writes", rounds, reads.Load(), written.Load())
}

// readCounter reads over one connection, with time enough for a stopped node to
// go on.
func readCounter(ctx context.Context, conn grpc.ClientConnInterface, request *keelstatepb.ReadRequest) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	res, err := keelstatepb.NewStateClient(conn).Read(ctx, request)
	if err != nil {
		return 0, err
	}
	a := res.GetAnswers()[0]
	if e := a.GetError(); e != nil {
		return 0, errors.New(e.String())
	}
	if !a.GetFound() {
		return 0, nil
	}
	return keel.Int64.Decode(a.GetValue())
}

// count adds to a sum until the test ends, as a cluster goes on around a fault.
func count(t *testing.T, s *states, times int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for i := range times {
		if _, err := s.sum.Add(ctx, fmt.Sprint("key", i%50), 1); err != nil {
			t.Fatalf("adding: %v", err)
		}
	}
}

func total(t *testing.T, s *states) int64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	sum := int64(0)
	for i := range 50 {
		v, _, err := s.sum.Get(ctx, fmt.Sprint("key", i))
		if err != nil {
			t.Fatal(err)
		}
		sum += v
	}
	return sum
}
