package cluster_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// BenchmarkSubmit measures writes and reads of three nodes in one process, below
// gRPC, over loopback TCP and real fsyncs.
func BenchmarkSubmit(b *testing.B) {
	for _, clients := range []int{1, 64, 256} {
		for _, kind := range []string{"write", "batch100", "read"} {
			b.Run(fmt.Sprintf("%s/clients=%d", kind, clients), func(b *testing.B) { benchmarkSubmit(b, kind, clients) })
		}
	}
}

func benchmarkSubmit(b *testing.B, kind string, clients int) {
	c := testcluster.New(b, testcluster.Options{Engine: "rocks", Configure: func(i int, o *cluster.Options) {
		o.Network = transport.TCP{}
		o.RaftAddr = fmt.Sprintf("127.0.0.1:%d", 17600+i)
		o.AdvertiseRaftAddr = o.RaftAddr
		o.ElectionTimeout, o.CheckInterval = 500*time.Millisecond, time.Second
	}, Addr: func(i int) string { return fmt.Sprintf("127.0.0.1:%d", 17600+i) }})
	ctx := context.Background()
	d, _, rev, err := c.Node(0).Declare(ctx, state.Declaration{Keyspace: "b", Name: "v", Kind: state.KindValue, KeyType: keygroup.String, ValueType: keygroup.String})
	if err != nil {
		b.Fatal(err)
	}
	leader := c.Node(c.Leader(1))
	route := cluster.Route{Group: 1, Epoch: 1, MetadataRevision: rev}
	value := []byte(strings.Repeat("v", 100))
	var n atomic.Int64
	b.ResetTimer()
	var wg sync.WaitGroup
	for range clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			done := make(chan raftfsm.Result, 1)
			for {
				i := n.Add(1)
				if i > int64(b.N) {
					return
				}
				if kind == "read" {
					reply, err := leader.Read(ctx, &cluster.ReadRequest{Route: route, Queries: []state.Query{{State: d.ID, Kind: state.QueryGet, Key: []byte(fmt.Sprintf("key-%d", i%100000))}}})
					if err != nil || reply.Errs[0] != nil {
						b.Errorf("read: %v", err)
						return
					}
					continue
				}
				per := 1
				if kind == "batch100" {
					per = 100
				}
				req := &raftfsm.Request{}
				for j := range per {
					req.Mutations = append(req.Mutations, raftfsm.Mutation{Ordinal: uint32(j), Mutation: state.Mutation{
						State: d.ID, Op: state.OpValuePut, Key: []byte(fmt.Sprintf("key-%d", (int(i)*per+j)%100000)), Value: value}})
				}
				leader.Submit(ctx, route, req, func(r raftfsm.Result) { done <- r })
				if r := <-done; r.Err != nil {
					b.Errorf("write: %v", r.Err)
					return
				}
			}
		}()
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}
