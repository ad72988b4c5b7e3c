package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// MaxOrphans bounds what one search for orphans gives; the next finds the rest.
const MaxOrphans = 100_000

// ExecutePlan deletes the keys of a delete plan from the object store: `_metadata`
// before the objects, so that what it names goes later. It may be done again, by
// anybody, at any time: no key of a plan is used again. A plan with a key that is
// not one of this cluster's is refused as a whole, with base.ErrInvalid (B49). After
// another error some may be deleted.
func ExecutePlan(ctx context.Context, store objectstore.Store, cluster base.ClusterID, keys []string) error {
	var metadata, objects []string
	for _, key := range keys {
		switch isMetadata, ok := ownKey(cluster, key); {
		case !ok:
			return base.Invalid("keys", fmt.Sprintf("%.200q is no object of cluster %s", key, cluster))
		case isMetadata:
			metadata = append(metadata, key)
		default:
			objects = append(objects, key)
		}
	}
	for _, part := range [][]string{metadata, objects} {
		if len(part) == 0 {
			continue
		}
		if err := store.Delete(ctx, part...); err != nil {
			return fmt.Errorf("deleting %d objects of a plan: %w", len(part), err)
		}
	}
	return nil
}

// ownKey says whether a key is one that a cluster's checkpoints make, and which
// kind.
func ownKey(cluster base.ClusterID, key string) (metadata, ok bool) {
	if prefix, _, _, ok := ParseObjectKey(key); ok {
		return false, prefix == string(cluster)
	}
	if of, _, ok := ParseMetadataKey(key); ok {
		return true, of == cluster
	}
	of, _, metadata, ok := ParseSavepointKey(key)
	return metadata, ok && of == cluster
}

// OrphanOptions say what an orphan is.
type OrphanOptions struct {
	// IsOrphan says that nothing knows a key, and that nothing that runs may yet
	// come to use it. Keys that are not the cluster's own are never asked for.
	IsOrphan func(key string) bool
	// Before is the time, by the store's clock, before which an orphan was stored.
	// Clocks may differ: it is a grace on top of what IsOrphan rules out, not what
	// keeps objects that are being uploaded.
	Before time.Time
}

// Orphans is what FindOrphans found below a cluster's prefix.
type Orphans struct {
	// Keys are orphans, at most MaxOrphans, in the order of their keys; Bytes is
	// their size.
	Keys  []string
	Bytes int64
	// Objects is how many objects there are in all, Young how many orphans that
	// were stored too lately, Foreign how many that are not the cluster's own.
	Objects, Young, Foreign int
}

// FindOrphans looks for objects of a cluster that nothing uses. It lists only what
// is below the cluster's prefix, and gives nothing if the list is not complete. What
// lies in the folder of a savepoint beside a `_metadata` that is no orphan is none:
// the user may have put it there.
func FindOrphans(ctx context.Context, store objectstore.Store, cluster base.ClusterID, o OrphanOptions) (*Orphans, error) {
	if err := checkPrefix("cluster", string(cluster)); err != nil {
		return nil, err
	}
	out := &Orphans{}
	var saved savedFolder
	for object, err := range store.List(ctx, string(cluster)+"/", "") {
		if err != nil {
			return nil, fmt.Errorf("listing the objects of cluster %s: %w", cluster, err)
		}
		out.Objects++
		if _, ok := ownKey(cluster, object.Key); !ok {
			out.Foreign++
			continue
		}
		saved.enter(out, object.Key, o.IsOrphan)
		switch {
		case !o.IsOrphan(object.Key):
		case !object.Modified.Before(o.Before):
			out.Young++
		case len(out.Keys) < MaxOrphans:
			out.Keys = append(out.Keys, object.Key)
			out.Bytes += object.Size
		}
	}
	saved.leave(out)
	return out, nil
}

// savedFolder is the folder of a savepoint that a search for orphans goes through.
type savedFolder struct {
	name string
	// owned: there is a `_metadata` that is no orphan.
	owned bool
	// keys, bytes and young are what was found before the folder.
	keys, young int
	bytes       int64
}

// enter notes to which folder an object belongs; objects of one folder come one
// after another.
func (s *savedFolder) enter(out *Orphans, key string, orphan func(string) bool) {
	cluster, number, metadata, ok := ParseSavepointKey(key)
	name := ""
	if ok {
		name = SavepointFolder(cluster, number)
	}
	if name != s.name {
		s.leave(out)
		*s = savedFolder{name: name, keys: len(out.Keys), bytes: out.Bytes, young: out.Young}
	}
	if metadata && !orphan(key) {
		s.owned = true
	}
}

// leave takes back what was found in a folder that is the user's.
func (s *savedFolder) leave(out *Orphans) {
	if s.owned {
		out.Keys, out.Bytes, out.Young = out.Keys[:s.keys], s.bytes, s.young
	}
}

// StoreMetadata makes the `_metadata` of a checkpoint durable and says what it is.
// If there is one already, stored by somebody before or by an earlier call whose
// answer was lost, it is taken, provided that it is of the same cut: what it says of
// declared states and of formats may differ, for whoever made it may have known
// others. Something else under that key is base.ErrConflict; what cannot be
// `_metadata` is base.ErrInvalid.
func StoreMetadata(ctx context.Context, store objectstore.Store, c *Checkpoint) (sum [sha256.Size]byte, size int64, err error) {
	raw, err := c.Encode()
	if err != nil {
		return sum, 0, err
	}
	key := c.Key()
	err = store.Put(ctx, key, objectstore.Bytes(raw))
	if errors.Is(err, base.ErrConflict) {
		if raw, err = adopt(ctx, store, key, raw); err != nil {
			return sum, 0, err
		}
	}
	if err != nil {
		return sum, 0, fmt.Errorf("storing %s: %w", key, err)
	}
	return sha256.Sum256(raw), int64(len(raw)), nil
}

// adopt returns the `_metadata` that is there, if it is of the same cut as mine.
func adopt(ctx context.Context, store objectstore.Store, key string, mine []byte) ([]byte, error) {
	there, err := objectstore.ReadAll(ctx, store, key, MaxCheckpointBytes)
	if err != nil {
		return nil, fmt.Errorf("reading %s, which is there already: %w", key, err)
	}
	if bytes.Equal(there, mine) {
		return there, nil
	}
	a, err := cutOf(there)
	if err == nil {
		var b []byte
		if b, err = cutOf(mine); err == nil && bytes.Equal(a, b) {
			return there, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("another object is under %s: %w: %w", key, base.ErrConflict, err)
	}
	return nil, fmt.Errorf("the _metadata of another cut is under %s: %w", key, base.ErrConflict)
}

// cutOf encodes what has to be equal in two `_metadata` of one checkpoint.
func cutOf(raw []byte) ([]byte, error) {
	c, err := DecodeCheckpoint(raw)
	if err != nil {
		return nil, err
	}
	cut := *c
	cut.FormatVersion, cut.Keyspaces, cut.States, cut.Shards = 1, nil, nil, slices.Clone(c.Shards)
	return cut.Encode()
}
