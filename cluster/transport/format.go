package transport

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/keelstate/keelstate/internal/base"
)

// The constants of this file are frozen: docs/formats/node-transport.md
// describes them and the golden files pin them. A change needs a new version.

const (
	frameMagic   = 'K'
	frameVersion = 1
	headerSize   = 32
)

// frameType says what a frame's body is.
type frameType uint8

const (
	typeAppend          frameType = 1  // raft AppendEntries
	typeVote            frameType = 2  // raft RequestVote
	typePreVote         frameType = 3  // raft RequestPreVote
	typeTimeoutNow      frameType = 4  // raft TimeoutNow
	typeInstall         frameType = 5  // raft InstallSnapshot with its manifest
	typeInstallProgress frameType = 6  // receiver to sender while it prepares
	typeCall            frameType = 7  // node-level call
	typeCancel          frameType = 8  // the caller gave up on a call
	typePoll            frameType = 9  // term poll
	typeFileRequest     frameType = 10 // opens a file stream
	typeFileInfo        frameType = 11 // size of the file
	typeFileChunk       frameType = 12 // piece of the file
	typeFileEnd         frameType = 13 // the file is complete
	typePing            frameType = 14
	typePong            frameType = 15
)

// Flags of a frame.
const (
	flagResponse uint8 = 1 << 0 // answers the request with the same id
	flagError    uint8 = 1 << 1 // the body is an error
	flagsKnown         = flagResponse | flagError
)

// Size limits, in bytes, checked before anything is allocated.
const (
	// MaxAppendFrame bounds one AppendEntries frame: one entry of any size up
	// to this, or several that together stay below appendSplit.
	MaxAppendFrame = 64 << 20
	// MaxManifest bounds the manifest in an InstallSnapshot.
	MaxManifest = 16 << 20
	// MaxCall bounds the request and the answer of a node-level call.
	MaxCall = 4 << 20
	// MaxFileName bounds the name in a file request.
	MaxFileName = 1 << 10

	fileChunk        = 128 << 10
	maxSmallBody     = 16 << 10
	maxPollGroups    = 4096
	maxPollBody      = maxPollGroups*(1+8+8+8+2+maxID) + 16
	maxID            = 255 // node, replica, cluster and disk ids
	maxErrorText     = 2 << 10
	bodyReadStep     = 256 << 10
	maxConfiguration = 1 << 20
)

// maxBody returns the largest body of a frame type; 0 for a type that this
// version does not know.
func maxBody(t frameType) int {
	switch t {
	case typeAppend:
		return MaxAppendFrame
	case typeInstall:
		return MaxManifest + maxConfiguration + maxSmallBody
	case typeCall:
		return MaxCall + maxSmallBody
	case typePoll:
		return maxPollBody
	case typeFileChunk:
		return fileChunk + 8
	case typeVote, typePreVote, typeTimeoutNow, typeInstallProgress, typeCancel,
		typeFileRequest, typeFileInfo, typeFileEnd, typePing, typePong:
		return maxSmallBody
	}
	return 0
}

// frame is one message on a connection.
type frame struct {
	typ   frameType
	flags uint8
	group base.GroupID
	id    uint64
	body  []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// beginFrame returns a buffer with room for the header; the body is appended
// to it and sealFrame completes it.
func beginFrame(sizeHint int) []byte {
	return make([]byte, headerSize, headerSize+sizeHint)
}

// sealFrame writes the header over the first bytes of a buffer that beginFrame
// made. It refuses a body over the limit of its type.
func sealFrame(b []byte, f frame) error {
	n := len(b) - headerSize
	if n > maxBody(f.typ) {
		return fmt.Errorf("sealing a frame of type %d with %d bytes: %w", f.typ, n, base.ErrTooLarge)
	}
	b[0], b[1], b[2], b[3] = frameMagic, frameVersion, uint8(f.typ), f.flags
	binary.LittleEndian.PutUint32(b[4:], uint32(n))
	binary.LittleEndian.PutUint64(b[8:], uint64(f.group))
	binary.LittleEndian.PutUint64(b[16:], f.id)
	binary.LittleEndian.PutUint32(b[24:], crc32.Checksum(b[headerSize:], castagnoli))
	binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
	return nil
}

// parseHeader checks a frame's header and returns it without a body, with the
// body's length and checksum.
func parseHeader(h []byte) (f frame, length int, sum uint32, err error) {
	if h[0] != frameMagic {
		return f, 0, 0, fmt.Errorf("reading a frame's magic: %w", base.ErrCorrupt)
	}
	if h[1] != frameVersion {
		return f, 0, 0, fmt.Errorf("reading a frame of version %d: %w", h[1], base.ErrFormatVersion)
	}
	if crc32.Checksum(h[:28], castagnoli) != binary.LittleEndian.Uint32(h[28:]) {
		return f, 0, 0, fmt.Errorf("checking a frame's header: %w", base.ErrCorrupt)
	}
	f = frame{
		typ: frameType(h[2]), flags: h[3],
		group: base.GroupID(binary.LittleEndian.Uint64(h[8:])),
		id:    binary.LittleEndian.Uint64(h[16:]),
	}
	n := binary.LittleEndian.Uint32(h[4:])
	if limit := maxBody(f.typ); limit == 0 || f.flags&^flagsKnown != 0 || int64(n) > int64(limit) {
		return f, 0, 0, fmt.Errorf("reading a frame of type %d, flags %#x, %d bytes: %w", f.typ, f.flags, n, base.ErrCorrupt)
	}
	return f, int(n), binary.LittleEndian.Uint32(h[24:]), nil
}

// readFrame reads one frame. io.EOF means that the stream ended between
// frames. A large body is read in steps, so that memory grows with what the
// peer has really sent and not with what its header claims.
func readFrame(r *bufio.Reader) (frame, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return frame{}, fmt.Errorf("reading a frame's header: %w", err)
		}
		return frame{}, err
	}
	f, n, sum, err := parseHeader(h[:])
	if err != nil {
		return frame{}, err
	}
	if f.body, err = readBody(r, n); err != nil {
		return frame{}, fmt.Errorf("reading a frame's body: %w", err)
	}
	if crc32.Checksum(f.body, castagnoli) != sum {
		return frame{}, fmt.Errorf("checking the body of a frame of type %d: %w", f.typ, base.ErrCorrupt)
	}
	return f, nil
}

func readBody(r io.Reader, n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	body := make([]byte, min(n, bodyReadStep))
	for have := 0; ; {
		k, err := io.ReadFull(r, body[have:])
		have += k
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil || have == n {
			return body, err
		}
		grown := make([]byte, min(n, 2*have))
		copy(grown, body)
		body = grown
	}
}
