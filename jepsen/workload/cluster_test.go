package workload

import (
	"context"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/client/keeltest/cluster"
	"github.com/keelstate/keelstate/jepsen/check"
)

// All workloads over a real cluster whose clients lose their connections and
// whose nodes stop and start.
func TestRealCluster(t *testing.T) {
	c := cluster.New(t, cluster.Options{Shards: 2})
	var clients []Client
	for n := range 3 {
		k := c.Client(keel.WithDialer(Flaky(uint64(n), 400)), keel.WithAttemptTimeout(time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		stores, err := NewClient(ctx, k)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, stores)
	}
	h := drive(t, All(Config{Keys: 8, OpsPerKey: 150, Rate: 300, Batch: 6, Timeout: 300 * time.Millisecond}), clients, 3, 6*time.Second, func() {
		for n := range 2 {
			<-time.After(time.Second)
			c.Stop(n)
			<-time.After(time.Second)
			c.Start(n)
		}
	})
	judge(t, h, check.Pass)
	ok := map[string]int{}
	for _, op := range h.Ops {
		ok[op.Workload+" "+op.Outcome.String()]++
	}
	t.Logf("%d operations: %v", len(h.Ops), ok)
}
