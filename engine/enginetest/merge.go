package enginetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// operand makes a valid operand of kind from x, with a header from y.
func operand(k engine.MergeKind, x int64, y uint64) []byte {
	sum := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, uint64(x>>63)), uint64(x))
	h := engine.Header{Flags: byte(y & 0xf), Codec: uint16(y >> 4), Sequence: y % 1000, TimestampMs: y >> 8 % 1000}
	v := engine.AppendHeader(nil, h)
	switch k {
	case engine.MergeSum128:
		return append(v, sum...)
	case engine.MergeSumCount:
		return binary.BigEndian.AppendUint64(append(v, sum...), 1)
	case engine.MergeAnd64, engine.MergeOr64:
		return binary.BigEndian.AppendUint64(v, uint64(x)^1<<63)
	default:
		return append(v, fmt.Append(nil, x)[:1+uint64(x)%2]...)
	}
}

func fold(h *harness, k engine.MergeKind, base []byte, operands ...[]byte) []byte {
	h.Helper()
	out, err := engine.Fold(k, base, base != nil, operands...)
	h.must(err, "folding with kind %d", k)
	return out
}

// testMerge: the interesting values of every kind, in one batch and in several,
// with and without a base (EN5).
func testMerge(h *harness) {
	s := h.openMerging()
	values := []int64{0, 1, -1, 12, math.MaxInt64, math.MaxInt64, math.MinInt64, 7, math.MinInt64, -300}
	for _, k := range mergeKinds {
		f, _ := mergeFamily(k)
		var ops [][]byte
		for i, x := range values {
			ops = append(ops, operand(k, x, uint64(i*i*7919)))
		}
		for i := range ops {
			together, single := fmt.Sprint("together", i), fmt.Sprint("single", i)
			h.write(func(b *engine.Batch) {
				for _, o := range ops[:i+1] {
					b.Merge(f, []byte(together), o)
				}
			})
			h.want(s, f, together, fold(h, k, nil, ops[:i+1]...))
			h.put(f, single, string(ops[i]))
			for _, o := range ops[:i] {
				h.write(func(b *engine.Batch) { b.Merge(f, []byte(single), o) })
			}
			h.want(s, f, single, fold(h, k, ops[i], ops[:i]...))
		}
		h.write(func(b *engine.Batch) {
			b.Delete(f, []byte("together9"))
			b.Merge(f, []byte("together9"), ops[1])
			b.DeleteRange(f, []byte("single"), []byte("single5"))
			b.Merge(f, []byte("single4"), ops[2])
			b.Merge(f, []byte("single4"), ops[3])
		})
		h.want(s, f, "together9", ops[1])
		h.want(s, f, "single4", fold(h, k, nil, ops[2], ops[3]))
		h.want(s, f, "single3", nil)
		for _, p := range h.collect(s.Scan(f, []byte("together"), []byte("together9"), engine.ScanOptions{Reverse: true})) {
			h.want(s, f, p.key, []byte(p.value))
		}
	}
}

// testMergeAcrossFlushes: operands and bases that end up in different files
// fold as if nothing had happened in between.
func testMergeAcrossFlushes(h *harness) {
	s := h.openMerging()
	rng := rand.New(rand.NewPCG(1, 2))
	want := map[engine.MergeKind]map[string][]byte{}
	for _, k := range mergeKinds {
		want[k] = map[string][]byte{}
	}
	for round := range 12 {
		h.write(func(b *engine.Batch) {
			for _, k := range mergeKinds {
				f, _ := mergeFamily(k)
				for i := range 8 {
					key, op := fmt.Sprint("k", i), operand(k, int64(rng.Uint64()), rng.Uint64())
					switch n := rng.IntN(8); {
					case n == 0:
						b.Put(f, []byte(key), op)
						want[k][key] = op
					case n == 1:
						b.Delete(f, []byte(key))
						delete(want[k], key)
					case n < 7:
						b.Merge(f, []byte(key), op)
						want[k][key] = fold(h, k, want[k][key], op)
					}
				}
			}
		})
		switch round % 4 {
		case 1:
			h.flush()
		case 2:
			h.must(s.Compact(), "compacting")
		case 3:
			h.flush()
			h.close()
			s = h.openMerging()
		}
		for _, k := range mergeKinds {
			f, _ := mergeFamily(k)
			for i := range 8 {
				key := fmt.Sprint("k", i)
				h.want(s, f, key, want[k][key])
			}
		}
	}
}

// testMalformedOperand: bytes that are no operand are refused by the write or
// show as corruption when read; other keys and the process are not hurt.
func testMalformedOperand(h *harness) {
	for _, k := range mergeKinds {
		f, o := mergeFamily(k)
		good := operand(k, 5, 5)
		for i, bad := range [][]byte{{}, {0x10}, good[:engine.HeaderLen-1], append([]byte{0xf0}, good[1:]...)} {
			s := h.open()
			h.must(s.EnsureFamily(f, o), "creating family %d", f)
			h.put(f, "good", string(good))
			var b engine.Batch
			b.Merge(f, []byte("bad"), good)
			b.Merge(f, []byte("bad"), bad)
			err := s.Write(&b)
			if err == nil {
				_, _, err = s.Get(f, []byte("bad"))
			} else {
				h.want(s, f, "bad", nil)
			}
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				h.Fatalf("kind %d, operand %d: %v", k, i, err)
			}
			h.want(s, f, "good", good)
			// Start over: a store may stop for good when it meets corruption.
			h.close()
			h.dir += "+"
		}
	}
}
