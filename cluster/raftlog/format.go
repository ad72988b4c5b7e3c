package raftlog

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// The constants of this file are the disk format, described in
// docs/formats/raft-log.md. They are frozen: a change is a new formatVersion.
const (
	segmentMagic  = "KSRAFTLG"
	formatVersion = 1

	segmentHeaderBytes = 48
	recordHeaderBytes  = 40
	entryHeaderBytes   = 40
	recordAlign        = 8
	recordMagic        = 0x524b // "KR"

	// maxPayloadBytes bounds one record. A larger StoreLogs is cut into several
	// records; a single larger entry is refused.
	maxPayloadBytes = 64 << 20
	// maxKeyBytes, maxValueBytes and maxKeys bound the stable store of a group.
	maxKeyBytes   = 256
	maxValueBytes = 64 << 10
	maxKeys       = 64

	noTime = math.MinInt64 // the zero time.Time as appended-at
)

// recordType says what a record's payload is.
type recordType uint8

const (
	recAppend    recordType = 1 // entries that follow the group's last
	recMoved     recordType = 2 // copies of live entries, written forward
	recDelete    recordType = 3 // a prefix or suffix goes
	recStable    recordType = 4 // one stable value
	recState     recordType = 5 // a group's state, at the head of a segment
	recHeadEnd   recordType = 6 // the head of a segment is complete
	recCreate    recordType = 7 // a group comes, empty, under a generation
	recTombstone recordType = 8 // a group goes for ever
	recMark      recordType = 9 // proves that all before it was durable
	recSeal      recordType = 10
)

