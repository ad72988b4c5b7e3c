package meta

import (
	"bytes"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// The checks of the hot path do not allocate.
func TestLookupsDoNotAllocate(t *testing.T) {
	w := founded(t)
	txn, _, _, err := DeclareTxn(w.view(), Declaration{Keyspace: "ks", Name: "s", Kind: "value", KeyType: "string"}, nil)
	w.do(txn, err)
	w.do(OpenSessionTxn(w.view(), 1, 7, 5000))
	w.view()
	if n := testing.AllocsPerRun(100, func() {
		v, err := w.mirror.View()
		if err != nil || !v.SessionAlive(7) || v.SessionAlive(8) || v.StateByID(1) == nil || v.Shard(1) == nil || v.Node("n1") == nil {
			t.Fatal("a record is missing")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// An old view stays as it was while the mirror goes on, by changes or, behind
// the history or a restore, by a full copy.
func TestViewsNeverChange(t *testing.T) {
	w := newWorld(t, broadcast.Options{HistoryEvents: 8})
	type kept struct {
		v    *View
		dump string
	}
	var views []kept
	keep := func() {
		v := w.view()
		views = append(views, kept{v, dumpView(v)})
	}
	keep()
	for i := range 60 {
		w.do(OpenSessionTxn(w.view(), uint64(i), base.SessionID(i+1), 2000))
		if i%3 == 0 {
			w.do(CloseSessionTxn(w.view(), base.SessionID(i/2+1)))
		}
		keep()
		switch {
		case i%20 == 7:
			// The mirror is left behind by the history.
			for range 20 {
				w.do(broadcast.Txn{Then: []broadcast.Op{broadcast.Put("user/x", nil)}}, nil)
			}
			keep()
		case i%20 == 13:
			var b bytes.Buffer
			if err := w.store.WriteSnapshot(&b); err != nil {
				t.Fatal(err)
			}
			if err := w.store.Restore(&b); err != nil {
				t.Fatal(err)
			}
			keep()
		case i%20 == 17:
			w.tick(uint64(i) * 10)
			keep()
		}
	}
	for i, k := range views {
		if dumpView(k.v) != k.dump {
			t.Errorf("view %d of revision %d changed", i, k.v.Revision())
		}
	}
}

// A restore to an older state is shown as such.
func TestMirrorFollowsARestoreBackwards(t *testing.T) {
	w := founded(t)
	var b bytes.Buffer
	if err := w.store.WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	want := dumpView(w.view())
	w.do(OpenSessionTxn(w.view(), 1, 7, 5000))
	w.view()
	if err := w.store.Restore(&b); err != nil {
		t.Fatal(err)
	}
	if got := dumpView(w.view()); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}

// Readers use the mirror and its views beside the writer (run with -race).
func TestMirrorIsUsedConcurrently(t *testing.T) {
	const writes = 500
	w := founded(t)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			last := base.Revision(0)
			for {
				v, err := w.mirror.View()
				if err != nil || v.Revision() < last || int(v.NextSessionID())-1 != v.SessionCount() {
					t.Errorf("view at %d after %d: %v", v.Revision(), last, err)
					return
				}
				last = v.Revision()
				if v.SessionAlive(writes) {
					return
				}
			}
		})
	}
	for i := range writes {
		w.do(OpenSessionTxn(w.quick(), 1, base.SessionID(i+1), 5000))
	}
	wg.Wait()
}

func BenchmarkMirrorAfterOneChangeAmong10000Sessions(b *testing.B) {
	w := newWorld(b, broadcast.Options{})
	var all builder
	for i := range uint64(10_000) {
		all.replace(kindSession, idKey(kindSession, i), 0, Session{ID: base.SessionID(i), LeaseMs: 1000, ExpiresMs: 1})
	}
	w.do(all.done())
	now := uint64(1)
	b.ReportAllocs()
	for b.Loop() {
		now++
		v, err := w.mirror.View()
		if err != nil {
			b.Fatal(err)
		}
		txn, _, err := KeepAliveTxn(v, now, []base.SessionID{base.SessionID(now % 10_000)})
		w.do(txn, err)
	}
}

func BenchmarkSessionAlive(b *testing.B) {
	w := founded(b)
	w.do(OpenSessionTxn(w.view(), 1, 7, 5000))
	b.ReportAllocs()
	for b.Loop() {
		if v, err := w.mirror.View(); err != nil || !v.SessionAlive(7) {
			b.Fatal("gone")
		}
	}
}
