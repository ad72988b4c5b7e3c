//go:build linux

package faultfs

import "sort"

// span is the half-open range [lo, hi) of bytes.
type span struct{ lo, hi int64 }

// spans is a sorted set of disjoint ranges that do not touch.
type spans []span

// add joins [lo, hi) to the set and returns how many bytes are new.
func (s *spans) add(lo, hi int64) int64 {
	if lo >= hi {
		return 0
	}
	i := sort.Search(len(*s), func(i int) bool { return (*s)[i].hi >= lo })
	j, covered, merged := i, int64(0), span{lo, hi}
	for ; j < len(*s) && (*s)[j].lo <= hi; j++ {
		old := (*s)[j]
		covered += max(0, min(old.hi, hi)-max(old.lo, lo))
		merged = span{min(merged.lo, old.lo), max(merged.hi, old.hi)}
	}
	*s = append((*s)[:i:i], append(spans{merged}, (*s)[j:]...)...)
	return hi - lo - covered
}

// missing counts the bytes of [lo, hi) that are not in the set.
func (s spans) missing(lo, hi int64) int64 {
	n := max(0, hi-lo)
	for _, old := range s {
		n -= max(0, min(old.hi, hi)-max(old.lo, lo))
	}
	return n
}

// cut removes [lo, hi) and returns how many bytes that were in the set went.
func (s *spans) cut(lo, hi int64) int64 {
	if lo >= hi {
		return 0
	}
	var kept spans
	var gone int64
	for _, old := range *s {
		if old.hi <= lo || old.lo >= hi {
			kept = append(kept, old)
			continue
		}
		gone += min(old.hi, hi) - max(old.lo, lo)
		if old.lo < lo {
			kept = append(kept, span{old.lo, lo})
		}
		if old.hi > hi {
			kept = append(kept, span{hi, old.hi})
		}
	}
	*s = kept
	return gone
}

// total is the number of bytes in the set.
func (s spans) total() int64 {
	var n int64
	for _, r := range s {
		n += r.hi - r.lo
	}
	return n
}

// extent is a piece of a file's old contents.
type extent struct {
	off  int64
	data []byte
}

// subtract removes [lo, hi) from a list of extents.
func subtract(list []extent, lo, hi int64) []extent {
	var kept []extent
	for _, e := range list {
		end := e.off + int64(len(e.data))
		if end <= lo || e.off >= hi {
			kept = append(kept, e)
			continue
		}
		if e.off < lo {
			kept = append(kept, extent{e.off, e.data[:lo-e.off]})
		}
		if end > hi {
			kept = append(kept, extent{hi, e.data[hi-e.off:]})
		}
	}
	return kept
}

// overlay writes the parts of extents that lie in [off, off+len(p)) over p.
func overlay(p []byte, off int64, list []extent) {
	for _, e := range list {
		lo, hi := max(off, e.off), min(off+int64(len(p)), e.off+int64(len(e.data)))
		if lo < hi {
			copy(p[lo-off:hi-off], e.data[lo-e.off:hi-e.off])
		}
	}
}
