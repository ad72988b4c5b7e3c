package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

func installRequest(term, index uint64, manifest string) *raft.InstallSnapshotRequest {
	return &raft.InstallSnapshotRequest{RPCHeader: header("a"), SnapshotVersion: 1, Term: term, LastLogIndex: index,
		LastLogTerm: 1, Configuration: goldenConfig, ConfigurationIndex: 1, Size: int64(len(manifest))}
}

// installRig is a sender, and a receiver whose hook and raft a test controls.
type installRig struct {
	t        *testing.T
	net      *memnet.Network
	ga, gb   *Group
	entered  chan SnapshotMeta
	release  chan error // answers the hook
	running  atomic.Int32
	overlaps atomic.Int32
	toRaft   chan string // manifests that raft got
	tick     atomic.Bool // the hook reports progress while it waits
	have     atomic.Bool // the replica has got further than any snapshot
}

func newInstallRig(t *testing.T, change ...func(*Options)) *installRig {
	n := memnet.New(1)
	r := &installRig{t: t, net: n, entered: make(chan SnapshotMeta, 10), release: make(chan error), toRaft: make(chan string, 10)}
	a, b := startNode(t, n, "a", change...), startNode(t, n, "b", change...)
	r.ga = a.group(t, 7, GroupOptions{Local: "a/1"})
	r.gb = b.group(t, 7, GroupOptions{Local: "b/1", PrepareSnapshot: r.hook,
		HasSnapshot: func(m SnapshotMeta) (bool, error) {
			if m.LastIndex == brokenIndex {
				return false, base.ErrCorrupt
			}
			return r.have.Load(), nil
		}})
	serve(t, r.gb, func(rpc raft.RPC) {
		switch rpc.Command.(type) {
		case *raft.InstallSnapshotRequest:
			b, _ := io.ReadAll(rpc.Reader)
			r.toRaft <- string(b)
			rpc.Respond(&raft.InstallSnapshotResponse{RPCHeader: header("b"), Term: 5, Success: true}, nil)
		default:
			rpc.Respond(&raft.AppendEntriesResponse{RPCHeader: header("b"), Success: true}, nil)
		}
	})
	return r
}

// brokenIndex is that of a snapshot which the rig cannot compare.
const brokenIndex = 99

func (r *installRig) hook(ctx context.Context, m SnapshotMeta, manifest []byte, from base.NodeID) error {
	if r.running.Add(1) > 1 {
		r.overlaps.Add(1)
	}
	defer r.running.Add(-1)
	r.entered <- m
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-r.release:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if r.tick.Load() {
				ReportProgress(ctx, 1)
			}
		}
	}
}

func (r *installRig) send(term, index uint64, manifest string) <-chan error {
	out := make(chan error, 1)
	go func() {
		var resp raft.InstallSnapshotResponse
		err := r.ga.InstallSnapshot("b/1", "b", installRequest(term, index, manifest), &resp, bytes.NewReader([]byte(manifest)))
		if err == nil && (!resp.Success || resp.Term != 5) {
			err = errors.New("wrong answer")
		}
		out <- err
	}()
	return out
}

// TestInstallPreparesFirst is TR7: raft sees nothing, and stays responsive,
// until the hook is done; a failed hook reaches the sender.
func TestInstallPreparesFirst(t *testing.T) {
	r := newInstallRig(t)
	sent := r.send(5, 10, "manifest")
	m := <-r.entered
	if m.Group != 7 || m.Term != 5 || m.LastIndex != 10 || m.LastTerm != 1 || len(m.Configuration.Servers) != 2 {
		t.Fatalf("meta %+v", m)
	}
	for range 10 { // heartbeats go on
		if err := r.ga.AppendEntries("b/1", "b", &raft.AppendEntriesRequest{RPCHeader: header("a")}, new(raft.AppendEntriesResponse)); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.toRaft) != 0 {
		t.Fatal("raft got the snapshot before it was prepared")
	}
	r.release <- nil
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if got := <-r.toRaft; got != "manifest" {
		t.Fatalf("raft got %q", got)
	}
	r.ended("the first")
	sent = r.send(5, 11, "other")
	<-r.entered
	r.release <- base.ErrCorrupt
	wantIs(t, <-sent, base.ErrCorrupt)
	if len(r.toRaft) != 0 {
		t.Fatal("raft got a snapshot that was not prepared")
	}
}

// A replica that gets further while a snapshot is prepared, or waits in the
// queue, keeps what it has: the leader is told success and raft gets nothing.
func TestInstallLeavesAReplicaAloneThatGotFurther(t *testing.T) {
	r := newInstallRig(t)
	sent := r.send(5, 10, "m1")
	<-r.entered
	r.have.Store(true)
	r.release <- nil
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	r.ended("the first") // until then another is refused
	r.have.Store(false)
	sent = r.send(5, brokenIndex, "m2")
	<-r.entered
	r.release <- nil
	wantIs(t, <-sent, base.ErrCorrupt)
	if len(r.toRaft) != 0 {
		t.Fatal("raft got a snapshot")
	}
	r.ended("the broken one")
	sent = r.send(5, 11, "m3")
	<-r.entered
	r.release <- nil
	if err := <-sent; err != nil || len(r.toRaft) != 1 {
		t.Fatalf("a snapshot that is needed: %v, raft got %d", err, len(r.toRaft))
	}
}

// ended waits until no installation is under way at the receiver, which may be a
// little after the sender has its answer.
func (r *installRig) ended(what string) {
	r.t.Helper()
	eventually(r.t, what, func() bool {
		r.gb.install.mu.Lock()
		defer r.gb.install.mu.Unlock()
		return r.gb.install.op == nil
	})
}

