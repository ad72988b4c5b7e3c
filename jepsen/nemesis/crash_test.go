//go:build linux

package nemesis

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/faultfs"
	"github.com/keelstate/keelstate/jepsen/host"
)

var (
	realFor  = flag.Duration("real-for", 10*time.Second, "how long TestCrashRealCluster injects faults")
	realSeed = flag.Uint64("real-seed", 1, "its seed")
	// Without full disks, which the runner has: on these the RocksDB of Debian, which
	// tests are built with, aborted until its LOG was ours (jepsen/FOUND.md). Clocks beside nodes
	// that stop are the runner's affair; TestCrashRealClock has them alone.
	realFaults = flag.String("real-faults", "kill,restart,pause,partition,one-way,flap,loss,duplicate,delay,reset,bandwidth,cpu,slow-disk,hung-disk,power-loss,fsync-error,bit-flip,transfer",
		"its faults, by name or kind, separated by commas")
)

// TestCrashRealCluster runs a schedule against real nodes, with a client that
// writes, and wants no more than that the cluster is healthy in the end and has
// what it acknowledged. The harness's own runs judge far more.
func TestCrashRealCluster(t *testing.T) {
	must(t, build())
	f := newFleet(t, host.Options{NodeBinary: filepath.Join(binaries, "node"), CtlBinary: filepath.Join(binaries, "keelctl"),
		Disk: host.DiskFault, Groups: true, Memory: "256MiB"}, host.CapNetns, host.CapNft, host.CapFuse, host.CapCPU)
	must(t, f.Found(t.Context(), 2))
	client, err := keel.Open(t.Context(), f.Endpoints())
	must(t, err)
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = client.Close(ctx) // nothing open matters any more
	}()
	values, err := keel.DeclareValue(t.Context(), client.Keyspace("chaos", keel.String.Type()), "v", keel.Int64)
	must(t, err)

	env := NewEnv(f, *realSeed)
	faults, _ := Catalogue(env)
	faults, err = Select(faults, strings.Split(*realFaults, ","))
	must(t, err)
	s, err := NewScheduler(env, faults, Options{Seed: *realSeed, MaxHold: 3 * time.Second, MaxGap: time.Second, OnRecord: func(r Record) { t.Log(r) }})
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), *realFor)
	defer cancel()
	var acked sync.Map
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() { writeUntil(ctx, values, w, &acked) })
	}
	must(t, s.Run(ctx))
	wg.Wait()
	must(t, f.WaitHealthy(t.Context()))
	t.Logf("injected: %v; deaths: %v", Count(s.Records()), env.Deaths())
	count, read := 0, 0
	acked.Range(func(key, value any) bool {
		if count++; count%7 != 0 { // a seventh tells as much, sooner
			return true
		}
		read++
		got, found, err := values.Get(t.Context(), key)
		if err != nil || !found || got != value {
			t.Errorf("%v: acknowledged %v, found %v %v %v", key, value, got, found, err)
		}
		return !t.Failed()
	})
	if count < 100 {
		t.Errorf("only %d writes were acknowledged", count)
	}
	t.Logf("%d of %d acknowledged writes were read, and are there", read, count)
	for _, d := range env.Deaths() {
		if d.Code != 70 && d.Signal != "killed" {
			t.Errorf("%+v", d)
		}
	}
}

