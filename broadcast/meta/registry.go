package meta

import (
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// CutObjects parts objects into batches that one transaction can register each.
func CutObjects(objects []Object) [][]Object {
	var out [][]Object
	from, size := 0, 0
	for i := range objects {
		n := objectBytes(&objects[i])
		if i > from && (i-from == MaxObjectsPerTxn || size+n > MaxObjectBytesPerTxn) {
			out, from, size = append(out, objects[from:i]), i, 0
		}
		size += n
	}
	if from < len(objects) {
		out = append(out, objects[from:])
	}
	return out
}

// objectBytes is about what an object takes in a transaction, rather too much.
func objectBytes(o *Object) int { return 256 + len(o.Key) + 128*len(o.Parts) }

// RegisterObjectsTxn puts objects that the uploader of a shard has stored into the
// registry before its final report, which alone could not hold them all; each batch
// is one of CutObjects. Objects that are there already are left out, so a batch may
// come twice; if nothing is left the transaction is empty. Numbers in the objects
// are ignored, and so are the parts of those of a savepoint, which nobody reuses.
// Beside what uploading refuses, an object is base.ErrInvalid whose key
// is not of this cluster and attempt (or the shard's Prior), or whose parts do not lie in it, and
// base.ErrConflict if the registry has something else under its key.
func RegisterObjectsTxn(v *View, nowMs, number uint64, group base.GroupID, attempt uint64, objects []Object) (broadcast.Txn, error) {
	c, have, err := uploading(v, number, group, attempt)
	if err != nil {
		return broadcast.Txn{}, err
	}
	next := *have
	var b builder
	added, err := b.register(v, c, &next, objects)
	if err != nil || len(added) == 0 {
		return broadcast.Txn{}, err
	}
	if have.State == CheckpointShardUploaded {
		return broadcast.Txn{}, conflict("group", fmt.Sprintf("shard %s has uploaded already", group))
	}
	b.use(&next, added)
	next.UpdatedMs = max(nowMs, have.UpdatedMs)
	b.replaceShard(c, &next)
	return b.done()
}

// register puts those of the objects into the registry that are not there, and
// returns their numbers in order.
func (b *builder) register(v *View, c *Checkpoint, s *CheckpointShard, objects []Object) ([]uint64, error) {
	if len(objects) > MaxObjectsPerTxn {
		return nil, tooMany("objects", MaxObjectsPerTxn)
	}
	var added []uint64
	batch := make(map[string]*Object, len(objects))
	size := 0
	for i := range objects {
		o := objects[i]
		prior, err := normaliseObject(c.objectFolder(v.Cluster().ID), s, &o)
		if err != nil {
			return nil, fmt.Errorf("registering object %d of %d: %w", i+1, len(objects), err)
		}
		known := v.ObjectByKey(o.Key)
		if known == nil {
			known = batch[o.Key]
		}
		if known != nil {
			if !known.sameAs(&o) {
				return nil, conflict("objects", fmt.Sprintf("object %s is registered with other contents", o.Key))
			}
			continue
		}
		if size += objectBytes(&o); size > MaxObjectBytesPerTxn {
			return nil, &base.Error{Cause: base.ErrTooLarge, Field: "objects", Hint: "cut the objects into batches", Ordinal: -1}
		}
		if o.Number, err = s.nextNumber(prior); err != nil {
			return nil, err
		}
		batch[o.Key] = &o
		b.replace(kindObject, idKey(kindObject, o.Number), 0, &o)
		added = append(added, o.Number)
	}
	slices.Sort(added)
	return added, nil
}

// nextNumber gives an object a number. That of one of the shard's Prior has a place
// that the attempt's own upload has not given, nor any but this checkpoint gives
// (ME14).
func (s *CheckpointShard) nextNumber(prior bool) (uint64, error) {
	if prior {
		if s.PriorObjects >= MaxPriorObjects {
			return 0, tooMany("objects", MaxPriorObjects)
		}
		s.PriorObjects++
		return s.Prior<<objectPlaceBits | uint64(MaxUploadObjects+s.PriorObjects-1), nil
	}
	if s.Objects >= MaxUploadObjects {
		return 0, tooMany("objects", MaxUploadObjects)
	}
	s.Objects++
	return s.Attempt<<objectPlaceBits | uint64(s.Objects-1), nil
}

// normaliseObject checks an object that a shard's attempt has stored, or its Prior
// (prior), and leaves parts out that say what the key says.
func normaliseObject(folder string, s *CheckpointShard, o *Object) (prior bool, err error) {
	sum, by, err := parseObjectName(o.Key)
	if err != nil {
		return false, err
	}
	prior = by == s.Prior
	if !prior && by != s.Attempt || o.Key != objectKey(folder, sum, by) {
		return false, base.Invalid("key", fmt.Sprintf("%q is not one of attempt %d below %s", o.Key, s.Attempt, folder))
	}
	if o.Size < 0 {
		return false, base.Invalid("size", "0 or more bytes")
	}
	if len(o.Parts) > MaxObjectParts {
		return false, tooMany("parts", MaxObjectParts)
	}
	for _, p := range o.Parts {
		if p.Offset < 0 || p.Length < 0 || p.Length > o.Size || p.Offset > o.Size-p.Length {
			return false, base.Invalid("parts", fmt.Sprintf("%d bytes from %d on do not lie in an object of %d", p.Length, p.Offset, o.Size))
		}
	}
	if len(o.Parts) == 1 && o.Parts[0] == (ObjectPart{SHA256: sum, Length: o.Size}) || len(o.Parts) == 0 {
		o.Parts = nil
	}
	if _, saved := savepointOf(o.Key); saved {
		o.Parts = nil
	}
	return prior, nil
}

// use records that a shard of a checkpoint uses objects, whose numbers ascend.
func (b *builder) use(s *CheckpointShard, numbers []uint64) {
	for len(numbers) > 0 {
		n := min(len(numbers), maxUsesPerRecord)
		part := uint64(s.UseParts)
		s.UseParts++
		b.replace(kindCheckpointUses, idsKey(kindCheckpointUses, s.Checkpoint, uint64(s.Group), part), 0,
			objectUse{Checkpoint: s.Checkpoint, Group: s.Group, Part: part, Objects: numbers[:n]})
		numbers = numbers[n:]
	}
}

// reusedNumbers finds the objects of other attempts among keys; those of the
// attempt itself are used from when they were registered.
func reusedNumbers(v *View, attempt uint64, keys []string) ([]uint64, error) {
	if len(keys) > MaxReusedObjects {
		return nil, tooMany("reused", MaxReusedObjects)
	}
	numbers := make([]uint64, 0, len(keys))
	for _, key := range keys {
		o := v.ObjectByKey(key)
		if o == nil {
			return nil, conflict("reused", fmt.Sprintf("object %q is not in the registry", key))
		}
		if _, saved := savepointOf(key); saved {
			return nil, conflict("reused", fmt.Sprintf("object %q belongs to a savepoint", key))
		}
		if o.Attempt() != attempt {
			numbers = append(numbers, o.Number)
		}
	}
	slices.Sort(numbers)
	return slices.Compact(numbers), nil
}
