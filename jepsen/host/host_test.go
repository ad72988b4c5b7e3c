//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/faultfs"
	"github.com/keelstate/keelstate/jepsen/s3fault"
)

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
	if !answers(patience) {
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
	ctx, cancel := context.WithTimeout(t.Context(), patience)
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
	must(t, await(patience, "the other ended", func() bool { _, ended := other.Ended(); return ended }))
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
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
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
	if answer := order(t, n, patience, "end-with 3"); answer != "ok" { // when it is asked to stop
		t.Fatalf("it does not take the order: %q", answer)
	}
	stop(3)
	deaths(3)
	again()
	order(t, n, patience, "end-now 4")
	must(t, await(patience, "it has ended", func() bool { _, ended := n.Ended(); return ended }))
	must(t, n.Kill())
	deaths(3, 4)
}

// Processes with other numbers draw other ports, as long as theirs last.
func TestPortsOfProcesses(t *testing.T) {
	of := map[int]int{} // whose a port is
	for pid := range ports / portBlock {
		for range 2000 {
			port := drawPort(pid, 0)
			if owner, drawn := of[port]; port < firstPort || port >= firstPort+ports || drawn && owner != pid {
				t.Fatalf("port %d of process %d is that of %d", port, pid, owner)
			}
			of[port] = pid
		}
	}
	for range 20000 { // far more than chance needs to leave a block of sixteen
		if port := drawPort(0, triesInBlock); port >= firstPort+portBlock && port < firstPort+ports {
			return
		}
	}
	t.Error("a process whose ports are used up gets no others")
}

