package transport

import (
	"fmt"
	"slices"

	"github.com/hashicorp/raft"
)

// asRaftTakes changes an append into one that raft answers rightly in two cases
// where it would not as it is:
//
// raft looks for the previous entry in its log, or at the very end of log or
// snapshot. Where the log is cut right behind a snapshot, or was replaced by one,
// and holds entries again, raft refuses every append that begins at the snapshot
// or before it, without a pause; the leader then falls back to a snapshot of its
// own, which the replica has, and the two go round for ever. What a snapshot holds
// is committed, and every leader has it (Leader Completeness, section 5.4 of the
// Raft paper): the previous entry need not be compared, and entries that the
// snapshot holds need not be stored.
//
// raft takes what the leader has committed for committed up to the end of its own
// log, which may hold older entries behind those of this append. The rule of the
// paper (figure 2, AppendEntries 5) is the last entry of the append.
func (g *Group) asRaftTakes(m *raft.AppendEntriesRequest) (*raft.AppendEntriesRequest, error) {
	if m.PrevLogEntry == 0 && len(m.Entries) == 0 { // a heartbeat
		return m, nil
	}
	last := m.PrevLogEntry
	if n := len(m.Entries); n > 0 {
		last = m.Entries[n-1].Index
	}
	c := *m
	c.LeaderCommitIndex = min(m.LeaderCommitIndex, last)
	if m.PrevLogEntry == 0 || g.opts.SnapshotOver == nil {
		return &c, nil
	}
	over, err := g.opts.SnapshotOver(m.PrevLogEntry)
	if err != nil {
		return nil, fmt.Errorf("looking for entry %d of group %s: %w", m.PrevLogEntry, g.id, err)
	}
	if over < m.PrevLogEntry {
		return &c, nil
	}
	c.PrevLogEntry, c.PrevLogTerm = 0, 0
	behind := slices.IndexFunc(m.Entries, func(e *raft.Log) bool { return e.Index > over })
	if behind < 0 {
		behind = len(m.Entries)
	}
	c.Entries = m.Entries[behind:]
	return &c, nil
}
