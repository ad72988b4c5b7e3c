package cluster

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// storedFiles gives those files of a leader's snapshot that the object store has,
// for a checkpoint, from there, and the others from the leader. Files are known by
// their content, so that it is the same whoever has them. What is deleted from the
// store meanwhile is an error, and the fetch goes on from the leader alone.
//
// Replicas compact on their own: the store has files of the leader's if the leader
// is the one that uploads the shard.
type storedFiles struct {
	stored map[string]bool // by name
	store  snapshot.Source
	peer   snapshot.Source
}

// Open implements snapshot.Source.
func (s *storedFiles) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	if s.stored[name] {
		return s.store.Open(ctx, name, offset)
	}
	return s.peer.Open(ctx, name, offset)
}

// storedFiles returns nil if the object store has none of the files.
func (r *replica) storedFiles(m *snapshot.Manifest, peer snapshot.Source) *storedFiles {
	if r.node.opts.Objects == nil {
		return nil
	}
	v, err := r.node.metaView()
	if err != nil {
		return nil
	}
	placed := *m
	placed.Files = slices.Clone(m.Files)
	s := &storedFiles{stored: map[string]bool{}, peer: peer}
	for i := range placed.Files {
		f := &placed.Files[i]
		p, known := v.FindContent(f.SHA256, f.Size)
		if !known || f.Size == 0 {
			continue
		}
		f.Object, f.Offset, f.Length = p.Object, p.Offset, p.Length
		s.stored[f.Name] = true
	}
	if len(s.stored) == 0 {
		return nil
	}
	s.store = r.storeSource(&placed)
	return s
}

// fetchFiles brings the files of a leader's snapshot here: from the leader, or with
// RebuildFromStore from the object store as far as that has them. Where one does not
// do, the other is tried; what has come stays.
func (r *replica) fetchFiles(ctx context.Context, m *snapshot.Manifest, peer snapshot.Source, dir string, o snapshot.FetchOptions) error {
	leader := countedSource{peer, r.metrics.fetchedFrom(fromPeer)}
	key := fetchKey{group: r.id}
	defer r.node.fetches.remove(func(k fetchKey) bool { return k == key })
	fetch := func(src snapshot.Source) error {
		o.Progress = r.node.fetches.begin(key, m.Bytes(), r.metrics).note
		return snapshot.Fetch(ctx, src, m, dir, o)
	}
	stored := r.storedFiles(m, leader)
	if stored == nil {
		return fetch(leader)
	}
	if r.node.opts.RebuildFromStore {
		err := fetch(stored)
		if err == nil || ctx.Err() != nil {
			return err
		}
		r.logger.Warn("fetching a snapshot from the object store; going on from the leader", "error", err)
		return fetch(leader)
	}
	err := fetch(leader)
	// The leader's file is gone or has rotted: the store may have it whole. While the
	// leader cannot be reached its snapshot is of no use.
	if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrNotFound) || ctx.Err() != nil {
		return err
	}
	r.logger.Warn("fetching a snapshot from the leader; going on from the object store", "error", err)
	return fetch(stored)
}
