package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/internal/vfs"
)

// committer is the state of the goroutine that writes. Nobody else touches it
// once Open has returned.
type committer struct {
	active *segment
	seq    uint64 // of the next record
	// unitPos is how many records were written since the last fsync: 0, or 1
	// after a mark, which waits for the next batch to be synced with it.
	unitPos uint32
	// unmarked: no mark stands after the last batch.
	unmarked bool
	// hasBody: the active segment holds more than its head.
	hasBody bool
	// filled is where the zeros end that the active segment was filled with
	// ahead of its records, 0 if it was not.
	filled int64
	batch  uint64 // number of the batch being built
	ops    []*op
	buf    []byte
}

// projection is the state of a group after all accepted ops, as far as the
// committer needs it to accept more.
type projection struct {
	exists     bool
	tombstone  bool
	generation uint64
	first      uint64
	last       uint64
	keys       map[string]bool
	// touched is the last batch that changed the group's entries; a move in the
	// same batch cannot trust the index.
	touched uint64
}

func (l *Log) runCommitter() {
	defer l.wg.Done()
	defer close(l.stop)
	c := &l.commit
	mark := time.NewTimer(time.Hour)
	defer mark.Stop()
	for {
		mark.Stop()
		if c.unmarked && l.opt.MarkDelay > 0 {
			mark.Reset(l.opt.MarkDelay)
		}
		select {
		case <-l.queue.wake:
		case <-mark.C:
			l.writeMark()
		}
		for {
			var closed bool
			c.ops, closed = l.queue.take(c.ops[:0])
			if len(c.ops) > 0 {
				l.commitAll(c.ops)
				clear(c.ops)
				continue
			}
			if closed {
				l.finish()
				return
			}
			break
		}
	}
}

// finish makes the tail provable before the files are closed, and cuts off what
// was filled ahead.
func (l *Log) finish() {
	l.writeMark()
	if l.Err() == nil {
		_ = l.trim()
	}
	if l.Err() == nil && l.commit.unitPos > 0 {
		if err := l.commit.active.file.SyncData(); err != nil {
			_ = l.fail("syncing "+l.commit.active.path, err)
		}
	}
}

// commitAll cuts the ops into batches and commits them in order.
func (l *Log) commitAll(ops []*op) {
	for start := 0; start < len(ops); {
		bytes, end := 0, start
		for end < len(ops) && (end == start || bytes+len(ops[end].buf) <= l.opt.MaxBatchBytes) {
			bytes += len(ops[end].buf)
			end++
		}
		batch := ops[start:end]
		if err := l.commitBatch(batch); err != nil {
			for _, o := range batch {
				o.err = err
			}
		}
		for _, o := range batch {
			o.done <- struct{}{}
		}
		start = end
	}
}

// commitBatch writes, syncs and applies one batch. An error is the whole log's;
// what only one op got wrong is in its err.
func (l *Log) commitBatch(ops []*op) error {
	if err := l.Err(); err != nil {
		return err
	}
	c := &l.commit
	c.batch++
	rolled := c.hasBody && c.active.size.Load() >= l.opt.SegmentBytes
	if rolled {
		if err := l.roll(); err != nil {
			return err
		}
	}
	data, records := l.assemble(ops)
	if records > 0 {
		if err := l.writeAndSync(data, records); err != nil {
			return err
		}
	}
	freed := rolled
	for _, o := range ops {
		if o.err == nil && !o.skip {
			freed = l.apply(o) || freed
		}
	}
	if freed {
		l.kickCompactor()
	}
	return nil
}

// assemble accepts or refuses each op and lays the accepted records out.
func (l *Log) assemble(ops []*op) (data []byte, records int) {
	c := &l.commit
	off := uint32(c.active.size.Load())
	data = c.buf[:0]
	for _, o := range ops {
		if l.accept(o); o.err != nil || o.skip {
			continue
		}
		putRecordHeader(o.buf, record{
			typ: o.typ, group: o.g.id, seq: c.seq, unitPos: c.unitPos,
			payloadLen: o.payloadLen, payloadCRC: o.payloadCRC,
		}, c.active.salt)
		o.off = off
		off += uint32(len(o.buf))
		c.seq++
		c.unitPos++
		records++
		if len(ops) == 1 {
			return o.buf, 1 // no copy where one record is the batch
		}
		data = append(data, o.buf...)
	}
	const keep = 8 << 20
	if cap(data) <= keep {
		c.buf = data
	}
	return data, records
}

