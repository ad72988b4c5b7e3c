package broadcast

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// apply applies a transaction that must not be refused.
func apply(t testing.TB, s *Store, txn Txn) Result {
	t.Helper()
	res, err := s.Apply(s.Snapshot().AppliedIndex()+1, mustTxn(t, txn))
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
	return res
}

func put(t testing.TB, s *Store, key, value string) base.Revision {
	t.Helper()
	return apply(t, s, Txn{Then: []Op{Put(key, []byte(value))}}).Revision
}

// BC2: what moves the revision and what does not.
func TestRevisionGrowsOnlyWithAChange(t *testing.T) {
	s := New(Options{})
	put(t, s, "a", "1")
	for _, c := range []struct {
		name string
		cmd  []byte
		grow base.Revision
	}{
		{"put", mustTxn(t, Txn{Then: []Op{Put("b", nil)}}), 1},
		{"put of the same value", mustTxn(t, Txn{Then: []Op{Put("b", nil)}}), 1},
		{"several ops", mustTxn(t, Txn{Then: []Op{Put("c", nil), Put("d", nil), Delete("a")}}), 1},
		{"no ops", mustTxn(t, Txn{}), 0},
		{"delete of absent", mustTxn(t, Txn{Then: []Op{Delete("x"), DeletePrefix("x")}}), 0},
		{"created and deleted", mustTxn(t, Txn{Then: []Op{Put("x", nil), Delete("x")}}), 0},
		{"created and deleted by prefix", mustTxn(t, Txn{Then: []Op{Put("x/1", nil), DeletePrefix("x/")}}), 0},
		{"failed condition", mustTxn(t, Txn{Conditions: []Condition{IfAbsent("b")}, Then: []Op{Put("b", nil)}}), 0},
		{"tick", EncodeTick(99), 0},
		{"compact", EncodeCompact(1), 0},
		{"compact of the future", EncodeCompact(1 << 40), 0},
		{"nonsense", []byte("nonsense"), 0},
		{"delete", mustTxn(t, Txn{Then: []Op{Delete("b")}}), 1},
	} {
		before := s.Snapshot()
		res, _ := s.Apply(before.AppliedIndex()+1, c.cmd)
		after := s.Snapshot()
		if after.Revision() != before.Revision()+c.grow || res.Revision != after.Revision() || res.Changed != (c.grow == 1) {
			t.Errorf("%s: revision %d to %d, result %+v", c.name, before.Revision(), after.Revision(), res)
		}
		if after.AppliedIndex() != before.AppliedIndex()+1 {
			t.Errorf("%s: applied index %d", c.name, after.AppliedIndex())
		}
	}
}

func TestConditionsAreJudgedBeforeTheTransaction(t *testing.T) {
	s := New(Options{})
	r1 := put(t, s, "a", "1")
	r2 := put(t, s, "a", "2")
	put(t, s, "empty", "")
	for _, c := range []struct {
		name  string
		conds []Condition
		fails int
	}{
		{"none", nil, -1},
		{"absent", []Condition{IfAbsent("x")}, -1},
		{"absent but there", []Condition{IfAbsent("x"), IfAbsent("empty")}, 1},
		{"revision", []Condition{IfRevision("a", r2)}, -1},
		{"old revision", []Condition{IfRevision("a", r1)}, 0},
		{"revision of absent", []Condition{IfRevision("x", 0)}, 0},
		{"value", []Condition{IfValue("a", []byte("2")), IfValue("empty", nil)}, -1},
		{"other value", []Condition{IfValue("a", []byte("2")), IfValue("a", []byte("1"))}, 1},
		{"empty value of absent", []Condition{IfValue("x", nil)}, 0},
	} {
		res := apply(t, s, Txn{Conditions: c.conds, Then: []Op{Delete("x")}})
		if res.FailedCondition != c.fails || res.Succeeded != (c.fails < 0) {
			t.Errorf("%s: %+v, want failure of %d", c.name, res, c.fails)
		}
		var e *base.Error
		if err := res.Err(); (err != nil) != (c.fails >= 0) || (err != nil && (!errors.Is(err, base.ErrPrecondition) || !errors.As(err, &e) || e.Ordinal != c.fails)) {
			t.Errorf("%s: Err %v", c.name, err)
		}
	}
}

