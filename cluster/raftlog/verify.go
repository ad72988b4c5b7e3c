package raftlog

import (
	"fmt"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// Verify reads every entry of the group from its file, past the cache, and
// checks it. Entries that are cut or moved meanwhile are no failure. pace is
// called after each entry with its bytes; it may wait, and its error ends the
// call. Damage is base.ErrCorrupt, with file and offset, and OnCorrupt is told,
// as for any other read.
func (g *GroupLog) Verify(pace func(bytes int64) error) error {
	g.mu.RLock()
	first, last := g.mu.index.first, g.mu.index.last()
	g.mu.RUnlock()
	for i := first; i != 0 && i <= last; i++ {
		n, err := g.verifyEntry(i)
		if err != nil {
			return fmt.Errorf("verifying the log of %s: %w", g.id, err)
		}
		if n == 0 { // cut: what is left begins later, or ends before
			g.mu.RLock()
			i = max(i, g.mu.index.first-min(1, g.mu.index.first))
			last = min(last, g.mu.index.last())
			g.mu.RUnlock()
			continue
		}
		if err := pace(n); err != nil {
			return err
		}
	}
	return nil
}

// verifyEntry returns the entry's size, 0 if it is not in the log any more.
func (g *GroupLog) verifyEntry(i uint64) (int64, error) {
	for {
		if err := g.log.Err(); err != nil {
			return 0, err
		}
		s, ok := g.slotOf(i)
		if !ok {
			return 0, nil
		}
		seg := g.log.segmentByID(s.seg)
		if seg == nil {
			if now, ok := g.slotOf(i); ok && now == s {
				return 0, fmt.Errorf("reading entry %d of %s: %w", i, g.id, base.ErrClosed)
			}
			continue // it was moved, and its segment removed
		}
		var e raft.Log
		b := make([]byte, s.len)
		_, err := seg.file.ReadAt(b, int64(s.off))
		if err == nil {
			err = decodeEntry(b, g.salt, &e)
		}
		if err == nil && e.Index == i {
			return int64(len(b)), seg.release()
		}
		// It counts only if the log still needs these very bytes.
		now, ok := g.slotOf(i)
		if !ok || now != s {
			if err := seg.release(); err != nil {
				return 0, err
			}
			continue
		}
		if _, err = g.readEntry(seg, s, i, &e); err == nil {
			return int64(len(b)), seg.release() // it can be read the second time
		}
		_ = seg.release() // the damage counts
		return 0, err
	}
}

func (g *GroupLog) slotOf(i uint64) (slot, bool) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if !g.mu.index.has(i) {
		return slot{}, false
	}
	return *g.mu.index.at(i), true
}
