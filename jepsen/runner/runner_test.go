//go:build linux

package runner

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/host"
	"github.com/keelstate/keelstate/jepsen/nemesis"
	"github.com/keelstate/keelstate/jepsen/report"
	"github.com/keelstate/keelstate/jepsen/workload"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if binaries != "" {
		if err := os.RemoveAll(binaries); err != nil {
			println(err.Error())
			code = 1
		}
	}
	if err := goleak.Find(); err != nil && code == 0 {
		println(err.Error())
		code = 1
	}
	os.Exit(code)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// An episode's schedule follows from the run's seed and its number alone.
func TestDerive(t *testing.T) {
	seen, names := map[uint64]bool{}, map[string]bool{}
	for n := range 60 {
		a, sa := (&run{Options: Options{Seed: 5}}).derive(n)
		b, sb := (&run{Options: Options{Seed: 5}}).derive(n)
		if a != b || !reflect.DeepEqual(sa, sb) || sa.options.Seed != a {
			t.Fatalf("episode %d is derived twice", n)
		}
		if seen[a] {
			t.Fatalf("episode %d has the seed of another", n)
		}
		seen[a], names[sa.name] = true, true
		if other, _ := (&run{Options: Options{Seed: 6}}).derive(n); other == a {
			t.Errorf("episode %d does not depend on the seed", n)
		}
	}
	if len(names) != len(styles) {
		t.Errorf("styles: %v", names)
	}
}

func TestOptions(t *testing.T) {
	good := func() Options { return Options{Dir: "x", NodeBinary: "n", CtlBinary: "c"} }
	for _, c := range []struct {
		name string
		bad  func(*Options)
	}{
		{"nothing wrong", nil},
		{"no directory", func(o *Options) { o.Dir = "" }},
		{"no binary", func(o *Options) { o.CtlBinary = "" }},
		{"duration", func(o *Options) { o.Duration = -1 }},
		{"episode", func(o *Options) { o.Episode = 1 }},
		{"nodes", func(o *Options) { o.Nodes = 101 }},
		{"shards", func(o *Options) { o.Shards = -1 }},
		{"first", func(o *Options) { o.First = -1 }},
		{"rate", func(o *Options) { o.Rate = -1 }},
		{"keys", func(o *Options) { o.Keys = -1 }},
		{"batch", func(o *Options) { o.Batch = 1001 }},
		{"no number", func(o *Options) { o.Rate = math.NaN() }},
		{"no end", func(o *Options) { o.Rate = math.Inf(1) }},
		{"clients", func(o *Options) { o.Clients = 1001 }},
		{"workers", func(o *Options) { o.Workers = 10_001 }},
		{"limit", func(o *Options) { o.CheckLimit = -1 }},
		{"workload twice", func(o *Options) { o.Workloads = []string{"list", "register", "list"} }},
		{"workload", func(o *Options) { o.Workloads = []string{"register", "nonsense"} }},
		{"net", func(o *Options) { o.Net = "nonsense" }},
		{"disk", func(o *Options) { o.Disk = "nonsense" }},
		{"nothing to go back to", func(o *Options) { o.Rollback = true }},
	} {
		o := good()
		if c.bad != nil {
			c.bad(&o)
		}
		o.ensureDefaults()
		if err := o.validate(); errors.Is(err, ErrUsage) != (c.bad != nil) {
			t.Errorf("%s: %v", c.name, err)
		} else if err != nil && strings.Contains(err.Error(), "usage") {
			t.Errorf("%s: the error has more than what is wrong: %v", c.name, err)
		}
	}
	o := good()
	o.ensureDefaults()
	if len(o.Workloads) != len(workload.All(workload.Config{})) {
		t.Errorf("workloads: %v", o.Workloads)
	}
}

// A run never writes into a folder that has something in it.
func TestFolderMustBeEmpty(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "precious"), nil, 0o644))
	if _, err := Run(t.Context(), Options{Dir: dir, NodeBinary: "n", CtlBinary: "c"}); !errors.Is(err, ErrUsage) {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "precious")); err != nil {
		t.Fatal(err)
	}
}