func (t recordType) String() string {
	names := [...]string{"", "append", "moved", "delete", "stable", "state", "head-end", "create", "tombstone", "mark", "seal"}
	if t == 0 || int(t) >= len(names) {
		return fmt.Sprintf("type-%d", uint8(t))
	}
	return names[t]
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// logID is the random identity of a log, equal in all its segments. It salts
// every checksum, so that no bytes of another log, and none that a user stored
// in an entry, ever look like a record of this one.
type logID [16]byte

func (id logID) String() string { return fmt.Sprintf("%x", id[:]) }

// salt is the start value of checksums over what n stands for.
func (id logID) salt(n uint64) uint32 {
	var b [24]byte
	copy(b[:], id[:])
	binary.LittleEndian.PutUint64(b[16:], n)
	return crc32.Checksum(b[:], castagnoli)
}

func pad(n int) int { return (n + recordAlign - 1) &^ (recordAlign - 1) }

// encodeSegmentHeader gives the first bytes of a segment.
func encodeSegmentHeader(id logID, segment uint32) []byte {
	b := make([]byte, segmentHeaderBytes)
	copy(b, segmentMagic)
	binary.LittleEndian.PutUint32(b[8:], formatVersion)
	binary.LittleEndian.PutUint64(b[16:], uint64(segment))
	copy(b[24:40], id[:])
	binary.LittleEndian.PutUint32(b[44:], crc32.Checksum(b[:44], castagnoli))
	return b
}

// decodeSegmentHeader checks the first bytes of a segment. Place and checksum
// are the same in every version, so an unknown version with a good checksum is
// told from damage.
func decodeSegmentHeader(b []byte) (id logID, segment uint32, err error) {
	if len(b) < segmentHeaderBytes {
		return id, 0, fmt.Errorf("header of %d bytes is cut short: %w", len(b), base.ErrCorrupt)
	}
	if string(b[:8]) != segmentMagic {
		return id, 0, fmt.Errorf("no raft log segment: %w", base.ErrCorrupt)
	}
	if crc32.Checksum(b[:44], castagnoli) != binary.LittleEndian.Uint32(b[44:]) {
		return id, 0, fmt.Errorf("header checksum differs: %w", base.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != formatVersion {
		return id, 0, fmt.Errorf("raft log format %d, this build knows %d: %w", v, formatVersion, base.ErrFormatVersion)
	}
	n := binary.LittleEndian.Uint64(b[16:])
	if n == 0 || n > math.MaxUint32 {
		return id, 0, fmt.Errorf("segment number %d: %w", n, base.ErrCorrupt)
	}
	copy(id[:], b[24:40])
	return id, uint32(n), nil
}

// record is one decoded record header.
type record struct {
	typ        recordType
	group      base.GroupID
	seq        uint64 // counts all records of the log
	unitPos    uint32 // records before this one that the same fsync covers
	payloadLen int
	payloadCRC uint32
}

// unitStart is the sequence number of the first record of the same fsync.
func (r record) unitStart() uint64 { return r.seq - uint64(r.unitPos) }

// size is the number of bytes on disk, with padding.
func (r record) size() int { return recordHeaderBytes + pad(r.payloadLen) }

// putRecordHeader fills the header of a record whose payload checksum is known.
func putRecordHeader(b []byte, r record, segmentSalt uint32) {
	le := binary.LittleEndian
	le.PutUint16(b, recordMagic)
	b[2], b[3] = byte(r.typ), 0
	le.PutUint32(b[4:], uint32(r.payloadLen))
	le.PutUint64(b[8:], r.seq)
	le.PutUint64(b[16:], uint64(r.group))
	le.PutUint32(b[24:], r.unitPos)
	le.PutUint32(b[28:], r.payloadCRC)
	le.PutUint32(b[32:], 0)
	le.PutUint32(b[36:], crc32.Update(segmentSalt, castagnoli, b[:36]))
}

// parseRecordHeader decodes a header, and says what is wrong with it.
func parseRecordHeader(b []byte, segmentSalt uint32) (record, string) {
	le := binary.LittleEndian
	if len(b) < recordHeaderBytes {
		return record{}, "record header is cut short"
	}
	if le.Uint16(b) != recordMagic {
		return record{}, "no record begins here"
	}
	if crc32.Update(segmentSalt, castagnoli, b[:36]) != le.Uint32(b[36:]) {
		return record{}, "record header checksum differs"
	}
	n := le.Uint32(b[4:])
	r := record{
		typ: recordType(b[2]), group: base.GroupID(le.Uint64(b[16:])), seq: le.Uint64(b[8:]),
		unitPos: le.Uint32(b[24:]), payloadLen: int(n), payloadCRC: le.Uint32(b[28:]),
	}
	if n > maxPayloadBytes || b[3] != 0 || le.Uint32(b[32:]) != 0 || uint64(r.unitPos) > r.seq {
		return record{}, "record header is out of bounds"
	}
	return r, ""
}

// parseRecord decodes the record at the start of b with its payload.
func parseRecord(b []byte, segmentSalt, payloadSalt uint32) (record, []byte, string) {
	r, bad := parseRecordHeader(b, segmentSalt)
	if bad != "" {
		return r, nil, bad
	}
	if len(b) < r.size() {
		return r, nil, "record is cut short"
	}
	payload := b[recordHeaderBytes : recordHeaderBytes+r.payloadLen]
	if crc32.Update(payloadSalt, castagnoli, payload) != r.payloadCRC {
		return r, nil, "record payload checksum differs"
	}
	for _, z := range b[recordHeaderBytes+r.payloadLen : r.size()] {
		if z != 0 {
			return r, nil, "record padding is not zero"
		}
	}
	return r, payload, ""
}

func entrySize(l *raft.Log) int { return entryHeaderBytes + len(l.Data) + len(l.Extensions) }

// appendEntry encodes one entry. groupSalt binds it to its log and group.
func appendEntry(b []byte, l *raft.Log, groupSalt uint32) []byte {
	le := binary.LittleEndian
	start := len(b)
	at := int64(noTime)
	if !l.AppendedAt.IsZero() {
		at = l.AppendedAt.UnixNano()
	}
	var h [entryHeaderBytes]byte
	h[4] = byte(l.Type)
	le.PutUint64(h[8:], l.Index)
	le.PutUint64(h[16:], l.Term)
	le.PutUint64(h[24:], uint64(at))
	le.PutUint32(h[32:], uint32(len(l.Data)))
	le.PutUint32(h[36:], uint32(len(l.Extensions)))
	b = append(b, h[:]...)
	b = append(b, l.Data...)
	b = append(b, l.Extensions...)
	le.PutUint32(b[start:], crc32.Update(groupSalt, castagnoli, b[start+4:]))
	return b
}

// entryHead is the part of an entry that the index needs.
type entryHead struct {
	index uint64
	term  uint64
	typ   raft.LogType
	size  int // with the header
}

// parseEntryHead decodes the head of the first entry in b and checks that the
// whole entry is in b.
func parseEntryHead(b []byte) (entryHead, error) {
	le := binary.LittleEndian
	if len(b) < entryHeaderBytes {
		return entryHead{}, fmt.Errorf("entry header is cut short: %w", base.ErrCorrupt)
	}
	size := uint64(entryHeaderBytes) + uint64(le.Uint32(b[32:])) + uint64(le.Uint32(b[36:]))
	h := entryHead{index: le.Uint64(b[8:]), term: le.Uint64(b[16:]), typ: raft.LogType(b[4])}
	if size > uint64(len(b)) || b[5]|b[6]|b[7] != 0 || h.index == 0 {
		return entryHead{}, fmt.Errorf("entry header is out of bounds: %w", base.ErrCorrupt)
	}
	h.size = int(size)
	return h, nil
}

// decodeEntry decodes b, exactly one entry, into out. out aliases b.
func decodeEntry(b []byte, groupSalt uint32, out *raft.Log) error {
	h, err := parseEntryHead(b)
	if err != nil {
		return err
	}
	if h.size != len(b) || crc32.Update(groupSalt, castagnoli, b[4:]) != binary.LittleEndian.Uint32(b) {
		return fmt.Errorf("entry checksum differs: %w", base.ErrCorrupt)
	}
	dataLen := int(binary.LittleEndian.Uint32(b[32:]))
	*out = raft.Log{Index: h.index, Term: h.term, Type: h.typ}
	if at := int64(binary.LittleEndian.Uint64(b[24:])); at != noTime {
		out.AppendedAt = time.Unix(0, at)
	}
	data := b[entryHeaderBytes:]
	if dataLen > 0 {
		out.Data = data[:dataLen:dataLen]
	}
	if dataLen < len(data) {
		out.Extensions = data[dataLen:]
	}
	return nil
}

// walkEntries calls f for each entry of an append or moved payload, with its
// offset in the payload.
func walkEntries(payload []byte, f func(off int, h entryHead) error) error {
	if len(payload) < 4 {
		return fmt.Errorf("entries payload is cut short: %w", base.ErrCorrupt)
	}
	count := binary.LittleEndian.Uint32(payload)
	off := 4
	for i := uint32(0); i < count; i++ {
		h, err := parseEntryHead(payload[off:])
		if err != nil {
			return err
		}
		if err := f(off, h); err != nil {
			return err
		}
		off += h.size
	}
	if off != len(payload) {
		return fmt.Errorf("%d bytes after the last entry: %w", len(payload)-off, base.ErrCorrupt)
	}
	return nil
}

func appendKV(b []byte, key string, val []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(len(key)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(val)))
	b = append(b, key...)
	return append(b, val...)
}

// parseKV decodes one stable value and returns the rest.
func parseKV(b []byte) (key string, val, rest []byte, err error) {
	if len(b) < 6 {
		return "", nil, nil, fmt.Errorf("stable value is cut short: %w", base.ErrCorrupt)
	}
	k, v := int(binary.LittleEndian.Uint16(b)), uint64(binary.LittleEndian.Uint32(b[2:]))
	if k == 0 || k > maxKeyBytes || v > maxValueBytes || uint64(len(b)-6) < uint64(k)+v {
		return "", nil, nil, fmt.Errorf("stable value is out of bounds: %w", base.ErrCorrupt)
	}
	b = b[6:]
	return string(b[:k]), append([]byte{}, b[k:k+int(v)]...), b[k+int(v):], nil
}

// groupImage is the state of a group as the head of a segment holds it.
type groupImage struct {
	generation uint64
	tombstone  bool
	first      uint64 // 0: no entries
	last       uint64
	stable     map[string][]byte
}

const imageFixedBytes = 32

func appendImage(b []byte, im groupImage) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, im.generation)
	b = le.AppendUint64(b, im.first)
	b = le.AppendUint64(b, im.last)
	flags := uint32(0)
	if im.tombstone {
		flags = 1
	}
	b = le.AppendUint32(b, flags)
	b = le.AppendUint32(b, uint32(len(im.stable)))
	for _, k := range sortedKeys(im.stable) {
		b = appendKV(b, k, im.stable[k])
	}
	return b
}