// writeAndSync is the one write and the one fsync of a batch (RL1, RL2).
func (l *Log) writeAndSync(data []byte, records int) error {
	c := &l.commit
	start := time.Since(l.base)
	l.inflight.Store(max(int64(start), 1))
	defer l.inflight.Store(0)
	off := c.active.size.Load()
	doing := fmt.Sprintf("writing %d bytes to %s at %d", len(data), c.active.path, off)
	err := l.withSpace(doing, func() error {
		if err := failpoint.Err("raftlog.append.before-write"); err != nil {
			return err
		}
		_, err := c.active.file.WriteAt(data, off)
		return err
	})
	if err != nil {
		return err
	}
	if err := l.fillAhead(off+int64(len(data)), len(data)); err != nil {
		return err
	}
	if err = failpoint.Err("raftlog.append.before-sync"); err == nil {
		err = c.active.file.SyncData()
	}
	if err != nil {
		return l.fail("syncing "+c.active.path, err)
	}
	failpoint.Hit("raftlog.append.after-sync")
	c.active.size.Store(off + int64(len(data)))
	c.unitPos, c.unmarked, c.hasBody = 0, true, true
	l.opt.Metrics.batch(time.Since(l.base)-start, records, len(data))
	return nil
}

var zeros [MaxPreallocateBytes]byte

// fillAhead fills the active segment with zeros from end on, once a small batch
// has gone beyond what was filled: a sync of what lies within the file need not
// make a new size durable, which costs more than the data. Large batches
// would pay for it by being written twice.
func (l *Log) fillAhead(end int64, batch int) error {
	c := &l.commit
	n := min(l.opt.PreallocateBytes, l.opt.SegmentBytes-end)
	if end <= c.filled || n <= 0 || int64(batch) > l.opt.PreallocateBytes/4 {
		return nil
	}
	c.filled = end + n
	_, err := c.active.file.WriteAt(zeros[:n], end)
	if err != nil && !errors.Is(err, syscall.ENOSPC) { // records may still fit where zeros do not
		return l.fail(fmt.Sprintf("filling %s ahead from %d", c.active.path, end), err)
	}
	return nil
}

// trim cuts off what the active segment was filled with ahead.
func (l *Log) trim() error {
	c := &l.commit
	if c.filled <= c.active.size.Load() {
		return nil
	}
	if err := c.active.file.Truncate(c.active.size.Load()); err != nil {
		return l.fail("trimming "+c.active.path, err)
	}
	c.filled = 0
	return nil
}

// writeMark appends a mark if the last batch has none. It is not synced: it
// belongs to the fsync of the next batch (its unit), and if it is lost only the
// proof is lost.
func (l *Log) writeMark() {
	c := &l.commit
	if !c.unmarked || l.Err() != nil {
		return
	}
	b := controlRecord(recMark, l.ident, c.active.salt, c.seq, c.unitPos, nil)
	l.inflight.Store(max(int64(time.Since(l.base)), 1))
	defer l.inflight.Store(0)
	off := c.active.size.Load()
	failpoint.Hit("raftlog.mark.before-write")
	if _, err := c.active.file.WriteAt(b, off); errors.Is(err, syscall.ENOSPC) {
		return // the next batch waits for space; a mark proves only what is there
	} else if err != nil {
		_ = l.fail(fmt.Sprintf("writing a mark to %s at %d", c.active.path, off), err)
		return
	}
	c.active.size.Store(off + int64(len(b)))
	c.seq++
	c.unitPos++
	c.unmarked = false
}

// controlRecord encodes a record that belongs to no call.
func controlRecord(typ recordType, ident logID, segmentSalt uint32, seq uint64, unitPos uint32, payload []byte) []byte {
	return imageRecord(typ, 0, ident, segmentSalt, seq, unitPos, payload)
}

func imageRecord(typ recordType, g base.GroupID, ident logID, segmentSalt uint32, seq uint64, unitPos uint32, payload []byte) []byte {
	b := make([]byte, recordHeaderBytes+pad(len(payload)))
	copy(b[recordHeaderBytes:], payload)
	putRecordHeader(b, record{
		typ: typ, group: g, seq: seq, unitPos: unitPos, payloadLen: len(payload),
		payloadCRC: crc32.Update(ident.salt(0), castagnoli, payload),
	}, segmentSalt)
	return b
}

// roll begins a new segment. Order matters (RL6): the new file with the state of
// every group is durable, with its name, before the old one is sealed; and the
// old one is sealed before anything that a caller waits for is in the new one.
// A crash in between leaves an unsealed segment and a successor that holds only
// a head, which recovery discards.
func (l *Log) roll() error {
	c := &l.commit
	l.inflight.Store(max(int64(time.Since(l.base)), 1))
	defer l.inflight.Store(0)
	old := c.active
	failpoint.Hit("raftlog.rotate.begin")
	seal := controlRecord(recSeal, l.ident, old.salt, c.seq, c.unitPos, nil)
	next, seq, err := l.createSegment(old.id+1, c.seq+1)
	if err != nil {
		return err
	}
	failpoint.Hit("raftlog.rotate.head-made")
	if err := l.trim(); err != nil {
		return err
	}
	failpoint.Hit("raftlog.rotate.before-seal")
	if err := l.withSpace("sealing "+old.path, func() error { _, err := old.file.WriteAt(seal, old.size.Load()); return err }); err != nil {
		return err
	}
	failpoint.Hit("raftlog.rotate.before-seal-sync")
	if err := old.file.SyncData(); err != nil {
		return l.fail("syncing "+old.path, err)
	}
	failpoint.Hit("raftlog.rotate.sealed")
	old.size.Add(int64(len(seal)))
	c.active, c.seq, c.unitPos, c.unmarked, c.hasBody, c.filled = next, seq, 0, false, false, 0
	l.mu.Lock()
	l.mu.segments = append(l.mu.segments, next)
	n := len(l.mu.segments)
	l.mu.Unlock()
	l.opt.Metrics.segments(n)
	return nil
}

