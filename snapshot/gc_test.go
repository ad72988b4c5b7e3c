package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/objectstore/fault"
	"github.com/keelstate/keelstate/snapshot"
)

// later is after everything that a test has stored.
func later() time.Time { return time.Now().Add(time.Hour) }

// put writes objects behind the store's back, which takes no fsync.
func put(t testing.TB, s dirStore, keys ...string) {
	t.Helper()
	for _, k := range keys {
		if err := os.MkdirAll(filepath.Dir(s.path(k)), 0o755); err != nil {
			t.Fatal(err)
		}
		writeFile(t, s.path(k), []byte(k))
	}
}

// objectKeys are n keys of an attempt.
func objectKeys(n int, attempt uint64) []string {
	var keys []string
	for i := range n {
		keys = append(keys, snapshot.ObjectKey(cluster, sha256.Sum256([]byte{byte(i), byte(i >> 8)}), attempt))
	}
	slices.Sort(keys)
	return keys
}

// foreignKeys lie beside the objects of the cluster, or look like them.
func foreignKeys() []string {
	sum := sha256.Sum256(nil)
	return []string{
		snapshot.ObjectKey("ffffffffffffffffffffffffffffffff", sum, 1), snapshot.ObjectKey(cluster+"0", sum, 1), snapshot.ObjectKey("0"+cluster, sum, 1),
		snapshot.MetadataKey("ffffffffffffffffffffffffffffffff", 1), cluster + "/notes.txt", cluster + "/checkpoints/1/_metadata",
		cluster + "/checkpoints/0000000001/other", cluster + "/sub/" + snapshot.ObjectKey(cluster, sum, 1), cluster + "/" + strings.Repeat("A", 64) + ".1",
	}
}

// B49: all of a plan's keys go, and nothing else.
func TestExecutePlanDeletesItsKeys(t *testing.T) {
	s := openStore(t)
	keys := append(objectKeys(20, 7), snapshot.MetadataKey(cluster, 3))
	stay := append(foreignKeys(), objectKeys(2, 8)...)
	put(t, s, append(slices.Clone(keys), stay...)...)
	for range 2 { // again does nothing
		if err := snapshot.ExecutePlan(testCtx(t), s, cluster, keys); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(stay)
	if got := keysOf(t, s); !slices.Equal(got, stay) {
		t.Errorf("left are %v, want %v", got, stay)
	}
	if err := snapshot.ExecutePlan(testCtx(t), s, cluster, nil); err != nil {
		t.Error(err)
	}
}

// deletions is a store that notes which keys are to be deleted, in which calls.
type deletions struct {
	objectstore.Store
	calls [][]string
}

func (d *deletions) Delete(_ context.Context, keys ...string) error {
	d.calls = append(d.calls, keys)
	return nil
}

// B54: however many keys a plan has, each is handed to the store, which cuts them
// into requests; `_metadata` alone and first.
func TestExecutePlanOfManyKeys(t *testing.T) {
	for _, n := range []int{1, 999, 1000, 1001, 2001} {
		var s deletions
		keys := append(objectKeys(n, 7), snapshot.MetadataKey(cluster, 3), snapshot.MetadataKey(cluster, 4))
		if err := snapshot.ExecutePlan(testCtx(t), &s, cluster, keys); err != nil {
			t.Fatal(err)
		}
		if len(s.calls) != 2 || !slices.Equal(s.calls[0], keys[n:]) || !slices.Equal(s.calls[1], keys[:n]) {
			t.Errorf("%d keys: %d calls", n, len(s.calls))
		}
	}
}

// B49: a plan with a foreign key deletes nothing.
func TestExecutePlanRefusesForeignKeys(t *testing.T) {
	s := openStore(t)
	mine := objectKeys(3, 7)
	put(t, s, append(foreignKeys(), mine...)...)
	before := keysOf(t, s)
	for _, k := range append(foreignKeys(), "", "../x", cluster, cluster+"/") {
		if err := snapshot.ExecutePlan(testCtx(t), s, cluster, append(slices.Clone(mine), k)); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %v", k, err)
		}
	}
	if got := keysOf(t, s); !slices.Equal(got, before) {
		t.Errorf("deleted: left are %v", got)
	}
}

