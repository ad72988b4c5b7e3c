package keygroup

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

// KG5, over every p for some m and some p for every m.
func TestRangesTileAndAgreeWithOwners(t *testing.T) {
	check := func(m, p int) {
		next := Group(0)
		for i := range p {
			r := RangeOf(i, m, p)
			if r.Lo != next || r.Empty() {
				t.Fatalf("m=%d p=%d: range %d is %s, want it to start at %d", m, p, i, r, next)
			}
			for g := r.Lo; g < r.Hi; g++ {
				if OwnerOf(g, m, p) != i {
					t.Fatalf("m=%d p=%d: group %d belongs to %d, but is in the range of %d", m, p, g, OwnerOf(g, m, p), i)
				}
			}
			next = r.Hi
		}
		if int(next) != m {
			t.Fatalf("m=%d p=%d: the ranges end at %d", m, p, next)
		}
	}
	for m := 1; m <= 200; m++ {
		for p := 1; p <= m; p++ {
			check(m, p)
		}
	}
	for _, p := range []int{1, 2, 3, 7, 1000, 32767, 32768} {
		check(MaxM, p)
	}
}

func TestDefaultM(t *testing.T) {
	for p := 1; p <= MaxM; p++ {
		want := 1
		for want < p+p/2 {
			want *= 2
		}
		want = min(max(want, 128), 32768)
		if got := DefaultM(p); got != want {
			t.Fatalf("DefaultM(%d) = %d, want %d", p, got, want)
		}
	}
	for _, p := range []int{0, -1, math.MinInt} {
		if got := DefaultM(p); got != 128 {
			t.Errorf("DefaultM(%d) = %d", p, got)
		}
	}
	if got := DefaultM(math.MaxInt); got != MaxM {
		t.Errorf("DefaultM(MaxInt) = %d", got)
	}
}

func TestMixIsNeverNegativeAndGroupsAreInRange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := rapid.Int32().Draw(t, "hash")
		m := rapid.IntRange(1, MaxM).Draw(t, "m")
		if Mix(h) < 0 {
			t.Fatalf("Mix(%d) = %d", h, Mix(h))
		}
		if g := GroupOf(h, m); int(g) >= m {
			t.Fatalf("GroupOf(%d, %d) = %d", h, m, g)
		}
	})
}

// unmix inverts the mixing before its sign is dropped: every step is a bijection
// of 32 bits.
func unmix(k uint32) int32 {
	rotr := func(x uint32, n int) uint32 { return x>>n | x<<(32-n) }
	inverse := func(odd uint32) uint32 { // Newton: each round doubles the right bits
		x := odd
		for range 5 {
			x *= 2 - odd*x
		}
		return x
	}
	k ^= k >> 16
	k *= inverse(0xc2b2ae35)
	k ^= k>>13 ^ k>>26
	k *= inverse(0x85ebca6b)
	k ^= k >> 16
	k ^= 4
	k = rotr((k-0xe6546b64)*inverse(5), 13)
	k = rotr(k*inverse(0x1b873593), 15)
	return int32(k * inverse(0xcc9e2d51))
}

// The one hash code whose murmur result is the smallest integer: it cannot be
// negated, and becomes 0.
func TestMixOfTheMinimumIsZero(t *testing.T) {
	h := unmix(1 << 31)
	if got := Mix(h); got != 0 {
		t.Errorf("Mix(%d) = %d, want 0", h, got)
	}
	if up := Mix(unmix(1<<31 + 1)); up != math.MaxInt32 {
		t.Errorf("its neighbour mixes to %d, so the inverse in this test is wrong", up)
	}
}

