//go:build linux

package host

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// unreached lists the pairs of which one does not reach the other, as "n1>n2 ...".
func unreached(t *testing.T, f *Fleet) string {
	t.Helper()
	var cut []string
	for _, to := range f.Nodes {
		if _, err := call(to.Raft, 1, 300*time.Millisecond); err != nil {
			cut = append(cut, Client+">"+to.ID)
		}
	}
	type answer struct{ pair, text string }
	answers := make(chan answer)
	asked := 0
	for _, from := range f.Nodes {
		for _, to := range f.Nodes {
			if from != to {
				asked++
				go func() { answers <- answer{from.ID + ">" + to.ID, order(t, from, patience, "reach %s", to.Raft)} }()
			}
		}
	}
	for range asked {
		if a := <-answers; a.text != "ok" {
			cut = append(cut, a.pair)
		}
	}
	slices.Sort(cut)
	return strings.Join(cut, " ")
}

// wantUnreached looks until the pairs are those: a cut one never gets through, one
// that is not cut may be slow on a busy machine.
func wantUnreached(t *testing.T, f *Fleet, want string) {
	t.Helper()
	got := ""
	if await(patience, "", func() bool { got = unreached(t, f); return got == want }) != nil {
		t.Errorf("unreached: %q, want %q", got, want)
	}
}

// wantQuick looks until a call takes no longer than a limit: one that is slowed down
// never does, one that is not may on a busy machine.
func wantQuick(t *testing.T, addr string, bytes int, limit time.Duration) {
	t.Helper()
	var took time.Duration
	var err error
	if await(patience, "", func() bool { took, err = call(addr, bytes, patience); return err == nil && took <= limit }) != nil {
		t.Errorf("calls to %s are slow: the last took %s, %v", addr, took, err)
	}
}

// TestPartitions: what is cut is cut, both ways if a TCP answer is lost, and
// nothing else is; and healing heals.
func TestPartitions(t *testing.T) {
	f := fleet(t, Options{Net: NetNamespaces}, CapNetns, CapNft)
	wantUnreached(t, f, "")
	// Over TCP a one-way cut shows in both directions of asking, so datagrams tell
	// the directions apart.
	sent := func(from, to *Node, limit time.Duration) bool {
		before := number(t, order(t, to, patience, "received"))
		order(t, from, patience, "send %s 5", to.Gossip)
		return await(limit, "all arrived", func() bool { return number(t, order(t, to, patience, "received")) >= before+5 }) == nil
	}
	n1, n2 := f.Nodes[0], f.Nodes[1]
	id, err := f.Net.Inject(NetFault{From: []string{"n1"}, To: []string{"n2"}, Drop: 1})
	must(t, err)
	if sent(n1, n2, 200*time.Millisecond) || !sent(n2, n1, patience) {
		t.Error("a one-way cut is not one-way")
	}
	must(t, f.Net.Remove(id))
	must(t, f.Net.Remove(id)) // HO5
	if !sent(n1, n2, patience) {
		t.Error("a removed cut still cuts")
	}
	_, err = f.Net.Inject(NetFault{From: []string{"n1"}, To: []string{"n2", "n3"}, Drop: 1})
	must(t, err)
	_, err = f.Net.Inject(NetFault{From: []string{"n2", Client}, To: []string{"n3", "n1"}, Drop: 1})
	must(t, err)
	wantUnreached(t, f, "client>n1 client>n3 n1>n2 n1>n3 n2>n1 n2>n3 n3>n1 n3>n2")
	must(t, f.Net.Clear())
	_, err = f.Net.Inject(NetFault{From: []string{"n3"}, To: []string{Client}, Drop: 1})
	must(t, err)
	wantUnreached(t, f, "client>n3")
	must(t, f.Heal())
	wantUnreached(t, f, "")
	if f.Net.Faults() != 0 {
		t.Errorf("%d faults after healing", f.Net.Faults())
	}
	for _, bad := range []NetFault{{}, {From: []string{"n1"}, To: []string{"n9"}, Drop: 1}, {From: []string{"n1"}, To: []string{"n2"}, Drop: 2},
		{From: []string{"n1"}, To: []string{"n2"}, Drop: 1, Reset: 1}, {From: []string{"n1"}, Drop: 1}} {
		if _, err := f.Net.Inject(bad); err == nil {
			t.Errorf("accepted: %+v", bad)
		}
	}
}

