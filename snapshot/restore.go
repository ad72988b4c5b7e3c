package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// ReadCheckpoint reads `_metadata` under a key, which says of which cluster and
// checkpoint it must be. If sum is not zero, the object's SHA-256 must be this.
// It returns the SHA-256 of what it read. The errors are base.ErrNotFound,
// base.ErrCorrupt for bytes that are damaged or of another checkpoint,
// base.ErrFormatVersion, and those of the store; all name the object.
func ReadCheckpoint(ctx context.Context, store objectstore.Store, key string, sum [sha256.Size]byte) (*Checkpoint, [sha256.Size]byte, error) {
	fail := func(err error) (*Checkpoint, [sha256.Size]byte, error) {
		return nil, sum, fmt.Errorf("reading checkpoint %s: %w", key, err)
	}
	cluster, number, ok := ParseMetadataKey(key)
	if !ok {
		return fail(base.Invalid("key", "it is not the key of a checkpoint"))
	}
	raw, err := objectstore.ReadAll(ctx, store, key, MaxCheckpointBytes)
	if err != nil {
		return fail(err)
	}
	got := sha256.Sum256(raw)
	if sum != ([sha256.Size]byte{}) && sum != got {
		return fail(fmt.Errorf("its SHA-256 is %x, not %x: %w", got, sum, base.ErrCorrupt))
	}
	c, err := DecodeCheckpoint(raw)
	if err != nil {
		return fail(err)
	}
	if c.ClusterID != cluster || c.Number != number {
		return fail(fmt.Errorf("it is of checkpoint %d of cluster %s: %w", c.Number, c.ClusterID, base.ErrCorrupt))
	}
	return c, got, nil
}

// ReadManifest reads the manifest of one of the checkpoint's shards, whose files
// all have a place in the store. Errors are those of ReadCheckpoint.
func (c *Checkpoint) ReadManifest(ctx context.Context, store objectstore.Store, s *Shard) (*Manifest, error) {
	fail := func(err error) (*Manifest, error) {
		return nil, fmt.Errorf("reading manifest %s of shard %s: %w", s.ManifestKey, s.Group, err)
	}
	if prefix, sum, _, ok := ParseObjectKey(s.ManifestKey); !ok || prefix != string(c.ClusterID) || sum != s.ManifestSHA256 {
		return fail(fmt.Errorf("it is not named as a manifest of the checkpoint: %w", base.ErrCorrupt))
	}
	raw, err := objectstore.ReadAll(ctx, store, s.ManifestKey, maxManifestBytes)
	if err != nil {
		return fail(err)
	}
	if int64(len(raw)) != s.ManifestSize || sha256.Sum256(raw) != s.ManifestSHA256 {
		return fail(fmt.Errorf("its %d bytes are not the %d of its name: %w", len(raw), s.ManifestSize, base.ErrCorrupt))
	}
	m, err := Decode(raw)
	if err == nil {
		err = m.CheckPlaces()
	}
	if err != nil {
		return fail(err)
	}
	if why := c.differs(s, m); why != "" {
		return fail(fmt.Errorf("%s: %w", why, base.ErrCorrupt))
	}
	for i := range m.Files {
		if prefix, _, _, ok := ParseObjectKey(m.Files[i].Object); m.Files[i].Object != "" && (!ok || prefix != string(c.ClusterID)) {
			return fail(fmt.Errorf("file %s lies in %.200q, which is no object of cluster %s: %w", m.Files[i].Name, m.Files[i].Object, c.ClusterID, base.ErrCorrupt))
		}
	}
	return m, nil
}

// latestPart stands for the number of a cluster's newest checkpoint.
const latestPart = "latest"

// ParseName reads how people name a checkpoint within a store: the key of its
// `_metadata`, the folder of that, or CLUSTER/NUMBER. CLUSTER/latest gives number
// 0. Any other name is base.ErrInvalid.
func ParseName(name string) (cluster base.ClusterID, number uint64, err error) {
	parts := strings.Split(strings.TrimSuffix(name, "/"+metadataPart), "/")
	if len(parts) == 3 && parts[1] == checkpointsPart {
		parts = []string{parts[0], parts[2]}
	}
	refused := base.Invalid("restore", fmt.Sprintf("%.200q names no checkpoint: use what keelctl checkpoint show prints as its uri, or CLUSTER/NUMBER, or CLUSTER/latest", name))
	if len(parts) != 2 || objectstore.CheckKey(parts[0]) != nil {
		return "", 0, refused
	}
	if parts[1] == latestPart {
		return base.ClusterID(parts[0]), 0, nil
	}
	number, perr := strconv.ParseUint(parts[1], 10, 64)
	if perr != nil || number == 0 || strings.TrimLeft(parts[1], "0123456789") != "" {
		return "", 0, refused
	}
	if _, _, ok := ParseMetadataKey(MetadataKey(base.ClusterID(parts[0]), number)); !ok {
		return "", 0, refused
	}
	return base.ClusterID(parts[0]), number, nil
}

// Latest is the number of a cluster's newest checkpoint in the store, that is the
// highest that has its `_metadata`. It fails with base.ErrNotFound if there is
// none, and with the store's error unless the listing was complete.
func Latest(ctx context.Context, store objectstore.Store, cluster base.ClusterID) (uint64, error) {
	if err := checkPrefix("cluster", string(cluster)); err != nil {
		return 0, err
	}
	var newest uint64
	for o, err := range store.List(ctx, string(cluster)+"/"+checkpointsPart+"/", "") {
		if err != nil {
			return 0, fmt.Errorf("looking for the newest checkpoint of cluster %s: %w", cluster, err)
		}
		if of, number, ok := ParseMetadataKey(o.Key); ok && of == cluster {
			newest = max(newest, number)
		}
	}
	if newest == 0 {
		return 0, fmt.Errorf("looking for the newest checkpoint of cluster %s: there is none: %w", cluster, errors.Join(base.ErrNotFound, ctx.Err()))
	}
	return newest, nil
}
