package raftlog

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

func TestGroupStoresReadsAndDeletes(t *testing.T) {
	for _, cache := range []int{-1, 1 << 20} {
		t.Run(fmt.Sprintf("cache %d", cache), func(t *testing.T) {
			l := mustOpen(t, vfs.NewMem(), Options{CacheBytes: cache})
			defer func() { must(t, l.Close()) }()
			g := l.Group(3)
			at := time.Unix(0, 1234567890123456789)
			in := &raft.Log{Index: 7, Term: 2, Type: raft.LogConfiguration, Data: []byte("data"), Extensions: []byte("ext"), AppendedAt: at}
			must(t, g.StoreLog(in))
			must(t, g.StoreLogs(entries(8, 20, 2)))
			var out raft.Log
			must(t, g.GetLog(7, &out))
			if out.Term != 2 || out.Type != raft.LogConfiguration || string(out.Data) != "data" ||
				string(out.Extensions) != "ext" || !out.AppendedAt.Equal(at) {
				t.Fatalf("read %+v", out)
			}
			must(t, g.GetLog(8, &out))
			if !out.AppendedAt.IsZero() {
				t.Fatalf("a zero time came back as %v", out.AppendedAt)
			}
			must(t, g.DeleteRange(1, 9))
			must(t, g.DeleteRange(18, 99))
			checkRange(t, g, 10, 17)
			for _, i := range []uint64{0, 9, 18, 1 << 60} {
				if err := g.GetLog(i, &out); err != raft.ErrLogNotFound { //nolint:errorlint // identity is the contract
					t.Fatalf("entry %d: %v", i, err)
				}
			}
			must(t, g.StoreLogs(entries(18, 18, 9)))
			must(t, g.GetLog(18, &out))
			if out.Term != 9 {
				t.Fatalf("after a suffix delete entry 18 has term %d", out.Term)
			}
			must(t, g.DeleteRange(0, 1<<60))
			checkRange(t, g, 0, 0)
			must(t, g.StoreLogs(entries(1000, 1001, 10)))
			checkRange(t, g, 1000, 1001)
		})
	}
}

func checkRange(t *testing.T, g *GroupLog, first, last uint64) {
	t.Helper()
	f, err := g.FirstIndex()
	must(t, err)
	la, err := g.LastIndex()
	must(t, err)
	if f != first || la != last {
		t.Fatalf("entries are %d..%d, want %d..%d", f, la, first, last)
	}
}

// TestGroupRefusals: what is refused names its reason and changes nothing (RL8).
func TestGroupRefusals(t *testing.T) {
	l := mustOpen(t, vfs.NewMem(), Options{MaxBatchBytes: 64})
	defer func() { must(t, l.Close()) }()
	g := l.Group(1)
	must(t, g.StoreLogs(entries(5, 10, 1)))
	must(t, l.Tombstone(2))
	must(t, l.CreateGroup(3, 4))
	big := make([]byte, maxPayloadBytes)
	cases := []struct {
		name string
		err  error
		call func() error
	}{
		{"gap", base.ErrInvalid, func() error { return g.StoreLogs(entries(12, 12, 1)) }},
		{"overlap", base.ErrInvalid, func() error { return g.StoreLogs(entries(10, 11, 1)) }},
		// In parts of 64 bytes the second part alone would fit.
		{"overlap in parts", base.ErrInvalid, func() error { return g.StoreLogs(entries(10, 14, 1)) }},
		{"gap inside", base.ErrInvalid, func() error { return g.StoreLogs([]*raft.Log{entry(11, 1, 0, ""), entry(13, 1, 0, "")}) }},
		{"index zero", base.ErrInvalid, func() error { return l.Group(9).StoreLogs(entries(0, 0, 1)) }},
		{"middle", base.ErrInvalid, func() error { return g.DeleteRange(6, 7) }},
		{"big entry", base.ErrTooLarge, func() error { return g.StoreLog(&raft.Log{Index: 11, Data: big}) }},
		{"big value", base.ErrTooLarge, func() error { return g.Set([]byte("k"), big) }},
		{"empty key", base.ErrTooLarge, func() error { return g.Set(nil, nil) }},
		{"tombstone append", base.ErrNoSuchShard, func() error { return l.Group(2).StoreLogs(entries(1, 1, 1)) }},
		{"tombstone set", base.ErrNoSuchShard, func() error { return l.Group(2).SetUint64([]byte("k"), 1) }},
		{"tombstone same generation", base.ErrConflict, func() error { return l.CreateGroup(2, 0) }},
		{"other generation", base.ErrConflict, func() error { return l.CreateGroup(3, 5) }},
	}
	before := describeAll(t, l)
	for _, c := range cases {
		if err := c.call(); !errors.Is(err, c.err) {
			t.Errorf("%s: %v, want %v", c.name, err, c.err)
		}
	}
	if after := describeAll(t, l); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Fatalf("refusals changed %v to %v", before, after)
	}
	for k := range maxKeys {
		must(t, g.SetUint64(fmt.Appendf(nil, "key%d", k), 1))
	}
	if err := g.SetUint64([]byte("one more"), 1); !errors.Is(err, base.ErrTooLarge) {
		t.Fatalf("key beyond the limit: %v", err)
	}
	must(t, g.SetUint64([]byte("key3"), 2))
}

