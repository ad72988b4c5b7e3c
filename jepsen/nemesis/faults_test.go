//go:build linux

package nemesis

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/keelstate/keelstate/jepsen/faultfs"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/s3fault"
)

// fakeClock remembers what it was told. Only so many nodes take a wrong time, if
// that is above 0.
type fakeClock struct {
	set   map[string]string
	takes int
}

func (c *fakeClock) Set(_ context.Context, n *host.Node, offset time.Duration, ppm int64) error {
	if c.takes > 0 && len(c.set) == c.takes && (offset != 0 || ppm != 0) {
		return errors.New("it takes no clock")
	}
	c.set[n.ID] = fmt.Sprint(offset, ppm)
	return nil
}

// newFleet starts a fleet and closes it however the test ends.
func newFleet(t *testing.T, opts host.Options, needs ...host.Capability) *host.Fleet {
	t.Helper()
	if err := host.Detect().Lacks(needs...); err != nil {
		t.Skipf("SKIPPED, NOT TESTED HERE: %v", err)
	}
	opts.Dir = t.TempDir()
	f, err := host.NewFleet(opts)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range f.Nodes {
				b, _ := os.ReadFile(n.LogFile)
				t.Logf("the end of the log of %s:\n%s", n.ID, b[max(0, len(b)-3000):])
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	must(t, f.StartAll())
	return f
}

func fakeFleet(t *testing.T, opts host.Options, needs ...host.Capability) *host.Fleet {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	t.Setenv("KEELJ_TEST_FAKE", "1")
	opts.NodeBinary, opts.CtlBinary = self, self
	f := newFleet(t, opts, needs...)
	for _, n := range f.Nodes {
		eventually(t, func() error {
			info, err := os.Stat(filepath.Join(n.Disk.DataDir(), "log"))
			if err == nil && info.Size() == 0 {
				err = errors.New("nothing is written yet")
			}
			return err
		})
	}
	return f
}

// stopped says whether a process stands.
func stopped(n *host.Node) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.Pid()))
	return err == nil && strings.HasPrefix(string(b[bytes.LastIndexByte(b, ')')+1:]), " T")
}

// lies counts the fsyncs of which the disks lied.
func lies(f *host.Fleet) (n int64) {
	for _, node := range f.Nodes {
		if node.Disk.Fault != nil {
			st, _ := node.Disk.Fault.Stats()
			n += st.Lies
		}
	}
	return n
}

// effective says why a fault that was injected shows no effect, or nil. Before it
// the disks had lied so many times.
func effective(f *host.Fleet, fault Fault, in *Injection, clock *fakeClock, lied int64) error {
	var target *host.Node
	for _, id := range in.Targets {
		if n := f.Node(id); n != nil {
			target = n
			break
		}
	}
	rules := func(want bool) error {
		if st, err := target.Disk.Fault.Stats(); err != nil || (st.Rules > 0) != want {
			return fmt.Errorf("%d rules on the disk: %w", st.Rules, err)
		}
		return nil
	}
	ok := true
	switch fault.Kind() {
	case KindKill, KindRestart, KindPowerLoss, KindBitFlip:
		ok = !target.Running()
	case KindPause:
		ok = stopped(target) || fault.Name() == "freeze-one"
	case KindPartition, KindOneWay, KindFlap, KindLoss, KindDuplicate, KindDelay, KindReset, KindBandwidth:
		ok = f.Net.Faults() > 0
	case KindHungDisk:
		if target.Disk.Kind == host.DiskFault {
			st, _ := target.Disk.Fault.Stats()
			ok = st.Stalled > 0
		}
	case KindFsyncError:
		_, ok = target.Ended()
	case KindLyingFsync:
		ok = lies(f) > lied
	case KindSlowDisk, KindReadError:
		if target.Disk.Fault != nil {
			return rules(true)
		}
	case KindFullDisk:
		if target.Disk.Kind == host.DiskFault {
			st, _ := target.Disk.Fault.Stats()
			ok = st.Capacity < 1<<30
		}
	case KindStoreDown, KindStoreHang, KindStoreSlow, KindStoreThrottle, KindStoreErrors, KindStoreLostAnswer, KindStoreCutBody, KindStoreWrongBytes:
		ok = f.Store.Proxy.Faults() > 0
	case KindClock:
		ok = clock.set[target.ID] != "0s 0" && clock.set[target.ID] != "0s0"
	}
	if !ok {
		return fmt.Errorf("%s on %v has no effect", fault.Name(), in.Targets)
	}
	return nil
}

