package raftlog

import (
	"bytes"
	"fmt"
	"maps"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// replay rebuilds the groups from records. Entries whose segment is gone are
// holes until a moved record fills them.
type replay struct {
	groups map[base.GroupID]*replayGroup
}

type replayGroup struct {
	generation uint64
	tombstone  bool
	index      index
	stable     map[string][]byte
}

func (rp *replay) group(id base.GroupID) *replayGroup {
	g := rp.groups[id]
	if g == nil {
		g = &replayGroup{stable: map[string][]byte{}}
		rp.groups[id] = g
	}
	return g
}

// state takes a group's state from the head of a segment. In the oldest segment
// it is where the group begins; in a later one it must say what replay found.
func (rp *replay) state(id base.GroupID, payload []byte, oldest bool) error {
	im, err := parseImage(payload)
	if err != nil {
		return fmt.Errorf("state of %s: %w", id, err)
	}
	g := rp.groups[id]
	if oldest {
		if g != nil {
			return fmt.Errorf("state of %s stands twice: %w", id, base.ErrCorrupt)
		}
		g = rp.group(id)
		g.generation, g.tombstone, g.stable = im.generation, im.tombstone, im.stable
		if im.first != 0 {
			g.index = index{first: im.first, slots: make([]slot, im.last-im.first+1)}
		}
		return nil
	}
	if g == nil {
		return fmt.Errorf("state of %s, which no earlier record brought: %w", id, base.ErrCorrupt)
	}
	same := g.generation == im.generation && g.tombstone == im.tombstone && g.index.first == im.first &&
		g.index.last() == im.last && maps.EqualFunc(g.stable, im.stable, bytes.Equal)
	if !same {
		return fmt.Errorf("state of %s is entries %d to %d, replay found %d to %d: %w",
			id, im.first, im.last, g.index.first, g.index.last(), base.ErrCorrupt)
	}
	return nil
}

// apply replays one record of a segment's body; at is the offset of the payload.
func (rp *replay) apply(seg uint32, r record, payload []byte, at int64) error {
	g := rp.group(r.group)
	if g.tombstone && r.typ != recCreate {
		return fmt.Errorf("%s record for %s, which is deleted: %w", r.typ, r.group, base.ErrCorrupt)
	}
	var err error
	switch r.typ {
	case recAppend:
		err = g.append(seg, payload, at)
	case recMoved:
		err = g.moved(seg, payload, at)
	case recDelete:
		var lo, hi uint64
		if lo, hi, err = decodeDelete(payload, &g.index); err == nil {
			g.index.remove(lo, hi)
		}
	case recStable:
		err = g.set(payload)
	case recCreate:
		g.generation, err = parseUint64(payload)
		g.tombstone = false
	case recTombstone:
		*g = replayGroup{generation: g.generation, tombstone: true, stable: map[string][]byte{}}
	default:
		err = fmt.Errorf("unknown %s: %w", r.typ, base.ErrCorrupt)
	}
	if err != nil {
		return fmt.Errorf("%s record of %s: %w", r.typ, r.group, err)
	}
	return nil
}

func (g *replayGroup) append(seg uint32, payload []byte, at int64) error {
	return walkEntries(payload, func(off int, h entryHead) error {
		if n := len(g.index.slots); n > 0 && h.index != g.index.last()+1 {
			return fmt.Errorf("entry %d follows %d: %w", h.index, g.index.last(), base.ErrCorrupt)
		}
		s := slot{seg: seg, off: uint32(at) + uint32(off), len: uint32(h.size)}
		g.index.push(h.index, s, h.typ == raft.LogCommand)
		g.index.at(h.index).dist = distOf(h.typ)
		return nil
	})
}

// distOf is dist as it stands during recovery; finish links it.
func distOf(t raft.LogType) uint32 {
	if t == raft.LogCommand {
		return 0
	}
	return noCommand
}

func (g *replayGroup) moved(seg uint32, payload []byte, at int64) error {
	return walkEntries(payload, func(off int, h entryHead) error {
		if !g.index.has(h.index) {
			return fmt.Errorf("copy of entry %d, which is not live: %w", h.index, base.ErrCorrupt)
		}
		s := g.index.at(h.index)
		if s.seg != 0 && s.len != uint32(h.size) {
			return fmt.Errorf("copy of entry %d has %d bytes, not %d: %w", h.index, h.size, s.len, base.ErrCorrupt)
		}
		*s = slot{seg: seg, off: uint32(at) + uint32(off), len: uint32(h.size), dist: distOf(h.typ)}
		return nil
	})
}

func (g *replayGroup) set(payload []byte) error {
	k, v, rest, err := parseKV(payload)
	if err != nil {
		return err
	}
	if len(rest) != 0 {
		return fmt.Errorf("%d bytes after the value: %w", len(rest), base.ErrCorrupt)
	}
	g.stable[k] = v
	if len(g.stable) > maxKeys {
		return fmt.Errorf("more than %d keys: %w", maxKeys, base.ErrCorrupt)
	}
	return nil
}

// finish links the slots and checks that no entry is missing.
func (rp *replay) finish(dir string) error {
	for id, g := range rp.groups {
		for k := range g.index.slots {
			s := &g.index.slots[k]
			if s.seg == 0 {
				return fmt.Errorf("%s: entry %d of %s is in no segment: %w", dir, g.index.first+uint64(k), id, base.ErrCorrupt)
			}
			g.index.link(k, s.dist == 0)
		}
	}
	return nil
}
