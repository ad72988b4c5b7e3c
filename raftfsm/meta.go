package raftfsm

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Frozen (docs/formats/shard-meta.md): the keys of the metadata family start
// with one of these bytes. Big-endian in keys, little-endian in values.
const (
	metaCore          byte = 0x01 // -> core record
	metaConfiguration byte = 0x02 // -> Raft configuration and its index
	metaDeclaration   byte = 0x03 // + id u32 -> declaration
	metaSession       byte = 0x04 // + session u64, lo u32, hi u32 -> session
	metaOpHash        byte = 0x05 // + group u32 -> op hash
	metaDropped       byte = 0x06 // + id u32 -> index of the drop, state of the family

	metaMagic   byte = 0xC8
	metaVersion byte = 1
	// coreVersion2 is that of the core record of a shard that is fenced or was
	// rolled back; others have version 1.
	coreVersion2 byte = 2

	coreLen  = 2 + 2 + 8*12 + 4*3 + 4
	coreLen2 = coreLen + 8*5
)

var (
	coreKey          = []byte{metaCore}
	configurationKey = []byte{metaConfiguration}
	castagnoli       = crc32.MakeTable(crc32.Castagnoli)
)

// core is what changes with nearly every batch.
type core struct {
	initialised bool
	appliedIndex,
	appliedTerm uint64
	group       base.GroupID
	birth       base.Birth
	rng         keygroup.Range
	m           int
	epoch       base.Epoch
	incarnation base.Incarnation
	clockMs     uint64
	sequence    uint64
	forgotten   base.Revision // newest revision of a Forget
	barrier     uint64
	generation  uint64 // counts changes of the declarations
	rollback    rollback
}

func declarationKey(id engine.FamilyID) []byte {
	return binary.BigEndian.AppendUint32([]byte{metaDeclaration}, uint32(id))
}

func droppedKey(id engine.FamilyID) []byte {
	return binary.BigEndian.AppendUint32([]byte{metaDropped}, uint32(id))
}

func appendOpHashKey(dst []byte, g keygroup.Group) []byte {
	return binary.BigEndian.AppendUint32(append(dst, metaOpHash), uint32(g))
}

func appendSessionKey(dst []byte, id base.SessionID, r keygroup.Range) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, metaSession), uint64(id))
	dst = binary.BigEndian.AppendUint32(dst, uint32(r.Lo))
	return binary.BigEndian.AppendUint32(dst, uint32(r.Hi))
}

// Every metadata value is magic, version, body, CRC-32C of all before.
func appendMetaHead(dst []byte) []byte { return append(dst, metaMagic, metaVersion) }