// clean says what is left of faults, or nil.
func clean(f *host.Fleet, clock *fakeClock) error {
	var left error
	if f.Net != nil && f.Net.Faults() > 0 {
		left = fmt.Errorf("%d faults of the network", f.Net.Faults())
	}
	if f.Store != nil && f.Store.Proxy.Faults() > 0 {
		left = errors.Join(left, fmt.Errorf("%d faults of the object store", f.Store.Proxy.Faults()))
	}
	for _, n := range f.Nodes {
		if !n.Running() || stopped(n) {
			left = errors.Join(left, fmt.Errorf("%s does not run", n.ID))
		}
		if n.Disk.Fault != nil {
			if st, err := n.Disk.Fault.Stats(); err != nil || st.Rules > 0 || st.Capacity < 1<<30 {
				left = errors.Join(left, fmt.Errorf("the disk of %s: %+v %w", n.ID, st, err))
			}
		}
		if set, ok := clock.set[n.ID]; ok && set != "0s 0" {
			left = errors.Join(left, fmt.Errorf("the clock of %s: %s", n.ID, set))
		}
	}
	return left
}

// TestCrashEveryFault injects every fault of the catalogue, twice with other seeds, and
// looks for its effect, and for what its heal, done twice, leaves (NE1).
func TestCrashEveryFault(t *testing.T) {
	for _, disk := range []host.DiskKind{host.DiskFault, host.DiskExt4, host.DiskPlain} {
		t.Run(string(disk), func(t *testing.T) { everyFault(t, disk) })
	}
}

func everyFault(t *testing.T, disk host.DiskKind) {
	nodes := map[host.DiskKind]int{host.DiskPlain: 5}[disk] // for the ring; else the default
	self, err := os.Executable()
	must(t, err)
	f := fakeFleet(t, host.Options{Nodes: nodes, Disk: disk, StoreBinary: map[host.DiskKind]string{host.DiskFault: self}[disk], DiskBytes: map[host.DiskKind]int64{host.DiskExt4: 16 << 20}[disk], Groups: true},
		host.CapNetns, host.CapNft, host.CapTC, host.CapTun, host.CapFuse, host.CapLoop, host.CapCPU, host.CapMemory, host.CapBlkio, host.CapFreezer)
	env, clock := NewEnv(f, 1), &fakeClock{set: map[string]string{}}
	env.Clock = clock
	faults, missing := Catalogue(env)
	t.Logf("%d faults; missing:\n%s", len(faults), strings.Join(missing, "\n"))
	if want := map[host.DiskKind]int{host.DiskFault: 58}[disk]; want > 0 && (len(faults) != want || len(missing) != 1) {
		t.Errorf("%d faults, want %d; missing: %q", len(faults), want, missing)
	}
	seen := map[string]bool{}
	for _, fault := range faults {
		if disk != host.DiskFault && !slices.Contains([]Kind{KindSlowDisk, KindHungDisk, KindFullDisk, KindBitFlip}, fault.Kind()) &&
			fault.Name() != "partition-ring" {
			continue // tried with the other disks
		}
		if seen[fault.Name()] {
			t.Errorf("two faults are called %s", fault.Name())
		}
		seen[fault.Name()] = true
		for seed := range uint64(2) {
			lied := lies(f)
			in, err := fault.Inject(t.Context(), rand.New(rand.NewPCG(seed, 1)))
			if errors.Is(err, ErrNotNow) && fault.Kind() == KindMemory {
				continue
			}
			if err != nil {
				t.Errorf("seed %d: %v", seed, err)
				continue
			}
			if in.Description == "" || len(in.Targets) == 0 {
				t.Errorf("%s: %+v", fault.Name(), in)
			}
			eventually(t, func() error { return effective(f, fault, in, clock, lied) })
			must(t, in.Heal(t.Context()))
			must(t, in.Heal(t.Context()))
			if fault.Kind() == KindFsyncError && !strings.Contains(in.Outcome, "with code 70") || fault.Kind() == KindLyingFsync && in.Outcome == "" {
				t.Errorf("%s: outcome %q", fault.Name(), in.Outcome)
			}
			if in.Idle && slices.Contains([]Kind{KindFsyncError, KindLyingFsync, KindTransfer}, fault.Kind()) {
				t.Errorf("%s counts as idle: %s", fault.Name(), in.Outcome)
			}
			eventually(t, func() error { return clean(f, clock) })
		}
	}
	if disk == host.DiskPlain && !seen["partition-ring"] {
		t.Error("no ring of five")
	}
	// Nodes of these tests end by themselves only when their disk fails, or the
	// kernel takes them for their memory.
	for _, d := range env.Deaths() {
		if d.Code != 70 && d.Signal != "killed" {
			t.Errorf("%+v", d)
		}
	}
}

