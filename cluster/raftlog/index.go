package raftlog

import (
	"math"
	"slices"
	"sort"
)

const (
	// noCommand in slot.dist: no command at or below, back to where the log of
	// the group began.
	noCommand = math.MaxUint32
	// maxEntries bounds the live entries of one group, so that a damaged head
	// cannot ask for more memory than that.
	maxEntries = 1 << 28
)

// slot says where an entry is and what the index must answer without reading it.
type slot struct {
	seg uint32 // segment number; 0: not found yet, during recovery only
	off uint32 // of the entry in the segment
	len uint32 // encoded bytes
	// dist counts the entries back to the newest command at or below: 0 if this
	// is a command. During recovery only: 0 for a command, else noCommand.
	dist uint32
	cum  uint64 // encoded bytes of this entry and all before it, ever
}

// index holds the slots of one group. Entries are dense (RL8).
type index struct {
	first uint64 // 0: no entries
	slots []slot
}

func (x *index) last() uint64 {
	if len(x.slots) == 0 {
		return 0
	}
	return x.first + uint64(len(x.slots)) - 1
}

func (x *index) has(i uint64) bool { return len(x.slots) > 0 && i >= x.first && i <= x.last() }

func (x *index) at(i uint64) *slot { return &x.slots[i-x.first] }

// push adds the entry after the last one, or the first one at index i.
func (x *index) push(i uint64, s slot, command bool) {
	if len(x.slots) == 0 {
		x.first = i
	}
	x.slots = append(x.slots, s)
	x.link(len(x.slots)-1, command)
}

// link fills dist and cum of slot k from the slot before it.
func (x *index) link(k int, command bool) {
	s := &x.slots[k]
	s.cum, s.dist = uint64(s.len), noCommand
	if k > 0 {
		prev := x.slots[k-1]
		s.cum += prev.cum
		if prev.dist != noCommand {
			s.dist = prev.dist + 1
		}
	}
	if command {
		s.dist = 0
	}
}

// segBytes counts bytes that are no longer live in a segment.
type segBytes struct {
	seg   uint32
	bytes int64
}

// remove deletes [lo, hi], a prefix or suffix that exists, and returns what was
// freed where.
func (x *index) remove(lo, hi uint64) []segBytes {
	var freed []segBytes
	for _, s := range x.slots[lo-x.first : hi-x.first+1] {
		if n := len(freed); n > 0 && freed[n-1].seg == s.seg {
			freed[n-1].bytes += int64(s.len)
		} else {
			freed = append(freed, segBytes{s.seg, int64(s.len)})
		}
	}
	switch {
	case lo == x.first && hi == x.last():
		x.first, x.slots = 0, nil
	case lo == x.first:
		x.slots = x.slots[hi-x.first+1:]
		x.first = hi + 1
		if hi-lo > 4*uint64(len(x.slots)) {
			x.slots = slices.Clone(x.slots) // let go of the long array
		}
	default:
		x.slots = x.slots[:lo-x.first]
	}
	return freed
}

// bytesFrom is the encoded size of the entries at or above i.
func (x *index) bytesFrom(i uint64) uint64 {
	if len(x.slots) == 0 || i > x.last() {
		return 0
	}
	s := x.at(max(i, x.first))
	return x.slots[len(x.slots)-1].cum - s.cum + uint64(s.len)
}

// indexForBytes is the smallest index such that the entries after it hold at
// most n bytes; first-1 if all do, 0 if there are no entries.
func (x *index) indexForBytes(n uint64) uint64 {
	if len(x.slots) == 0 {
		return 0
	}
	k := sort.Search(len(x.slots), func(k int) bool { return x.bytesFrom(x.first+uint64(k)) <= n })
	return x.first + uint64(k) - 1
}

// newestCommand is the newest command at or below i, or 0 if the log has none.
func (x *index) newestCommand(i uint64) uint64 {
	if len(x.slots) == 0 || i < x.first {
		return 0
	}
	i = min(i, x.last())
	d := x.at(i).dist
	if d == noCommand || uint64(d) > i-x.first {
		return 0
	}
	return i - uint64(d)
}

func sortedKeys(m map[string][]byte) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
