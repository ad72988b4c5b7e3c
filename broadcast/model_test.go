package broadcast

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

// model is the obvious implementation: a map, copied whenever it is kept.
type model struct {
	m     map[string]Entry
	rev   base.Revision
	clock uint64
}

func (m *model) holds(c Condition) bool {
	e, ok := m.m[c.Key]
	switch c.Kind {
	case ConditionAbsent:
		return !ok
	case ConditionRevision:
		return ok && e.ModRevision == c.Revision
	default:
		return ok && bytes.Equal(e.Value, c.Value)
	}
}

// apply returns the first failed condition.
func (m *model) apply(txn Txn) int {
	m.clock = max(m.clock, txn.Stamp)
	for i, c := range txn.Conditions {
		if !m.holds(c) {
			return i
		}
	}
	before := maps.Clone(m.m)
	rev := m.rev + 1
	for _, op := range txn.Then {
		switch op.Kind {
		case OpPut:
			create := rev
			if e, ok := m.m[op.Key]; ok {
				create = e.CreateRevision
			}
			m.m[op.Key] = Entry{Value: op.Value, CreateRevision: create, ModRevision: rev}
		case OpDelete:
			delete(m.m, op.Key)
		case OpDeletePrefix:
			maps.DeleteFunc(m.m, func(k string, _ Entry) bool { return strings.HasPrefix(k, op.Key) })
		}
	}
	if !maps.EqualFunc(before, m.m, func(a, b Entry) bool { return a.ModRevision == b.ModRevision }) {
		m.rev = rev
	}
	return -1
}

func (m *model) dump() string {
	var s strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m.m)) {
		e := m.m[k]
		fmt.Fprintf(&s, "%q=%q %d %d\n", k, e.Value, e.CreateRevision, e.ModRevision)
	}
	return s.String()
}

func dumpSnapshot(v *Snapshot) string {
	var s strings.Builder
	v.Scan("", "", func(k string, e *Entry) bool {
		fmt.Fprintf(&s, "%q=%q %d %d\n", k, e.Value, e.CreateRevision, e.ModRevision)
		return true
	})
	return s.String()
}

// mirror is a copy that a watcher keeps.
type mirror struct {
	prefix string
	w      *Watcher
	m      map[string]Entry
	copies int
}

// follow brings the mirror up to the store, by events or by a full copy.
func (r *mirror) follow(t *rapid.T, s *Store) {
	for {
		var b Batch
		var ok bool
		var err error = base.ErrCompacted
		before := base.Revision(0)
		if r.w != nil {
			before = r.w.Revision()
			b, ok, err = r.w.Poll()
		}
		switch {
		case errors.Is(err, base.ErrCompacted):
			v := s.Snapshot()
			r.m = map[string]Entry{}
			v.Scan(r.prefix, "", func(k string, e *Entry) bool { r.m[k] = *e; return true })
			if r.w, err = s.Watch(t.Context(), r.prefix, v.Revision()); err != nil {
				t.Fatalf("watching from a copy: %v", err)
			}
			r.copies++
		case err != nil:
			t.Fatalf("Poll: %v", err)
		case !ok:
			return
		default:
			if b.Revision <= before || len(b.Events) == 0 {
				t.Fatalf("after %d came %v", before, b)
			}
			for _, e := range b.Events {
				if !strings.HasPrefix(e.Key, r.prefix) || e.Revision != b.Revision {
					t.Fatalf("event %+v in batch %d of prefix %q", e, b.Revision, r.prefix)
				}
				if e.Kind == EventDelete {
					if _, had := r.m[e.Key]; !had {
						t.Fatalf("delete of %q, which was not there", e.Key)
					}
					delete(r.m, e.Key)
				} else {
					r.m[e.Key] = Entry{Value: e.Value, CreateRevision: e.CreateRevision, ModRevision: e.Revision}
				}
			}
		}
	}
}

var (
	genKey = rapid.Custom(func(t *rapid.T) string {
		return rapid.SampledFrom([]string{"a", "a/", "b/", "\x00", "\xff"}).Draw(t, "space") + fmt.Sprint(rapid.IntRange(0, 60).Draw(t, "n"))
	})
	genValue = rapid.SliceOfN(rapid.Byte(), 0, 3)
	genOp    = rapid.Custom(func(t *rapid.T) Op {
		switch rapid.IntRange(0, 9).Draw(t, "op") {
		case 0, 1:
			return Delete(genKey.Draw(t, "key"))
		case 2:
			return DeletePrefix(rapid.SampledFrom([]string{"a", "a/", "a/1", "b/", "\xff", "none"}).Draw(t, "prefix"))
		default:
			return Put(genKey.Draw(t, "key"), genValue.Draw(t, "value"))
		}
	})
)

