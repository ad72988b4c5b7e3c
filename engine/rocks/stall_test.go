package rocks

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
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

// Numbers of files of level 0 at which RocksDB makes writes slow, and at which it
// stops them.
const (
	slowFiles = 20
	stopFiles = 36
)

// stalled is a store that has as many files of level 0 as asked for, since nothing
// is compacted until release is called, with a writer that goes on as fast as it is
// let.
type stalled struct {
	t       *testing.T
	s       engine.Store
	dir     string
	write   func(b *engine.Batch, n uint64)
	release func()
	written atomic.Uint64
	ended   chan error
}

// stall makes one in dir; write puts the operations of a batch together.
func stall(t *testing.T, d *Driver, dir string, files int, write func(b *engine.Batch, n uint64)) *stalled {
	t.Helper()
	s := openNumbered(t, d, dir)
	st := &stalled{t: t, s: s, dir: dir, write: write, release: sync.OnceFunc(holdCompactions()), ended: make(chan error, 1)}
	t.Cleanup(st.release)
	for range files {
		var b engine.Batch
		write(&b, st.written.Add(1))
		must(t, s.Write(&b))
		must(t, s.Flush())
	}
	go func() {
		var b engine.Batch
		for {
			n := st.written.Load() + 1
			b.Reset()
			write(&b, n)
			if err := s.Write(&b); err != nil {
				st.ended <- err
				return
			}
			st.written.Store(n)
		}
	}()
	return st
}

// putNumbers makes a batch of a few bytes, since RocksDB makes writes as slow as
// 16 KiB a second: its number in every family.
func putNumbers(b *engine.Batch, n uint64) {
	for _, f := range append(fullFamilies, engine.MetaFamily) {
		b.Put(f, []byte("number"), binary.BigEndian.AppendUint64(nil, n))
	}
}

// putBytes makes a batch of 16 KiB that nothing makes smaller in one family, so that
// a compaction needs more room than a disk that is full may still have.
func putBytes(b *engine.Batch, n uint64) {
	rnd, value := rand.New(rand.NewPCG(n, 1)), make([]byte, 16<<10)
	for i := range value {
		value[i] = byte(rnd.Uint32())
	}
	b.Put(1, []byte("number"), binary.BigEndian.AppendUint64(nil, n))
	b.Put(1, fmt.Append(nil, n), value)
}

// calls are those of B61 that are not the end of a store.
func (st *stalled) calls() map[string]func() error {
	n := 0
	return map[string]func() error{
		"flush": st.s.Flush,
		"checkpoint": func() error {
			n++
			dir := filepath.Join(filepath.Dir(st.dir), fmt.Sprint("c", n))
			return errors.Join(st.s.Checkpoint(dir), os.RemoveAll(dir))
		},
		"compaction": st.s.Compact,
	}
}

// close closes the store in bounded time, and sees that the writer ends with it.
func (st *stalled) close() {
	st.t.Helper()
	closeInTime(st.t, st.s)
	if err := inTime(st.t, "the writer", func() error { return <-st.ended }); err == nil {
		st.t.Error("the writer of a closed store ended without an error")
	}
}

func stallDriver(t *testing.T) *Driver {
	return newTestDriver(t, Options{MemoryBytes: 64 << 20, FamilyBufferBytes: 256 << 10})
}

// B61, RO9: while writes are slow a forced flush, a checkpoint and a compaction
// return, though nothing is compacted beside them. (RocksDB's own flush in a
// checkpoint waits until writes are fast again.)
func TestCallsReturnWhileWritesAreSlow(t *testing.T) {
	for _, what := range []string{"flush", "checkpoint", "compaction"} {
		t.Run(what, func(t *testing.T) {
			st := stall(t, stallDriver(t), filepath.Join(t.TempDir(), "s"), slowFiles, putNumbers)
			call := st.calls()[what]
			for range 3 {
				before := st.written.Load()
				must(t, inTime(t, what, call))
				if what == "checkpoint" && before == 0 {
					t.Fatal("nothing was written")
				}
			}
			st.close()
		})
	}
}

// B61: writes that are stopped end with the store; and all that waits for them
// goes on with the compaction that they wait for.
func TestCallsReturnWhileWritesAreStopped(t *testing.T) {
	t.Run("shutdown", func(t *testing.T) {
		st := stall(t, stallDriver(t), filepath.Join(t.TempDir(), "s"), stopFiles, putNumbers)
		st.awaitStopped()
		st.close()
	})
	t.Run("compacted", func(t *testing.T) {
		st := stall(t, stallDriver(t), filepath.Join(t.TempDir(), "s"), stopFiles, putNumbers)
		before := st.awaitStopped()
		ended := make(chan error)
		calls := st.calls()
		for _, call := range calls {
			go func() { ended <- call() }()
		}
		st.release()
		for range calls {
			must(t, inTime(t, "a call beside stopped writes", func() error { return <-ended }))
		}
		for deadline := time.Now().Add(30 * time.Second); st.written.Load() == before; pause() {
			if time.Now().After(deadline) {
				t.Fatal("the writer does not go on")
			}
		}
		st.close()
	})
}

