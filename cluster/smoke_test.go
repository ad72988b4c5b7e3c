package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

func TestClusterFoundsWritesAndReads(t *testing.T) {
	t.Parallel()
	c := testcluster.New(t, testcluster.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), testcluster.Wait)
	defer cancel()
	str, err := keygroup.ParseType("string")
	if err != nil {
		t.Fatal(err)
	}
	d, created, rev, err := c.Node(1).Declare(ctx, state.Declaration{Keyspace: "ks", Name: "v", Kind: state.KindValue, KeyType: str, ValueType: str})
	if err != nil || !created {
		t.Fatalf("declare: %v, created %v", err, created)
	}
	leader := c.Leader(1)
	route := cluster.Route{Group: 1, Epoch: 1, MetadataRevision: rev}
	done := make(chan raftfsm.Result, 1)
	start := time.Now()
	c.Node(leader).Submit(ctx, route, &raftfsm.Request{Mutations: []raftfsm.Mutation{{Mutation: state.Mutation{
		State: d.ID, Op: state.OpValuePut, Key: []byte("k"), Value: []byte("hello")}}}}, func(r raftfsm.Result) { done <- r })
	if r := <-done; r.Err != nil {
		t.Fatalf("write: %v", r.Err)
	}
	t.Logf("write took %v", time.Since(start))
	start = time.Now()
	reply, err := c.Node(leader).Read(ctx, &cluster.ReadRequest{Route: route, Queries: []state.Query{{State: d.ID, Kind: state.QueryGet, Key: []byte("k")}}})
	if err != nil || reply.Errs[0] != nil {
		t.Fatalf("read: %v %v", err, reply)
	}
	t.Logf("read took %v", time.Since(start))
	if string(reply.Answers[0].Value) != "hello" {
		t.Fatalf("read %q", reply.Answers[0].Value)
	}
}