// TestFlipTarget: every class of files of a node is hit alike, however many files
// it has, and none that the node never reads.
func TestFlipTarget(t *testing.T) {
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 1, Disk: host.DiskPlain})
	n := f.Nodes[0]
	for name, size := range map[string]int{"IDENTITY": 10, "BALLAST": 1000, "g/1/s/IDENTITY": 5, "g/1/s/LOG": 9, "g/1/s/LOG.old.17": 9, "empty": 0,
		"g/1/s/000001.sst": 7, "g/1/s/000002.sst": 7, "g/2/s/000003.sst": 7, "g/2/s/MANIFEST-000009": 7} {
		path := filepath.Join(n.Disk.DataDir(), name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, make([]byte, size), 0o644))
	}
	env, hit := NewEnv(f, 1), map[string]int{}
	for seed := range uint64(600) {
		path, size, err := env.flipTarget(rand.New(rand.NewPCG(seed, 1)), n)
		must(t, err)
		if size == 0 {
			t.Fatalf("%s is empty", path)
		}
		hit[digits.ReplaceAllString(strings.TrimPrefix(path, n.Disk.DataDir()+"/"), "#")]++
	}
	// The fake node's own file is a class too.
	for _, class := range []string{"IDENTITY", "g/#/s/IDENTITY", "g/#/s/#.sst", "g/#/s/MANIFEST-#", "log"} {
		if hit[class] < 80 {
			t.Errorf("%s is hit %d times of 600", class, hit[class])
		}
		delete(hit, class)
	}
	if len(hit) > 0 {
		t.Errorf("also hit: %v", hit)
	}
}

// TestIdle: a fault that nothing met is no injection.
func TestIdle(t *testing.T) {
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 1, Disk: host.DiskFault}, host.CapFuse)
	slow := func(path string) *Injection {
		in, err := withRule(f.Nodes, "slow", faultfs.Rule{Ops: []faultfs.Op{faultfs.OpWrite}, Path: path, Delay: time.Millisecond})
		must(t, err)
		return in
	}
	idle, met := slow("no-such-file"), slow("*")
	eventually(t, func() error {
		if hits, err := f.Nodes[0].Disk.Fault.Hits(2); err != nil || hits == 0 { // the second of this disk
			return fmt.Errorf("%d hits: %w", hits, err)
		}
		return nil
	})
	for _, in := range []*Injection{idle, met, idle, met} {
		must(t, in.Heal(t.Context()))
	}
	if !idle.Idle || met.Idle || idle.Outcome != "it hit 0 calls" || strings.Count(met.Outcome, "hit") != 1 {
		t.Errorf("idle: %v %q; met: %v %q", idle.Idle, idle.Outcome, met.Idle, met.Outcome)
	}
	counts := Count([]Record{{Kind: KindSlowDisk, Idle: true}, {Kind: KindSlowDisk}, {Kind: KindSlowDisk, Skipped: "x"}})
	if counts[KindSlowDisk] != 1 {
		t.Errorf("counted: %v", counts)
	}
}

// TestClocksTogether: if one of several nodes takes no wrong time, none keeps it.
func TestClocksTogether(t *testing.T) {
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 3})
	env, clock := NewEnv(f, 1), &fakeClock{set: map[string]string{}, takes: 2}
	env.Clock = clock
	for seed := uint64(0); len(clock.set) < clock.takes; seed++ { // until all nodes are meant
		in, err := env.clockStep(t.Context(), rand.New(rand.NewPCG(seed, 1)))
		if err == nil {
			must(t, in.Heal(t.Context()))
			clear(clock.set)
		}
	}
	for id, set := range clock.set {
		if set != "0s 0" {
			t.Errorf("the clock of %s: %s", id, set)
		}
	}
}