func TestEntryKeepsItsCreateRevisionUntilDeleted(t *testing.T) {
	s := New(Options{})
	r1 := put(t, s, "a", "1")
	r2 := put(t, s, "a", "2")
	if e, rev := s.Get("a"); e.CreateRevision != r1 || e.ModRevision != r2 || rev != r2 {
		t.Fatalf("%+v at %d", e, rev)
	}
	apply(t, s, Txn{Then: []Op{Delete("a")}})
	r4 := put(t, s, "a", "")
	if e, _ := s.Get("a"); e.CreateRevision != r4 || e.Value == nil || len(e.Value) != 0 {
		t.Fatalf("%+v: an empty value is present", e)
	}
	if e, rev := s.Get("b"); e != nil || rev != r4 {
		t.Fatalf("absent: %+v at %d", e, rev)
	}
}

// BC3.
func TestClockIsTheMaximumOfStamps(t *testing.T) {
	s := New(Options{})
	put(t, s, "a", "1")
	for i, c := range []struct {
		cmd  []byte
		want uint64
	}{
		{EncodeTick(100), 100},
		{EncodeTick(50), 100},
		{mustTxn(t, Txn{Stamp: 120}), 120},
		{mustTxn(t, Txn{Stamp: 70, Then: []Op{Put("k", nil)}}), 120},
		{mustTxn(t, Txn{Stamp: 130, Conditions: []Condition{IfAbsent("a")}}), 130},
		{EncodeCompact(1), 130},
		{[]byte("nonsense"), 130},
	} {
		res, _ := s.Apply(s.Snapshot().AppliedIndex()+1, c.cmd)
		if s.Snapshot().Clock() != c.want || res.Clock != c.want {
			t.Errorf("step %d: clock %d, result %d, want %d", i, s.Snapshot().Clock(), res.Clock, c.want)
		}
	}
}

// BC4: a refused command moves the applied index only; an old index nothing.
func TestRefusedAndRepeatedCommandsChangeNothing(t *testing.T) {
	s := New(Options{})
	put(t, s, "a", "1")
	state := func() string {
		v := *s.Snapshot()
		v.index = 0
		return string(v.appendHeader(nil)) + fmt.Sprint(s.Range("", "", 0))
	}
	before := state()
	newer := EncodeTick(7)
	newer[4]++
	for want, cmd := range map[*base.Sentinel][]byte{
		base.ErrCorrupt:       []byte("nonsense"),
		base.ErrFormatVersion: newer,
		base.ErrInvalid:       EncodeCompact(1000),
	} {
		index := s.Snapshot().AppliedIndex() + 5
		if _, err := s.Apply(index, cmd); !errors.Is(err, want) {
			t.Errorf("%v: got %v", want, err)
		}
		if s.Snapshot().AppliedIndex() != index || state() != before {
			t.Errorf("%v: the state changed", want)
		}
	}
	index := s.Snapshot().AppliedIndex()
	for _, old := range []uint64{0, 1, index} {
		res, err := s.Apply(old, mustTxn(t, Txn{Stamp: 1 << 40, Then: []Op{Put("a", []byte("again"))}}))
		if err != nil || !res.Skipped || res.Changed || res.Err() != nil || state() != before || s.Snapshot().AppliedIndex() != index {
			t.Errorf("repeated index %d: %+v, %v", old, res, err)
		}
	}
}

func TestApplyDoesNotKeepTheCommandsBytes(t *testing.T) {
	s := New(Options{})
	cmd := mustTxn(t, Txn{Then: []Op{Put("key", []byte("value"))}})
	if _, err := s.Apply(1, cmd); err != nil {
		t.Fatal(err)
	}
	for i := range cmd {
		cmd[i] = 0xFF
	}
	if e, _ := s.Get("key"); e == nil || string(e.Value) != "value" {
		t.Fatalf("got %+v", e)
	}
}

