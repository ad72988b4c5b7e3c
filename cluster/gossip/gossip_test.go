package gossip

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, node base.NodeID, cluster base.ClusterID, change func(*Options), seeds ...string) *Gossip {
	t.Helper()
	o := Options{
		BindAddr: "127.0.0.1:0", Seeds: seeds, ProbeInterval: 50 * time.Millisecond, RejoinInterval: 50 * time.Millisecond,
		DuplicateAfter: 2 * time.Second,
		Meta:           Meta{Node: node, Cluster: cluster, RaftAddr: "raft-" + string(node), Version: "v0"},
	}
	if change != nil {
		change(&o)
	}
	g, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// sees waits until g sees exactly these nodes.
func sees(t *testing.T, g *Gossip, want ...base.NodeID) {
	t.Helper()
	end := time.After(20 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var got []string
		for _, m := range g.Members() {
			got = append(got, string(m.Node))
		}
		var exp []string
		for _, w := range want {
			exp = append(exp, string(w))
		}
		if strings.Join(got, ",") == strings.Join(exp, ",") {
			return
		}
		select {
		case <-g.Changed():
		case <-tick.C:
		case <-end:
			t.Fatalf("sees %v, want %v", got, exp)
		}
	}
}

func TestJoinLeaveUpdate(t *testing.T) {
	key := func(o *Options) { o.Key = []byte("0123456789abcdef") }
	a := start(t, "a", "c1", key)
	b := start(t, "b", "", key, a.Addr())
	sees(t, a, "a", "b")
	sees(t, b, "a", "b")
	if err := b.SetMeta(Meta{Node: "b", Cluster: "c1", GRPCAddr: "g"}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); a.Members()[1].GRPCAddr != "g"; {
		if time.Now().After(end) {
			t.Fatal("the update did not arrive")
		}
		<-a.Changed()
	}
	if err := b.SetMeta(Meta{Node: "x"}); !errors.Is(err, base.ErrInvalid) {
		t.Fatalf("changing the node id: %v", err)
	}
	if err := b.Leave(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	sees(t, a, "a")
	// Another key joins nothing.
	start(t, "c", "c1", func(o *Options) { o.Key = []byte("fedcba9876543210") }, a.Addr())
	sees(t, a, "a")
}

// TestNewAddress is GO1 and case B67: killed, not left, and at once back with
// the same id at another address: one member, at the new address, at once.
func TestNewAddress(t *testing.T) {
	a := start(t, "a", "c1", nil)
	b := start(t, "b", "c1", nil, a.Addr())
	sees(t, a, "a", "b")
	old := b.Addr()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b2 := start(t, "b", "c1", nil, a.Addr())
	if b2.Addr() == old {
		t.Fatal("the system gave the same port again")
	}
	for end := time.Now().Add(5 * time.Second); ; {
		m := a.Members()
		if len(m) == 2 && m[1].Addr == b2.Addr() {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("members %v, want b at %s", m, b2.Addr())
		}
		<-a.Changed()
	}
	if d := a.Duplicates(); len(d) != 0 {
		t.Fatalf("duplicates %v", d)
	}
}

// TestDuplicate is GO5: two live processes with one id.
func TestDuplicate(t *testing.T) {
	a := start(t, "a", "c1", nil)
	start(t, "b", "c1", nil, a.Addr())
	start(t, "b", "c1", nil, a.Addr())
	for end := time.Now().Add(15 * time.Second); len(a.Duplicates()) == 0; {
		if time.Now().After(end) {
			t.Fatal("not reported")
		}
		<-time.After(20 * time.Millisecond) // duplicates change without a signal
	}
	sees(t, a, "a", "b")
}

// TestForeignCluster is GO3, through a node that belongs to none.
func TestForeignCluster(t *testing.T) {
	a := start(t, "a", "c1", nil)
	x := start(t, "x", "c2", nil)
	u := start(t, "u", "", nil, a.Addr(), x.Addr())
	sees(t, u, "a", "u", "x")
	sees(t, a, "a", "u")
	sees(t, x, "u", "x")
	if err := u.SetMeta(Meta{Node: "u", Cluster: "c1"}); err != nil {
		t.Fatal(err)
	}
	sees(t, u, "a", "u")
	sees(t, x, "x")
}

// A look at the members beside news about them once deadlocked: memberlist asks
// the delegate with its own lock held.
func TestRejoinBesideNewsDoesNotDeadlock(t *testing.T) {
	a := start(t, "a", "c1", nil)
	b := start(t, "b", "c1", nil, a.Addr())
	sees(t, a, "a", "b")
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 20_000 {
			a.rejoin()
		}
	}()
	for i := range 200 {
		if err := b.SetMeta(Meta{Node: "b", Cluster: "c1", Version: string(rune('a' + i%26))}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("rejoin hangs")
	}
	sees(t, a, "a", "b")
}

// TestLateSeed is GO4: the seed is not there when the node starts.
func TestLateSeed(t *testing.T) {
	a := start(t, "a", "c1", nil)
	addr := a.Addr()
	a.Close()
	b := start(t, "b", "c1", nil, addr)
	sees(t, b, "b")
	start(t, "a", "c1", func(o *Options) { o.BindAddr = addr })
	sees(t, b, "a", "b")
}

// TestTooLarge is GO2 and case B69.
func TestTooLarge(t *testing.T) {
	long := strings.Repeat("x", 200)
	_, err := Start(Options{BindAddr: "127.0.0.1:0", Meta: Meta{Node: "a", RaftAddr: long, GRPCAddr: long, HTTPAddr: long}})
	if !errors.Is(err, base.ErrTooLarge) {
		t.Fatalf("got %v", err)
	}
	_, err = Start(Options{BindAddr: "127.0.0.1:0", Meta: Meta{Node: "a", RaftAddr: strings.Repeat("x", 256)}})
	if !errors.Is(err, base.ErrTooLarge) {
		t.Fatalf("got %v", err)
	}
	a := start(t, "a", "c1", nil)
	if err := a.SetMeta(Meta{Node: "a", RaftAddr: long, GRPCAddr: long, HTTPAddr: long}); !errors.Is(err, base.ErrTooLarge) {
		t.Fatalf("got %v", err)
	}
	for _, o := range []Options{{BindAddr: "x"}, {BindAddr: "127.0.0.1:70000"}, {BindAddr: "127.0.0.1:0", Key: []byte("short")}, {BindAddr: "127.0.0.1:0", AdvertiseAddr: "y"}} {
		o.Meta.Node = "a"
		if _, err := Start(o); !errors.Is(err, base.ErrInvalid) {
			t.Fatalf("%+v: %v", o, err)
		}
	}
}

var sample = Meta{Node: "n1", Cluster: "0123456789abcdef0123456789abcdef", RaftAddr: "10.0.0.1:7411", GRPCAddr: "10.0.0.1:7401", HTTPAddr: "10.0.0.1:7431", Version: "v1.0.0"}

func TestGolden(t *testing.T) {
	b, err := encodeMeta(sample, 0x0102030405060708)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "golden", "v1", "meta.bin")
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || string(want) != string(b) {
		t.Fatalf("the format changed (%v): %x", err, b)
	}
	m, boot, err := decodeMeta(want)
	if err != nil || m != sample || boot != 0x0102030405060708 {
		t.Fatalf("%+v %x %v", m, boot, err)
	}
	for i := range b {
		if _, _, err := decodeMeta(b[:i]); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("cut at %d: %v", i, err)
		}
		for bit := range 8 {
			c := append([]byte(nil), b...)
			c[i] ^= 1 << bit
			wantErr := error(base.ErrCorrupt)
			if i == 2 {
				wantErr = base.ErrFormatVersion
			}
			if _, _, err := decodeMeta(c); !errors.Is(err, wantErr) {
				t.Fatalf("bit %d of byte %d: %v", bit, i, err)
			}
		}
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringN(0, 20, 60)
		m := Meta{Node: base.NodeID(rapid.StringN(1, 20, 60).Draw(t, "node")), Cluster: base.ClusterID(s.Draw(t, "c")), RaftAddr: s.Draw(t, "r"), GRPCAddr: s.Draw(t, "g"), HTTPAddr: s.Draw(t, "h"), Version: s.Draw(t, "v")}
		boot := rapid.Uint64().Draw(t, "boot")
		b, err := encodeMeta(m, boot)
		if err != nil {
			t.Fatal(err)
		}
		if got, gotBoot, err := decodeMeta(b); err != nil || got != m || gotBoot != boot {
			t.Fatalf("%+v %v", got, err)
		}
	})
}

func FuzzMeta(f *testing.F) {
	b, _ := encodeMeta(sample, 1)
	f.Add(b)
	f.Add([]byte("KG\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, boot, err := decodeMeta(b)
		if err != nil {
			return
		}
		if again, err := encodeMeta(m, boot); err != nil || string(again) != string(b) {
			t.Fatalf("%x became %x, %v", b, again, err)
		}
	})
}
