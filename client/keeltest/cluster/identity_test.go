package cluster

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
)

// A cluster is restored, found wanting, and restored again at the same addresses.
// Both are of the same incarnation, number their sessions alike, and have the same
// shards of the same epoch. A client that has outlived the first is refused by the
// second in all that it asks for, at once, with an error that says why; it writes
// nothing, reads nothing, and disturbs the session that has its number there.
func TestClientOfAClusterThatWasReplaced(t *testing.T) {
	old, next := New(t, Options{Nodes: 1}), New(t, Options{Nodes: 1})
	ctx := testContext(t, 60*time.Second)
	var replaced atomic.Bool
	k := old.Client(keel.WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
		if replaced.Load() {
			address = next.Endpoints()[0]
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}))
	open := func(k *keel.Client) *keel.Reducing[int64] {
		s, err := keel.DeclareReducing(ctx, k.Keyspace("s", keel.String.Type()), "sum", "sum", keel.Int64)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	sums, theirs := open(k), open(next.Client())
	for _, s := range []*keel.Reducing[int64]{sums, theirs} {
		if _, err := s.Add(ctx, "a", 1); err != nil {
			t.Fatal(err)
		}
	}
	replaced.Store(true)
	old.Stop(0)

	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, keel.ErrIdentity) {
			t.Errorf("%s is refused with: %v", what, err)
		}
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	_, err := sums.Add(short, "a", 10)
	refused("a write", err)
	_, _, err = sums.Get(short, "a")
	refused("a read", err)
	_, err = k.Participate(short, "job")
	refused("a participant", err)
	for range 3 {
		if _, err := theirs.Add(ctx, "a", 1); err != nil {
			t.Fatal(err)
		}
	}
	if got, _, err := theirs.Get(ctx, "a"); err != nil || got != 4 {
		t.Errorf("the cluster in its place has %d, %v; want 4", got, err)
	}
}

// One node's address becomes that of another cluster's: the client goes on with the
// others of its own.
func TestClientPassesOverANodeOfAnotherCluster(t *testing.T) {
	old, next := New(t, Options{Shards: 2}), New(t, Options{Nodes: 1})
	ctx := testContext(t, 60*time.Second)
	var replaced atomic.Bool
	k := old.Client(keel.WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
		if replaced.Load() && address == old.Endpoints()[0] {
			address = next.Endpoints()[0]
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}))
	sums, err := keel.DeclareReducing(ctx, k.Keyspace("s", keel.String.Type()), "sum", "sum", keel.Int64)
	if err != nil {
		t.Fatal(err)
	}
	keys := []string{"a", "b", "c", "d", "e"}
	add := func() {
		t.Helper()
		for _, key := range keys {
			if _, err := sums.Add(ctx, key, 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	add()
	replaced.Store(true)
	old.Stop(0)
	add()
	if _, err := k.Participate(ctx, "job"); err != nil { // asks the endpoints in order
		t.Error(err)
	}
	for _, key := range keys {
		if got, _, err := sums.Get(ctx, key); err != nil || got != 2 {
			t.Errorf("%s is %d, %v", key, got, err)
		}
	}
}
