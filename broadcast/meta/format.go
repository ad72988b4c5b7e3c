package meta

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// Prefix is the reserved part of the map; everything below it belongs to this
// package.
const Prefix = "meta/"

// recordVersion is the version of every record; docs/formats/system-metadata.md
// has the tables. Frozen with the golden files.
const recordVersion = 1

// MaxRecordBytes bounds an encoded record.
const MaxRecordBytes = 1 << 20

// The kinds of records: the first part of the key below Prefix, and the "kind"
// in the record. Frozen.
const (
	kindCluster    = "cluster"
	kindNode       = "node"
	kindShard      = "shard"
	kindKeyspace   = "keyspace"
	kindState      = "state"
	kindDropped    = "dropped"
	kindSession    = "session"
	kindEnded      = "ended"
	kindEndedFloor = "ended-floor"
	kindOperation  = "operation"
	kindCounter    = "counter"

	kindCheckpoint      = "checkpoint"
	kindCheckpointShard = "checkpoint-shard"
	kindCheckpointUses  = "checkpoint-uses"
	kindObject          = "object"
	kindDeletePlan      = "delete-plan"

	kindRollbackShard = "rollback-shard"

	kindParticipant      = "participant"
	kindPosition         = "checkpoint-participant"
	kindRestoredPosition = "restored-position"
)

// The counters.
const (
	counterShard     = "shard"
	counterState     = "state"
	counterSession   = "session"
	counterOperation = "operation"

	counterCheckpoint = "checkpoint"
	counterAttempt    = "attempt"
	counterPlan       = "delete-plan"

	counterParticipant = "participant"
)

// idKey is the key of a record that has a number: 16 hexadecimal digits, so
// that the order of the keys is that of the numbers.
func idKey(kind string, id uint64) string { return fmt.Sprintf("%s%s/%016x", Prefix, kind, id) }

func nameKey(kind, name string) string { return Prefix + kind + "/" + name }

const (
	clusterKey    = Prefix + kindCluster
	endedFloorKey = Prefix + kindEndedFloor
)

// stateName is the key of a state below its kind, and in View.states.
func stateName(keyspace, name string) string { return keyspace + "/" + name }

// envelope is what every record looks like. The version comes first and keeps
// its name in every version.
type envelope struct {
	V    int             `json:"v"`
	Kind string          `json:"kind"`
	Data json.RawMessage `json:"data"`
}

// encode returns the bytes of a record.
func encode(kind string, rec any) ([]byte, error) {
	data, err := json.Marshal(rec)
	if err != nil {
		return nil, fmt.Errorf("encoding a %s record: %w: %w", kind, err, base.ErrInvalid)
	}
	b, err := json.Marshal(envelope{V: recordVersion, Kind: kind, Data: data})
	if err != nil {
		return nil, fmt.Errorf("encoding a %s record: %w: %w", kind, err, base.ErrInvalid)
	}
	if len(b) > MaxRecordBytes {
		return nil, &base.Error{Cause: base.ErrTooLarge, Field: kind, Hint: fmt.Sprintf("a record has at most %d bytes", MaxRecordBytes), Ordinal: -1}
	}
	return b, nil
}

// decode reads a record into rec. Another version wraps base.ErrFormatVersion;
// whatever else is not such a record, unknown fields too, base.ErrCorrupt.
func decode(kind string, b []byte, rec any) error {
	if len(b) > MaxRecordBytes {
		return fmt.Errorf("reading a %s record of %d bytes: %w", kind, len(b), base.ErrCorrupt)
	}
	var version struct {
		V int `json:"v"`
	}
	if err := json.Unmarshal(b, &version); err != nil || version.V <= 0 {
		return fmt.Errorf("reading the version of a %s record: %v: %w", kind, err, base.ErrCorrupt)
	}
	if version.V != recordVersion {
		return fmt.Errorf("reading a %s record of version %d, this build knows %d: %w", kind, version.V, recordVersion, base.ErrFormatVersion)
	}
	var e envelope
	if err := strict(b, &e); err != nil {
		return fmt.Errorf("reading a %s record: %v: %w", kind, err, base.ErrCorrupt)
	}
	if e.Kind != kind {
		return fmt.Errorf("reading a %s record: it says that it is a %q record: %w", kind, e.Kind, base.ErrCorrupt)
	}
	if err := strict(e.Data, rec); err != nil {
		return fmt.Errorf("reading a %s record: %v: %w", kind, err, base.ErrCorrupt)
	}
	return nil
}

// strict parses one JSON object without unknown fields and nothing behind it.
func strict(b []byte, into any) error {
	if len(b) == 0 || b[0] != '{' {
		return errors.New("no object")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("bytes after the end")
	}
	return nil
}

// splitKey parts a key below Prefix into its kind and the rest.
func splitKey(key string) (kind, rest string) {
	kind, rest, _ = strings.Cut(strings.TrimPrefix(key, Prefix), "/")
	return kind, rest
}

// parseID reads the number of a key that idKey made.
func parseID(rest string) (uint64, error) {
	id, err := strconv.ParseUint(rest, 16, 64)
	if err != nil || fmt.Sprintf("%016x", id) != rest {
		return 0, fmt.Errorf("reading the number in key %q: %w", rest, base.ErrCorrupt)
	}
	return id, nil
}
