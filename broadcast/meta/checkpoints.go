package meta

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// Limits of checkpoints.
const (
	// MaxCheckpointShards bounds the shards of a cluster that can be checkpointed:
	// one command has to hold their records.
	MaxCheckpointShards = 8192
	// MaxFailedCheckpoints is how many failed checkpoints are kept to be shown.
	MaxFailedCheckpoints = 16
	// MaxObjectParts bounds the contents of one object.
	MaxObjectParts = 8000
	// MaxObjectsPerTxn and MaxObjectBytesPerTxn bound what one transaction puts
	// into the registry; CutObjects keeps to them.
	MaxObjectsPerTxn     = 8192
	MaxObjectBytesPerTxn = 4 << 20
	// MaxReusedObjects bounds the objects of other uploads that one shard uses.
	MaxReusedObjects = 1 << 17
	// maxUsesPerRecord keeps a record of uses below MaxRecordBytes.
	maxUsesPerRecord = 32768
	// MaxCheckpointErrorBytes bounds the text that says why a checkpoint failed; a
	// longer one is cut.
	MaxCheckpointErrorBytes = 4096
)

// CheckpointSpec is what a new checkpoint is to be like.
type CheckpointSpec struct {
	Automatic bool
	// Savepoint: it is to be the user's.
	Savepoint bool
	// Changelog: shards may store their log; a savepoint never does.
	Changelog bool
	TimeoutMs uint64
	// Uploaders names, for every shard, the node whose replica uploads.
	Uploaders map[base.GroupID]base.NodeID
}

// StartCheckpointTxn announces a new checkpoint of all shards as the view shows
// them, with a number and attempts that were never given (ME1). It is refused with
// base.ErrConflict while another one runs (ME7). nowMs is the wall clock. Of the
// record that it returns only the number and what the caller gave is to be relied
// on before the transaction has succeeded.
func StartCheckpointTxn(v *View, nowMs uint64, spec CheckpointSpec) (broadcast.Txn, *Checkpoint, error) {
	c := v.Cluster()
	if c == nil {
		return broadcast.Txn{}, nil, base.ErrNotFounded
	}
	if r := v.RunningCheckpoint(); r != nil {
		return broadcast.Txn{}, nil, conflict("checkpoint", fmt.Sprintf("checkpoint %d is running", r.Number))
	}
	if err := refuseDuringRollback(v); err != nil {
		return broadcast.Txn{}, nil, err
	}
	shards := slices.Clone(v.Shards())
	if len(shards) == 0 || len(shards) > MaxCheckpointShards {
		return broadcast.Txn{}, nil, conflict("shards", fmt.Sprintf("a checkpoint has 1 to %d shards, there are %d", MaxCheckpointShards, len(shards)))
	}
	number, attempt := v.NextCheckpoint(), v.NextAttempt()
	rec := &Checkpoint{Number: number, Phase: CheckpointAnnounced, Automatic: spec.Automatic, Savepoint: spec.Savepoint, Changelog: spec.Changelog && !spec.Savepoint, Incarnation: c.Incarnation, KeyGroups: c.KeyGroups,
		Shards: len(shards), CreatedMs: nowMs, UpdatedMs: nowMs, TimeoutMs: spec.TimeoutMs}
	var b builder
	b.advance(v, counterCheckpoint, number+1)
	b.advance(v, counterAttempt, attempt+uint64(len(shards)))
	b.expect(clusterKey, c.Revision)
	b.await(v, rec)
	b.replace(kindCheckpoint, idKey(kindCheckpoint, number), 0, rec)
	open := v.openCheckpoint()
	if open != nil && !spec.Savepoint {
		closed := *open
		closed.LogOpen = false
		b.replaceCheckpoint(&closed)
	}
	var tiles []Shard
	for i, s := range shards {
		node := spec.Uploaders[s.ID]
		if !slices.ContainsFunc(s.Replicas, func(r Replica) bool { return r.Node == node }) {
			return broadcast.Txn{}, nil, base.Invalid("uploaders", fmt.Sprintf("node %q has no replica of shard %s", node, s.ID))
		}
		b.expect(idKey(kindShard, uint64(s.ID)), s.Revision)
		part := CheckpointShard{
			Checkpoint: number, Group: s.ID, Birth: s.Birth, Epoch: s.Epoch, Lo: s.Lo, Hi: s.Hi,
			Uploader: node, Attempt: attempt + uint64(i), State: CheckpointShardAnnounced, UpdatedMs: nowMs,
		}
		if rec.Changelog {
			part.Prior = v.LogAttempt(s.ID, node)
		}
		b.replace(kindCheckpointShard, idsKey(kindCheckpointShard, number, uint64(s.ID)), 0, part)
		tiles = append(tiles, Shard{ID: s.ID, Lo: s.Lo, Hi: s.Hi})
	}
	if attempt+uint64(len(shards)) > maxAttempt {
		return broadcast.Txn{}, nil, &base.Error{Cause: base.ErrOutOfRange, Field: "attempt", Hint: "all attempts are used", Ordinal: -1}
	}
	slices.SortFunc(tiles, func(a, b Shard) int { return a.Lo - b.Lo })
	if err := checkTiling(tiles, c.KeyGroups); err != nil {
		return broadcast.Txn{}, nil, err
	}
	txn, err := b.done()
	return txn, rec, err
}