// A plan that broke off is executed again; `_metadata` went before the objects.
func TestExecutePlanIsResumed(t *testing.T) {
	dir := openStore(t)
	keys := append(objectKeys(5, 7), snapshot.MetadataKey(cluster, 3))
	put(t, dir, keys...)
	items := 1
	s := fault.Wrap(dir, func(op fault.Op, key string) fault.Fault {
		if op == fault.OpDelete && items > 0 && !strings.Contains(key, "checkpoints") {
			items--
			return fault.Fault{Items: 2}
		}
		return fault.Fault{}
	})
	if err := snapshot.ExecutePlan(testCtx(t), s, cluster, keys); !errors.Is(err, base.ErrObjectStore) {
		t.Fatalf("%v", err)
	}
	if left := keysOf(t, dir); len(left) != 3 || slices.Contains(left, snapshot.MetadataKey(cluster, 3)) {
		t.Fatalf("left are %v", left)
	}
	if err := snapshot.ExecutePlan(testCtx(t), s, cluster, keys); err != nil || len(keysOf(t, dir)) != 0 {
		t.Fatalf("%v, left are %v", err, keysOf(t, dir))
	}
	down := fault.Wrap(dir, func(op fault.Op, key string) fault.Fault { return fault.Fault{Err: fault.Trouble("down")} })
	put(t, dir, keys...)
	if err := snapshot.ExecutePlan(testCtx(t), down, cluster, keys); !errors.Is(err, base.ErrObjectStore) || len(keysOf(t, dir)) != len(keys) {
		t.Errorf("%v, left are %v", err, keysOf(t, dir))
	}
}

// Orphans are the cluster's own, unknown and old; the rest is counted.
func TestFindOrphans(t *testing.T) {
	s := openStore(t)
	lost, kept := append(objectKeys(1001, 7), snapshot.MetadataKey(cluster, 3)), objectKeys(3, 8)
	put(t, s, slices.Concat(lost, kept, foreignKeys())...)
	var asked []string
	o := snapshot.OrphanOptions{Before: later(), IsOrphan: func(key string) bool {
		asked = append(asked, key)
		return !slices.Contains(kept, key)
	}}
	got, err := snapshot.FindOrphans(testCtx(t), s, cluster, o)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(lost)
	if !slices.Equal(got.Keys, lost) || got.Bytes == 0 || got.Objects != 1001+1+3+5 || got.Foreign != 5 || got.Young != 0 {
		t.Errorf("%d keys, %+v", len(got.Keys), got)
	}
	if slices.ContainsFunc(foreignKeys(), func(k string) bool { return slices.Contains(asked, k) }) {
		t.Error("asked for a foreign key")
	}
	o.Before = time.Now().Add(-time.Hour)
	if got, err = snapshot.FindOrphans(testCtx(t), s, cluster, o); err != nil || len(got.Keys) != 0 || got.Young != len(lost) {
		t.Errorf("young ones: %+v, %v", got, err)
	}
	if _, err = snapshot.FindOrphans(testCtx(t), s, "", o); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("no cluster: %v", err)
	}
}

// B54: a list that breaks off gives an error and nothing else, wherever it does.
func TestFindOrphansNeedsTheWholeList(t *testing.T) {
	dir := openStore(t)
	put(t, dir, objectKeys(5, 7)...)
	for n := 1; n < 5; n++ {
		s := fault.Wrap(dir, func(op fault.Op, key string) fault.Fault {
			if op == fault.OpList && key != cluster+"/" {
				t.Errorf("listed %q", key)
			}
			return fault.Fault{Items: n}
		})
		got, err := snapshot.FindOrphans(testCtx(t), s, cluster, snapshot.OrphanOptions{Before: later(), IsOrphan: func(string) bool { return true }})
		if got != nil || !errors.Is(err, base.ErrObjectStore) {
			t.Errorf("cut after %d: %+v, %v", n, got, err)
		}
	}
}

