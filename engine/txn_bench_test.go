package engine_test

import (
	"encoding/binary"
	"testing"

	"github.com/keelstate/keelstate/engine"
)

// batchOps is the size of the batches below; figures are per operation.
const batchOps = 1000

func benchKey(dst []byte, i int) []byte {
	dst = append(dst[:0], 0, byte(i%128))
	return binary.BigEndian.AppendUint64(dst, uint64(i)*0x9e3779b97f4a7c15)
}

func BenchmarkTxn(b *testing.B) {
	s := openMem(b)
	var load engine.Batch
	key, value := make([]byte, 0, 16), make([]byte, 100)
	for i := range 50_000 {
		key = benchKey(key, i)
		load.Put(plain, key, value)
	}
	if err := s.Write(&load); err != nil {
		b.Fatal(err)
	}
	operand := append(engine.AppendHeader(nil, engine.Header{}), make([]byte, 16)...)
	get := func(b *testing.B, txn *engine.Txn, f engine.FamilyID, k []byte) {
		if _, _, err := txn.Get(f, k); err != nil {
			b.Fatal(err)
		}
	}
	for name, op := range map[string]func(b *testing.B, txn *engine.Txn, i int){
		"put":            func(_ *testing.B, txn *engine.Txn, i int) { txn.Put(plain, benchKey(key, i%50_000), value) },
		"put with marks": func(_ *testing.B, txn *engine.Txn, i int) { txn.Mark(); txn.Put(plain, benchKey(key, i%50_000), value) },
		"merge":          func(_ *testing.B, txn *engine.Txn, i int) { txn.Merge(sums, benchKey(key, i%50_000), operand) },
		"merge hot key":  func(_ *testing.B, txn *engine.Txn, i int) { txn.Merge(sums, benchKey(key, 1), operand) },
		"get and put": func(b *testing.B, txn *engine.Txn, i int) {
			k := benchKey(key, i%50_000)
			get(b, txn, plain, k)
			txn.Put(plain, k, value)
		},
		"get of a merge": func(b *testing.B, txn *engine.Txn, i int) {
			txn.Merge(sums, benchKey(key, i%10), operand)
			get(b, txn, sums, benchKey(key, i%10))
		},
		"put and scan of 10": func(b *testing.B, txn *engine.Txn, i int) {
			k := benchKey(key, i%50_000)
			txn.Put(plain, k, value)
			it := txn.Scan(plain, k, nil, engine.ScanOptions{Limit: 10})
			for it.Next() {
			}
			it.Close()
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			txn := engine.NewTxn(s, kinds)
			for i := 0; b.Loop(); i++ {
				if i%batchOps == 0 {
					txn.Reset(s)
				}
				op(b, txn, i)
			}
		})
	}
}

func BenchmarkFold(b *testing.B) {
	v := append(engine.AppendHeader(nil, engine.Header{}), make([]byte, 16)...)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := engine.Fold(engine.MergeSum128, v, true, v); err != nil {
			b.Fatal(err)
		}
	}
}
