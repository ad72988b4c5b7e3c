package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// rawReplica is a bare hashicorp/raft node in memory.
type rawReplica struct {
	id    raft.ServerID
	trans *raft.InmemTransport
	raft  *raft.Raft
	fsm   *rawFSM
}

type rawFSM struct {
	mu  sync.Mutex
	log []string
}

func (f *rawFSM) Apply(l *raft.Log) any {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, string(l.Data))
	return nil
}

func (f *rawFSM) Snapshot() (raft.FSMSnapshot, error) { return nil, errors.New("not needed") }
func (f *rawFSM) Restore(io.ReadCloser) error         { return errors.New("not needed") }

func (f *rawFSM) applied() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.log, ",")
}

// startRaw starts a replica on empty stores; with a configuration if it founds.
func startRaw(t *testing.T, id raft.ServerID, first *raft.Configuration) *rawReplica {
	t.Helper()
	r := &rawReplica{id: id, fsm: &rawFSM{}}
	_, r.trans = raft.NewInmemTransport(raft.ServerAddress(id))
	c := raft.DefaultConfig()
	c.LocalID, c.LogOutput = id, io.Discard
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = 100*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond
	store, snaps := raft.NewInmemStore(), raft.NewInmemSnapshotStore()
	if first != nil {
		if err := raft.BootstrapCluster(c, store, store, snaps, r.trans, *first); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if r.raft, err = raft.NewRaft(c, r.fsm, store, store, snaps, r.trans); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.stop(t) })
	return r
}

func (r *rawReplica) stop(t *testing.T) {
	t.Helper()
	if err := r.raft.Shutdown().Error(); err != nil {
		t.Errorf("stopping %s: %v", r.id, err)
	}
}

func connectRaw(a, b *rawReplica) {
	a.trans.Connect(raft.ServerAddress(b.id), b.trans)
	b.trans.Connect(raft.ServerAddress(a.id), a.trans)
}

func cutRaw(a, b *rawReplica) {
	a.trans.Disconnect(raft.ServerAddress(b.id))
	b.trans.Disconnect(raft.ServerAddress(a.id))
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(testcluster.Wait); !cond(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waiting until %s", what)
		}
	}
}

// The control of R3: bare raft. A write is acknowledged by {a, b} while c is cut
// off; b loses its disk and keeps its id; a is cut off. b and c then elect c,
// which never had the write. It shows what CL5 has to prevent.
func TestControlAmnesiacKeepingItsIdLosesAnAcknowledgedWrite(t *testing.T) {
	conf := &raft.Configuration{}
	for _, id := range []raft.ServerID{"n1", "n2", "n3"} {
		conf.Servers = append(conf.Servers, raft.Server{ID: id, Address: raft.ServerAddress(id)})
	}
	var all []*rawReplica
	for _, s := range conf.Servers {
		all = append(all, startRaw(t, s.ID, conf))
	}
	connectRaw(all[0], all[1])
	connectRaw(all[0], all[2])
	connectRaw(all[1], all[2])
	leader := -1
	eventually(t, "a bare replica leads", func() bool {
		for i, r := range all {
			if r.raft.State() == raft.Leader {
				leader = i
			}
		}
		return leader >= 0
	})
	a, b, c := all[leader], all[(leader+1)%3], all[(leader+2)%3]
	if err := a.raft.Apply([]byte("first"), time.Second).Error(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "c has the first write", func() bool { return c.fsm.applied() == "first" })
	cutRaw(c, a)
	cutRaw(c, b)
	if err := a.raft.Apply([]byte("acknowledged"), time.Second).Error(); err != nil {
		t.Fatalf("the write of {a, b}: %v", err)
	}
	b.stop(t)
	cutRaw(a, b)
	wiped := startRaw(t, b.id, nil)
	connectRaw(wiped, c)
	eventually(t, "c leads with the vote of the wiped replica", func() bool { return c.raft.State() == raft.Leader })
	if err := c.raft.Barrier(testcluster.Wait).Error(); err != nil {
		t.Fatalf("c does not lead: %v", err)
	}
	if got := c.fsm.applied(); got != "first" {
		t.Fatalf("the new leader has %q: the control does not show the loss", got)
	}
	if err := c.raft.Apply([]byte("other"), time.Second).Error(); err != nil {
		t.Fatalf("a write in place of the lost one: %v", err)
	}
	if got := c.fsm.applied(); got != "first,other" {
		t.Fatalf("the new leader has %q", got)
	}
}

