package transport

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

// TestRaftMessages: every message arrives as sent, with its answer.
func TestRaftMessages(t *testing.T) {
	n := memnet.New(1)
	a, b := startNode(t, n, "a"), startNode(t, n, "b")
	ga := a.group(t, 7, GroupOptions{Local: "a/1"})
	gb := b.group(t, 7, GroupOptions{Local: "b/1"})
	seen := make(chan any, 1)
	serve(t, gb, func(rpc raft.RPC) {
		seen <- rpc.Command
		switch rpc.Command.(type) {
		case *raft.AppendEntriesRequest:
			rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: header("b"), Term: 3, LastLog: 9, Success: true, NoRetryBackoff: true}, nil)
		case *raft.RequestVoteRequest:
			rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header("b"), Term: 4, Granted: true}, nil)
		case *raft.RequestPreVoteRequest:
			rpc.Respond(&raft.RequestPreVoteResponse{RPCHeader: header("b"), Term: 5, Granted: true}, nil)
		case *raft.TimeoutNowRequest:
			rpc.Respond(&raft.TimeoutNowResponse{RPCHeader: header("b")}, nil)
		}
	})
	at := time.Unix(5, 6)
	ae := &raft.AppendEntriesRequest{RPCHeader: header("a"), Term: 3, PrevLogEntry: 8, PrevLogTerm: 2, LeaderCommitIndex: 7, Entries: []*raft.Log{
		{Index: 9, Term: 3, Type: raft.LogCommand, Data: []byte("x"), Extensions: []byte("y"), AppendedAt: at}}}
	var aer raft.AppendEntriesResponse
	if err := ga.AppendEntries("b/1", "b", ae, &aer); err != nil {
		t.Fatal(err)
	}
	if got := (<-seen).(*raft.AppendEntriesRequest); fmt.Sprintf("%+v %+v", *got.Entries[0], got.RPCHeader) != fmt.Sprintf("%+v %+v", *ae.Entries[0], ae.RPCHeader) || got.PrevLogEntry != 8 || got.LeaderCommitIndex != 7 {
		t.Fatalf("got %+v", got)
	}
	if !aer.Success || aer.Term != 3 || aer.LastLog != 9 || !aer.NoRetryBackoff || string(aer.ID) != "b/1" {
		t.Fatalf("got %+v", aer)
	}
	var vr raft.RequestVoteResponse
	if err := ga.RequestVote("b/1", "b", &raft.RequestVoteRequest{RPCHeader: header("a"), Term: 4, LeadershipTransfer: true}, &vr); err != nil || !vr.Granted || vr.Term != 4 {
		t.Fatalf("%+v, %v", vr, err)
	}
	if got := (<-seen).(*raft.RequestVoteRequest); !got.LeadershipTransfer || got.Term != 4 {
		t.Fatalf("got %+v", got)
	}
	var pr raft.RequestPreVoteResponse
	if err := ga.RequestPreVote("b/1", "b", &raft.RequestPreVoteRequest{RPCHeader: header("a"), Term: 5}, &pr); err != nil || !pr.Granted {
		t.Fatalf("%+v, %v", pr, err)
	}
	<-seen
	if err := ga.TimeoutNow("b/1", "b", &raft.TimeoutNowRequest{RPCHeader: header("a")}, new(raft.TimeoutNowResponse)); err != nil {
		t.Fatal(err)
	}
	<-seen
	// Into the replica's own transport, without the network.
	if err := gb.TimeoutNow("b/1", "b", &raft.TimeoutNowRequest{RPCHeader: header("b")}, new(raft.TimeoutNowResponse)); err != nil {
		t.Fatal(err)
	}
	<-seen
	// TR3 and an unknown group.
	wantIs(t, ga.RequestVote("b/0", "b", &raft.RequestVoteRequest{RPCHeader: header("a")}, &vr), base.ErrIdentity)
	g8 := a.group(t, 8, GroupOptions{})
	wantIs(t, g8.RequestVote("b/1", "b", &raft.RequestVoteRequest{RPCHeader: header("a")}, &vr), base.ErrNoSuchShard)
	if _, err := a.Group(8, GroupOptions{}); err == nil {
		t.Fatal("a group was registered twice")
	}
	g8.Close()
	a.group(t, 8, GroupOptions{}).Close()
}

