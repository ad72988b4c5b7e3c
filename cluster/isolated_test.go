package cluster_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
)

// staleReads read at one node in every way that is linearizable; each returns
// whether what it was served is from before the overwrite.
func (k *kit) staleReads(node int) map[string]func() (stale bool, err error) {
	get := state.Query{State: k.values, Kind: state.QueryGet, Key: []byte("k")}
	scan := func(req *cluster.ScanRequest, first func(state.ScanItem) bool) (bool, error) {
		ctx := initCtx(k.t, 300*time.Millisecond)
		req.Route = k.route()
		s, err := k.Node(node).OpenScan(ctx, req)
		if err != nil {
			return false, err
		}
		defer s.Close()
		items, _, _, err := s.Next(ctx)
		if err != nil {
			return false, err
		}
		return len(items) == 1 && first(items[0]), nil
	}
	return map[string]func() (bool, error){
		"scan": func() (bool, error) {
			return scan(&cluster.ScanRequest{Query: state.ScanQuery{State: k.values}}, func(i state.ScanItem) bool { return string(i.Entry.Value) == "1" })
		},
		"scan of a key": func() (bool, error) {
			return scan(&cluster.ScanRequest{Key: &state.Query{State: k.lists, Kind: state.QueryPage, Key: []byte("l")}},
				func(state.ScanItem) bool { return true }) // one element only
		},
		"batch": func() (bool, error) {
			reply, err := k.Node(node).Read(initCtx(k.t, 300*time.Millisecond), &cluster.ReadRequest{Route: k.route(), Queries: []state.Query{
				get, {State: k.lists, Kind: state.QueryPage, Key: []byte("l")}, {State: k.sums, Kind: state.QueryGet, Key: []byte("s")}, get}})
			if err != nil {
				return false, err
			}
			stale := len(reply.Answers[1].Elements) == 1
			for i, a := range reply.Answers {
				if reply.Errs[i] != nil {
					return false, reply.Errs[i]
				}
				stale = stale || string(a.Value) == "1"
			}
			return stale, nil
		},
		"states": func() (bool, error) {
			states, _, err := k.Node(node).States(initCtx(k.t, 300*time.Millisecond), "late")
			return len(states) == 0, err
		},
		"operations": func() (bool, error) { // served by the same confirmation; there is nothing newer to miss
			_, err := k.Node(node).Operations(initCtx(k.t, 300*time.Millisecond))
			return err == nil, err
		},
	}
}

// CL2: a leader that is cut off serves no scan, no batch of queries and no
// metadata from before what was acknowledged elsewhere.
func TestIsolatedLeaderServesNoStaleScanBatchOrMetadata(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "1"), k.appendTo("l", "1"), k.add("s", 1))
	old := k.Leader(base.SystemGroup)
	if k.Leader(1) != old { // it leads both groups, so that it could serve both
		if _, err := k.Node(k.Leader(1)).TransferLeader(k.ctx(), 1, testcluster.ID(old)); err != nil {
			t.Fatal(err)
		}
	}
	k.Eventually("one node leads both groups", func() error {
		if !k.Node(old).Leads(1) || !k.Node(old).Leads(base.SystemGroup) {
			return errors.New("not yet")
		}
		return nil
	})
	reads := k.staleReads(old)
	for name, read := range reads {
		if _, err := read(); err != nil {
			t.Fatalf("%s before the cut: %v", name, err)
		}
	}
	var others []string
	for _, i := range k.Running() {
		if i != old {
			others = append(others, string(testcluster.ID(i)))
		}
	}
	acked, stop := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	for name, read := range reads {
		wg.Add(1)
		go func() {
			defer wg.Done()
			pause := time.NewTicker(time.Millisecond) // refusals must not starve the others
			defer pause.Stop()
			for after := false; ; {
				select {
				case <-stop:
					return
				case <-acked:
					after = true
					<-pause.C
				case <-pause.C:
				}
				stale, err := read()
				if after && err == nil && stale {
					t.Errorf("%s served what was overwritten", name)
					return
				}
			}
		}()
	}
	k.Net.Isolate(string(testcluster.ID(old)), others...)
	leader := k.otherLeader(1, old)
	k.seq++
	if res := k.submit(leader, k.request(k.seq, k.put("k", "2"), k.appendTo("l", "2"), k.add("s", 1))); res.Err != nil {
		t.Fatalf("write at the new leader: %v", res.Err)
	}
	if _, _, _, err := k.Node(k.otherLeader(base.SystemGroup, old)).Declare(k.ctx(), state.Declaration{Keyspace: "late", Name: "x", Kind: state.KindValue,
		KeyType: keygroup.String, ValueType: keygroup.String}); err != nil {
		t.Fatalf("declaring at the new leader: %v", err)
	}
	close(acked)
	for start := time.Now(); time.Since(start) < time.Second; { // many reads at the old leader meanwhile
		if got := k.value("k"); got != "2" {
			t.Fatalf("the cluster serves %q", got)
		}
	}
	close(stop)
	wg.Wait()
	k.Net.HealAll()
	k.Eventually("the old leader follows", func() error { return k.level(old) })
}

// otherLeader waits until a node that is not the old one leads the group.
func (k *kit) otherLeader(g base.GroupID, old int) int {
	k.t.Helper()
	leader := -1
	k.Eventually(fmt.Sprintf("another node leads %s", g), func() error {
		for _, i := range k.Running() {
			if i != old && k.Node(i).Leads(g) {
				leader = i
				return nil
			}
		}
		return errors.New("not yet")
	})
	return leader
}
