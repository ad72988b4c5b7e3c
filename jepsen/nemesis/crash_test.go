//go:build linux

package nemesis

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/jepsen/host"
)

var (
	realFor    = flag.Duration("real-for", 10*time.Second, "how long TestCrashRealCluster injects faults")
	realSeed   = flag.Uint64("real-seed", 1, "its seed")
	realFaults = flag.String("real-faults", "kill,restart,pause,partition,one-way,flap,loss,duplicate,delay,reset,bandwidth,cpu,slow-disk,hung-disk,full-disk,power-loss,fsync-error,bit-flip,transfer,clock",
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