// TestGroups: quotas, limits and the freezer have their effect.
func TestGroups(t *testing.T) {
	f := fleet(t, Options{Net: NetLoopback, Nodes: 1, Groups: true}, CapCPU, CapMemory, CapBlkio, CapFreezer)
	n := f.Nodes[0]
	t.Run("cpu", func(t *testing.T) {
		must(t, n.Group.LimitCPU(5))
		// 300 ms of trying to compute get 5 ms of each 100, and at most two periods
		// more at the ends.
		if used := duration(t, order(t, n, patience, "work")); used > 60*time.Millisecond {
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
		slow := duration(t, order(t, n, patience, "write f 1000000"))
		if slow < 1500*time.Millisecond {
			t.Errorf("1 MB at 500 kB/s took %s", slow)
		}
		must(t, n.Group.Clear())
		// Others may use the disk, too; under the limit no write is ever so quick.
		quick := await(patience, "a write is quick again", func() bool {
			return duration(t, order(t, n, patience, "write f 1000000")) <= slow/2
		})
		if quick != nil {
			t.Errorf("%s with the limit, and after it: %v", slow, quick)
		}
	})
	t.Run("freezer", func(t *testing.T) {
		must(t, n.Group.Freeze(true))
		if answer := order(t, n, 150*time.Millisecond, "received"); answer != "" {
			t.Error("a frozen node answers")
		}
		must(t, n.Group.Freeze(false))
		if answer := order(t, n, patience, "received"); answer == "" {
			t.Error("a thawed node does not answer")
		}
		must(t, n.Group.Freeze(true))
		must(t, n.Kill()) // HO6
		must(t, n.Start())
		listening(t, n)
	})
	t.Run("memory", func(t *testing.T) {
		must(t, n.Group.LimitMemory(64<<20))
		if answer := order(t, n, patience, "take %d", 256<<20); answer != "" {
			t.Errorf("took over the limit: %s", answer)
		}
		must(t, await(patience, "it is killed", func() bool { _, ended := n.Ended(); return ended }))
		if d := n.Deaths(); len(d) != 1 || d[0].Signal != "killed" || d[0].Code != -1 {
			t.Errorf("deaths: %v", d)
		}
		must(t, n.Group.LimitMemory(0))
		must(t, n.Start())
		listening(t, n)
		if answer := order(t, n, patience, "take %d", 256<<20); answer != fmt.Sprint(256<<20) {
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
			duration(t, order(t, n, patience, "write f 100000"))
			must(t, n.Disk.Fill(0))
			must(t, n.Disk.Fill(0))
			if answer := order(t, n, patience, "write g 200000"); !strings.Contains(answer, "no space left") {
				t.Errorf("on a full disk: %s", answer)
			}
			must(t, n.Disk.Unfill())
			must(t, n.Disk.Unfill())
			duration(t, order(t, n, patience, "write g 200000"))
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
		go func() { done <- order(t, n, patience, "write f 10") }()
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
		go func() { done <- order(t, n, patience, "write f 10") }()
		must(t, await(patience, "it hangs", func() bool { s, _ := n.Disk.Fault.Stats(); return s.Stalled == 1 }))
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
	duration(t, order(t, n, patience, "write lost 1000")) // without its directory
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
	duration(t, order(t, n, patience, "write kept 1000"))
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
	must(t, await(patience, "its node is dead", func() bool { return syscall.Kill(pid, 0) != nil }))
	var swept []string
	must(t, await(patience, "all is swept", func() bool {
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
	if answer := order(t, living.Nodes[0], patience, "write f 10"); strings.HasPrefix(answer, "error") || answer == "" {
		t.Errorf("the living one was swept: %q", answer)
	}
	if _, err := call(living.Nodes[0].Raft, 1, patience); err != nil {
		t.Error(err)
	}
}

// Only what lies on a device can be throttled.
func TestThrottles(t *testing.T) {
	if err := Throttles("/proc"); err == nil {
		t.Error("/proc is taken for a disk")
	}
	for _, dir := range []string{t.TempDir(), "/", "/dev"} {
		if Throttles(dir) != nil {
			continue
		}
		f := fleet(t, Options{Nodes: 1, Groups: true}, CapBlkio)
		must(t, f.Nodes[0].Group.LimitDisk(dir, 1_000_000))
		must(t, f.Nodes[0].Group.LimitDisk(dir, 0))
		return
	}
}

// TestStore: every node reaches the object store, which has a host of its own
// where there are hosts; faults hit the nodes that they are for, Heal ends them, and
// a service that ends by itself is noticed.
func TestStore(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	for _, mode := range []NetMode{NetLoopback, NetNamespaces} {
		t.Run(string(mode), func(t *testing.T) {
			var needs []Capability
			if mode == NetNamespaces {
				needs = []Capability{CapNetns, CapNft}
			}
			f := fleet(t, Options{Nodes: 2, Net: mode, StoreBinary: self}, needs...)
			flags, env := f.Store.flags()
			url := flags[slices.Index(flags, "--object-store-endpoint")+1]
			if !slices.Contains(f.Nodes[0].flags(), url) || len(env) == 0 {
				t.Errorf("the nodes' flags: %q", f.Nodes[0].flags())
			}
			ask := func(n *Node) string { return order(t, n, patience, "get %s/b/k", url) }
			all := func(want bool) {
				t.Helper()
				for _, n := range f.Nodes {
					if got := ask(n); strings.HasSuffix(got, "/data") != want {
						t.Errorf("%s is told %q", n.ID, got)
					}
				}
			}
			all(true)
			if _, err := f.Store.Proxy.Inject(s3fault.Fault{Kind: s3fault.Down, Share: 1}); err != nil {
				t.Fatal(err)
			}
			all(false)
			must(t, f.Heal())
			all(true)
			if f.Net != nil {
				one := s3fault.Fault{Kind: s3fault.Errors, Share: 1, From: []string{f.Net.Address("n2")}}
				if _, err := f.Store.Proxy.Inject(one); err != nil {
					t.Fatal(err)
				}
				if a, b := ask(f.Nodes[0]), ask(f.Nodes[1]); !strings.HasSuffix(a, "/data") || !strings.Contains(b, "InternalError") {
					t.Errorf("a fault for n2: %q and %q", a, b)
				}
				must(t, f.Heal())
			}
			must(t, f.Store.Err())
			order(t, f.Nodes[0], patience, "get %s/end", url)
			must(t, await(patience, "its end is noticed", func() bool { return f.Store.Err() != nil }))
			if err := f.Store.Err(); !strings.Contains(err.Error(), "code 3") {
				t.Error(err)
			}
		})
	}
}

// A store that does not start says so, and leaves nothing.
func TestStoreThatDoesNotStart(t *testing.T) {
	_, err := NewFleet(Options{Nodes: 1, Net: NetLoopback, Dir: t.TempDir(), NodeBinary: "/bin/true", StoreBinary: "/bin/false"})
	if err == nil || !strings.Contains(err.Error(), "the object store ended with code 1") {
		t.Fatal(err)
	}
}