func TestGroupPrefix(t *testing.T) {
	for _, m := range []int{1, 2, 128, 129, 4096, MaxM} {
		var last []byte
		for g := 0; g < m; g++ {
			b := AppendGroup([]byte{0xAA}, m, Group(g))
			if len(b) != 1+PrefixLen(m) {
				t.Fatalf("m=%d: a group takes %d bytes, PrefixLen says %d", m, len(b)-1, PrefixLen(m))
			}
			if last != nil && slices.Compare(last, b) >= 0 {
				t.Fatalf("m=%d: group %d does not sort after its predecessor", m, g)
			}
			got, rest, err := CutGroup(append(slices.Clone(b[1:]), "key"...), m)
			if err != nil || got != Group(g) || string(rest) != "key" {
				t.Fatalf("m=%d: group %d read back as %d, %q, %v", m, g, got, rest, err)
			}
			last = b
		}
	}
	for _, tc := range []struct {
		b string
		m int
	}{{"", 128}, {"\x80", 128}, {"\x01", 129}, {"\x00\x81", 129}, {"\x05", 5}} {
		if g, _, err := CutGroup([]byte(tc.b), tc.m); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("CutGroup(%q, %d) = %d, %v; want ErrCorrupt", tc.b, tc.m, g, err)
		}
	}
	if PrefixLen(128) != 1 || PrefixLen(129) != 2 {
		t.Error("the prefix must grow just above 128 groups")
	}
}

func TestRange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) Range {
			return Range{Group(rapid.IntRange(0, 12).Draw(t, name+".lo")), Group(rapid.IntRange(0, 12).Draw(t, name+".hi"))}
		}
		r, s := draw("r"), draw("s")
		both, inside, n := false, true, 0
		for g := Group(0); g < 13; g++ {
			both = both || r.Contains(g) && s.Contains(g)
			inside = inside && (!s.Contains(g) || r.Contains(g))
			if r.Contains(g) {
				n++
			}
		}
		if r.Overlaps(s) != both || r.ContainsRange(s) != inside || r.Len() != n || r.Empty() != (n == 0) {
			t.Fatalf("%s and %s: overlaps %v, contains %v, len %d", r, s, r.Overlaps(s), r.ContainsRange(s), r.Len())
		}
	})
	if got := fmt.Sprint(FullRange(128)); got != "[0,128)" {
		t.Errorf("a range prints as %q", got)
	}
}

func TestCheckM(t *testing.T) {
	for m, ok := range map[int]bool{-1: false, 0: false, 1: true, 128: true, 32768: true, 32769: false} {
		if err := CheckM(m); (err == nil) != ok {
			t.Errorf("CheckM(%d) = %v", m, err)
		}
	}
}

// KG6.
func TestTableFindsEveryGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.IntRange(1, 300).Draw(t, "m")
		cuts := rapid.SliceOfDistinct(rapid.IntRange(0, m-1), func(n int) int { return n }).Draw(t, "cuts")
		cuts = append(cuts, 0, m)
		slices.Sort(cuts)
		cuts = slices.Compact(cuts)
		var entries []Entry
		for i := 1; i < len(cuts); i++ {
			entries = append(entries, Entry{Range{Group(cuts[i-1]), Group(cuts[i])}, base.GroupID(i * 7), base.Epoch(i)})
		}
		shuffled := rapid.Permutation(entries).Draw(t, "order")
		table, err := NewTable(m, 9, shuffled)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(table.Entries(), entries) || table.Len() != len(entries) || table.M() != m || table.Revision() != 9 {
			t.Fatalf("the table holds %v, want %v", table.Entries(), entries)
		}
		for _, e := range entries {
			if got, ok := table.Shard(e.Shard); !ok || got != e {
				t.Fatalf("Shard(%s) = %v, %v", e.Shard, got, ok)
			}
			for g := e.Range.Lo; g < e.Range.Hi; g++ {
				if got, ok := table.Find(g); !ok || got != e {
					t.Fatalf("Find(%d) = %v, %v; want %v", g, got, ok, e)
				}
			}
		}
		for _, g := range []Group{Group(m), Group(m) + 1, math.MaxUint32} {
			if got, ok := table.Find(g); ok {
				t.Fatalf("Find(%d) = %v among %d groups", g, got, m)
			}
		}
		r := Range{Group(rapid.IntRange(0, m+2).Draw(t, "lo")), Group(rapid.IntRange(0, m+2).Draw(t, "hi"))}
		var want []Entry
		for _, e := range entries {
			if e.Range.Overlaps(r) {
				want = append(want, e)
			}
		}
		if got := table.Overlapping(r); !slices.Equal(got, want) {
			t.Fatalf("Overlapping(%s) = %v, want %v", r, got, want)
		}
	})
}

