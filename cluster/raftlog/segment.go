package raftlog

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/keelstate/keelstate/internal/vfs"
)

const segmentSuffix = ".rlog"

func segmentName(id uint32) string { return fmt.Sprintf("%08x%s", id, segmentSuffix) }

// parseSegmentName returns the number in a segment's file name.
func parseSegmentName(name string) (uint32, bool) {
	hex, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(hex) != 8 {
		return 0, false
	}
	n, err := strconv.ParseUint(hex, 16, 32)
	if err != nil || n == 0 || segmentName(uint32(n)) != name {
		return 0, false
	}
	return uint32(n), true
}

// segment is one file of the log.
type segment struct {
	id   uint32
	path string
	file vfs.File
	salt uint32 // of record headers

	// size is where the next record goes. Owned by the committer; others read
	// it only of segments that are no longer active.
	size atomic.Int64
	// live is the number of bytes of live entries. Only the committer changes it.
	live atomic.Int64
	// refs counts the readers plus one for being in the log; who takes it to
	// zero closes the file.
	refs atomic.Int32
	// damaged is set when a live entry could not be read; the compactor then
	// leaves the segment alone.
	damaged atomic.Bool
}

func newSegment(dir string, id uint32, ident logID, f vfs.File) *segment {
	s := &segment{id: id, path: filepath.Join(dir, segmentName(id)), file: f, salt: ident.salt(uint64(id))}
	s.refs.Store(1)
	return s
}

func (s *segment) acquire() { s.refs.Add(1) }

func (s *segment) release() error {
	if s.refs.Add(-1) == 0 {
		return s.file.Close()
	}
	return nil
}
