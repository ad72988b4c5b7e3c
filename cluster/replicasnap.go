package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// What a replica gives away as a snapshot, and how it brings one here.

// snapshotFSM begins a snapshot at the present instant. It runs on the apply
// goroutine (R2): the flush that takes time was made just before, beside it.
func (r *replica) snapshotFSM() (raft.FSMSnapshot, error) {
	store, release, err := r.machine.Store()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := failpoint.Err("cluster.snapshot.begin"); err != nil {
		return nil, err
	}
	dir := filepath.Join(r.snaps.incoming(), fmt.Sprintf("tmp-%d", time.Now().UnixNano()))
	finish, err := store.BeginCheckpoint(dir)
	if err != nil {
		return nil, fmt.Errorf("taking a checkpoint of %s: %w", r.id, err)
	}
	return &replicaSnapshot{replica: r, dir: dir, finish: finish, header: r.machine.Header()}, nil
}

type replicaSnapshot struct {
	replica *replica
	dir     string
	finish  func() error
	header  *raftfsm.Header
}

// Persist implements raft.FSMSnapshot: it finishes the checkpoint, hashes the
// files and writes the manifest.
func (s *replicaSnapshot) Persist(sink raft.SnapshotSink) error {
	r := s.replica
	failpoint.Hit("cluster.snapshot.persist")
	err := s.finish()
	var raw []byte
	if err == nil {
		raw, err = r.snaps.stage(r.ctx, s.dir, manifestOf(s.header, r.node.opts.Driver.Name()))
	}
	if err == nil {
		err = failpoint.Err("cluster.snapshot.staged")
	}
	if err == nil {
		_, err = sink.Write(raw)
	}
	if err == nil {
		err = sink.Close()
	}
	if err != nil {
		r.metrics.snapshot("failed")
		return errors.Join(fmt.Errorf("persisting snapshot of %s: %w", r.id, err), sink.Cancel())
	}
	r.metrics.snapshot("made")
	return nil
}

// Release implements raft.FSMSnapshot.
func (s *replicaSnapshot) Release() {
	if err := s.replica.node.remover.remove(s.dir); err != nil {
		s.replica.logger.Warn("removing a checkpoint", "error", err)
	}
}

func manifestOf(h *raftfsm.Header, engineName string) *snapshot.Manifest {
	return &snapshot.Manifest{
		Group: h.Group, Birth: h.Birth, Incarnation: h.Incarnation, Epoch: h.Epoch, Range: h.Range, M: h.M,
		Engine: engineName, Index: h.AppliedIndex, Term: h.AppliedTerm, Sequence: h.Sequence, ClockMs: h.ClockMs,
	}
}

// peerFiles reads a snapshot's files from the node that sent the manifest.
type peerFiles struct {
	t     *transport.Transport
	node  base.NodeID
	group base.GroupID
	sum   string
}

// Open implements snapshot.Source.
func (p peerFiles) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	return p.t.FetchFile(ctx, p.node, fileName(p.group, p.sum, name), offset)
}

func fileName(g base.GroupID, sum, name string) string {
	return fmt.Sprintf("snapshot/%d/%s/%s", uint64(g), sum, name)
}

// prepareSnapshot fetches and verifies the files of a snapshot that a leader
// sends, before Raft sees it: raft's main loop never waits for a fetch.
func (r *replica) prepareSnapshot(ctx context.Context, m transport.SnapshotMeta, raw []byte, from base.NodeID) error {
	manifest, err := snapshot.Decode(raw)
	if err != nil {
		return fmt.Errorf("preparing snapshot of %s from %s: %w", r.id, from, err)
	}
	if manifest.Group != r.id || manifest.Birth != r.birth || manifest.Engine != r.node.opts.Driver.Name() {
		return fmt.Errorf("preparing snapshot of %s from %s: it is of group %s birth %x engine %s: %w",
			r.id, from, manifest.Group, uint64(manifest.Birth), manifest.Engine, base.ErrIdentity)
	}
	if have, err := r.hasSnapshot(r.snaps, m); have || err != nil {
		if err != nil {
			return err
		}
		return transport.ErrHaveSnapshot // it would say the same at the hand-over: fetch nothing
	}
	defer r.snaps.hold(raw)()
	var reuse []string
	if _, _, files, err := r.snaps.newest(); err == nil && files != "" {
		reuse = append(reuse, files)
	}
	if name, err := r.currentStore(); err == nil {
		reuse = append(reuse, filepath.Join(r.dir, name))
	}
	start := time.Now()
	src := peerFiles{t: r.node.transport, node: from, group: r.id, sum: manifestSum(raw)}
	err = r.fetchFiles(ctx, manifest, src, r.snaps.incomingDir(raw), snapshot.FetchOptions{Parallel: 2, ReuseDirs: reuse, Hashes: r.snaps.hashes})
	if err != nil {
		r.metrics.snapshot("failed")
		return fmt.Errorf("fetching snapshot of %s from %s: %w", r.id, from, err)
	}
	r.logger.Info("fetched a snapshot", "from", string(from), "index", manifest.Index, "files", len(manifest.Files), "took", time.Since(start))
	return nil
}
