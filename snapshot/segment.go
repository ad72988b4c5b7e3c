package snapshot

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/keelstate/keelstate/internal/base"
)

// Segment is a run of a shard's committed log. Its format is
// docs/formats/changelog-segment.md. Equal segments have equal bytes.
type Segment struct {
	Group       base.GroupID
	Birth       base.Birth
	Incarnation base.Incarnation
	// First is the index of the first entry; the others follow one by one.
	First   uint64
	Entries []LogEntry
}

// LogEntry is one entry of a log.
type LogEntry struct {
	Term uint64
	// Command is nil for an entry that is none of the shard's commands: only the
	// index advances.
	Command []byte
}

// Limits of a segment.
const (
	// MaxSegmentBytes bounds a segment as a whole, MaxEntryBytes the command of one
	// of its entries.
	MaxSegmentBytes = 64 << 20
	MaxEntryBytes   = 32 << 20
	// MaxSegmentEntries bounds its entries.
	MaxSegmentEntries = 1 << 20
)

// The constants of the format are frozen.
const (
	segmentMagic     = "KSCL"
	segmentVersion   = 1
	segmentHeadBytes = len(segmentMagic) + 1 + 8*5
	entryHeadBytes   = 1 + 8 + 4
	entryEmpty       = 0
	entryCommand     = 1
)

// EntryBytes is what an entry takes in a segment.
func EntryBytes(command []byte) int { return entryHeadBytes + len(command) }

// Last is the index of the last entry.
func (s *Segment) Last() uint64 { return s.First + uint64(len(s.Entries)) - 1 }

// validate checks what holds for every segment (SN11).
func (s *Segment) validate() error {
	switch n := len(s.Entries); {
	case s.First == 0 || n == 0 || s.First+uint64(n)-1 < s.First:
		return base.Invalid("first", fmt.Sprintf("%d entries from index %d", n, s.First))
	case n > MaxSegmentEntries:
		return tooMany("entries", MaxSegmentEntries)
	}
	term, size := uint64(1), segmentHeadBytes+sumLen
	for i := range s.Entries {
		e := &s.Entries[i]
		if e.Term < term {
			return base.Invalid("term", fmt.Sprintf("entry %d has term %d after %d", s.First+uint64(i), e.Term, term))
		}
		if len(e.Command) > MaxEntryBytes {
			return tooMany("command", MaxEntryBytes)
		}
		term = e.Term
		size += EntryBytes(e.Command)
	}
	if size > MaxSegmentBytes {
		return tooMany("segment", MaxSegmentBytes)
	}
	return nil
}

// Encode returns the bytes of the segment.
func (s *Segment) Encode() ([]byte, error) {
	if err := s.validate(); err != nil {
		return nil, fmt.Errorf("encoding changelog segment of %s: %w", s.Group, err)
	}
	size := segmentHeadBytes + sumLen
	for i := range s.Entries {
		size += EntryBytes(s.Entries[i].Command)
	}
	b := append(make([]byte, 0, size), segmentMagic...)
	b = appendU64s(append(b, segmentVersion), uint64(s.Group), uint64(s.Birth), uint64(s.Incarnation), s.First, s.Last())
	for i := range s.Entries {
		e := &s.Entries[i]
		kind := byte(entryEmpty)
		if e.Command != nil {
			kind = entryCommand
		}
		b = binary.LittleEndian.AppendUint64(append(b, kind), e.Term)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(e.Command)))
		b = append(b, e.Command...)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// DecodeSegment parses and checks a segment; the commands alias raw. Damage is
// base.ErrCorrupt, a version of a newer build base.ErrFormatVersion.
func DecodeSegment(raw []byte) (*Segment, error) {
	if len(raw) > MaxSegmentBytes {
		return nil, fmt.Errorf("decoding changelog segment: %d bytes: %w", len(raw), base.ErrCorrupt)
	}
	_, body, err := unseal("changelog segment", raw, segmentMagic, segmentVersion)
	if err != nil {
		return nil, err
	}
	d := decoder{b: body}
	s := &Segment{Group: base.GroupID(d.u64()), Birth: base.Birth(d.u64()), Incarnation: base.Incarnation(d.u64()), First: d.u64()}
	last := d.u64()
	// Each entry takes at least its head: the indexes cannot make us allocate more
	// than the segment holds.
	if d.bad || last < s.First || last-s.First >= uint64(len(d.b)/entryHeadBytes) {
		return nil, fmt.Errorf("decoding changelog segment: entries %d to %d in %d bytes: %w", s.First, last, len(d.b), base.ErrCorrupt)
	}
	s.Entries = make([]LogEntry, last-s.First+1)
	for i := range s.Entries {
		kind := d.take(1)
		e := &s.Entries[i]
		e.Term = d.u64()
		command := d.take(int(d.u32()))
		if d.bad || kind[0] > entryCommand || kind[0] == entryEmpty && len(command) > 0 {
			return nil, fmt.Errorf("decoding changelog segment: entry %d cannot be read: %w", s.First+uint64(i), base.ErrCorrupt)
		}
		if kind[0] == entryCommand {
			e.Command = command[:len(command):len(command)]
		}
	}
	if len(d.b) != 0 {
		return nil, fmt.Errorf("decoding changelog segment: %d bytes behind the last entry: %w", len(d.b), base.ErrCorrupt)
	}
	if err := s.validate(); err != nil {
		return nil, fmt.Errorf("decoding changelog segment: %v: %w", err, base.ErrCorrupt)
	}
	return s, nil
}