// TestLargeAppendIsSplit: the parts follow each other and the caller sees one.
func TestLargeAppendIsSplit(t *testing.T) {
	n := memnet.New(1)
	a, b := startNode(t, n, "a"), startNode(t, n, "b")
	ga, gb := a.group(t, 7, GroupOptions{}), b.group(t, 7, GroupOptions{})
	var last, parts atomic.Uint64
	last.Store(10)
	serve(t, gb, func(rpc raft.RPC) {
		m := rpc.Command.(*raft.AppendEntriesRequest)
		ok := m.PrevLogEntry == last.Load()
		if ok && len(m.Entries) > 0 {
			last.Store(m.Entries[len(m.Entries)-1].Index)
		}
		parts.Add(1)
		rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: header("b"), Term: 1, LastLog: last.Load(), Success: ok}, nil)
	})
	big := func(prev uint64) *raft.AppendEntriesRequest {
		m := &raft.AppendEntriesRequest{RPCHeader: header("a"), Term: 1, PrevLogEntry: prev, PrevLogTerm: 1}
		for i := uint64(1); i <= 6; i++ {
			m.Entries = append(m.Entries, &raft.Log{Index: prev + i, Term: 1, Data: bytes.Repeat([]byte{byte(i)}, 3<<20)})
		}
		return m
	}
	var resp raft.AppendEntriesResponse
	if err := ga.AppendEntries("b/1", "b", big(10), &resp); err != nil || !resp.Success || last.Load() != 16 || parts.Load() != 6 {
		t.Fatalf("%+v, %v, last %d, parts %d", resp, err, last.Load(), parts.Load())
	}
	p, err := ga.AppendEntriesPipeline("b/1", "b")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, prev := range []uint64{16, 22, 3} {
		if _, err := p.AppendEntries(big(prev), new(raft.AppendEntriesResponse)); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []bool{true, true, false} {
		if f := answered(t, p); f.Error() != nil || f.Response().Success != want {
			t.Fatalf("append %d: %v, %+v", i, f.Error(), f.Response())
		}
	}
}

// answered waits for the next answer of a pipeline that must not end.
func answered(t *testing.T, p raft.AppendPipeline) raft.AppendFuture {
	t.Helper()
	select {
	case f := <-p.Consumer():
		return f
	case <-p.(*pipeline).done:
		t.Fatalf("the pipeline ended: %v", p.(*pipeline).why())
	case <-time.After(20 * time.Second):
		t.Fatal("no answer came")
	}
	return nil
}

// TestNoHeadOfLineBlocking is TR5: while a peer's group is stuck with a full
// window of large appends, heartbeats of other groups and votes of the same
// group get through.
func TestNoHeadOfLineBlocking(t *testing.T) {
	n := memnet.New(1)
	n.SetWindow(64 << 10)
	a, b := startNode(t, n, "a"), startNode(t, n, "b")
	ga, gb := a.group(t, 1, GroupOptions{}), b.group(t, 1, GroupOptions{})
	ga2, gb2 := a.group(t, 3, GroupOptions{}), b.group(t, 3, GroupOptions{}) // same append connection
	hold := make(chan struct{})
	entered := make(chan struct{}, 100)
	serve(t, gb, func(rpc raft.RPC) {
		if m, ok := rpc.Command.(*raft.AppendEntriesRequest); ok {
			if len(m.Entries) > 0 {
				entered <- struct{}{}
				<-hold
			}
			rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: header("b"), Success: true}, nil)
			return
		}
		rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header("b"), Granted: true}, nil)
	})
	serve(t, gb2, func(rpc raft.RPC) {
		rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: header("b"), Success: true}, nil)
	})
	p, err := ga.AppendEntriesPipeline("b/1", "b")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for i := uint64(1); i <= 8; i++ {
		if _, err := p.AppendEntries(&raft.AppendEntriesRequest{RPCHeader: header("a"), PrevLogEntry: i, Entries: []*raft.Log{
			{Index: i + 1, Data: make([]byte, 1<<20)}}}, new(raft.AppendEntriesResponse)); err != nil {
			t.Fatal(err)
		}
	}
	<-entered
	for range 20 {
		var resp raft.AppendEntriesResponse
		if err := ga2.AppendEntries("b/1", "b", &raft.AppendEntriesRequest{RPCHeader: header("a")}, &resp); err != nil || !resp.Success {
			t.Fatalf("heartbeat of another group: %v", err)
		}
	}
	// An append of the other group shares the connection, not the stuck queue.
	var resp raft.AppendEntriesResponse
	if err := ga2.AppendEntries("b/1", "b", &raft.AppendEntriesRequest{RPCHeader: header("a"), PrevLogEntry: 1}, &resp); err != nil || !resp.Success {
		t.Fatalf("append of another group: %v", err)
	}
	// A vote of the stuck group overtakes its queued appends.
	vote := make(chan error, 1)
	go func() {
		vote <- ga.RequestVote("b/1", "b", &raft.RequestVoteRequest{RPCHeader: header("a")}, new(raft.RequestVoteResponse))
	}()
	eventually(t, "the vote to be queued", func() bool { gb.mu.Lock(); defer gb.mu.Unlock(); return len(gb.mu.urgent) == 1 })
	hold <- struct{}{}
	if err := <-vote; err != nil {
		t.Fatal(err)
	}
	if len(entered) > 1 {
		t.Fatalf("%d appends came before the vote", len(entered))
	}
	close(hold)
	for range 8 {
		if f := answered(t, p); f.Error() != nil || !f.Response().Success {
			t.Fatalf("%v %+v", f.Error(), f.Response())
		}
	}
}