// TestProofWithout: the proof that lets a node come back which lost what it had
// synced is of every shard, and of a majority of its replicas (NE6).
func TestProofWithout(t *testing.T) {
	three, five := []string{"a", "b", "c"}, []string{"a", "b", "c", "d", "e"}
	h := func(shard int, node string, index uint64, content string) host.ReplicaHash {
		return host.ReplicaHash{Shard: shard, Node: node, Index: index, Content: content}
	}
	both := []host.ReplicaHash{h(1, "n2", 7, "x"), h(1, "n3", 7, "x"), h(2, "n2", 9, "y"), h(2, "n3", 9, "y")}
	for _, c := range []struct {
		name   string
		shards []host.Shard
		hashes []host.ReplicaHash
		proved bool
	}{
		{"all", []host.Shard{{ID: 1, Replicas: three}, {ID: 2, Replicas: three}}, both, true},
		{"a shard without a leader", []host.Shard{{ID: 1, Leader: "n2", Replicas: three}, {ID: 2, Replicas: three}}, both[:2], false},
		{"with its help only", []host.Shard{{ID: 1, Replicas: three}}, []host.ReplicaHash{h(1, "n1", 7, "x"), h(1, "n2", 7, "x")}, false},
		{"other indexes", []host.Shard{{ID: 1, Replicas: three}}, []host.ReplicaHash{h(1, "n2", 7, "x"), h(1, "n3", 8, "x")}, false},
		{"two of five replicas", []host.Shard{{ID: 1, Replicas: five}}, both[:2], false},
		{"three replicas on five nodes", []host.Shard{{ID: 1, Replicas: three}}, both[:2], true},
	} {
		if err := agreeWithout("n1", c.shards, c.hashes); (err == nil) != c.proved {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// The system group has to commit an entry, too.
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 3})
	env := NewEnv(f, 1)
	must(t, env.committedWithout(t.Context(), f.Nodes[2], time.Minute))
	t.Setenv("KEELJ_TEST_NO_SYSTEM", "1")
	if err := env.committedWithout(t.Context(), f.Nodes[2], time.Minute); err == nil || !strings.Contains(err.Error(), "system group") {
		t.Errorf("without the system group: %v", err)
	}
}

// TestRing: a node of a ring sees a majority, and no more than that takes.
func TestRing(t *testing.T) {
	for nodes := 5; nodes < 20; nodes++ {
		sees := func(sight int) bool { return 2*sight+1 > nodes/2 }
		if sight := ringSight(nodes); !sees(sight) || sees(sight-1) {
			t.Errorf("of %d nodes one sees %d to either side", nodes, sight)
		}
	}
}

// TestDownTogether: a node that two faults want down starts after the second (NE4).
func TestDownTogether(t *testing.T) {
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 1})
	env := NewEnv(f, 1)
	kill := env.kill(always(env.one))
	rnd := rand.New(rand.NewPCG(1, 1))
	a, err := kill(t.Context(), rnd)
	must(t, err)
	b, err := kill(t.Context(), rnd)
	must(t, err)
	must(t, a.Heal(t.Context()))
	must(t, a.Heal(t.Context()))
	must(t, env.upAll())
	if f.Nodes[0].Running() {
		t.Error("started though a fault wants it down")
	}
	must(t, b.Heal(t.Context()))
	if !f.Nodes[0].Running() {
		t.Error("not started after the last fault")
	}
	if len(env.Deaths()) != 0 {
		t.Errorf("deaths: %v", env.Deaths())
	}
	must(t, env.HealAll(t.Context()))
}

// TestSupervise: a node that ends by itself, after its faults were healed, is started
// again; one that a fault wants down is not.
func TestSupervise(t *testing.T) {
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 2})
	env := NewEnv(f, 1)
	in, err := env.kill(always(func(*rand.Rand) []*host.Node { return f.Nodes[:1] }))(t.Context(), rand.New(rand.NewPCG(1, 1)))
	must(t, err)
	stop := env.Supervise()
	defer stop()
	first := f.Nodes[1].Pid()
	must(t, syscall.Kill(first, syscall.SIGKILL))
	eventually(t, func() error {
		if pid := f.Nodes[1].Pid(); pid == 0 || pid == first {
			return fmt.Errorf("the process is %d, was %d", pid, first)
		}
		return nil
	})
	if f.Nodes[0].Running() {
		t.Error("started though a fault wants it down")
	}
	stop()
	if n := len(env.Deaths()); n != 1 {
		t.Errorf("%d deaths", n)
	}
	must(t, in.Heal(t.Context()))
}

