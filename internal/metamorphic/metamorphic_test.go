package metamorphic_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/engine/rocks"
	"github.com/keelstate/keelstate/internal/metamorphic"
	"github.com/keelstate/keelstate/raftfsm"
)

var (
	seed = flag.Uint64("seed", 0, "seed of the random logs; 0 takes a new one")
	ops  = flag.Int("ops", 40, "entries of a log")
	logs = flag.Int("logs", 0, "number of logs per engine; 0 is a short run")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	set("rapid.seed", strconv.FormatUint(*seed, 10))
	set("rapid.nofailfile", "true") // the seed repeats it
	goleak.VerifyTestMain(m)
}

func set(name, value string) {
	if err := flag.Set(name, value); err != nil {
		panic(err)
	}
}

func TestRandomLogsAgainstTheModelOnMem(t *testing.T) {
	run(t, mem.NewDriver(), 60)
}

func TestRandomLogsAgainstTheModelOnRocks(t *testing.T) {
	d, err := rocks.NewDriver(rocks.Options{MemoryBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	run(t, d, 10)
}

func run(t *testing.T, d engine.Driver, short int) {
	n := *logs
	if n == 0 {
		n = short
	}
	t.Logf("%d logs of %d entries; repeat with: go test ./internal/metamorphic -run '%s' -seed %d -ops %d -logs %d", n, *ops, t.Name(), *seed, *ops, n)
	set("rapid.checks", strconv.Itoa(n))
	dirs := 0
	rapid.Check(t, func(rt *rapid.T) {
		dirs++
		dir := filepath.Join(t.TempDir(), fmt.Sprint(dirs))
		defer os.RemoveAll(dir)
		check(rt, d, dir)
	})
}

// check runs one log on the reference, and on a variant with the engine under
// test in step with the model.
func check(t *rapid.T, d engine.Driver, dir string) {
	log := metamorphic.Generate(t, *ops)
	defer func() {
		if t.Failed() {
			t.Logf("the log, shrunk as far as may be:\n%s", printLog(log))
		}
	}()
	limit := rapid.IntRange(1, 5).Draw(t, "page")
	model := metamorphic.NewModel(log.Init)
	reference, err := metamorphic.Run(metamorphic.Variant{
		Driver: mem.NewDriver(), Stages: []metamorphic.Stage{{Entries: 1}},
	}, log, filepath.Join(dir, "reference"), nil)
	if err != nil {
		t.Fatalf("reference: %v", err)
	}
	variant := drawVariant(t, d)
	checked := 0
	trace, err := metamorphic.Run(variant, log, filepath.Join(dir, "variant"), func(applied int, m *raftfsm.Machine) error {
		for ; checked < applied; checked++ {
			if err := metamorphic.Check(model, &log.Steps[checked], &reference.Outcomes[checked]); err != nil {
				return fmt.Errorf("entry %d (%s): %w", checked+1, log.Steps[checked].Text, err)
			}
		}
		v, err := m.View()
		if err != nil {
			return err
		}
		defer v.Close()
		if err := metamorphic.CheckReads(model, v, limit); err != nil {
			return fmt.Errorf("reads after entry %d: %w", applied, err)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s with stages %v: %v", d.Name(), variant.Stages, err)
	}
	if err := metamorphic.Compare(reference, trace); err != nil {
		t.Fatalf("%s with stages %v differs from the reference: %v", d.Name(), variant.Stages, err)
	}
}

func drawVariant(t *rapid.T, d engine.Driver) metamorphic.Variant {
	v := metamorphic.Variant{Driver: d}
	v.Options.MaxBatchOps = rapid.SampledFrom([]int{0, 1, 7}).Draw(t, "batch operations")
	v.Options.MaxBatchBytes = rapid.SampledFrom([]int{0, 1, 500}).Draw(t, "batch bytes")
	for range rapid.IntRange(1, 6).Draw(t, "stages") {
		v.Stages = append(v.Stages, metamorphic.Stage{
			Entries: rapid.IntRange(1, 12).Draw(t, "entries"),
			After:   metamorphic.Event(rapid.IntRange(0, int(metamorphic.Events)-1).Draw(t, "event")),
		})
	}
	return v
}

func printLog(log *metamorphic.Log) string {
	var b strings.Builder
	for i := range log.Steps {
		fmt.Fprintf(&b, "%4d %s\n", log.Steps[i].Entry.Index, log.Steps[i].Text)
	}
	return b.String()
}
