package rocks

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// smallDisk mounts a file system of so many bytes in memory.
func smallDisk(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Skipf("a small disk needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes what is left of a disk.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	for block := make([]byte, 64<<10); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	must(t, f.Close())
}

// onSmallDisk opens a store with several families on a disk that fills up soon.
func onSmallDisk(t *testing.T) (d *Driver, dir string) {
	t.Helper()
	dir = filepath.Join(smallDisk(t, 24<<20), "s")
	d, err := NewDriver(Options{MemoryBytes: 8 << 20, FamilyBufferBytes: 512 << 10})
	must(t, err)
	t.Cleanup(func() { must(t, d.Close()) })
	return d, dir
}

// fullFamilies are those of numbered batches beside the metadata.
var fullFamilies = []engine.FamilyID{1, 2, 3, 4, 5}

func openNumbered(t *testing.T, d *Driver, dir string) engine.Store {
	t.Helper()
	s, err := d.Open(dir)
	must(t, err)
	for _, f := range fullFamilies {
		must(t, s.EnsureFamily(f, engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}))
	}
	return s
}

// writeNumbered writes batch n: its number into every family, and some bytes.
func writeNumbered(s engine.Store, b *engine.Batch, n uint64) error {
	b.Reset()
	number := binary.BigEndian.AppendUint64(nil, n)
	b.Put(engine.MetaFamily, []byte("number"), number)
	for _, f := range fullFamilies {
		b.Put(f, []byte("number"), number)
		b.Put(f, fmt.Appendf(nil, "%08d", n%20), bytes.Repeat(number, 800))
	}
	return s.Write(b)
}

// numberIn returns the number of the last batch in a store, whole as batches are.
func numberIn(t *testing.T, s engine.Store) uint64 {
	t.Helper()
	read := func(f engine.FamilyID) (n uint64) {
		v, ok, err := s.Get(f, []byte("number"))
		must(t, err)
		if ok {
			n = binary.BigEndian.Uint64(v)
		}
		return n
	}
	n := read(engine.MetaFamily)
	for _, f := range fullFamilies {
		if got := read(f); got != n {
			t.Fatalf("family %d has batch %d, the metadata has %d", f, got, n)
		}
		if v, ok, err := s.Get(f, fmt.Appendf(nil, "%08d", n%20)); err != nil || n > 0 &&
			(!ok || !bytes.Equal(v, bytes.Repeat(binary.BigEndian.AppendUint64(nil, n), 800))) {
			t.Fatalf("batch %d in family %d: %v, %v", n, f, ok, err)
		}
	}
	return n
}

// closeInTime closes a store that met a full disk; it may say what it could not
// write.
func closeInTime(t *testing.T, s engine.Store) {
	t.Helper()
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		if errors.Is(err, base.ErrConflict) {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("closing does not end")
	}
}

// awaitFailed waits until the store has met the end of its disk.
func awaitFailed(t *testing.T, s engine.Store) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); s.Stats().Failed == ""; pause() {
		if time.Now().After(deadline) {
			t.Fatal("the full disk went unnoticed")
		}
	}
}

