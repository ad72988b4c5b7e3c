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
	t.Parallel()
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

// The clock of leases is no wall clock: a step of the leader's by years, in either
// direction, neither ends a session nor makes one live for years.
func TestStepsOfAWallClockDoNotMoveLeases(t *testing.T) {
	t.Parallel()
	const years = 10 * 365 * 24 * time.Hour
	var ahead atomic.Int64
	k := newKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) {
		o.WallClock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	}})
	for _, step := range []time.Duration{years, 0, -years, 0} {
		ahead.Store(int64(step))
		// Its lease, too, is given and counted while the clock is wrong.
		id, rev, _, err := k.Node(1).OpenSession(k.ctx(), time.Second)
		if err != nil {
			t.Fatal(err)
		}
		old := k.session
		k.session, k.rev = id, rev
		k.Eventually("the short lease runs out", func() error {
			if res := k.submit(k.Leader(1), k.request(1, k.add("s", 1))); !errors.Is(res.Failure(), base.ErrSessionEnded) {
				return errors.Join(errors.New("the session lives"), res.Failure())
			}
			return nil
		})
		k.session = old
		k.mustWrite(k.add("s", 1)) // in the session that has a minute
	}
}

// Leases do not run while nobody can renew them: a session of a few seconds
// outlives an outage that is longer, and ends when its lease has run out since.
func TestLeasesStandWhileNobodyLeads(t *testing.T) {
	t.Parallel()
	const lease, outage = 2 * time.Second, 5 * time.Second
	k := newKit(t, testcluster.Options{})
	id, rev, _, err := k.Node(0).OpenSession(k.ctx(), lease)
	if err != nil {
		t.Fatal(err)
	}
	k.rev = rev
	for i := range 3 {
		k.Stop(i)
	}
	over := time.NewTimer(outage)
	defer over.Stop()
	<-over.C
	for i := range 3 {
		k.Start(i)
	}
	k.WaitReady()
	k.Eventually("the session is renewed after the outage", func() error {
		_, err := k.Node(1).KeepAliveSession(k.ctx(), id)
		if errors.Is(err, base.ErrSessionEnded) {
			t.Fatal("the session ended while nobody led")
		}
		return err
	})
}
