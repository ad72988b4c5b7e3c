package meta

import (
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
)

// CheckpointPhase is where a checkpoint of the cluster stands.
type CheckpointPhase string

// The phases of a checkpoint. The first three are running; at most one checkpoint
// runs at a time (ME7). Frozen.
const (
	// CheckpointWaiting: participants are to acknowledge; until they all have, no
	// shard passes the barrier (ME11). Without participants it is left out.
	CheckpointWaiting CheckpointPhase = "waiting"
	// CheckpointAnnounced: the shards are to pass the barrier and to upload.
	CheckpointAnnounced CheckpointPhase = "announced"
	// CheckpointMetadata: every shard has uploaded; nothing of the checkpoint
	// changes any more, its `_metadata` is being stored.
	CheckpointMetadata CheckpointPhase = "metadata"
	// CheckpointCompleted: retained, every object it uses is in the registry.
	CheckpointCompleted CheckpointPhase = "completed"
	// CheckpointFailed: kept to be shown.
	CheckpointFailed CheckpointPhase = "failed"
	// CheckpointDeleting: no longer retained; what only it used is being moved
	// to delete plans. The record goes away with the last of it.
	CheckpointDeleting CheckpointPhase = "deleting"
)

// Checkpoint is the record of a checkpoint of the cluster. It changes with the
// phase only: what the shards report is in records of their own (CheckpointShard).
type Checkpoint struct {
	// Number is given once (ME1) and grows.
	Number uint64          `json:"number"`
	Phase  CheckpointPhase `json:"phase"`
	// Automatic says that the interval started it, not a user.
	Automatic bool `json:"automatic,omitempty"`
	// Savepoint says that it is the user's: its objects are its own (ME13), and
	// it is retained until it is deleted as one.
	Savepoint bool `json:"savepoint,omitempty"`
	// Changelog says that a shard may store the log since an earlier checkpoint in
	// place of its files. Of a savepoint it is false.
	Changelog bool `json:"changelog,omitempty"`
	// LogOpen says that the uploaders of its shards may store the log that follows
	// under its attempts, though it has completed (ME14). The completion of one of
	// mode changelog opens it; the next start that is no savepoint's closes it.
	LogOpen     bool             `json:"log_open,omitempty"`
	Incarnation base.Incarnation `json:"incarnation"`
	KeyGroups   int              `json:"key_groups"`
	// Shards is how many shards it has.
	Shards int `json:"shards"`
	// Participants is how many participants it has, PositionBytes the sum of what
	// they have given.
	Participants  int `json:"participants,omitempty"`
	PositionBytes int `json:"position_bytes,omitempty"`
	// CreatedMs, UpdatedMs and EndedMs (0 while it runs) are the wall clock of
	// who made the change.
	CreatedMs uint64 `json:"created_ms"`
	UpdatedMs uint64 `json:"updated_ms"`
	EndedMs   uint64 `json:"ended_ms,omitempty"`
	// TimeoutMs is how long it may run, by the coordinator's own clock.
	TimeoutMs uint64 `json:"timeout_ms"`
	// Error says why it failed.
	Error string `json:"error,omitempty"`
	// MetadataSHA256 and MetadataSize are those of `_metadata`, once completed.
	MetadataSHA256 Sum   `json:"metadata_sha256"`
	MetadataSize   int64 `json:"metadata_size,omitempty"`
	// Totals are the sums over the shards, from CheckpointMetadata on.
	Totals CheckpointTotals `json:"totals"`
	// Garbage says that objects which only it uses may still be in the registry,
	// though it has failed.
	Garbage bool `json:"garbage,omitempty"`
	// MetadataPlanned says that its `_metadata` is in a delete plan, or was.
	MetadataPlanned bool `json:"metadata_planned,omitempty"`

	Revision base.Revision `json:"-"`
}

// Running says that the checkpoint has neither completed nor failed.
func (c *Checkpoint) Running() bool {
	return c.Phase == CheckpointWaiting || c.Phase == CheckpointAnnounced || c.Phase == CheckpointMetadata
}

