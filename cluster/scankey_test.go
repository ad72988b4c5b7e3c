package cluster_test

import (
	"fmt"
	"testing"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// The pages of one key are from the instant at which the scan was opened,
// whatever is written between two of them.
func TestPagesOfOneKeyShareAnInstant(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		var old []string
		var entries []state.Mutation
		for i := range 10 {
			old = append(old, fmt.Sprintf("old%d", i))
			entries = append(entries, k.mapPut("m", fmt.Sprintf("a%d", i), "v"))
		}
		k.mustWrite(k.appendTo("l", old...))
		k.mustWrite(entries...)
		open := func(q state.Query) *cluster.Scan {
			q.Kind, q.Limit = state.QueryPage, 3
			s, err := k.Node(k.Leader(1)).OpenScan(k.ctx(), &cluster.ScanRequest{Route: k.route(), Key: &q})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(s.Close)
			return s
		}
		next := func(s *cluster.Scan, n int) ([]state.ScanItem, bool) {
			items, cursor, more, err := s.Next(k.ctx())
			if err != nil || len(items) != n || more != (cursor != nil) {
				t.Fatalf("%d items, cursor %q, more %v: %v", len(items), cursor, more, err)
			}
			return items, more
		}
		list := open(state.Query{State: k.lists, Key: []byte("l")})
		users := open(state.Query{State: k.maps, Key: []byte("m")})
		elements, _ := next(list, 3)
		pairs, _ := next(users, 3)

		// Between two pages the list is replaced and the entries move behind the
		// cursor, all in one request.
		batch := []state.Mutation{{State: k.lists, Op: state.OpListUpdate, Key: []byte("l"), Elements: [][]byte{[]byte("new"), []byte("new")}}}
		for i := range 10 {
			batch = append(batch, k.mapPut("m", fmt.Sprintf("z%d", i), "v"))
			batch = append(batch, state.Mutation{State: k.maps, Op: state.OpMapRemove, Key: []byte("m"), Entries: []state.Entry{{UserKey: []byte(fmt.Sprintf("a%d", i))}}})
		}
		k.mustWrite(batch...)
		for _, n := range []int{3, 3, 1} {
			more, left := next(list, n)
			elements = append(elements, more...)
			rest, leftToo := next(users, n)
			pairs = append(pairs, rest...)
			if left != (n == 3) || leftToo != left {
				t.Fatalf("after a page of %d: more %v and %v", n, left, leftToo)
			}
		}
		for i := range 10 {
			if got := string(elements[i].Entry.Value); got != old[i] {
				t.Errorf("element %d is %q", i, got)
			}
			if got := string(pairs[i].Entry.UserKey); got != fmt.Sprintf("a%d", i) || string(pairs[i].Key) != "m" {
				t.Errorf("entry %d is %q", i, got)
			}
		}
		if items, more := next(list, 0); len(items) > 0 || more {
			t.Error("the scan goes on after its end")
		}
		now := open(state.Query{State: k.lists, Key: []byte("l")})
		if now.Token().Sequence <= list.Token().Sequence {
			t.Errorf("tokens %v and %v", list.Token(), now.Token())
		}
		next(now, 2)
	})
}
