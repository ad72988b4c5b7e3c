package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/keelstate/keelstate/internal/base"
)

// HeaderLen is the length of the header in front of every stored value of a
// state (never in the metadata family). Its layout is frozen:
//
//	0     u8      layout version (high nibble, 1) and flags (low nibble)
//	1     u16 BE  codec version of the payload
//	3     u64 BE  shard sequence of the last write (the version)
//	11    u64 BE  timestamp of the last update in ms of the shard clock; 0 = written without TTL
//	19    payload
//
// Folding a merge takes the larger sequence, the larger timestamp, the newest
// operand's codec version, and the newest operand's flags.
const HeaderLen = 19

// Flags of a value header.
const (
	FlagNull byte = 0x1
)

const headerVersion byte = 0x10

// Header is the decoded header of a stored value.
type Header struct {
	Flags       byte
	Codec       uint16
	Sequence    uint64
	TimestampMs uint64
}

// AppendHeader appends h to dst.
func AppendHeader(dst []byte, h Header) []byte {
	dst = append(dst, headerVersion|h.Flags&0x0f)
	dst = binary.BigEndian.AppendUint16(dst, h.Codec)
	dst = binary.BigEndian.AppendUint64(dst, h.Sequence)
	return binary.BigEndian.AppendUint64(dst, h.TimestampMs)
}

// ParseHeader splits a stored value into header and payload, which aliases v.
func ParseHeader(v []byte) (Header, []byte, error) {
	if len(v) < HeaderLen {
		return Header{}, nil, fmt.Errorf("parsing value header: %d bytes: %w", len(v), base.ErrCorrupt)
	}
	if v[0]&0xf0 != headerVersion {
		return Header{}, nil, fmt.Errorf("parsing value header: layout %d: %w", v[0]>>4, base.ErrFormatVersion)
	}
	return Header{
		Flags:       v[0] & 0x0f,
		Codec:       binary.BigEndian.Uint16(v[1:]),
		Sequence:    binary.BigEndian.Uint64(v[3:]),
		TimestampMs: binary.BigEndian.Uint64(v[11:]),
	}, v[HeaderLen:], nil
}
