package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// With CheckpointLocalLinks every replica keeps, for each checkpoint that the
// cluster keeps, what its store held at the barrier, by hard links where the engine
// has immutable files. A rollback then fetches nothing. It costs the room of what
// has been compacted away since, and a flush at the barrier on every replica.
//
// linked-<number>/ has files/ and, once those are whole, MANIFEST.

const linkedPrefix = "linked-"

// linksBelieved is how long a file that was read is linked without being read again: it
// is read at the barrier of the first checkpoint that has it, not at later ones. A job
// goes back to the newest checkpoint, and waits for it: reading 1 GB on each of three
// nodes that share two processors took 1.6 s. What rots meanwhile RocksDB finds by the
// checksums of its blocks, and the peers have it.
const linksBelieved = time.Hour

// linkedCheckpoints are the directories of a replica that may be here.
type linkedCheckpoints struct {
	mu     sync.Mutex
	listed bool
	here   []uint64
	// making are those that are being made; removing says that some are removed.
	making   map[uint64]bool
	removing bool
}

func (r *replica) linkedDir(number uint64) string {
	return filepath.Join(r.dir, linkedPrefix+strconv.FormatUint(number, 10))
}

// linkBarrier keeps what the store holds at a barrier. It is called on the apply
// goroutine, which waits for a short flush; what takes time is done beside it.
func (r *replica) linkBarrier(b raftfsm.Barrier) {
	if !r.node.opts.CheckpointLocalLinks || b.Missed() || r.node.linksNothing(b.Number) {
		return
	}
	dir := r.linkedDir(b.Number)
	files := filepath.Join(dir, preparedFiles)
	header := r.machine.Header()
	finish, err := r.beginLinks(dir, files)
	if err != nil {
		r.logger.Warn("keeping a checkpoint's files", "checkpoint", b.Number, "error", err)
		return
	}
	l := &r.linked
	l.mu.Lock()
	if l.making == nil {
		l.making = map[uint64]bool{}
	}
	l.making[b.Number] = true
	if !slices.Contains(l.here, b.Number) {
		l.here = append(l.here, b.Number)
	}
	l.mu.Unlock()
	r.spawn(func() {
		defer func() {
			l.mu.Lock()
			delete(l.making, b.Number)
			l.mu.Unlock()
		}()
		err := finish()
		m := manifestOf(header, r.node.opts.Driver.Name())
		if err == nil {
			m.Files, err = snapshot.HashFiles(r.ctx, files, r.snaps.hashes)
		}
		var raw []byte
		if err == nil {
			raw, err = m.Encode()
		}
		if err == nil {
			failpoint.Hit("cluster.links.before-manifest")
			err = writeFileDurably(filepath.Join(dir, preparedManifest), raw)
		}
		if err != nil && r.ctx.Err() == nil {
			r.logger.Warn("keeping a checkpoint's files", "checkpoint", b.Number, "error", err)
			if err := os.RemoveAll(dir); err != nil {
				r.logger.Warn("removing what was not kept", "checkpoint", b.Number, "error", err)
			}
		}
	})
}

// linksNothing says that nobody will want what is held at a barrier: by what the node
// knows the checkpoint has ended and is not kept, or is a savepoint.
func (n *Node) linksNothing(number uint64) bool {
	v, err := n.metaView()
	if err != nil || v.NextCheckpoint() <= number {
		return false // it is not known yet
	}
	return !keepsLinks(v.Checkpoint(number))
}

// keepsLinks says whether replicas keep what they held at a checkpoint.
func keepsLinks(c *meta.Checkpoint) bool {
	return c != nil && !c.Savepoint && (c.Running() || c.Phase == meta.CheckpointCompleted)
}

// beginLinks fixes the present instant. What an attempt before a crash has left of
// the same barrier goes.
func (r *replica) beginLinks(dir, files string) (finish func() error, err error) {
	if err := errors.Join(os.RemoveAll(dir), makeDirs(r.node.opts.DataDir, dir)); err != nil {
		return nil, err
	}
	store, release, err := r.machine.Store()
	if err != nil {
		return nil, err
	}
	defer release()
	return store.BeginCheckpoint(files)
}

