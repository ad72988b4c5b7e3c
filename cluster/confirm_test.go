package cluster

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/internal/base"
)

// fakePoller answers for every voter as the test says.
type fakePoller struct {
	mu    sync.Mutex
	term  map[base.NodeID]uint64
	hangs map[base.NodeID]bool
	asked []base.NodeID
}

func (p *fakePoller) Poll(ctx context.Context, node base.NodeID, _ base.GroupID) (transport.TermAnswer, error) {
	p.mu.Lock()
	p.asked = append(p.asked, node)
	term, hangs := p.term[node], p.hangs[node]
	p.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return transport.TermAnswer{}, ctx.Err()
	}
	if term == 0 {
		return transport.TermAnswer{}, base.ErrUnavailable
	}
	return transport.TermAnswer{Known: true, Replica: base.ReplicaID(node), Term: term}, nil
}

// take returns who was asked since the last time.
func (p *fakePoller) take() map[base.NodeID]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[base.NodeID]bool{}
	for _, n := range p.asked {
		out[n] = true
	}
	p.asked = nil
	return out
}

// CL2: as many voters as are needed confirm, no more are asked, and one that is
// slow, gone or of a newer term costs one round at most: the others are asked,
// and it is not asked first again.
func TestConfirmationAsksWhoIsNeeded(t *testing.T) {
	const own = 3
	p := &fakePoller{term: map[base.NodeID]uint64{}, hangs: map[base.NodeID]bool{}}
	var voters []raft.Server
	for i := range 5 {
		id := fmt.Sprintf("n%d", i)
		voters = append(voters, raft.Server{ID: raft.ServerID(id), Address: raft.ServerAddress(id), Suffrage: raft.Voter})
		p.term[base.NodeID(id)] = own
	}
	g := &group{replica: "n0", poll: p, opts: &Options{ElectionTimeout: 250 * time.Millisecond}}
	ask := func(need, granted, asked int) map[base.NodeID]bool {
		t.Helper()
		if got := g.askVoters(context.Background(), voters, own, need); got != granted {
			t.Fatalf("%d granted, want %d", got, granted)
		}
		// Where a quorum is reached without the last, its question is under way.
		waitFor(t, func() bool { p.mu.Lock(); defer p.mu.Unlock(); return len(p.asked) >= asked })
		who := p.take()
		if len(who) != asked || who["n0"] {
			t.Fatalf("%v were asked, want %d", who, asked)
		}
		return who
	}
	ask(2, 2, 2)
	first := ask(2, 2, 2)
	for node := range first { // one of those that are asked first has voted in a newer term
		p.term[node] = own + 1
		break
	}
	ask(2, 2, 4)
	var hung base.NodeID
	for node := range ask(2, 2, 2) {
		if p.term[node] != own {
			t.Fatalf("%s refused, and is asked first again", node)
		}
		hung = node
	}
	p.hangs[hung] = true
	start := time.Now()
	ask(2, 2, 4)
	if took := time.Since(start); took < hedgeAfter {
		t.Fatalf("the others were asked after %v", took)
	}
	if who := ask(2, 2, 2); who[hung] {
		t.Fatalf("%v: %s hangs, and is asked first again", who, hung)
	}
	// Without a quorum it ends with what it has.
	for node := range p.term {
		if !p.hangs[node] {
			p.term[node] = 0
		}
	}
	p.hangs[hung] = false
	ask(2, 1, 4)
}
