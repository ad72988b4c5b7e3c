package transport

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

// slowStable is a StableStore whose writes of the term take 1 to 8 ms, as an
// fsync does.
type slowStable struct {
	*raft.InmemStore
	slow bool
}

func (s *slowStable) SetUint64(key []byte, v uint64) error {
	if s.slow && string(key) == "CurrentTerm" {
		<-time.After(time.Millisecond + rand.N(7*time.Millisecond)) // what the race needs
	}
	return s.InmemStore.SetUint64(key, v)
}

func (s *slowStable) term() uint64 {
	v, err := s.InmemStore.GetUint64([]byte("CurrentTerm"))
	if err != nil {
		return 0
	}
	return v
}

// nothingFSM keeps the last command only.
type nothingFSM struct{ last atomic.Uint64 }

func (f *nothingFSM) Apply(l *raft.Log) any {
	if len(l.Data) == 8 {
		f.last.Store(binary.LittleEndian.Uint64(l.Data))
	}
	return nil
}
func (f *nothingFSM) Snapshot() (raft.FSMSnapshot, error) {
	return nil, fmt.Errorf("no snapshots here")
}
func (f *nothingFSM) Restore(r io.ReadCloser) error { return r.Close() }

func quietConfig(id string, timeout time.Duration) *raft.Config {
	c := raft.DefaultConfig()
	c.LocalID = raft.ServerID(id)
	c.Logger = hclog.NewNullLogger()
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = timeout, timeout, timeout
	c.CommitTimeout = 10 * time.Millisecond
	return c
}

// termRace plays the race of rule R1 against one voter: a vote for term T+2
// and a heartbeat of the leader of term T+1 reach it at once. It returns how
// many votes were granted and how often the voter ended below the term that it
// had granted its vote for.
func termRace(t *testing.T, rounds int, voterTrans raft.Transport, stable *slowStable, addr raft.ServerAddress, peer raft.Transport) (granted, regressed int) {
	t.Helper()
	servers := raft.Configuration{Servers: []raft.Server{{ID: "v", Address: addr}, {ID: "x", Address: "x"}, {ID: "y", Address: "y"}}}
	conf := quietConfig("v", time.Hour)
	if err := raft.BootstrapCluster(conf, stable, stable, raft.NewInmemSnapshotStore(), voterTrans, servers); err != nil {
		t.Fatal(err)
	}
	v, err := raft.NewRaft(conf, new(nothingFSM), stable, stable, raft.NewInmemSnapshotStore(), voterTrans)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := v.Shutdown().Error(); err != nil {
			t.Error(err)
		}
	}()
	h := func(id string) raft.RPCHeader {
		return raft.RPCHeader{ProtocolVersion: 3, ID: []byte(id), Addr: []byte(id)}
	}
	for i := range rounds {
		term := uint64(10 + 3*i)
		var vote raft.RequestVoteResponse
		var beat raft.AppendEntriesResponse
		stable.slow = false
		if err := peer.AppendEntries("v", addr, &raft.AppendEntriesRequest{RPCHeader: h("x"), Term: term}, &beat); err != nil {
			t.Fatal(err)
		}
		stable.slow = true
		var wg sync.WaitGroup
		wg.Go(func() {
			err = peer.AppendEntries("v", addr, &raft.AppendEntriesRequest{RPCHeader: h("x"), Term: term + 1}, &beat)
		})
		wg.Go(func() {
			_ = peer.RequestVote("v", addr, &raft.RequestVoteRequest{RPCHeader: h("y"), Term: term + 2, LastLogIndex: 1 << 20, LastLogTerm: term, LeadershipTransfer: true}, &vote)
		})
		wg.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if vote.Granted {
			granted++
			if stable.term() < term+2 {
				regressed++
			}
		}
	}
	return granted, regressed
}