// removeEndedLinks removes what is kept for checkpoints that are not kept any more.
// The checkpoint loop calls it.
func (r *replica) removeEndedLinks(v *meta.View) {
	l := &r.linked
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.listed {
		names, err := dirNames(r.dir)
		if err != nil {
			r.logger.Warn("looking for files that checkpoints keep", "error", err)
			return
		}
		for _, name := range names {
			digits, found := strings.CutPrefix(name, linkedPrefix)
			if n, err := strconv.ParseUint(digits, 10, 64); found && err == nil && !slices.Contains(l.here, n) {
				l.here = append(l.here, n)
			}
		}
		l.listed = true
	}
	gone := slices.DeleteFunc(slices.Clone(l.here), func(n uint64) bool {
		kept := keepsLinks(v.Checkpoint(n))
		if l.making[n] || kept && r.node.opts.CheckpointLocalLinks || v.NextCheckpoint() <= n {
			return true
		}
		op := v.RunningRollback()
		return op != nil && op.Checkpoint == n
	})
	if len(gone) == 0 || l.removing {
		return
	}
	l.removing = true
	r.spawn(func() { r.removeLinks(gone) })
}

// removeLinks removes what is kept for checkpoints. It takes its time beside the
// checkpoint loop, and without the lock, for which the apply goroutine waits.
func (r *replica) removeLinks(gone []uint64) {
	var left []uint64
	for _, n := range gone {
		if err := r.node.remover.remove(r.linkedDir(n)); err != nil {
			r.logger.Warn("removing what a checkpoint kept", "checkpoint", n, "error", err)
			left = append(left, n)
		}
	}
	l := &r.linked
	l.mu.Lock()
	defer l.mu.Unlock()
	l.here = slices.DeleteFunc(l.here, func(n uint64) bool { return slices.Contains(gone, n) && !slices.Contains(left, n) })
	l.removing = false
}

// linkedSource gives what a replica keeps and cannot link: files that an engine writes
// to are copied from where they lie, those that have rotted come from the object store,
// if it has their content. Fetch compares all of it.
type linkedSource struct {
	dir    string
	stored *storedFiles // nil: the object store has none of them
}

// Open implements snapshot.Source.
func (s linkedSource) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	switch {
	case !snapshot.Immutable(name):
		return openAt(filepath.Join(s.dir, name), offset)
	case s.stored == nil || !s.stored.stored[name]:
		return nil, fmt.Errorf("what is kept of %s is damaged, and the object store has no file of that content: %w", name, base.ErrCorrupt)
	}
	return s.stored.store.Open(ctx, name, offset)
}

func openAt(path string, offset int64) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// prepareFromLinks prepares a rollback of what this replica keeps itself, if that is
// of the cut which the checkpoint's uploader has reported; m is what it keeps. Every
// file is read and compared before it is linked, since it has lain on the disk, unless
// this process has read it lately.
func (r *replica) prepareFromLinks(ctx context.Context, op *meta.Rollback, cut *meta.ShardReport) (m *snapshot.Manifest, err error) {
	from := r.linkedDir(op.Checkpoint)
	m, err = readPrepared(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if m.Group != r.id || m.Birth != r.birth || m.Range != r.rng || m.Engine != r.node.opts.Driver.Name() ||
		m.Index != cut.Index || m.Term != cut.Term || m.Sequence != cut.Sequence || m.ClockMs != cut.ClockMs {
		return nil, fmt.Errorf("what is kept here is of index %d of term %d, the checkpoint is of %d of %d", m.Index, m.Term, cut.Index, cut.Term)
	}
	files, kept := filepath.Join(r.rollbackDir(op.ID), preparedFiles), filepath.Join(from, preparedFiles)
	if err := os.RemoveAll(files); err != nil {
		return nil, err
	}
	progress := r.node.fetches.begin(fetchKey{r.id, op.ID}, m.Bytes(), r.metrics)
	src := linkedSource{dir: kept, stored: r.storedFiles(m, nil)}
	err = snapshot.Fetch(ctx, src, m, files, snapshot.FetchOptions{Parallel: storeFetches / maxPreparing, ReuseDirs: []string{kept},
		Read: r.snaps.hashes, ReadWithin: linksBelieved, Progress: progress.note})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("using what is kept of checkpoint %d: %w", op.Checkpoint, err), os.RemoveAll(files))
	}
	return m, nil
}