// TestMute is TR4, both ways and for what is under way.
func TestMute(t *testing.T) {
	n := memnet.New(1)
	short := func(o *Options) { o.SmallTimeout = 100 * time.Millisecond }
	a, b := startNode(t, n, "a", short), startNode(t, n, "b", short)
	ga, gb := a.group(t, 7, GroupOptions{}), b.group(t, 7, GroupOptions{})
	var served atomic.Int64
	hook := func() {}
	serve(t, gb, func(rpc raft.RPC) {
		served.Add(1)
		hook()
		rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header("b"), Granted: true}, nil)
	})
	vote := func() error {
		return ga.RequestVote("b/1", "b", &raft.RequestVoteRequest{RPCHeader: header("a")}, new(raft.RequestVoteResponse))
	}
	if err := vote(); err != nil {
		t.Fatal(err)
	}
	for name, set := range map[string]func(bool){
		"receiving group": gb.Mute, "receiving node": b.Mute,
	} {
		set(true)
		before := served.Load()
		if err := vote(); err == nil || served.Load() != before {
			t.Fatalf("%s muted: %v, served %d", name, err, served.Load()-before)
		}
		set(false)
		if err := vote(); err != nil {
			t.Fatalf("%s unmuted: %v", name, err)
		}
	}
	for name, set := range map[string]func(bool){
		"sending group": ga.Mute, "sending node": a.Mute,
	} {
		set(true)
		wantIs(t, vote(), base.ErrNotReady)
		if _, err := ga.AppendEntriesPipeline("b/1", "b"); err == nil {
			t.Fatalf("%s muted, but a pipeline opened", name)
		}
		set(false)
		// Muted while the request is served: the answer must not count.
		hook = func() { set(true) }
		wantIs(t, vote(), base.ErrNotReady)
		hook = func() {}
		set(false)
	}
	hook = func() { b.Mute(true) } // the granted vote of a replica muted meanwhile
	if err := vote(); err == nil {
		t.Fatal("the answer of a muted replica arrived")
	}
	b.Mute(false)
	gb.Mute(true)
	if err := gb.Close(); err != nil {
		t.Fatal(err)
	}
	hook = func() {}
	serve(t, b.group(t, 7, GroupOptions{}), func(rpc raft.RPC) { rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header("b"), Granted: true}, nil) })
	if err := vote(); err != nil {
		t.Fatalf("the group that follows on a muted one: %v", err)
	}
}

// TestPipelineFailure is TR8: after a cut nothing is handed out as an answer,
// and the next append fails.
func TestPipelineFailure(t *testing.T) {
	n := memnet.New(1)
	a, b := startNode(t, n, "a"), startNode(t, n, "b")
	ga, gb := a.group(t, 7, GroupOptions{}), b.group(t, 7, GroupOptions{})
	entered, hold := make(chan struct{}, 1), make(chan struct{})
	serve(t, gb, func(rpc raft.RPC) {
		entered <- struct{}{}
		<-hold
		rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: header("b"), Success: true}, nil)
	})
	defer close(hold)
	p, err := ga.AppendEntriesPipeline("b/1", "b")
	if err != nil {
		t.Fatal(err)
	}
	req := &raft.AppendEntriesRequest{RPCHeader: header("a"), PrevLogEntry: 1}
	f1, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
	if err != nil {
		t.Fatal(err)
	}
	f2, err := p.AppendEntries(req, new(raft.AppendEntriesResponse))
	if err != nil {
		t.Fatal(err)
	}
	<-entered
	n.Cut("a", "b")
	wantIs(t, f1.Error(), base.ErrUnavailable)
	if f2.Error() == nil {
		t.Fatal("an append succeeded after a cut")
	}
	select {
	case f := <-p.Consumer():
		t.Fatalf("a failed append was handed out: %v", f.Error())
	default:
	}
	if _, err := p.AppendEntries(req, new(raft.AppendEntriesResponse)); err == nil {
		t.Fatal("a broken pipeline took an append")
	}
	p.Close()
}

