package snapshot

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/objectstore"
)

// Checkpoint is what `_metadata` says of a checkpoint of a cluster. Its format is
// docs/formats/checkpoint-metadata.md. Equal checkpoints have equal bytes, so that
// whoever finds the object there can tell whether it is his.
type Checkpoint struct {
	ClusterID   base.ClusterID
	Number      uint64
	Incarnation base.Incarnation
	// FormatVersion is the newest format that the cluster's nodes were allowed to
	// write.
	FormatVersion uint32
	// M is the number of key groups; Engine the one of every shard's files.
	M         int
	Engine    string
	CreatedMs uint64
	// Savepoint says that it belongs to the user: all its objects lie in the folder
	// of `_metadata`, and the names of objects, here and in the manifests, are those
	// within this folder, so that it may be copied elsewhere.
	Savepoint bool
	// Keyspaces are in the order of their names, States in that of their ids.
	Keyspaces []Keyspace
	States    []State
	// Shards are in the order of their ranges, which tile [0, M).
	Shards []Shard
	// Participants are in the order of their ids.
	Participants []Participant
	// Broadcast and Operator hold the content of states of these kinds, in
	// formats of their own. They are empty until such states exist.
	Broadcast, Operator []byte

	// folder is where a savepoint was read.
	folder string
}

// Key is where the cluster stores `_metadata`.
func (c *Checkpoint) Key() string {
	if c.Savepoint {
		return SavepointKey(c.ClusterID, c.Number)
	}
	return MetadataKey(c.ClusterID, c.Number)
}

// misplaced says why the checkpoint cannot be what is to be found under a key, or
// nothing. A savepoint may have been copied to anywhere.
func (c *Checkpoint) misplaced(key string) string {
	if c.Savepoint || key == c.Key() {
		return ""
	}
	return fmt.Sprintf("it is of checkpoint %d of cluster %s", c.Number, c.ClusterID)
}

// resolve returns the key of an object that the checkpoint or a manifest of it
// names, and the SHA-256 of its bytes. A name that leads out of what belongs to the
// checkpoint is not ok.
func (c *Checkpoint) resolve(name string) (key string, sum [sha256.Size]byte, ok bool) {
	if !c.Savepoint {
		prefix, sum, _, ok := ParseObjectKey(name)
		return name, sum, ok && prefix == string(c.ClusterID)
	}
	sum, _, ok = parseObjectName(name)
	if c.folder == "" {
		return name, sum, ok
	}
	return c.folder + "/" + name, sum, ok
}

// Keyspace is a keyspace as it was declared.
type Keyspace struct{ Name, KeyType string }

// State is a state as it was declared; the texts are those of the declaration.
type State struct {
	ID                              uint32
	Keyspace, Name, Kind            string
	KeyType, UserKeyType, ValueType string
	Function, FunctionParams        string
	CodecVersion                    uint32
	// DroppedMs is the time of its drop, 0 if it was not dropped.
	DroppedMs uint64
}

// Shard is the cut through one shard, and where its manifest lies.
type Shard struct {
	Group base.GroupID
	Birth base.Birth
	Epoch base.Epoch
	Range keygroup.Range
	// Index, Term, Sequence and ClockMs are those of the manifest.
	Index, Term, Sequence, ClockMs uint64
	// ManifestKey is the name within the folder if it is a savepoint.
	ManifestKey    string
	ManifestSHA256 [sha256.Size]byte
	ManifestSize   int64
	// FullBytes is the size of all its files, NewBytes of those that the
	// checkpoint uploaded.
	FullBytes, NewBytes int64
}

// Participant is what a participant gave to be kept with the checkpoint.
type Participant struct {
	ID    string
	Bytes []byte
}

// Limits of `_metadata`.
const (
	// MaxCheckpointBytes bounds `_metadata` as a whole.
	MaxCheckpointBytes = 256 << 20
	MaxKeyspaces       = 100_000
	MaxStates          = 100_000
	MaxParticipants    = 100_000
	// MaxTextBytes bounds every text of a declaration, and a participant's id.
	MaxTextBytes = 1<<16 - 1
	// MaxParticipantBytes bounds what one participant may give.
	MaxParticipantBytes = 1 << 20
)

