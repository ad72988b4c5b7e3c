package check

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/jepsen/history"
)

func TestMapCases(t *testing.T) {
	put := func(k, v, at, ret int64) *history.Op { return did("put", "m", ints(k, v), nil, at, ret) }
	del := func(k, at, ret int64) *history.Op { return did("remove", "m", ints(k), nil, at, ret) }
	get := func(k, at, ret int64, v ...int64) *history.Op { return did("get", "m", ints(k), v, at, ret) }
	scan := func(at, ret int64, kv ...int64) *history.Op { return did("scan", "m", nil, kv, at, ret) }
	handwritten{
		"B81 unknown put seen":          {[]*history.Op{put(1, 1, 1, 2), put(1, 2, 3, 0), get(1, 5, 6, 2)}, Pass},
		"B81 unknown put unseen":        {[]*history.Op{put(1, 1, 1, 2), put(1, 2, 3, 0), get(1, 5, 6, 1)}, Pass},
		"B81 failed put seen":           {[]*history.Op{put(1, 1, 1, 2), failed(put(1, 2, 3, 4)), get(1, 5, 6, 2)}, Fail},
		"B81 acked put lost":            {[]*history.Op{put(1, 1, 1, 2), put(1, 2, 3, 4), get(1, 5, 6, 1)}, Fail},
		"unknown removal seen":          {[]*history.Op{put(1, 1, 1, 2), del(1, 3, 0), get(1, 5, 6)}, Pass},
		"unknown removal unseen":        {[]*history.Op{put(1, 1, 1, 2), del(1, 3, 0), get(1, 5, 6, 1)}, Pass},
		"unknown removal seen, then no": {[]*history.Op{put(1, 1, 1, 2), del(1, 3, 0), get(1, 5, 6), get(1, 7, 8, 1)}, Fail},
		"failed removal seen":           {[]*history.Op{put(1, 1, 1, 2), failed(del(1, 3, 4)), get(1, 5, 6)}, Fail},
		"removal lost":                  {[]*history.Op{put(1, 1, 1, 2), del(1, 3, 4), get(1, 5, 6, 1)}, Fail},
		"entry lost":                    {[]*history.Op{put(1, 1, 1, 2), put(2, 2, 3, 4), scan(5, 6, 2, 2)}, Fail},
		"never put":                     {[]*history.Op{put(1, 1, 1, 2), get(1, 5, 6, 9)}, Fail},
		"under another user key":        {[]*history.Op{put(1, 1, 1, 2), put(2, 2, 1, 2), scan(3, 4, 1, 2, 2, 1)}, Fail},
		"twice in a scan":               {[]*history.Op{put(1, 1, 1, 2), scan(3, 4, 1, 1, 1, 1)}, Fail},
		"scan":                          {[]*history.Op{put(1, 1, 1, 2), put(2, 2, 3, 4), scan(5, 6, 1, 1, 2, 2), del(1, 7, 8), scan(9, 10, 2, 2)}, Pass},
		"scan amid two puts":            {[]*history.Op{scan(1, 9, 1, 1), put(1, 1, 2, 3), put(2, 2, 4, 5)}, Pass},
		"torn scan":                     {[]*history.Op{scan(1, 9, 2, 2), put(1, 1, 2, 3), put(2, 2, 4, 5)}, Fail},
		"torn scan with removal":        {[]*history.Op{put(1, 1, 1, 2), scan(3, 19, 1, 1, 2, 2), del(1, 4, 5), put(2, 2, 6, 7)}, Fail},
		"scans that cross":              {[]*history.Op{put(1, 1, 1, 9), put(2, 2, 1, 9), scan(2, 8, 1, 1), scan(2, 8, 2, 2)}, Fail},
		"scans one after the other":     {[]*history.Op{put(1, 1, 1, 9), put(2, 2, 1, 9), scan(2, 3, 1, 1), scan(4, 5, 1, 1, 2, 2)}, Pass},
		"the workload repeats itself":   {[]*history.Op{put(1, 1, 1, 2), put(2, 1, 3, 4)}, Unknown},
		"another word":                  {[]*history.Op{put(1, 1, 1, 2), did("pop", "m", ints(1), nil, 3, 4)}, Unknown},
	}.run(t, Map{})
}

