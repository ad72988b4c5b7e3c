package raftlog

import (
	"bytes"
	"errors"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// TestKilledLogWithFilledTailIsWhole: zeros that were filled ahead are no torn
// tail; Open and Close cut them off.
func TestKilledLogWithFilledTailIsWhole(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem, Options{MarkDelay: -1})
	must(t, l.Group(1).StoreLogs(entries(1, 3, 1)))
	want, end := describeForTest(t, l), l.commit.active.size.Load()
	killed := mem.CrashClone(1)
	must(t, l.Close())

	name := filepath.Join("log", segmentName(1))
	data := fileBytes(t, killed, name)
	if int64(len(data)) != end+512<<10 || !allZero(data[end:]) {
		t.Fatalf("%d bytes after the kill, records end at %d: want 512 KiB of zeros", len(data), end)
	}
	rep, err := Verify(killed, "log")
	must(t, err)
	if rep.TornBytes != 0 {
		t.Errorf("%d torn bytes", rep.TornBytes)
	}
	l = mustOpen(t, killed, Options{MarkDelay: -1})
	if got := describeForTest(t, l); got != want {
		t.Errorf("holds\n%s\nwant\n%s", got, want)
	}
	must(t, l.Close())
	if n := len(fileBytes(t, killed, name)); int64(n) >= end+512<<10 {
		t.Errorf("%d bytes after Open and Close", n)
	}
}

// TestSealFollowedByZeros: the cut before a seal may be lost in a crash; zeros
// behind a seal are no damage, anything else is.
func TestSealFollowedByZeros(t *testing.T) {
	mem, states, _, _ := buildGolden(t)
	name := segmentName(1)
	data := append(fileBytes(t, mem, filepath.Join("log", name)), make([]byte, 999)...)
	got, err := reopen(t, withFile(t, mem, name, data))
	if err != nil || got != states[len(states)-1] {
		t.Fatalf("zeros after the seal: %v\n%s", err, got)
	}
	for _, at := range []int{1, 500, 999} {
		bad := bytes.Clone(data)
		bad[len(bad)-at] = 1
		if _, err := reopen(t, withFile(t, mem, name, bad)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("a byte after the seal: %v", err)
		}
	}
}

// TestNoRoomToFillAhead: a disk on which zeros do not fit still takes records;
// another failure stops the log (RL4).
func TestNoRoomToFillAhead(t *testing.T) {
	for _, c := range []struct {
		failure error
		stops   bool
	}{{syscall.ENOSPC, false}, {syscall.EIO, true}} {
		var armed atomic.Bool
		mem := vfs.NewMem()
		l := mustOpen(t, vfs.Faulty(mem, func(op vfs.Op) vfs.Fault {
			if armed.Load() && op.Kind == vfs.OpWrite && op.Bytes == 512<<10 {
				return vfs.Fault{Err: c.failure, Partial: 100}
			}
			return vfs.Fault{}
		}), Options{MarkDelay: -1})
		armed.Store(true)
		err := l.Group(1).StoreLogs(entries(1, 3, 1))
		if err == nil {
			err = l.Group(1).StoreLogs(entries(4, 4, 1))
		}
		if stopped := errors.Is(err, base.ErrDiskFailed); stopped != c.stops || err != nil && !stopped {
			t.Errorf("%v: %v", c.failure, err)
		}
		must(t, l.Close())
		if c.stops {
			continue
		}
		l = mustOpen(t, mem, Options{})
		if last, err := l.Group(1).LastIndex(); err != nil || last != 4 {
			t.Errorf("last entry %d, %v", last, err)
		}
		must(t, l.Close())
	}
}

// TestLargeBatchesAreNotWrittenTwice: what would be filled ahead of them is no
// gain to them.
func TestLargeBatchesAreNotWrittenTwice(t *testing.T) {
	mem := vfs.NewMem()
	var written atomic.Int64
	l := mustOpen(t, vfs.Faulty(mem, func(op vfs.Op) vfs.Fault {
		if op.Kind == vfs.OpWrite {
			written.Add(int64(op.Bytes))
		}
		return vfs.Fault{}
	}), Options{MarkDelay: -1})
	before := written.Load()
	const size = 200 << 10
	must(t, l.Group(1).StoreLog(entry(1, 1, 0, string(make([]byte, size)))))
	if n := written.Load() - before; n > size+1000 {
		t.Errorf("%d bytes written for an entry of %d", n, size)
	}
	must(t, l.Close())
}
