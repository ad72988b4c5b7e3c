package raftlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"sort"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// scannedSegment is what a scan found out about one file.
type scannedSegment struct {
	id       uint32
	path     string
	fileSize int64
	end      int64 // after the last valid record
	unitOff  int64 // where the last unit (fsync) begins
	unit     []byte
	sealed   bool
	hasBody  bool
	lastType recordType
	torn     string // why the bytes after end are not a record; "" if there are none
}

// scan reads a whole log without changing it. It is the one reader behind Open,
// Dump and Verify.
type scan struct {
	fs       vfs.FS
	dir      string
	ident    logID
	segments []scannedSegment
	discard  []string // files of a segment whose creation a crash cut short
	nextSeq  uint64
	records  int
	replay   replay
	// visit, if not nil, sees every valid record.
	visit func(s *scannedSegment, off int64, r record, payload []byte)
}

// corruptAt names file and offset (RL3).
func corruptAt(path string, off int64, format string, args ...any) error {
	return fmt.Errorf("%s at offset %d: %s: %w", path, off, fmt.Sprintf(format, args...), base.ErrCorrupt)
}

// listSegments returns the segment numbers in dir, in order. A missing one in the
// middle is damage.
func listSegments(fsys vfs.FS, dir string) ([]uint32, error) {
	names, err := fsys.List(dir)
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", dir, err)
	}
	var ids []uint32
	for _, name := range names {
		if id, ok := parseSegmentName(name); ok {
			ids = append(ids, id)
		}
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	for k := 1; k < len(ids); k++ {
		if ids[k] != ids[k-1]+1 {
			return nil, corruptAt(filepath.Join(dir, segmentName(ids[k-1]+1)), 0, "segment is missing")
		}
	}
	return ids, nil
}