// TestCrashRealClock steps the clocks of real nodes, and lets them drift, while a
// client writes: the nodes see the time that they are told, a session outlives it,
// and afterwards they see the true time.
func TestCrashRealClock(t *testing.T) {
	must(t, build())
	f := newFleet(t, host.Options{NodeBinary: filepath.Join(binaries, "node"), CtlBinary: filepath.Join(binaries, "keelctl"), Net: host.NetLoopback,
		Disk: host.DiskPlain, Flags: []string{"--fault-injection"}})
	must(t, f.Found(t.Context(), 1))
	client, err := keel.Open(t.Context(), f.Endpoints(), keel.WithSessionLease(30*time.Second))
	must(t, err)
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = client.Close(ctx) // nothing open matters any more
	}()
	values, err := keel.DeclareValue(t.Context(), client.Keyspace("clock", keel.String.Type()), "v", keel.Int64)
	must(t, err)
	clock := NewHTTPClock(5 * time.Second)
	env := NewEnv(f, 1)
	env.Clock = clock
	all, _ := Catalogue(env)
	faults, err := Select(all, []string{"clock-step", "clock-drift"})
	must(t, err)
	for seed := range uint64(8) {
		fault := faults[seed%2]
		in, err := fault.Inject(t.Context(), rand.New(rand.NewPCG(seed, 1)))
		must(t, err)
		for _, id := range in.Targets {
			// What a drift does to the time in the end is the node's own test. An answer
			// that takes long says nothing of a small step.
			eventually(t, func() error {
				if offset, ppm := seenClock(t, f.Node(id)); offset.Abs() < 50*time.Millisecond && ppm == 0 {
					return fmt.Errorf("%s: %s is off by %s, and runs true", in.Description, id, offset)
				}
				return nil
			})
		}
		key := fmt.Sprint(seed)
		if _, err := values.Set(t.Context(), key, int64(seed)); err != nil {
			t.Errorf("%s: a write: %v", in.Description, err)
		}
		must(t, in.Heal(t.Context()))
		for _, n := range f.Nodes {
			if d, ppm := seenClock(t, n); d.Abs() > 5*time.Second || ppm != 0 {
				t.Errorf("after %s: %s is off by %s, and drifts by %d", in.Description, n.ID, d, ppm)
			}
		}
		if v, found, err := values.Get(t.Context(), key); err != nil || !found || v != int64(seed) {
			t.Errorf("after %s: %v %v %v", in.Description, v, found, err)
		}
	}
}

// seenClock is how far the clock that a node sees is off at least, as far as it can be
// told, and by how many parts per million it drifts.
func seenClock(t *testing.T, n *host.Node) (offset time.Duration, ppm int64) {
	t.Helper()
	asked := time.Now()
	resp, err := http.Get("http://" + n.HTTP + "/debug/fault/clock")
	must(t, err)
	defer resp.Body.Close()
	var answer struct {
		NowMs    int64 `json:"nowMs"`
		DriftPPM int64 `json:"driftPPM"`
	}
	must(t, json.NewDecoder(resp.Body).Decode(&answer))
	seen, answered := time.UnixMilli(answer.NowMs), time.Now()
	switch {
	case seen.After(answered):
		return seen.Sub(answered), answer.DriftPPM
	case seen.Before(asked):
		return seen.Sub(asked), answer.DriftPPM
	}
	return 0, answer.DriftPPM
}

// TestCrashPowerLossBehindACutLog takes the power from all nodes, whose disks then
// have only what was synced, after their logs were cut: what was flushed before has
// to be there, with the names of all directories on the way.
func TestCrashPowerLossBehindACutLog(t *testing.T) {
	must(t, build())
	f := newFleet(t, host.Options{NodeBinary: filepath.Join(binaries, "node"), CtlBinary: filepath.Join(binaries, "keelctl"), Net: host.NetLoopback,
		Disk: host.DiskFault, Flags: []string{"--log-size", "1MiB"}}, host.CapFuse)
	must(t, f.Found(t.Context(), 1))
	client, err := keel.Open(t.Context(), f.Endpoints())
	must(t, err)
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = client.Close(ctx) // nothing open matters any more
	}()
	values, err := keel.DeclareValue(t.Context(), client.Keyspace("cut", keel.String.Type()), "v", keel.String)
	must(t, err)
	written := 0
	write := func() {
		key := fmt.Sprint(written)
		_, err := values.Set(t.Context(), key, key+strings.Repeat("x", 64<<10))
		must(t, err)
		written++
	}
	write()
	eventually(t, func() error {
		write()
		for _, n := range f.Nodes {
			if cut, err := logWasCut(n); err != nil || !cut {
				return fmt.Errorf("after %d writes the log of %s is not cut: %w", written, n.ID, err)
			}
		}
		return nil
	})
	_, err = f.PowerLoss(f.Nodes, faultfs.DropAll, 1)
	must(t, err)
	must(t, f.StartAll())
	healing, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must(t, f.WaitHealthy(healing))
	for i := range written {
		key := fmt.Sprint(i)
		if v, found, err := values.Get(t.Context(), key); err != nil || !found || v != key+strings.Repeat("x", 64<<10) {
			t.Fatalf("key %s of %d: found %v, %d bytes, %v", key, written, found, len(v), err)
		}
	}
	for _, n := range f.Nodes {
		if b, err := os.ReadFile(n.LogFile); err != nil || strings.Contains(string(b), "replica damaged") {
			t.Errorf("%s has a damaged replica: %v", n.ID, err)
		}
	}
}