// sort brings the lists into the order in which they are written.
func (c *Checkpoint) sort() {
	slices.SortFunc(c.Keyspaces, func(a, b Keyspace) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(c.States, func(a, b State) int { return int(int64(a.ID) - int64(b.ID)) })
	slices.SortFunc(c.Shards, func(a, b Shard) int { return int(a.Range.Lo) - int(b.Range.Lo) })
	slices.SortFunc(c.Participants, func(a, b Participant) int { return strings.Compare(a.ID, b.ID) })
}

// validate checks what holds for every checkpoint (SN9).
func (c *Checkpoint) validate() error {
	if err := checkPrefix("cluster", string(c.ClusterID)); err != nil {
		return err
	}
	switch {
	case c.Number == 0:
		return base.Invalid("number", "1 or more")
	case c.FormatVersion == 0:
		return base.Invalid("format_version", "1 or more")
	case c.M < 1 || c.M > maxKeyGroups:
		return base.Invalid("m", fmt.Sprintf("1 to %d key groups", maxKeyGroups))
	case len(c.Engine) == 0 || len(c.Engine) > maxEngineBytes:
		return base.Invalid("engine", "1 to 255 bytes")
	case len(c.Keyspaces) > MaxKeyspaces:
		return tooMany("keyspaces", MaxKeyspaces)
	case len(c.States) > MaxStates:
		return tooMany("states", MaxStates)
	case len(c.Participants) > MaxParticipants:
		return tooMany("participants", MaxParticipants)
	}
	if err := c.validateStates(); err != nil {
		return err
	}
	if err := c.validateShards(); err != nil {
		return err
	}
	for i := range c.Participants {
		p := &c.Participants[i]
		if p.ID == "" || len(p.ID) > MaxTextBytes || i > 0 && c.Participants[i-1].ID >= p.ID {
			return base.Invalid("participants", fmt.Sprintf("%.64q is no id, out of order or twice", p.ID))
		}
		if len(p.Bytes) > MaxParticipantBytes {
			return tooMany("participants", MaxParticipantBytes)
		}
	}
	return nil
}

func tooMany(field string, limit int) error {
	return &base.Error{Cause: base.ErrTooLarge, Field: field, Ordinal: -1, Hint: fmt.Sprintf("at most %d", limit)}
}

func (c *Checkpoint) validateStates() error {
	for i := range c.Keyspaces {
		k := &c.Keyspaces[i]
		if k.Name == "" || i > 0 && c.Keyspaces[i-1].Name >= k.Name {
			return base.Invalid("keyspaces", fmt.Sprintf("%.64q is no name, out of order or twice", k.Name))
		}
		if len(k.Name) > MaxTextBytes || len(k.KeyType) > MaxTextBytes {
			return tooMany("keyspaces", MaxTextBytes)
		}
	}
	for i := range c.States {
		s := &c.States[i]
		if s.ID == 0 || i > 0 && c.States[i-1].ID >= s.ID {
			return base.Invalid("states", fmt.Sprintf("id %d is none, out of order or twice", s.ID))
		}
		for _, t := range s.texts() {
			if len(*t) > MaxTextBytes {
				return tooMany("states", MaxTextBytes)
			}
		}
	}
	return nil
}

// texts are the texts of a declaration in the order of the format.
func (s *State) texts() []*string {
	return []*string{&s.Keyspace, &s.Name, &s.Kind, &s.KeyType, &s.UserKeyType, &s.ValueType, &s.Function, &s.FunctionParams}
}

// validateShards checks the cuts, and that their ranges tile [0, M).
func (c *Checkpoint) validateShards() error {
	next := keygroup.Group(0)
	groups := make(map[base.GroupID]bool, min(len(c.Shards), c.M))
	for i := range c.Shards {
		s := &c.Shards[i]
		if s.Range.Lo != next || s.Range.Empty() {
			return base.Invalid("shards", fmt.Sprintf("the range %s of %s does not follow %d", s.Range, s.Group, next))
		}
		next = s.Range.Hi
		if s.Group == base.SystemGroup || groups[s.Group] {
			return base.Invalid("shards", fmt.Sprintf("%s is no shard, or twice", s.Group))
		}
		groups[s.Group] = true
		if s.ManifestSize <= 0 || s.FullBytes < 0 || s.NewBytes < 0 || s.NewBytes > s.FullBytes {
			return base.Invalid("shards", fmt.Sprintf("%s has impossible sizes", s.Group))
		}
		if err := objectstore.CheckKey(s.ManifestKey); err != nil {
			return fmt.Errorf("manifest of %s: %w", s.Group, err)
		}
		if c.Savepoint && strings.Contains(s.ManifestKey, "/") {
			return base.Invalid("shards", fmt.Sprintf("the manifest of %s lies outside of the savepoint's folder", s.Group))
		}
	}
	if int(next) != c.M {
		return base.Invalid("shards", fmt.Sprintf("the ranges end at %d of %d key groups", next, c.M))
	}
	return nil
}

// FullBytes is the size of the files of all shards, NewBytes of those that the
// checkpoint uploaded.
func (c *Checkpoint) FullBytes() (n int64) {
	for i := range c.Shards {
		n += c.Shards[i].FullBytes
	}
	return n
}

// NewBytes is the size of the files that the checkpoint uploaded.
func (c *Checkpoint) NewBytes() (n int64) {
	for i := range c.Shards {
		n += c.Shards[i].NewBytes
	}
	return n
}