// doomed says that objects of the checkpoint are to be planned for deletion.
func (c *Checkpoint) doomed() bool {
	return c.Phase == CheckpointDeleting || c.Phase == CheckpointFailed && c.Garbage
}

// CheckpointTotals are sums over the shards of a checkpoint.
type CheckpointTotals struct {
	// FullBytes are the bytes of all files, NewBytes those that were uploaded.
	FullBytes int64 `json:"full_bytes,omitempty"`
	NewBytes  int64 `json:"new_bytes,omitempty"`
	Files     int   `json:"files,omitempty"`
	NewFiles  int   `json:"new_files,omitempty"`
	// Objects is how many objects were stored.
	Objects  int `json:"objects,omitempty"`
	Requests int `json:"requests,omitempty"`
	// SyncMs and AsyncMs are the longest of any shard.
	SyncMs  uint64 `json:"sync_ms,omitempty"`
	AsyncMs uint64 `json:"async_ms,omitempty"`
}

// CheckpointShardState is where one shard stands within a checkpoint.
type CheckpointShardState string

// The states of a shard within a checkpoint, in their order. Frozen.
const (
	CheckpointShardAnnounced CheckpointShardState = "announced"
	// CheckpointShardFlushed: the uploader has flushed, so the flush at the
	// barrier will be short.
	CheckpointShardFlushed CheckpointShardState = "flushed"
	// CheckpointShardUploaded: its manifest and all files are in the store and in
	// the registry. It does not change any more.
	CheckpointShardUploaded CheckpointShardState = "uploaded"
)

// CheckpointShard is the record of one shard within a checkpoint: the version of
// the shard map that the barrier belongs to, and who uploads.
type CheckpointShard struct {
	Checkpoint uint64       `json:"checkpoint"`
	Group      base.GroupID `json:"group"`
	Birth      base.Birth   `json:"birth,string"`
	Epoch      base.Epoch   `json:"epoch"`
	Lo         int          `json:"lo"`
	Hi         int          `json:"hi"`
	// Uploader is the node whose replica uploads, under an attempt that is given
	// once (ME1) and is part of the key of every object it stores.
	Uploader  base.NodeID          `json:"uploader"`
	Attempt   uint64               `json:"attempt"`
	State     CheckpointShardState `json:"state"`
	UpdatedMs uint64               `json:"updated_ms"`
	// Prior is an attempt of the checkpoint before, under which the same uploader may
	// have stored the log since; 0: none. What it has stored so it registers here.
	Prior uint64 `json:"prior,omitempty"`
	// PriorObjects is how many objects of Prior it has put into the registry.
	PriorObjects int `json:"prior_objects,omitempty"`
	// Objects is how many objects it has put into the registry, UseParts how
	// many records say which ones it uses.
	Objects  int `json:"objects,omitempty"`
	UseParts int `json:"use_parts,omitempty"`
	// Report is there once the shard has uploaded.
	Report *ShardReport `json:"report,omitempty"`

	Revision base.Revision `json:"-"`
}

// ShardReport is what the uploader of a shard reports.
type ShardReport struct {
	// Index, Term, Sequence and ClockMs are the cut: the barrier's place in the
	// shard's log, and what the shard's header said behind it.
	Index    uint64 `json:"index"`
	Term     uint64 `json:"term"`
	Sequence uint64 `json:"sequence"`
	ClockMs  uint64 `json:"clock_ms"`

	ManifestKey    string `json:"manifest_key"`
	ManifestSHA256 Sum    `json:"manifest_sha256"`
	ManifestSize   int64  `json:"manifest_size"`

	FullBytes int64 `json:"full_bytes,omitempty"`
	NewBytes  int64 `json:"new_bytes,omitempty"`
	Files     int   `json:"files,omitempty"`
	NewFiles  int   `json:"new_files,omitempty"`
	Requests  int   `json:"requests,omitempty"`
	// BaseIndex is the index that the files hold if the rest is in Segments of the
	// log, of LogBytes of the full ones; 0 if the files hold all.
	BaseIndex uint64 `json:"base_index,omitempty"`
	LogBytes  int64  `json:"log_bytes,omitempty"`
	Segments  int    `json:"segments,omitempty"`
	// SyncMs is how long the uploader's apply paused, AsyncMs how long the upload
	// took.
	SyncMs  uint64 `json:"sync_ms,omitempty"`
	AsyncMs uint64 `json:"async_ms,omitempty"`
}