// awaitStopped waits until RocksDB has stopped writes, and returns what was written.
func (st *stalled) awaitStopped() uint64 {
	st.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !st.s.Stats().WriteStalled; pause() {
		if time.Now().After(deadline) {
			st.t.Fatal("writes were never stopped")
		}
	}
	return st.written.Load()
}

// B61, RO9: writes that are stopped for a compaction that finds no room end the
// waits of all others with the full disk's error. With room again the store asks to
// be opened again, as always (RO8).
func TestCallsReturnWhileWritesWaitForAFullDisk(t *testing.T) {
	d, dir := onSmallDisk(t)
	st := stall(t, d, dir, stopFiles, putBytes)
	st.awaitStopped()
	filler := filepath.Join(filepath.Dir(dir), "filler")
	fill(t, filler)
	ended := make(chan error)
	calls := st.calls()
	for name, call := range calls {
		go func() {
			if err := call(); !errors.Is(err, syscall.ENOSPC) {
				ended <- fmt.Errorf("%s: %w", name, err)
				return
			}
			ended <- nil
		}()
	}
	st.release()
	for range calls {
		if err := inTime(t, "a call beside stopped writes on a full disk", func() error { return <-ended }); err != nil {
			t.Error(err)
		}
	}
	select {
	case err := <-st.ended:
		t.Errorf("a write beside the full disk: %v", err)
	case <-time.After(2 * fullRetry):
	}
	must(t, os.Remove(filler))
	if err := inTime(t, "the writer", func() error { return <-st.ended }); !errors.Is(err, base.ErrReopen) {
		t.Errorf("the write that waited: %v", err)
	}
	closeInTime(t, st.s)
	s := openNumbered(t, d, dir)
	if got, _, err := s.Get(1, []byte("number")); err != nil || len(got) != 8 || binary.BigEndian.Uint64(got) < stopFiles {
		t.Errorf("it has batch %x, %d were flushed; %v", got, stopFiles, err)
	}
	must(t, inTime(t, "a compaction after the full disk", s.Compact))
	must(t, s.Close())
}

// immutable is FS_IMMUTABLE_FL of the kernel.
const immutable = 0x10

// takesNoFiles makes a directory take no new files for a while, as a volume does
// that has become read-only.
func takesNoFiles(t *testing.T, dir string) (again func()) {
	t.Helper()
	set := func(flags int) error {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
	}
	if err := set(immutable); err != nil {
		t.Skipf("a directory that takes no files needs root and a file system that knows such: %v", err)
	}
	again = sync.OnceFunc(func() {
		if err := set(0); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(again)
	return again
}

// B61: a store whose directory takes no files ends every call in bounded time with
// an error; what was durable is there when it is opened after that.
func TestCallsReturnOnAReadOnlyVolume(t *testing.T) {
	for _, what := range []string{"flush", "checkpoint", "compaction", "shutdown"} {
		t.Run(what, func(t *testing.T) {
			d := stallDriver(t)
			dir := filepath.Join(t.TempDir(), "s")
			s := openNumbered(t, d, dir)
			n := uint64(1)
			must(t, writeNumbered(s, new(engine.Batch), n))
			must(t, s.Flush())
			again := takesNoFiles(t, dir)
			must(t, writeNumbered(s, new(engine.Batch), n+1))
			st := &stalled{t: t, s: s, dir: dir}
			if call := st.calls()[what]; call != nil {
				if err := inTime(t, what, call); !errors.Is(err, base.ErrDiskFailed) {
					t.Errorf("%s: %v", what, err)
				}
			}
			// Writes end too, at the latest when memory is full.
			err := inTime(t, "writing", func() error {
				for b := new(engine.Batch); ; {
					if err := writeNumbered(s, b, n+2); err != nil {
						return err
					}
				}
			})
			if !errors.Is(err, base.ErrDiskFailed) {
				t.Errorf("writing: %v", err)
			}
			if v, ok, err := s.DurableGet([]byte("number")); err != nil || !ok || !bytes.Equal(v, binary.BigEndian.AppendUint64(nil, n)) {
				t.Errorf("durable: %x, %v, %v", v, ok, err)
			}
			closeInTime(t, s)
			again()
			s = openNumbered(t, d, dir)
			if got := numberIn(t, s); got != n {
				t.Errorf("it has batch %d, %d was durable", got, n)
			}
			must(t, s.Close())
		})
	}
}