// A map that is too big for a search is still judged by its contradictions.
func TestBigMap(t *testing.T) {
	ops := []*history.Op{}
	var all []int64
	for k := range int64(40) {
		ops = append(ops, did("put", "m", ints(k, 100+k), nil, 10*k+1, 10*k+2))
		all = append(all, k, 100+k)
	}
	good := did("scan", "m", nil, all, 1000, 1100)
	torn := did("scan", "m", nil, slices.Concat(ints(0, 201), all[2:]), 1000, 1100) // between the two
	first, second := did("put", "m", ints(0, 201), nil, 1002, 1003), did("put", "m", ints(1, 202), nil, 1004, 1005)
	late := did("scan", "m", nil, slices.Concat(ints(0, 100, 1, 202), all[4:]), 1000, 1100) // the second without the first
	handwritten{
		"good":       {append(slices.Clone(ops), good), Pass},
		"in between": {append(slices.Clone(ops), torn, first, second), Pass},
		"torn":       {append(slices.Clone(ops), late, first, second), Fail},
		"lost":       {append(slices.Clone(ops), did("scan", "m", nil, all[:78], 1000, 1100)), Fail},
	}.run(t, Map{})
}

func maps(size int) func(r *rand.Rand, procs, n, lossy int) []*history.Op {
	return func(r *rand.Rand, procs, n, lossy int) []*history.Op {
		keys := 1 + r.IntN(2)
		next := int64(0)
		state := map[string]map[int64]int64{}
		ps := plan(r, procs, n, lossy, func() *history.Op {
			op := &history.Op{Key: fmt.Sprint("m", r.IntN(keys))}
			k := int64(r.IntN(size))
			switch p := r.IntN(20); {
			case p < 9:
				next++
				op.F, op.Arg = "put", ints(k, next)
			case p < 11 && size <= mapSlots:
				op.F, op.Arg = "remove", ints(k)
			case p < 14:
				op.F, op.Arg = "get", ints(k)
			default:
				op.F = "scan"
			}
			return op
		})
		var last []*history.Op
		for k := range keys {
			last = append(last, &history.Op{F: "scan", Key: fmt.Sprint("m", k)})
		}
		return apply(ps, func(op *history.Op) {
			m := state[op.Key]
			if m == nil {
				m = map[int64]int64{}
				state[op.Key] = m
			}
			switch op.F {
			case "put":
				m[op.Arg[0]] = op.Arg[1]
			case "remove":
				delete(m, op.Arg[0])
			case "get":
				if op.Result = nil; m[op.Arg[0]] != 0 {
					op.Result = ints(m[op.Arg[0]])
				}
			case "scan":
				op.Result = nil
				for k := range int64(size) {
					if m[k] != 0 {
						op.Result = append(op.Result, k, m[k])
					}
				}
			}
		}, last...)
	}
}

