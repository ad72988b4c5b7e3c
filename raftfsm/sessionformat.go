package raftfsm

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Frozen (docs/formats/shard-meta.md).
const maxReasonBytes = 64

// sentinelByReason resolves recorded reasons. It is written once, at start.
var sentinelByReason = func() map[base.Reason]*base.Sentinel {
	m := make(map[base.Reason]*base.Sentinel)
	for _, s := range base.Sentinels() {
		m[s.Reason] = s
	}
	return m
}()

func (s *session) appendTo(dst []byte) []byte {
	start := len(dst)
	dst = appendMetaHead(dst)
	dst = binary.AppendUvarint(dst, s.last)
	dst = binary.AppendUvarint(dst, s.floor)
	dst = binary.AppendUvarint(dst, uint64(len(s.records)))
	for i := range s.records {
		dst = binary.AppendUvarint(dst, s.records[i].seq)
		dst = s.records[i].appendParts(dst)
	}
	return sealMeta(dst, start)
}

func (rec *record) appendParts(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(rec.parts)))
	for i := range rec.parts {
		dst = rec.parts[i].appendTo(dst)
	}
	return dst
}

// encodedSize is that of the parts; the few bytes of the number do not count.
func (rec *record) encodedSize() int {
	var scratch [256]byte
	return len(rec.appendParts(scratch[:0]))
}

func (d *decided) appendTo(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(d.ordinals)))
	next := uint32(0)
	for _, r := range d.ordinals {
		dst = binary.AppendUvarint(dst, uint64(r.Lo-next))
		dst = binary.AppendUvarint(dst, uint64(r.Hi-r.Lo-1))
		next = r.Hi
	}
	dst = binary.AppendUvarint(dst, d.sequence)
	dst = binary.AppendUvarint(dst, d.barrier)
	if d.err == nil {
		dst = append(dst, 0)
		return binary.AppendUvarint(dst, d.first)
	}
	dst = append(dst, 1)
	dst = appendText(dst, string(base.SentinelOf(d.err.Cause).Reason))
	dst = appendText(dst, d.err.Field)
	dst = appendText(dst, d.err.Hint)
	return binary.AppendUvarint(dst, uint64(d.err.Ordinal+1))
}

func readDecided(r *reader) decided {
	var d decided
	next := uint64(0)
	for n := r.count("ordinal ranges", MaxCommandMutations); n > 0 && r.err == nil; n-- {
		lo := next + r.uvarint("ordinal")
		length := r.uvarint("ordinals")
		if lo > math.MaxUint32 || length > math.MaxUint32 || lo+length+1 > math.MaxUint32 {
			r.fail("ordinals")
			break
		}
		next = lo + length + 1
		d.ordinals = append(d.ordinals, OrdinalRange{Lo: uint32(lo), Hi: uint32(next)})
	}
	d.sequence, d.barrier = r.uvarint("sequence"), r.uvarint("barrier")
	switch kind := r.u8("result kind"); kind {
	case 0:
		d.first = r.uvarint("first sequence")
	case 1:
		reason := base.Reason(r.text("reason", maxReasonBytes))
		sentinel := sentinelByReason[reason]
		if sentinel == nil {
			if r.err == nil {
				r.err = fmt.Errorf("reading refusal %q: %w", reason, base.ErrFormatVersion)
			}
			r.b = nil
			break
		}
		d.err = &base.Error{Cause: sentinel, Field: r.text("field", maxFieldBytes), Hint: r.text("hint", maxHintBytes)}
		d.err.Ordinal = int(r.u32("ordinal")) - 1
	default:
		r.unknown("result kind", uint64(kind))
	}
	return d
}

func (t *sessionTable) load(key, value []byte, shard keygroup.Range) error {
	if len(key) != 1+8+4+4 {
		return base.ErrCorrupt
	}
	s := &session{
		id: base.SessionID(binary.BigEndian.Uint64(key[1:])),
		rng: keygroup.Range{
			Lo: keygroup.Group(binary.BigEndian.Uint32(key[9:])),
			Hi: keygroup.Group(binary.BigEndian.Uint32(key[13:])),
		},
	}
	if s.rng != shard || t.byID[s.id] != nil {
		return fmt.Errorf("session %x has range %s in a shard of %s: %w", uint64(s.id), s.rng, shard, base.ErrFormatVersion)
	}
	if err := s.parse(value); err != nil {
		return fmt.Errorf("reading session %x: %w", uint64(s.id), err)
	}
	t.byID[s.id] = s
	return nil
}

func (s *session) parse(value []byte) error {
	r, err := openMeta(value)
	if err != nil {
		return err
	}
	s.last, s.floor = r.uvarint("last"), r.uvarint("floor")
	for n := r.count("records", SessionWindow); n > 0 && r.err == nil; n-- {
		rec := record{seq: r.uvarint("number")}
		if rec.seq > s.last || rec.seq < s.floor ||
			len(s.records) > 0 && rec.seq <= s.records[len(s.records)-1].seq {
			r.fail("number")
			break
		}
		parts := r.count("parts", MaxCommandMutations)
		if parts == 0 {
			r.fail("parts")
		}
		for ; parts > 0 && r.err == nil; parts-- {
			rec.parts = append(rec.parts, readDecided(&r))
		}
		if r.err != nil {
			break
		}
		rec.size = rec.encodedSize()
		s.bytes += rec.size
		s.records = append(s.records, rec)
	}
	return r.end("session")
}
