package cluster_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/internal/vfs"
)

// hangingDisk lets the fsyncs of one node hang until they are released.
type hangingDisk struct {
	mu   sync.Mutex
	hang chan struct{}
}

func (d *hangingDisk) fault(op vfs.Op) vfs.Fault {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hang == nil || op.Kind != vfs.OpSync {
		return vfs.Fault{}
	}
	return vfs.Fault{Wait: d.hang}
}

func (d *hangingDisk) set(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if on {
		d.hang = make(chan struct{})
	} else if d.hang != nil {
		close(d.hang)
		d.hang = nil
	}
}

// B23: a leader whose disk hangs loses its office, although it sends heartbeats
// and has quorum; the node says so, and takes part again when the disk answers.
func TestLeaderWithAHungDiskLosesItsOffice(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		var disks [3]hangingDisk
		k := newKit(t, testcluster.Options{Engine: e, Configure: func(i int, o *cluster.Options) {
			o.SyncLimit = 400 * time.Millisecond
			o.Log.FS = vfs.Faulty(vfs.OS, disks[i].fault)
		}})
		t.Cleanup(func() {
			for i := range disks {
				disks[i].set(false)
			}
		})
		k.mustWrite(k.add("s", 1))
		a := k.Leader(1)
		disks[a].set(true)
		k.Eventually("another node leads", func() error {
			for i := range 3 {
				if i != a && k.Node(i).Leads(1) {
					return nil
				}
			}
			return errors.New("no other leader")
		})
		k.mustWrite(k.add("s", 10))
		if ok, why := k.Node(a).Ready(); ok || !strings.Contains(why, "disk hangs") {
			t.Errorf("the sick node says ready %v, %q", ok, why)
		}
		if _, err := k.readAt(a, 200*time.Millisecond, state.Query{State: k.sums, Kind: state.QueryGet, Key: []byte("s")}); err == nil {
			t.Error("the sick node served a read")
		}
		disks[a].set(false)
		k.WaitReady()
		if got := k.sum("s"); got != 11 {
			t.Fatalf("sum %d, want 11", got)
		}
		k.checkHashes()
	})
}

// B23: a disk that hangs may hang whoever asks for its space, too; the node falls
// silent all the same.
func TestHungDiskIsNoticedWhileItsSpaceIsAskedFor(t *testing.T) {
	t.Parallel()
	var disks [3]hangingDisk
	var asks [3]atomic.Pointer[chan struct{}]
	var waits atomic.Bool
	k := newKit(t, testcluster.Options{Configure: func(i int, o *cluster.Options) {
		o.SyncLimit = 400 * time.Millisecond
		o.Log.FS = vfs.Faulty(vfs.OS, disks[i].fault)
		o.DiskSpace = func(string) (cluster.DiskSpace, error) {
			if wait := asks[i].Load(); wait != nil {
				waits.Store(true)
				<-*wait
			}
			return cluster.DiskSpace{Free: 1 << 40, Total: 1 << 40}, nil
		}
	}})
	a := k.Leader(1)
	wait := make(chan struct{})
	release := sync.OnceFunc(func() {
		asks[a].Store(nil)
		close(wait)
		disks[a].set(false)
	})
	t.Cleanup(release)
	asks[a].Store(&wait)
	k.Eventually("it is asked for the space", func() error {
		if !waits.Load() {
			return errors.New("not yet")
		}
		return nil
	})
	disks[a].set(true)
	k.Eventually("another node leads", func() error {
		for i := range 3 {
			if i != a && k.Node(i).Leads(1) {
				return nil
			}
		}
		return errors.New("no other leader")
	})
	release()
	k.WaitReady()
}

