package snapshot

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Changelog is the log that leads from a manifest's files to what the manifest
// describes: the files are those of an earlier moment, Base, and the segments have
// every entry after it up to the manifest's index (SN12).
type Changelog struct {
	Base Cut
	// Digest is what the shard's state must have at the manifest's index
	// (raftfsm.Machine.Digest).
	Digest [sha256.Size]byte
	// Segments are in the order of their indexes, without a gap, and not none.
	Segments []SegmentRef
}

// Cut is a moment of a shard.
type Cut struct{ Index, Term, Sequence, ClockMs uint64 }

// SegmentRef says which entries a segment has, and where it lies in an object
// store.
type SegmentRef struct {
	First, Last uint64
	Size        int64
	SHA256      [sha256.Size]byte
	// Object is empty where the segment lies in no store; it is the whole of it.
	Object string
}

// MaxSegments bounds the segments of a manifest.
const MaxSegments = 100_000

// segmentPrefix is that of a segment's file, where it is kept beside those of its
// base. No engine has such files.
const segmentPrefix = "changelog-"

// FileName is the name of the segment's file beside those of its base.
func (s *SegmentRef) FileName() string {
	return fmt.Sprintf("%s%020d-%020d", segmentPrefix, s.First, s.Last)
}

// Bytes is the size of all segments.
func (c *Changelog) Bytes() int64 {
	var n int64
	if c != nil {
		for i := range c.Segments {
			n += c.Segments[i].Size
		}
	}
	return n
}

// Cut is the moment that the manifest describes.
func (m *Manifest) Cut() Cut { return Cut{m.Index, m.Term, m.Sequence, m.ClockMs} }

// BaseManifest describes the files alone, as of their own moment; without a
// changelog it is the manifest itself.
func (m *Manifest) BaseManifest() *Manifest {
	if m.Changelog == nil {
		return m
	}
	b := *m
	at := m.Changelog.Base
	b.Index, b.Term, b.Sequence, b.ClockMs, b.Changelog = at.Index, at.Term, at.Sequence, at.ClockMs, nil
	return &b
}

// FetchManifest describes all that has to be fetched: the files, and the segments
// as files of their own (SegmentRef.FileName). It is none of a store.
func (m *Manifest) FetchManifest() *Manifest {
	if m.Changelog == nil {
		return m
	}
	b := *m.BaseManifest()
	b.Files = append([]File(nil), m.Files...)
	for i := range m.Changelog.Segments {
		s := &m.Changelog.Segments[i]
		b.Files = append(b.Files, File{Name: s.FileName(), Size: s.Size, SHA256: s.SHA256, Object: s.Object, Length: s.Size})
	}
	return &b
}

// ReadSegment reads a segment of the manifest from the directory into which it was
// fetched. base.ErrCorrupt names it if it is not what the manifest says.
func (m *Manifest) ReadSegment(dir string, s *SegmentRef) (*Segment, error) {
	raw, err := os.ReadFile(filepath.Join(dir, s.FileName()))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("it is missing: %w", base.ErrCorrupt)
		}
		return nil, fmt.Errorf("reading changelog segment %s: %w", s.FileName(), err)
	}
	return m.OpenSegment(s, raw)
}

// OpenSegment decodes the bytes of a segment of the manifest, and compares them
// with what the manifest says.
func (m *Manifest) OpenSegment(s *SegmentRef, raw []byte) (*Segment, error) {
	if int64(len(raw)) != s.Size || sha256.Sum256(raw) != s.SHA256 {
		return nil, fmt.Errorf("changelog segment %s: its bytes are not what the manifest says: %w", s.FileName(), base.ErrCorrupt)
	}
	seg, err := DecodeSegment(raw)
	if err != nil {
		return nil, fmt.Errorf("changelog segment %s: %w", s.FileName(), err)
	}
	if why := m.strange(s, seg); why != "" {
		return nil, fmt.Errorf("changelog segment %s: %s: %w", s.FileName(), why, base.ErrCorrupt)
	}
	return seg, nil
}