// RO8, B17: on a full disk a write waits, whatever the flush failed at. Once
// there is space the store asks to be opened again, and has then exactly what it
// said to be durable.
func TestFullDiskStopsNothingForGood(t *testing.T) {
	d, dir := onSmallDisk(t)
	s := openNumbered(t, d, dir)
	filler := filepath.Join(filepath.Dir(dir), "filler")
	written := make(chan error, 1)
	n := uint64(0)
	write := func(s engine.Store) {
		var b engine.Batch
		for {
			n++
			if err := writeNumbered(s, &b, n); err != nil {
				n--
				written <- err
				return
			}
		}
	}
	changes := func(want error) {
		t.Helper()
		for name, err := range map[string]error{
			"Flush": s.Flush(), "Checkpoint": s.Checkpoint(filepath.Join(filepath.Dir(dir), "c")), "Compact": s.Compact(),
			"DropFamily": s.DropFamily(5),
		} {
			if !errors.Is(err, want) || errors.Is(err, base.ErrReopen) != errors.Is(want, base.ErrReopen) {
				t.Fatalf("%s: %v, want %v", name, err, want)
			}
		}
	}
	n = 1
	must(t, writeNumbered(s, new(engine.Batch), n))
	for round := range 3 {
		must(t, s.Flush())
		fill(t, filler)
		go write(s)
		awaitFailed(t, s)
		if st := s.Stats(); st.Reopen {
			t.Fatalf("round %d: it asks to be opened again beside a full disk: %s", round, st.Failed)
		}
		changes(syscall.ENOSPC)
		select {
		case err := <-written:
			t.Fatalf("round %d: a write beside the full disk: %v", round, err)
		case <-time.After(2 * fullRetry):
		}
		must(t, os.Remove(filler))
		select {
		case err := <-written:
			if !errors.Is(err, base.ErrReopen) || base.OutcomeOf(err) != base.OutcomeNotApplied {
				t.Fatalf("round %d: the write that waited: %v", round, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("round %d: a write still waits after the disk has space: %s", round, s.Stats().Failed)
		}
		changes(base.ErrReopen)
		if err := s.EnsureFamily(6, engine.FamilyOptions{GroupWidth: 1}); !errors.Is(err, base.ErrReopen) {
			t.Fatalf("a new family: %v", err)
		}
		if st := s.Stats(); !st.Reopen || st.Failed == "" {
			t.Fatalf("round %d: it does not ask to be opened again: %+v", round, st)
		}
		if got := numberIn(t, s); got != n {
			t.Fatalf("round %d: it reads batch %d, %d is written", round, got, n)
		}
		v, ok, err := s.DurableGet([]byte("number"))
		must(t, err)
		if !ok {
			t.Fatalf("round %d: nothing is durable", round)
		}
		closeInTime(t, s)
		s = openNumbered(t, d, dir)
		if got, said := numberIn(t, s), binary.BigEndian.Uint64(v); got != said || got > n {
			t.Fatalf("round %d: it has batch %d, %d was durable and %d written", round, got, said, n)
		}
		n = binary.BigEndian.Uint64(v)
	}
	// A store that is closed while a write waits does not hang.
	fill(t, filler)
	go write(s)
	awaitFailed(t, s)
	closeInTime(t, s)
	if err := <-written; !errors.Is(err, base.ErrDiskFailed) && !errors.Is(err, base.ErrClosed) {
		t.Fatalf("the write that waited: %v", err)
	}
}

var fullRounds = flag.Int("full.rounds", 10, "how often TestFullDiskBesideFlushes fills its disk")

// RO8, seeds 512 and 513: a disk that fills up beside flushes and checkpoints
// stops the store in bounded time, and no flush or checkpoint that says to have
// been made lacks what was written before it.
func TestFullDiskBesideFlushes(t *testing.T) {
	d, dir := onSmallDisk(t)
	s := openNumbered(t, d, dir)
	filler := filepath.Join(filepath.Dir(dir), "filler")
	n, reopened := uint64(0), 0
	var checkpoints atomic.Int64
	for round := range *fullRounds {
		// What is written, and what a flush said to be durable.
		var last, durable atomic.Uint64
		last.Store(n)
		stop := make(chan struct{})
		var beside sync.WaitGroup
		every := func(interval time.Duration, do func(i int)) {
			beside.Go(func() {
				for i, tick := 0, time.NewTicker(interval); ; i++ {
					select {
					case <-stop:
						tick.Stop()
						return
					case <-tick.C:
						do(i)
					}
				}
			})
		}
		for k := range 2 {
			every(time.Duration(k+1)*7*time.Millisecond, func(int) {
				if before := last.Load(); s.Flush() == nil {
					for old := durable.Load(); before > old && !durable.CompareAndSwap(old, before); old = durable.Load() {
					}
				}
			})
		}
		every(21*time.Millisecond, func(i int) {
			copied := filepath.Join(filepath.Dir(dir), fmt.Sprint("c", i))
			before := last.Load()
			if s.Checkpoint(copied) != nil {
				return
			}
			if c, err := d.Open(copied); err == nil { // the disk may be full meanwhile
				if got := numberIn(t, c); got < before {
					t.Errorf("round %d: a checkpoint has batch %d, %d was written before it", round, got, before)
				}
				_ = c.Close()
				checkpoints.Add(1)
			}
			_ = os.RemoveAll(copied)
		})
		written := make(chan error, 1)
		var b engine.Batch
		go func() {
			for {
				if err := writeNumbered(s, &b, last.Load()+1); err != nil {
					written <- err
					return
				}
				last.Add(1)
				select {
				case <-stop:
					written <- nil
					return
				case <-time.After(time.Millisecond):
				}
			}
		}()
		var ended bool
		var err error
		wait := func(d time.Duration) {
			if ended {
				return
			}
			select {
			case err = <-written:
				ended = true
			case <-time.After(d):
			}
		}
		before, deadline := checkpoints.Load(), time.Now().Add(20*time.Second)
		for wait(100 * time.Millisecond); checkpoints.Load() == before && !ended; wait(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("round %d: no checkpoint beside the writes", round)
			}
		}
		fill(t, filler)
		wait(time.Duration(round*37%700) * time.Millisecond)
		failed := s.Stats().Failed
		must(t, os.Remove(filler))
		if failed == "" { // it came through
			close(stop)
		}
		wait(20 * time.Second)
		if !ended || err != nil && !errors.Is(err, base.ErrReopen) {
			t.Fatalf("round %d: it failed with %q and did not go on: %v", round, failed, err)
		}
		if failed != "" {
			close(stop)
		}
		beside.Wait()
		n = last.Load()
		if got := numberIn(t, s); got != n {
			t.Fatalf("round %d: it reads batch %d, %d is written", round, got, n)
		}
		if !s.Stats().Reopen && round%2 == 0 {
			must(t, s.Flush())
			durable.Store(n)
		} else if s.Stats().Reopen {
			reopened++
		}
		closeInTime(t, s)
		s = openNumbered(t, d, dir)
		got := numberIn(t, s)
		if got < durable.Load() || got > n {
			t.Fatalf("round %d: it has batch %d, %d was flushed and %d written", round, got, durable.Load(), n)
		}
		n = got
	}
	t.Logf("%d rounds, opened again %d times for a full disk, %d checkpoints", *fullRounds, reopened, checkpoints.Load())
	if reopened == 0 {
		t.Error("no round met the full disk")
	}
	must(t, s.Close())
}

// RO8: a store that is opened on a full disk, however much is left for its MANIFEST
// and options, fails or opens, and opens with all that it had once there is room.
func TestOpenOnAFullDisk(t *testing.T) {
	d, dir := onSmallDisk(t)
	s := openNumbered(t, d, dir)
	must(t, writeNumbered(s, new(engine.Batch), 7))
	must(t, s.Flush())
	must(t, s.Close())
	filler := filepath.Join(filepath.Dir(dir), "filler")
	failed := 0
	for left := range int64(10) {
		fill(t, filler)
		st, err := os.Stat(filler)
		must(t, err)
		must(t, os.Truncate(filler, st.Size()-left*4096))
		switch s, err := d.Open(dir); {
		case err == nil:
			must(t, s.Close())
		case errors.Is(err, syscall.ENOSPC):
			failed++
		default:
			t.Fatalf("with %d pages left: %v", left, err)
		}
		must(t, os.Remove(filler))
		s, err := d.Open(dir)
		must(t, err)
		if n := numberIn(t, s); n != 7 {
			t.Fatalf("with %d pages left: it has batch %d", left, n)
		}
		must(t, s.Close())
	}
	if failed == 0 {
		t.Error("no opening met the full disk")
	}
}

// RO8: a new family waits on a full disk before RocksDB has met its end, which with
// RocksDB's own assertions would end the process, and needs no reopening. The first
// wait is longer than the 10 seconds after which RocksDB flushes its LOG: that meets
// the end of the disk, and the lines of the next family follow.
func TestFamilyWaitsForAFullDisk(t *testing.T) {
	d, dir := onSmallDisk(t)
	s := openNumbered(t, d, dir)
	filler := filepath.Join(filepath.Dir(dir), "filler")
	o := engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}
	for f := engine.FamilyID(10); f < 20; f++ {
		full := fullRetry + fullRetry/2
		if f == 11 { // the lines of the one before wait for the flush
			full = 11 * time.Second
		}
		fill(t, filler)
		made := make(chan error, 1)
		go func() { made <- s.EnsureFamily(f, o) }()
		select {
		case err := <-made:
			t.Fatalf("family %d on a full disk: %v", f, err)
		case <-time.After(full):
		}
		if _, there := s.Families()[f]; there {
			t.Fatalf("family %d is there before it is made", f)
		}
		must(t, os.Remove(filler))
		select {
		case err := <-made:
			must(t, err)
		case <-time.After(20 * time.Second):
			t.Fatalf("family %d is not made although there is space", f)
		}
		if st := s.Stats(); st.Failed != "" {
			t.Fatalf("family %d: %s", f, st.Failed)
		}
	}
	must(t, writeNumbered(s, new(engine.Batch), 1))
	closeInTime(t, s)
	s = openNumbered(t, d, dir)
	if n := len(s.Families()); n != 1+len(fullFamilies)+10 {
		t.Fatalf("%d families", n)
	}
	// Closing ends the wait.
	fill(t, filler)
	made := make(chan error, 1)
	go func() { made <- s.EnsureFamily(99, o) }()
	select {
	case err := <-made:
		t.Fatalf("a family on a full disk: %v", err)
	case <-time.After(fullRetry):
	}
	closeInTime(t, s)
	if err := <-made; !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, base.ErrClosed) {
		t.Fatal(err)
	}
}

// pause is the time between two looks at a condition.
func pause() { time.Sleep(5 * time.Millisecond) }