func TestParseMetrics(t *testing.T) {
	got, err := parseMetrics(strings.NewReader(`# HELP keelstate_leader 1 if this replica leads the group.
keelstate_leader{group="1"} 1
keelstate_leader{group="system"} 0
keelstate_leader_more{group="1"} 5
keelstate_snapshots_total{group="2",what="taken"} 3
keelstate_snapshots_total{group="2",what="sent"} 4
process_resident_memory_bytes 1.5e+07
unknown 7
`))
	must(t, err)
	want := map[string]float64{"keelstate_leader:1": 1, "keelstate_leader:system": 0, "keelstate_snapshots_total:2": 7, "process_resident_memory_bytes": 1.5e7}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v", got)
	}
	if _, err := parseMetrics(strings.NewReader("go_goroutines many\n")); err == nil {
		t.Error("no error for a value that is no number")
	}
}

func TestJudgeDeaths(t *testing.T) {
	on := func(node string, kind nemesis.Kind) hits { return hits{node: {nemesis.KindKill, kind}} }
	disk, memory := on("n1", nemesis.KindFsyncError), on("n1", nemesis.KindMemory)
	exit := func(code int) host.Death { return host.Death{Node: "n1", Code: code} }
	signal := func(s string) host.Death { return host.Death{Node: "n1", Code: -1, Signal: s} }
	for _, c := range []struct {
		name   string
		deaths []host.Death
		faults hits
		want   check.Verdict
	}{
		{"none", nil, nil, check.Pass},
		{"storage, with a fault of the disk", []host.Death{exit(70)}, disk, check.Pass},
		{"storage, without", []host.Death{exit(70)}, hits{}, check.Fail},
		{"storage, with a fault of another's disk", []host.Death{exit(70)}, on("n2", nemesis.KindFsyncError), check.Fail},
		{"storage, after an honest power loss", []host.Death{exit(70)}, on("n1", nemesis.KindPowerLoss), check.Fail},
		{"storage, in an episode after damage", []host.Death{exit(70)}, on("n1", nemesis.KindBitFlip).next(), check.Pass},
		{"storage, in an episode after a failed fsync", []host.Death{exit(70)}, disk.next(), check.Fail},
		{"no start on a bad disk", []host.Death{exit(1)}, on("n1", nemesis.KindReadError), check.Pass},
		{"no start", []host.Death{exit(1)}, on("n1", nemesis.KindBitFlip), check.Fail},
		{"a panic", []host.Death{exit(70), exit(2)}, disk, check.Fail},
		{"an end without reason", []host.Death{exit(0)}, disk, check.Fail},
		{"no memory", []host.Death{signal("killed")}, memory, check.Pass},
		{"killed by others", []host.Death{signal("killed")}, disk, check.Unknown},
		{"killed by others and a crash", []host.Death{signal("killed"), signal("segmentation fault")}, nil, check.Fail},
	} {
		res := judgeDeaths(c.deaths, c.faults)
		if res.Verdict != c.want || res.Text == "" || (c.want != check.Pass) != (len(res.Details) > 0) {
			t.Errorf("%s: %+v", c.name, res)
		}
	}
}

// Alarms in the logs are found once, also in a line that was not whole before.
func TestAlarms(t *testing.T) {
	path := filepath.Join(t.TempDir(), "n1.log")
	w := newLogWatch([]*host.Node{{ID: "n1", LogFile: path}})
	add := func(text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		must(t, err)
		_, err = f.WriteString(text)
		must(t, errors.Join(err, f.Close()))
	}
	for _, c := range []struct {
		text string
		hit  []nemesis.Kind
		want check.Verdict
	}{
		{"# start 1 of n1\nlevel=INFO msg=fine\n", nil, check.Pass},
		{"half a line with pa", nil, check.Pass},
		{"nic: runtime error\nmore\n", nil, check.Fail},
		{"no more\n", nil, check.Pass},
		{"keelstate-node: ./file.h:312: void f(): Assertion `true' failed.\n", nil, check.Fail},
		{strings.Repeat("x", 200_000) + "\nWARNING: DATA RACE\n", nil, check.Fail},
		{"", nil, check.Pass},
		// Damage has a cause, or the product has lost what it had written.
		{"msg=\"replica damaged; it will be rebuilt\"\n", []nemesis.Kind{nemesis.KindPowerLoss, nemesis.KindFsyncError}, check.Fail},
		{"msg=\"the raft log cannot be trusted\"\n", nil, check.Fail},
		{"msg=\"this node's replica of the system group is damaged\"\n", []nemesis.Kind{nemesis.KindPowerLoss}, check.Fail},
		{"msg=\"replica damaged; it will be rebuilt\"\n", []nemesis.Kind{nemesis.KindBitFlip}, check.Pass},
		{"msg=\"replica damaged; it will be rebuilt\"\n", []nemesis.Kind{nemesis.KindLyingFsync}, check.Pass},
		{"msg=\"replica damaged; it will be rebuilt\"\n", []nemesis.Kind{nemesis.KindReadError}, check.Pass},
		{"panic: all the same\n", []nemesis.Kind{nemesis.KindBitFlip}, check.Fail},
		{"msg=\"replica damaged; it will be rebuilt\" cause=\"the replica was not prepared for the rollback to checkpoint 7\"\n", nil, check.Pass},
	} {
		add(c.text)
		if res := w.judge(hits{"n1": c.hit}); res.Verdict != c.want {
			t.Errorf("after %.40q: %+v", c.text, res)
		}
	}
	must(t, os.Remove(path))
	if res := w.judge(nil); res.Verdict != check.Unknown {
		t.Errorf("without a log: %+v", res)
	}
}

func TestLastLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "n1.log")
	if got := lastLines(path, 2); !strings.Contains(got, "n1.log") {
		t.Errorf("without a log: %q", got)
	}
	for text, want := range map[string]string{"": "", "one": "one", "one\n\n two\nthree\n\n": "two; three"} {
		must(t, os.WriteFile(path, []byte(text), 0o644))
		if got := lastLines(path, 2); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// RU4: what was not seen of a healed cluster, or too late, fails; what was read
// wrong fails; replicas that differ fail, and too few that were seen are unknown.
func TestHealing(t *testing.T) {
	shards := []shard{{1, 2}, {2, 2}}
	whole := func() *healing {
		h := newHealing(shards)
		for _, s := range shards {
			h.note(s.id, led)
			h.note(s.id, wrote)
			h.note(s.id, read)
			h.note(s.id, agreed)
			for _, n := range []string{"n1", "n2"} {
				h.hashes = append(h.hashes, check.ReplicaHash{Shard: s.id, Node: n, Applied: 7, Hash: "aa"})
			}
		}
		return h
	}
	for _, c := range []struct {
		name         string
		change       func(*healing)
		live, hashes check.Verdict
	}{
		{"whole", func(*healing) {}, check.Pass, check.Pass},
		{"late", func(h *healing) { h.seen[2].Wrote = time.Minute }, check.Fail, check.Pass},
		{"never read", func(h *healing) { h.seen[1].Read = -1; h.complain("read", errors.New("why")) }, check.Fail, check.Pass},
		{"read wrong", func(h *healing) { h.wrong = []check.Detail{{Verdict: check.Fail, Key: "k", Text: "wrong"}} }, check.Fail, check.Pass},
		{"differ", func(h *healing) { h.hashes[1].Hash = "bb" }, check.Pass, check.Fail},
		{"one answered", func(h *healing) { h.hashes = h.hashes[1:] }, check.Pass, check.Unknown},
	} {
		h := whole()
		if !h.complete(led) || !h.complete(agreed) {
			t.Fatal("not complete")
		}
		c.change(h)
		res := h.results(shards)
		if res[0].Verdict != c.hashes || res[1].Verdict != c.live {
			t.Errorf("%s: %+v", c.name, res)
		}
	}
}

// A cluster that serves nobody for long is left alone until it does, or for so
// long; one that serves is not.
func TestBreathe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &episode{run: &run{start: time.Now()}, Episode: &report.Episode{}}
		took := func() time.Duration {
			began := time.Now()
			e.breathe(t.Context())
			return time.Since(began)
		}
		time.Sleep(breathAfter - time.Second)
		if d := took(); d != 0 {
			t.Errorf("it waits %s at the beginning", d)
		}
		time.Sleep(time.Second)
		if d := took(); d < breathFor || d > breathFor+time.Second {
			t.Errorf("it waits %s for a cluster that serves nobody", d)
		}
		e.served.Store(e.now())
		if d := took(); d != 0 {
			t.Errorf("it waits %s for a cluster that serves", d)
		}
		time.Sleep(breathAfter)
		time.AfterFunc(2*time.Second, func() { e.served.Store(e.now()) })
		if d := took(); d < 2*time.Second || d > 3*time.Second {
			t.Errorf("it waits %s for a cluster that serves after 2 s", d)
		}
	})
}