// nobodyLeads looks at every change of metadata and leaders for a while, and
// fails when one of the nodes leads a group.
func (k *kit) nobodyLeads(d time.Duration, group base.GroupID, nodes ...int) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, i := range nodes {
			if k.Node(i).Leads(group) {
				k.t.Fatalf("node %s leads %s", testcluster.ID(i), group)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// R3, CL5: the same as the control, with our nodes. The one that lost its log
// helps nobody to lead without the acknowledged write; it comes back under a new
// replica id, and the write is there.
func TestAmnesiacDoesNotElectALeaderWithoutAnAcknowledgedWrite(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		k.mustWrite(k.put("k", "first"))
		a := k.Leader(1)
		b, c := (a+1)%3, (a+2)%3
		idA, idB, idC := string(testcluster.ID(a)), string(testcluster.ID(b)), string(testcluster.ID(c))
		k.Net.Isolate(idC, idA, idB)
		k.seq++
		if res := k.submit(a, k.request(k.seq, k.put("k", "acknowledged"), k.add("s", 1))); res.Err != nil {
			t.Fatalf("the write of {a, b}: %v", res.Err)
		}
		k.Stop(b)
		remove(t, filepath.Join(k.Dir(b), "raftlog"))
		k.Net.Isolate(idA, idB, idC)
		k.Net.Heal(idB, idC)
		k.Start(b)
		// Ten election timeouts: bare raft needs two.
		k.nobodyLeads(1500*time.Millisecond, 1, b, c)
		if _, err := k.readAt(c, 100*time.Millisecond, state.Query{State: k.values, Kind: state.QueryGet, Key: []byte("k")}); err == nil {
			t.Fatal("a node without the acknowledged write served a read")
		}
		if ok, why := k.Node(b).Ready(); ok || why == "" {
			t.Fatalf("the node without its log says ready %v, %q", ok, why)
		}
		if k.Node(b).Leads(base.SystemGroup) || k.Node(c).Leads(base.SystemGroup) {
			t.Fatal("the system group has a leader with the vote of the amnesiac")
		}
		k.Net.HealAll()
		k.WaitReady()
		if got := k.value("k"); got != "acknowledged" {
			t.Fatalf("the value is %q", got)
		}
		k.Eventually("the amnesiac is a voter under a new id", func() error {
			if gen := k.generation(b); gen < 2 {
				return fmt.Errorf("generation %d", gen)
			}
			return k.votes(b)
		})
		k.checkHashes()
		if gen := k.generation(c); gen != 1 {
			t.Fatalf("the node that was only cut off is generation %d", gen)
		}
		// It counts again: with it and c alone, the write is there.
		k.Stop(a)
		if got := k.value("k"); got != "acknowledged" {
			t.Fatalf("the value at the rebuilt majority is %q", got)
		}
	})
}

// R3: when two of three lose their logs, the write may be on the third only.
// Nothing is served and nothing founded anew; the nodes say why.
func TestMajorityWithoutLogsStaysUnavailable(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.put("k", "acknowledged"))
	for i := range 3 {
		k.Stop(i)
	}
	remove(t, filepath.Join(k.Dir(0), "raftlog"))
	remove(t, filepath.Join(k.Dir(1), "raftlog"))
	for i := range 3 {
		k.Start(i)
	}
	for _, g := range []base.GroupID{base.SystemGroup, 1} {
		k.nobodyLeads(time.Second, g, 0, 1, 2)
	}
	for i := range 3 {
		ok, why := k.Node(i).Ready()
		// The third knows its shard and cannot know what was committed in it.
		want := []string{"log was lost", "no leader of the system group"}
		if i == 2 {
			want = []string{"leader"}
		}
		if ok || slices.ContainsFunc(want, func(s string) bool { return !strings.Contains(why, s) }) {
			t.Errorf("node %d says ready %v, %q", i, ok, why)
		}
		if err := k.Node(i).Live(); err != nil {
			t.Errorf("node %d waits for its peers and says it is not alive: %v", i, err)
		}
		if _, err := k.readAt(i, 200*time.Millisecond, state.Query{State: k.values, Kind: state.QueryGet, Key: []byte("k")}); err == nil {
			t.Errorf("node %d served a read", i)
		}
		if res := k.submit(i, k.request(k.seq+1, k.put("k", "lost"))); res.Err == nil || base.OutcomeOf(res.Err) != base.OutcomeNotApplied {
			t.Errorf("node %d answered a write with %v", i, res.Err)
		}
	}
}

