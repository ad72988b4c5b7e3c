package state

import (
	"encoding/binary"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Layout places states in an engine. It is a pure value: everything it does
// depends on M, the declaration and the store only. docs/formats/state-layout.md
// describes the bytes.
type Layout struct {
	// M is the cluster's number of key groups, 1 to keygroup.MaxM; it decides the
	// width of the group prefix.
	M int
}

// Frozen: bytes inside an engine key. A zero byte of a part is escaped, and a
// part ends with a pair that sorts before every continuation of the part. The
// native prefix extractor of engine/rocks parses group, key and the end pair.
const (
	partZero    = 0x00
	partEscaped = 0xFF // 0x00 0xFF is a zero byte of the part
	partEnd     = 0x01 // 0x00 0x01 ends the part

	namespaceVoid = 0x01 // the void namespace: the tag alone
	namespaceSet  = 0x02 // followed by the escaped namespace and its end

	elementSuffix = 8 + 4 // sequence u64 BE, index u32 BE
)

// FamilyOptions returns the options of the family that holds the state. d must
// have passed ValidateDeclaration.
func (l Layout) FamilyOptions(d *Declaration) engine.FamilyOptions {
	o := engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: keygroup.PrefixLen(l.M)}
	switch d.Kind {
	case KindList, KindMap:
		o.Use = engine.UseScanned
	case KindReducing, KindAggregating:
		if f, err := functionOf(d); err == nil {
			o.Merge = f.merge
		}
	}
	return o
}

func appendPart(dst, part []byte) []byte {
	for _, c := range part {
		dst = append(dst, c)
		if c == partZero {
			dst = append(dst, partEscaped)
		}
	}
	return append(dst, partZero, partEnd)
}

func appendNamespace(dst []byte, ns Namespace) []byte {
	if !ns.Set {
		return append(dst, namespaceVoid)
	}
	return appendPart(append(dst, namespaceSet), ns.Bytes)
}

// keyPrefix is the engine key up to the namespace, exclusive.
func (l Layout) keyPrefix(dst []byte, g keygroup.Group, key []byte) []byte {
	return appendPart(keygroup.AppendGroup(dst, l.M, g), key)
}

// cell is the engine key of a single-valued state, and the prefix of all
// entries of a list or map: group, key and namespace.
func (l Layout) cell(g keygroup.Group, key []byte, ns Namespace) []byte {
	// Room for the parts without escapes, their ends, and a list element's suffix.
	dst := make([]byte, 0, len(key)+len(ns.Bytes)+8+elementSuffix)
	return appendNamespace(l.keyPrefix(dst, g, key), ns)
}

// prefixEnd returns the smallest key that is larger than every key that starts
// with prefix. Every prefix made here ends with partEnd, namespaceVoid or a
// group, none of which is 0xFF, so adding one to the last byte never carries.
func prefixEnd(prefix []byte) []byte {
	end := append(make([]byte, 0, len(prefix)+elementSuffix), prefix...)
	end[len(end)-1]++
	return end
}

// GroupBounds returns [lo, hi) of the engine keys of the groups in r.
func (l Layout) GroupBounds(r keygroup.Range) (lo, hi []byte) {
	lo = keygroup.AppendGroup(nil, l.M, r.Lo)
	// A group is at most 127 in one byte and 32767 in two, so Hi always fits.
	hi = keygroup.AppendGroup(nil, l.M, r.Hi)
	return lo, hi
}

func appendElement(dst []byte, sequence uint64, index uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(dst, sequence), index)
}

// ParsedKey is an engine key taken apart.
type ParsedKey struct {
	Group     keygroup.Group
	Key       []byte
	Namespace Namespace
	UserKey   []byte // Map only
	Sequence  uint64 // List only: shard sequence of the append
	Index     uint32 // List only: position inside the append
}

