package mem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/zeebo/xxh3"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// The constants and layouts here are frozen; docs/formats/engine-mem-checkpoint.md
// describes them. All integers are big-endian.
const (
	imageMagic     = "KSMEMIMG"
	imageVersion   = 1
	imageHeaderLen = 8 + 2 + 2 + 8 + checksumLen

	blockHeaderLen = 1 + 4
	checksumLen    = 8
	// blockTarget is the size at which a block of entries is closed.
	blockTarget = 64 << 10
	// maxEntryBytes bounds a key and its value together; Write refuses more.
	maxEntryBytes = 32 << 20
	entryHeader   = 4 + 4
	maxBlock      = blockTarget + entryHeader + maxEntryBytes

	blockFamily  = 1
	blockEntries = 2
	blockEnd     = 3

	familyLen = 4 + 1 + 1 + 1 + 1 + 8
	endLen    = 4 + 8
)

func corrupt(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, base.ErrCorrupt)...)
}

// checkMagic tells another version from damage. b holds at least the magic and
// the version if the file is long enough.
func checkMagic(b []byte, magic string, version uint16) error {
	if len(b) < len(magic)+2 || string(b[:len(magic)]) != magic {
		return corrupt("no magic %q", magic)
	}
	if v := binary.BigEndian.Uint16(b[len(magic):]); v != version {
		return fmt.Errorf("version %d of %q: %w", v, magic, base.ErrFormatVersion)
	}
	return nil
}

// appendFamily appends the 16 bytes that describe a family in both files.
func appendFamily(dst []byte, f *family) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(f.id))
	dst = append(dst, byte(f.options.Use), byte(f.options.Merge), byte(f.options.GroupWidth), 0)
	return binary.BigEndian.AppendUint64(dst, f.birth)
}

func decodeFamily(b []byte) (*family, error) {
	if len(b) != familyLen {
		return nil, corrupt("family of %d bytes", len(b))
	}
	f := &family{
		id:      engine.FamilyID(binary.BigEndian.Uint32(b)),
		options: engine.FamilyOptions{Use: engine.Use(b[4]), Merge: engine.MergeKind(b[5]), GroupWidth: int(b[6])},
		birth:   binary.BigEndian.Uint64(b[8:]),
	}
	if b[7] != 0 || checkOptions(f.id, f.options) != nil {
		return nil, corrupt("family %d with options %v", f.id, f.options)
	}
	return f, nil
}

// imageWriter writes the blocks of an image. Each block's checksum starts from
// the one before it, so that blocks cannot be lost, repeated or exchanged.
type imageWriter struct {
	w     io.Writer
	chain uint64
	block []byte // header and payload of the open block of entries
}

// writeImage writes r as image number n and returns its last checksum.
func writeImage(w io.Writer, r *root, n uint64) (uint64, error) {
	iw := &imageWriter{w: w, block: make([]byte, blockHeaderLen, 2*blockTarget)}
	h := binary.BigEndian.AppendUint16([]byte(imageMagic), imageVersion)
	h = binary.BigEndian.AppendUint64(append(h, 0, 0), n)
	iw.chain = xxh3.Hash(h)
	if _, err := w.Write(binary.BigEndian.AppendUint64(h, iw.chain)); err != nil {
		return 0, err
	}
	var entries uint64
	families := sortedFamilies(r.families)
	for _, f := range families {
		if err := iw.write(blockFamily, appendFamily(make([]byte, blockHeaderLen), f)); err != nil {
			return 0, err
		}
		if err := iw.entries(f.tree); err != nil {
			return 0, err
		}
		entries += uint64(f.tree.Len())
	}
	end := binary.BigEndian.AppendUint32(make([]byte, blockHeaderLen), uint32(len(families)))
	if err := iw.write(blockEnd, binary.BigEndian.AppendUint64(end, entries)); err != nil {
		return 0, err
	}
	return iw.chain, nil
}

// entries writes a family's entries in key order, which is key-group order
// because keys start with their group.
func (iw *imageWriter) entries(t *tree) (err error) {
	t.Scan(func(it item) bool {
		n := entryHeader + len(it.key) + len(it.value)
		if len(iw.block) > blockHeaderLen && len(iw.block)+n > blockTarget {
			if err = iw.flush(); err != nil {
				return false
			}
		}
		iw.block = binary.BigEndian.AppendUint32(iw.block, uint32(len(it.key)))
		iw.block = binary.BigEndian.AppendUint32(iw.block, uint32(len(it.value)))
		iw.block = append(iw.block, it.key...)
		iw.block = append(iw.block, it.value...)
		return true
	})
	if err != nil || len(iw.block) == blockHeaderLen {
		return err
	}
	return iw.flush()
}

func (iw *imageWriter) flush() error {
	err := iw.write(blockEntries, iw.block)
	iw.block = iw.block[:blockHeaderLen]
	return err
}

// write completes a block, whose first bytes are kept free for the header.
func (iw *imageWriter) write(kind byte, b []byte) error {
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(len(b)-blockHeaderLen))
	iw.chain = xxh3.HashSeed(b, iw.chain)
	if _, err := iw.w.Write(b); err != nil {
		return err
	}
	var sum [checksumLen]byte
	binary.BigEndian.PutUint64(sum[:], iw.chain)
	_, err := iw.w.Write(sum[:])
	return err
}

