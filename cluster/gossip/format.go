package gossip

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/keelstate/keelstate/internal/base"
)

// MaxMeta is memberlist's limit of a node's metadata, in bytes.
const MaxMeta = 512

// The constants of the format are frozen (docs/formats/gossip-meta.md).
const (
	metaMagic   = "KG"
	metaVersion = 1
)

// Meta is what a node tells about itself.
type Meta struct {
	Node     base.NodeID
	Cluster  base.ClusterID // empty while the node does not belong to a cluster
	RaftAddr string
	GRPCAddr string
	HTTPAddr string
	Version  string // of the program
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encodeMeta refuses fields over 255 bytes and a whole over MaxMeta (GO2).
func encodeMeta(m Meta, boot uint64) ([]byte, error) {
	b := append([]byte(metaMagic), metaVersion)
	b = binary.LittleEndian.AppendUint64(b, boot)
	for _, f := range []string{string(m.Node), string(m.Cluster), m.RaftAddr, m.GRPCAddr, m.HTTPAddr, m.Version} {
		if len(f) > 255 {
			return nil, fmt.Errorf("encoding gossip metadata: a field of %d bytes: %w", len(f), base.ErrTooLarge)
		}
		b = append(append(b, uint8(len(f))), f...)
	}
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	if len(b) > MaxMeta {
		return nil, fmt.Errorf("encoding gossip metadata of node %s: %d bytes of at most %d: %w", m.Node, len(b), MaxMeta, base.ErrTooLarge)
	}
	return b, nil
}

func decodeMeta(b []byte) (m Meta, boot uint64, err error) {
	bad := fmt.Errorf("decoding gossip metadata of %d bytes: %w", len(b), base.ErrCorrupt)
	const fixed = len(metaMagic) + 1
	if len(b) < fixed || len(b) > MaxMeta || string(b[:2]) != metaMagic {
		return m, 0, bad
	}
	if b[2] != metaVersion {
		return m, 0, fmt.Errorf("decoding gossip metadata of version %d: %w", b[2], base.ErrFormatVersion)
	}
	if len(b) < fixed+8+6+4 {
		return m, 0, bad
	}
	body := b[:len(b)-4]
	if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(b[len(body):]) {
		return m, 0, bad
	}
	boot = binary.LittleEndian.Uint64(body[fixed:])
	rest := body[fixed+8:]
	var fields [6]string
	for i := range fields {
		if len(rest) == 0 || len(rest) < 1+int(rest[0]) {
			return m, 0, bad
		}
		n := 1 + int(rest[0])
		fields[i], rest = string(rest[1:n]), rest[n:]
	}
	if len(rest) != 0 || fields[0] == "" {
		return m, 0, bad
	}
	return Meta{
		Node: base.NodeID(fields[0]), Cluster: base.ClusterID(fields[1]),
		RaftAddr: fields[2], GRPCAddr: fields[3], HTTPAddr: fields[4], Version: fields[5],
	}, boot, nil
}
