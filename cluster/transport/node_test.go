package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/memnet"
)

const methodEcho uint8 = 40

func echo(_ context.Context, from base.NodeID, req []byte) ([]byte, error) {
	return append([]byte(from+":"), req...), nil
}

// TestHandshakeRefusals is TR2, with both sides' view and the log's limit.
func TestHandshakeRefusals(t *testing.T) {
	identity := func(f func(*Identity)) func(*Options) { return func(o *Options) { f(&o.Identity) } }
	for name, c := range map[string]struct {
		a, b func(*Options)
		want error
	}{
		"cluster": {identity(func(i *Identity) { i.Cluster = "other" }), nil, base.ErrIdentity},
		"engine":  {identity(func(i *Identity) { i.Engine = "rocks" }), nil, base.ErrIdentity},
		"disk": {nil, func(o *Options) {
			o.CheckPeer = func(i Identity) error {
				if i.Disk != "known" {
					return errors.New("foreign disk")
				}
				return nil
			}
		}, base.ErrIdentity},
		"disk of the listener": {func(o *Options) {
			o.CheckPeer = func(i Identity) error { return base.ErrIdentity }
		}, nil, base.ErrIdentity},
		"disk of an unfounded listener": {func(o *Options) {
			o.CheckPeer = func(i Identity) error { return base.ErrIdentity }
		}, identity(func(i *Identity) { i.Cluster = "" }), base.ErrIdentity},
		"address":          {func(o *Options) { o.Resolver = func(base.NodeID) (string, bool) { return "c:1", true } }, nil, base.ErrIdentity},
		"unfounded dialer": {identity(func(i *Identity) { i.Cluster = "" }), nil, base.ErrNotFounded},
	} {
		t.Run(name, func(t *testing.T) {
			n := memnet.New(1)
			fast := func(o *Options) { o.BackoffMin, o.BackoffMax = 1, 1 }
			none := func(*Options) {}
			if c.a == nil {
				c.a = none
			}
			if c.b == nil {
				c.b = none
			}
			a, b := startNode(t, n, "a", fast, c.a), startNode(t, n, "b", fast, c.b)
			other := startNode(t, n, "c", fast)
			b.Handle(methodEcho, echo)
			other.Handle(methodEcho, echo)
			for range 5 {
				_, err := a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, nil)
				wantIs(t, err, c.want)
			}
			if got := a.log.count("node refused"); got != 1 {
				t.Errorf("the dialer logged %d times", got)
			}
			if got := b.log.count("node connection refused") + other.log.count("node connection refused"); got > 1 {
				t.Errorf("the listener logged %d times", got)
			}
		})
	}
}

// TestForeignBytes: a peer that speaks something else is cut off.
func TestForeignBytes(t *testing.T) {
	n := memnet.New(1)
	startNode(t, n, "b")
	for _, in := range []string{"GET / HTTP/1.1\r\n\r\n", "KSNT\x02\x00\x05\x00hello", "KSNT\x01\x00\xff\xff", ""} {
		c, err := n.Host("x").Dial(ctxFor(t, time.Second), "b:1")
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write([]byte(in)); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); err != nil && !strings.Contains(err.Error(), "reset") || len(got) > 0 {
			t.Fatalf("%q: %q, %v", in, got, err)
		}
		c.Close()
	}
}

// TestAdmission: a node without a cluster serves the admission and nothing
// else, and all lanes after SetCluster.
func TestAdmission(t *testing.T) {
	n := memnet.New(1)
	a := startNode(t, n, "a")
	b := startNode(t, n, "b", func(o *Options) { o.Identity.Cluster = "" })
	b.Handle(MethodAdmission, echo)
	b.Handle(methodEcho, echo)
	ga, gb := a.group(t, 7, GroupOptions{}), b.group(t, 7, GroupOptions{})
	serve(t, gb, func(rpc raft.RPC) { rpc.Respond(&raft.RequestVoteResponse{}, nil) })
	if got, err := a.Call(ctxFor(t, 5*time.Second), "b", MethodAdmission, []byte("x")); err != nil || string(got) != "a:x" {
		t.Fatalf("%q, %v", got, err)
	}
	refused := func() (errs []error) {
		_, err := a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, nil)
		errs = append(errs, err)
		errs = append(errs, ga.RequestVote("b/1", "b", &raft.RequestVoteRequest{}, new(raft.RequestVoteResponse)))
		_, err = a.FetchFile(ctxFor(t, 5*time.Second), "b", "f", 0)
		errs = append(errs, err)
		_, err = NewPoller(a.Transport, PollerOptions{}).Poll(ctxFor(t, 5*time.Second), "b", 7)
		return append(errs, err)
	}
	for _, err := range refused() {
		wantIs(t, err, base.ErrNotFounded)
	}
	if err := b.SetCluster(testCluster); err != nil {
		t.Fatal(err)
	}
	wantIs(t, b.SetCluster("another"), base.ErrAlreadyFounded)
	// Each lane has a connection of its own and learns by itself that b closed it.
	eventually(t, "calls, votes, files and polls after the founding", func() bool {
		if _, err := a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, nil); err != nil {
			return false
		}
		return !slices.ContainsFunc(refused(), func(err error) bool { return errors.Is(err, base.ErrNotFounded) })
	})
}