// imageReader reads an image and checks everything in it.
type imageReader struct {
	r       io.Reader
	size    int64 // of the file
	left    int64 // bytes of the file that are not read yet
	chain   uint64
	buf     []byte
	visit   imageVisitor
	family  *family
	last    []byte // key of the family's last entry
	any     bool   // the family has an entry
	counted struct {
		families uint32
		entries  uint64
	}
}

// imageVisitor gets what is in an image, in order. The slices are only valid
// during the call.
type imageVisitor interface {
	startFamily(f *family)
	entry(key, value []byte)
}

// readImage reads the image of the given size and returns its number and last
// checksum. What the visitor got counts only if there is no error.
func readImage(r io.Reader, size int64, v imageVisitor) (number, sum uint64, err error) {
	ir := &imageReader{r: r, size: size, left: size, visit: v}
	h := make([]byte, min(size, imageHeaderLen))
	if err := ir.fill(h); err != nil {
		return 0, 0, err
	}
	if err := checkMagic(h, imageMagic, imageVersion); err != nil {
		return 0, 0, err
	}
	if len(h) < imageHeaderLen {
		return 0, 0, corrupt("image of %d bytes", size)
	}
	ir.chain = binary.BigEndian.Uint64(h[imageHeaderLen-checksumLen:])
	if xxh3.Hash(h[:imageHeaderLen-checksumLen]) != ir.chain || h[10] != 0 || h[11] != 0 {
		return 0, 0, corrupt("header")
	}
	number = binary.BigEndian.Uint64(h[12:])
	for {
		kind, payload, err := ir.block()
		if err != nil {
			return 0, 0, err
		}
		if kind == blockEnd {
			return number, ir.chain, ir.end(payload)
		}
		if err := ir.content(kind, payload); err != nil {
			return 0, 0, err
		}
	}
}

// fill reads the next bytes of the file into b.
func (ir *imageReader) fill(b []byte) error {
	if int64(len(b)) > ir.left {
		return corrupt("%d bytes missing", int64(len(b))-ir.left)
	}
	if _, err := io.ReadFull(ir.r, b); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return corrupt("file shorter than its size")
		}
		return fmt.Errorf("reading %d bytes: %w: %w", len(b), base.ErrDiskFailed, err)
	}
	ir.left -= int64(len(b))
	return nil
}

// block reads the next block; the payload is valid until the next call.
func (ir *imageReader) block() (kind byte, payload []byte, err error) {
	var h [blockHeaderLen]byte
	if err := ir.fill(h[:]); err != nil {
		return 0, nil, err
	}
	n := int64(binary.BigEndian.Uint32(h[1:]))
	if n > maxBlock || n+checksumLen > ir.left {
		return 0, nil, corrupt("block of %d bytes with %d left", n, ir.left)
	}
	if total := blockHeaderLen + int(n) + checksumLen; cap(ir.buf) < total {
		ir.buf = make([]byte, total)
	}
	// The checksum covers the header too, so both are in one buffer.
	body, sum := ir.buf[:blockHeaderLen+n], ir.buf[blockHeaderLen+n:blockHeaderLen+n+checksumLen]
	copy(body, h[:])
	if err := ir.fill(ir.buf[blockHeaderLen : blockHeaderLen+n+checksumLen]); err != nil {
		return 0, nil, err
	}
	ir.chain = xxh3.HashSeed(body, ir.chain)
	if ir.chain != binary.BigEndian.Uint64(sum) {
		return 0, nil, corrupt("checksum of the block at offset %d differs", ir.size-ir.left-blockHeaderLen-n-checksumLen)
	}
	return h[0], body[blockHeaderLen:], nil
}

func (ir *imageReader) content(kind byte, payload []byte) error {
	switch {
	case kind == blockFamily:
		f, err := decodeFamily(payload)
		if err != nil {
			return err
		}
		if ir.family != nil && f.id <= ir.family.id {
			return corrupt("family %d after %d", f.id, ir.family.id)
		}
		ir.family, ir.any = f, false
		ir.counted.families++
		ir.visit.startFamily(f)
		return nil
	case kind == blockEntries && ir.family != nil && len(payload) > 0:
		return ir.entries(payload)
	default:
		return corrupt("block of kind %d and %d bytes", kind, len(payload))
	}
}

func (ir *imageReader) entries(p []byte) error {
	for len(p) > 0 {
		if len(p) < entryHeader {
			return corrupt("entry of family %d cut off", ir.family.id)
		}
		kl, vl := int64(binary.BigEndian.Uint32(p)), int64(binary.BigEndian.Uint32(p[4:]))
		p = p[entryHeader:]
		if kl+vl > int64(len(p)) || kl+vl > maxEntryBytes {
			return corrupt("entry of family %d: %d and %d bytes", ir.family.id, kl, vl)
		}
		key, value := p[:kl], p[kl:kl+vl]
		if ir.any && bytes.Compare(key, ir.last) <= 0 {
			return corrupt("key %x of family %d out of order", key, ir.family.id)
		}
		ir.last, ir.any = append(ir.last[:0], key...), true
		ir.counted.entries++
		ir.visit.entry(key, value)
		p = p[kl+vl:]
	}
	return nil
}

func (ir *imageReader) end(p []byte) error {
	if len(p) != endLen || ir.left != 0 {
		return corrupt("end of %d bytes with %d after it", len(p), ir.left)
	}
	families, entries := binary.BigEndian.Uint32(p), binary.BigEndian.Uint64(p[4:])
	if families != ir.counted.families || entries != ir.counted.entries {
		return corrupt("%d families and %d entries, not %d and %d", ir.counted.families, ir.counted.entries, families, entries)
	}
	return nil
}