func TestTableRefusesRangesThatDoNotTile(t *testing.T) {
	e := func(lo, hi Group, id base.GroupID) Entry { return Entry{Range: Range{lo, hi}, Shard: id} }
	for name, tc := range map[string]struct {
		m       int
		entries []Entry
	}{
		"no entry":       {10, nil},
		"bad m":          {0, []Entry{e(0, 0, 1)}},
		"m too large":    {32769, []Entry{e(0, 32769, 1)}},
		"gap":            {10, []Entry{e(0, 4, 1), e(5, 10, 2)}},
		"gap at start":   {10, []Entry{e(1, 10, 1)}},
		"gap at end":     {10, []Entry{e(0, 9, 1)}},
		"overlap":        {10, []Entry{e(0, 5, 1), e(4, 10, 2)}},
		"beyond the end": {10, []Entry{e(0, 11, 1)}},
		"empty range":    {10, []Entry{e(0, 10, 1), e(10, 10, 2)}},
		"shard twice":    {10, []Entry{e(0, 5, 1), e(5, 10, 1)}},
		"system group":   {10, []Entry{e(0, 10, base.SystemGroup)}},
	} {
		if _, err := NewTable(tc.m, 1, tc.entries); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: error %v, want ErrInvalid", name, err)
		}
	}
}

func TestTableDoesNotChangeWithItsInput(t *testing.T) {
	entries := []Entry{{Range{0, 5}, 1, 1}, {Range{5, 10}, 2, 1}}
	table, err := NewTable(10, 1, entries)
	if err != nil {
		t.Fatal(err)
	}
	entries[0].Shard = 99
	if got, _ := table.Find(0); got.Shard != 1 {
		t.Errorf("the table changed with the caller's slice: %v", got)
	}
}

func spread(counts map[base.NodeID]int, nodes []PlaceNode) int {
	lo, hi := math.MaxInt, 0
	for _, n := range nodes {
		lo, hi = min(lo, counts[n.ID]), max(hi, counts[n.ID])
	}
	return hi - lo
}

// KG7 and the promises of Place, with zones of any size.
func TestPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		zones := rapid.IntRange(0, 4).Draw(t, "zones")
		even := zones == 0 || rapid.Bool().Draw(t, "even")
		count := rapid.IntRange(1, 9).Draw(t, "nodes")
		if zones > 0 && even {
			count = zones * rapid.IntRange(1, 3).Draw(t, "per zone")
		}
		nodes := make([]PlaceNode, count)
		for i := range nodes {
			nodes[i] = PlaceNode{ID: base.NodeID(fmt.Sprintf("n%d", i)), Load: float64(rapid.IntRange(0, 2).Draw(t, "load"))}
			if zones > 0 {
				z := i % zones
				if !even {
					z = rapid.IntRange(0, zones-1).Draw(t, "zone")
				}
				nodes[i].Zone = fmt.Sprintf("z%d", z)
			}
		}
		replication := rapid.IntRange(1, count).Draw(t, "replication")
		shards := rapid.SliceOfNDistinct(rapid.Uint64Range(1, 1000), 0, 40, func(n uint64) uint64 { return n }).Draw(t, "shards")
		ids := make([]base.GroupID, len(shards))
		for i, s := range shards {
			ids[i] = base.GroupID(s)
		}
		plan, err := Place(nodes, ids, replication)
		if err != nil {
			t.Fatal(err)
		}
		checkPlan(t, nodes, ids, replication, plan, even)

		again, err := Place(rapid.Permutation(nodes).Draw(t, "node order"), rapid.Permutation(ids).Draw(t, "shard order"), replication)
		if err != nil || !maps.EqualFunc(plan, again, slices.Equal[[]base.NodeID]) {
			t.Fatalf("the plan depends on the order of its inputs: %v, %v (%v)", plan, again, err)
		}
	})
}