func genTxn(t *rapid.T, m *model) Txn {
	txn := Txn{Stamp: rapid.Uint64Range(0, 100).Draw(t, "stamp"), Then: rapid.SliceOfN(genOp, 0, 12).Draw(t, "then")}
	for range rapid.IntRange(0, 2).Draw(t, "conditions") {
		key := genKey.Draw(t, "key")
		e, ok := m.m[key]
		switch {
		case !ok:
			txn.Conditions = append(txn.Conditions, IfAbsent(key))
		case rapid.Bool().Draw(t, "by value"):
			txn.Conditions = append(txn.Conditions, IfValue(key, e.Value))
		default:
			txn.Conditions = append(txn.Conditions, IfRevision(key, e.ModRevision))
		}
		if rapid.IntRange(0, 5).Draw(t, "wrong") == 0 {
			c := &txn.Conditions[len(txn.Conditions)-1]
			*c = Condition{Kind: ConditionRevision, Key: c.Key, Revision: m.rev + 1}
		}
	}
	return txn
}

// TestStoreAgainstModel runs random commands on two stores and a map. One of
// the stores is replaced by its own snapshot now and then. Results, contents,
// pages, kept snapshots, watchers and the snapshot bytes of both must agree
// (BC1 to BC7).
func TestStoreAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{m: map[string]Entry{}}
		s := New(Options{HistoryEvents: 40})
		twin := New(Options{HistoryEvents: 1 << 20})
		mirrors := []*mirror{{prefix: ""}, {prefix: "a"}, {prefix: "b/"}}
		type kept struct {
			v    *Snapshot
			dump string
		}
		var snaps []kept
		index := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"txn": func(t *rapid.T) {
				txn := genTxn(t, m)
				cmd, err := EncodeTxn(txn)
				if err != nil {
					t.Fatal(err)
				}
				index += rapid.Uint64Range(1, 3).Draw(t, "gap")
				rev := m.rev
				want := m.apply(txn)
				res, err := s.Apply(index, cmd)
				other, err2 := twin.Apply(index, cmd)
				if err != nil || err2 != nil || res != other {
					t.Fatalf("%+v, %v and %+v, %v", res, err, other, err2)
				}
				if res.FailedCondition != want || res.Revision != m.rev || res.Clock != m.clock || res.Changed != (m.rev > rev) || res.Index != index {
					t.Fatalf("%+v, the model has failed condition %d, revision %d, clock %d", res, want, m.rev, m.clock)
				}
			},
			"tick": func(t *rapid.T) {
				stamp := rapid.Uint64Range(0, 100).Draw(t, "stamp")
				m.clock = max(m.clock, stamp)
				index++
				for _, x := range []*Store{s, twin} {
					if _, err := x.Apply(index, EncodeTick(stamp)); err != nil {
						t.Fatal(err)
					}
				}
			},
			"compact": func(t *rapid.T) {
				rev := base.Revision(rapid.Uint64Range(0, uint64(m.rev)).Draw(t, "revision"))
				index++
				for _, x := range []*Store{s, twin} {
					if _, err := x.Apply(index, EncodeCompact(rev)); err != nil {
						t.Fatal(err)
					}
				}
			},
			"restore": func(t *rapid.T) {
				var b bytes.Buffer
				if err := s.WriteSnapshot(&b); err != nil {
					t.Fatal(err)
				}
				if err := s.Restore(&b); err != nil {
					t.Fatal(err)
				}
			},
			"keep": func(t *rapid.T) { snaps = append(snaps, kept{s.Snapshot(), m.dump()}) },
			"watch": func(t *rapid.T) {
				for _, r := range mirrors {
					r.follow(t, s)
					want := maps.Clone(m.m)
					maps.DeleteFunc(want, func(k string, _ Entry) bool { return !strings.HasPrefix(k, r.prefix) })
					if got, want := (&model{m: r.m}).dump(), (&model{m: want}).dump(); got != want {
						t.Fatalf("watcher of %q has\n%s, want\n%s", r.prefix, got, want)
					}
				}
			},
			"": func(t *rapid.T) {
				if got, want := dumpSnapshot(s.Snapshot()), m.dump(); got != want {
					t.Fatalf("the store holds\n%s, the model\n%s", got, want)
				}
				for _, k := range snaps {
					if dumpSnapshot(k.v) != k.dump {
						t.Fatal("a kept snapshot changed")
					}
				}
				var a, b bytes.Buffer
				if s.WriteSnapshot(&a) != nil || twin.WriteSnapshot(&b) != nil || !bytes.Equal(a.Bytes(), b.Bytes()) {
					t.Fatal("equal logs, different snapshots")
				}
			},
		})
	})
}
