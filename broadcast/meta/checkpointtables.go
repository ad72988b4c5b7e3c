package meta

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/internal/base"
)

// checkpointTables are the decoded records of checkpoints and of the registry of
// objects.
type checkpointTables struct {
	checkpoints *btree.Map[uint64, *Checkpoint]
	// shardsOf is ordered by (checkpoint, group), usesOf by (checkpoint, group,
	// part), as numbersKey writes them.
	shardsOf *btree.Map[string, *CheckpointShard]
	usesOf   *btree.Map[string, *objectUse]
	objects  *btree.Map[uint64, *Object]
	byKey    *btree.Map[string, *Object]
	// contents is ordered by (SHA-256, size, number of the object, offset).
	contents *btree.Map[string, content]
	plans    *btree.Map[uint64, *DeletePlan]
	// rollbacks is ordered by (operation, group).
	rollbacks *btree.Map[string, *RollbackShard]

	participants *btree.Map[string, *Participant]
	// positions is ordered by (checkpoint, participant).
	positions *btree.Map[string, *Position]
	restored  *btree.Map[string, *RestoredPosition]
}

// content is a piece of an object.
type content struct {
	object         *Object
	offset, length int64
}

func newCheckpointTables() checkpointTables {
	return checkpointTables{
		checkpoints: btree.NewMap[uint64, *Checkpoint](tableDegree),
		shardsOf:    btree.NewMap[string, *CheckpointShard](tableDegree),
		usesOf:      btree.NewMap[string, *objectUse](tableDegree),
		objects:     btree.NewMap[uint64, *Object](tableDegree),
		byKey:       btree.NewMap[string, *Object](tableDegree),
		contents:    btree.NewMap[string, content](tableDegree),
		plans:       btree.NewMap[uint64, *DeletePlan](tableDegree),
		rollbacks:   btree.NewMap[string, *RollbackShard](tableDegree),

		participants: btree.NewMap[string, *Participant](tableDegree),
		positions:    btree.NewMap[string, *Position](tableDegree),
		restored:     btree.NewMap[string, *RestoredPosition](tableDegree),
	}
}

// publish is tables.publish for these tables.
func (t *checkpointTables) publish(old checkpointTables, dirty kindSet) checkpointTables {
	if dirty&hasCheckpoints != 0 {
		old.checkpoints = t.checkpoints.Copy()
	}
	if dirty&hasCheckpointShards != 0 {
		old.shardsOf = t.shardsOf.Copy()
	}
	if dirty&hasCheckpointUses != 0 {
		old.usesOf = t.usesOf.Copy()
	}
	if dirty&hasObjects != 0 {
		old.objects, old.byKey, old.contents = t.objects.Copy(), t.byKey.Copy(), t.contents.Copy()
	}
	if dirty&hasPlans != 0 {
		old.plans = t.plans.Copy()
	}
	if dirty&hasRollbacks != 0 {
		old.rollbacks = t.rollbacks.Copy()
	}
	if dirty&hasParticipants != 0 {
		old.participants = t.participants.Copy()
	}
	if dirty&hasPositions != 0 {
		old.positions = t.positions.Copy()
	}
	if dirty&hasRestored != 0 {
		old.restored = t.restored.Copy()
	}
	return old
}