// createSegment makes a segment durable that holds the head alone, and returns
// the sequence number that follows. The caller owns the groups' state: it is the
// committer, or Open before the committer runs.
func (l *Log) createSegment(id uint32, seq uint64) (*segment, uint64, error) {
	path := filepath.Join(l.dir, segmentName(id))
	var f vfs.File
	err := l.withSpace("creating "+path, func() (err error) { f, err = l.opt.FS.Create(path); return err })
	if err != nil {
		return nil, 0, err
	}
	s := newSegment(l.dir, id, l.ident, f)
	data := encodeSegmentHeader(l.ident, id)
	var unit uint32
	for _, g := range l.allGroups() {
		im, ok := g.image()
		if !ok {
			continue
		}
		data = append(data, imageRecord(recState, g.id, l.ident, s.salt, seq, unit, appendImage(nil, im))...)
		seq, unit = seq+1, unit+1
	}
	count := binary.LittleEndian.AppendUint64(nil, uint64(unit))
	data = append(data, controlRecord(recHeadEnd, l.ident, s.salt, seq, unit, count)...)
	doing := "writing the head of " + path
	if err := l.withSpace(doing, func() error { _, err := f.WriteAt(data, 0); return err }); err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	if err = failpoint.Err("raftlog.head.before-sync"); err == nil {
		err = f.Sync()
	}
	if err == nil {
		failpoint.Hit("raftlog.head.before-dir-sync")
		err = l.opt.FS.SyncDir(l.dir)
	}
	if err != nil {
		_ = f.Close()
		return nil, 0, l.fail(doing, err)
	}
	s.size.Store(int64(len(data)))
	return s, seq + 1, nil
}

// image is the durable state of the group for the head of a segment. Only the
// committer writes what it reads, so it needs no lock there.
func (g *GroupLog) image() (groupImage, bool) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return groupImage{
		generation: g.mu.generation, tombstone: g.mu.tombstone,
		first: g.mu.index.first, last: g.mu.index.last(), stable: g.mu.stable,
	}, g.mu.exists
}

// apply makes a durable op visible and says whether it freed space.
func (l *Log) apply(o *op) (freed bool) {
	g := o.g
	var gone []segBytes
	g.mu.Lock()
	g.mu.exists = true
	switch o.kind {
	case opAppend:
		l.applyAppend(o)
	case opMove:
		gone = l.applyMove(o)
	case opDelete:
		gone = g.mu.index.remove(o.lo, o.hi)
		g.mu.cache.remove(o.lo, o.hi)
	case opStable:
		g.mu.stable[o.key] = o.val
	case opCreate:
		g.mu.generation, g.mu.tombstone = o.gen, false
	case opTombstone:
		if len(g.mu.index.slots) > 0 {
			gone = g.mu.index.remove(g.mu.index.first, g.mu.index.last())
		}
		g.mu.cache.clear()
		g.mu.stable, g.mu.tombstone = map[string][]byte{}, true
	}
	g.mu.Unlock()
	l.release(gone)
	return len(gone) > 0
}

// applyAppend needs the group's lock.
func (l *Log) applyAppend(o *op) {
	g := o.g
	off := o.off + recordHeaderBytes + 4
	budget := int(l.cacheShare.Load())
	for _, e := range o.logs {
		n := uint32(entrySize(e))
		g.mu.index.push(e.Index, slot{seg: l.commit.active.id, off: off, len: n}, e.Type == raft.LogCommand)
		off += n
		if budget > 0 {
			g.mu.cache.push(e, budget)
		}
	}
	l.commit.active.live.Add(int64(off - o.off - recordHeaderBytes - 4))
}

// applyMove needs the group's lock.
func (l *Log) applyMove(o *op) []segBytes {
	var gone []segBytes
	for _, m := range o.moves {
		s := o.g.mu.index.at(m.index)
		gone = append(gone, segBytes{s.seg, int64(s.len)})
		s.seg, s.off = l.commit.active.id, o.off+recordHeaderBytes+uint32(m.copyOff)
		l.commit.active.live.Add(int64(s.len))
	}
	return gone
}

// release takes bytes off the live count of segments.
func (l *Log) release(gone []segBytes) {
	for _, f := range gone {
		if s := l.segmentByID(f.seg); s != nil {
			s.live.Add(-f.bytes)
			_ = s.release() // the log itself still holds a reference
		}
	}
}