// strange says why a segment is not the one that the manifest names, or nothing.
func (m *Manifest) strange(s *SegmentRef, seg *Segment) string {
	switch {
	case seg.Group != m.Group || seg.Birth != m.Birth || seg.Incarnation != m.Incarnation:
		return fmt.Sprintf("it is of group %s birth %x incarnation %d", seg.Group, uint64(seg.Birth), seg.Incarnation)
	case seg.First != s.First || seg.Last() != s.Last:
		return fmt.Sprintf("it has entries %d to %d", seg.First, seg.Last())
	case seg.Entries[0].Term < m.Changelog.Base.Term || seg.Entries[len(seg.Entries)-1].Term > m.Term:
		return fmt.Sprintf("its terms are outside of %d to %d", m.Changelog.Base.Term, m.Term)
	}
	return ""
}

// placed says whether the segment can be read from a store: it lies there under its
// own name.
func (s *SegmentRef) placed() bool {
	sum, _, ok := parseObjectName(s.Object[strings.LastIndexByte(s.Object, '/')+1:])
	return ok && sum == s.SHA256 && objectstore.CheckKey(s.Object) == nil
}

// validateChangelog checks what holds for every changelog (SN12).
func (m *Manifest) validateChangelog() error {
	c := m.Changelog
	if c == nil {
		return nil
	}
	at := &c.Base
	if at.Index == 0 || at.Index >= m.Index || at.Term > m.Term || at.Sequence > m.Sequence || at.ClockMs > m.ClockMs {
		return base.Invalid("base", fmt.Sprintf("the files are of index %d of term %d, the manifest of %d of %d", at.Index, at.Term, m.Index, m.Term))
	}
	if len(c.Segments) > MaxSegments {
		return tooMany("segments", MaxSegments)
	}
	for i := range m.Files {
		if strings.HasPrefix(m.Files[i].Name, segmentPrefix) {
			return base.Invalid("files", fmt.Sprintf("%q has the name of a segment", m.Files[i].Name))
		}
	}
	next := at.Index + 1
	for i := range c.Segments {
		s := &c.Segments[i]
		if s.First != next || s.Last < s.First || s.Last == math.MaxUint64 {
			return base.Invalid("segments", fmt.Sprintf("segment %d has entries %d to %d where %d is next", i, s.First, s.Last, next))
		}
		if s.Size <= 0 || s.Size > MaxSegmentBytes || len(s.Object) > MaxObjectBytes {
			return base.Invalid("segments", fmt.Sprintf("segment %d has an impossible size or place", i))
		}
		next = s.Last + 1
	}
	if next != m.Index+1 {
		return base.Invalid("segments", fmt.Sprintf("they end at %d, the manifest is of %d", next-1, m.Index))
	}
	return nil
}

// appendChangelog appends the section of version 2.
func appendChangelog(b []byte, c *Changelog) []byte {
	b = appendU64s(b, c.Base.Index, c.Base.Term, c.Base.Sequence, c.Base.ClockMs)
	b = append(b, c.Digest[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Segments)))
	for i := range c.Segments {
		s := &c.Segments[i]
		b = appendU64s(b, s.First, s.Last, uint64(s.Size))
		b = append(b, s.SHA256[:]...)
		b = appendText(b, s.Object)
	}
	return b
}

// changelog reads the section of version 2.
func (d *decoder) changelog() (*Changelog, error) {
	c := &Changelog{Base: Cut{d.u64(), d.u64(), d.u64(), d.u64()}}
	copy(c.Digest[:], d.take(sha256.Size))
	const refMin = 8 + 8 + 8 + sha256.Size + 2
	n := int(d.u32())
	if n > MaxSegments || n*refMin > len(d.b) {
		return nil, fmt.Errorf("decoding manifest: %d segments in %d bytes: %w", n, len(d.b), base.ErrCorrupt)
	}
	c.Segments = make([]SegmentRef, n)
	for i := range c.Segments {
		s := &c.Segments[i]
		s.First, s.Last, s.Size = d.u64(), d.u64(), int64(d.u64())
		copy(s.SHA256[:], d.take(sha256.Size))
		s.Object = d.text()
	}
	return c, nil
}
