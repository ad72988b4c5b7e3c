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
// checkpoint it must be, unless it is a savepoint, which may be anywhere. If sum is not zero, the object's SHA-256 must be this.
// It returns the SHA-256 of what it read. The errors are base.ErrNotFound,
// base.ErrCorrupt for bytes that are damaged or of another checkpoint,
// base.ErrFormatVersion, and those of the store; all name the object.
func ReadCheckpoint(ctx context.Context, store objectstore.Store, key string, sum [sha256.Size]byte) (*Checkpoint, [sha256.Size]byte, error) {
	fail := func(err error) (*Checkpoint, [sha256.Size]byte, error) {
		return nil, sum, fmt.Errorf("reading checkpoint %s: %w", key, err)
	}
	folder, ok := metadataFolder(key)
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
	if why := c.misplaced(key); why != "" {
		return fail(fmt.Errorf("%s: %w", why, base.ErrCorrupt))
	}
	c.folder = folder
	return c, got, nil
}

// ReadManifest reads the manifest of one of the checkpoint's shards, whose files
// all have a place in the store; those of a savepoint's files are made keys of the
// store. Errors are those of ReadCheckpoint.
func (c *Checkpoint) ReadManifest(ctx context.Context, store objectstore.Store, s *Shard) (*Manifest, error) {
	fail := func(err error) (*Manifest, error) {
		return nil, fmt.Errorf("reading manifest %s of shard %s: %w", s.ManifestKey, s.Group, err)
	}
	key, sum, ok := c.resolve(s.ManifestKey)
	if !ok || sum != s.ManifestSHA256 {
		return fail(fmt.Errorf("it is not named as a manifest of the checkpoint: %w", base.ErrCorrupt))
	}
	raw, err := objectstore.ReadAll(ctx, store, key, maxManifestBytes)
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
		f := &m.Files[i]
		if f.Object == "" {
			continue
		}
		key, _, ok := c.resolve(f.Object)
		if !ok {
			return fail(fmt.Errorf("file %s lies in %.200q, which is no object of cluster %s: %w", f.Name, f.Object, c.ClusterID, base.ErrCorrupt))
		}
		f.Object = key
	}
	if m.Changelog != nil {
		for i := range m.Changelog.Segments {
			g := &m.Changelog.Segments[i]
			if g.Object, _, ok = c.resolve(g.Object); !ok {
				return fail(fmt.Errorf("changelog segment %s lies in %.200q, which is no object of cluster %s: %w", g.FileName(), g.Object, c.ClusterID, base.ErrCorrupt))
			}
		}
	}
	return m, nil
}

// latestPart stands for the number of a cluster's newest checkpoint.
const latestPart = "latest"

// ParseName reads how people name a checkpoint within a store: the key of its
// `_metadata`, or its folder, which for a savepoint may be any, or CLUSTER/NUMBER. It
// returns the key of `_metadata`, or CLUSTER/latest for this name. What names
// nothing is base.ErrInvalid.
func ParseName(name string) (key string, err error) {
	refused := base.Invalid("restore", fmt.Sprintf("%.200q names no checkpoint: use what keelctl checkpoint show prints as its uri, or CLUSTER/NUMBER, or CLUSTER/latest", name))
	folder, literal := strings.CutSuffix("/"+name, "/"+metadataPart)
	folder = strings.TrimPrefix(folder, "/")
	if !literal {
		folder = strings.TrimSuffix(folder, "/")
	}
	parts := strings.Split(folder, "/")
	switch keyOf := MetadataKey; {
	case strings.HasPrefix(name, "/"):
		return "", refused
	case len(parts) == 2 && parts[1] == latestPart && !literal:
		if checkPrefix("cluster", parts[0]) != nil {
			return "", refused
		}
		return folder, nil
	case len(parts) == 3 && parts[1] == savepointsPart:
		keyOf = SavepointKey
		fallthrough
	case len(parts) == 3 && parts[1] == checkpointsPart, len(parts) == 2 && !literal && strings.Trim(parts[1], "0123456789") == "":
		number, err := strconv.ParseUint(parts[len(parts)-1], 10, 64)
		if err != nil || number == 0 || checkPrefix("cluster", parts[0]) != nil {
			return "", refused
		}
		return keyOf(base.ClusterID(parts[0]), number), nil
	case folder != "":
		folder += "/"
	case !literal:
		return "", refused
	}
	key = folder + metadataPart
	if objectstore.CheckKey(key) != nil {
		return "", refused
	}
	return key, nil
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
