package state_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
)

func TestPreconditionsCompareWhatIsThere(t *testing.T) {
	e := newEnv(t, 128, valueState, listState, mapState, sumState)
	check := func(want bool, d *state.Declaration, p *state.Precondition) {
		t.Helper()
		err := e.l.Check(e.store, d, p)
		if want != (err == nil) || err != nil && !errors.Is(err, base.ErrPrecondition) {
			t.Fatalf("precondition %d on %s: %v", p.Kind, d.Kind, err)
		}
	}
	pre := func(at target, k state.PreKind, edit func(*state.Precondition)) *state.Precondition {
		p := at.precondition(k)
		if edit != nil {
			edit(p)
		}
		return p
	}
	bytesOf := func(b []byte) func(*state.Precondition) { return func(p *state.Precondition) { p.Bytes = b } }
	version := func(v uint64) func(*state.Precondition) { return func(p *state.Precondition) { p.Version = v } }
	for _, d := range []*state.Declaration{valueState, listState, mapState, sumState} {
		check(true, d, pre(e.at(d, "k"), state.PreAbsent, nil))
		check(false, d, pre(e.at(d, "k"), state.PrePresent, nil))
	}
	at := e.at(valueState, "k")
	check(false, valueState, pre(at, state.PreEqual, bytesOf(nil))) // empty is not absent
	check(false, valueState, pre(at, state.PreVersion, version(1)))
	e.do(valueState, at.put([]byte{}))
	check(true, valueState, pre(at, state.PreEqual, bytesOf(nil)))
	check(false, valueState, pre(at, state.PreEqual, bytesOf([]byte{0})))
	check(true, valueState, pre(at, state.PreVersion, version(e.seq)))
	check(false, valueState, pre(at, state.PreVersion, version(e.seq+1)))
	check(false, valueState, pre(at, state.PreAbsent, nil))

	sum := e.at(sumState, "k")
	sum.add(int64(1), int64(2))
	acc := e.read(sumState, sum.query(state.QueryAccumulator))
	check(true, sumState, pre(sum, state.PreEqual, bytesOf(acc.Value)))
	check(true, sumState, pre(sum, state.PreVersion, version(acc.Version)))
	sum.add(int64(0))
	check(true, sumState, pre(sum, state.PreEqual, bytesOf(acc.Value)))
	check(false, sumState, pre(sum, state.PreVersion, version(acc.Version)))

	m := e.at(mapState, "k")
	entry := func(uk string, edit func(*state.Precondition)) func(*state.Precondition) {
		return func(p *state.Precondition) {
			p.HasUserKey, p.UserKey = true, []byte(uk)
			if edit != nil {
				edit(p)
			}
		}
	}
	e.do(mapState, m.entries(state.OpMapPut, state.Entry{UserKey: []byte("n"), Null: true}, state.Entry{UserKey: []byte{}, Value: []byte("v")}))
	check(true, mapState, pre(m, state.PrePresent, nil))
	check(false, mapState, pre(m, state.PreAbsent, nil))
	check(true, mapState, pre(m, state.PreNull, entry("n", nil)))
	check(true, mapState, pre(m, state.PrePresent, entry("n", nil)))
	check(false, mapState, pre(m, state.PreEqual, entry("n", bytesOf(nil))))
	check(true, mapState, pre(m, state.PreVersion, entry("n", version(e.seq))))
	check(false, mapState, pre(m, state.PreNull, entry("", nil)))
	check(true, mapState, pre(m, state.PreEqual, entry("", bytesOf([]byte("v")))))
	check(false, mapState, pre(m, state.PreNull, entry("absent", nil)))
	check(true, mapState, pre(m, state.PreAbsent, entry("absent", nil)))

	for _, c := range []struct {
		d     *state.Declaration
		p     *state.Precondition
		want  error
		field string
	}{
		{listState, pre(e.at(listState, "k"), state.PreEqual, nil), base.ErrWrongKind, "kind"},
		{listState, pre(e.at(listState, "k"), state.PreVersion, version(1)), base.ErrWrongKind, "kind"},
		{mapState, pre(m, state.PreEqual, nil), base.ErrWrongKind, "kind"},
		{mapState, pre(m, state.PreNull, nil), base.ErrWrongKind, "kind"},
		{valueState, pre(at, state.PreNull, nil), base.ErrWrongKind, "kind"},
		{valueState, pre(at, state.PreVersion, nil), base.ErrInvalid, "version"},
		{valueState, pre(at, 9, nil), base.ErrInvalid, "kind"},
		{valueState, pre(at, state.PreAbsent, entry("x", nil)), base.ErrWrongKind, "user_key"},
	} {
		wantRefusal(t, e.l.Check(e.store, c.d, c.p), c.want, c.field)
	}
}

