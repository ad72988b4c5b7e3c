package raftfsm_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// BenchmarkApplyBatch measures the state machine alone: decode, decide, engine
// batch. An operation is one mutation of 100 bytes or one number; entries hold 64
// requests of one mutation, a batch 16 entries, keys are 50,000.
func BenchmarkApplyBatch(b *testing.B) {
	value := string(make([]byte, 100))
	kinds := []struct {
		name string
		make func(key string, i int) state.Mutation
	}{
		{"value", func(key string, _ int) state.Mutation { return put(key, value) }},
		{"list", func(key string, _ int) state.Mutation { return listAdd(key, value) }},
		{"map", func(key string, i int) state.Mutation { return mapPut(key, fmt.Sprint("u", i%16), value) }},
		{"reducing-sum", func(key string, i int) state.Mutation { return add(sumID, key, i64(int64(i))) }},
		{"reducing-concat", func(key string, i int) state.Mutation { return add(concatID, key, []byte{byte(i)}) }},
		{"aggregating-mean", func(key string, i int) state.Mutation { return add(meanID, key, i64(int64(i))) }},
	}
	for _, name := range []string{"mem", "rocks"} {
		for _, k := range kinds {
			for _, session := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/%s/session=%t", name, k.name, session), func(b *testing.B) {
					benchmarkApply(b, name, session, k.make)
				})
			}
		}
	}
}

func benchmarkApply(b *testing.B, driver string, sessions bool, mutation func(string, int) state.Mutation) {
	const requests, entriesPerBatch, keys = 64, 16, 50_000
	d := newDriver(b, driver)
	store, err := d.Open(filepath.Join(b.TempDir(), "store"))
	if err != nil {
		b.Fatal(err)
	}
	m, err := raftfsm.Open(store, raftfsm.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close() })
	m.ApplyBatch([]raftfsm.Entry{
		{Index: 1, Command: raftfsm.AppendInit(nil, raftfsm.Init{Group: 1, Range: keygroup.FullRange(groups), M: groups, Epoch: 1, Birth: 1, Incarnation: 1})},
		{Index: 2, Command: raftfsm.AppendDeclare(nil, testDeclarations())},
	})
	index, n := uint64(2), 0
	b.ReportAllocs()
	b.ResetTimer()
	for b.Loop() {
		b.StopTimer()
		var entries []raftfsm.Entry
		for range entriesPerBatch {
			index++
			var qs []*raftfsm.Request
			for j := range requests {
				n++
				key := fmt.Sprintf("key-%d", n*7919%keys)
				q := request(mutation(key, n))
				if sessions {
					seq := index - 2
					q.Session, q.Seq, q.Prev, q.Floor = base.SessionID(j+1), seq, seq-1, seq
				}
				qs = append(qs, q)
			}
			entries = append(entries, raftfsm.Entry{Index: index, Command: encodeWrite(b, index, 0, qs...)})
		}
		b.StartTimer()
		out := m.ApplyBatch(entries)
		if err := out[len(out)-1].Err; err != nil {
			b.Fatal(err)
		}
		if f := out[0].Results[0].Failure(); f != nil {
			b.Fatal(f)
		}
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "mutations/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkReadView measures taking a view and one point read of it.
func BenchmarkReadView(b *testing.B) {
	r := newReplica(b, raftfsm.Options{})
	r.ok(r.command(r.encode(request(put("a", "1")))))
	q := &state.Query{State: valueID, Kind: state.QueryGet, Group: groupOf("a"), Key: []byte("a")}
	b.ReportAllocs()
	for b.Loop() {
		v, err := r.m.ReadView(1, 1)
		if err != nil {
			b.Fatal(err)
		}
		if a, err := v.Read(q); err != nil || !a.Found {
			b.Fatal(err)
		}
		v.Close()
	}
}

// BenchmarkDecode measures decoding an entry of 64 requests.
func BenchmarkDecode(b *testing.B) {
	var qs []*raftfsm.Request
	for i := range 64 {
		qs = append(qs, inSession(base.SessionID(i+1), 5, put(fmt.Sprint("key-", i), string(make([]byte, 100)))))
	}
	command := encodeWrite(b, 1, 1, qs...)
	var c raftfsm.Command
	b.ReportAllocs()
	b.SetBytes(int64(len(command)))
	for b.Loop() {
		if err := c.Decode(command); err != nil {
			b.Fatal(err)
		}
	}
}
