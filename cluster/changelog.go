package cluster

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// With CheckpointChangelog an uploader stores, where it can, the shard's log since
// the last checkpoint of which it stored the files, in place of the files of now: at
// the barrier nothing is flushed. The entries are those of its own Raft log up to
// the barrier, so that there is no second path of a write. What a restore replays
// is compared with the digest that the state machine had at the barrier. What has
// come together between two checkpoints is stored ahead of the barrier (changelogahead.go).

// maxSegments bounds the segments of a shard: each is an object that every
// checkpoint looks for, and that a restore fetches.
const maxSegments = 256

// lineage is what an uploader has stored of a shard: the files of a moment and the
// log behind it. It is replaced, never changed.
type lineage struct {
	// base are the files, with their places, segments the log behind them that a
	// checkpoint has registered.
	base     *snapshot.Manifest
	segments []snapshot.SegmentRef
	// ahead is the log that was stored since, under attempt, which is that of the last
	// checkpoint. Nobody knows of it yet. With attempt 0 nothing is stored ahead.
	ahead   []snapshot.SegmentRef
	attempt uint64
	// dropped is how many states were dropped by then.
	dropped int
}

// all are the segments, those stored ahead too.
func (l *lineage) all() []snapshot.SegmentRef { return slices.Concat(l.segments, l.ahead) }

// next is the index of the first entry that is not stored.
func (l *lineage) next() uint64 {
	switch {
	case len(l.ahead) > 0:
		return l.ahead[len(l.ahead)-1].Last + 1
	case len(l.segments) > 0:
		return l.segments[len(l.segments)-1].Last + 1
	}
	return l.base.Index + 1
}

func (l *lineage) bytes() (n int64) {
	for _, s := range l.all() {
		n += s.Size
	}
	return n
}