// R3, B24: a founder that loses its log before the founding has ended does not
// found the system group a second time under the same cluster id.
func TestFounderWithoutItsLogDoesNotFoundAgain(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Unfounded: true})
	k.Stop(2)
	reply, err := k.Node(0).Init(initCtx(t, 2*time.Second), k.Spec())
	if err != nil || reply.Phase != "admit" {
		t.Fatalf("init with a missing node: %+v, %v", reply, err)
	}
	k.Eventually("the second node has the founding", func() error {
		_, err := k.Node(1).Topology(k.ctx(), 1)
		return err
	})
	k.Stop(0)
	remove(t, filepath.Join(k.Dir(0), "raftlog"))
	k.Start(0)
	k.nobodyLeads(time.Second, base.SystemGroup, 0)
	if reply, err := k.Node(0).Init(initCtx(t, time.Second), k.Spec()); err == nil && reply.Phase == "done" {
		t.Fatalf("founded again: %+v", reply)
	}
}

// R3, B08: an older copy of the log is put back at one of the two replicas that
// hold an acknowledged write, and a crash stops its exchange. The node does not
// follow the copy afterwards, so the third replica is not elected without the
// write.
func TestOlderLogAfterACrashElectsNobodyWithoutAnAcknowledgedWrite(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Nodes: 5, Replication: 3})
	k.mustWrite(k.put("k", "first"))
	a := k.Leader(1)
	var shard, rest []int
	for i := range 5 {
		switch {
		case i == a:
		case k.generation(i) > 0:
			shard = append(shard, i)
		default:
			rest = append(rest, i)
		}
	}
	b, c := shard[0], shard[1]
	id := func(i int) string { return string(testcluster.ID(i)) }
	for _, i := range shard {
		k.Eventually("the follower has the first write", func() error { return k.level(i) })
	}
	k.Stop(b)
	saved := t.TempDir()
	copyDir(t, k.Dir(b), saved)
	k.Start(b)
	k.WaitReady()
	if now := k.Leader(1); now != a {
		if _, err := k.Node(now).TransferLeader(k.ctx(), 1, testcluster.ID(a)); err != nil {
			t.Fatal(err)
		}
		k.Eventually("the first leader leads again", func() error {
			if !k.Node(a).Leads(1) {
				return errors.New("not yet")
			}
			return nil
		})
	}
	k.Net.Isolate(id(c), id(a), id(b))
	k.seq++
	if res := k.submit(a, k.request(k.seq, k.put("k", "acknowledged"))); res.Err != nil {
		t.Fatalf("the write of {a, b}: %v", res.Err)
	}
	k.Stop(b)
	replace(t, filepath.Join(k.Dir(b), "raftlog"), filepath.Join(saved, "raftlog"))
	if err := cluster.ForgetRaftLog(k.Dir(b), testcluster.ID(b), "mem"); err != nil {
		t.Fatal(err)
	}
	k.Net.Isolate(id(a), id(b), id(c), id(rest[0]), id(rest[1]))
	k.Net.Heal(id(b), id(c))
	k.Start(b)
	k.nobodyLeads(1500*time.Millisecond, 1, b, c)
	k.Net.HealAll()
	k.WaitReady()
	if got := k.value("k"); got != "acknowledged" {
		t.Fatalf("the value is %q", got)
	}
	k.Eventually("the node with the old log is a voter under a new id", func() error {
		if gen := k.generation(b); gen < 2 {
			return fmt.Errorf("generation %d", gen)
		}
		return k.votes(b)
	})
}
