package raftlog

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// TestFailedDiskStopsTheLog is RL4: after a failed write or fsync every call fails,
// and no fsync is tried again.
func TestFailedDiskStopsTheLog(t *testing.T) {
	for _, kind := range []vfs.OpKind{vfs.OpWrite, vfs.OpSync, vfs.OpCreate, vfs.OpSyncDir} {
		t.Run(string(kind), func(t *testing.T) {
			var armed atomic.Bool
			var after atomic.Int64
			fsys := vfs.Faulty(vfs.NewMem(), func(op vfs.Op) vfs.Fault {
				if !armed.Load() {
					return vfs.Fault{}
				}
				if op.Kind == kind {
					if op.Kind == vfs.OpSync || op.Kind == vfs.OpWrite {
						after.Add(1)
					}
					return vfs.Fault{Err: syscall.EIO, Partial: 17}
				}
				return vfs.Fault{}
			})
			failed := make(chan error, 10)
			opt := small()
			opt.OnFailure = func(err error) { failed <- err }
			l := mustOpen(t, fsys, opt)
			g := l.Group(1)
			must(t, g.StoreLogs(entries(1, 200, 1))) // the next batch rolls
			armed.Store(true)
			err := g.StoreLogs(entries(201, 201, 1))
			if !errors.Is(err, base.ErrDiskFailed) || !errors.Is(err, syscall.EIO) {
				t.Fatalf("first failure: %v", err)
			}
			if err := <-failed; !errors.Is(err, base.ErrDiskFailed) {
				t.Fatalf("callback: %v", err)
			}
			armed.Store(false)
			var e raft.Log
			_, lastErr := g.LastIndex()
			_, firstErr := g.FirstIndex()
			_, getErr := g.Get([]byte("k"))
			for name, err := range map[string]error{
				"store": g.StoreLogs(entries(201, 201, 1)), "set": g.SetUint64([]byte("k"), 1), "get log": g.GetLog(1, &e),
				"last": lastErr, "first": firstErr, "get": getErr, "delete": g.DeleteRange(1, 1),
				"tombstone": l.Tombstone(1), "create": l.CreateGroup(9, 1), "other group": l.Group(2).StoreLogs(entries(1, 1, 1)),
			} {
				if !errors.Is(err, base.ErrDiskFailed) {
					t.Errorf("%s after the failure: %v", name, err)
				}
			}
			must(t, l.Close())
			if n := after.Load(); n > 1 {
				t.Errorf("%s was tried %d times", kind, n)
			}
			if len(failed) != 0 {
				t.Error("the callback was called twice")
			}
		})
	}
}

// TestFailureLeavesAcknowledgedWrites: what was acknowledged before the failure is
// there after a restart.
func TestFailureLeavesAcknowledgedWrites(t *testing.T) {
	mem := vfs.NewMem()
	var syncs atomic.Int64
	l := mustOpen(t, vfs.Faulty(mem, func(op vfs.Op) vfs.Fault {
		if op.Kind == vfs.OpSync && syncs.Add(1) > 20 {
			return vfs.Fault{Err: syscall.EIO}
		}
		return vfs.Fault{}
	}), small())
	acked := uint64(0)
	for i := uint64(1); ; i++ {
		if err := l.Group(1).StoreLogs(entries(i, i, 1)); err != nil {
			break
		}
		acked = i
	}
	must(t, l.Close())
	for seed := range int64(20) {
		l := mustOpen(t, mem.CrashClone(seed), small())
		last, err := l.Group(1).LastIndex()
		must(t, err)
		if last < acked || last > acked+1 {
			t.Fatalf("last entry is %d, acknowledged %d", last, acked)
		}
		must(t, l.Close())
	}
}

// TestFullDiskWaitsForSpace is RL11, B17: a write that a full disk refuses waits,
// at the log's own writes and at a new segment, and goes on when there is space:
// nothing is skipped, nothing is told twice.
func TestFullDiskWaitsForSpace(t *testing.T) {
	for _, kind := range []vfs.OpKind{vfs.OpWrite, vfs.OpCreate} {
		t.Run(string(kind), func(t *testing.T) {
			var full atomic.Bool
			var tries atomic.Int64
			mem := vfs.NewMem()
			opt := small()
			opt.FullRetry = time.Millisecond
			opt.OnFull = func() { tries.Add(1) }
			opt.OnFailure = func(err error) { t.Errorf("the log failed: %v", err) }
			l := mustOpen(t, vfs.Faulty(mem, func(op vfs.Op) vfs.Fault {
				if full.Load() && op.Kind == kind {
					return vfs.Fault{Err: syscall.ENOSPC, Partial: 17}
				}
				return vfs.Fault{}
			}), opt)
			g := l.Group(1)
			must(t, g.StoreLogs(entries(1, 200, 1))) // the next batch rolls
			full.Store(true)
			done := make(chan error, 1)
			go func() { done <- g.StoreLogs(entries(201, 210, 1)) }()
			waitFor(t, "several tries", func() bool { return tries.Load() > 5 })
			if last, err := g.LastIndex(); last != 200 || err != nil || l.OldestPendingSync() == 0 || l.Err() != nil {
				t.Fatalf("on the full disk: last %d, %v, pending %v, %v", last, err, l.OldestPendingSync(), l.Err())
			}
			full.Store(false)
			must(t, <-done)
			must(t, g.StoreLogs(entries(211, 220, 1)))
			for seed := range int64(10) {
				again := mustOpen(t, mem.CrashClone(seed), small())
				if first, _ := again.Group(1).FirstIndex(); first != 1 {
					t.Fatalf("the log begins at %d", first)
				}
				var e raft.Log
				for i := uint64(1); i <= 220; i++ {
					must(t, again.Group(1).GetLog(i, &e))
					if e.Index != i {
						t.Fatalf("entry %d at %d", e.Index, i)
					}
				}
				must(t, again.Close())
			}
			must(t, l.Close())
		})
	}
}