// Who is removed while he is being greeted is not served for ever by what was known
// of him before: all that is judged before DropPeers greets anew.
func TestPeerThatIsDroppedWhileItIsGreeted(t *testing.T) {
	n := memnet.New(1)
	a := startNode(t, n, "a")
	var b atomic.Pointer[testNode]
	var judged atomic.Int64
	nb := startNode(t, n, "b", func(o *Options) {
		o.CheckPeer = func(Identity) error {
			if judged.Add(1) > 1 {
				return base.ErrIdentity
			}
			b.Load().DropPeers() // the record lost him after it was read
			return nil
		}
	})
	b.Store(nb)
	nb.Handle(methodEcho, echo)
	eventually(t, "a refused peer", func() bool {
		_, err := a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, nil)
		if err == nil {
			t.Fatal("a peer that was removed while it was greeted is served")
		}
		return errors.Is(err, base.ErrIdentity)
	})
}

func TestCalls(t *testing.T) {
	n := memnet.New(1)
	a, b := startNode(t, n, "a"), startNode(t, n, "b", func(o *Options) { o.MaxCalls = 2 })
	b.Handle(methodEcho, echo)
	a.Handle(methodEcho, echo)
	big := bytes.Repeat([]byte("x"), MaxCall-2)
	for _, req := range [][]byte{nil, []byte("x"), big} {
		if got, err := a.Call(ctxFor(t, 20*time.Second), "b", methodEcho, req); err != nil || string(got) != "a:"+string(req) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
	}
	if got, err := a.Call(ctxFor(t, time.Second), "a", methodEcho, nil); err != nil || string(got) != "a:" {
		t.Fatalf("to itself: %q, %v", got, err)
	}
	_, err := a.Call(ctxFor(t, time.Second), "b", methodEcho, make([]byte, MaxCall+1))
	wantIs(t, err, base.ErrTooLarge)
	_, err = a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, make([]byte, MaxCall)) // the answer is larger
	wantIs(t, err, base.ErrTooLarge)
	_, err = a.Call(ctxFor(t, time.Second), "b", 99, nil)
	wantIs(t, err, base.ErrUnsupported)
	// Deadline, cancellation and overload.
	running := make(chan struct{}, 10)
	ended := make(chan error, 10)
	b.Handle(50, func(ctx context.Context, _ base.NodeID, _ []byte) ([]byte, error) {
		running <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	})
	_, err = a.Call(ctxFor(t, 50*time.Millisecond), "b", 50, nil)
	wantIs(t, err, base.ErrDeadline)
	<-running
	<-ended
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	results := make(chan error, 2)
	for range 2 {
		go func() { _, err := a.Call(ctx, "b", 50, nil); results <- err }()
	}
	<-running
	<-running
	_, err = a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, nil)
	wantIs(t, err, base.ErrOverloaded)
	cancel()
	for range 2 {
		if err := <-results; base.OutcomeOf(err) != base.OutcomeUnknown {
			t.Fatalf("a cancelled call has outcome %v: %v", base.OutcomeOf(err), err)
		}
		wantIs(t, <-ended, context.Canceled)
	}
	// The connection breaks under a call.
	go func() { _, err := a.Call(context.Background(), "b", 50, nil); results <- err }()
	<-running
	n.Cut("a", "b")
	wantIs(t, <-results, base.ErrUnavailable)
}

// seeker and stream are the two kinds of readers that a handler may return.
type seeker struct{ *bytes.Reader }