func TestRangePagesCoverAPrefixOnce(t *testing.T) {
	s := New(Options{})
	var ops []Op
	for i := range 100 {
		ops = append(ops, Put(fmt.Sprintf("p/%03d", i), []byte("v")))
	}
	ops = append(ops, Put("o/x", nil), Put("p0", nil), Put("p/big1", make([]byte, MaxPageBytes)), Put("p/big2", make([]byte, MaxPageBytes)))
	rev := apply(t, s, Txn{Then: ops}).Revision
	for _, limit := range []int{1, 7, 100, 0} {
		var keys []string
		pages, from := 0, ""
		for {
			p := s.Range("p/", from, limit)
			if p.Revision != rev || (limit > 0 && len(p.KVs) > limit) || len(p.KVs) == 0 {
				t.Fatalf("limit %d: page of %d at %d", limit, len(p.KVs), p.Revision)
			}
			for _, kv := range p.KVs {
				keys = append(keys, kv.Key)
			}
			pages++
			if !p.More {
				break
			}
			from = p.Next
		}
		if len(keys) != 102 || !slices.IsSorted(keys) || pages < 3 {
			t.Errorf("limit %d: %d keys in %d pages", limit, len(keys), pages)
		}
	}
	if p := s.Range("none/", "", 0); len(p.KVs) != 0 || p.More {
		t.Errorf("an empty range: %+v", p)
	}
	if p := s.Range("o/", "a", 0); len(p.KVs) != 1 {
		t.Errorf("a start before the prefix: %+v", p)
	}
	if p := s.Range("o/", "z", 0); len(p.KVs) != 0 {
		t.Errorf("a start behind the prefix: %+v", p)
	}
}

func TestWaitForRevisionAndIndex(t *testing.T) {
	s := New(Options{})
	ctx := t.Context()
	if err := s.WaitForRevision(ctx, 0); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for rev := range base.Revision(20) {
		wg.Go(func() {
			if err := s.WaitForRevision(ctx, rev); err != nil || s.Snapshot().Revision() < rev {
				t.Errorf("revision %d: %v at %d", rev, err, s.Snapshot().Revision())
			}
		})
		wg.Go(func() {
			if err := s.WaitForIndex(ctx, uint64(rev)); err != nil || s.Snapshot().AppliedIndex() < uint64(rev) {
				t.Errorf("index %d: %v at %d", rev, err, s.Snapshot().AppliedIndex())
			}
		})
	}
	for range 20 {
		put(t, s, "a", "1")
	}
	wg.Wait()
	short, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.WaitForRevision(short, 1000); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	wg.Go(func() {
		if err := s.WaitForRevision(ctx, 1000); !errors.Is(err, base.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
	})
	s.Close()
	wg.Wait()
	put(t, s, "a", "after close")
}

// TestCoreIsPure holds the import rule of doc.go where the layering test of
// the repository is not run.
func TestCoreIsPure(t *testing.T) {
	for _, dir := range []string{".", "meta"} {
		pkgs, err := parser.ParseDir(token.NewFileSet(), dir, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, pkg := range pkgs {
			for name, file := range pkg.Files {
				if strings.HasSuffix(name, "_test.go") {
					continue
				}
				for _, imp := range file.Imports {
					switch path := strings.Trim(imp.Path.Value, `"`); {
					case path == "time", path == "os", path == "net", strings.HasPrefix(path, "math/rand"), strings.HasPrefix(path, "crypto/rand"):
						t.Errorf("%s imports %s", name, path)
					}
				}
				ast.Inspect(file, func(n ast.Node) bool {
					if _, ok := n.(*ast.GoStmt); ok {
						t.Errorf("%s starts a goroutine", name)
					}
					return true
				})
			}
		}
	}
}

// BC5 under the race detector: readers walk snapshots while writes go on.
func TestReadersNeedNoLockWhileWritesGoOn(t *testing.T) {
	s := New(Options{})
	var ops []Op
	for i := range 500 {
		ops = append(ops, Put(fmt.Sprintf("k%03d", i), []byte("0")))
	}
	apply(t, s, Txn{Then: ops})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for ctx.Err() == nil {
				v := s.Snapshot()
				var first, second bytes.Buffer
				if v.Write(&first) != nil || v.Write(&second) != nil || !bytes.Equal(first.Bytes(), second.Bytes()) {
					t.Error("a snapshot changed while it was read")
					return
				}
				// Every transaction below sets all keys to one value (BC6).
				var value []byte
				v.Scan("k", "", func(key string, e *Entry) bool {
					if value == nil {
						value = e.Value
					}
					if !bytes.Equal(value, e.Value) {
						t.Errorf("half a transaction at %q", key)
					}
					return true
				})
			}
		})
	}
	for n := range 60 {
		for i := range ops {
			ops[i].Value = fmt.Append(nil, n)
		}
		apply(t, s, Txn{Then: ops})
	}
	cancel()
	wg.Wait()
}