func sealMeta(dst []byte, start int) []byte {
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

func openMeta(v []byte) (reader, error) { return openVersion(v, metaVersion) }

func openVersion(v []byte, newest byte) (reader, error) {
	if len(v) < 6 || v[0] != metaMagic {
		return reader{}, fmt.Errorf("reading metadata value of %d bytes: %w", len(v), base.ErrCorrupt)
	}
	body, sum := v[:len(v)-4], binary.LittleEndian.Uint32(v[len(v)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return reader{}, fmt.Errorf("checking metadata value: %w", base.ErrCorrupt)
	}
	if v[1] < metaVersion || v[1] > newest {
		return reader{}, fmt.Errorf("reading metadata version %d: %w", v[1], base.ErrFormatVersion)
	}
	return reader{b: body[2:len(body):len(body)]}, nil
}

func (c *core) appendTo(dst []byte) []byte {
	start := len(dst)
	dst = appendMetaHead(dst)
	var flags byte
	if c.initialised {
		flags = 1
	}
	if c.rollback != (rollback{}) {
		dst[start+1] = coreVersion2
	}
	dst = append(dst, flags, 0)
	for _, v := range [...]uint32{uint32(c.rng.Lo), uint32(c.rng.Hi), uint32(c.m)} {
		dst = binary.LittleEndian.AppendUint32(dst, v)
	}
	for _, v := range [...]uint64{
		c.appliedIndex, c.appliedTerm, uint64(c.group), uint64(c.birth), uint64(c.epoch), uint64(c.incarnation),
		c.clockMs, c.sequence, uint64(c.forgotten), c.barrier, c.generation, 0,
	} {
		dst = binary.LittleEndian.AppendUint64(dst, v)
	}
	if b := &c.rollback; *b != (rollback{}) {
		for _, v := range [...]uint64{b.fence, b.target, b.op, b.to, b.index} {
			dst = binary.LittleEndian.AppendUint64(dst, v)
		}
	}
	return sealMeta(dst, start)
}

func parseCore(v []byte) (core, error) {
	r, err := openVersion(v, coreVersion2)
	if err != nil {
		return core{}, err
	}
	size := coreLen
	if v[1] == coreVersion2 {
		size = coreLen2
	}
	if len(v) != size || v[2] > 1 || v[3] != 0 {
		return core{}, fmt.Errorf("reading core record: %w", base.ErrCorrupt)
	}
	r.take("flags", 2)
	u32 := func() uint32 { return binary.LittleEndian.Uint32(r.take("core", 4)) }
	c := core{initialised: v[2] == 1}
	c.rng.Lo, c.rng.Hi = keygroup.Group(u32()), keygroup.Group(u32())
	c.m = int(u32())
	c.appliedIndex, c.appliedTerm = r.u64("applied"), r.u64("term")
	c.group, c.birth = base.GroupID(r.u64("group")), base.Birth(r.u64("birth"))
	c.epoch, c.incarnation = base.Epoch(r.u64("epoch")), base.Incarnation(r.u64("incarnation"))
	c.clockMs, c.sequence = r.u64("clock"), r.u64("sequence")
	c.forgotten, c.barrier, c.generation = base.Revision(r.u64("forgotten")), r.u64("barrier"), r.u64("generation")
	if r.u64("reserved") != 0 || c.initialised && !validRange(c.rng, c.m) {
		return core{}, fmt.Errorf("reading core record: %w", base.ErrCorrupt)
	}
	if v[1] == coreVersion2 {
		b := &c.rollback
		b.fence, b.target, b.op, b.to, b.index = r.u64("fence"), r.u64("target"), r.u64("operation"), r.u64("checkpoint"), r.u64("index")
		if (b.fence == 0) != (b.target == 0) || (b.op == 0) != (b.to == 0) || (b.op == 0) != (b.index == 0) || *b == (rollback{}) {
			return core{}, fmt.Errorf("reading core record: %w", base.ErrCorrupt)
		}
	}
	return c, r.end("core record")
}

func encodeConfiguration(index uint64, raw []byte) []byte {
	dst := binary.LittleEndian.AppendUint64(appendMetaHead(nil), index)
	return sealMeta(append(dst, raw...), 0)
}

func parseConfiguration(v []byte) (index uint64, raw []byte, err error) {
	r, err := openMeta(v)
	if err != nil {
		return 0, nil, err
	}
	index = r.u64("configuration index")
	return index, r.b, r.err
}

func encodeDeclaration(d *state.Declaration) []byte {
	return sealMeta(appendDeclaration(appendMetaHead(nil), d), 0)
}

func parseDeclaration(v []byte) (*state.Declaration, error) {
	r, err := openMeta(v)
	if err != nil {
		return nil, err
	}
	d := readDeclaration(&r)
	return &d, r.end("declaration")
}

// dropped is the tombstone of a dropped state. It is kept for ever, so that a
// late Declare cannot bring the id back (RF9).
type dropped struct {
	index uint64 // of the entry that dropped it
	gone  bool   // the family has been dropped
}

func encodeDropped(d dropped) []byte {
	dst := binary.LittleEndian.AppendUint64(appendMetaHead(nil), d.index)
	var gone byte
	if d.gone {
		gone = 1
	}
	return sealMeta(append(dst, gone), 0)
}

func parseDropped(v []byte) (dropped, error) {
	r, err := openMeta(v)
	if err != nil {
		return dropped{}, err
	}
	d := dropped{index: r.u64("drop index")}
	gone := r.u8("family state")
	if gone > 1 {
		r.fail("family state")
	}
	d.gone = gone == 1
	return d, r.end("tombstone")
}

func appendOpHash(dst []byte, h OpHash) []byte {
	start := len(dst)
	return sealMeta(append(appendMetaHead(dst), h[:]...), start)
}

func parseOpHash(v []byte) (OpHash, error) {
	r, err := openMeta(v)
	if err != nil {
		return OpHash{}, err
	}
	var h OpHash
	copy(h[:], r.take("op hash", 16))
	return h, r.end("op hash")
}

// loaded is the metadata of a store.
type loaded struct {
	core               core
	configurationIndex uint64
	configuration      []byte
	decls              map[engine.FamilyID]*state.Declaration
	dropped            map[engine.FamilyID]dropped
	sessions           sessionTable
	hashes             opHashes
}

// loadMeta reads all metadata of r. A store without any is a new replica.
func loadMeta(r engine.Reader) (*loaded, error) {
	l := &loaded{
		decls: make(map[engine.FamilyID]*state.Declaration), dropped: make(map[engine.FamilyID]dropped),
		sessions: newSessionTable(),
	}
	v, ok, err := r.Get(engine.MetaFamily, coreKey)
	if err != nil {
		return nil, fmt.Errorf("loading metadata: %w", err)
	}
	if ok {
		if l.core, err = parseCore(v); err != nil {
			return nil, fmt.Errorf("loading metadata: %w", err)
		}
	}
	l.hashes = newOpHashes(l.core.rng)
	it := r.Scan(engine.MetaFamily, []byte{metaCore + 1}, nil, engine.ScanOptions{})
	defer it.Close()
	for it.Next() {
		if !ok {
			return nil, fmt.Errorf("loading metadata: records without a core record: %w", base.ErrCorrupt)
		}
		if err := l.add(it.Key(), it.Value()); err != nil {
			return nil, fmt.Errorf("loading metadata key %x: %w", it.Key(), err)
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("loading metadata: %w", err)
	}
	return l, nil
}

func (l *loaded) add(key, value []byte) error {
	id := func() (engine.FamilyID, error) {
		if len(key) != 5 {
			return 0, base.ErrCorrupt
		}
		return engine.FamilyID(binary.BigEndian.Uint32(key[1:])), nil
	}
	value = slices.Clone(value)
	switch key[0] {
	case metaConfiguration:
		var err error
		if len(key) != 1 {
			return base.ErrCorrupt
		}
		l.configurationIndex, l.configuration, err = parseConfiguration(value)
		return err
	case metaDeclaration:
		n, err := id()
		if err != nil {
			return err
		}
		d, err := parseDeclaration(value)
		if err == nil && d.ID != n {
			return base.ErrCorrupt
		}
		l.decls[n] = d
		return err
	case metaSession:
		return l.sessions.load(key, value, l.core.rng)
	case metaOpHash:
		n, err := id()
		if err != nil {
			return err
		}
		return l.hashes.load(keygroup.Group(n), value)
	case metaDropped:
		n, err := id()
		if err != nil {
			return err
		}
		l.dropped[n], err = parseDropped(value)
		return err
	default:
		return fmt.Errorf("record kind %d: %w", key[0], base.ErrFormatVersion)
	}
}

// bound shortens s to n bytes without cutting a rune in two.
func bound(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xC0 == 0x80 {
		n--
	}
	return s[:n]
}