func (seeker) Close() error { return nil }

func TestFiles(t *testing.T) {
	n := memnet.New(1)
	quick := func(o *Options) { o.StallTimeout = 300 * time.Millisecond }
	a, b := startNode(t, n, "a", quick), startNode(t, n, "b", quick, func(o *Options) { o.MaxFileStreams = 1 })
	data := make([]byte, 3*fileChunk+17)
	for i := range data {
		data[i] = byte(i * 7 >> 3)
	}
	b.ServeFiles(func(_ context.Context, from base.NodeID, name string) (io.ReadCloser, int64, error) {
		switch name {
		case "seek":
			return seeker{bytes.NewReader(data)}, int64(len(data)), nil
		case "stream":
			return io.NopCloser(io.MultiReader(bytes.NewReader(data))), int64(len(data)), nil
		case "short":
			return seeker{bytes.NewReader(data[:fileChunk+5])}, int64(len(data)), nil
		case "empty":
			return seeker{bytes.NewReader(nil)}, 0, nil
		}
		return nil, 0, base.ErrNotFound
	})
	fetch := func(name string, offset int64) ([]byte, error) {
		var f *File
		var err error
		eventually(t, "a free stream", func() bool {
			f, err = a.FetchFile(ctxFor(t, 20*time.Second), "b", name, offset)
			return !errors.Is(err, base.ErrOverloaded)
		})
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return io.ReadAll(f)
	}
	for _, name := range []string{"seek", "stream"} {
		for _, offset := range []int64{0, 1, fileChunk, int64(len(data))} {
			if got, err := fetch(name, offset); err != nil || !bytes.Equal(got, data[offset:]) {
				t.Fatalf("%s at %d: %d bytes, %v", name, offset, len(got), err)
			}
		}
		_, err := fetch(name, int64(len(data))+1)
		wantIs(t, err, base.ErrOutOfRange)
	}
	if got, err := fetch("empty", 0); err != nil || len(got) != 0 {
		t.Fatalf("%q, %v", got, err)
	}
	_, err := fetch("none", 0)
	wantIs(t, err, base.ErrNotFound)
	got, err := fetch("short", 0) // TR10: never a silent end
	wantIs(t, err, base.ErrCorrupt)
	if !bytes.Equal(got, data[:len(got)]) {
		t.Fatal("wrong bytes before the error")
	}
	_, err = a.FetchFile(ctxFor(t, time.Second), "b", strings.Repeat("x", MaxFileName+1), 0)
	wantIs(t, err, base.ErrInvalid)

	// One stream is open and not read: another is refused, memory stays bounded.
	n.SetWindow(16 << 10)
	f, err := a.FetchFile(ctxFor(t, 20*time.Second), "b", "seek", 0)
	if err != nil || f.Size() != int64(len(data)) {
		t.Fatal(err)
	}
	_, err = a.FetchFile(ctxFor(t, 20*time.Second), "b", "seek", 0)
	wantIs(t, err, base.ErrOverloaded)
	// The peer stalls midway: the stream fails, and resumes at its offset.
	head := make([]byte, 1000)
	if _, err := io.ReadFull(f, head); err != nil {
		t.Fatal(err)
	}
	n.Block("b", "a")
	rest, err := io.ReadAll(f)
	wantIs(t, err, base.ErrUnavailable)
	f.Close()
	f.Close()
	n.HealAll()
	n.SetWindow(memnet.DefaultWindow)
	have := append(head, rest...)
	tail, err := fetch("seek", int64(len(have)))
	if err != nil || !bytes.Equal(append(have, tail...), data) {
		t.Fatalf("resumed with %d + %d bytes, %v", len(have), len(tail), err)
	}
	// A cancelled context ends the stream.
	ctx, cancel := context.WithCancel(context.Background())
	eventually(t, "a free stream", func() bool { f, err = a.FetchFile(ctx, "b", "seek", 0); return err == nil })
	defer f.Close()
	n.Block("b", "a")
	cancel()
	if _, err := io.Copy(io.Discard, f); err == nil {
		t.Fatal("a cancelled stream came to its end")
	}
}

