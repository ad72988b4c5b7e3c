package meta

import (
	"fmt"
	"math"

	"github.com/keelstate/keelstate/internal/base"
)

// kindSet is a set of tables.
type kindSet uint32

const (
	hasCounters kindSet = 1 << iota
	hasNodes
	hasShards
	hasKeyspaces
	hasStates
	hasDropped
	hasSessions
	hasEnded
	hasOperations
	hasCheckpoints
	hasCheckpointShards
	hasCheckpointUses
	hasObjects
	hasPlans
	hasRollbacks
	hasParticipants
	hasPositions
	hasRestored
)

// publish returns the tables with copies of those in dirty, and old's for the
// rest. Single records are replaced, never changed, so they are simply taken.
func (t *tables) publish(old tables, dirty kindSet) tables {
	old.cluster, old.floor, old.floorRev = t.cluster, t.floor, t.floorRev
	if dirty&hasCounters != 0 {
		old.counters = t.counters.Copy()
	}
	if dirty&hasNodes != 0 {
		old.nodes = t.nodes.Copy()
	}
	if dirty&hasShards != 0 {
		old.shards = t.shards.Copy()
	}
	if dirty&hasKeyspaces != 0 {
		old.keyspaces = t.keyspaces.Copy()
	}
	if dirty&hasStates != 0 {
		old.states, old.statesByID = t.states.Copy(), t.statesByID.Copy()
	}
	if dirty&hasDropped != 0 {
		old.dropped = t.dropped.Copy()
	}
	if dirty&hasSessions != 0 {
		old.sessions = t.sessions.Copy()
	}
	if dirty&hasEnded != 0 {
		old.ended, old.endedByID = t.ended.Copy(), t.endedByID.Copy()
	}
	if dirty&hasOperations != 0 {
		old.operations = t.operations.Copy()
	}
	old.checkpointTables = t.checkpointTables.publish(old.checkpointTables, dirty)
	return old
}

// set decodes the record under key and puts it into its table, which it
// returns.
func (t *tables) set(key string, value []byte, rev base.Revision) (kindSet, error) {
	kind, rest := splitKey(key)
	k, err := t.setKind(kind, rest, value, rev)
	if err != nil {
		return 0, fmt.Errorf("reading metadata key %q: %w", key, err)
	}
	return k, nil
}

func (t *tables) setKind(kind, rest string, value []byte, rev base.Revision) (kindSet, error) {
	switch kind {
	case kindCluster:
		rec := &Cluster{Revision: rev}
		err := decode(kind, value, rec)
		t.cluster = rec
		return 0, same(err, rest, "")
	case kindEndedFloor:
		rec := &endedFloor{}
		err := decode(kind, value, rec)
		t.floor, t.floorRev = rec, rev
		return 0, same(err, rest, "")
	case kindCounter:
		rec := &counterRecord{revision: rev}
		err := decode(kind, value, &rec.counter)
		if err == nil && rec.Next == 0 {
			err = fmt.Errorf("a counter at 0: %w", base.ErrCorrupt)
		}
		t.counters.Set(rest, rec)
		return hasCounters, err
	case kindNode:
		rec := &Node{Revision: rev}
		err := decode(kind, value, rec)
		t.nodes.Set(rest, rec)
		return hasNodes, same(err, rest, string(rec.ID))
	case kindKeyspace:
		rec := &Keyspace{Revision: rev}
		err := decode(kind, value, rec)
		t.keyspaces.Set(rest, rec)
		return hasKeyspaces, same(err, rest, rec.Name)
	case kindState:
		rec := &Declaration{Revision: rev}
		err := decode(kind, value, rec)
		if old, had := t.states.Set(rest, rec); had {
			t.statesByID.Delete(old.ID)
		}
		t.statesByID.Set(rec.ID, rec)
		return hasStates, same(err, rest, stateName(rec.Keyspace, rec.Name))
	}
	if k, ok, err := t.checkpointTables.set(kind, rest, value, rev); ok {
		return k, err
	}
	id, err := numbered(kind, rest)
	if err != nil {
		return 0, err
	}
	return t.setNumbered(kind, id, value, rev)
}

