package transport

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

// termServer answers polls with one term for every group.
type termServer struct {
	term, polls, groups atomic.Uint64
}

func (s *termServer) answer(groups []base.GroupID) []TermAnswer {
	s.polls.Add(1)
	s.groups.Add(uint64(len(groups)))
	out := make([]TermAnswer, len(groups))
	for i, g := range groups {
		out[i] = TermAnswer{Known: true, Replica: "b/1", Term: s.term.Load() + uint64(g), LastIndex: 9, WallClock: 77}
	}
	return out
}

// TestPollStalledAnswers is TR6, the stalled leader with buffered answers: the
// answer to a poll that was sent before a read arrived is delivered after it,
// and must not serve it.
func TestPollStalledAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New(1)
		a, b := startNode(t, n, "a"), startNode(t, n, "b")
		s := new(termServer)
		s.term.Store(1)
		b.HandlePoll(s.answer)
		p := NewPoller(a.Transport, PollerOptions{Timeout: time.Minute})
		if got, err := p.Poll(ctxFor(t, time.Second), "b", 0); err != nil || got.Term != 1 {
			t.Fatalf("%+v, %v", got, err)
		}
		n.Block("b", "a") // b answers, the answers are held
		early := p.PollNodes(0, []base.NodeID{"b"})
		synctest.Wait()
		if s.polls.Load() != 2 || n.Held("b", "a") == 0 {
			t.Fatalf("%d polls, %d bytes held", s.polls.Load(), n.Held("b", "a"))
		}
		s.term.Store(2) // b votes for a new leader, which commits a write
		late := p.PollNodes(0, []base.NodeID{"b"})
		synctest.Wait()
		more := p.PollNodes(0, []base.NodeID{"b"}) // waits: both rounds are taken
		synctest.Wait()
		n.Unblock("b", "a")
		if r := <-early; r.Err != nil || r.Answer.Term != 1 {
			t.Fatalf("early: %+v", r)
		}
		if r := <-late; r.Err != nil || r.Answer.Term != 2 {
			t.Fatalf("a read was served by an answer older than itself: %+v", r)
		}
		if r := <-more; r.Err != nil || r.Answer.Term != 2 {
			t.Fatalf("a read was served by an answer older than itself: %+v", r)
		}
		if s.polls.Load() != 4 {
			t.Fatalf("%d polls", s.polls.Load())
		}
	})
}

// TestPollNeverStale: many readers, a term that grows, delays: what a read gets
// is never below the term at its arrival.
func TestPollNeverStale(t *testing.T) {
	n := memnet.New(3)
	a, b := startNode(t, n, "a"), startNode(t, n, "b")
	n.SetDelay("a", "b", 0, 300*time.Microsecond)
	n.SetDelay("b", "a", 0, 300*time.Microsecond)
	s := new(termServer)
	b.HandlePoll(s.answer)
	p := NewPoller(a.Transport, PollerOptions{Timeout: 20 * time.Second})
	var wg sync.WaitGroup
	var reads atomic.Uint64
	for w := range 32 {
		wg.Go(func() {
			for i := range 50 {
				g := base.GroupID((w + i) % 5)
				before := s.term.Add(1)
				got, err := p.Poll(ctxFor(t, 20*time.Second), "b", g)
				if err != nil || got.Term < before+uint64(g) {
					t.Errorf("read at term %d got %+v, %v", before, got, err)
					return
				}
				reads.Add(1)
			}
		})
	}
	wg.Wait()
	if polls := s.polls.Load(); polls > reads.Load()/3 || s.groups.Load() > 5*polls {
		t.Errorf("%d reads took %d polls for %d groups: nothing was shared", reads.Load(), polls, s.groups.Load())
	}
}

func TestPollFailures(t *testing.T) {
	n := memnet.New(1)
	a, b := startNode(t, n, "a"), startNode(t, n, "b")
	p := NewPoller(a.Transport, PollerOptions{Timeout: 100 * time.Millisecond})
	poll := func(node base.NodeID, g base.GroupID) (TermAnswer, error) {
		return p.Poll(ctxFor(t, 5*time.Second), node, g)
	}
	_, err := poll("b", 7)
	wantIs(t, err, base.ErrNotReady) // nobody answers polls there
	b.HandlePoll(func([]base.GroupID) []TermAnswer { return nil })
	_, err = poll("b", 7)
	wantIs(t, err, base.ErrInternal)
	s := new(termServer)
	a.HandlePoll(s.answer)
	b.HandlePoll(s.answer)
	gb := b.group(t, 7, GroupOptions{})
	ga := a.group(t, 7, GroupOptions{})
	for _, node := range []base.NodeID{"a", "b"} {
		if got, err := poll(node, 7); err != nil || !got.Known || got.Replica != "b/1" || got.LastIndex != 9 {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	// What is muted must not count, but its clock may.
	gb.muted.Store(true)
	if got, err := poll("b", 7); err != nil || got != (TermAnswer{WallClock: 77}) {
		t.Fatalf("muted group: %+v, %v", got, err)
	}
	gb.muted.Store(false)
	b.Mute(true)
	if got, err := poll("b", 8); err != nil || got.Known {
		t.Fatalf("muted node: %+v, %v", got, err)
	}
	b.Mute(false)
	ga.muted.Store(true)
	_, err = poll("b", 7)
	wantIs(t, err, base.ErrNotReady)
	ga.muted.Store(false)
	a.Mute(true)
	_, err = poll("b", 8)
	wantIs(t, err, base.ErrNotReady)
	a.Mute(false)
	// Each node's result comes once; a node that is cut off fails.
	n.Block("a", "b")
	got := map[base.NodeID]bool{}
	out := p.PollNodes(8, []base.NodeID{"a", "b", "nowhere"})
	for range 3 {
		r := <-out
		got[r.Node] = r.Err == nil
	}
	if len(got) != 3 || !got["a"] || got["b"] || got["nowhere"] {
		t.Fatalf("got %v", got)
	}
}

// TestPollManyGroups: more groups than one request holds go into several.
func TestPollManyGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New(1)
		a, b := startNode(t, n, "a"), startNode(t, n, "b")
		s := new(termServer)
		b.HandlePoll(s.answer)
		p := NewPoller(a.Transport, PollerOptions{Rounds: 1, Timeout: time.Minute})
		n.Block("a", "b")
		var outs []<-chan PollResult
		for g := range base.GroupID(maxPollGroups + 10) {
			outs = append(outs, p.PollNodes(g, []base.NodeID{"b"}))
		}
		n.Unblock("a", "b")
		for g, out := range outs {
			if r := <-out; r.Err != nil || r.Answer.Term != uint64(g) {
				t.Fatalf("group %d: %+v", g, r)
			}
		}
	})
}