// Object is an object of the object store that checkpoints use: the registry. It
// never changes.
type Object struct {
	// Number is that of the attempt that stored it and its place among the
	// objects of that attempt: given once (ME1).
	Number uint64 `json:"number"`
	// Key is <cluster id>/<SHA-256 of the object>.<attempt>, in a savepoint
	// <cluster id>/savepoints/<number>/<SHA-256>.<attempt>.
	Key  string `json:"key"`
	Size int64  `json:"size"`
	// Parts says which contents lie in it. None means one: the whole object.
	Parts []ObjectPart `json:"parts,omitempty"`
}

// ObjectPart is one file's content within an object.
type ObjectPart struct {
	SHA256 Sum   `json:"sha256"`
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// Place is where some content lies in the object store.
type Place struct {
	Object         string
	Offset, Length int64
}

// The number of an object has the attempt in front of its place. Numbers stay
// below 2^53, so that readers of JSON with floating point keep them. Frozen.
const (
	objectPlaceBits = 20
	maxAttempt      = 1<<33 - 1
	// MaxPriorObjects bounds those of an attempt that the next checkpoint registers.
	// Their places are behind those of the attempt's own upload.
	MaxPriorObjects = 1 << 12
	// MaxUploadObjects bounds the objects of one shard's upload.
	MaxUploadObjects = 1<<objectPlaceBits - MaxPriorObjects
)

// Attempt is the attempt that stored the object.
func (o *Object) Attempt() uint64 { return o.Number >> objectPlaceBits }

// pieces are the contents of the object, whose key was checked.
func (o *Object) pieces() []ObjectPart {
	if len(o.Parts) > 0 {
		return o.Parts
	}
	sum, _, err := parseObjectName(o.Key)
	if err != nil {
		return nil
	}
	return []ObjectPart{{SHA256: sum, Length: o.Size}}
}

// sameAs says that two records name the same object with the same contents.
func (o *Object) sameAs(other *Object) bool {
	return o.Key == other.Key && o.Size == other.Size && slices.Equal(o.Parts, other.Parts)
}

// objectUse is a part of the list of objects that one shard of a checkpoint uses.
type objectUse struct {
	Checkpoint uint64       `json:"checkpoint"`
	Group      base.GroupID `json:"group"`
	Part       uint64       `json:"part"`
	// Objects are numbers in ascending order.
	Objects []uint64 `json:"objects"`

	revision base.Revision
}

// DeletePlan is a list of keys that are to be deleted from the object store. No
// key of a plan is in the registry, and none gets there again (ME8). The record
// goes away once they are deleted.
type DeletePlan struct {
	ID   uint64   `json:"id"`
	Keys []string `json:"keys"`
	// CreatedMs is the wall clock of who made it.
	CreatedMs uint64 `json:"created_ms"`
	// Why says whose keys these are, to be shown.
	Why string `json:"why"`

	Revision base.Revision `json:"-"`
}

// Sum is a SHA-256; 64 lower-case hexadecimal digits in a record, none for zero.
type Sum [32]byte

func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// MarshalText writes the sum for a record.
func (s Sum) MarshalText() ([]byte, error) {
	if s == (Sum{}) {
		return nil, nil
	}
	return hex.AppendEncode(nil, s[:]), nil
}

// UnmarshalText reads what MarshalText wrote, and nothing else.
func (s *Sum) UnmarshalText(text []byte) error {
	*s = Sum{}
	if len(text) == 0 {
		return nil
	}
	if len(text) != 2*len(s) || slices.ContainsFunc(text, func(c byte) bool { return 'A' <= c && c <= 'F' }) {
		return fmt.Errorf("a sum has 64 lower-case hexadecimal digits")
	}
	_, err := hex.Decode(s[:], text)
	return err
}