func TestPageHoldsAtLeastOneItemAndAtMostItsBytes(t *testing.T) {
	e := newEnv(t, 128, listState, mapState)
	big := bytes.Repeat([]byte{7}, 1<<20)
	var elements [][]byte
	for range 5 {
		elements = append(elements, big)
	}
	e.do(listState, e.at(listState, "big").elements(state.OpListAdd, elements...))
	for _, c := range []struct{ pageBytes, want int }{{1, 1}, {1<<20 - 1, 1}, {1 << 20, 1}, {2<<20 - 1, 1}, {2 << 20, 2}, {2<<20 + 1, 2}, {1 << 30, 4}, {0, 1}} {
		q := e.at(listState, "big").query(state.QueryPage)
		q.PageBytes = c.pageBytes
		equal(t, fmt.Sprintf("elements in a page of %d bytes", c.pageBytes), len(e.read(listState, q).Elements), c.want)
	}
	got, _ := e.at(listState, "big").all(0, 1<<20)
	equal(t, "all", len(got), 5)
	for _, n := range []int{0, 1, 127, 128, 129, 255, 256, 257} {
		key := fmt.Sprint("n", n)
		for i := range n {
			e.do(listState, e.at(listState, key).elements(state.OpListAdd, fmt.Append(nil, i)))
			e.do(mapState, e.at(mapState, key).entries(state.OpMapPut, state.Entry{UserKey: fmt.Appendf(nil, "%03d", i), Value: []byte{1}}))
		}
		l, _ := e.at(listState, key).all(128, 0)
		_, m := e.at(mapState, key).all(128, 0)
		equal(t, fmt.Sprintf("list of %d", n), len(l), n)
		equal(t, fmt.Sprintf("map of %d", n), len(m), n)
		q := e.at(mapState, key).query(state.QueryPage)
		q.Limit = 128
		if first := e.read(mapState, q); (first.Next != nil) != (n > 128) {
			t.Fatalf("map of %d: next is %v", n, first.Next)
		}
		q.KeysOnly = true
		for _, en := range e.read(mapState, q).Entries {
			if en.Value != nil {
				t.Fatal("a value in a page of keys")
			}
		}
	}
}

// B40: pages are live: each entry comes at most once, whatever is removed or
// replaced on the way.
func TestWalkingAMapWhileItChangesGivesEachEntryAtMostOnce(t *testing.T) {
	for _, size := range []int{127, 128, 129, 300} {
		for _, change := range []string{"remove current", "remove next", "remove previous", "replace", "remove all", "insert before"} {
			e := newEnv(t, 128, mapState)
			at := e.at(mapState, "k")
			uk := func(i int) []byte { return fmt.Appendf(nil, "%04d", i*2) }
			for i := range size {
				e.do(mapState, at.entries(state.OpMapPut, state.Entry{UserKey: uk(i), Value: []byte("v")}))
			}
			seen := map[string]bool{}
			q := at.query(state.QueryPage)
			q.Limit = 128
			for {
				a := e.read(mapState, q)
				for _, en := range a.Entries {
					if seen[string(en.UserKey)] {
						t.Fatalf("%s, %d: %s comes twice", change, size, en.UserKey)
					}
					seen[string(en.UserKey)] = true
					var i int
					_, _ = fmt.Sscan(strings.TrimLeft(string(en.UserKey), "0")+" ", &i)
					i /= 2
					switch change {
					case "remove current":
						e.do(mapState, at.entries(state.OpMapRemove, state.Entry{UserKey: en.UserKey}))
					case "remove next":
						e.do(mapState, at.entries(state.OpMapRemove, state.Entry{UserKey: uk(i + 1)}))
					case "remove previous":
						e.do(mapState, at.entries(state.OpMapRemove, state.Entry{UserKey: uk(max(i-1, 0))}))
					case "replace":
						e.do(mapState, at.entries(state.OpMapPut, state.Entry{UserKey: en.UserKey, Value: []byte("w")}))
					case "insert before":
						e.do(mapState, at.entries(state.OpMapPut, state.Entry{UserKey: append(uk(i)[:4:4], 0), Value: []byte("w")}))
					case "remove all":
						at.clear()
					}
				}
				if a.Next == nil {
					break
				}
				q.Cursor = a.Next
			}
			left := e.entriesInStore(mapState)
			switch change {
			case "remove current":
				equal(t, "seen", len(seen), size)
				equal(t, "left", left, 0)
			case "replace", "remove previous":
				equal(t, "seen", len(seen), size)
			case "remove all":
				equal(t, "seen", len(seen), min(size, 128))
				equal(t, "left", left, 0)
			}
		}
	}
}

func TestReadManyAnswersLikeRead(t *testing.T) {
	e := newEnv(t, 128, valueState, listState, mapState, sumState)
	var requests []state.ReadRequest
	for i := range 20 {
		key := fmt.Sprint(i)
		if i%2 == 0 {
			e.do(valueState, e.at(valueState, key).put([]byte(key)))
			e.at(sumState, key).add(int64(i))
			e.at(listState, key).add([]byte(key))
			e.do(mapState, e.at(mapState, key).entries(state.OpMapPut, state.Entry{UserKey: []byte("u"), Null: i%4 == 0}))
		}
		byKey := e.at(mapState, key).query(state.QueryGet)
		byKey.UserKey = []byte("u")
		requests = append(requests,
			state.ReadRequest{D: valueState, Q: e.at(valueState, key).query(state.QueryGet)},
			state.ReadRequest{D: mapState, Q: byKey},
			state.ReadRequest{D: sumState, Q: e.at(sumState, key).query(state.QueryGet)},
			state.ReadRequest{D: sumState, Q: e.at(sumState, key).query(state.QueryAccumulator)},
			state.ReadRequest{D: sumState, Q: e.at(sumState, key).query(state.QueryIsEmpty)},
			state.ReadRequest{D: listState, Q: e.at(listState, key).query(state.QueryPage)},
			state.ReadRequest{D: listState, Q: e.at(listState, key).query(state.QueryGet)}, // refused
		)
	}
	answers, errs := e.l.ReadMany(e.store, requests)
	for i, r := range requests {
		a, err := e.l.Read(e.store, r.D, r.Q)
		equal(t, fmt.Sprintf("answer %d", i), answers[i], a)
		if (err == nil) != (errs[i] == nil) {
			t.Fatalf("request %d: %v, alone %v", i, errs[i], err)
		}
	}
}
