package rocks

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine"
)

const benchKeys = 50_000

func benchKey(i int) []byte {
	i = i * 7919 % benchKeys
	return fmt.Appendf(nil, "%c%s", i%128, escaped(fmt.Sprintf("key%08d", i)))
}

func benchStore(b *testing.B, use engine.Use, k engine.MergeKind, filled bool) *Store {
	d := newTestDriver(b, Options{MemoryBytes: 512 << 20, FamilyBufferBytes: 64 << 20})
	s := openTest(b, d, filepath.Join(b.TempDir(), "s"))
	must(b, s.EnsureFamily(1, engine.FamilyOptions{Use: use, Merge: k, GroupWidth: 1}))
	if filled {
		var w engine.Batch
		for i := range benchKeys {
			w.Put(1, benchKey(i), benchValue(k, 100))
		}
		must(b, s.Write(&w))
	}
	return s
}

func benchValue(k engine.MergeKind, n int) []byte {
	v := engine.AppendHeader(nil, engine.Header{Sequence: 7})
	switch k {
	case engine.MergeSum128:
		n = 16
	case engine.MergeAnd64, engine.MergeOr64:
		n = 8
	case engine.MergeSumCount:
		n = 24
	}
	v = append(v, make([]byte, n)...)
	binary.BigEndian.PutUint64(v[len(v)-8:], 3)
	return v
}

func eachUse(b *testing.B, fn func(b *testing.B, use engine.Use)) {
	for use, word := range []string{"skiplist", "hash"} {
		b.Run(word, func(b *testing.B) { fn(b, engine.Use(use)) })
	}
}

func BenchmarkPut(b *testing.B) {
	for _, n := range []int{1, 100} {
		b.Run(fmt.Sprintf("batch=%d", n), func(b *testing.B) {
			eachUse(b, func(b *testing.B, use engine.Use) {
				s := benchStore(b, use, engine.MergeNone, false)
				var w engine.Batch
				v := benchValue(engine.MergeNone, 100)
				for i := 0; b.Loop(); i++ {
					w.Reset()
					for j := range n {
						w.Put(1, benchKey(i*n+j), v)
					}
					must(b, s.Write(&w))
				}
				b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "ops/s")
			})
		})
	}
}

func BenchmarkGet(b *testing.B) {
	for _, place := range []string{"memtable", "flushed"} {
		b.Run(place, func(b *testing.B) {
			eachUse(b, func(b *testing.B, use engine.Use) {
				s := benchStore(b, use, engine.MergeNone, true)
				if place == "flushed" {
					must(b, s.Flush())
				}
				for i := 0; b.Loop(); i++ {
					if _, ok, err := s.Get(1, benchKey(i)); !ok || err != nil {
						b.Fatal(ok, err)
					}
				}
			})
		})
	}
}

func BenchmarkReadModifyWrite(b *testing.B) {
	eachUse(b, func(b *testing.B, use engine.Use) {
		s := benchStore(b, use, engine.MergeNone, true)
		var w engine.Batch
		for i := 0; b.Loop(); i++ {
			v, _, err := s.Get(1, benchKey(i))
			must(b, err)
			v[len(v)-1]++
			w.Reset()
			w.Put(1, benchKey(i), v)
			must(b, s.Write(&w))
		}
	})
}

func BenchmarkMerge(b *testing.B) {
	for _, k := range mergeKinds {
		b.Run(mergeWords[k], func(b *testing.B) {
			eachUse(b, func(b *testing.B, use engine.Use) {
				s := benchStore(b, use, k, true)
				var w engine.Batch
				v := benchValue(k, 16)
				for i := 0; b.Loop(); i++ {
					w.Reset()
					w.Merge(1, benchKey(i), v)
					must(b, s.Write(&w))
				}
			})
		})
	}
}

// A hot key is merged and read: the operands pile up in the memtable.
func BenchmarkMergeHotKey(b *testing.B) {
	for _, successive := range []int{-1, 8, 64, 512} {
		b.Run(fmt.Sprintf("successive=%d", successive), func(b *testing.B) {
			d := newTestDriver(b, Options{MemoryBytes: 512 << 20, FamilyBufferBytes: 64 << 20, MaxSuccessiveMerges: successive})
			s := openTest(b, d, filepath.Join(b.TempDir(), "s"))
			must(b, s.EnsureFamily(1, engine.FamilyOptions{Use: engine.UsePoint, Merge: engine.MergeSum128, GroupWidth: 1}))
			var w engine.Batch
			v := benchValue(engine.MergeSum128, 16)
			for i := 0; b.Loop(); i++ {
				w.Reset()
				for range 100 {
					w.Merge(1, benchKey(i%10), v)
				}
				must(b, s.Write(&w))
				if _, ok, err := s.Get(1, benchKey(i%10)); !ok || err != nil {
					b.Fatal(ok, err)
				}
			}
			b.ReportMetric(float64(b.N*100)/b.Elapsed().Seconds(), "merges/s")
		})
	}
}

func BenchmarkMultiGet100(b *testing.B) {
	for _, place := range []string{"memtable", "flushed"} {
		b.Run(place, func(b *testing.B) {
			eachUse(b, func(b *testing.B, use engine.Use) {
				s := benchStore(b, use, engine.MergeNone, true)
				if place == "flushed" {
					must(b, s.Flush())
				}
				keys := make([][]byte, 100)
				for i := 0; b.Loop(); i++ {
					for j := range keys {
						keys[j] = benchKey(i*100 + j)
					}
					vs, err := s.MultiGet(1, keys)
					if err != nil || vs[99] == nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.N*100)/b.Elapsed().Seconds(), "keys/s")
			})
		})
	}
}

func BenchmarkScan(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			s := benchStore(b, engine.UseScanned, engine.MergeNone, true)
			must(b, s.Flush())
			for i := 0; b.Loop(); i++ {
				it := s.Scan(1, []byte{byte(i % 60)}, nil, engine.ScanOptions{Limit: n})
				got := 0
				for it.Next() {
					got++
				}
				it.Close()
				if got != n {
					b.Fatal(got, it.Err())
				}
			}
			b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "entries/s")
		})
	}
}

func BenchmarkView(b *testing.B) {
	s := benchStore(b, engine.UseScanned, engine.MergeNone, true)
	for b.Loop() {
		v, err := s.NewView()
		must(b, err)
		v.Close()
	}
}