// TestCrashPowerLossBehindAMetadataSnapshot is the same for the log of the system
// group, which is cut behind a snapshot of its own kind.
func TestCrashPowerLossBehindAMetadataSnapshot(t *testing.T) {
	must(t, build())
	f := newFleet(t, host.Options{NodeBinary: filepath.Join(binaries, "node"), CtlBinary: filepath.Join(binaries, "keelctl"), Net: host.NetLoopback,
		Disk: host.DiskFault, Flags: []string{"--log-size", "1MiB"}}, host.CapFuse)
	must(t, f.Found(t.Context(), 1))
	// Sessions that come and go fill it.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				// Disks that hang with this process may keep one from its answer.
				if err := oneSession(ctx, f.Endpoints(), fmt.Sprint(worker, "-", i)); err != nil && ctx.Err() == nil {
					t.Logf("session %d of worker %d: %v", i, worker, err)
				}
			}
		})
	}
	eventually(t, func() error {
		for _, n := range f.Nodes {
			made, err := filepath.Glob(filepath.Join(n.Disk.Dir, "data", "system", "*", "snapshots", "*", "meta.json"))
			if err != nil || len(made) == 0 {
				return fmt.Errorf("%s has no snapshot of the metadata: %w", n.ID, err)
			}
		}
		return nil
	})
	cancel()
	wg.Wait()
	_, err := f.PowerLoss(f.Nodes, faultfs.DropAll, 1)
	must(t, err)
	must(t, f.StartAll())
	healing, done := context.WithTimeout(t.Context(), time.Minute)
	defer done()
	must(t, f.WaitHealthy(healing))
	must(t, oneSession(healing, f.Endpoints(), "after"))
	for _, n := range f.Nodes {
		if b, err := os.ReadFile(n.LogFile); err != nil || strings.Contains(string(b), "system group is damaged") {
			t.Errorf("the metadata of %s are damaged: %v", n.ID, err)
		}
	}
}

// oneSession opens a session, writes in it, and closes it.
func oneSession(ctx context.Context, endpoints []string, key string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	client, err := keel.Open(ctx, endpoints)
	if err != nil {
		return err
	}
	values, err := keel.DeclareValue(ctx, client.Keyspace("sessions", keel.String.Type()), "v", keel.String)
	if err == nil {
		_, err = values.Set(ctx, key, key)
	}
	return errors.Join(err, client.Close(ctx))
}

// logWasCut says whether a node has taken a snapshot of the first shard, which is
// when it cuts its log.
func logWasCut(n *host.Node) (bool, error) {
	resp, err := http.Get("http://" + n.HTTP + "/metrics")
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	in := bufio.NewScanner(resp.Body)
	for in.Scan() {
		if name, value, ok := strings.Cut(in.Text(), " "); ok && strings.HasPrefix(name, "keelstate_snapshots_total{") && strings.Contains(name, `"S1"`) && value != "0" {
			return true, nil
		}
	}
	return false, in.Err()
}

// writeUntil writes keys of its own, one after the other.
func writeUntil(ctx context.Context, values *keel.Value[int64], writer int, acked *sync.Map) {
	for i := int64(0); ctx.Err() == nil; i++ {
		key := fmt.Sprintf("%d-%d", writer, i)
		call, cancel := context.WithTimeout(ctx, 2*time.Second)
		_, err := values.Set(call, key, i)
		cancel()
		if err == nil {
			acked.Store(key, i)
		} else if !errors.Is(err, context.DeadlineExceeded) {
			pauseFor(ctx, 20*time.Millisecond)
		}
	}
}