// numbersKey orders records that have several numbers.
func numbersKey(numbers ...uint64) string {
	b := make([]byte, 0, 8*len(numbers))
	for _, n := range numbers {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	return string(b)
}

// idsKey is the key of a record that has several numbers, each written as in
// idKey.
func idsKey(kind string, ids ...uint64) string {
	b := []byte(Prefix + kind)
	for _, id := range ids {
		b = fmt.Appendf(b, "/%016x", id)
	}
	return string(b)
}

// parseIDs reads the numbers of a key that idsKey made.
func parseIDs(rest string, ids ...*uint64) error {
	parts := strings.Split(rest, "/")
	if len(parts) != len(ids) {
		return fmt.Errorf("%d numbers in key %q, want %d: %w", len(parts), rest, len(ids), base.ErrCorrupt)
	}
	for i, p := range parts {
		id, err := parseID(p)
		if err != nil {
			return err
		}
		*ids[i] = id
	}
	return nil
}

func contentKey(sum Sum, size int64, rest ...uint64) string {
	return string(sum[:]) + numbersKey(append([]uint64{uint64(size)}, rest...)...)
}

// set decodes a record of these tables; ok is false if it is of another kind.
func (t *checkpointTables) set(kind, rest string, value []byte, rev base.Revision) (k kindSet, ok bool, err error) {
	switch kind {
	case kindCheckpoint, kindObject, kindDeletePlan:
		id, err := parseID(rest)
		if err != nil {
			return 0, true, err
		}
		k, err = t.setNumbered(kind, id, value, rev)
		return k, true, err
	case kindCheckpointShard:
		rec := &CheckpointShard{Revision: rev}
		var n, g uint64
		if err := parseIDs(rest, &n, &g); err != nil {
			return 0, true, err
		}
		err := decode(kind, value, rec)
		t.shardsOf.Set(numbersKey(n, g), rec)
		return hasCheckpointShards, true, same(err, [2]uint64{n, g}, [2]uint64{rec.Checkpoint, uint64(rec.Group)})
	case kindRollbackShard:
		rec := &RollbackShard{Revision: rev}
		var n, g uint64
		if err := parseIDs(rest, &n, &g); err != nil {
			return 0, true, err
		}
		err := decode(kind, value, rec)
		t.rollbacks.Set(numbersKey(n, g), rec)
		return hasRollbacks, true, same(err, [2]uint64{n, g}, [2]uint64{rec.Operation, uint64(rec.Group)})
	case kindCheckpointUses:
		rec := &objectUse{revision: rev}
		var n, g, p uint64
		if err := parseIDs(rest, &n, &g, &p); err != nil {
			return 0, true, err
		}
		err := decode(kind, value, rec)
		t.usesOf.Set(numbersKey(n, g, p), rec)
		return hasCheckpointUses, true, same(err, [3]uint64{n, g, p}, [3]uint64{rec.Checkpoint, uint64(rec.Group), rec.Part})
	}
	return t.setParticipant(kind, rest, value, rev)
}

// setParticipant is set for what concerns participants.
func (t *checkpointTables) setParticipant(kind, rest string, value []byte, rev base.Revision) (k kindSet, ok bool, err error) {
	switch kind {
	case kindParticipant:
		rec := &Participant{Revision: rev}
		err := decode(kind, value, rec)
		t.participants.Set(rest, rec)
		return hasParticipants, true, same(err, rest, rec.ID)
	case kindPosition:
		rec := &Position{Revision: rev}
		n, id, err := parsePositionKey(rest)
		if err != nil {
			return 0, true, err
		}
		err = decode(kind, value, rec)
		t.positions.Set(numbersKey(n)+id, rec)
		return hasPositions, true, same(same(err, n, rec.Checkpoint), id, rec.Participant)
	case kindRestoredPosition:
		rec := &RestoredPosition{Revision: rev}
		err := decode(kind, value, rec)
		t.restored.Set(rest, rec)
		return hasRestored, true, same(err, rest, rec.Participant)
	}
	return 0, false, nil
}

// parsePositionKey reads what positionKey has behind the kind.
func parsePositionKey(rest string) (checkpoint uint64, participant string, err error) {
	number, participant, _ := strings.Cut(rest, "/")
	if checkpoint, err = parseID(number); err == nil && participant == "" {
		err = fmt.Errorf("no participant in key %q: %w", rest, base.ErrCorrupt)
	}
	return checkpoint, participant, err
}

func (t *checkpointTables) setNumbered(kind string, id uint64, value []byte, rev base.Revision) (kindSet, error) {
	switch kind {
	case kindCheckpoint:
		rec := &Checkpoint{Revision: rev}
		err := decode(kind, value, rec)
		t.checkpoints.Set(id, rec)
		return hasCheckpoints, same(err, id, rec.Number)
	case kindDeletePlan:
		rec := &DeletePlan{Revision: rev}
		err := decode(kind, value, rec)
		t.plans.Set(id, rec)
		return hasPlans, same(err, id, rec.ID)
	}
	rec := &Object{}
	err := decode(kind, value, rec)
	if err == nil {
		err = checkStoredObject(rec)
	}
	t.dropObject(id)
	if err == nil && id == rec.Number {
		t.addObject(rec)
	}
	return hasObjects, same(err, id, rec.Number)
}

// checkStoredObject refuses a record that could not be indexed.
func checkStoredObject(o *Object) error {
	_, attempt, err := parseObjectName(o.Key)
	if err != nil {
		return fmt.Errorf("object %d: %v: %w", o.Number, err, base.ErrCorrupt)
	}
	if attempt != o.Attempt() {
		return fmt.Errorf("object %d has key %q: %w", o.Number, o.Key, base.ErrCorrupt)
	}
	return nil
}

func (t *checkpointTables) addObject(o *Object) {
	t.objects.Set(o.Number, o)
	t.byKey.Set(o.Key, o)
	if _, saved := savepointOf(o.Key); saved {
		return // nobody is to find its content
	}
	for _, p := range o.pieces() {
		t.contents.Set(contentKey(p.SHA256, p.Length, o.Number, uint64(p.Offset)), content{o, p.Offset, p.Length})
	}
}

func (t *checkpointTables) dropObject(number uint64) {
	o, had := t.objects.Delete(number)
	if !had {
		return
	}
	if now, ok := t.byKey.Get(o.Key); ok && now == o {
		t.byKey.Delete(o.Key)
	}
	for _, p := range o.pieces() {
		t.contents.Delete(contentKey(p.SHA256, p.Length, o.Number, uint64(p.Offset)))
	}
}

// remove takes a record out of these tables; ok is false if it is of another
// kind.
func (t *checkpointTables) remove(kind, rest string) (k kindSet, ok bool, err error) {
	var n, g, p uint64
	switch kind {
	case kindCheckpoint:
		n, err = parseID(rest)
		t.checkpoints.Delete(n)
		return hasCheckpoints, true, err
	case kindCheckpointShard:
		err = parseIDs(rest, &n, &g)
		t.shardsOf.Delete(numbersKey(n, g))
		return hasCheckpointShards, true, err
	case kindCheckpointUses:
		err = parseIDs(rest, &n, &g, &p)
		t.usesOf.Delete(numbersKey(n, g, p))
		return hasCheckpointUses, true, err
	case kindRollbackShard:
		err = parseIDs(rest, &n, &g)
		t.rollbacks.Delete(numbersKey(n, g))
		return hasRollbacks, true, err
	case kindObject:
		n, err = parseID(rest)
		t.dropObject(n)
		return hasObjects, true, err
	case kindDeletePlan:
		n, err = parseID(rest)
		t.plans.Delete(n)
		return hasPlans, true, err
	case kindParticipant:
		t.participants.Delete(rest)
		return hasParticipants, true, nil
	case kindPosition:
		n, id, err := parsePositionKey(rest)
		t.positions.Delete(numbersKey(n) + id)
		return hasPositions, true, err
	case kindRestoredPosition:
		t.restored.Delete(rest)
		return hasRestored, true, nil
	}
	return 0, false, nil
}
