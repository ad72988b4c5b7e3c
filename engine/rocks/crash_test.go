package rocks

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/engine"
)

// B09: with the write-ahead log off, all families come back from a kill -9 at
// one and the same batch, whatever made the store flush.

const (
	crashDirEnv     = "KEELSTATE_ROCKS_CRASH_DIR"
	crashTriggerEnv = "KEELSTATE_ROCKS_CRASH_TRIGGER"
)

// crashTriggers are what makes the child's store flush.
var crashTriggers = []string{"size", "manual", "memory", "checkpoint", "compact"}

const (
	crashValue = engine.FamilyID(1)
	crashMap   = engine.FamilyID(2)
	crashList  = engine.FamilyID(3)
	crashSum   = engine.FamilyID(4)
)

func crashDriver(trigger string) (*Driver, error) {
	o := Options{MemoryBytes: 64 << 20}
	switch trigger {
	case "size": // the map wants to flush long before the others
		o.BufferOf = func(f engine.FamilyID) int64 {
			if f == crashMap {
				return minBufferBytes
			}
			return 0
		}
	case "memory": // only the shared budget is small
		o.MemoryBytes = 6 << 20
	}
	return NewDriver(o)
}

func crashFamilies(s engine.Store) error {
	for f, o := range map[engine.FamilyID]engine.FamilyOptions{
		crashValue: {Use: engine.UsePoint, GroupWidth: 1},
		crashMap:   {Use: engine.UseScanned, GroupWidth: 1},
		crashList:  {Use: engine.UseScanned, GroupWidth: 1},
		crashSum:   {Use: engine.UsePoint, Merge: engine.MergeMax, GroupWidth: 1},
	} {
		if err := s.EnsureFamily(f, o); err != nil {
			return err
		}
	}
	return nil
}

func crashBatch(b *engine.Batch, i uint64) {
	n := []byte(strconv.FormatUint(i, 10))
	b.Reset()
	b.Put(crashValue, []byte("v"), n)
	b.Put(crashMap, []byte("m"), n)
	b.Put(crashMap, fmt.Appendf(nil, "fill%d", i%500), make([]byte, 1000))
	b.Put(crashList, []byte("l"), n)
	b.Merge(crashSum, []byte("s"), fmt.Appendf(engine.AppendHeader(nil, engine.Header{Sequence: i}), "%020d", i))
	b.Put(engine.MetaFamily, []byte("index"), n)
}

// crashIndex returns the one index that all families of the store carry.
func crashIndex(s engine.Store) (uint64, error) {
	seen := make(map[string]string)
	for what, at := range map[string]struct {
		f   engine.FamilyID
		key string
	}{"value": {crashValue, "v"}, "map": {crashMap, "m"}, "list": {crashList, "l"}, "sum": {crashSum, "s"}, "meta": {0, "index"}} {
		v, ok, err := s.Get(at.f, []byte(at.key))
		if err != nil {
			return 0, err
		}
		if what == "sum" && ok {
			h, p, err := engine.ParseHeader(v)
			if err != nil {
				return 0, err
			}
			v = []byte(strings.TrimLeft(string(p), "0"))
			if string(v) != strconv.FormatUint(h.Sequence, 10) {
				return 0, fmt.Errorf("sum %s with sequence %d", v, h.Sequence)
			}
		}
		seen[what] = string(v)
	}
	for what, v := range seen {
		if v != seen["meta"] {
			return 0, fmt.Errorf("%s differs from meta: %v", what, seen)
		}
	}
	if seen["meta"] == "" {
		return 0, nil
	}
	return strconv.ParseUint(seen["meta"], 10, 64)
}

// crashChild writes batches until it is killed. It tells on standard output
// "w i" before it writes batch i, and "d i" when batch i is durable.
func crashChild(dir string) {
	trigger := os.Getenv(crashTriggerEnv)
	var mu sync.Mutex
	tell := func(what string, i uint64) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(os.Stdout, what, i)
	}
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	}
	if trigger == crashAbsorb {
		fail(absorbChild(dir))
	}
	d, err := crashDriver(trigger)
	fail(err)
	s, err := d.Open(filepath.Join(dir, "s"))
	fail(err)
	fail(crashFamilies(s))
	i, err := crashIndex(s)
	fail(err)
	// Unlike the index, the time of birth is never that of an earlier child.
	born := time.Now().UnixNano()
	var written struct {
		sync.Mutex
		i uint64
	}
	newest := func() uint64 { written.Lock(); defer written.Unlock(); return written.i }
	go func() {
		for n := 0; ; n++ {
			at := newest()
			switch trigger {
			case "size", "memory": // it flushes by itself
				v, _, err := s.DurableGet([]byte("index"))
				fail(err)
				at, _ = strconv.ParseUint(string(v), 10, 64) // 0 as long as there is none
				pause()
			case "manual":
				fail(s.Flush())
			case "checkpoint":
				to := filepath.Join(dir, "c"+strconv.FormatInt(born, 10)+"-"+strconv.Itoa(n))
				fail(s.Checkpoint(to))
				fail(retire(dir, to))
			case "compact":
				fail(s.Compact())
			}
			tell("d", at)
		}
	}()
	var b engine.Batch
	for {
		i++
		tell("w", i)
		crashBatch(&b, i)
		fail(s.Write(&b))
		written.Lock()
		written.i = i
		written.Unlock()
	}
}