// spoilMaps has mutations that hold for maps of any size.
func spoilMaps() map[string]func(*rand.Rand, []*history.Op) bool {
	put, scan := is("put"), is("scan")
	removed := func(ops []*history.Op, key string, k int64) bool {
		return slices.ContainsFunc(ops, func(op *history.Op) bool { return op.F == "remove" && op.Key == key && op.Arg[0] == k })
	}
	at := func(scan *history.Op, k int64) int {
		for n := 0; n < len(scan.Result); n += 2 {
			if scan.Result[n] == k {
				return n
			}
		}
		return -1
	}
	return map[string]func(*rand.Rand, []*history.Op) bool{
		"a scan misses an acknowledged entry": func(r *rand.Rand, ops []*history.Op) bool {
			for range 50 {
				p := pick(r, ops, put)
				if p == nil || removed(ops, p.Key, p.Arg[0]) {
					continue
				}
				if s := pick(r, ops, func(op *history.Op) bool { return scan(op) && op.Key == p.Key && p.Return < op.Invoke }); s != nil {
					n := at(s, p.Arg[0])
					s.Result = slices.Delete(s.Result, n, n+2)
					return true
				}
			}
			return false
		},
		"a scan has a stale entry": func(r *rand.Rand, ops []*history.Op) bool {
			for range 100 {
				p, q := pick(r, ops, put), pick(r, ops, put)
				if p == nil || p.Key != q.Key || p.Arg[0] != q.Arg[0] || p.Return >= q.Invoke {
					continue
				}
				s := pick(r, ops, func(op *history.Op) bool {
					return scan(op) && op.Key == q.Key && q.Return < op.Invoke && at(op, q.Arg[0]) >= 0
				})
				if s != nil {
					s.Result[at(s, q.Arg[0])+1] = p.Arg[1]
					return true
				}
			}
			return false
		},
		"a torn scan": func(r *rand.Rand, ops []*history.Op) bool {
			// It has a put that began after another had ended, which it misses.
			for range 200 {
				p, q := pick(r, ops, put), pick(r, ops, put)
				if p == nil || p.Key != q.Key || p.Arg[0] == q.Arg[0] || p.Return >= q.Invoke || removed(ops, p.Key, p.Arg[0]) {
					continue
				}
				s := pick(r, ops, func(op *history.Op) bool { return scan(op) && op.Key == q.Key && slices.Contains(op.Result, q.Arg[1]) })
				if s == nil {
					continue
				}
				n := at(s, p.Arg[0])
				s.Result = slices.Delete(s.Result, n, n+2)
				return true
			}
			return false
		},
		"a failed put is seen": func(r *rand.Rand, ops []*history.Op) bool {
			p := pick(r, ops, func(op *history.Op) bool { return op.F == "put" && op.Outcome == history.Fail })
			if p == nil {
				return false
			}
			s := pick(r, ops, func(op *history.Op) bool { return scan(op) && op.Key == p.Key && at(op, p.Arg[0]) >= 0 })
			if s == nil {
				return false
			}
			s.Result[at(s, p.Arg[0])+1] = p.Arg[1]
			return true
		},
	}
}

func init() {
	small := spoilMaps()
	small["a removal is lost"] = func(r *rand.Rand, ops []*history.Op) bool {
		for range 50 {
			d := pick(r, ops, is("remove"))
			if d == nil {
				return false
			}
			p := pick(r, ops, func(op *history.Op) bool {
				return is("put")(op) && op.Key == d.Key && op.Arg[0] == d.Arg[0] && op.Return < d.Invoke
			})
			g := pick(r, ops, func(op *history.Op) bool {
				return is("get")(op) && op.Key == d.Key && op.Arg[0] == d.Arg[0] && d.Return < op.Invoke
			})
			if p != nil && g != nil {
				g.Result = ints(p.Arg[1])
				return true
			}
		}
		return false
	}
	worlds = append(worlds,
		world{checker: Map{}, generate: maps(5), spoil: small},
		world{checker: Map{}, generate: maps(24), spoil: spoilMaps()})
}

func BenchmarkMap(b *testing.B) {
	r := rng(3)
	var ops []*history.Op
	for n := range 1000 {
		some := maps(8)(r, 4, 1000, 200)
		for _, op := range some {
			op.Key, op.Process = fmt.Sprint(n, op.Key), op.Process+int64(n)<<41
		}
		ops = append(ops, some...)
	}
	b.ResetTimer()
	for b.Loop() {
		if res := (Map{}).Check(ops, Options{}); res.Verdict != Pass {
			b.Fatal(res.Text)
		}
	}
	b.ReportMetric(float64(b.N)*float64(len(ops))/b.Elapsed().Seconds(), "ops/s")
}