// `_metadata` is stored once; what is there already is taken if it is of the same
// cut, whoever made it.
func TestStoreMetadata(t *testing.T) {
	dir := openStore(t)
	c := fullCheckpoint()
	raw := mustEncodeCheckpoint(t, c)
	lose := true
	s := fault.Wrap(dir, func(op fault.Op, _ string) fault.Fault {
		if op == fault.OpPut && lose {
			lose = false
			return fault.Fault{After: fault.Trouble("the answer is lost")}
		}
		return fault.Fault{}
	})
	if _, _, err := snapshot.StoreMetadata(testCtx(t), s, c); !errors.Is(err, base.ErrObjectStore) {
		t.Fatalf("%v", err)
	}
	other := fullCheckpoint()
	other.FormatVersion, other.States, other.Keyspaces = 9, other.States[:1], nil
	for what, m := range map[string]*snapshot.Checkpoint{"the same": c, "other declarations": other} {
		sum, size, err := snapshot.StoreMetadata(testCtx(t), s, m)
		if err != nil || sum != sha256.Sum256(raw) || size != int64(len(raw)) {
			t.Errorf("%s: %x, %d, %v", what, sum, size, err)
		}
	}
	if b, err := objectstore.ReadAll(testCtx(t), dir, snapshot.MetadataKey(cluster, c.Number), 1<<20); err != nil || !bytes.Equal(b, raw) {
		t.Errorf("another _metadata is there: %v", err)
	}
	for what, change := range map[string]func(*snapshot.Checkpoint){
		"index": func(c *snapshot.Checkpoint) { c.Shards[1].Index++ }, "manifest": func(c *snapshot.Checkpoint) { c.Shards[0].ManifestSHA256[0]++ },
		"range": func(c *snapshot.Checkpoint) {
			c.Shards[0].Range.Hi++
			c.Shards[1].Range.Lo++
			c.Shards[1].Range.Hi++
			c.Shards[2].Range.Lo++
		},
		"time": func(c *snapshot.Checkpoint) { c.CreatedMs++ }, "incarnation": func(c *snapshot.Checkpoint) { c.Incarnation++ },
		"participant": func(c *snapshot.Checkpoint) { c.Participants[0].Bytes = nil }, "broadcast": func(c *snapshot.Checkpoint) { c.Broadcast = nil },
		"operator": func(c *snapshot.Checkpoint) { c.Operator = nil },
	} {
		m := fullCheckpoint()
		change(m)
		if _, _, err := snapshot.StoreMetadata(testCtx(t), s, m); !errors.Is(err, base.ErrConflict) {
			t.Errorf("another %s: %v", what, err)
		}
	}
	dir.change(t, snapshot.MetadataKey(cluster, c.Number), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	if _, _, err := snapshot.StoreMetadata(testCtx(t), s, c); !errors.Is(err, base.ErrConflict) || !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("a damaged one: %v", err)
	}
	c.Number = 0
	if _, _, err := snapshot.StoreMetadata(testCtx(t), s, c); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("an impossible one: %v", err)
	}
}

// A body that ends early is an error, not another object.
func TestStoreMetadataReadsWhole(t *testing.T) {
	dir := openStore(t)
	c := fullCheckpoint()
	putCheckpoint(t, dir, c)
	for _, kind := range []fault.BodyKind{fault.BodyCut, fault.BodyBroken} {
		s := fault.Wrap(dir, func(op fault.Op, _ string) fault.Fault {
			if op == fault.OpGet {
				return fault.Fault{Body: fault.Body{Kind: kind, At: 50}}
			}
			return fault.Fault{}
		})
		if _, _, err := snapshot.StoreMetadata(testCtx(t), s, c); err == nil || errors.Is(err, base.ErrConflict) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, _, err := snapshot.StoreMetadata(testCtx(t), dir, c); err != nil {
		t.Error(err)
	}
}

func ExampleMetadataKey() {
	fmt.Println(snapshot.MetadataKey("c", 12))
	// Output: c/checkpoints/0000000012/_metadata
}
