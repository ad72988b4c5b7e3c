package broadcast

import (
	"fmt"
	"testing"
)

// filled returns a store of n keys.
func filled(b *testing.B, n int) *Store {
	s := New(Options{})
	for i := 0; i < n; i += 1000 {
		var ops []Op
		for j := i; j < min(i+1000, n); j++ {
			ops = append(ops, Put(fmt.Sprintf("key/%09d", j), make([]byte, 100)))
		}
		apply(b, s, Txn{Then: ops})
	}
	return s
}

func benchmarkApply(b *testing.B, keys, opsPerTxn int) {
	s := filled(b, keys)
	var cmds [][]byte
	n := uint64(0)
	for range 512 {
		var txn Txn
		for range opsPerTxn {
			n = (n*6364136223846793005 + 1442695040888963407)
			txn.Then = append(txn.Then, Put(fmt.Sprintf("key/%09d", (n>>33)%uint64(keys)), make([]byte, 100)))
		}
		cmds = append(cmds, mustTxn(b, txn))
	}
	index := s.Snapshot().AppliedIndex()
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		index++
		if _, err := s.Apply(index, cmds[i%len(cmds)]); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*opsPerTxn)/b.Elapsed().Seconds(), "ops/s")
}

func BenchmarkApplyPut(b *testing.B) {
	for _, keys := range []int{1000, 100_000} {
		for _, ops := range []int{1, 100} {
			b.Run(fmt.Sprintf("keys=%d/ops=%d", keys, ops), func(b *testing.B) { benchmarkApply(b, keys, ops) })
		}
	}
}

func BenchmarkApplyTick(b *testing.B) {
	s := filled(b, 1000)
	index := s.Snapshot().AppliedIndex()
	b.ReportAllocs()
	for b.Loop() {
		index++
		if _, err := s.Apply(index, EncodeTick(index)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkGet(b *testing.B) {
	s := filled(b, 100_000)
	b.ReportAllocs()
	for b.Loop() {
		if e, _ := s.Get("key/000050000"); e == nil {
			b.Fatal("absent")
		}
	}
}