// TestRuleOfDamage: over many seeds the victims of a run are one same minority
// (NE6).
func TestRuleOfDamage(t *testing.T) {
	hit := map[string]bool{}
	for nodes, want := range map[int]int{1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 7: 3} {
		f := &host.Fleet{}
		for i := range nodes {
			f.Nodes = append(f.Nodes, &host.Node{ID: fmt.Sprint("n", i)})
		}
		for seed := range uint64(50) {
			env := NewEnv(f, seed)
			if again := NewEnv(f, seed); !slices.Equal(env.Victims(), again.Victims()) || len(env.Victims()) != want {
				t.Fatalf("%d nodes: victims %v and %v", nodes, env.Victims(), again.Victims())
			}
			rnd := rand.New(rand.NewPCG(seed, 2))
			for range 20 {
				v, err := env.victim(rnd)
				if want == 0 {
					if !errors.Is(err, ErrNotNow) {
						t.Fatalf("a victim of %d nodes: %v", nodes, err)
					}
					continue
				}
				must(t, err)
				if !slices.Contains(env.Victims(), v[0].ID) {
					t.Fatalf("%s is none of %v", v[0].ID, env.Victims())
				}
				hit[v[0].ID] = true
			}
		}
	}
	if len(hit) != 7 {
		t.Errorf("only %v are ever victims", hit)
	}
}

// meet makes requests until a fault, which may hit some only, has met one. That one may
// hang until the fault is healed: ended waits for it.
func meet(p *s3fault.Proxy, request func() string) (ended func()) {
	for {
		done := make(chan struct{})
		go func() { defer close(done); request() }()
		for over := false; !over; {
			select {
			case <-done:
				over = true
			case <-time.After(time.Millisecond):
			}
			if p.Met() > 0 {
				return func() { <-done }
			}
		}
	}
}

// TestStoreFaults: what a fault of the object store meets is counted, one that
// nothing met is idle (NE3), and without a store each is missing with the reason (NE5).
func TestStoreFaults(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	f := fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 1, Disk: host.DiskPlain, StoreBinary: self})
	env := NewEnv(f, 1)
	all, _ := Catalogue(env)
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	get := func() string {
		resp, err := client.Get("http://" + f.Store.Endpoint() + "/bucket/key")
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return fmt.Sprint(resp.StatusCode, " ", string(b), " ", err)
	}
	healthy := get()
	tried := 0
	for _, fault := range all {
		if !OfStore(fault.Kind()) {
			continue
		}
		tried++
		for _, met := range []bool{true, false} {
			in, err := fault.Inject(t.Context(), rand.New(rand.NewPCG(3, 3)))
			must(t, err)
			if !slices.Equal(in.Targets, []string{storeTarget}) || !strings.HasPrefix(in.Description, "the object store ") {
				t.Errorf("%s: %+v", fault.Name(), in)
			}
			ended := func() {}
			if met {
				ended = meet(f.Store.Proxy, get)
			}
			must(t, in.Heal(t.Context()))
			ended()
			if in.Idle == met || in.Outcome != fmt.Sprintf("it met %d requests", map[bool]int{true: 1}[met]) {
				t.Errorf("%s met one %v: idle %v, %q", fault.Name(), met, in.Idle, in.Outcome)
			}
			if got := get(); got != healthy {
				t.Errorf("after %s: %q, not %q", fault.Name(), got, healthy)
			}
		}
	}
	if tried != len(harms) || OfStore(KindKill) {
		t.Errorf("%d faults of the store, not %d", tried, len(harms))
	}
	f = fakeFleet(t, host.Options{Net: host.NetLoopback, Nodes: 1, Disk: host.DiskPlain})
	env = NewEnv(f, 1)
	env.StoreLacks = errors.New("nobody made one")
	if _, missing := Catalogue(env); !slices.Contains(missing, "object-store-down: nobody made one") {
		t.Errorf("missing: %q", missing)
	}
}