func checkPlan(t *rapid.T, nodes []PlaceNode, shards []base.GroupID, replication int, plan map[base.GroupID][]base.NodeID, even bool) {
	zoneOf, sizes := map[base.NodeID]string{}, map[string]int{}
	for _, n := range nodes {
		zone := n.Zone
		if zone == "" {
			zone = "node " + string(n.ID)
		}
		zoneOf[n.ID] = zone
		sizes[zone]++
	}
	// The least that the fullest zone must hold when replicas are dealt to the
	// zones in turn, as long as a zone has nodes left.
	most, left := 0, replication
	for left > 0 {
		most++
		for _, size := range sizes {
			if size >= most {
				left--
			}
		}
	}
	replicas, leaders := map[base.NodeID]int{}, map[base.NodeID]int{}
	for _, s := range shards {
		got := plan[s]
		inZone := map[string]int{}
		seen := map[base.NodeID]bool{}
		for _, n := range got {
			if zoneOf[n] == "" || seen[n] {
				t.Fatalf("shard %s is placed on %v: unknown or repeated node", s, got)
			}
			seen[n] = true
			replicas[n]++
			inZone[zoneOf[n]]++
			if inZone[zoneOf[n]] > most {
				t.Fatalf("shard %s is placed on %v: more than %d in zone %s", s, got, most, zoneOf[n])
			}
		}
		if len(got) != replication || len(inZone) != min(replication, len(sizes)) {
			t.Fatalf("shard %s is placed on %v: %d zones, want %d replicas in %d zones", s, got, len(inZone), replication, min(replication, len(sizes)))
		}
		leaders[got[0]]++
	}
	if len(plan) != len(shards) {
		t.Fatalf("%d shards placed, want %d", len(plan), len(shards))
	}
	if even && spread(replicas, nodes) > 1 {
		t.Fatalf("replicas are not balanced: %v", replicas)
	}
	if even && spread(leaders, nodes) > 1 {
		t.Fatalf("leaders are not balanced: %v", leaders)
	}
}

func TestPlaceFavoursLightNodes(t *testing.T) {
	nodes := []PlaceNode{{ID: "heavy", Load: 9}, {ID: "light", Load: 1}}
	plan, err := Place(nodes, []base.GroupID{1, 2, 3}, 1)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, p := range plan {
		if p[0] == "light" {
			n++
		}
	}
	if n != 2 {
		t.Errorf("the light node got %d of 3 shards, want 2", n)
	}
}

func TestPlaceRefusesBadInput(t *testing.T) {
	two := []PlaceNode{{ID: "a"}, {ID: "b"}}
	for name, tc := range map[string]struct {
		nodes  []PlaceNode
		shards []base.GroupID
		r      int
	}{
		"no node":         {nil, []base.GroupID{1}, 1},
		"no replica":      {two, []base.GroupID{1}, 0},
		"too many":        {two, []base.GroupID{1}, 3},
		"node twice":      {[]PlaceNode{{ID: "a"}, {ID: "a"}}, nil, 1},
		"nameless node":   {[]PlaceNode{{}}, nil, 1},
		"shard twice":     {two, []base.GroupID{1, 1}, 1},
		"load not number": {[]PlaceNode{{ID: "a", Load: math.NaN()}}, nil, 1},
	} {
		if plan, err := Place(tc.nodes, tc.shards, tc.r); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v, %v; want ErrInvalid", name, plan, err)
		}
	}
}

func BenchmarkTableFind(b *testing.B) {
	entries := make([]Entry, 256)
	for i := range entries {
		entries[i] = Entry{Range: RangeOf(i, MaxM, len(entries)), Shard: base.GroupID(i + 1)}
	}
	table, err := NewTable(MaxM, 1, entries)
	if err != nil {
		b.Fatal(err)
	}
	for g := Group(0); b.Loop(); g = (g + 7919) % MaxM {
		table.Find(g)
	}
}
