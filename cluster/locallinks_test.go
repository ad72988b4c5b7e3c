package cluster_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

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

// What has rotted since a checkpoint kept it is found before it is used, and comes
// from the object store: the file alone where the store has its content, else the
// shard.
func TestRottenLinksAreNotUsed(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, engine string) {
		regs := make([]*prometheus.Registry, 3)
		k := newRollingKit(t, testcluster.Options{Engine: engine, Configure: func(i int, o *cluster.Options) {
			regs[i] = prometheus.NewRegistry()
			o.CheckpointLocalLinks, o.Registerer = true, regs[i]
		}})
		k.more()
		c := k.mustCreate()
		k.saved[c.Number] = k.contents(k.keys)
		k.more()
		k.kept(c.Number)
		var rotten [3]int64
		for i := range 3 {
			rotten[i] = rot(t, filepath.Join(k.Dir(i), "groups", "1", "1", fmt.Sprint("linked-", c.Number), "files"))
		}
		k.mustBack(c.Number)
		k.more()
		for i := range 3 {
			stored := sum(t, regs[i], "keelstate_fetched_bytes_total", "store")
			if uploads := c.Shards[0].Uploader == testcluster.ID(i); stored < 1 || engine == "rocks" && uploads && stored != float64(rotten[i]) {
				t.Errorf("node %d, which uploads: %t, had %d rotten bytes, and %v from the store", i, uploads, rotten[i], stored)
			}
			if disk := sum(t, regs[i], "keelstate_fetched_bytes_total", "disk"); engine == "rocks" && disk == 0 {
				t.Errorf("node %d has linked nothing", i)
			}
		}
	})
}

// rot flips a bit of the largest file in a directory, which has an inode of its own by
// then, and returns its size.
func rot(t *testing.T, dir string) int64 {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var raw []byte
	var name string
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		table, before := strings.HasSuffix(e.Name(), ".sst"), strings.HasSuffix(name, ".sst")
		if table && !before || table == before && len(b) > len(raw) { // a table, where there is one
			raw, name = b, e.Name()
		}
	}
	raw[len(raw)/3] ^= 4
	path := filepath.Join(dir, name)
	if err := errors.Join(os.Remove(path), os.WriteFile(path, raw, 0o640)); err != nil {
		t.Fatal(err)
	}
	return int64(len(raw))
}
