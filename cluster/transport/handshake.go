package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// lane is what a connection is for. Every lane has connections of its own, so
// that no large message delays a small one.
type lane uint8

const (
	laneUrgent lane = 1 // votes, heartbeats, TimeoutNow, term polls
	laneAppend lane = 2 // log appends
	laneCall   lane = 3 // node-level calls and InstallSnapshot
	laneBulk   lane = 4 // one file stream
)

func (l lane) String() string {
	switch l {
	case laneUrgent:
		return "urgent"
	case laneAppend:
		return "append"
	case laneCall:
		return "call"
	case laneBulk:
		return "bulk"
	}
	return "unknown"
}

const (
	helloMagic   = "KSNT"
	helloVersion = 1
	maxHello     = 4 << 10
	helloPrefix  = 4 + 2 + 2 // magic, version, length of the rest
)

// hello is the first message of both sides. The dialer says which node it
// means to reach; the listener answers with its own hello and either an empty
// Refusal or an encoded error.
type hello struct {
	lane    lane
	target  base.NodeID
	id      Identity
	refusal []byte
}

func (h hello) encode() []byte {
	b := append([]byte(nil), helloMagic...)
	b = putU16(b, helloVersion)
	b = putU16(b, 0)
	b = append(b, uint8(h.lane))
	b = putBytes16(b, h.target)
	b = putBytes16(b, h.id.Cluster)
	b = putBytes16(b, h.id.Node)
	b = putBytes16(b, h.id.Disk)
	b = putBytes16(b, h.id.Engine)
	b = putBytes16(b, h.refusal[:min(len(h.refusal), maxHello/2)])
	binary.LittleEndian.PutUint16(b[6:], uint16(len(b)-helloPrefix+4))
	return putU32(b, crc32.Checksum(b, castagnoli))
}

