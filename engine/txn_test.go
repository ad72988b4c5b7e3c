package engine_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/internal/base"
)

// The property tests of Txn (TX1 to TX3) are enginetest's Txn, which runs over
// every implementation; here are the cases that a model does not reach.

const (
	plain engine.FamilyID = 1
	sums  engine.FamilyID = 2
)

func kinds(f engine.FamilyID) engine.MergeKind {
	if f == sums {
		return engine.MergeSum128
	}
	return engine.MergeNone
}

func openMem(t testing.TB) engine.Store {
	t.Helper()
	s, err := mem.NewDriver().Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, f := range []engine.FamilyID{plain, sums} {
		if err := s.EnsureFamily(f, engine.FamilyOptions{Merge: kinds(f), GroupWidth: 2}); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// counting counts the scans that reach the store and the entries they give.
type counting struct {
	engine.Reader
	scans, steps, gets int
	limit              int // of the newest scan
}

func (c *counting) Get(f engine.FamilyID, key []byte) ([]byte, bool, error) {
	c.gets++
	return c.Reader.Get(f, key)
}

func (c *counting) Scan(f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	c.scans++
	c.limit = o.Limit
	return &countingIterator{c.Reader.Scan(f, lo, hi, o), c}
}

type countingIterator struct {
	engine.Iterator
	c *counting
}

func (it *countingIterator) Next() bool {
	it.c.steps++
	return it.Iterator.Next()
}

func keys(t *testing.T, it engine.Iterator) string {
	t.Helper()
	defer it.Close()
	var out []string
	for it.Next() {
		out = append(out, string(it.Key()))
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(out)
}

func filled(t *testing.T, n int) (*counting, *engine.Txn) {
	t.Helper()
	s := openMem(t)
	var b engine.Batch
	for i := range n {
		b.Put(plain, fmt.Appendf(nil, "k%03d", i), []byte("v"))
	}
	if err := s.Write(&b); err != nil {
		t.Fatal(err)
	}
	c := &counting{Reader: s}
	return c, engine.NewTxn(c, kinds)
}

// TestTxnScanWork: a scan takes no more from the store than it needs.
func TestTxnScanWork(t *testing.T) {
	c, txn := filled(t, 100)
	txn.DeleteRange(plain, []byte("k010"), []byte("k090"))
	if got := keys(t, txn.Scan(plain, []byte("k010"), []byte("k090"), engine.ScanOptions{})); got != "[]" || c.scans != 0 {
		t.Fatalf("of a deleted range: %s, %d scans of the store", got, c.scans)
	}
	if got := keys(t, txn.Scan(plain, []byte("k008"), []byte("k050"), engine.ScanOptions{})); got != "[k008 k009]" || c.steps > 3 {
		t.Fatalf("into a deleted range: %s, %d steps", got, c.steps)
	}
	c.steps = 0
	if got := keys(t, txn.Scan(plain, []byte("k050"), nil, engine.ScanOptions{Limit: 2})); got != "[k090 k091]" || c.steps > 3 {
		t.Fatalf("out of a deleted range: %s, %d steps", got, c.steps)
	}
	if got := keys(t, txn.Scan(plain, []byte("k095"), nil, engine.ScanOptions{Limit: 1})); got != "[k095]" || c.limit != 1 {
		t.Fatalf("beside the batch's writes: %s, limit %d", got, c.limit)
	}
	txn.Delete(plain, []byte("k095"))
	txn.Put(plain, []byte("k096"), nil)
	if got := keys(t, txn.Scan(plain, []byte("k095"), nil, engine.ScanOptions{Limit: 2})); got != "[k096 k097]" || c.limit != 4 {
		t.Fatalf("over two written keys: %s, limit %d", got, c.limit)
	}
}

func TestTxnPointReads(t *testing.T) {
	c, txn := filled(t, 3)
	txn.Put(plain, []byte("k000"), []byte("new"))
	txn.Delete(plain, []byte("k001"))
	txn.DeleteRange(plain, []byte("k002"), []byte("k003"))
	for _, k := range []string{"k000", "k001", "k002"} {
		if _, ok, err := txn.Get(plain, []byte(k)); err != nil || ok != (k == "k000") {
			t.Fatalf("%s: %v, %v", k, ok, err)
		}
	}
	if c.gets != 0 {
		t.Fatalf("%d reads of the store for keys that the batch decides", c.gets)
	}
	v, _, err := txn.Get(plain, []byte("k000"))
	if err != nil {
		t.Fatal(err)
	}
	copy(v, "XXX")
	if v, _, _ = txn.Get(plain, []byte("k000")); string(v) != "new" {
		t.Fatalf("%q after the caller changed its copy", v)
	}
}

// TestTxnManyRanges: ranges that meet become one, and thousands stay cheap.
func TestTxnManyRanges(t *testing.T) {
	c, txn := filled(t, 400)
	for i := 0; i < 400; i += 2 {
		txn.DeleteRange(plain, fmt.Appendf(nil, "k%03d", i), fmt.Appendf(nil, "k%03d", i+1))
	}
	m := txn.Mark()
	for i := 1; i < 400; i += 2 {
		txn.DeleteRange(plain, fmt.Appendf(nil, "k%03d", i), fmt.Appendf(nil, "k%03d", i+1))
	}
	if got := keys(t, txn.Scan(plain, nil, []byte("k400"), engine.ScanOptions{Reverse: true})); got != "[]" || c.steps > 1 {
		t.Fatalf("%s, %d steps", got, c.steps)
	}
	txn.Rollback(m)
	if got := keys(t, txn.Scan(plain, nil, []byte("k004"), engine.ScanOptions{Reverse: true})); got != "[k003 k001]" {
		t.Fatal(got)
	}
}

func TestTxnMalformedOperand(t *testing.T) {
	s := openMem(t)
	txn := engine.NewTxn(s, kinds)
	good := engine.AppendHeader(nil, engine.Header{})
	good = append(good, make([]byte, 16)...)
	m := txn.Mark()
	txn.Merge(sums, []byte("bad"), []byte{1})
	txn.Merge(sums, []byte("bad"), good)
	txn.Merge(sums, []byte("good"), good)
	if _, _, err := txn.Get(sums, []byte("bad")); !errors.Is(err, base.ErrCorrupt) {
		t.Fatalf("get: %v", err)
	}
	if _, err := txn.MultiGet(sums, [][]byte{[]byte("good"), []byte("bad")}); !errors.Is(err, base.ErrCorrupt) {
		t.Fatalf("multi-get: %v", err)
	}
	it := txn.Scan(sums, nil, nil, engine.ScanOptions{})
	if it.Next() || !errors.Is(it.Err(), base.ErrCorrupt) {
		t.Fatalf("scan: %v", it.Err())
	}
	it.Close()
	if _, ok, err := txn.Get(sums, []byte("good")); err != nil || !ok {
		t.Fatalf("another key: %v, %v", ok, err)
	}
	if err := s.Write(txn.Batch()); !errors.Is(err, base.ErrCorrupt) {
		t.Fatalf("the store took it: %v", err)
	}
	txn.Rollback(m)
	if _, ok, err := txn.Get(sums, []byte("bad")); err != nil || ok {
		t.Fatalf("after the rollback: %v, %v", ok, err)
	}
	txn.Merge(plain, []byte("k"), good)
	if _, _, err := txn.Get(plain, []byte("k")); !errors.Is(err, base.ErrInvalid) {
		t.Fatalf("merge in a family without: %v", err)
	}
	txn.Put(plain, []byte("k"), []byte("whole again"))
	if v, _, err := txn.Get(plain, []byte("k")); err != nil || string(v) != "whole again" {
		t.Fatalf("put over a bad merge: %q, %v", v, err)
	}
}

// TestTxnMergeAfterRange: a merge after a range deletion does not fold onto what
// the range removed from the store.
func TestTxnMergeAfterRange(t *testing.T) {
	s := openMem(t)
	one := append(engine.AppendHeader(nil, engine.Header{}), make([]byte, 16)...)
	one[len(one)-1] = 1
	var b engine.Batch
	b.Put(sums, []byte("k"), one)
	if err := s.Write(&b); err != nil {
		t.Fatal(err)
	}
	txn := engine.NewTxn(s, kinds)
	txn.DeleteRange(sums, []byte("a"), []byte("z"))
	txn.Merge(sums, []byte("k"), one)
	if v, ok, err := txn.Get(sums, []byte("k")); err != nil || !ok || string(v) != string(one) {
		t.Fatalf("%x, %v, %v; want %x", v, ok, err, one)
	}
	if got := keys(t, txn.Scan(sums, nil, nil, engine.ScanOptions{})); got != "[k]" {
		t.Fatal(got)
	}
}

func TestTxnEndedMark(t *testing.T) {
	for name, end := range map[string]func(txn *engine.Txn, m engine.Mark){
		"reset": func(txn *engine.Txn, _ engine.Mark) { txn.Reset(openMem(t)) },
		"rollback to an earlier mark": func(txn *engine.Txn, m engine.Mark) {
			txn.Rollback(m)
		},
	} {
		txn := engine.NewTxn(openMem(t), kinds)
		first := txn.Mark()
		txn.Put(plain, []byte("a"), nil)
		second := txn.Mark()
		end(txn, first)
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: rolling back to an ended mark went through", name)
				}
			}()
			txn.Rollback(second)
		}()
	}
}

func TestTxnErrorsBelow(t *testing.T) {
	txn := engine.NewTxn(openMem(t), func(engine.FamilyID) engine.MergeKind { return engine.MergeMax })
	const absent engine.FamilyID = 99
	v := engine.AppendHeader(nil, engine.Header{})
	txn.Merge(absent, []byte("k"), v)
	if _, _, err := txn.Get(absent, []byte("k")); !errors.Is(err, base.ErrNotFound) {
		t.Fatalf("get: %v", err)
	}
	if _, err := txn.MultiGet(absent, [][]byte{[]byte("k")}); !errors.Is(err, base.ErrNotFound) {
		t.Fatalf("multi-get: %v", err)
	}
	it := txn.Scan(absent, nil, nil, engine.ScanOptions{})
	defer it.Close()
	if it.Next() || !errors.Is(it.Err(), base.ErrNotFound) {
		t.Fatalf("scan: %v", it.Err())
	}
}
