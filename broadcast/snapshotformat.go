package broadcast

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/internal/base"
)

// The snapshot format, frozen; docs/formats/system-snapshot.md has the table.
const (
	snapshotMagic     = "KSYS"
	snapshotVersion   = 1
	snapshotHeaderLen = 4 + 2 + 2 + 5*8 + 4
	// snapshotBlockTarget is the size at which the writer ends a block.
	snapshotBlockTarget = 256 << 10
	// snapshotBlockMax bounds a block for the reader.
	snapshotBlockMax   = snapshotBlockTarget + MaxKeyBytes + MaxValueBytes + 4*binary.MaxVarintLen64
	snapshotTrailerLen = 4 + 4 + 4
)

// WriteSnapshot writes the newest state; Apply goes on meanwhile.
func (s *Store) WriteSnapshot(w io.Writer) error { return s.view.Load().Write(w) }

// Write writes the whole state in the snapshot format.
func (s *Snapshot) Write(w io.Writer) error {
	sum := crc32.New(castagnoli)
	out := io.MultiWriter(w, sum)
	if _, err := out.Write(s.appendHeader(nil)); err != nil {
		return fmt.Errorf("writing the header of a system snapshot: %w", err)
	}
	var block []byte
	var err error
	flush := func() bool {
		if err = writeBlock(out, block); err != nil {
			err = fmt.Errorf("writing a block of a system snapshot: %w", err)
		}
		block = block[:0]
		return err == nil
	}
	s.tree.Scan(func(key string, e *Entry) bool {
		block = appendString(block, key)
		block = binary.AppendUvarint(block, uint64(e.CreateRevision))
		block = binary.AppendUvarint(block, uint64(e.ModRevision))
		block = appendString(block, e.Value)
		return len(block) < snapshotBlockTarget || flush()
	})
	if err == nil && len(block) > 0 {
		flush()
	}
	if err != nil {
		return err
	}
	trailer := make([]byte, 8, snapshotTrailerLen)
	copy(trailer[4:], snapshotMagic)
	sum.Write(trailer)
	trailer = binary.LittleEndian.AppendUint32(trailer, sum.Sum32())
	if _, err := w.Write(trailer); err != nil {
		return fmt.Errorf("writing the trailer of a system snapshot: %w", err)
	}
	return nil
}

func (s *Snapshot) appendHeader(b []byte) []byte {
	b = append(b, snapshotMagic...)
	b = binary.LittleEndian.AppendUint16(b, snapshotVersion)
	b = binary.LittleEndian.AppendUint16(b, 0)
	for _, v := range []uint64{s.index, uint64(s.revision), s.clock, uint64(s.compacted), uint64(s.tree.Len())} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func writeBlock(w io.Writer, block []byte) error {
	head := binary.LittleEndian.AppendUint32(nil, uint32(len(block)))
	head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(block, castagnoli))
	if _, err := w.Write(head); err != nil {
		return err
	}
	_, err := w.Write(block)
	return err
}

// Restore replaces the whole state by the one that r holds, up to its end. It
// is all or nothing (BC8). Watchers whose place the new state does not cover get
// base.ErrCompacted.
func (s *Store) Restore(r io.Reader) error {
	next, err := ReadSnapshot(r)
	if err != nil {
		return err
	}
	s.applyMu.Lock()
	defer s.applyMu.Unlock()
	s.tree = next.tree
	next.tree = s.tree.Copy()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.view.Store(next)
	s.mu.history = history{floor: next.revision}
	s.wakeLocked()
	return nil
}

// ReadSnapshot reads a state in the snapshot format, up to the end of r, and
// verifies all of it. The error wraps base.ErrFormatVersion for another version
// and base.ErrCorrupt for damage or a cut.
func ReadSnapshot(r io.Reader) (*Snapshot, error) {
	d := &snapshotReader{r: bufio.NewReaderSize(r, 64<<10)}
	s, err := d.read()
	if err != nil {
		return nil, fmt.Errorf("reading a system snapshot at offset %d: %w", d.offset, err)
	}
	return s, nil
}

// snapshotReader reads one snapshot; offset is that of the next byte.
type snapshotReader struct {
	r      *bufio.Reader
	offset int64
	sum    uint32
	buf    bytes.Buffer
	last   string
}