// uploading returns the records that a report of a shard belongs to. It refuses,
// with base.ErrConflict, a report of another attempt than the one that was given,
// and any once the checkpoint has ended: the reporter gives up.
func uploading(v *View, number uint64, group base.GroupID, attempt uint64) (*Checkpoint, *CheckpointShard, error) {
	c, s := v.Checkpoint(number), v.CheckpointShard(number, group)
	switch {
	case c == nil:
		return nil, nil, conflict("checkpoint", fmt.Sprintf("checkpoint %d is not running", number))
	case !c.Running():
		return nil, nil, conflict("checkpoint", fmt.Sprintf("checkpoint %d is %s", number, c.Phase))
	case c.Phase == CheckpointWaiting:
		return nil, nil, conflict("checkpoint", fmt.Sprintf("checkpoint %d waits for participants, shards have no part in it yet", number))
	case s == nil:
		return nil, nil, conflict("group", fmt.Sprintf("checkpoint %d has no shard %s", number, group))
	case s.Attempt != attempt:
		return nil, nil, conflict("attempt", fmt.Sprintf("checkpoint %d has attempt %d for shard %s, not %d", number, s.Attempt, group, attempt))
	}
	return c, s, nil
}

// replaceShard puts the next record of a shard, as long as the checkpoint is in
// the phase that the view shows.
func (b *builder) replaceShard(c *Checkpoint, s *CheckpointShard) {
	b.expect(idKey(kindCheckpoint, c.Number), c.Revision)
	b.replace(kindCheckpointShard, idsKey(kindCheckpointShard, s.Checkpoint, uint64(s.Group)), s.Revision, s)
}

// ReportFlushedTxn records that the uploader of a shard has flushed and waits for
// the barrier. It is empty if that is known; the errors are those of uploading:
// base.ErrConflict for another attempt or a checkpoint that does not run.
func ReportFlushedTxn(v *View, nowMs, number uint64, group base.GroupID, attempt uint64) (broadcast.Txn, error) {
	c, have, err := uploading(v, number, group, attempt)
	if err != nil || have.State != CheckpointShardAnnounced {
		return broadcast.Txn{}, err
	}
	next := *have
	next.State, next.UpdatedMs = CheckpointShardFlushed, max(nowMs, have.UpdatedMs)
	var b builder
	b.replaceShard(c, &next)
	return b.done()
}

// ReportUploadedTxn records that a shard has uploaded: the objects that the
// attempt stored, which may in part or all be registered (RegisterObjectsTxn), the
// keys of other objects that it uses, and its report. A reused key that is not in
// the registry is refused with base.ErrConflict: somebody may be deleting it. So is
// a manifest that is neither among the objects nor reused. A report that comes
// again is empty; another one of the same shard is base.ErrConflict.
func ReportUploadedTxn(v *View, nowMs, number uint64, group base.GroupID, attempt uint64, report ShardReport, objects []Object, reused []string) (broadcast.Txn, error) {
	c, have, err := uploading(v, number, group, attempt)
	if err != nil {
		return broadcast.Txn{}, err
	}
	if have.State == CheckpointShardUploaded {
		if *have.Report == report {
			return broadcast.Txn{}, nil
		}
		return broadcast.Txn{}, conflict("report", fmt.Sprintf("shard %s has reported something else", group))
	}
	if err := checkReport(&report); err != nil {
		return broadcast.Txn{}, err
	}
	if report.BaseIndex != 0 && !c.Changelog {
		return broadcast.Txn{}, base.Invalid("report", fmt.Sprintf("checkpoint %d takes files only", number))
	}
	next := *have
	var b builder
	numbers, err := b.register(v, c, &next, objects)
	if err != nil {
		return broadcast.Txn{}, err
	}
	if c.Savepoint && len(reused) > 0 {
		return broadcast.Txn{}, base.Invalid("reused", fmt.Sprintf("savepoint %d uses no objects but its own", number))
	}
	older, err := reusedNumbers(v, attempt, reused)
	if err != nil {
		return broadcast.Txn{}, err
	}
	if err := checkManifest(v, attempt, &report, objects, reused); err != nil {
		return broadcast.Txn{}, err
	}
	used := append(older, numbers...)
	// Those of other shards of the same checkpoint may have larger numbers.
	slices.Sort(used)
	b.use(&next, used)
	next.State, next.Report, next.UpdatedMs = CheckpointShardUploaded, &report, max(nowMs, have.UpdatedMs)
	b.replaceShard(c, &next)
	return b.done()
}

