package cluster_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/internal/vfs"
)

// A node that cannot read its log stops with a reason, or gives the replica up
// (R3); raft, which reads entries that are not in memory to apply and to send
// them, must not panic. Started again with a disk that works, it is whole.
func TestUnreadableLogIsNoPanic(t *testing.T) {
	t.Parallel()
	for _, leads := range []bool{false, true} {
		t.Run(fmt.Sprintf("leader=%v", leads), func(t *testing.T) {
			var broken [3]atomic.Bool
			k := newKit(t, testcluster.Options{Configure: func(i int, o *cluster.Options) {
				o.Log.CacheBytes = -1
				o.Log.FS = vfs.Faulty(vfs.OS, func(op vfs.Op) vfs.Fault {
					if op.Kind == vfs.OpRead && broken[i].Load() && strings.Contains(op.Path, "raftlog") {
						return vfs.Fault{Err: syscall.EIO}
					}
					return vfs.Fault{}
				})
			}})
			fill(k, 10)
			sick := k.Leader(1)
			if !leads {
				sick = (sick + 1) % 3
			}
			other := (sick + 1) % 3
			if leads { // what it has to send is not in its memory
				k.Stop(other)
				fill(k, 5)
				broken[sick].Store(true)
				k.Start(other)
			} else {
				broken[sick].Store(true)
			}
			k.Eventually("the node says that it cannot go on", func() error {
				if !leads {
					k.mustWrite(k.add("s", 0))
				}
				if ok, _ := k.Node(sick).Ready(); ok {
					return fmt.Errorf("node %s is ready", testcluster.ID(sick))
				}
				return nil
			})
			k.Stop(sick) // as its process would by itself: the system group has the same log
			broken[sick].Store(false)
			k.Start(sick)
			k.WaitReady()
			k.Eventually("it votes again", func() error { return k.votes(sick) })
			want := int64(10)
			if leads {
				want = 15
			}
			if got := k.sum("s"); got != want {
				t.Fatalf("sum %d, want %d", got, want)
			}
			k.checkHashes()
		})
	}
}