// ParseKey takes an engine key of a state of the given kind apart; the result
// shares no memory with raw. Bytes that no Layout with this M can have written
// are base.ErrCorrupt; an unknown kind is base.ErrInvalid.
func (l Layout) ParseKey(kind Kind, raw []byte) (ParsedKey, error) {
	var k ParsedKey
	g, rest, err := keygroup.CutGroup(raw, l.M)
	if err != nil {
		return k, fmt.Errorf("parsing engine key: %w", err)
	}
	k.Group = g
	if k.Key, rest, err = cutPart(rest); err != nil {
		return k, fmt.Errorf("parsing key of engine key: %w", err)
	}
	if k.Namespace, rest, err = cutNamespace(rest); err != nil {
		return k, fmt.Errorf("parsing namespace of engine key: %w", err)
	}
	switch kind {
	case KindValue, KindReducing, KindAggregating:
	case KindMap:
		if k.UserKey, rest, err = cutPart(rest); err != nil {
			return k, fmt.Errorf("parsing user key of engine key: %w", err)
		}
	case KindList:
		if len(rest) < elementSuffix {
			return k, fmt.Errorf("parsing element of engine key: %d bytes: %w", len(rest), base.ErrCorrupt)
		}
		k.Sequence, k.Index = binary.BigEndian.Uint64(rest), binary.BigEndian.Uint32(rest[8:])
		rest = rest[elementSuffix:]
	default:
		return k, fmt.Errorf("parsing engine key of kind %d: %w", kind, base.ErrInvalid)
	}
	if len(rest) != 0 {
		return k, fmt.Errorf("parsing engine key: %d bytes follow its last part: %w", len(rest), base.ErrCorrupt)
	}
	return k, nil
}

func cutNamespace(b []byte) (Namespace, []byte, error) {
	if len(b) == 0 {
		return Namespace{}, nil, fmt.Errorf("no namespace tag: %w", base.ErrCorrupt)
	}
	switch b[0] {
	case namespaceVoid:
		return Namespace{}, b[1:], nil
	case namespaceSet:
		part, rest, err := cutPart(b[1:])
		return Namespace{Set: true, Bytes: part}, rest, err
	}
	return Namespace{}, nil, fmt.Errorf("namespace tag 0x%02x: %w", b[0], base.ErrCorrupt)
}

// cutPart returns the unescaped first part of b, never nil, and what follows it.
func cutPart(b []byte) (part, rest []byte, err error) {
	part = []byte{}
	for i := 0; i < len(b); i++ {
		if b[i] != partZero {
			part = append(part, b[i])
			continue
		}
		if i++; i == len(b) {
			break
		}
		switch b[i] {
		case partEscaped:
			part = append(part, partZero)
		case partEnd:
			return part, b[i+1:], nil
		default:
			return nil, nil, fmt.Errorf("0x00 0x%02x is neither an escape nor an end: %w", b[i], base.ErrCorrupt)
		}
	}
	return nil, nil, fmt.Errorf("a part does not end: %w", base.ErrCorrupt)
}

// cellLen returns how many bytes of a well-formed engine key form its cell:
// group, key and namespace.
func (l Layout) cellLen(raw []byte) (int, error) {
	n, err := l.keyLen(raw)
	if err != nil {
		return 0, err
	}
	switch {
	case n < len(raw) && raw[n] == namespaceVoid:
		return n + 1, nil
	case n < len(raw) && raw[n] == namespaceSet:
		end, err := partLen(raw[n+1:])
		return n + 1 + end, err
	}
	return 0, fmt.Errorf("finding namespace of engine key: %w", base.ErrCorrupt)
}

// keyLen returns how many bytes of a well-formed engine key are group and key.
func (l Layout) keyLen(raw []byte) (int, error) {
	w := keygroup.PrefixLen(l.M)
	if len(raw) < w {
		return 0, fmt.Errorf("finding key of engine key: %w", base.ErrCorrupt)
	}
	n, err := partLen(raw[w:])
	return w + n, err
}

func partLen(b []byte) (int, error) {
	for i := 0; i+1 < len(b); i++ {
		if b[i] != partZero {
			continue
		}
		if b[i+1] == partEnd {
			return i + 2, nil
		}
		i++ // the second byte of an escape is no start of an end
	}
	return 0, fmt.Errorf("a part of an engine key does not end: %w", base.ErrCorrupt)
}
