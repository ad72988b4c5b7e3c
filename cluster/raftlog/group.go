package raftlog

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// GroupLog is one group's part of the log: its LogStore and its StableStore.
// Every write is durable when it returns nil. What the committer refuses
// (a gap, a tombstoned group, a size) leaves the log as it was; base.ErrDiskFailed
// means that the outcome is unknown and the whole log is dead.
type GroupLog struct {
	log  *Log
	id   base.GroupID
	salt uint32 // of entry checksums

	// proj is the state after all ops that the committer has accepted, durable
	// or not. Owned by the committer.
	proj projection

	// mu guards what is durable. Only the committer writes it.
	mu struct {
		sync.RWMutex
		exists     bool
		tombstone  bool
		generation uint64
		index      index
		stable     map[string][]byte
		cache      entryCache
	}
}

var (
	_ raft.LogStore          = (*GroupLog)(nil)
	_ raft.StableStore       = (*GroupLog)(nil)
	_ raft.MonotonicLogStore = (*GroupLog)(nil)
)

func groupSalt(ident logID, id base.GroupID) uint32 {
	// The constant parts entries from records and segments of the same number.
	return ident.salt(uint64(id) ^ 0x656e747279) // "entry"
}

func newGroupLog(l *Log, id base.GroupID) *GroupLog {
	g := &GroupLog{log: l, id: id, salt: groupSalt(l.ident, id)}
	g.mu.stable = map[string][]byte{}
	return g
}

// ID is the group's id.
func (g *GroupLog) ID() base.GroupID { return g.id }

// IsMonotonic tells raft that gaps are refused: after it has installed a
// snapshot it deletes all entries instead of leaving a gap.
func (g *GroupLog) IsMonotonic() bool { return true }

// FirstIndex is the index of the oldest entry, 0 if there is none.
func (g *GroupLog) FirstIndex() (uint64, error) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.index.first, g.log.Err()
}

// LastIndex is the index of the newest entry, 0 if there is none.
func (g *GroupLog) LastIndex() (uint64, error) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.index.last(), g.log.Err()
}

// GetLog reads one entry. It returns raft.ErrLogNotFound, as raft wants it, for
// an index that the log does not hold, and base.ErrCorrupt for a damaged entry.
// The caller must not change the entry's bytes.
func (g *GroupLog) GetLog(i uint64, out *raft.Log) error {
	if err := g.log.Err(); err != nil {
		return err
	}
	g.mu.RLock()
	if e := g.mu.cache.get(i); e != nil {
		*out = *e
		g.mu.RUnlock()
		return nil
	}
	if !g.mu.index.has(i) {
		g.mu.RUnlock()
		return raft.ErrLogNotFound
	}
	s := *g.mu.index.at(i)
	// While the entry is live under mu its segment cannot go; the reference
	// keeps it open afterwards.
	seg := g.log.segmentByID(s.seg)
	g.mu.RUnlock()
	if seg == nil {
		return fmt.Errorf("reading entry %d of %s: %w", i, g.id, base.ErrClosed)
	}
	_, err := g.readEntry(seg, s, i, out)
	if rerr := seg.release(); err == nil && rerr != nil {
		err = rerr
	}
	return err
}

// readEntry reads and checks one entry and returns its bytes.
func (g *GroupLog) readEntry(seg *segment, s slot, i uint64, out *raft.Log) ([]byte, error) {
	b := make([]byte, s.len)
	if _, err := seg.file.ReadAt(b, int64(s.off)); err != nil {
		return nil, g.damaged(seg, fmt.Errorf("reading entry %d of %s at %s offset %d: %w: %w", i, g.id, seg.path, s.off, base.ErrCorrupt, err))
	}
	err := decodeEntry(b, g.salt, out)
	if err == nil && out.Index != i {
		err = fmt.Errorf("found entry %d: %w", out.Index, base.ErrCorrupt)
	}
	if err != nil {
		return nil, g.damaged(seg, fmt.Errorf("reading entry %d of %s at %s offset %d: %w", i, g.id, seg.path, s.off, err))
	}
	return b, nil
}

func (g *GroupLog) damaged(seg *segment, err error) error {
	seg.damaged.Store(true)
	if g.log.opt.OnCorrupt != nil {
		g.log.opt.OnCorrupt(g.id, err)
	}
	return err
}

// StoreLog stores one entry.
func (g *GroupLog) StoreLog(e *raft.Log) error { return g.StoreLogs([]*raft.Log{e}) }

