package mem

import (
	"encoding/binary"
	"fmt"
	"io"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine"
)

const benchKeys = 100_000

func benchKey(i int) []byte {
	k := []byte{0, byte(i % 128)}
	return binary.BigEndian.AppendUint64(k, uint64(i)*0x9e3779b97f4a7c15)
}

func benchStore(b *testing.B) engine.Store {
	s := openStore(b, filepath.Join(b.TempDir(), "s"))
	do(b, s.EnsureFamily(2, engine.FamilyOptions{Use: engine.UsePoint, Merge: engine.MergeSum128, GroupWidth: 2}))
	var batch engine.Batch
	for i := range benchKeys {
		batch.Put(1, benchKey(i), make([]byte, 100))
	}
	do(b, s.Write(&batch))
	b.Cleanup(func() { do(b, s.Close()) })
	return s
}

func BenchmarkWrite(b *testing.B) {
	operand := append(engine.AppendHeader(nil, engine.Header{}), make([]byte, 16)...)
	for _, size := range []int{1, 100} {
		for _, kind := range []string{"put", "merge"} {
			b.Run(fmt.Sprintf("%s/batch=%d", kind, size), func(b *testing.B) {
				s := benchStore(b)
				value := make([]byte, 100)
				var batch engine.Batch
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					batch.Reset()
					for range size {
						n++
						if kind == "put" {
							batch.Put(1, benchKey(n%benchKeys), value)
						} else {
							batch.Merge(2, benchKey(n%benchKeys), operand)
						}
					}
					do(b, s.Write(&batch))
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*size), "ns/key")
			})
		}
	}
}

func BenchmarkGet(b *testing.B) {
	s := benchStore(b)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, ok, err := s.Get(1, benchKey(i%benchKeys)); err != nil || !ok {
			b.Fatal(ok, err)
		}
	}
}

func BenchmarkMultiGet100(b *testing.B) {
	s := benchStore(b)
	var keys [][]byte
	for i := range 100 {
		keys = append(keys, benchKey(i*997))
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.MultiGet(1, keys); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkScan100(b *testing.B) {
	s := benchStore(b)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		it := s.Scan(1, benchKey(i%benchKeys), nil, engine.ScanOptions{Limit: 100})
		for it.Next() {
		}
		it.Close()
	}
}

func BenchmarkView(b *testing.B) {
	s := benchStore(b)
	b.ReportAllocs()
	for b.Loop() {
		v, err := s.NewView()
		do(b, err)
		v.Close()
	}
}

func BenchmarkImage(b *testing.B) {
	s := benchStore(b)
	r := s.(*store).current.Load()
	b.SetBytes(int64(r.families[1].bytes))
	for b.Loop() {
		if _, err := writeImage(io.Discard, r, 1); err != nil {
			b.Fatal(err)
		}
	}
}