func checkReport(r *ShardReport) error {
	if r.Index == 0 || r.Term == 0 {
		return base.Invalid("report", "a cut has an index and a term")
	}
	if r.FullBytes < 0 || r.NewBytes < 0 || r.ManifestSize < 0 || r.Files < 0 || r.NewFiles < 0 || r.Requests < 0 {
		return base.Invalid("report", "negative numbers")
	}
	if log := r.BaseIndex != 0; log != (r.Segments > 0) || log != (r.LogBytes > 0) || r.Segments < 0 || r.LogBytes < 0 || r.LogBytes > r.FullBytes || r.BaseIndex >= r.Index {
		return base.Invalid("report", fmt.Sprintf("%d segments of %d bytes lead from index %d to %d", r.Segments, r.LogBytes, r.BaseIndex, r.Index))
	}
	return nil
}

// checkManifest demands that the manifest is an object as it is reported, and that
// the shard uses it.
func checkManifest(v *View, attempt uint64, r *ShardReport, objects []Object, reused []string) error {
	sum, _, err := parseObjectName(r.ManifestKey)
	if err != nil {
		return err
	}
	if sum != r.ManifestSHA256 {
		return base.Invalid("manifest_key", "is not that of the manifest's SHA-256")
	}
	size := int64(-1)
	if i := slices.IndexFunc(objects, func(o Object) bool { return o.Key == r.ManifestKey }); i >= 0 {
		size = objects[i].Size
	} else if o := v.ObjectByKey(r.ManifestKey); o != nil && (o.Attempt() == attempt || slices.Contains(reused, r.ManifestKey)) {
		size = o.Size
	}
	if size != r.ManifestSize {
		return conflict("manifest_key", fmt.Sprintf("no object %q of %d bytes among those that the shard uses", r.ManifestKey, r.ManifestSize))
	}
	return nil
}

// replaceCheckpoint puts the next record of a checkpoint.
func (b *builder) replaceCheckpoint(c *Checkpoint) {
	b.replace(kindCheckpoint, idKey(kindCheckpoint, c.Number), c.Revision, c)
}

// MetadataPhaseTxn freezes a checkpoint of which every shard has uploaded, so
// that its `_metadata` is the same bytes whoever makes it. It is empty if that was
// done; base.ErrConflict if the checkpoint does not run, or shards are missing.
func MetadataPhaseTxn(v *View, nowMs, number uint64) (broadcast.Txn, error) {
	c := v.Checkpoint(number)
	if c == nil || !c.Running() {
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d is not running", number))
	}
	if c.Phase == CheckpointMetadata {
		return broadcast.Txn{}, nil
	}
	if c.Phase == CheckpointWaiting {
		return broadcast.Txn{}, conflict("participants", fmt.Sprintf("checkpoint %d waits for participants", number))
	}
	next := *c
	var tiles []Shard
	for _, s := range v.CheckpointShards(number) {
		if s.State != CheckpointShardUploaded {
			return broadcast.Txn{}, conflict("shards", fmt.Sprintf("shard %s has not uploaded yet", s.Group))
		}
		tiles = append(tiles, Shard{ID: s.Group, Lo: s.Lo, Hi: s.Hi})
		next.Totals.add(s)
	}
	slices.SortFunc(tiles, func(a, b Shard) int { return a.Lo - b.Lo })
	if err := checkTiling(tiles, c.KeyGroups); err != nil {
		return broadcast.Txn{}, err
	}
	next.Phase, next.UpdatedMs = CheckpointMetadata, max(nowMs, c.UpdatedMs)
	var b builder
	b.replaceCheckpoint(&next)
	return b.done()
}