func readFile(fsys vfs.FS, path string) (data []byte, err error) {
	f, err := fsys.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	size, err := f.Size()
	if err != nil {
		return nil, fmt.Errorf("sizing %s: %w", path, err)
	}
	const maxFile = 3 << 30 // a segment ends at 1 GiB plus one batch
	if size > maxFile {
		return nil, corruptAt(path, maxFile, "file of %d bytes is no segment", size)
	}
	data = make([]byte, size)
	if n, err := f.ReadAt(data, 0); err != nil && !(errors.Is(err, io.EOF) && int64(n) == size) {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return data, nil
}

// run reads all segments in order. An empty directory is an empty log.
func (sc *scan) run() error {
	sc.replay.groups = map[base.GroupID]*replayGroup{}
	ids, err := listSegments(sc.fs, sc.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for k := 0; k < len(ids); k++ {
		path := filepath.Join(sc.dir, segmentName(ids[k]))
		data, err := readFile(sc.fs, path)
		if err != nil {
			return err
		}
		if len(ids) == 1 && ids[0] == 1 && tornFirstSegment(data) {
			sc.discard = append(sc.discard, path)
			return nil
		}
		rest := ids[k+1:]
		s, err := sc.segment(path, ids[k], k == 0, data, len(rest))
		if err != nil {
			return err
		}
		sc.segments = append(sc.segments, s)
		if s.sealed && len(rest) == 0 {
			return corruptAt(filepath.Join(sc.dir, segmentName(s.id+1)), 0, "segment is missing: its predecessor is sealed")
		}
		if !s.sealed && len(rest) == 1 {
			sc.discard = append(sc.discard, filepath.Join(sc.dir, segmentName(rest[0])))
			break
		}
	}
	return sc.replay.finish(sc.dir)
}

// tornFirstSegment says that a crash cut the creation of the first segment
// short: it never held anything that a caller had waited for.
func tornFirstSegment(data []byte) bool {
	const whole = segmentHeaderBytes + recordHeaderBytes + 8
	if len(data) > whole {
		return false
	}
	ident, id, err := decodeSegmentHeader(data)
	if err != nil {
		return !errors.Is(err, base.ErrFormatVersion)
	}
	_, _, bad := parseRecord(data[segmentHeaderBytes:], ident.salt(uint64(id)), ident.salt(0))
	return bad != ""
}

// segment reads one segment; after is the number of files behind it.
func (sc *scan) segment(path string, id uint32, oldest bool, data []byte, after int) (scannedSegment, error) {
	s := scannedSegment{id: id, path: path, fileSize: int64(len(data))}
	ident, number, err := decodeSegmentHeader(data)
	if err != nil {
		return s, fmt.Errorf("%s at offset 0: %w", path, err)
	}
	if number != id || (!oldest && ident != sc.ident) {
		return s, corruptAt(path, 0, "header names segment %d of log %s", number, ident)
	}
	sc.ident = ident
	salt, payloadSalt := ident.salt(uint64(id)), ident.salt(0)
	headDone, first := false, oldest
	prevUnit := uint32(0)
	off := segmentHeaderBytes
	for !s.sealed && off < len(data) {
		r, payload, bad := parseRecord(data[off:], salt, payloadSalt)
		if bad == "" && !first {
			bad = sc.outOfOrder(r, prevUnit, off == segmentHeaderBytes)
		}
		if bad != "" {
			if err := sc.checkTorn(&s, data, off, salt, headDone, after, bad); err != nil {
				return s, err
			}
			break
		}
		if r.unitPos == 0 {
			s.unitOff = int64(off)
		}
		if err := sc.record(&s, r, payload, int64(off), oldest, &headDone); err != nil {
			return s, fmt.Errorf("%s at offset %d: %w", path, off, err)
		}
		first, prevUnit, sc.nextSeq = false, r.unitPos, r.seq+1
		off += r.size()
	}
	s.end = int64(off)
	s.unit = bytes.Clone(data[s.unitOff:s.end])
	return s, sc.checkEnd(&s, data, headDone, after, salt)
}

// outOfOrder checks the sequence number and the place in its unit.
func (sc *scan) outOfOrder(r record, prevUnit uint32, atStart bool) string {
	if r.seq != sc.nextSeq {
		return fmt.Sprintf("record %d stands where %d belongs", r.seq, sc.nextSeq)
	}
	if r.unitPos != 0 && (atStart || r.unitPos != prevUnit+1) {
		return fmt.Sprintf("record %d has place %d in its batch after place %d", r.seq, r.unitPos, prevUnit)
	}
	return ""
}

// checkTorn decides whether an invalid record is a torn tail (RL3).
func (sc *scan) checkTorn(s *scannedSegment, data []byte, off int, salt uint32, headDone bool, after int, bad string) error {
	if !headDone {
		return corruptAt(s.path, int64(off), "%s in the head", bad)
	}
	if after > 1 || (after == 1 && !sc.successorIsHead(s.id+1)) {
		return corruptAt(s.path, int64(off), "%s, and a later segment has records", bad)
	}
	for o := off; o+recordHeaderBytes <= len(data); o += recordAlign {
		if r, b := parseRecordHeader(data[o:], salt); b == "" && r.unitStart() > sc.nextSeq {
			return corruptAt(s.path, int64(off), "%s, and a later batch stands at offset %d", bad, o)
		}
	}
	if !allZero(data[off:]) { // zeros are what was filled ahead
		s.torn = bad
	}
	return nil
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// checkEnd checks what must hold at the end of a segment.
func (sc *scan) checkEnd(s *scannedSegment, data []byte, headDone bool, after int, salt uint32) error {
	switch {
	case !headDone:
		return corruptAt(s.path, s.end, "the head is incomplete")
	case s.sealed && !allZero(data[s.end:]):
		return corruptAt(s.path, s.end, "bytes follow the seal")
	case !s.sealed && after > 1, !s.sealed && after == 1 && !sc.successorIsHead(s.id+1):
		return corruptAt(s.path, s.end, "the seal is missing, and a later segment has records")
	}
	return nil
}

// successorIsHead says that a segment holds no record beyond its head, so that
// it may have been made by a roll that a crash cut short.
func (sc *scan) successorIsHead(id uint32) bool {
	data, err := readFile(sc.fs, filepath.Join(sc.dir, segmentName(id)))
	if err != nil {
		return false
	}
	salt := sc.ident.salt(uint64(id))
	for o := segmentHeaderBytes; o+recordHeaderBytes <= len(data); o += recordAlign {
		r, bad := parseRecordHeader(data[o:], salt)
		if bad == "" && r.typ != recState && r.typ != recHeadEnd {
			return false
		}
	}
	return true
}

// record applies one valid record.
func (sc *scan) record(s *scannedSegment, r record, payload []byte, off int64, oldest bool, headDone *bool) error {
	sc.records++
	s.lastType = r.typ
	if sc.visit != nil {
		sc.visit(s, off, r, payload)
	}
	inHead := r.typ == recState || r.typ == recHeadEnd
	if inHead == *headDone {
		return fmt.Errorf("%s record in the wrong part of the segment: %w", r.typ, base.ErrCorrupt)
	}
	switch r.typ {
	case recHeadEnd:
		*headDone = true
		n, err := parseUint64(payload)
		if err == nil && n != uint64(r.unitPos) {
			err = fmt.Errorf("head counts %d groups, has %d: %w", n, r.unitPos, base.ErrCorrupt)
		}
		if err == nil && n != uint64(len(sc.replay.groups)) {
			err = fmt.Errorf("head counts %d groups, the log has %d: %w", n, len(sc.replay.groups), base.ErrCorrupt)
		}
		return err
	case recState:
		return sc.replay.state(r.group, payload, oldest)
	case recMark, recSeal:
		s.sealed = r.typ == recSeal
		s.hasBody = true
		if len(payload) != 0 {
			return fmt.Errorf("%s record with a payload: %w", r.typ, base.ErrCorrupt)
		}
		return nil
	default:
		s.hasBody = true
		return sc.replay.apply(s.id, r, payload, off+recordHeaderBytes)
	}
}

func decodeDelete(payload []byte, x *index) (lo, hi uint64, err error) {
	lo, hi, err = parseRange(payload)
	if err != nil {
		return 0, 0, err
	}
	if lo > hi || !x.has(lo) || !x.has(hi) || (lo != x.first && hi != x.last()) {
		return 0, 0, fmt.Errorf("delete of %d to %d from entries %d to %d: %w", lo, hi, x.first, x.last(), base.ErrCorrupt)
	}
	return lo, hi, nil
}