// B17: a node whose disk is nearly full hands its offices over and says so, and
// takes them back by itself when there is space; when no node has space, writes
// that add data are refused as not applied, and deletes pass.
func TestNearlyFullDiskShedsItsOffices(t *testing.T) {
	t.Parallel()
	var free [3]atomic.Uint64
	k := newKit(t, testcluster.Options{Configure: func(i int, o *cluster.Options) {
		free[i].Store(10 << 30)
		o.DiskSpace = func(string) (cluster.DiskSpace, error) {
			return cluster.DiskSpace{Free: free[i].Load(), Total: 100 << 30}, nil
		}
		o.BalanceDelay = 100 * time.Millisecond
	}})
	k.mustWrite(k.add("s", 1), k.put("v", "old"))
	a := k.Leader(1)
	free[a].Store(100 << 20)
	k.Eventually("another node leads shard and system group", func() error {
		if k.Node(a).Leads(1) || k.Node(a).Leads(base.SystemGroup) {
			return errors.New("it leads")
		}
		if ok, why := k.Node(a).Ready(); ok || !strings.Contains(why, "nearly full") {
			return fmt.Errorf("ready %v, %q", ok, why)
		}
		return nil
	})
	k.mustWrite(k.add("s", 10))
	for i := range free {
		free[i].Store(100 << 20)
	}
	k.Eventually("writes that add are refused", func() error {
		// Without a session: what is taken does not change what the kit writes next.
		req := k.request(1, k.add("s", 100))
		req.Session, req.Seq, req.Prev, req.Floor = 0, 0, 0, 0
		res := k.submit(k.Leader(1), req)
		if res.Err == nil {
			return errors.New("it was taken")
		}
		if !errors.Is(res.Err, base.ErrDiskFull) || base.OutcomeOf(res.Err) != base.OutcomeNotApplied {
			return res.Err
		}
		return nil
	})
	before := k.sum("s")
	k.mustWrite(state.Mutation{State: k.values, Op: state.OpClear, Key: []byte("v")})
	if got := k.value("v"); got != "" {
		t.Fatalf("the value is %q after a delete on full disks", got)
	}
	for i := range free {
		free[i].Store(10 << 30)
	}
	k.WaitReady()
	k.mustWrite(k.add("s", 1000))
	if got := k.sum("s"); got != before+1000 {
		t.Fatalf("sum %d, want %d", got, before+1000)
	}
	k.checkHashes()
}

// The ballast is made where there is room, and given up when the log meets the
// end of the disk, so that Raft's own writes go on.
func TestBallastIsGivenUpForTheLog(t *testing.T) {
	t.Parallel()
	var full atomic.Bool
	var k *kit
	ballast := func() string { return filepath.Join(k.Dir(0), "BALLAST") }
	k = newKit(t, testcluster.Options{Nodes: 1, Replication: 1, Configure: func(_ int, o *cluster.Options) {
		o.DiskSpace = func(string) (cluster.DiskSpace, error) {
			if full.Load() {
				return cluster.DiskSpace{Total: 1 << 30}, nil
			}
			return cluster.DiskSpace{Free: 1 << 30, Total: 1 << 30}, nil
		}
		o.Log.FullRetry = 5 * time.Millisecond
		o.Log.FS = vfs.Faulty(vfs.OS, func(op vfs.Op) vfs.Fault {
			if op.Kind == vfs.OpWrite && full.Load() {
				if _, err := os.Stat(ballast()); err == nil {
					return vfs.Fault{Err: syscall.ENOSPC}
				}
			}
			return vfs.Fault{}
		})
	}})
	k.Eventually("the ballast is there", func() error {
		st, err := os.Stat(ballast())
		if err == nil && st.Size() != (1<<30)/100 {
			err = fmt.Errorf("it has %d bytes", st.Size())
		}
		return err
	})
	k.mustWrite(k.put("k", "v"))
	full.Store(true)
	k.mustWrite(state.Mutation{State: k.values, Op: state.OpClear, Key: []byte("k")})
	if _, err := os.Stat(ballast()); err == nil {
		t.Fatal("the ballast is still there")
	}
	full.Store(false)
	k.Eventually("the ballast is back", func() error { _, err := os.Stat(ballast()); return err })
}
