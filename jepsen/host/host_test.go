//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/faultfs"
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
				go func() { answers <- answer{from.ID + ">" + to.ID, order(t, from, 5*time.Second, "reach %s", to.Raft)} }()
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
	for range 5 {
		if got = unreached(t, f); got == want {
			return
		}
	}
	t.Errorf("unreached: %q, want %q", got, want)
}

// quickest is the shortest of some calls that succeed.
func quickest(t *testing.T, addr string, bytes int) time.Duration {
	t.Helper()
	best := time.Duration(0)
	for range 5 {
		if took, err := call(addr, bytes, 10*time.Second); err == nil && (best == 0 || took < best) {
			best = took
		}
	}
	if best == 0 {
		t.Fatalf("no call to %s succeeds", addr)
	}
	return best
}

// TestPartitions: what is cut is cut, both ways if a TCP answer is lost, and
// nothing else is; and healing heals.
func TestPartitions(t *testing.T) {
	f := fleet(t, Options{Net: NetNamespaces}, CapNetns, CapNft)
	wantUnreached(t, f, "")
	// Over TCP a one-way cut shows in both directions of asking, so datagrams tell
	// the directions apart.
	sent := func(from, to *Node, limit time.Duration) bool {
		before := number(t, order(t, to, time.Second, "received"))
		order(t, from, time.Second, "send %s 5", to.Gossip)
		return await(limit, "all arrived", func() bool { return number(t, order(t, to, time.Second, "received")) >= before+5 }) == nil
	}
	n1, n2 := f.Nodes[0], f.Nodes[1]
	id, err := f.Net.Inject(NetFault{From: []string{"n1"}, To: []string{"n2"}, Drop: 1})
	must(t, err)
	if sent(n1, n2, 200*time.Millisecond) || !sent(n2, n1, 5*time.Second) {
		t.Error("a one-way cut is not one-way")
	}
	must(t, f.Net.Remove(id))
	must(t, f.Net.Remove(id)) // HO5
	if !sent(n1, n2, 5*time.Second) {
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
	datagrams := func(count, least int) int {
		before := number(t, order(t, n2, time.Second, "received"))
		order(t, n1, 5*time.Second, "send %s %d", n2.Gossip, count)
		got := 0
		_ = await(500*time.Millisecond, "all arrived", func() bool {
			got = number(t, order(t, n2, time.Second, "received")) - before
			return got >= least
		})
		return got
	}
	with := func(name string, fault NetFault, check func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			id, err := f.Net.Inject(fault)
			must(t, err)
			check(t)
			must(t, f.Net.Remove(id))
			if answer := order(t, n1, 5*time.Second, "call %s 1", n2.Raft); strings.HasPrefix(answer, "error") {
				t.Errorf("after the fault: %s", answer)
			}
		})
	}
	loss := n1to2
	loss.Drop = 0.5
	with("loss", loss, func(t *testing.T) {
		if got := datagrams(400, 400); got < 100 || got > 300 {
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
		if answer := order(t, n1, 5*time.Second, "call %s 1", n2.Raft); !strings.Contains(answer, "refused") && !strings.Contains(answer, "reset") {
			t.Errorf("a reset call: %s", answer)
		}
	})
	slow := n1to2
	slow.Delay, slow.Jitter = 60*time.Millisecond, 20*time.Millisecond
	with("delay", slow, func(t *testing.T) {
		if took := duration(t, order(t, n1, 5*time.Second, "call %s 1000", n2.Raft)); took < 110*time.Millisecond {
			t.Errorf("a call took %s, and 2 of its packets wait 60 ms", took)
		}
		if took := quickest(t, n2.Raft, 1); took > 110*time.Millisecond {
			t.Errorf("another link is slow: %s", took)
		}
	})
	both := NetFault{From: []string{Client, "n1"}, To: []string{"n1", Client}, Delay: 30 * time.Millisecond}
	with("delay of clients", both, func(t *testing.T) {
		if took, err := call(n1.Raft, 1, 5*time.Second); err != nil || took < 110*time.Millisecond {
			t.Errorf("a call took %s, and 4 of its packets wait 30 ms: %v", took, err)
		}
	})
	t.Run("bandwidth", func(t *testing.T) {
		must(t, f.Net.Limit("n2", 1_000_000))
		slow, err := call(n2.Raft, 100_000, 10*time.Second)
		if err != nil || slow < 600*time.Millisecond {
			t.Errorf("200 kB at 1 Mbit/s took %s: %v", slow, err)
		}
		must(t, f.Net.Limit("n2", 0))
		must(t, f.Net.Limit("n2", 0))
		if took := quickest(t, n2.Raft, 100_000); took > slow/2 {
			t.Errorf("200 kB without limit took %s", took)
		}
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
		for _, name := range []string{n.bridge(), n.veth("n1"), n.veth("n100"), n.device("n2"), n.device(Client)} {
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

// TestProcesses: signals do what they say, and a dead node is dead (HO1, HO6).
func TestProcesses(t *testing.T) {
	f := fleet(t, Options{Net: NetLoopback, Nodes: 2})
	n, other := f.Nodes[0], f.Nodes[1]
	answers := func(limit time.Duration) bool { return order(t, n, limit, "received") != "" }
	must(t, n.Pause())
	if answers(150*time.Millisecond) || !n.Running() {
		t.Error("a paused node answers, or is gone")
	}
	must(t, n.Resume())
	must(t, n.Resume())
	if !answers(5 * time.Second) {
		t.Error("a resumed node does not answer")
	}
	if err := n.Start(); err == nil {
		t.Error("started twice")
	}
	if err := n.Wipe(); err == nil {
		t.Error("a running node was wiped")
	}
	must(t, n.Pause())
	must(t, n.Kill())
	must(t, n.Kill())
	if n.Running() || answers(150*time.Millisecond) {
		t.Error("a killed node lives")
	}
	must(t, n.Start())
	listening(t, n)
	must(t, os.WriteFile(filepath.Join(n.Disk.DataDir(), "x"), nil, 0o644))
	if files, err := n.Files(); err != nil || len(files) != 1 {
		t.Errorf("files: %v %v", files, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if code, err := n.Stop(ctx); code != 0 || err != nil {
		t.Errorf("stopped: %d %v", code, err)
	}
	must(t, n.Wipe())
	if files, err := n.Files(); err != nil || len(files) != 0 {
		t.Errorf("a wiped node has data: %v %v", files, err)
	}
	if _, ended := n.Ended(); ended {
		t.Error("a node that was stopped counts as ended by itself")
	}
	must(t, syscall.Kill(other.Pid(), syscall.SIGTERM))
	must(t, await(5*time.Second, "the other ended", func() bool { _, ended := other.Ended(); return ended }))
	if code, _ := other.Ended(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if d := other.Deaths(); len(d) != 1 || d[0].Code != 0 || d[0].Node != "n2" || len(n.Deaths()) != 0 {
		t.Errorf("deaths: %v %v", d, n.Deaths())
	}
	must(t, f.StartAll())
	if !n.Running() || !other.Running() || !n.LogHas("# start 3 of n1") {
		t.Error("not all run again")
	}
}

// TestDeaths: a node that is asked to stop and ends with an error, or ends by
// itself before it is killed, has died; one that ends as it is told has not.
func TestDeaths(t *testing.T) {
	f := fleet(t, Options{Net: NetLoopback, Nodes: 1})
	n := f.Nodes[0]
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	again := func() {
		must(t, n.Start())
		listening(t, n)
	}
	stop := func(want int) {
		t.Helper()
		if code, err := n.Stop(ctx); code != want || err != nil {
			t.Errorf("stopped with code %d: %v", code, err)
		}
	}
	deaths := func(want ...int) {
		t.Helper()
		var codes []int
		for _, d := range n.Deaths() {
			codes = append(codes, d.Code)
		}
		if !slices.Equal(codes, want) {
			t.Errorf("deaths with codes %v, want %v", codes, want)
		}
	}
	stop(0)
	again()
	must(t, n.Kill())
	deaths()
	again()
	order(t, n, time.Second, "end-with 3") // when it is asked to stop
	stop(3)
	deaths(3)
	again()
	order(t, n, time.Second, "end-now 4")
	must(t, await(5*time.Second, "it has ended", func() bool { _, ended := n.Ended(); return ended }))
	must(t, n.Kill())
	deaths(3, 4)
}

// TestGroups: quotas, limits and the freezer have their effect.
func TestGroups(t *testing.T) {
	f := fleet(t, Options{Net: NetLoopback, Nodes: 1, Groups: true}, CapCPU, CapMemory, CapBlkio, CapFreezer)
	n := f.Nodes[0]
	t.Run("cpu", func(t *testing.T) {
		must(t, n.Group.LimitCPU(5))
		// 300 ms of trying to compute get 5 ms of each 100, and at most two periods
		// more at the ends.
		if used := duration(t, order(t, n, 30*time.Second, "work")); used > 60*time.Millisecond {
			t.Errorf("used %s of 300 ms with a twentieth of a CPU", used)
		}
		stat, err := os.ReadFile(filepath.Join(n.Group.dirs["cpu"].dir, "cpu.stat"))
		must(t, err)
		if strings.Contains(string(stat), "nr_throttled 0\n") {
			t.Errorf("never throttled: %q", stat)
		}
		must(t, n.Group.LimitCPU(0))
	})
	t.Run("disk", func(t *testing.T) {
		must(t, n.Group.LimitDisk(n.Disk.Dir, 500_000))
		slow := duration(t, order(t, n, 30*time.Second, "write f 1000000"))
		if slow < 1500*time.Millisecond {
			t.Errorf("1 MB at 500 kB/s took %s", slow)
		}
		must(t, n.Group.Clear())
		again := slow
		for range 3 {
			again = min(again, duration(t, order(t, n, 30*time.Second, "write f 1000000")))
		}
		if again > slow/2 {
			t.Errorf("%s with the limit, %s after it", slow, again)
		}
	})
	t.Run("freezer", func(t *testing.T) {
		must(t, n.Group.Freeze(true))
		if answer := order(t, n, 150*time.Millisecond, "received"); answer != "" {
			t.Error("a frozen node answers")
		}
		must(t, n.Group.Freeze(false))
		if answer := order(t, n, 5*time.Second, "received"); answer == "" {
			t.Error("a thawed node does not answer")
		}
		must(t, n.Group.Freeze(true))
		must(t, n.Kill()) // HO6
		must(t, n.Start())
		listening(t, n)
	})
	t.Run("memory", func(t *testing.T) {
		must(t, n.Group.LimitMemory(64<<20))
		if answer := order(t, n, 20*time.Second, "take %d", 256<<20); answer != "" {
			t.Errorf("took over the limit: %s", answer)
		}
		must(t, await(10*time.Second, "it is killed", func() bool { _, ended := n.Ended(); return ended }))
		if d := n.Deaths(); len(d) != 1 || d[0].Signal != "killed" || d[0].Code != -1 {
			t.Errorf("deaths: %v", d)
		}
		must(t, n.Group.LimitMemory(0))
		must(t, n.Start())
		listening(t, n)
		if answer := order(t, n, 20*time.Second, "take %d", 256<<20); answer != fmt.Sprint(256<<20) {
			t.Errorf("without limit: %q", answer)
		}
	})
}

// TestFullDisks: each kind of a small disk fills up, and empties again.
func TestFullDisks(t *testing.T) {
	for kind, needs := range map[DiskKind][]Capability{DiskFault: {CapFuse}, DiskExt4: {CapLoop}, DiskTmpfs: {CapTmpfs}} {
		t.Run(string(kind), func(t *testing.T) {
			f := fleet(t, Options{Net: NetLoopback, Nodes: 1, Disk: kind, DiskBytes: 16 << 20}, needs...)
			n := f.Nodes[0]
			duration(t, order(t, n, 10*time.Second, "write f 100000"))
			must(t, n.Disk.Fill(0))
			must(t, n.Disk.Fill(0))
			if answer := order(t, n, 10*time.Second, "write g 200000"); !strings.Contains(answer, "no space left") {
				t.Errorf("on a full disk: %s", answer)
			}
			must(t, n.Disk.Unfill())
			must(t, n.Disk.Unfill())
			duration(t, order(t, n, 10*time.Second, "write g 200000"))
		})
	}
	d := &Disk{Kind: DiskPlain}
	if d.Fill(0) == nil || d.Freeze(true) == nil {
		t.Error("the machine's own disk was filled or frozen")
	}
}

// TestHungDisks: writes hang until the disk comes back, and a node on a hung disk
// can be killed (HO6).
func TestHungDisks(t *testing.T) {
	t.Run("ext4", func(t *testing.T) {
		f := fleet(t, Options{Net: NetLoopback, Nodes: 1, Disk: DiskExt4, DiskBytes: 16 << 20}, CapLoop)
		n := f.Nodes[0]
		must(t, n.Disk.Freeze(true))
		done := make(chan string, 1)
		go func() { done <- order(t, n, 10*time.Second, "write f 10") }()
		select {
		case answer := <-done:
			t.Errorf("a frozen disk writes: %s", answer)
		case <-time.After(200 * time.Millisecond):
		}
		must(t, n.Heal())
		duration(t, <-done)
	})
	t.Run("fault", func(t *testing.T) {
		f := fleet(t, Options{Net: NetLoopback, Nodes: 1, Disk: DiskFault}, CapFuse)
		n := f.Nodes[0]
		_, err := n.Disk.Fault.Inject(faultfs.Rule{Ops: []faultfs.Op{faultfs.OpSync}, Stall: true})
		must(t, err)
		done := make(chan string, 1)
		go func() { done <- order(t, n, 10*time.Second, "write f 10") }()
		must(t, await(5*time.Second, "it hangs", func() bool { s, _ := n.Disk.Fault.Stats(); return s.Stalled == 1 }))
		must(t, n.Kill())
		if answer := <-done; answer != "" {
			t.Errorf("a killed node answers: %s", answer)
		}
	})
}

// TestPowerLoss: what a node synced is there after it, the rest is not.
func TestPowerLoss(t *testing.T) {
	f := fleet(t, Options{Net: NetLoopback, Nodes: 2, Disk: DiskFault}, CapFuse)
	n := f.Nodes[0]
	duration(t, order(t, n, 10*time.Second, "write lost 1000")) // without its directory
	reports, err := f.PowerLoss(f.Nodes, faultfs.DropAll, 1)
	must(t, err)
	if len(reports) != 2 || reports[0].NamesDropped != 1 {
		t.Errorf("reports: %v", reports)
	}
	if files, err := n.Files(); err != nil || len(files) != 0 {
		t.Errorf("after the power loss: %v %v", files, err)
	}
	must(t, f.Heal())
	listening(t, n)
	duration(t, order(t, n, 10*time.Second, "write kept 1000"))
	must(t, n.Disk.Fault.SyncAll())
	_, err = f.PowerLoss(f.Nodes[:1], faultfs.DropAll, 1)
	must(t, err)
	if files, err := n.Files(); err != nil || len(files) != 1 {
		t.Errorf("after the second: %v %v", files, err)
	}
}

// TestSweep: what a killed harness leaves is swept, what a living one has is not
// (HO2), and its nodes die with it (HO1).
func TestSweep(t *testing.T) {
	if os.Getenv("KEELJ_TEST_ORPHAN") != "" {
		f := fleet(t, Options{Disk: DiskFault, Groups: true, Nodes: 1}, CapNetns, CapNft, CapFuse, CapCPU)
		must(t, os.WriteFile(os.Getenv("KEELJ_TEST_ORPHAN"), fmt.Append(nil, f.Nodes[0].Pid(), " ", f.Net.ns("n1")), 0o644))
		must(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
	}
	living := fleet(t, Options{Disk: DiskFault, Groups: true, Nodes: 1}, CapNetns, CapNft, CapFuse, CapCPU)
	self, err := os.Executable()
	must(t, err)
	told := filepath.Join(t.TempDir(), "told")
	cmd := exec.Command(self, "-test.run=^TestSweep$")
	cmd.Env = append(os.Environ(), "KEELJ_TEST_ORPHAN="+told)
	out, _ := cmd.CombinedOutput() // it kills itself
	b, err := os.ReadFile(told)
	if err != nil {
		t.Fatalf("the harness to be killed did not come so far: %v\n%s", err, out)
	}
	var pid int
	var ns string
	if _, err := fmt.Sscan(string(b), &pid, &ns); err != nil {
		t.Fatal(err)
	}
	must(t, await(10*time.Second, "its node is dead", func() bool { return syscall.Kill(pid, 0) != nil }))
	var swept []string
	must(t, await(10*time.Second, "all is swept", func() bool {
		more, err := Sweep()
		swept = append(swept, more...)
		return err == nil
	}))
	for _, kind := range []string{"namespace " + ns, "link k", "mount /", "group "} {
		if !strings.Contains(strings.Join(swept, "\n"), kind) {
			t.Errorf("no %q was swept: %q", kind, swept)
		}
	}
	if _, err := os.Stat(filepath.Join(netnsDir, ns)); err == nil {
		t.Error("the namespace is still there")
	}
	routes, err := output("", "ip", "-o", "route", "show", "type", "unreachable")
	must(t, err)
	if strings.Contains(routes, fmt.Sprint("metric ", guardBase+cmd.Process.Pid)) || !strings.Contains(routes, "metric "+guardMetric()) {
		t.Errorf("guarding routes: %q", routes)
	}
	if answer := order(t, living.Nodes[0], 5*time.Second, "write f 10"); strings.HasPrefix(answer, "error") || answer == "" {
		t.Errorf("the living one was swept: %q", answer)
	}
	if _, err := call(living.Nodes[0].Raft, 1, time.Second); err != nil {
		t.Error(err)
	}
}
