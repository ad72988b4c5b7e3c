package snapshot

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// The constants of the format are frozen.
const (
	checkpointMagic   = "KSCP"
	checkpointVersion = 1
	// savepointVersion is that of savepoints, and of nothing else: whoever knows
	// only version 1 would look for the objects in another place.
	savepointVersion = 2
	flagSavepoint    = 1
)

// Encode returns the bytes of `_metadata`. It sorts the lists.
func (c *Checkpoint) Encode() ([]byte, error) {
	c.sort()
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("encoding checkpoint %d: %w", c.Number, err)
	}
	version, flags := c.version()
	b := append([]byte(checkpointMagic), version)
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = appendText(b, string(c.ClusterID))
	b = appendU64s(b, c.Number, uint64(c.Incarnation), uint64(c.FormatVersion), uint64(c.M), c.CreatedMs)
	b = appendText(b, c.Engine)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Keyspaces)))
	for i := range c.Keyspaces {
		b = appendText(appendText(b, c.Keyspaces[i].Name), c.Keyspaces[i].KeyType)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.States)))
	for i := range c.States {
		s := &c.States[i]
		b = appendU64s(b, uint64(s.ID), uint64(s.CodecVersion), s.DroppedMs)
		for _, t := range s.texts() {
			b = appendText(b, *t)
		}
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Shards)))
	for i := range c.Shards {
		b = c.Shards[i].append(b)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Participants)))
	for i := range c.Participants {
		b = appendText(b, c.Participants[i].ID)
		b = appendBytes(b, c.Participants[i].Bytes)
	}
	// Two lengths of 32 bits: the whole is bounded before it is believed.
	if total := len(b) + len(c.Broadcast) + len(c.Operator); total > MaxCheckpointBytes-64 {
		return nil, fmt.Errorf("encoding checkpoint %d: %w", c.Number, tooMany("bytes", MaxCheckpointBytes))
	}
	b = appendBytes(appendBytes(b, c.Broadcast), c.Operator)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// version is that of the format in which it is written, and the flags.
func (c *Checkpoint) version() (version byte, flags uint32) {
	if c.Savepoint {
		return savepointVersion, flagSavepoint
	}
	return checkpointVersion, 0
}

func (s *Shard) append(b []byte) []byte {
	b = appendU64s(b, uint64(s.Group), uint64(s.Birth), uint64(s.Epoch), uint64(s.Range.Lo), uint64(s.Range.Hi),
		s.Index, s.Term, s.Sequence, s.ClockMs, uint64(s.ManifestSize), uint64(s.FullBytes), uint64(s.NewBytes))
	b = append(b, s.ManifestSHA256[:]...)
	return appendText(b, s.ManifestKey)
}

func appendU64s(b []byte, vs ...uint64) []byte {
	for _, v := range vs {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func appendBytes(b, v []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(b, uint32(len(v))), v...)
}

// The least that an entry of each list takes: a count cannot make us allocate
// more than the bytes hold.
const (
	keyspaceMin    = 2 + 2
	stateMin       = 3*8 + 8*2
	shardMin       = 12*8 + sha256.Size + 2
	participantMin = 2 + 4
)

// DecodeCheckpoint parses and checks `_metadata`. Damage is base.ErrCorrupt, a
// version of a newer build base.ErrFormatVersion.
func DecodeCheckpoint(raw []byte) (*Checkpoint, error) {
	version, body, err := unseal("checkpoint", raw, checkpointMagic, savepointVersion)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{Savepoint: version == savepointVersion}
	_, wantFlags := c.version()
	if len(raw) > MaxCheckpointBytes {
		return nil, fmt.Errorf("decoding checkpoint: %d bytes: %w", len(raw), base.ErrCorrupt)
	}
	d := decoder{b: body}
	flags := d.u32()
	c.ClusterID = base.ClusterID(d.text())
	c.Number, c.Incarnation = d.u64(), base.Incarnation(d.u64())
	c.FormatVersion, c.M, c.CreatedMs = d.u32of64(), int(d.small()), d.u64()
	c.Engine = d.text()
	c.Keyspaces = make([]Keyspace, d.count(keyspaceMin, MaxKeyspaces))
	for i := range c.Keyspaces {
		c.Keyspaces[i] = Keyspace{Name: d.text(), KeyType: d.text()}
	}
	c.States = make([]State, d.count(stateMin, MaxStates))
	for i := range c.States {
		s := &c.States[i]
		s.ID, s.CodecVersion, s.DroppedMs = d.u32of64(), d.u32of64(), d.u64()
		for _, t := range s.texts() {
			*t = d.text()
		}
	}
	c.Shards = make([]Shard, d.count(shardMin, maxKeyGroups))
	for i := range c.Shards {
		d.shard(&c.Shards[i])
	}
	c.Participants = make([]Participant, d.count(participantMin, MaxParticipants))
	for i := range c.Participants {
		c.Participants[i] = Participant{ID: d.text(), Bytes: d.bytes()}
	}
	c.Broadcast, c.Operator = d.bytes(), d.bytes()
	if d.bad || len(d.b) != 0 || flags != wantFlags {
		return nil, fmt.Errorf("decoding checkpoint: lengths do not add up: %w", base.ErrCorrupt)
	}
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("decoding checkpoint: %v: %w", err, base.ErrCorrupt)
	}
	return c, nil
}

func (d *decoder) shard(s *Shard) {
	s.Group, s.Birth, s.Epoch = base.GroupID(d.u64()), base.Birth(d.u64()), base.Epoch(d.u64())
	s.Range = keygroup.Range{Lo: keygroup.Group(d.small()), Hi: keygroup.Group(d.small())}
	s.Index, s.Term, s.Sequence, s.ClockMs = d.u64(), d.u64(), d.u64(), d.u64()
	s.ManifestSize, s.FullBytes, s.NewBytes = int64(d.u64()), int64(d.u64()), int64(d.u64())
	copy(s.ManifestSHA256[:], d.take(sha256.Size))
	s.ManifestKey = d.text()
}

// count is the length of a list whose entries take at least so many bytes.
func (d *decoder) count(least, limit int) int {
	n := int(d.u32())
	if n > limit || n*least > len(d.b) {
		d.bad = true
		return 0
	}
	return n
}

// u32of64 is a number of 64 bits that must fit 32.
func (d *decoder) u32of64() uint32 {
	v := d.u64()
	if v > math.MaxUint32 {
		d.bad = true
		return 0
	}
	return uint32(v)
}

// bytes is a copy; none are nil.
func (d *decoder) bytes() []byte {
	b := d.take(4)
	if b == nil {
		return nil
	}
	n := binary.LittleEndian.Uint32(b)
	if uint64(n) > uint64(len(d.b)) {
		d.bad = true
		return nil
	}
	return append([]byte(nil), d.take(int(n))...)
}