func parseImage(b []byte) (groupImage, error) {
	le := binary.LittleEndian
	if len(b) < imageFixedBytes {
		return groupImage{}, fmt.Errorf("group state is cut short: %w", base.ErrCorrupt)
	}
	im := groupImage{generation: le.Uint64(b), first: le.Uint64(b[8:]), last: le.Uint64(b[16:]), stable: map[string][]byte{}}
	flags, keys := le.Uint32(b[24:]), le.Uint32(b[28:])
	im.tombstone = flags&1 != 0
	if flags > 1 || keys > maxKeys || im.last < im.first || (im.first == 0) != (im.last == 0) ||
		im.last-im.first >= maxEntries {
		return groupImage{}, fmt.Errorf("group state is out of bounds: %w", base.ErrCorrupt)
	}
	b = b[imageFixedBytes:]
	for range keys {
		k, v, rest, err := parseKV(b)
		if err != nil {
			return groupImage{}, err
		}
		im.stable[k], b = v, rest
	}
	if len(b) != 0 || len(im.stable) != int(keys) {
		return groupImage{}, fmt.Errorf("group state has a wrong length: %w", base.ErrCorrupt)
	}
	return im, nil
}

func parseRange(payload []byte) (lo, hi uint64, err error) {
	if len(payload) != 16 {
		return 0, 0, fmt.Errorf("delete payload of %d bytes: %w", len(payload), base.ErrCorrupt)
	}
	return binary.LittleEndian.Uint64(payload), binary.LittleEndian.Uint64(payload[8:]), nil
}

func parseUint64(payload []byte) (uint64, error) {
	if len(payload) != 8 {
		return 0, fmt.Errorf("payload of %d bytes, not 8: %w", len(payload), base.ErrCorrupt)
	}
	return binary.LittleEndian.Uint64(payload), nil
}
