package raftlog

import (
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/keelstate/keelstate/internal/failpoint"
)

// recover reads the log, mends what a crash left (RL3), makes durable what it
// accepted (RL5), and fills the memory. Nothing is changed if anything is
// damaged: the scan comes first and is read-only.
func (l *Log) recover() error {
	sc := scan{fs: l.opt.FS, dir: l.dir}
	if err := sc.run(); err != nil {
		return err
	}
	for _, path := range sc.discard {
		if err := l.opt.FS.Remove(path); err != nil {
			return fmt.Errorf("removing the unfinished segment %s: %w", path, err)
		}
	}
	if len(sc.segments) == 0 {
		return l.found()
	}
	l.ident = sc.ident
	l.commit.seq = sc.nextSeq
	if err := l.openSegments(&sc); err != nil {
		return err
	}
	if err := l.opt.FS.SyncDir(l.dir); err != nil {
		return fmt.Errorf("syncing %s: %w", l.dir, err)
	}
	l.install(&sc)
	return nil
}

// found makes the first segment of a new log.
func (l *Log) found() error {
	if _, err := rand.Read(l.ident[:]); err != nil {
		return fmt.Errorf("making the log's identity: %w", err)
	}
	if l.opt.ident != nil {
		l.ident = *l.opt.ident
	}
	l.fresh = true
	s, seq, err := l.createSegment(1, 1)
	if err != nil {
		return err
	}
	l.commit.active, l.commit.seq = s, seq
	l.mu.segments = []*segment{s}
	return nil
}

// openSegments opens all files, the last for writing. The last two are mended:
// the last because a crash may have torn it, the one before because its seal may
// be in the page cache only.
func (l *Log) openSegments(sc *scan) error {
	for k := range sc.segments {
		in := &sc.segments[k]
		last := k == len(sc.segments)-1
		mend := k >= len(sc.segments)-2
		open := l.opt.FS.Open
		if mend {
			open = l.opt.FS.OpenReadWrite
		}
		f, err := open(in.path)
		if err != nil {
			return fmt.Errorf("opening %s: %w", in.path, err)
		}
		s := newSegment(l.dir, in.id, l.ident, f)
		s.size.Store(in.end)
		l.mu.segments = append(l.mu.segments, s)
		if mend {
			if err := mendTail(s, in); err != nil {
				return err
			}
		}
		if last {
			l.commit.active, l.commit.hasBody = s, in.hasBody
			l.commit.unmarked = in.hasBody && in.lastType != recMark
		}
	}
	return nil
}

// mendTail cuts a torn tail off and writes the last unit once more (RL5).
func mendTail(s *segment, in *scannedSegment) error {
	failpoint.Hit("raftlog.recover.before-mend")
	_, err := s.file.WriteAt(in.unit, in.unitOff)
	if err == nil && in.fileSize > in.end {
		err = s.file.Truncate(in.end)
	}
	failpoint.Hit("raftlog.recover.before-sync")
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("making the tail of %s durable: %w", s.path, errors.Join(err))
	}
	return nil
}

// install fills the groups and the live counts.
func (l *Log) install(sc *scan) {
	for id, in := range sc.replay.groups {
		g := newGroupLog(l, id)
		g.mu.exists, g.mu.tombstone, g.mu.generation = true, in.tombstone, in.generation
		g.mu.index, g.mu.stable = in.index, in.stable
		g.proj = projection{
			exists: true, tombstone: in.tombstone, generation: in.generation,
			first: in.index.first, last: in.index.last(), keys: map[string]bool{},
		}
		for k := range in.stable {
			g.proj.keys[k] = true
		}
		l.mu.groups[id] = g
		for _, s := range in.index.slots {
			l.mu.segments[s.seg-sc.segments[0].id].live.Add(int64(s.len))
		}
	}
	l.kickCompactor()
	l.opt.Metrics.segments(len(l.mu.segments))
}
