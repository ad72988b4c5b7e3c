package cluster_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// staleDriver makes its shards' stores ask to be opened again.
type staleDriver struct {
	engine.Driver
	asks  atomic.Bool // until the next Open
	opens atomic.Int64
}

func (d *staleDriver) Open(dir string) (engine.Store, error) {
	s, err := d.Driver.Open(dir)
	if err != nil || !strings.Contains(dir, "groups") {
		return s, err
	}
	d.asks.Store(false)
	d.opens.Add(1)
	return &staleStore{Store: s, driver: d}, nil
}

type staleStore struct {
	engine.Store
	driver *staleDriver
}

var errStale = fmt.Errorf("no space left: %w", base.ErrReopen)

func (s *staleStore) refuse(do func() error) error {
	if s.driver.asks.Load() {
		return errStale
	}
	return do()
}

func (s *staleStore) Write(b *engine.Batch) error {
	return s.refuse(func() error { return s.Store.Write(b) })
}
func (s *staleStore) Flush() error { return s.refuse(s.Store.Flush) }

func (s *staleStore) Stats() engine.Stats {
	st := s.Store.Stats()
	if st.Reopen = s.driver.asks.Load(); st.Reopen {
		st.Failed = "no space left"
	}
	return st
}

// EN6, seeds 512 and 513: a replica whose store met a full disk is closed and
// opened again, by what it was given to write or by a look; what was in memory
// comes from the log, and nothing is lost or applied twice.
func TestStoreThatMetAFullDiskIsOpenedAgain(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		drivers := make([]*staleDriver, 3)
		k := newKit(t, testcluster.Options{Engine: e, Configure: func(i int, o *cluster.Options) {
			drivers[i] = &staleDriver{Driver: o.Driver}
			o.Driver = drivers[i]
		}})
		written := 0
		write := func(n int) {
			for range n {
				written++
				k.mustWrite(k.add("s", 1), k.appendTo("l", fmt.Sprint(written)))
			}
		}
		write(20)
		leader, follower := k.Leader(1), k.follower()
		for _, c := range []struct {
			name  string
			nodes []int
			idle  bool
		}{{"a follower", []int{follower}, false}, {"the leader", []int{leader}, false}, {"all", []int{0, 1, 2}, false}, {"all, idle", []int{0, 1, 2}, true}} {
			opens := make([]int64, 3)
			for _, i := range c.nodes {
				opens[i] = drivers[i].opens.Load()
				drivers[i].asks.Store(true)
			}
			if !c.idle {
				write(5) // retried in its session while replicas are closed
			}
			k.Eventually(c.name+" is opened again", func() error {
				for _, i := range c.nodes {
					if drivers[i].opens.Load() == opens[i] {
						return fmt.Errorf("node %d has the old store", i)
					}
				}
				return nil
			})
			k.WaitReady()
			write(5)
			if got := k.sum("s"); got != int64(written) {
				t.Fatalf("%s: sum %d, want %d", c.name, got, written)
			}
			if got := len(k.list("l")); got != written {
				t.Fatalf("%s: %d elements, want %d", c.name, got, written)
			}
			k.checkHashes()
		}
		for i := range 3 {
			if got := k.generation(i); got != 1 {
				t.Errorf("node %d came back as generation %d, want 1: to be opened again is no damage", i, got)
			}
		}
	})
}

// Seed 513: a snapshot whose files hold less than its manifest says is refused,
// and what was live stays live.
func TestSnapshotThatHoldsLessThanItSaysIsRefused(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e, Nodes: 1})
		k.mustWrite(k.add("s", 1))
		if _, _, err := k.Node(0).SnapshotShard(k.ctx(), 1); err != nil {
			t.Fatal(err)
		}
		k.mustWrite(k.add("s", 1))
		if err := k.Node(0).InstallOwnSnapshot(1, 1000); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("installed: %v", err)
		}
		k.mustWrite(k.add("s", 1))
		k.Restart(0)
		k.WaitReady()
		if got := k.sum("s"); got != 3 {
			t.Fatalf("sum %d, want 3", got)
		}
	})
}

// spoilStores makes a node's stores such that they cannot be opened.
func spoilStores(t *testing.T, dir string) {
	t.Helper()
	manifests, err := filepath.Glob(filepath.Join(dir, "groups", "*", "*", "store-*", "MANIFEST*"))
	if err != nil || len(manifests) == 0 {
		t.Fatalf("no store has a MANIFEST: %v", err)
	}
	for _, m := range manifests {
		flip(t, m, 20)
	}
}

// Seed 519: a power loss may leave stores that cannot be opened, of all replicas of
// a shard at once. Each is built again from the replica's own snapshot and log, or
// from the log alone if that is whole, and the replica stays the one it was.
func TestStoreThatCannotBeOpenedIsBuiltAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		small bool // the log is cut
	}{{"from the log", false}, {"from a snapshot and the log", true}} {
		t.Run(c.name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, e string) {
				o := testcluster.Options{Engine: e}
				if c.small {
					o.Configure = smallLog
				}
				k := newKit(t, o)
				n := 20
				if c.small {
					n = 300
					fill(k, n)
				} else {
					for range n {
						k.mustWrite(k.add("s", 1))
					}
				}
				k.checkHashes()
				for _, nodes := range [][]int{{k.follower()}, {0, 1, 2}} {
					for _, i := range nodes {
						k.Stop(i)
						spoilStores(t, k.Dir(i))
					}
					for _, i := range nodes {
						k.Start(i)
					}
					k.WaitReady()
					k.mustWrite(k.add("s", 1))
					n++
					if got := k.sum("s"); got != int64(n) {
						t.Fatalf("sum %d, want %d", got, n)
					}
					k.checkHashes()
					for _, i := range nodes {
						if got := k.generation(i); got != 1 {
							t.Fatalf("node %d came back as generation %d, want 1", i, got)
						}
					}
				}
			})
		})
	}
}

// A replica whose store cannot be opened, and whose snapshot is damaged too, is
// rebuilt from its peers under a new id (R3).
func TestStoreIsNotBuiltOfADamagedSnapshot(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e, Configure: smallLog})
		fill(k, 300)
		f := k.follower()
		k.Eventually("the follower has a snapshot", func() error {
			if path, _ := largest(t, k.Dir(f), "groups/1/1/snapshots/*/files/*"); path == "" {
				return errors.New("not yet")
			}
			return k.level(f)
		})
		k.Stop(f)
		spoilStores(t, k.Dir(f))
		newest := ""
		for _, files := range mustGlob(t, filepath.Join(k.Dir(f), "groups/1/1/snapshots/*/files")) {
			newest = max(newest, files)
		}
		path, size := largest(t, newest, "*")
		flip(t, path, size/2)
		k.Start(f)
		k.WaitReady()
		if got := k.generation(f); got < 2 {
			t.Fatalf("the replica is generation %d: it trusts a damaged snapshot", got)
		}
		if got := k.sum("s"); got != 300 {
			t.Fatalf("sum %d, want 300", got)
		}
		k.checkHashes()
	})
}

func mustGlob(t *testing.T, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil || len(paths) == 0 {
		t.Fatalf("nothing is at %s: %v", pattern, err)
	}
	return paths
}
