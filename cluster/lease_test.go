package cluster_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// W3: the system clock stands while no session lives. The lease of the first
// session after a long idle time is as long as any other.
func TestFirstSessionAfterIdleTimeHasAWholeLease(t *testing.T) {
	var ahead atomic.Int64
	k := newKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) {
		o.WallClock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	}})
	if err := k.Node(0).CloseSession(k.ctx(), k.session); err != nil {
		t.Fatal(err)
	}
	ahead.Store(int64(time.Hour))
	for i := range 3 { // the leader and others
		long, _, _, err := k.Node(i).OpenSession(k.ctx(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		short, rev, _, err := k.Node(i).OpenSession(k.ctx(), time.Second)
		if err != nil {
			t.Fatal(err)
		}
		k.rev, k.session = rev, short
		k.Eventually("the short lease runs out", func() error {
			if res := k.submit(k.Leader(1), k.request(1, k.add("s", 1))); !errors.Is(res.Failure(), base.ErrSessionEnded) {
				return errors.Join(errors.New("the session lives"), res.Failure())
			}
			return nil
		})
		k.session = long
		if res := k.submit(k.Leader(1), k.request(1, k.add("s", 1))); res.Failure() != nil {
			t.Errorf("node %d: the session with the long lease: %v", i, res.Failure())
		}
		if err := k.Node(i).CloseSession(k.ctx(), long); err != nil {
			t.Fatal(err)
		}
		ahead.Add(int64(time.Hour))
	}
}