// TestBadLinks: loss, resets, duplicates, delay and bandwidth have their effect.
func TestBadLinks(t *testing.T) {
	f := fleet(t, Options{Net: NetNamespaces, Nodes: 2}, CapNetns, CapNft, CapTC, CapTun)
	n1, n2 := f.Nodes[0], f.Nodes[1]
	n1to2 := NetFault{From: []string{"n1"}, To: []string{"n2"}}
	// datagrams sends some, waits for the least that should arrive, and a moment for
	// more.
	datagrams := func(count, least int) int {
		before := number(t, order(t, n2, patience, "received"))
		order(t, n1, patience, "send %s %d", n2.Gossip, count)
		got := 0
		arrived := func(limit time.Duration, least int) {
			_ = await(limit, "so many arrived", func() bool {
				got = number(t, order(t, n2, patience, "received")) - before
				return got >= least
			})
		}
		arrived(patience, least)
		arrived(200*time.Millisecond, 2*count+1)
		return got
	}
	with := func(name string, fault NetFault, check func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			id, err := f.Net.Inject(fault)
			must(t, err)
			check(t)
			must(t, f.Net.Remove(id))
			if answer := order(t, n1, patience, "call %s 1", n2.Raft); strings.HasPrefix(answer, "error") {
				t.Errorf("after the fault: %s", answer)
			}
		})
	}
	loss := n1to2
	loss.Drop = 0.5
	with("loss", loss, func(t *testing.T) {
		if got := datagrams(400, 100); got < 100 || got > 300 {
			t.Errorf("%d of 400 datagrams arrived", got)
		}
	})
	double := n1to2
	double.Duplicate = 1
	with("duplicates", double, func(t *testing.T) {
		if got := datagrams(20, 40); got != 40 {
			t.Errorf("of 20 datagrams %d arrived", got)
		}
	})
	reset := n1to2
	reset.Reset = 1
	with("resets", reset, func(t *testing.T) {
		if answer := order(t, n1, patience, "call %s 1", n2.Raft); !strings.Contains(answer, "refused") && !strings.Contains(answer, "reset") {
			t.Errorf("a reset call: %s", answer)
		}
	})
	slow := n1to2
	slow.Delay, slow.Jitter = 60*time.Millisecond, 20*time.Millisecond
	with("delay", slow, func(t *testing.T) {
		if took := duration(t, order(t, n1, patience, "call %s 1000", n2.Raft)); took < 110*time.Millisecond {
			t.Errorf("a call took %s, and 2 of its packets wait 60 ms", took)
		}
		wantQuick(t, n2.Raft, 1, 110*time.Millisecond) // another link
	})
	both := NetFault{From: []string{Client, "n1"}, To: []string{"n1", Client}, Delay: 30 * time.Millisecond}
	with("delay of clients", both, func(t *testing.T) {
		if took, err := call(n1.Raft, 1, patience); err != nil || took < 110*time.Millisecond {
			t.Errorf("a call took %s, and 4 of its packets wait 30 ms: %v", took, err)
		}
	})
	t.Run("bandwidth", func(t *testing.T) {
		must(t, f.Net.Limit("n2", 1_000_000))
		slow, err := call(n2.Raft, 100_000, patience)
		if err != nil || slow < 600*time.Millisecond {
			t.Errorf("200 kB at 1 Mbit/s took %s: %v", slow, err)
		}
		must(t, f.Net.Limit("n2", 0))
		must(t, f.Net.Limit("n2", 0))
		wantQuick(t, n2.Raft, 100_000, slow/2)
	})
}

// A device that could not be made is no device: the next delay tries anew, and
// nothing is left of it.
func TestDeviceThatCannotBeMade(t *testing.T) {
	if err := Detect().Lacks(CapTun, CapNetns); err != nil {
		t.Skipf("SKIPPED, NOT TESTED HERE: %v", err)
	}
	n := &Network{run: fmt.Sprintf("%s%d-0", namePrefix, os.Getpid()), short: fmt.Sprintf("kx%d", os.Getpid()%1000)}
	s := newSlowLinks(n)
	defer s.close()
	for range 2 {
		if err := s.tun("n1"); err == nil { // there is no such namespace
			t.Error("made a device in a namespace that does not exist")
		}
		if _, err := os.Stat("/sys/class/net/" + n.device("n1")); err == nil {
			t.Error("it is still there")
		}
	}
}

// HO2: only names that we make are ours to sweep.
func TestLinkOwner(t *testing.T) {
	for _, want := range []int64{4711, 1190} { // the second is x2
		n := &Network{short: "k" + strconv.FormatInt(want, 36) + "x" + strconv.FormatInt(37, 36)}
		for _, name := range []string{n.bridge(), n.veth("n1"), n.veth("n100"), n.device("n2"), n.device(Client), n.veth(StoreHost), n.device(StoreHost)} {
			if pid, ok := linkOwner(name); !ok || int64(pid) != want {
				t.Errorf("%s: %d %v, want %d", name, pid, ok, want)
			}
		}
	}
	for _, name := range []string{"knox0", "kx0", "k8sx1", "kube-ipvs0", "eth0", "k1xbridge", "kbr", "k3nx1eth0"} {
		if pid, ok := linkOwner(name); ok {
			t.Errorf("%s is taken for a link of process %d", name, pid)
		}
	}
}