// TestStableNotFoundIsRafts: raft compares the text of the error.
func TestStableNotFoundIsRafts(t *testing.T) {
	l := mustOpen(t, vfs.NewMem(), Options{})
	defer func() { must(t, l.Close()) }()
	g := l.Group(1)
	_, want := raft.NewInmemStore().Get([]byte("nothing"))
	if _, err := g.Get([]byte("nothing")); err == nil || err.Error() != want.Error() {
		t.Fatalf("Get: %v, raft's own store says %v", err, want)
	}
	if v, err := g.GetUint64([]byte("nothing")); v != 0 || err == nil || err.Error() != want.Error() {
		t.Fatalf("GetUint64: %d, %v", v, err)
	}
	has, err := raft.HasExistingState(g, g, raft.NewInmemSnapshotStore())
	if err != nil || has {
		t.Fatalf("a new group has state: %t, %v", has, err)
	}
	must(t, g.Set([]byte("empty"), nil))
	if v, err := g.Get([]byte("empty")); err != nil || v == nil || len(v) != 0 {
		t.Fatalf("an empty value came back as %v, %v", v, err)
	}
	must(t, g.SetUint64([]byte("n"), 77))
	if v, err := g.GetUint64([]byte("n")); v != 77 || err != nil {
		t.Fatalf("GetUint64: %d, %v", v, err)
	}
}

// TestTombstoneOutlivesRestart is RL9 and rule R3.
func TestTombstoneOutlivesRestart(t *testing.T) {
	fsys := vfs.NewMem()
	l := mustOpen(t, fsys, small())
	must(t, l.CreateGroup(5, 2))
	must(t, l.Group(5).StoreLogs(entries(1, 30, 1)))
	must(t, l.Group(5).SetUint64([]byte(keyCurrentTerm), 9))
	must(t, l.Tombstone(5))
	must(t, l.Tombstone(5))
	for i := range uint64(20) { // roll past the segment that holds the record
		must(t, l.Group(6).StoreLogs(entries(i*20+1, i*20+20, 1)))
		must(t, l.Group(6).DeleteRange(0, i*20+19))
	}
	must(t, l.Close())
	l = mustOpen(t, fsys, small())
	defer func() { must(t, l.Close()) }()
	st, ok := l.Group(5).State()
	if !ok || !st.Tombstoned || st.Generation != 2 || st.Last != 0 {
		t.Fatalf("state after restart: %+v, %t", st, ok)
	}
	if err := l.CreateGroup(5, 2); !errors.Is(err, base.ErrConflict) {
		t.Fatalf("same generation: %v", err)
	}
	must(t, l.CreateGroup(5, 3))
	if _, err := l.Group(5).GetUint64([]byte(keyCurrentTerm)); !errors.Is(err, base.ErrNotFound) {
		t.Fatalf("the new generation inherited a term: %v", err)
	}
	must(t, l.Group(5).StoreLogs(entries(1, 1, 1)))
}

