package state_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/keygroup"
)

// benchCases is one write per kind and function, over engine/mem.
func benchCases(b *testing.B) []struct {
	d *state.Declaration
	m func(at target, i int) *state.Mutation
} {
	value := make([]byte, 100)
	add := func(at target, i int) *state.Mutation {
		switch at.d.ValueType {
		case keygroup.Int64:
			return at.elements(state.OpAdd, enc(b, keygroup.Int64, int64(i)))
		case keygroup.Float64:
			return at.elements(state.OpAdd, enc(b, keygroup.Float64, float64(i)))
		}
		return at.elements(state.OpAdd, fmt.Append(nil, "element", i%50))
	}
	type c = struct {
		d *state.Declaration
		m func(at target, i int) *state.Mutation
	}
	out := []c{
		{decl(1, state.KindValue, keygroup.Bytes, ""), func(at target, _ int) *state.Mutation { return at.put(value) }},
		{decl(1, state.KindList, keygroup.Bytes, ""), func(at target, _ int) *state.Mutation { return at.elements(state.OpListAdd, value) }},
		{decl(1, state.KindMap, keygroup.Bytes, ""), func(at target, i int) *state.Mutation {
			return at.entries(state.OpMapPut, state.Entry{UserKey: fmt.Append(nil, i%100), Value: value})
		}},
	}
	for _, f := range []string{"sum", "max", "last"} {
		out = append(out, c{decl(1, state.KindReducing, keygroup.Int64, f), add})
	}
	out = append(out, c{decl(1, state.KindReducing, keygroup.Float64, "sum"), add})
	for _, f := range []string{"count", "mean", "variance", "distinct", "quantiles(0.5,0.99)", "topk(10)"} {
		out = append(out, c{decl(1, state.KindAggregating, keygroup.Int64, f), add})
	}
	return append(out, c{decl(1, state.KindAggregating, keygroup.String, "topk(10)"), add})
}

func name(d *state.Declaration) string { return fmt.Sprint(d.Kind, " ", d.ValueType, " ", d.Function) }

// BenchmarkApply applies mutations over 1000 keys, 100 to a batch.
func BenchmarkApply(b *testing.B) {
	for _, c := range benchCases(b) {
		b.Run(name(c.d), func(b *testing.B) {
			e, targets := benchEnv(b, c.d)
			muts := make([]*state.Mutation, 4096)
			for i := range muts {
				muts[i] = c.m(targets[i%len(targets)], i)
			}
			tx := e.txn()
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				if err := e.l.Apply(tx, c.d, muts[i%len(muts)], state.Stamp{Sequence: uint64(i + 1)}); err != nil {
					b.Fatal(err)
				}
				if i%100 == 99 || i == b.N-1 {
					if err := e.store.Write(tx.Batch()); err != nil {
						b.Fatal(err)
					}
					tx.Reset(e.store)
				}
			}
		})
	}
}

func benchEnv(b *testing.B, d *state.Declaration) (*env, []target) {
	e := &env{tb: b, l: state.Layout{M: 128}, store: openStore(b, filepath.Join(b.TempDir(), "s"))}
	b.Cleanup(func() { _ = e.store.Close() })
	e.declare(d)
	targets := make([]target, 1000)
	for i := range targets {
		targets[i] = e.at(d, fmt.Sprint("key-", i))
	}
	return e, targets
}

// BenchmarkRead reads one key of each kind, 1000 keys with 10 writes each.
func BenchmarkRead(b *testing.B) {
	for _, c := range benchCases(b) {
		b.Run(name(c.d), func(b *testing.B) {
			e, targets := benchEnv(b, c.d)
			for i := range 10 * len(targets) {
				e.do(c.d, c.m(targets[i%len(targets)], i))
			}
			kind := state.QueryGet
			if c.d.Kind == state.KindList || c.d.Kind == state.KindMap {
				kind = state.QueryPage
			}
			queries := make([]*state.Query, len(targets))
			for i, at := range targets {
				queries[i] = at.query(kind)
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				if a, err := e.l.Read(e.store, c.d, queries[i%len(queries)]); err != nil || !a.Found {
					b.Fatal(a, err)
				}
			}
		})
	}
}

func BenchmarkReadMany100(b *testing.B) {
	d := decl(1, state.KindValue, keygroup.Bytes, "")
	e, targets := benchEnv(b, d)
	var requests []state.ReadRequest
	for _, at := range targets[:100] {
		e.do(d, at.put(make([]byte, 100)))
		requests = append(requests, state.ReadRequest{D: d, Q: at.query(state.QueryGet)})
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, errs := e.l.ReadMany(e.store, requests); errs[0] != nil {
			b.Fatal(errs[0])
		}
	}
}

func BenchmarkScan1000(b *testing.B) {
	d := decl(1, state.KindValue, keygroup.Bytes, "")
	e, targets := benchEnv(b, d)
	for _, at := range targets {
		e.do(d, at.put(make([]byte, 100)))
	}
	q := &state.ScanQuery{State: 1, Range: keygroup.FullRange(128)}
	b.ReportAllocs()
	for b.Loop() {
		if items, _, err := e.l.Scan(e.store, d, q); err != nil || len(items) != 1000 {
			b.Fatal(len(items), err)
		}
	}
}

func BenchmarkHashGroup(b *testing.B) {
	d := decl(1, state.KindValue, keygroup.Bytes, "")
	e := &env{tb: b, l: state.Layout{M: 1}, store: openStore(b, filepath.Join(b.TempDir(), "s"))}
	b.Cleanup(func() { _ = e.store.Close() })
	e.declare(d)
	var batch engine.Batch
	for i := range 10_000 {
		batch.Put(1, fmt.Append(nil, "\x00", i), make([]byte, 119))
	}
	if err := e.store.Write(&batch); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := e.l.HashGroup(e.store, []*state.Declaration{d}, 0); err != nil {
			b.Fatal(err)
		}
	}
}