// StoreLogs stores entries that follow the last one, or any first ones into an
// empty log. It returns base.ErrInvalid for a gap or an overlap and
// base.ErrTooLarge for an entry beyond 64 MiB, and then nothing is stored.
func (g *GroupLog) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return g.log.Err()
	}
	for k, e := range logs {
		if e.Index == 0 || e.Index != logs[0].Index+uint64(k) {
			return fmt.Errorf("storing entry %d of %s after %d others from %d: not contiguous: %w", e.Index, g.id, k, logs[0].Index, base.ErrInvalid)
		}
		if entrySize(e)+4 > maxPayloadBytes {
			return fmt.Errorf("storing entry %d of %s, %d bytes: %w", e.Index, g.id, len(e.Data)+len(e.Extensions), base.ErrTooLarge)
		}
	}
	var ops []*op
	for start := 0; start < len(logs); {
		size, end := 4, start
		for end < len(logs) && (end == start || size+entrySize(logs[end]) <= g.log.opt.MaxBatchBytes) {
			size += entrySize(logs[end])
			end++
		}
		o := newAppendOp(g, logs[start:end], size)
		if len(ops) > 0 {
			o.prev = ops[len(ops)-1]
		}
		ops = append(ops, o)
		start = end
	}
	if err := g.log.do(ops...); err != nil {
		return fmt.Errorf("storing entries %d to %d of %s: %w", logs[0].Index, logs[len(logs)-1].Index, g.id, err)
	}
	return nil
}

// DeleteRange deletes the entries lo to hi, both included. What does not exist
// is skipped; a range in the middle is base.ErrInvalid.
func (g *GroupLog) DeleteRange(lo, hi uint64) error {
	if lo > hi {
		return g.log.Err()
	}
	failpoint.Hit("raftlog.cut.begin")
	if err := g.log.do(newDeleteOp(g, lo, hi)); err != nil {
		return fmt.Errorf("deleting entries %d to %d of %s: %w", lo, hi, g.id, err)
	}
	failpoint.Hit("raftlog.cut.end")
	return nil
}

// Set stores a value durably. A key has 1 to 256 bytes, a value up to 64 KiB, a
// group up to 64 keys.
func (g *GroupLog) Set(key, val []byte) error {
	if len(key) == 0 || len(key) > maxKeyBytes || len(val) > maxValueBytes {
		return fmt.Errorf("storing stable value %.32q of %s, %d bytes: %w", key, g.id, len(val), base.ErrTooLarge)
	}
	o := newOp(opStable, g, recStable, 6+len(key)+len(val))
	o.key, o.val = string(key), append([]byte{}, val...)
	o.buf = appendKV(o.buf, o.key, o.val)
	if err := g.log.do(o.seal()); err != nil {
		return fmt.Errorf("storing stable value %q of %s: %w", key, g.id, err)
	}
	return nil
}

// Get returns a value that Set stored; the caller must not change it. A missing
// key is base.ErrNotFound itself, unwrapped: raft compares its text.
func (g *GroupLog) Get(key []byte) ([]byte, error) {
	if err := g.log.Err(); err != nil {
		return nil, err
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	val, ok := g.mu.stable[string(key)]
	if !ok {
		return nil, base.ErrNotFound
	}
	return val, nil
}

// SetUint64 stores a number durably.
func (g *GroupLog) SetUint64(key []byte, val uint64) error {
	return g.Set(key, binary.BigEndian.AppendUint64(nil, val))
}

// GetUint64 returns a number that SetUint64 stored, and 0 with base.ErrNotFound,
// unwrapped, if there is none.
func (g *GroupLog) GetUint64(key []byte) (uint64, error) {
	val, err := g.Get(key)
	if err != nil {
		return 0, err
	}
	if len(val) != 8 {
		return 0, fmt.Errorf("reading stable value %q of %s: %d bytes are no number: %w", key, g.id, len(val), base.ErrInvalid)
	}
	return binary.BigEndian.Uint64(val), nil
}

// Bytes is the encoded size of the entries held: data and extensions plus 40
// bytes each.
func (g *GroupLog) Bytes() uint64 {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.index.bytesFrom(0)
}

// BytesFrom is the encoded size of the entries at or above i.
func (g *GroupLog) BytesFrom(i uint64) uint64 {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.index.bytesFrom(i)
}

// IndexForBytes is the smallest index such that the entries after it hold at
// most n bytes: deleting up to it keeps as much as n bytes allow. It is one
// below the first index if all fits, and 0 if there are no entries.
func (g *GroupLog) IndexForBytes(n uint64) uint64 {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.index.indexForBytes(n)
}

// NewestCommandAtOrBelow is the index of the newest entry of type LogCommand at
// or below i, in constant time. It is 0 if the log holds none; the newest command
// is then at or below the snapshot.
func (g *GroupLog) NewestCommandAtOrBelow(i uint64) uint64 {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.index.newestCommand(i)
}

// State describes the group, and is false if the log holds nothing of it.
func (g *GroupLog) State() (GroupState, bool) { return g.state() }

func (g *GroupLog) state() (GroupState, bool) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return GroupState{
		ID: g.id, Generation: g.mu.generation, Tombstoned: g.mu.tombstone,
		First: g.mu.index.first, Last: g.mu.index.last(), Bytes: g.mu.index.bytesFrom(0),
	}, g.mu.exists
}

func (g *GroupLog) trimCache(budget int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.cache.trim(budget)
}
