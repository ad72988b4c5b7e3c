package cluster

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	keel "github.com/keelstate/keelstate/client"
)

// B38: empty, null and separator values, for every kind: at once, after a
// compaction, after a restart, and after a compaction of what was restarted.
func TestB38EmptyNullSeparators(t *testing.T) {
	for _, engine := range []string{"mem", "rocks"} {
		t.Run(engine, func(t *testing.T) {
			c := New(t, Options{Nodes: 1, Engine: engine})
			x := newOddCells(t, c)
			compact := func() {
				t.Helper()
				if _, _, err := c.Nodes().Node(0).CompactShard(x.ctx, 1); err != nil {
					t.Fatal(err)
				}
			}
			half := len(odd) / 2
			x.write(odd[:half])
			// To the disk, so that a compaction has parts of one list to merge.
			if _, _, err := c.Nodes().Node(0).SnapshotShard(x.ctx, 1); err != nil {
				t.Fatal(err)
			}
			x.write(odd[half:])
			x.check("at once", odd)
			compact()
			x.check("after a compaction", odd)
			c.Restart(0)
			x.check("after a restart", odd)
			x.write([][]byte{{}})
			compact()
			x.check("after more and a compaction", append(slices.Clone(odd), []byte{}))
			x.clear()
			compact()
			x.checkCleared()
		})
	}
}

// odd are keys, user keys and values that a careless encoding mistakes for
// something else.
var odd = [][]byte{{}, []byte(","), []byte("a,b"), {0}, {0xff}, {0, 0}, []byte("\n"), []byte("null"), {0xff, 0, 0}}

// oddCells holds odd values in states of every kind under odd keys.
type oddCells struct {
	t     *testing.T
	ctx   context.Context
	value *keel.Value[[]byte]
	list  *keel.List[[]byte]
	m     *keel.Map[[]byte, []byte]
	last  *keel.Reducing[[]byte]
	cat   *keel.Reducing[[]byte]
	count *keel.Aggregating[[]byte, int64]
}

func newOddCells(t *testing.T, c *Cluster) *oddCells {
	t.Helper()
	ctx := testContext(t, 2*time.Minute)
	ks := c.Client().Keyspace("b38", keel.Bytes.Type())
	return &oddCells{t: t, ctx: ctx,
		value: must[*keel.Value[[]byte]](t)(keel.DeclareValue(ctx, ks, "v", keel.Bytes)),
		list:  must[*keel.List[[]byte]](t)(keel.DeclareList(ctx, ks, "l", keel.Bytes)),
		m:     must[*keel.Map[[]byte, []byte]](t)(keel.DeclareMap(ctx, ks, "m", keel.Bytes, keel.Bytes)),
		last:  must[*keel.Reducing[[]byte]](t)(keel.DeclareReducing(ctx, ks, "r", "last", keel.Bytes)),
		cat:   must[*keel.Reducing[[]byte]](t)(keel.DeclareReducing(ctx, ks, "c", "concat", keel.Bytes)),
		count: must[*keel.Aggregating[[]byte, int64]](t)(keel.DeclareAggregating(ctx, ks, "a", "count", keel.Bytes, keel.Int64)),
	}
}

// nullKey is a user key whose entry is null in every map.
var nullKey = []byte("is null")

// write adds the values to every state, each key being odd itself.
func (x *oddCells) write(values [][]byte) {
	x.t.Helper()
	for _, key := range odd {
		must[keel.Token](x.t)(x.list.AddAll(x.ctx, key, values...))
		must[keel.Token](x.t)(x.list.AddAll(x.ctx, key)) // nothing, which clears nothing
		must[keel.Token](x.t)(x.m.PutNull(x.ctx, key, nullKey))
		for _, v := range values {
			must[keel.Token](x.t)(x.value.Set(x.ctx, key, v))
			must[keel.Token](x.t)(x.m.Put(x.ctx, key, v, v))
			must[keel.Token](x.t)(x.last.Add(x.ctx, key, v))
			must[keel.Token](x.t)(x.cat.Add(x.ctx, key, v))
			must[keel.Token](x.t)(x.count.Add(x.ctx, key, v))
			for name, get := range map[string]func(context.Context, any) ([]byte, bool, error){"value": x.value.Get, "last": x.last.Get} {
				if got, found, err := get(x.ctx, key); err != nil || !found || !bytes.Equal(got, v) {
					x.t.Fatalf("%s %q of %q: %q %v %v", name, v, key, got, found, err)
				}
			}
		}
	}
}