func (t *CheckpointTotals) add(s *CheckpointShard) {
	r := s.Report
	t.FullBytes += r.FullBytes
	t.NewBytes += r.NewBytes
	t.Files += r.Files
	t.NewFiles += r.NewFiles
	t.Objects += s.Objects + s.PriorObjects
	t.Requests += r.Requests
	t.SyncMs, t.AsyncMs = max(t.SyncMs, r.SyncMs), max(t.AsyncMs, r.AsyncMs)
}

// CompleteTxn completes a checkpoint whose `_metadata`, with this SHA-256 and size,
// is durable, and no longer retains the completed ones before it but the newest,
// retain of them with this one (at least 1), and those that participants need
// (ME12). Savepoints are neither counted nor touched, and the completion of one
// retires nothing (ME13). What only those used is planned for
// deletion, in this transaction as far as it can hold it (PlanDeletionsTxn does the
// rest). It is empty if the checkpoint is completed; base.ErrConflict if it is not
// in CheckpointMetadata.
func CompleteTxn(v *View, nowMs, number uint64, sum [32]byte, size int64, retain int) (broadcast.Txn, error) {
	c := v.Checkpoint(number)
	switch {
	case c != nil && c.Phase == CheckpointCompleted && c.MetadataSHA256 == sum:
		return broadcast.Txn{}, nil
	case c == nil || c.Phase != CheckpointMetadata:
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d is not waiting for its completion", number))
	}
	p := newPlanning(v, nowMs)
	next := *c
	next.Phase, next.EndedMs = CheckpointCompleted, max(nowMs, c.UpdatedMs)
	next.UpdatedMs, next.MetadataSHA256, next.MetadataSize, next.LogOpen = next.EndedMs, sum, size, c.Changelog
	p.change(&next)
	left, pinned := max(retain, 1), v.pinned(c)
	for _, old := range slices.Backward(p.heads) {
		if old.Phase != CheckpointCompleted || old.Savepoint || c.Savepoint {
			continue
		}
		if left--; left < 0 && !pinned[old.Number] {
			gone := *old
			gone.Phase, gone.UpdatedMs = CheckpointDeleting, max(nowMs, old.UpdatedMs)
			p.change(&gone)
		}
	}
	return p.done()
}

// FailCheckpointTxn ends a running checkpoint for a reason. What it has stored and
// registered is planned for deletion by PlanDeletionsTxn, from a view that shows it
// failed and so shows all of that: shards may report beside this transaction. What
// it has stored and not registered are orphans (PlanOrphansTxn). What others left
// is planned now, as in CompleteTxn. It is empty if the checkpoint has failed
// already; base.ErrConflict if it does not run.
func FailCheckpointTxn(v *View, nowMs, number uint64, reason string) (broadcast.Txn, error) {
	c := v.Checkpoint(number)
	switch {
	case c != nil && c.Phase == CheckpointFailed:
		return broadcast.Txn{}, nil
	case c == nil || !c.Running():
		return broadcast.Txn{}, conflict("checkpoint", fmt.Sprintf("checkpoint %d is not running", number))
	}
	if len(reason) > MaxCheckpointErrorBytes {
		reason = reason[:MaxCheckpointErrorBytes]
	}
	p := newPlanning(v, nowMs)
	next := *c
	next.Phase, next.EndedMs, next.Garbage = CheckpointFailed, max(nowMs, c.UpdatedMs), true
	p.later = number
	next.UpdatedMs, next.Error = next.EndedMs, string(bytes.ToValidUTF8([]byte(strings.TrimSpace(reason)), []byte("?")))
	p.change(&next)
	p.deleteOf(kindPosition, number)
	return p.done()
}

// ReportFailedTxn fails the checkpoint because a shard's uploader cannot go on. A
// report of another attempt is refused as uploading does, so that a late one never
// fails a checkpoint that it is not part of.
func ReportFailedTxn(v *View, nowMs, number uint64, group base.GroupID, attempt uint64, reason string) (broadcast.Txn, error) {
	_, s, err := uploading(v, number, group, attempt)
	if err != nil {
		return broadcast.Txn{}, err
	}
	if s.State == CheckpointShardUploaded {
		return broadcast.Txn{}, conflict("group", fmt.Sprintf("shard %s has uploaded already", group))
	}
	return FailCheckpointTxn(v, nowMs, number, fmt.Sprintf("shard %s on node %s: %s", group, s.Uploader, strings.TrimSpace(reason)))
}
