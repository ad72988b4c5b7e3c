package raftlog

import (
	"encoding/binary"
	"errors"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/failpoint"
)

// moveBytes is how much the compactor writes forward in one record: small
// enough not to delay the batch that it shares.
const moveBytes = 256 << 10

// runCompactor removes segments without live entries and rewrites the remains
// of the oldest one when the files hold too much garbage (RL6, RL7).
//
// Cost: the log is cleaned in a circle. A round rewrites at most the live bytes
// and frees at least as much garbage, so that it at most doubles what is written.
func (l *Log) runCompactor() {
	defer l.wg.Done()
	for {
		select {
		case <-l.stop:
			return
		case <-l.kick:
		}
		for l.compactOnce() {
			select {
			case <-l.stop:
				return
			default:
			}
		}
	}
}

// compactOnce does one step and says whether there may be another.
func (l *Log) compactOnce() bool {
	if l.Err() != nil {
		return false
	}
	l.mu.RLock()
	var oldest *segment
	if len(l.mu.segments) > 1 {
		oldest = l.mu.segments[0]
	}
	l.mu.RUnlock()
	if oldest == nil {
		return false
	}
	if oldest.live.Load() == 0 {
		return l.removeOldest(oldest)
	}
	st := l.Space()
	if st.FileBytes <= 2*st.LiveBytes+l.opt.GarbageBytes || oldest.damaged.Load() {
		return false
	}
	return l.moveForward(oldest)
}

// removeOldest deletes a segment without live entries. The directory is synced
// each time, so that a crash never leaves a gap between segments.
func (l *Log) removeOldest(s *segment) bool {
	l.mu.Lock()
	if len(l.mu.segments) < 2 || l.mu.segments[0] != s {
		l.mu.Unlock()
		return false
	}
	l.mu.segments = l.mu.segments[1:]
	n := len(l.mu.segments)
	l.mu.Unlock()
	failpoint.Hit("raftlog.remove-segment.begin")
	err := l.opt.FS.Remove(s.path)
	failpoint.Hit("raftlog.remove-segment.before-sync")
	if err == nil {
		err = l.opt.FS.SyncDir(l.dir)
	}
	if err == nil {
		err = s.release()
	}
	if err != nil {
		_ = l.fail("removing "+s.path, err)
		return false
	}
	l.opt.Metrics.segments(n)
	return true
}

// moveForward copies the live entries of a segment into the active one.
func (l *Log) moveForward(s *segment) bool {
	for _, g := range l.allGroups() {
		moves := g.entriesIn(s.id)
		for len(moves) > 0 {
			n, ok := l.moveSome(s, g, moves)
			if !ok {
				return false
			}
			moves = moves[n:]
		}
	}
	return true
}

// entriesIn lists the group's live entries in a segment.
func (g *GroupLog) entriesIn(seg uint32) []move {
	g.mu.RLock()
	defer g.mu.RUnlock()
	var moves []move
	for k, s := range g.mu.index.slots {
		if s.seg == seg {
			moves = append(moves, move{index: g.mu.index.first + uint64(k), old: s})
		}
	}
	return moves
}

// moveSome writes one record of copies and says how many of the moves it took,
// and false if the compactor should stop. Copies that are out of date are
// dropped as a whole: the next round lists again what is still live.
func (l *Log) moveSome(s *segment, g *GroupLog, moves []move) (int, bool) {
	size, n := 4, 0
	for n < len(moves) && (n == 0 || size+int(moves[n].old.len) <= moveBytes) {
		size += int(moves[n].old.len)
		n++
	}
	o := newOp(opMove, g, recMoved, size)
	o.buf = binary.LittleEndian.AppendUint32(o.buf, uint32(n))
	for k := range moves[:n] {
		m := &moves[k]
		var e raft.Log
		b, err := g.readEntry(s, m.old, m.index, &e)
		if err != nil {
			return 0, false
		}
		m.copyOff = len(o.buf) - recordHeaderBytes
		o.buf = append(o.buf, b...)
	}
	o.moves = moves[:n]
	failpoint.Hit("raftlog.move.before-write")
	err := l.do(o.seal())
	failpoint.Hit("raftlog.move.written")
	if err != nil && !errors.Is(err, errMoved) {
		// A tombstone, too, means that the entries are dead: only a dead or
		// closed log ends the round for good, and compactOnce sees that.
		return n, l.Err() == nil && !l.queueClosed()
	}
	l.opt.Metrics.moved(size)
	return n, true
}

func (l *Log) queueClosed() bool {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	return l.queue.mu.closed
}