// check reads everything back, when the values have been written in this order.
func (x *oddCells) check(when string, values [][]byte) {
	x.t.Helper()
	for _, key := range odd {
		if got := must[[][]byte](x.t)(x.list.Get(x.ctx, key)); !slices.EqualFunc(got, values, bytes.Equal) {
			x.t.Fatalf("%s: list of %q is %q", when, key, got)
		}
		for _, v := range values {
			it := must[keel.Item[[]byte]](x.t)(x.m.Get(x.ctx, key, v))
			if !it.Found || it.Null || !bytes.Equal(it.Value, v) {
				x.t.Fatalf("%s: entry %q is %+v", when, v, it)
			}
		}
		if it := must[keel.Item[[]byte]](x.t)(x.m.Get(x.ctx, key, nullKey)); !it.Found || !it.Null {
			x.t.Fatalf("%s: a null entry reads as %+v", when, it)
		}
		if !must[bool](x.t)(x.m.Contains(x.ctx, key, nullKey)) || must[bool](x.t)(x.m.Contains(x.ctx, key, []byte("none"))) {
			x.t.Fatalf("%s: contains does not tell null from absent", when)
		}
		newest := values[len(values)-1]
		for name, tc := range map[string]struct {
			get  func(context.Context, any) ([]byte, bool, error)
			want []byte
		}{"value": {x.value.Get, newest}, "last": {x.last.Get, newest}, "concat": {x.cat.Get, bytes.Join(values, nil)}} {
			if got, found, err := tc.get(x.ctx, key); err != nil || !found || !bytes.Equal(got, tc.want) {
				x.t.Fatalf("%s: %s of %q is %q %v %v, want %q", when, name, key, got, found, err, tc.want)
			}
		}
		if got, found, err := x.count.Get(x.ctx, key); err != nil || !found || got != int64(len(values)) {
			x.t.Fatalf("%s: count of %q is %d %v %v", when, key, got, found, err)
		}
	}
}

// clear empties every second cell, by what clears its kind, then adds one empty
// element to the list and sets the value in the empty namespace.
func (x *oddCells) clear() {
	x.t.Helper()
	for i := 0; i < len(odd); i += 2 {
		must[keel.Token](x.t)(x.list.Update(x.ctx, odd[i]))
		must[keel.Token](x.t)(x.list.Add(x.ctx, odd[i], []byte{}))
		must[keel.Token](x.t)(x.m.Clear(x.ctx, odd[i]))
		must[keel.Token](x.t)(x.value.Clear(x.ctx, odd[i]))
		must[keel.Token](x.t)(x.value.In("").Set(x.ctx, odd[i], []byte("empty")))
	}
}

func (x *oddCells) checkCleared() {
	x.t.Helper()
	for i, key := range odd {
		cleared := i%2 == 0
		if got := must[[][]byte](x.t)(x.list.Get(x.ctx, key)); (len(got) == 1 && len(got[0]) == 0) != cleared {
			x.t.Fatalf("cleared %v: the list of %q is %q", cleared, key, got)
		}
		if must[bool](x.t)(x.m.Contains(x.ctx, key, nullKey)) == cleared || must[bool](x.t)(x.m.IsEmpty(x.ctx, key)) != cleared {
			x.t.Fatalf("cleared %v: the map of %q", cleared, key)
		}
		// The void namespace and the empty one do not mix.
		if _, found, err := x.value.Get(x.ctx, key); found == cleared || err != nil {
			x.t.Fatalf("cleared %v: value of %q: %v %v", cleared, key, found, err)
		}
		if got, found, err := x.value.In("").Get(x.ctx, key); found != cleared || err != nil || cleared && string(got) != "empty" {
			x.t.Fatalf("cleared %v: value of %q in the empty namespace: %q %v %v", cleared, key, got, found, err)
		}
	}
}
