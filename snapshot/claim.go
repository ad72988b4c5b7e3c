package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// deleteAtOnce bounds the keys of one request.
const deleteAtOnce = 1000

// DeleteClaimed deletes a checkpoint that its cluster has given away: what no other
// checkpoint of that cluster in the store uses, then the manifests, and
// `_metadata`, whose SHA-256 must be sum, at the end. So whoever finds it there
// goes on, and it is no error that it is not: then nothing is left to be done. It
// deletes nothing unless it can read every other checkpoint of the cluster; and
// never a key that the claimed checkpoint does not name (B49). It returns how many
// keys it asked to be deleted.
func DeleteClaimed(ctx context.Context, store objectstore.Store, key string, sum [sha256.Size]byte) (int, error) {
	c, _, err := ReadCheckpoint(ctx, store, key, sum)
	switch {
	case errors.Is(err, base.ErrNotFound):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("deleting a claimed checkpoint: %w", err)
	}
	if c.Savepoint {
		return 0, fmt.Errorf("deleting a claimed checkpoint: %w", base.Invalid("key", fmt.Sprintf("%s is a savepoint, which belongs to the user", key)))
	}
	objects, manifests, err := c.names(ctx, store)
	if err != nil {
		return 0, fmt.Errorf("deleting a claimed checkpoint: %w", err)
	}
	for o, err := range store.List(ctx, string(c.ClusterID)+"/"+checkpointsPart+"/", "") {
		if err != nil {
			return 0, fmt.Errorf("deleting claimed checkpoint %s: looking for others: %w", key, err)
		}
		if _, _, ok := ParseMetadataKey(o.Key); !ok || o.Key == key {
			continue
		}
		other, _, err := ReadCheckpoint(ctx, store, o.Key, [sha256.Size]byte{})
		if errors.Is(err, base.ErrNotFound) {
			continue // it was deleted meanwhile
		}
		if err != nil {
			return 0, fmt.Errorf("deleting claimed checkpoint %s: %w", key, err)
		}
		used, theirs, err := other.names(ctx, store)
		if err != nil {
			return 0, fmt.Errorf("deleting claimed checkpoint %s: %w", key, err)
		}
		for k := range used {
			delete(objects, k)
		}
		for k := range theirs {
			delete(manifests, k)
		}
	}
	n := 0
	for _, part := range [][]string{slices.Sorted(maps.Keys(objects)), slices.Sorted(maps.Keys(manifests)), {key}} {
		for keys := range slices.Chunk(part, deleteAtOnce) {
			if err := store.Delete(ctx, keys...); err != nil {
				return n, fmt.Errorf("deleting claimed checkpoint %s: %w", key, err)
			}
			n += len(keys)
		}
	}
	return n, nil
}

// names are the objects and the manifests that a checkpoint uses. A manifest that
// is gone names none: it goes only after they have gone.
func (c *Checkpoint) names(ctx context.Context, store objectstore.Store) (objects, manifests map[string]bool, err error) {
	objects, manifests = map[string]bool{}, map[string]bool{}
	for i := range c.Shards {
		s := &c.Shards[i]
		m, err := c.ReadManifest(ctx, store, s)
		if errors.Is(err, base.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		manifests[s.ManifestKey] = true
		for _, f := range m.FetchManifest().Files {
			if f.Object != "" {
				objects[f.Object] = true
			}
		}
	}
	return objects, manifests, nil
}
