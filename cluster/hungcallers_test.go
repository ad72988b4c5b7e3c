package cluster_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/internal/vfs"
)

// Who calls a leader whose disk hangs is back when its time is over, and leaves
// no goroutine behind that waits for raft.
func TestCallersOfAHungLeaderLeaveNothingBehind(t *testing.T) {
	const callers = 30
	var disks [3]hangingDisk
	k := newKit(t, testcluster.Options{Configure: func(i int, o *cluster.Options) {
		o.SyncLimit = time.Hour // the node goes on to lead
		o.Log.FS = vfs.Faulty(vfs.OS, disks[i].fault)
	}})
	t.Cleanup(func() {
		for i := range disks {
			disks[i].set(false)
		}
	})
	a := k.Leader(base.SystemGroup)
	disks[a].set(true)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			if _, _, _, err := k.Node(a).OpenSession(ctx, time.Minute); err == nil {
				t.Error("a session was opened while the disk hangs")
			}
		})
	}
	back := make(chan struct{})
	go func() { wg.Wait(); close(back) }()
	select {
	case <-back:
	case <-time.After(testcluster.Wait):
		disks[a].set(false)
		<-back
		t.Fatal("the callers waited for the disk, not for their own time")
	}
	k.Eventually("nobody waits for raft but the node itself", func() error {
		buf := make([]byte, 8<<20)
		if n := strings.Count(string(buf[:runtime.Stack(buf, true)]), "cluster.(*group).await"); n >= callers {
			return fmt.Errorf("%d frames wait", n)
		}
		return nil
	})
	disks[a].set(false)
	k.mustWrite(k.add("s", 1))
}