// readHello reads one hello. A peer that speaks something else is told apart
// from one that speaks another version.
func readHello(r io.Reader) (hello, error) {
	b := make([]byte, helloPrefix, helloPrefix+256)
	if _, err := io.ReadFull(r, b); err != nil {
		return hello{}, fmt.Errorf("reading the handshake: %w", err)
	}
	if string(b[:4]) != helloMagic {
		return hello{}, fmt.Errorf("reading the handshake's magic: %w", base.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != helloVersion {
		return hello{}, fmt.Errorf("reading a handshake of version %d: %w", v, base.ErrFormatVersion)
	}
	n := int(binary.LittleEndian.Uint16(b[6:]))
	if n < 4 || n > maxHello {
		return hello{}, fmt.Errorf("reading a handshake of %d bytes: %w", n, base.ErrCorrupt)
	}
	b = append(b, make([]byte, n)...)
	if _, err := io.ReadFull(r, b[helloPrefix:]); err != nil {
		return hello{}, fmt.Errorf("reading the handshake: %w", err)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return hello{}, fmt.Errorf("checking the handshake: %w", base.ErrCorrupt)
	}
	w := wireReader{b: body[helloPrefix:]}
	h := hello{lane: lane(w.u8()), target: base.NodeID(w.str16())}
	h.id = Identity{
		Cluster: base.ClusterID(w.str16()), Node: base.NodeID(w.str16()), Disk: base.DiskID(w.str16()), Engine: w.str16(),
	}
	h.refusal = w.bytes16()
	if err := w.finish("the handshake"); err != nil {
		return hello{}, err
	}
	return h, h.id.check()
}

// judgePeer decides about a peer by its identity; listening says on which side
// we are. restricted means that only admission calls may pass, because one
// side does not belong to a cluster yet.
func (t *Transport) judgePeer(peer Identity, listening bool) (restricted bool, err error) {
	own := t.Identity()
	switch {
	case peer.Node == "":
		return false, fmt.Errorf("checking a peer without a node id: %w", base.ErrIdentity)
	case peer.Node == own.Node:
		return false, fmt.Errorf("checking peer %s: another process uses this node's id: %w", peer.Node, base.ErrIdentity)
	case own.Cluster == "" && listening:
		return true, nil
	case own.Cluster != "" && peer.Cluster == "" && !listening:
		// Only the disk can be wrong about a node that is yet to be admitted.
		return true, t.checkPeer(peer)
	case own.Cluster == "" && peer.Cluster == "" && !listening:
		return true, nil
	case own.Cluster == "" || peer.Cluster == "":
		return false, fmt.Errorf("checking peer %s: %w", peer.Node, base.ErrNotFounded)
	case peer.Cluster != own.Cluster:
		return false, fmt.Errorf("checking peer %s: it belongs to cluster %s, this node to %s: %w", peer.Node, peer.Cluster, own.Cluster, base.ErrIdentity)
	case peer.Engine != own.Engine:
		return false, fmt.Errorf("checking peer %s: its engine is %q, this node's %q: %w", peer.Node, peer.Engine, own.Engine, base.ErrIdentity)
	}
	return false, t.checkPeer(peer)
}

// checkPeer asks the node whether it knows better about a peer.
func (t *Transport) checkPeer(peer Identity) error {
	err := t.opts.CheckPeer(peer)
	if err == nil {
		return nil
	}
	if base.SentinelOf(err) == base.ErrInternal { // a plain error still means "refused"
		err = errors.Join(err, base.ErrIdentity)
	}
	return fmt.Errorf("checking peer %s: %w", peer.Node, err)
}

// greet runs the dialer's half of the handshake on a fresh connection.
func (t *Transport) greet(nc net.Conn, target base.NodeID, l lane) (peer Identity, restricted bool, err error) {
	if err := nc.SetDeadline(time.Now().Add(t.opts.DialTimeout)); err != nil {
		return peer, false, fmt.Errorf("starting the handshake with %s: %w", target, err)
	}
	if _, err := nc.Write(hello{lane: l, target: target, id: t.Identity()}.encode()); err != nil {
		return peer, false, fmt.Errorf("sending the handshake to %s: %w", target, err)
	}
	h, err := readHello(nc)
	if err != nil {
		return peer, false, fmt.Errorf("greeting %s: %w", target, err)
	}
	if len(h.refusal) > 0 {
		return h.id, false, fmt.Errorf("greeting %s: refused: %w", target, decodeError(h.refusal, h.id.Node))
	}
	if h.id.Node != target {
		return h.id, false, fmt.Errorf("greeting %s: node %s answers at its address: %w", target, h.id.Node, base.ErrIdentity)
	}
	restricted, err = t.judgePeer(h.id, false)
	if err != nil {
		return h.id, false, err
	}
	return h.id, restricted, nc.SetDeadline(time.Time{})
}

// welcome runs the listener's half of the handshake.
func (t *Transport) welcome(nc net.Conn) (h hello, restricted bool, err error) {
	if err := nc.SetDeadline(time.Now().Add(max(t.opts.DialTimeout, time.Second))); err != nil {
		return h, false, fmt.Errorf("starting a handshake: %w", err)
	}
	if h, err = readHello(nc); err != nil {
		return h, false, err
	}
	own := t.Identity()
	answer := hello{lane: h.lane, target: h.id.Node, id: own}
	if h.target != own.Node {
		err = fmt.Errorf("greeted by %s, which looks for node %s: this is %s: %w", h.id.Node, h.target, own.Node, base.ErrIdentity)
	} else if h.lane < laneUrgent || h.lane > laneBulk {
		err = fmt.Errorf("greeted by %s for lane %d: %w", h.id.Node, h.lane, base.ErrUnsupported)
	} else {
		restricted, err = t.judgePeer(h.id, true)
	}
	if err != nil {
		answer.refusal = putError(nil, err)
	}
	if _, werr := nc.Write(answer.encode()); werr != nil && err == nil {
		err = fmt.Errorf("answering the handshake of %s: %w", h.id.Node, werr)
	}
	if err != nil {
		return h, false, err
	}
	return h, restricted, nc.SetDeadline(time.Time{})
}