// TestTermRace is rule R1: with our transport the term of a voter never goes
// back. The control is raft's own transport, which installs the heartbeat fast
// path: there it does, so the test would notice it.
func TestTermRace(t *testing.T) {
	t.Run("ours", func(t *testing.T) {
		n := memnet.New(1)
		v, x := startNode(t, n, "v"), startNode(t, n, "x")
		gv, gx := v.group(t, 7, GroupOptions{Local: "v"}), x.group(t, 7, GroupOptions{})
		granted, regressed := termRace(t, 200, gv, &slowStable{InmemStore: raft.NewInmemStore()}, "v", gx)
		t.Logf("%d votes granted, %d terms went back", granted, regressed)
		if granted < 100 || regressed != 0 {
			t.Fatalf("%d votes granted, %d terms went back", granted, regressed)
		}
	})
	t.Run("control", func(t *testing.T) {
		mk := func() *raft.NetworkTransport {
			tr, err := raft.NewTCPTransportWithLogger("127.0.0.1:0", nil, 4, 5*time.Second, hclog.NewNullLogger())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = tr.Close() })
			return tr
		}
		v, x := mk(), mk()
		granted, regressed := termRace(t, 200, v, &slowStable{InmemStore: raft.NewInmemStore()}, v.LocalAddr(), x)
		t.Logf("%d votes granted, %d terms went back", granted, regressed)
		if regressed == 0 {
			t.Fatal("the control shows no race: this test proves nothing any more")
		}
	})
}

// replicaRig is one raft replica over our transport.
type replicaRig struct {
	node   *testNode
	group  *Group
	raft   *raft.Raft
	fsm    *nothingFSM
	stable *slowStable
}

func startReplicas(t *testing.T, n *memnet.Network, timeouts map[base.NodeID]time.Duration, change ...func(*Options)) map[base.NodeID]*replicaRig {
	t.Helper()
	var servers raft.Configuration
	for _, id := range []base.NodeID{"a", "b", "c"} {
		servers.Servers = append(servers.Servers, raft.Server{ID: raft.ServerID(id + "/1"), Address: raft.ServerAddress(id)})
	}
	out := make(map[base.NodeID]*replicaRig)
	for id, timeout := range timeouts {
		r := &replicaRig{node: startNode(t, n, id, change...), fsm: new(nothingFSM), stable: &slowStable{InmemStore: raft.NewInmemStore()}}
		r.group = r.node.group(t, 7, GroupOptions{Local: raft.ServerID(id + "/1")})
		conf := quietConfig(string(id)+"/1", timeout)
		snaps := raft.NewInmemSnapshotStore()
		if err := raft.BootstrapCluster(conf, r.stable, r.stable, snaps, r.group, servers); err != nil {
			t.Fatal(err)
		}
		var err error
		if r.raft, err = raft.NewRaft(conf, r.fsm, r.stable, r.stable, snaps, r.group); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			done := r.raft.Shutdown()
			r.group.Close() // ends what waits for a peer
			if err := done.Error(); err != nil {
				t.Error(err)
			}
		})
		r.node.HandlePoll(func(groups []base.GroupID) []TermAnswer {
			out := make([]TermAnswer, len(groups))
			for i := range out {
				out[i] = TermAnswer{Known: true, Replica: base.ReplicaID(id + "/1"), Term: r.stable.term()}
			}
			return out
		})
		out[id] = r
	}
	return out
}

func apply(t *testing.T, r *raft.Raft, v uint64) {
	t.Helper()
	if err := r.Apply(binary.LittleEndian.AppendUint64(nil, v), 10*time.Second).Error(); err != nil {
		t.Fatal(err)
	}
}