// TestIndexQueriesMatchModel drives deletes and appends at both ends and compares
// the byte and command queries with a plain walk.
func TestIndexQueriesMatchModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		fsys := vfs.NewMem()
		l := mustOpen(t, fsys, small())
		defer func() { must(t, l.Close()) }()
		var model []*raft.Log
		next := uint64(rapid.IntRange(1, 5).Draw(rt, "start"))
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			g := l.Group(1)
			switch rapid.IntRange(0, 5).Draw(rt, "op") {
			case 0, 1, 2:
				var batch []*raft.Log
				for range rapid.IntRange(1, 8).Draw(rt, "n") {
					typ := rapid.SampledFrom([]raft.LogType{raft.LogCommand, raft.LogNoop, raft.LogBarrier, raft.LogConfiguration}).Draw(rt, "type")
					batch = append(batch, entry(next, 1, typ, rapid.StringN(0, 20, -1).Draw(rt, "data")))
					next++
				}
				must(t, g.StoreLogs(batch))
				model = append(model, batch...)
			case 3:
				n := rapid.IntRange(0, len(model)).Draw(rt, "prefix")
				if n > 0 {
					must(t, g.DeleteRange(0, model[n-1].Index))
					model = model[n:]
				}
			case 4:
				n := rapid.IntRange(0, len(model)).Draw(rt, "keep")
				if n < len(model) {
					must(t, g.DeleteRange(model[n].Index, next))
					next = model[n].Index
					model = model[:n]
				}
			case 5:
				must(t, l.Close())
				l = mustOpen(t, fsys, small())
			}
			compareQueries(rt, l.Group(1), model, next)
		}
	})
}

func compareQueries(rt *rapid.T, g *GroupLog, model []*raft.Log, next uint64) {
	total := uint64(0)
	for _, e := range model {
		total += uint64(entrySize(e))
	}
	if g.Bytes() != total {
		rt.Fatalf("Bytes is %d, want %d", g.Bytes(), total)
	}
	for i := uint64(0); i <= next+1; i++ {
		var from, newest uint64
		for _, e := range model {
			if e.Index >= i {
				from += uint64(entrySize(e))
			}
			if e.Index <= i && e.Type == raft.LogCommand {
				newest = e.Index
			}
		}
		if got := g.BytesFrom(i); got != from {
			rt.Fatalf("BytesFrom(%d) is %d, want %d", i, got, from)
		}
		if got := g.NewestCommandAtOrBelow(i); got != newest {
			rt.Fatalf("NewestCommandAtOrBelow(%d) is %d, want %d", i, got, newest)
		}
	}
	for _, n := range []uint64{0, 1, 41, 60, total / 2, total - 1, total, total + 1} {
		want := uint64(0)
		if len(model) > 0 {
			for want = model[0].Index - 1; g.BytesFrom(want+1) > n; want++ {
			}
		}
		if got := g.IndexForBytes(n); got != want {
			rt.Fatalf("IndexForBytes(%d) is %d, want %d", n, got, want)
		}
	}
}

// TestManyGroupsAtOnce has writers, readers and truncation on many groups, with
// the compactor at work; run it with -race.
func TestManyGroupsAtOnce(t *testing.T) {
	fsys := vfs.NewMem()
	opt := small()
	opt.CacheBytes = 16 << 10
	l := mustOpen(t, fsys, opt)
	const groups, rounds = 8, 60
	var wg sync.WaitGroup
	for id := range base.GroupID(groups) {
		g := l.Group(id)
		wg.Add(2)
		go func() {
			defer wg.Done()
			for i := range uint64(rounds) {
				if err := g.StoreLogs(entries(i*5+1, i*5+5, i)); err != nil {
					t.Error(err)
				}
				if err := g.SetUint64([]byte(keyCurrentTerm), i); err != nil {
					t.Error(err)
				}
				if i%7 == 6 && id != 0 { // group 0 keeps everything
					if err := g.DeleteRange(0, i*5); err != nil {
						t.Error(err)
					}
				}
			}
		}()
		go func() {
			defer wg.Done()
			for last := uint64(0); last < rounds*5; last, _ = g.LastIndex() {
				for i := max(last, 12) - 10; i <= last; i++ {
					var e raft.Log
					if err := g.GetLog(i, &e); err != nil && !errors.Is(err, raft.ErrLogNotFound) {
						t.Error(err)
						return
					} else if err == nil && string(e.Data) != fmt.Sprintf("d%d.%d", i, (i-1)/5) {
						t.Errorf("entry %d of %s is %q", i, g.ID(), e.Data)
						return
					}
				}
			}
		}()
	}
	wg.Wait()
	before := describeAll(t, l)
	must(t, l.Close())
	l = mustOpen(t, fsys, opt)
	defer func() { must(t, l.Close()) }()
	if after := describeAll(t, l); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Fatalf("restart changed\n%v\nto\n%v", before, after)
	}
}