// retire removes all checkpoints but keep, each by a rename first, so that what
// has a checkpoint's name is complete whenever the child is killed.
func retire(dir, keep string) error {
	old, err := filepath.Glob(filepath.Join(dir, "c*-*"))
	if err != nil {
		return err
	}
	trash := filepath.Join(dir, "trash")
	for _, c := range old {
		if c == keep {
			continue
		}
		if err := os.RemoveAll(trash); err != nil {
			return err
		}
		if err := os.Rename(c, trash); err != nil {
			return err
		}
	}
	return nil
}

// killAfter runs the child until it has told n lines, and if durably is set said
// of something that it is durable; it kills it, and returns the newest batch that
// was begun and the newest that was said to be durable.
func killAfter(t *testing.T, dir, trigger string, n int, durably bool) (begun, durable uint64) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashDirEnv+"="+dir, crashTriggerEnv+"="+trigger)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	watchdog := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer watchdog.Stop()
	lines := bufio.NewReader(out)
	killed := false
	for told := 0; ; told++ {
		if !killed && told >= n && (durable > 0 || !durably) {
			must(t, cmd.Process.Kill())
			killed = true
		}
		line, err := lines.ReadString('\n')
		if err == io.EOF {
			if !killed {
				t.Fatalf("child ended early after %d lines: %s", told, stderr.String())
			}
			break
		}
		must(t, err)
		var what string
		var i uint64
		if _, err := fmt.Sscan(line, &what, &i); err != nil {
			t.Fatalf("child told %q: %v", line, err)
		}
		if what == "w" {
			begun = i
		} else {
			durable = max(durable, i)
		}
	}
	_ = cmd.Wait() // killed
	return begun, durable
}

func TestAllFamiliesComeBackAtOneBatchAfterKill(t *testing.T) {
	const rounds = 35 // 7 kills per trigger
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 9))
	for i, trigger := range crashTriggers {
		t.Run(trigger, func(t *testing.T) {
			dir := t.TempDir()
			recovered := uint64(0)
			for round := range rounds / len(crashTriggers) {
				begun, durable := killAfter(t, dir, trigger, 1+rnd.IntN(3000), round == 0)
				got := checkAfterKill(t, dir, trigger)
				if got > max(begun, recovered) || got < durable || got < recovered {
					t.Fatalf("recovered at %d: begun %d, durable %d, before %d", got, begun, durable, recovered)
				}
				recovered = got
			}
			if recovered == 0 {
				t.Fatalf("trigger %d (%s) never made anything durable", i, trigger)
			}
			t.Logf("recovered at %d", recovered)
		})
	}
}

func checkAfterKill(t *testing.T, dir, trigger string) uint64 {
	t.Helper()
	d, err := crashDriver(trigger)
	must(t, err)
	open := func(dir string) uint64 {
		t.Helper()
		s, err := d.Open(dir)
		must(t, err)
		must(t, crashFamilies(s))
		i, err := crashIndex(s)
		must(t, err)
		v, _, err := s.DurableGet([]byte("index"))
		must(t, err)
		if i > 0 && string(v) != strconv.FormatUint(i, 10) {
			t.Fatalf("durable index %s, read index %d", v, i)
		}
		must(t, s.Close())
		return i
	}
	i := open(filepath.Join(dir, "s"))
	must(t, d.Verify(filepath.Join(dir, "s")))
	// Checkpoints that are there are complete.
	checkpoints, err := filepath.Glob(filepath.Join(dir, "c*-*"))
	must(t, err)
	for _, c := range checkpoints {
		if strings.Contains(c, makingSuffix) {
			continue
		}
		must(t, d.Verify(c))
		open(c)
	}
	must(t, d.Close())
	return i
}

// Every way to flush alone makes all families durable, without a kill.
func TestAnOrderlyCloseLosesWholeBatchesOnly(t *testing.T) {
	dir := t.TempDir()
	d, err := crashDriver("size")
	must(t, err)
	defer func() { must(t, d.Close()) }()
	last := uint64(0)
	for range 5 {
		s, err := d.Open(dir)
		must(t, err)
		must(t, crashFamilies(s))
		i, err := crashIndex(s)
		must(t, err)
		if i < last {
			t.Fatalf("went back from %d to %d", last, i)
		}
		last = i
		var b engine.Batch
		for n := range uint64(1500) {
			crashBatch(&b, i+1+n)
			must(t, s.Write(&b))
		}
		must(t, s.Close())
	}
	if last == 0 {
		t.Fatal("the tiny buffer never made the store flush")
	}
}