// TestVerifyLeaderCountsOldAnswers: a stalled leader, whose followers' answers
// are buffered, is deposed; another leader commits a write; then a read arrives
// at the old leader and the buffered answers are delivered. raft's VerifyLeader
// counts them and would serve the old value; a term poll does not.
func TestVerifyLeaderCountsOldAnswers(t *testing.T) {
	n := memnet.New(1)
	// The old leader never notices by itself: its lease outlives the test, as
	// that of a paused process would.
	var deposed atomic.Bool // b and c cannot dial a: only old answers are on their way
	patient := func(o *Options) {
		o.PingInterval, o.AppendTimeout = time.Minute, time.Minute
		known := o.Resolver
		own := o.Identity.Node
		o.Resolver = func(id base.NodeID) (string, bool) {
			addr, ok := known(id)
			return addr, ok && !(deposed.Load() && id == "a" && own != "a")
		}
	}
	rigs := startReplicas(t, n, map[base.NodeID]time.Duration{"a": time.Minute, "b": 300 * time.Millisecond, "c": 300 * time.Millisecond}, patient)
	a := rigs["a"]
	leads := func(id base.NodeID) bool { return rigs[id].raft.State() == raft.Leader }
	eventually(t, "a leader", func() bool { return leads("b") || leads("c") || leads("a") })
	eventually(t, "a to lead", func() bool {
		for _, id := range []base.NodeID{"b", "c"} {
			if leads(id) {
				_ = rigs[id].raft.LeadershipTransferToServer("a/1", "a").Error()
			}
		}
		return leads("a")
	})
	apply(t, a.raft, 1)
	eventually(t, "everybody to have the value", func() bool {
		return a.fsm.last.Load() == 1 && rigs["b"].fsm.last.Load() == 1 && rigs["c"].fsm.last.Load() == 1
	})

	deposed.Store(true)
	for _, id := range []base.NodeID{"b", "c"} {
		for _, l := range rigs[id].node.peer("a").lanes() {
			l.closeConn(base.ErrClosed)
		}
	}
	// Answers to a are held; a goes on to send heartbeats and appends.
	n.Block("b", "a")
	n.Block("c", "a")
	eventually(t, "buffered answers", func() bool { return n.Held("b", "a") > 200 && n.Held("c", "a") > 200 })
	n.Block("a", "b")
	n.Block("a", "c")
	eventually(t, "another leader", func() bool { return leads("b") || leads("c") })
	next := rigs["b"]
	if leads("c") {
		next = rigs["c"]
	}
	apply(t, next.raft, 2)

	// The read arrives at a now. Nothing that a sends arrives, only old answers.
	term := a.stable.term()
	p := NewPoller(a.node.Transport, PollerOptions{Timeout: 2 * time.Second})
	polled := p.PollNodes(7, []base.NodeID{"b", "c"})
	verified := make(chan error, 1)
	verify := a.raft.VerifyLeader()
	go func() { verified <- verify.Error() }()
	// Nothing shows when raft's main loop has taken the request. If that takes
	// longer than this, the answers come too early and the test fails below.
	<-time.After(200 * time.Millisecond)
	n.Unblock("b", "a")
	n.Unblock("c", "a")
	select {
	case err := <-verified:
		if err != nil {
			t.Fatalf("the control failed: VerifyLeader noticed (%v); this test proves nothing any more", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the control failed: VerifyLeader did not count the buffered answers")
	}
	if got := a.fsm.last.Load(); got != 1 {
		t.Fatalf("the old leader has value %d", got)
	}
	deposed.Store(false)
	n.HealAll() // now the polls get through, and tell the newer term
	for range 2 {
		if r := <-polled; r.Err == nil && r.Answer.Term <= term {
			t.Fatalf("a poll let the stale read pass: %+v, our term %d", r, term)
		}
	}
	eventually(t, "a to follow", func() bool { return !leads("a") && a.fsm.last.Load() == 2 })
}

// TestRaftOverFaults: three replicas over a faulty network stay one group.
func TestRaftOverFaults(t *testing.T) {
	n := memnet.New(9)
	rigs := startReplicas(t, n, map[base.NodeID]time.Duration{"a": 200 * time.Millisecond, "b": 200 * time.Millisecond, "c": 200 * time.Millisecond})
	for _, x := range []string{"a", "b", "c"} {
		for _, y := range []string{"a", "b", "c"} {
			if x != y {
				n.SetDelay(x, y, 0, 2*time.Millisecond)
				n.SetCutOneIn(x, y, 400)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	good := uint64(0)
	for v := uint64(1); ctx.Err() == nil && good < 300; v++ {
		for _, r := range rigs {
			if r.raft.State() == raft.Leader && r.raft.Apply(binary.LittleEndian.AppendUint64(nil, v), time.Second).Error() == nil {
				good++
			}
		}
	}
	if good < 20 {
		t.Fatalf("only %d writes", good)
	}
	n.HealAll()
	eventually(t, "equal replicas", func() bool {
		want := rigs["a"].fsm.last.Load()
		return want > 0 && rigs["b"].fsm.last.Load() == want && rigs["c"].fsm.last.Load() == want
	})
}