// keys are the objects of the registry that a checkpoint on the lineage uses.
func (l *lineage) keys() []string {
	var keys []string
	for i := range l.base.Files {
		if key := l.base.Files[i].Object; key != "" {
			keys = append(keys, key)
		}
	}
	for i := range l.segments {
		keys = append(keys, l.segments[i].Object)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// changelog is what a replica remembers of its lineage; a restart forgets it, and
// the next checkpoint stores files again.
type changelog struct {
	mu      sync.Mutex
	lineage *lineage // nil: the next checkpoint stores files
	// planned is the attempt that was found to be able to store the log.
	planned uint64
	// waiting is since when there is enough to be stored ahead, if there is.
	waiting time.Time
}

func (c *changelog) get() *lineage {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lineage
}

func (c *changelog) set(l *lineage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lineage, c.waiting = l, time.Time{}
}

// announced returns the lineage as a checkpoint finds it that may register what was
// stored ahead under the attempt prior, and nothing else.
func (c *changelog) announced(prior uint64) *lineage {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.lineage; l != nil && (l.attempt == 0 || l.attempt != prior) {
		left := *l
		left.ahead, left.attempt = nil, 0
		c.lineage = &left
	}
	return c.lineage
}

// beginChangelog makes files that an attempt has stored the base of what follows.
func (r *replica) beginChangelog(cp *meta.Checkpoint, attempt uint64, m *snapshot.Manifest, h *raftfsm.Header) {
	switch {
	case cp == nil || cp.Savepoint: // its files are not for others
	case !cp.Changelog:
		r.changelog.set(nil)
	default:
		r.changelog.set(&lineage{base: m, attempt: attempt, dropped: h.Dropped})
		r.metrics.materialised()
	}
}

// planChangelog says whether this attempt is to store the log, and nothing has to be
// flushed for it. It is asked when the checkpoint is announced.
func (r *replica) planChangelog(cp *meta.Checkpoint, s *meta.CheckpointShard) bool {
	if !cp.Changelog || cp.Savepoint || r.node.opts.Objects == nil {
		return false
	}
	l := r.changelog.announced(s.Prior)
	if l == nil {
		return false
	}
	v, err := r.node.runningCheckpoint(r.ctx, cp.Number)
	if err != nil {
		return false
	}
	why := r.cannotGoOn(l, r.machine.Header())
	if why == "" {
		why = r.tooLong(l)
	}
	for _, key := range l.keys() {
		if why == "" && v.ObjectByKey(key) == nil {
			why = fmt.Sprintf("object %s is not kept any more", key)
		}
	}
	if why != "" {
		r.logger.Info("a checkpoint stores files, not the log", "checkpoint", cp.Number, "cause", why)
		return false
	}
	r.changelog.mu.Lock()
	defer r.changelog.mu.Unlock()
	r.changelog.planned = s.Attempt
	return true
}

// tooLong says why files are to be stored though the log could be.
func (r *replica) tooLong(l *lineage) string {
	if size := l.bytes() + int64(r.log.BytesFrom(l.next())); size > max(r.node.opts.ChangelogMaterializeBytes, l.base.Bytes()/2) {
		return fmt.Sprintf("the log has %d bytes", size)
	}
	if n := len(l.segments) + len(l.ahead); n >= maxSegments {
		return fmt.Sprintf("the log is in %d segments", n)
	}
	return ""
}

// cannotGoOn says why the log does not lead from the lineage to where the shard is,
// or cannot be replayed.
func (r *replica) cannotGoOn(l *lineage, h *raftfsm.Header) string {
	b := l.base
	switch {
	case b.Group != h.Group || b.Birth != h.Birth || b.Incarnation != h.Incarnation || b.Epoch != h.Epoch || b.Range != h.Range:
		return "the shard's range, epoch or incarnation has changed"
	case l.dropped != h.Dropped:
		return "a state was dropped"
	case h.RollbackIndex > b.Index:
		return "the shard was rolled back"
	case h.AppliedIndex < l.next():
		return "" // nothing is new yet
	}
	if first, err := r.log.FirstIndex(); err != nil || first == 0 || first > l.next() {
		return fmt.Sprintf("the log begins at %d, %d is next", first, l.next())
	}
	// Behind a snapshot that was just installed the log still has what was never
	// committed. With one entry of the same term all before it are the same.
	var e raft.Log
	if err := r.log.GetLog(h.AppliedIndex, &e); err != nil || e.Term != h.AppliedTerm {
		return fmt.Sprintf("entry %d of the log is not the one that was applied", h.AppliedIndex)
	}
	return ""
}

// cutChangelog returns the lineage that a checkpoint stores with the log up to its
// barrier, nil if it has to store files. It is called on the apply goroutine, with
// the store at the barrier: what is stored ahead ends in front of it, for nothing
// gets to the lineage from here on.
func (r *replica) cutChangelog(b raftfsm.Barrier, h *raftfsm.Header) *lineage {
	r.changelog.mu.Lock()
	defer r.changelog.mu.Unlock()
	l := r.changelog.lineage
	if l == nil || r.changelog.planned != b.Attempt || r.cannotGoOn(l, h) != "" {
		return nil
	}
	closed := *l
	closed.attempt = 0
	r.changelog.lineage, r.changelog.waiting = &closed, time.Time{}
	return &closed
}

// uploadChangelog stores the log up to the barrier, and a manifest. If that is not
// possible the checkpoint fails, and the next one stores files.
func (r *replica) uploadChangelog(ctx context.Context, c *cut, v *meta.View, start time.Time) (err error) {
	defer func() {
		if err != nil && ctx.Err() == nil {
			r.changelog.set(nil)
		}
	}()
	o := snapshot.UploadOptions{Store: r.node.opts.Objects, Prefix: string(v.Cluster().ID), Attempt: c.barrier.Attempt, CheckReused: true}
	next := &lineage{base: c.log.base, segments: c.log.all(), attempt: c.barrier.Attempt, dropped: c.log.dropped}
	fresh := map[string]bool{}
	for i := range c.log.ahead {
		fresh[c.log.ahead[i].Object] = true
	}
	for s, err := range r.segments(next.next(), c.header) {
		if err != nil {
			return fmt.Errorf("reading the log of %s: %w", r.id, err)
		}
		ref, err := snapshot.PutSegment(ctx, s, o)
		if err != nil {
			return err
		}
		next.segments = append(next.segments, ref)
		fresh[ref.Object] = true
	}
	if err := failpoint.Err("cluster.upload.segments"); err != nil {
		return err
	}
	m := manifestOf(c.header, r.node.opts.Driver.Name())
	m.Files = slices.Clone(next.base.Files)
	m.Changelog = &snapshot.Changelog{Base: next.base.Cut(), Digest: c.digest, Segments: next.segments}
	up, err := snapshot.UploadChangelog(ctx, m, fresh, o)
	if err != nil {
		return err
	}
	up.Requests += len(fresh)
	if len(c.log.ahead) > 0 {
		if err := failpoint.Err("cluster.upload.ahead"); err != nil {
			return err
		}
	}
	if err := r.report(ctx, c, m, up, time.Since(start)); err != nil {
		return err
	}
	r.changelog.set(next)
	r.metrics.changelog(up.NewBytes, len(fresh))
	return nil
}

// segments gives the entries from an index on up to the header's, all of which were
// applied and so are committed, in segments.
func (r *replica) segments(from uint64, h *raftfsm.Header) iter.Seq2[*snapshot.Segment, error] {
	return func(yield func(*snapshot.Segment, error) bool) {
		for from <= h.AppliedIndex {
			s, _, err := r.segment(from, h)
			if !yield(s, err) || err != nil {
				return
			}
			from = s.Last() + 1
		}
	}
}

// segment is the first of segments; full says that no entry belongs to it any more.
func (r *replica) segment(from uint64, h *raftfsm.Header) (s *snapshot.Segment, full bool, err error) {
	s = &snapshot.Segment{Group: h.Group, Birth: h.Birth, Incarnation: h.Incarnation, First: from}
	for size := 0; from <= h.AppliedIndex && !full; from++ {
		var e raft.Log
		if err := r.log.GetLog(from, &e); err != nil {
			return nil, false, err
		}
		entry := snapshot.LogEntry{Term: e.Term}
		if e.Type == raft.LogCommand {
			if entry.Command = e.Data; entry.Command == nil {
				entry.Command = []byte{}
			}
		}
		s.Entries = append(s.Entries, entry)
		size += snapshot.EntryBytes(entry.Command)
		full = size >= r.node.opts.ChangelogSegmentBytes || len(s.Entries) >= snapshot.MaxSegmentEntries
	}
	return s, full, nil
}

// replayChangelog brings a store of a manifest's files to what the manifest
// describes, by the segments that lie in a directory; if the manifest has none it
// only looks whether the store is what it must be. A store that it fails for is of
// no use any more.
func replayChangelog(ctx context.Context, store engine.Store, m *snapshot.Manifest, dir string) error {
	if err := holds(store, m.BaseManifest()); err != nil || m.Changelog == nil {
		return err
	}
	batches := func(yield func([]raftfsm.Entry, error) bool) {
		for i := range m.Changelog.Segments {
			s, err := m.ReadSegment(dir, &m.Changelog.Segments[i])
			var entries []raftfsm.Entry
			if err == nil {
				entries = make([]raftfsm.Entry, len(s.Entries))
				for k, e := range s.Entries {
					entries[k] = raftfsm.Entry{Index: s.First + uint64(k), Term: e.Term, Command: e.Command}
				}
			}
			if !yield(entries, err) {
				return
			}
		}
	}
	return raftfsm.Replay(ctx, store, batches, raftfsm.Position{Index: m.Index, Term: m.Term, Sequence: m.Sequence, ClockMs: m.ClockMs, Digest: m.Changelog.Digest})
}

// materialise makes, of the base and the log in a directory, the files that the
// shard would have had, and describes them. What an earlier attempt has left half
// done is made again.
func (r *replica) materialise(ctx context.Context, dir, files string, m *snapshot.Manifest) (*snapshot.Manifest, error) {
	fetched, replay := filepath.Join(dir, preparedBase), filepath.Join(dir, "replay")
	if err := errors.Join(os.RemoveAll(replay), os.RemoveAll(files)); err != nil {
		return nil, err
	}
	if err := snapshot.Link(replay, fetched, m); err != nil {
		return nil, err
	}
	store, err := r.node.opts.Driver.Open(replay)
	if err != nil {
		return nil, fmt.Errorf("opening what the shard had: %w", err)
	}
	if err = replayChangelog(ctx, store, m, fetched); err == nil {
		err = store.Checkpoint(files)
	}
	if err = errors.Join(err, store.Close()); err != nil {
		return nil, err
	}
	made := *m
	made.Changelog = nil
	if made.Files, err = snapshot.HashFiles(ctx, files, r.snaps.hashes); err != nil {
		return nil, err
	}
	return &made, errors.Join(os.RemoveAll(replay), os.RemoveAll(fetched))
}