func (t *tables) setNumbered(kind string, id uint64, value []byte, rev base.Revision) (kindSet, error) {
	switch kind {
	case kindShard:
		rec := &Shard{Revision: rev}
		err := decode(kind, value, rec)
		t.shards.Set(id, rec)
		return hasShards, same(err, id, uint64(rec.ID))
	case kindDropped:
		rec := &Declaration{Revision: rev}
		err := decode(kind, value, rec)
		t.dropped.Set(rec.ID, rec)
		return hasDropped, same(err, id, uint64(rec.ID))
	case kindSession:
		rec := &Session{Revision: rev}
		err := decode(kind, value, rec)
		t.sessions.Set(id, rec)
		return hasSessions, same(err, id, uint64(rec.ID))
	case kindEnded:
		rec := &EndedSession{Revision: rev}
		err := decode(kind, value, rec)
		t.dropEnded(id)
		t.ended.Set(endedKey(rev, rec.ID), rec)
		t.endedByID.Set(id, rec)
		return hasEnded, same(err, id, uint64(rec.ID))
	case kindOperation:
		rec := &Operation{Revision: rev}
		err := decode(kind, value, rec)
		t.operations.Set(id, rec)
		return hasOperations, same(err, id, rec.ID)
	}
	return 0, unknownKind(kind)
}

// numbered reads the number in the key of a record that has one.
func numbered(kind, rest string) (uint64, error) {
	switch kind {
	case kindShard, kindDropped, kindSession, kindEnded, kindOperation:
		return parseID(rest)
	}
	return 0, unknownKind(kind)
}

// unknownKind is no corruption: a newer build may have written the record.
func unknownKind(kind string) error {
	return fmt.Errorf("a record of unknown kind %q: %w", kind, base.ErrFormatVersion)
}

// same returns err, or that the name in the key is not that in the record. A
// table that got such a record is thrown away by its owner.
func same[T comparable](err error, key, record T) error {
	if err == nil && key != record {
		return fmt.Errorf("the key says %v, the record %v: %w", key, record, base.ErrCorrupt)
	}
	return err
}

func (t *tables) dropEnded(id uint64) {
	if old, had := t.endedByID.Delete(id); had {
		t.ended.Delete(endedKey(old.Revision, old.ID))
	}
}

// remove takes the record under key out of its table, which it returns.
func (t *tables) remove(key string) (kindSet, error) {
	kind, rest := splitKey(key)
	switch kind {
	case kindCluster:
		t.cluster = nil
		return 0, nil
	case kindEndedFloor:
		t.floor, t.floorRev = nil, 0
		return 0, nil
	case kindCounter:
		t.counters.Delete(rest)
		return hasCounters, nil
	case kindNode:
		t.nodes.Delete(rest)
		return hasNodes, nil
	case kindKeyspace:
		t.keyspaces.Delete(rest)
		return hasKeyspaces, nil
	case kindState:
		if old, had := t.states.Delete(rest); had {
			t.statesByID.Delete(old.ID)
		}
		return hasStates, nil
	}
	if k, ok, err := t.checkpointTables.remove(kind, rest); ok {
		return k, err
	}
	id, err := numbered(kind, rest)
	if err != nil {
		return 0, err
	}
	switch kind {
	case kindShard:
		t.shards.Delete(id)
		return hasShards, nil
	case kindDropped:
		if id <= math.MaxUint32 {
			t.dropped.Delete(uint32(id))
		}
		return hasDropped, nil
	case kindSession:
		t.sessions.Delete(id)
		return hasSessions, nil
	case kindEnded:
		t.dropEnded(id)
		return hasEnded, nil
	case kindOperation:
		t.operations.Delete(id)
		return hasOperations, nil
	}
	return 0, unknownKind(kind)
}
