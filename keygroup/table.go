package keygroup

import (
	"fmt"
	"slices"
	"sort"

	"github.com/keelstate/keelstate/internal/base"
)

// Entry says which shard holds a range of key groups, and the shard's epoch,
// which a request for the shard must carry.
type Entry struct {
	Range Range
	Shard base.GroupID
	Epoch base.Epoch
}

// Table routes key groups to shards. It is immutable: a change of the map makes
// a new Table under a higher revision. KG6 holds for every Table.
type Table struct {
	m        int
	revision base.Revision
	entries  []Entry // sorted by range, tiling [0, m)
	byShard  map[base.GroupID]int
}

// NewTable builds the routing table of m key groups at a revision of the
// cluster's metadata. The entries, in any order, must tile [0, m) and name each
// shard once; otherwise the error is base.ErrInvalid and says where.
func NewTable(m int, revision base.Revision, entries []Entry) (*Table, error) {
	if err := CheckM(m); err != nil {
		return nil, err
	}
	t := &Table{
		m:        m,
		revision: revision,
		entries:  slices.Clone(entries),
		byShard:  make(map[base.GroupID]int, len(entries)),
	}
	sort.Slice(t.entries, func(i, j int) bool { return t.entries[i].Range.Lo < t.entries[j].Range.Lo })
	var next Group
	for i, e := range t.entries {
		switch {
		case e.Range.Empty():
			return nil, fmt.Errorf("%w: shard %s has the empty range %s", base.ErrInvalid, e.Shard, e.Range)
		case e.Range.Lo < next:
			return nil, fmt.Errorf("%w: the range %s of shard %s overlaps its predecessor", base.ErrInvalid, e.Range, e.Shard)
		case e.Range.Lo > next:
			return nil, fmt.Errorf("%w: no shard holds %s", base.ErrInvalid, Range{Lo: next, Hi: e.Range.Lo})
		case e.Shard == base.SystemGroup:
			return nil, fmt.Errorf("%w: the system group cannot hold %s", base.ErrInvalid, e.Range)
		}
		if _, dup := t.byShard[e.Shard]; dup {
			return nil, fmt.Errorf("%w: shard %s is listed twice", base.ErrInvalid, e.Shard)
		}
		t.byShard[e.Shard] = i
		next = e.Range.Hi
	}
	if int(next) != m {
		return nil, fmt.Errorf("%w: the ranges end at %d, not at %d", base.ErrInvalid, next, m)
	}
	return t, nil
}

// M returns the number of key groups.
func (t *Table) M() int { return t.m }

// Revision returns the revision of the cluster's metadata that the table shows.
func (t *Table) Revision() base.Revision { return t.revision }

// Len returns the number of shards.
func (t *Table) Len() int { return len(t.entries) }

// Find returns the entry of the shard that holds g, in O(log shards). It is
// false only for a group outside [0, M).
func (t *Table) Find(g Group) (Entry, bool) {
	if int(g) >= t.m {
		return Entry{}, false
	}
	i := sort.Search(len(t.entries), func(i int) bool { return t.entries[i].Range.Hi > g })
	return t.entries[i], true
}

// Shard returns the entry of a shard by its id.
func (t *Table) Shard(id base.GroupID) (Entry, bool) {
	i, ok := t.byShard[id]
	if !ok {
		return Entry{}, false
	}
	return t.entries[i], true
}

// Overlapping returns the entries that share a group with r, in range order.
// The caller must not change them.
func (t *Table) Overlapping(r Range) []Entry {
	if r.Empty() || int(r.Lo) >= t.m {
		return nil
	}
	lo := sort.Search(len(t.entries), func(i int) bool { return t.entries[i].Range.Hi > r.Lo })
	hi := sort.Search(len(t.entries), func(i int) bool { return t.entries[i].Range.Lo >= r.Hi })
	return slices.Clip(t.entries[lo:hi])
}

// Entries returns all entries in range order. The caller must not change them.
func (t *Table) Entries() []Entry { return slices.Clip(t.entries) }