// TestFailFastAndReturn: while a peer is down requests fail at once, and when
// it returns the pause ends with its first connection.
func TestFailFastAndReturn(t *testing.T) {
	n := memnet.New(1)
	a := startNode(t, n, "a", func(o *Options) { o.BackoffMin, o.BackoffMax = time.Hour, time.Hour })
	ga := a.group(t, 7, GroupOptions{})
	vote := func() error {
		return ga.RequestVote("b/1", "b", &raft.RequestVoteRequest{RPCHeader: header("a")}, new(raft.RequestVoteResponse))
	}
	for range 3 {
		start := time.Now()
		wantIs(t, vote(), base.ErrUnavailable)
		if d := time.Since(start); d > time.Second {
			t.Fatalf("failing took %v", d)
		}
	}
	b := startNode(t, n, "b")
	gb := b.group(t, 7, GroupOptions{})
	serve(t, gb, func(rpc raft.RPC) { rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header("b")}, nil) })
	wantIs(t, vote(), base.ErrUnavailable) // the pause of an hour
	b.Handle(9, nil)
	_, err := b.Call(ctxFor(t, 5*time.Second), "a", 9, nil) // b greets a
	wantIs(t, err, base.ErrUnsupported)
	eventually(t, "a vote after the peer's return", func() bool { return vote() == nil })
	wantIs(t, ga.RequestVote("x/1", "nowhere", &raft.RequestVoteRequest{}, nil), base.ErrUnavailable)
}

// TestBlackHole: a connection that brings nothing is given up and dialed anew.
func TestBlackHole(t *testing.T) {
	n := memnet.New(1)
	quick := func(o *Options) { o.PingInterval, o.DialTimeout = 20*time.Millisecond, 50*time.Millisecond }
	a, b := startNode(t, n, "a", quick), startNode(t, n, "b", quick)
	ga, gb := a.group(t, 7, GroupOptions{}), b.group(t, 7, GroupOptions{})
	serve(t, gb, func(rpc raft.RPC) { rpc.Respond(&raft.RequestVoteResponse{RPCHeader: header("b")}, nil) })
	vote := func() error {
		return ga.RequestVote("b/1", "b", &raft.RequestVoteRequest{RPCHeader: header("a")}, new(raft.RequestVoteResponse))
	}
	if err := vote(); err != nil {
		t.Fatal(err)
	}
	n.Block("b", "a")
	wantIs(t, vote(), base.ErrUnavailable) // well before SmallTimeout: the pings fail
	n.HealAll()
	eventually(t, "a vote after the partition", func() bool { return vote() == nil })
}

// A probe is answered by raft's main loop or not at all; a muted group is left
// alone.
func TestProbeIsAnsweredByTheMainLoop(t *testing.T) {
	n := memnet.New(1)
	a := startNode(t, n, "a")
	g := a.group(t, 7, GroupOptions{Local: "a/1"})
	hang, got := make(chan struct{}), make(chan *raft.AppendEntriesRequest, 10)
	serve(t, g, func(rpc raft.RPC) {
		got <- rpc.Command.(*raft.AppendEntriesRequest)
		select {
		case <-hang:
		case <-g.done:
		}
		rpc.Respond(&raft.AppendEntriesResponse{}, nil)
	})
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	wantIs(t, g.Probe(ctx), base.ErrUnavailable)
	if m := <-got; m.Term != 0 || len(m.Entries) != 0 {
		t.Fatalf("the probe is %+v", m)
	}
	close(hang)
	if err := g.Probe(context.Background()); err != nil {
		t.Fatal(err)
	}
	<-got
	g.muted.Store(true)
	if err := g.Probe(context.Background()); err != nil || len(got) != 0 {
		t.Fatalf("a muted group: %v", err)
	}
}