// next reads n bytes, which stay valid until the next call. What is allocated
// grows with what is there, not with n.
func (d *snapshotReader) next(n int) ([]byte, error) {
	d.buf.Reset()
	got, err := io.CopyN(&d.buf, d.r, int64(n))
	d.offset += got
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("the end is missing: %w", base.ErrCorrupt)
	}
	if err != nil {
		return nil, err
	}
	return d.buf.Bytes(), nil
}

func (d *snapshotReader) add(b []byte) { d.sum = crc32.Update(d.sum, castagnoli, b) }

func (d *snapshotReader) read() (*Snapshot, error) {
	s, count, err := d.header()
	if err != nil {
		return nil, err
	}
	for {
		more, err := d.block(s)
		if err != nil {
			return nil, err
		}
		if !more {
			break
		}
	}
	if uint64(s.tree.Len()) != count {
		return nil, fmt.Errorf("%d entries instead of %d: %w", s.tree.Len(), count, base.ErrCorrupt)
	}
	if _, err := d.r.ReadByte(); err == nil {
		return nil, fmt.Errorf("bytes after the end: %w", base.ErrCorrupt)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return s, nil
}

func (d *snapshotReader) header() (*Snapshot, uint64, error) {
	// Magic and version first: a later version may have another header.
	b, err := d.next(6)
	if err != nil {
		return nil, 0, err
	}
	if string(b[:4]) != snapshotMagic {
		return nil, 0, fmt.Errorf("no system snapshot: %w", base.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != snapshotVersion {
		return nil, 0, fmt.Errorf("version %d, this build knows %d: %w", v, snapshotVersion, base.ErrFormatVersion)
	}
	d.add(b)
	if b, err = d.next(snapshotHeaderLen - 6); err != nil {
		return nil, 0, err
	}
	body := b[:len(b)-4]
	d.add(body)
	if d.sum != binary.LittleEndian.Uint32(b[len(body):]) {
		return nil, 0, fmt.Errorf("checksum of the header: %w", base.ErrCorrupt)
	}
	d.add(b[len(body):])
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(body[2+8*i:]) }
	s := &Snapshot{
		tree: btree.NewMap[string, *Entry](treeDegree), index: word(0),
		revision: base.Revision(word(1)), clock: word(2), compacted: base.Revision(word(3)),
	}
	if body[0] != 0 || body[1] != 0 || s.compacted > s.revision || uint64(s.revision) > s.index {
		return nil, 0, fmt.Errorf("impossible header: %w", base.ErrCorrupt)
	}
	return s, word(4), nil
}

// block reads a block, or the trailer: then it returns false.
func (d *snapshotReader) block(s *Snapshot) (bool, error) {
	head, err := d.next(8)
	if err != nil {
		return false, err
	}
	d.add(head)
	size, sum := binary.LittleEndian.Uint32(head), binary.LittleEndian.Uint32(head[4:])
	if size == 0 {
		return false, d.trailer(string(head[4:]))
	}
	if size > snapshotBlockMax {
		return false, fmt.Errorf("a block of %d bytes: %w", size, base.ErrCorrupt)
	}
	b, err := d.next(int(size))
	if err != nil {
		return false, err
	}
	if crc32.Checksum(b, castagnoli) != sum {
		return false, fmt.Errorf("checksum of a block: %w", base.ErrCorrupt)
	}
	d.add(b)
	r := &reader{b: b}
	for len(r.b) > 0 && r.err == nil {
		d.entry(s, r)
	}
	return true, r.err
}

func (d *snapshotReader) entry(s *Snapshot, r *reader) {
	key := string(r.bytes(MaxKeyBytes))
	e := &Entry{CreateRevision: base.Revision(r.uvarint()), ModRevision: base.Revision(r.uvarint())}
	// A copy, since the block's buffer is used again; never nil.
	e.Value = append([]byte{}, r.bytes(MaxValueBytes)...)
	if r.err != nil {
		return
	}
	if key <= d.last || e.CreateRevision == 0 || e.CreateRevision > e.ModRevision || e.ModRevision > s.revision {
		r.fail("an entry out of order or with impossible revisions")
		return
	}
	d.last = key
	s.tree.Set(key, e)
}

func (d *snapshotReader) trailer(magic string) error {
	want := d.sum
	b, err := d.next(4)
	if err != nil {
		return err
	}
	if magic != snapshotMagic || binary.LittleEndian.Uint32(b) != want {
		return fmt.Errorf("checksum of the whole: %w", base.ErrCorrupt)
	}
	return nil
}