// TestFaultyNetwork: under random cuts and delays every answered call has the
// right answer.
func TestFaultyNetwork(t *testing.T) {
	n := memnet.New(42)
	fast := func(o *Options) { o.BackoffMin, o.BackoffMax = time.Millisecond, 2*time.Millisecond }
	a, b := startNode(t, n, "a", fast), startNode(t, n, "b", fast)
	b.Handle(methodEcho, echo)
	for _, p := range [][2]string{{"a", "b"}, {"b", "a"}} {
		n.SetDelay(p[0], p[1], 0, time.Millisecond)
		n.SetCutOneIn(p[0], p[1], 20)
	}
	var good, bad atomic.Int64
	done := make(chan struct{})
	for w := range 8 {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := range 100 {
				req := []byte{byte(w), byte(i)}
				got, err := a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, req)
				switch {
				case err != nil:
					bad.Add(1)
					<-time.After(time.Millisecond) // longer than most pauses of a lane
				case string(got) != "a:"+string(req):
					t.Errorf("call %v answered %q", req, got)
				default:
					good.Add(1)
				}
			}
		}()
	}
	for range 8 {
		<-done
	}
	if good.Load() == 0 || bad.Load() == 0 {
		t.Fatalf("%d good, %d failed calls: the test shows nothing", good.Load(), bad.Load())
	}
}

// TestTCP runs the product's network once.
func TestTCP(t *testing.T) {
	addrs := map[base.NodeID]string{}
	tcp := func(o *Options) {
		o.Network, o.ListenAddr = TCP{}, "127.0.0.1:0"
		o.Resolver = func(id base.NodeID) (string, bool) { return addrs[id], true }
	}
	a, b := startNode(t, nilNet(), "a", tcp), startNode(t, nilNet(), "b", tcp)
	addrs["a"], addrs["b"] = a.Addr().String(), b.Addr().String()
	b.Handle(methodEcho, echo)
	if got, err := a.Call(ctxFor(t, 5*time.Second), "b", methodEcho, []byte("x")); err != nil || string(got) != "a:x" {
		t.Fatalf("%q, %v", got, err)
	}
}

func nilNet() *memnet.Network { return memnet.New(1) }

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"empty":       {},
		"long id":     {Resolver: func(base.NodeID) (string, bool) { return "", false }, Identity: Identity{Node: base.NodeID(strings.Repeat("x", 256))}},
		"small queue": {Resolver: func(base.NodeID) (string, bool) { return "", false }, Identity: Identity{Node: "a"}, GroupQueueBytes: 1},
		"conns":       {Resolver: func(base.NodeID) (string, bool) { return "", false }, Identity: Identity{Node: "a"}, AppendConns: 17},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestMetricNames lists every metric.
func TestMetricNames(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m, err := newMetrics(reg)
	if err != nil {
		t.Fatal(err)
	}
	m.traffic(laneUrgent).sent(1, 1)
	m.traffic(laneUrgent).received(1)
	m.refused(base.ErrIdentity)
	m.dials.WithLabelValues("ok").Inc()
	m.fileBytes.WithLabelValues("sent").Inc()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		got = append(got, strings.TrimPrefix(f.GetName(), "keelstate_transport_"))
	}
	want := "bytes_received_total bytes_sent_total dials_total file_bytes_total frames_received_total frames_sent_total handshake_refusals_total muted_total overloads_total poll_rounds_total poll_waiters_total wrong_replica_total"
	if s := strings.Join(got, " "); s != want {
		t.Fatalf("got %s", s)
	}
	if _, err := newMetrics(reg); err == nil {
		t.Fatal("registered twice")
	}
}

// TestClose: a closed transport refuses everything and can be closed again.
func TestClose(t *testing.T) {
	n := memnet.New(1)
	a := startNode(t, n, "a")
	g := a.group(t, 7, GroupOptions{})
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if a.Start() == nil {
		t.Fatal("started after its end")
	}
	_, err := a.Call(ctxFor(t, time.Second), "b", 1, nil)
	wantIs(t, err, base.ErrClosed)
	wantIs(t, g.RequestVote("b/1", "b", &raft.RequestVoteRequest{}, nil), base.ErrClosed)
	_, err = a.Group(8, GroupOptions{})
	wantIs(t, err, base.ErrClosed)
	_, err = NewPoller(a.Transport, PollerOptions{}).Poll(ctxFor(t, time.Second), "b", 7)
	wantIs(t, err, base.ErrClosed)
	_, err = a.FetchFile(ctxFor(t, time.Second), "b", "f", 0)
	wantIs(t, err, base.ErrClosed)
}