// A log that is closed while it waits for space does not hang, and says why.
func TestFullDiskDoesNotHangClose(t *testing.T) {
	var full atomic.Bool
	var tries atomic.Int64
	opt := small()
	opt.FullRetry, opt.OnFull = time.Millisecond, func() { tries.Add(1) }
	l := mustOpen(t, vfs.Faulty(vfs.NewMem(), func(op vfs.Op) vfs.Fault {
		if full.Load() && op.Kind == vfs.OpWrite {
			return vfs.Fault{Err: syscall.ENOSPC}
		}
		return vfs.Fault{}
	}), opt)
	full.Store(true)
	done := make(chan error, 1)
	go func() { done <- l.Group(1).StoreLogs(entries(1, 1, 1)) }()
	waitFor(t, "a try", func() bool { return tries.Load() > 0 })
	must(t, l.Close())
	if err := <-done; !errors.Is(err, base.ErrDiskFailed) || !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the write that waited: %v", err)
	}
}

// TestOldestPendingSyncGrowsOnAHungDisk lets a node see that it must fall silent;
// meanwhile calls wait, and later ones share the next fsync.
func TestOldestPendingSyncGrowsOnAHungDisk(t *testing.T) {
	hang := make(chan struct{})
	var hung, syncs atomic.Int64
	l := mustOpen(t, vfs.Faulty(vfs.NewMem(), func(op vfs.Op) vfs.Fault {
		if op.Kind == vfs.OpSync && syncs.Add(1) == 2 {
			hung.Store(1)
			return vfs.Fault{Wait: hang}
		}
		return vfs.Fault{}
	}), Options{MarkDelay: -1})
	if d := l.OldestPendingSync(); d != 0 {
		t.Fatalf("an idle log has a pending sync of %v", d)
	}
	var wg sync.WaitGroup
	store := func(id base.GroupID) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := l.Group(id).StoreLogs(entries(1, 1, 1)); err != nil {
				t.Error(err)
			}
		}()
	}
	store(1)
	waitFor(t, "the fsync to hang", func() bool { return hung.Load() == 1 })
	a := l.OldestPendingSync()
	waitFor(t, "the age to grow", func() bool { return l.OldestPendingSync() > a+5*time.Millisecond })
	const others = 10
	for id := range base.GroupID(others) {
		store(id + 10)
	}
	waitFor(t, "ten calls to queue", func() bool {
		l.queue.mu.Lock()
		defer l.queue.mu.Unlock()
		return len(l.queue.mu.ops) == others
	})
	if last, _ := l.Group(1).LastIndex(); last != 0 {
		t.Fatal("an entry is visible before its fsync")
	}
	close(hang)
	wg.Wait()
	if n := syncs.Load(); n != 3 {
		t.Errorf("%d fsyncs, want 3: the head, the hung one, one for the ten", n)
	}
	waitFor(t, "no pending sync", func() bool { return l.OldestPendingSync() == 0 })
	must(t, l.Close())
	if err := l.Group(1).StoreLogs(entries(2, 2, 1)); !errors.Is(err, base.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestDamagedEntryIsNamed: damage on disk under a running log is found by the read,
// reported, and never returned as data.
func TestDamagedEntryIsNamed(t *testing.T) {
	mem := vfs.NewMem()
	opt := small()
	var told atomic.Int64
	opt.OnCorrupt = func(g base.GroupID, err error) {
		if g == 1 && errors.Is(err, base.ErrCorrupt) {
			told.Add(1)
		}
	}
	l := mustOpen(t, mem, opt)
	defer func() { must(t, l.Close()) }()
	g := l.Group(1)
	must(t, g.StoreLogs(entries(1, 3, 1)))
	s := *g.mu.index.at(2)
	f, err := mem.OpenReadWrite(filepath.Join("log", segmentName(1)))
	must(t, err)
	_, err = f.WriteAt([]byte{0xff}, int64(s.off+entryHeaderBytes))
	must(t, err)
	must(t, f.Close())
	var stopped error
	store := NewStoppingStore(g, func(err error) { stopped = err })
	var e raft.Log
	must(t, store.GetLog(1, &e))
	if err := store.GetLog(99, &e); err != raft.ErrLogNotFound || stopped != nil { //nolint:errorlint // identity
		t.Fatalf("missing entry: %v, stop %v", err, stopped)
	}
	if err := store.GetLog(2, &e); !errors.Is(err, base.ErrCorrupt) || told.Load() != 1 || !errors.Is(stopped, base.ErrCorrupt) {
		t.Fatalf("damaged entry: %v, told %d times, stop %v", err, told.Load(), stopped)
	}
	must(t, store.GetLog(3, &e))
}

// TestIdleGroupCannotPinSpace is RL7: the files stay bounded though one group never
// truncates, and its entries and values survive being moved.
func TestIdleGroupCannotPinSpace(t *testing.T) {
	mem := vfs.NewMem()
	opt := small()
	var moved atomic.Int64
	opt.Metrics.MovedBytes = func(v float64) { moved.Add(int64(v)) }
	l := mustOpen(t, mem, opt)
	idle := l.Group(1)
	must(t, idle.StoreLogs(entries(1, 40, 3)))
	must(t, idle.SetUint64([]byte(keyCurrentTerm), 3))
	want, err := describe(idle)
	must(t, err)
	written := int64(0)
	for i := range uint64(300) {
		must(t, l.Group(2).StoreLogs(entries(i*10+1, i*10+10, 1)))
		must(t, l.Group(2).DeleteRange(0, i*10+9))
		written += 500
		if i%100 == 50 {
			must(t, l.Close())
			l = mustOpen(t, mem, opt)
			idle = l.Group(1)
		}
	}
	bound := func() bool {
		st := l.Space()
		return st.FileBytes <= 2*st.LiveBytes+opt.GarbageBytes+2*opt.SegmentBytes
	}
	waitFor(t, "the files to shrink", bound)
	got, err := describe(idle)
	must(t, err)
	if got != want || moved.Load() == 0 || written < 10*l.Space().FileBytes/2 {
		t.Fatalf("moved %d, wrote %d, holds\n%s\nwant\n%s", moved.Load(), written, got, want)
	}
	names, err := mem.List("log")
	must(t, err)
	if len(names)-1 != l.Space().Segments {
		t.Fatalf("files %v, segments %d", names, l.Space().Segments)
	}
	must(t, l.Close())
	l = mustOpen(t, mem, opt)
	defer func() { must(t, l.Close()) }()
	if got, err = describe(l.Group(1)); err != nil || got != want {
		t.Fatalf("after restart: %v\n%s", err, got)
	}
}

func TestSecondOpenIsRefused(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, Options{})
	must(t, err)
	if !l.Fresh() || len(l.ID()) != 32 {
		t.Fatalf("a new log: fresh %t, id %q", l.Fresh(), l.ID())
	}
	if _, err := Open(dir, Options{}); !errors.Is(err, base.ErrConflict) {
		t.Fatalf("second open: %v", err)
	}
	id := l.ID()
	must(t, l.Close())
	must(t, l.Close())
	l, err = Open(dir, Options{})
	must(t, err)
	if l.Fresh() || l.ID() != id {
		t.Fatalf("reopened: fresh %t, id %s, was %s", l.Fresh(), l.ID(), id)
	}
	must(t, l.Close())
}