// TestInstallJoins is TR7: a repeated request shares the preparation and, in
// the same term, raft's answer; other content is refused, and stops the
// preparation if the leader is newer.
func TestInstallJoins(t *testing.T) {
	r := newInstallRig(t)
	waiting := func(n int) func() bool {
		return func() bool {
			r.gb.install.mu.Lock()
			defer r.gb.install.mu.Unlock()
			return r.gb.install.op != nil && r.gb.install.op.waiters == n
		}
	}
	first := r.send(5, 10, "m1")
	<-r.entered
	second := r.send(5, 10, "m1")
	eventually(t, "the second to join", waiting(2))
	third := r.send(6, 10, "m1") // a newer leader, the same content
	eventually(t, "the third to join", waiting(3))
	wantIs(t, <-r.send(5, 10, "m2"), base.ErrOverloaded)
	r.release <- nil
	for _, c := range []<-chan error{first, second, third} {
		if err := <-c; err != nil {
			t.Fatal(err)
		}
	}
	if n := len(r.toRaft); n != 2 { // once per term
		t.Fatalf("raft got the snapshot %d times", n)
	}
	r.ended("the end")
	old := r.send(6, 20, "m3")
	<-r.entered
	wantIs(t, <-r.send(7, 21, "m4"), base.ErrOverloaded) // stops m3
	if err := <-old; err == nil {
		t.Fatal("a stopped preparation succeeded")
	}
	r.ended("the old one to leave")
	next := r.send(7, 21, "m4")
	<-r.entered
	r.release <- nil
	if err := <-next; err != nil {
		t.Fatal(err)
	}
	if r.overlaps.Load() != 0 {
		t.Fatal("two preparations ran at once")
	}
}

// TestInstallStall: the sender waits as long as there is progress, and no
// longer; the preparation outlives the sender and its retry joins.
func TestInstallStall(t *testing.T) {
	r := newInstallRig(t, func(o *Options) { o.StallTimeout = 1500 * time.Millisecond })
	r.tick.Store(true)
	sent := r.send(5, 10, "m1")
	<-r.entered
	select {
	case err := <-sent:
		t.Fatalf("gave up in spite of progress: %v", err)
	case <-time.After(3 * time.Second): // twice the stall timeout
	}
	r.tick.Store(false)
	wantIs(t, <-sent, base.ErrUnavailable)
	waiting := func(n int) func() bool {
		return func() bool {
			r.gb.install.mu.Lock()
			defer r.gb.install.mu.Unlock()
			return r.gb.install.op.waiters == n
		}
	}
	again := r.send(5, 10, "m1")
	eventually(t, "the retry to join", waiting(2))
	r.net.Cut("a", "b")
	if err := <-again; err == nil {
		t.Fatal("succeeded over a cut connection")
	}
	eventually(t, "the cut ones to leave", waiting(0))
	again = r.send(5, 10, "m1")
	eventually(t, "the last to join", waiting(1))
	r.release <- nil
	if err := <-again; err != nil {
		t.Fatal(err)
	}
	if len(r.entered) != 0 || r.overlaps.Load() != 0 {
		t.Fatal("a retry began a second preparation")
	}
}

// A mute ends an install at once, wherever it meets it: its sender would wait for
// StallTimeout, long after the mute (TR4).
func TestInstallMeetsAMute(t *testing.T) {
	r := newInstallRig(t)
	refused := func(when string, sent <-chan error) {
		t.Helper()
		select {
		case err := <-sent:
			if err == nil || !errors.Is(err, base.ErrNotReady) {
				t.Errorf("%s: %v", when, err)
			}
		case <-time.After(10 * time.Second): // a sixth of StallTimeout
			t.Fatalf("%s: the sender still waits", when)
		}
	}
	for name, mute := range map[string]func(bool){"group": r.gb.Mute, "node": r.gb.t.Mute} {
		mute(true)
		refused(name+" muted before", r.send(5, 10, "m1"))
		if len(r.entered) > 0 {
			t.Fatal("a muted replica prepares a snapshot")
		}
		mute(false)
		waiting := r.send(5, 10, "m1")
		<-r.entered
		mute(true)
		refused(name+" muted during the preparation", waiting)
		r.release <- nil
		r.ended("the preparation")
		mute(false)
		if len(r.toRaft) > 0 {
			t.Fatal("raft got a snapshot that was refused")
		}
		again := r.send(5, 10, "m1")
		<-r.entered
		r.release <- nil
		if err := <-again; err != nil || <-r.toRaft != "m1" {
			t.Fatalf("%s: after the mute: %v", name, err)
		}
		r.ended("the one behind the mute") // until then the next would join it
	}
}

func TestInstallLimits(t *testing.T) {
	r := newInstallRig(t)
	req := installRequest(5, 10, "m")
	req.Size = MaxManifest + 1
	wantIs(t, r.ga.InstallSnapshot("b/1", "b", req, nil, bytes.NewReader(nil)), base.ErrTooLarge)
	req.Size = 5 // the reader has less
	wantIs(t, r.ga.InstallSnapshot("b/1", "b", req, nil, bytes.NewReader([]byte("abc"))), io.ErrUnexpectedEOF)
	req.Size = 0
	wantIs(t, r.ga.InstallSnapshot("b/0", "b", req, nil, bytes.NewReader(nil)), base.ErrIdentity)
	wantIs(t, r.ga.InstallSnapshot("a/1", "a", req, nil, bytes.NewReader(nil)), base.ErrUnsupported)
	r.gb.Close()
	wantIs(t, r.ga.InstallSnapshot("b/1", "b", req, nil, bytes.NewReader(nil)), base.ErrNoSuchShard)
}
