package cluster_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// Nobody keeps files for a savepoint at its barrier, not even for a moment.
func TestSavepointsLinkNothing(t *testing.T) {
	t.Parallel()
	k := newRollingKit(t, testcluster.Options{Configure: func(_ int, o *cluster.Options) { o.CheckpointLocalLinks = true }})
	k.more()
	n := k.checkpoint()
	k.kept(n)
	k.more()
	saved, seen := make(chan uint64, 1), make(chan string, 1)
	go func() {
		var last uint64
		err := k.Node(0).CreateSavepoint(k.ctx(), func(c *cluster.CheckpointInfo) error {
			last = c.Number
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		saved <- last
	}()
	for {
		select {
		case number := <-saved:
			if number != n+1 {
				t.Errorf("savepoint %d follows on checkpoint %d", number, n)
			}
			k.kept(n)
			return
		case dir := <-seen:
			t.Fatalf("%s is kept for a savepoint", dir)
		default:
			for _, i := range k.Running() {
				for _, dir := range k.linked(i) {
					if strings.HasSuffix(dir, fmt.Sprint("linked-", n+1)) && len(seen) == 0 {
						seen <- dir
					}
				}
			}
		}
	}
}