func TestOptionsNameAllProblems(t *testing.T) {
	_, err := Open("x", Options{FS: vfs.NewMem(), SegmentBytes: 1, MaxBatchBytes: 1 << 40, GarbageBytes: -1})
	for _, field := range []string{"SegmentBytes", "MaxBatchBytes", "GarbageBytes"} {
		if err == nil || !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named in %v", field, err)
		}
	}
}

// TestMetricNames pins the names that dashboards use.
func TestMetricNames(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := mustOpen(t, vfs.NewMem(), Options{Metrics: NewMetrics(reg)})
	RegisterLog(reg, l)
	must(t, l.Group(1).StoreLogs(entries(1, 5, 1)))
	families, err := reg.Gather()
	must(t, err)
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
		if f.GetName() == "keelstate_raftlog_sync_seconds" && f.GetMetric()[0].GetHistogram().GetSampleCount() != 1 {
			t.Error("one batch was not observed once")
		}
	}
	want := "[keelstate_raftlog_batch_bytes keelstate_raftlog_batch_records keelstate_raftlog_file_bytes keelstate_raftlog_live_bytes " +
		"keelstate_raftlog_moved_bytes_total keelstate_raftlog_pending_sync_seconds keelstate_raftlog_segments keelstate_raftlog_sync_seconds]"
	if fmt.Sprint(names) != want {
		t.Errorf("metrics are %v", names)
	}
	must(t, l.Close())
}
