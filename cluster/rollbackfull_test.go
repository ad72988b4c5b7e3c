package cluster_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// fullDriver opens no live store of a shard while its disk is full.
type fullDriver struct {
	engine.Driver
	full    atomic.Bool
	refused atomic.Int64
}

func (d *fullDriver) Open(dir string) (engine.Store, error) {
	if d.full.Load() && strings.Contains(dir, "groups") && strings.HasPrefix(filepath.Base(dir), "store-") {
		d.refused.Add(1)
		return nil, fmt.Errorf("opening %s: %w", dir, syscall.ENOSPC)
	}
	return d.Driver.Open(dir)
}

// A disk that is full when the shards are to go back holds the rollback up and ends
// no node: once there is room again it goes on by itself (B17).
func TestB17RollbackWaitsForRoom(t *testing.T) {
	t.Parallel()
	var driver *fullDriver
	k := newRollingKit(t, testcluster.Options{Engine: "mem", Configure: func(i int, o *cluster.Options) {
		if driver == nil {
			driver = &fullDriver{Driver: o.Driver}
		}
		o.Driver = driver
	}})
	k.more()
	n := k.checkpoint()
	k.more()
	was := k.top.Incarnation
	done := make(chan error, 1)
	go func() {
		info, err := k.back(0, n, func(i *cluster.RollbackInfo) {
			if i.Phase == meta.PhaseRollbackFence {
				driver.full.Store(true)
			}
		})
		if err == nil && info.Phase != meta.PhaseDone {
			err = errors.New(info.Phase + ": " + info.Error)
		}
		done <- err
	}()
	k.Eventually("the disks are found full", func() error {
		if refused := driver.refused.Load(); refused < 6 {
			return fmt.Errorf("%d times", refused)
		}
		return nil
	})
	select {
	case err := <-done:
		t.Fatalf("it ended on full disks: %v", err)
	default:
	}
	driver.full.Store(false)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	k.renew(was)
	k.WaitReady()
	k.holds(n)
	k.more()
	k.agree()
	for i := range 3 {
		if g := k.generation(i); g != 1 {
			t.Errorf("node %d was given up for damaged: generation %d", i, g)
		}
	}
}
