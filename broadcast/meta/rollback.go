package meta

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// OperationRollback takes the whole cluster back to a checkpoint, in a new
// incarnation.
const OperationRollback = "rollback"

// The phases of a rollback, in their order. It can be given up in the first only.
// Frozen.
const (
	// PhaseRollbackPrepare: replicas fetch and check what their shard had.
	PhaseRollbackPrepare = "prepare"
	// PhaseRollbackFence: the shards are to refuse writes.
	PhaseRollbackFence = "fence"
	// PhaseRollbackSwap: every shard refuses writes; each is to be rolled back.
	PhaseRollbackSwap = "swap"
	// PhaseRollbackOpen: every shard is rolled back and the cluster has the new
	// incarnation; the fences are to go.
	PhaseRollbackOpen = "open"
)

// Limits of a rollback.
const (
	// MaxRollbackShards bounds the shards: one command changes all their records.
	MaxRollbackShards = MaxFoundingShards
	// maxRollbackSessions bounds the sessions that end with the new incarnation;
	// the others end before.
	maxRollbackSessions = 2000
	// maxRollbackProblemBytes bounds what a shard waits for.
	maxRollbackProblemBytes = 1024
)

// RollbackSpec is the specification of a rollback.
type RollbackSpec struct {
	// Checkpoint is the number of the one that the cluster goes back to, and
	// MetadataSHA256 that of its `_metadata`.
	Checkpoint     uint64 `json:"checkpoint"`
	MetadataSHA256 Sum    `json:"metadata_sha256"`
	// Savepoint says that it is one.
	Savepoint bool `json:"savepoint,omitempty"`
	// Incarnation is the cluster's after the rollback.
	Incarnation base.Incarnation `json:"incarnation"`
	// TimeoutMs bounds the first phase, by the coordinator's own clock.
	TimeoutMs uint64 `json:"timeout_ms"`
}

// Rollback is an operation of that kind with its specification.
type Rollback struct {
	*Operation
	RollbackSpec
}

// Opening says that shards may serve the new incarnation: what was acknowledged in it
// is no part of what a request to go back, that comes now, finds gone by this rollback.
func (r *Rollback) Opening() bool { return r.Phase == PhaseRollbackOpen }

// RollbackShardState is where a shard stands within a rollback.
type RollbackShardState string

// The states of a shard within a rollback, in their order. Frozen.
const (
	RollbackShardServing RollbackShardState = "serving"
	// RollbackShardFenced: it refuses writes.
	RollbackShardFenced RollbackShardState = "fenced"
	// RollbackShardSwapped: it holds what it had at the checkpoint.
	RollbackShardSwapped RollbackShardState = "swapped"
	// RollbackShardOpen: it serves the new incarnation.
	RollbackShardOpen RollbackShardState = "open"
)

var rollbackShardStates = []RollbackShardState{RollbackShardServing, RollbackShardFenced, RollbackShardSwapped, RollbackShardOpen}

func (s RollbackShardState) rank() int { return slices.Index(rollbackShardStates, s) }

// RollbackShard is the record of one shard within a rollback that runs.
type RollbackShard struct {
	Operation uint64       `json:"operation"`
	Group     base.GroupID `json:"group"`
	// Epoch is the shard's after the rollback.
	Epoch base.Epoch `json:"epoch"`
	// Bytes are those of the shard in the checkpoint.
	Bytes int64              `json:"bytes"`
	State RollbackShardState `json:"state"`
	// Prepared are the replicas that can be rolled back at any moment, whatever
	// happens to them meanwhile.
	Prepared []base.ReplicaID `json:"prepared,omitempty"`
	// Problem is what a replica waits for.
	Problem   string `json:"problem,omitempty"`
	UpdatedMs uint64 `json:"updated_ms"`

	Revision base.Revision `json:"-"`
}

// PreparedQuorum says whether a quorum of the voters of a shard is prepared, and
// the replica on node must among them.
func (s *RollbackShard) PreparedQuorum(rec *Shard, must base.NodeID) bool {
	voters, ready, there := 0, 0, false
	for _, r := range rec.Replicas {
		if r.Role != RoleVoter {
			continue
		}
		voters++
		if slices.Contains(s.Prepared, r.ReplicaID) {
			ready++
			there = there || r.Node == must
		}
	}
	return there && ready >= voters/2+1
}

// RunningRollback returns the rollback that has not ended, or nil.
func (v *View) RunningRollback() *Rollback {
	var found *Operation
	v.operations.Reverse(func(_ uint64, o *Operation) bool {
		if o.Kind == OperationRollback && !o.Finished() {
			found = o
		}
		return found == nil
	})
	return rollbackOf(found)
}

// Rollback returns a rollback that is kept, ended or not, or nil.
func (v *View) Rollback(id uint64) *Rollback { return rollbackOf(v.Operation(id)) }

func rollbackOf(o *Operation) *Rollback {
	if o == nil || o.Kind != OperationRollback {
		return nil
	}
	r := &Rollback{Operation: o}
	if strict(o.Spec, &r.RollbackSpec) != nil {
		return nil
	}
	return r
}

// RollbackShard returns the record of a shard within a rollback that runs, or nil.
func (v *View) RollbackShard(operation uint64, group base.GroupID) *RollbackShard {
	s, _ := v.rollbacks.Get(numbersKey(operation, uint64(group)))
	return s
}

// RollbackShards returns the shards of a rollback that runs, in the order of their
// ids; none of one that has ended.
func (v *View) RollbackShards(operation uint64) []*RollbackShard {
	var list []*RollbackShard
	v.rollbacks.Ascend(numbersKey(operation), func(_ string, s *RollbackShard) bool {
		if s.Operation != operation {
			return false
		}
		list = append(list, s)
		return true
	})
	return list
}

// CheckRollback says why the cluster cannot be rolled back to a checkpoint now:
// base.ErrNotFound if it is not kept, base.ErrConflict if it has not completed,
// if something else is under way, or if the shard map is another one by now. A
// checkpoint that waits for participants is nothing that is under way: no shard has
// had a part in it.
func CheckRollback(v *View, number uint64) error {
	c, k := v.Cluster(), v.Checkpoint(number)
	if c == nil {
		return base.ErrNotFounded
	}
	if k == nil {
		return notFound("number", fmt.Sprintf("no checkpoint %d is kept", number))
	}
	if k.Phase != CheckpointCompleted {
		return conflict("number", fmt.Sprintf("checkpoint %d is %s; only to a completed one can the cluster be rolled back", number, k.Phase))
	}
	if r := v.RunningRollback(); r != nil {
		return conflict("operation", fmt.Sprintf("operation %d is rolling the cluster back to checkpoint %d", r.ID, r.Checkpoint))
	}
	if r := v.RunningCheckpoint(); r != nil && r.Phase != CheckpointWaiting {
		return conflict("checkpoint", fmt.Sprintf("checkpoint %d is running", r.Number))
	}
	if v.FoundingUnderWay() {
		return conflict("operation", "the cluster is being founded")
	}
	return sameMap(v, k)
}

// sameMap refuses a checkpoint of another shard map. Epochs may differ: a rollback
// gives new ones.
func sameMap(v *View, k *Checkpoint) error {
	other := func(what string) error {
		return conflict("shards", what+"; restore the checkpoint into a new cluster (keelctl cluster init --restore)")
	}
	shards := v.Shards()
	if len(shards) > MaxRollbackShards {
		return conflict("shards", fmt.Sprintf("at most %d can be rolled back", MaxRollbackShards))
	}
	if len(shards) != k.Shards || v.Cluster().KeyGroups != k.KeyGroups {
		return other(fmt.Sprintf("checkpoint %d has %d shards of %d key groups, the cluster has %d of %d", k.Number, k.Shards, k.KeyGroups, len(shards), v.Cluster().KeyGroups))
	}
	for _, s := range shards {
		then := v.CheckpointShard(k.Number, s.ID)
		if then == nil || then.Report == nil || then.Birth != s.Birth || then.Lo != s.Lo || then.Hi != s.Hi {
			return other(fmt.Sprintf("checkpoint %d has no shard %s with [%d, %d)", k.Number, s.ID, s.Lo, s.Hi))
		}
	}
	return nil
}

// RollbackStart is what a rollback is to be like.
type RollbackStart struct {
	// Checkpoint is the number of the one to go back to.
	Checkpoint uint64
	// TimeoutMs bounds the first phase.
	TimeoutMs uint64
	// Force goes back though participants lack their position in it (ME15).
	Force bool
}

// checkPositions refuses a checkpoint from which a participant could not go on.
func checkPositions(v *View, number uint64) error {
	lacked := v.LackedPositions(number)
	if len(lacked) == 0 {
		return nil
	}
	p := lacked[0]
	hint := fmt.Sprintf("checkpoint %d may hold writes of participant %q and has no position of it", number, p.Participant)
	if n := len(lacked) - 1; n > 0 {
		hint += fmt.Sprintf(" (nor of %d others)", n)
	}
	if p.Newest != 0 {
		hint += fmt.Sprintf("; the newest one that has is %d", p.Newest)
	} else {
		hint += "; none that is kept has"
	}
	return &base.Error{Cause: base.ErrPrecondition, Field: "participant", Ordinal: -1,
		Hint: hint + ". Go back to one that has, or forget the participant (keelctl participant remove), or force it (--force): then it is given nothing back"}
}

// StartRollbackTxn begins a rollback; errors are those of CheckRollback, and
// base.ErrPrecondition where a participant lacks its position. A checkpoint that waits
// for participants fails with it: one that is dead would hold the rollback up until its
// lease ends. No checkpoint starts while it runs, and the one that it goes back to
// stays (ME10).
func StartRollbackTxn(v *View, nowMs uint64, want RollbackStart) (broadcast.Txn, *Operation, error) {
	number := want.Checkpoint
	if err := CheckRollback(v, number); err != nil {
		return broadcast.Txn{}, nil, err
	}
	if !want.Force {
		if err := checkPositions(v, number); err != nil {
			return broadcast.Txn{}, nil, err
		}
	}
	c, k := v.Cluster(), v.Checkpoint(number)
	start, op, err := StartOperationTxn(v, nowMs, OperationRollback, PhaseRollbackPrepare,
		RollbackSpec{Checkpoint: number, MetadataSHA256: k.MetadataSHA256, Savepoint: k.Savepoint, Incarnation: c.Incarnation + 1, TimeoutMs: want.TimeoutMs})
	if err != nil {
		return broadcast.Txn{}, nil, err
	}
	var failing broadcast.Txn
	if r := v.RunningCheckpoint(); r != nil { // it waits, or CheckRollback would have refused it
		if failing, err = FailCheckpointTxn(v, nowMs, r.Number, fmt.Sprintf("rolled back meanwhile, to checkpoint %d", number)); err != nil {
			return broadcast.Txn{}, nil, err
		}
	}
	var b builder
	b.expect(clusterKey, c.Revision)
	b.expect(idKey(kindCheckpoint, number), k.Revision)
	// Excludes the start and the end of checkpoints that were built from the same view.
	b.advance(v, counterCheckpoint, v.next(counterCheckpoint))
	b.expectCounter(v, counterParticipant)
	for _, s := range v.Shards() {
		b.expect(idKey(kindShard, uint64(s.ID)), s.Revision)
		b.replace(kindRollbackShard, idsKey(kindRollbackShard, op.ID, uint64(s.ID)), 0, RollbackShard{
			Operation: op.ID, Group: s.ID, Epoch: s.Epoch + 1, Bytes: v.CheckpointShard(number, s.ID).Report.FullBytes,
			State: RollbackShardServing, UpdatedMs: op.CreatedMs,
		})
	}
	txn, err := b.done()
	return Join(failing, start, txn), op, err
}

// rolling returns the records that a report of a shard belongs to; base.ErrConflict
// once the rollback has ended.
func rolling(v *View, operation uint64, group base.GroupID) (*Rollback, *RollbackShard, error) {
	r, s := v.Rollback(operation), v.RollbackShard(operation, group)
	switch {
	case r == nil || r.Finished():
		return nil, nil, conflict("operation", fmt.Sprintf("no rollback %d is running", operation))
	case s == nil:
		return nil, nil, conflict("group", fmt.Sprintf("rollback %d has no shard %s", operation, group))
	}
	return r, s, nil
}

// replaceRollbackShard puts the next record of a shard, as long as the rollback is
// in the phase that the view shows.
func (b *builder) replaceRollbackShard(r *Rollback, s *RollbackShard) {
	b.expect(idKey(kindOperation, r.ID), r.Revision)
	b.replace(kindRollbackShard, idsKey(kindRollbackShard, s.Operation, uint64(s.Group)), s.Revision, s)
}

// ReportPreparedTxn records that a replica is prepared. It is empty if that is
// known or does not matter any more; base.ErrConflict once the rollback has ended.
func ReportPreparedTxn(v *View, nowMs, operation uint64, group base.GroupID, replica base.ReplicaID) (broadcast.Txn, error) {
	r, have, err := rolling(v, operation, group)
	if err != nil || have.State.rank() >= RollbackShardSwapped.rank() || slices.Contains(have.Prepared, replica) {
		return broadcast.Txn{}, err
	}
	next := *have
	next.Prepared = append(slices.Clone(have.Prepared), replica)
	next.Problem, next.UpdatedMs = "", max(nowMs, have.UpdatedMs)
	var b builder
	b.replaceRollbackShard(r, &next)
	return b.done()
}

// ReportUnpreparedTxn records what a replica waits for, or, if that will not be
// better later, gives the rollback up while it can be.
func ReportUnpreparedTxn(v *View, nowMs, operation uint64, group base.GroupID, problem string, hopeless bool) (broadcast.Txn, error) {
	r, have, err := rolling(v, operation, group)
	if err != nil {
		return broadcast.Txn{}, err
	}
	if hopeless && r.Phase == PhaseRollbackPrepare {
		return AbortRollbackTxn(v, nowMs, operation, fmt.Sprintf("shard %s: %s", group, problem))
	}
	problem = cutText(problem, maxRollbackProblemBytes)
	if have.Problem == problem || have.State.rank() >= RollbackShardSwapped.rank() {
		return broadcast.Txn{}, nil
	}
	next := *have
	next.Problem, next.UpdatedMs = problem, max(nowMs, have.UpdatedMs)
	var b builder
	b.replaceRollbackShard(r, &next)
	return b.done()
}

// cutText makes text what a record can hold.
func cutText(text string, limit int) string {
	text = strings.TrimSpace(text)
	if len(text) > limit {
		text = text[:limit]
	}
	return string(bytes.ToValidUTF8([]byte(text), []byte("?")))
}

// ReportRollbackStateTxn records how far a shard has come. It is empty if that is
// known; base.ErrConflict if the rollback has ended, or is not so far that the
// shard could be there.
func ReportRollbackStateTxn(v *View, nowMs, operation uint64, group base.GroupID, state RollbackShardState) (broadcast.Txn, error) {
	r, have, err := rolling(v, operation, group)
	if err != nil || state.rank() <= have.State.rank() {
		return broadcast.Txn{}, err
	}
	phases := []string{PhaseRollbackPrepare, PhaseRollbackFence, PhaseRollbackSwap, PhaseRollbackOpen}
	if slices.Index(phases, r.Phase) < state.rank() {
		return broadcast.Txn{}, conflict("state", fmt.Sprintf("shard %s is %s in the phase %s of rollback %d", group, state, r.Phase, operation))
	}
	next := *have
	next.State, next.Problem, next.UpdatedMs = state, "", max(nowMs, have.UpdatedMs)
	var b builder
	b.replaceRollbackShard(r, &next)
	return b.done()
}

// RollbackPhaseTxn brings a rollback from the phase that the view shows to the
// next: every shard must be so far. From the first to the second it says nothing
// of who leads: leader does, and is to be among the prepared of its shard. With
// the last but one the cluster gets its new incarnation, the shards their new
// epochs, and the last sessions end, all at once; if there are too many sessions,
// it only ends some. base.ErrConflict if a shard is not so far.
func RollbackPhaseTxn(v *View, nowMs, operation uint64, leader func(base.GroupID) base.NodeID) (broadcast.Txn, error) {
	r := v.Rollback(operation)
	if r == nil || r.Finished() {
		return broadcast.Txn{}, conflict("operation", fmt.Sprintf("no rollback %d is running", operation))
	}
	if s := v.unready(r, leader); s != nil {
		return broadcast.Txn{}, conflict("shards", fmt.Sprintf("shard %s is not so far: %s", s.Group, s.State))
	}
	b := builder{txn: broadcast.Txn{Stamp: nowMs}}
	for _, s := range v.RollbackShards(operation) {
		b.expect(idsKey(kindRollbackShard, operation, uint64(s.Group)), s.Revision)
	}
	switch r.Phase {
	case PhaseRollbackPrepare:
		b.enter(v, r, nowMs, PhaseRollbackFence, "")
	case PhaseRollbackFence:
		b.enter(v, r, nowMs, PhaseRollbackSwap, "")
	case PhaseRollbackSwap:
		b.turn(v, r, nowMs)
	case PhaseRollbackOpen:
		b.enter(v, r, nowMs, PhaseDone, "")
	}
	return b.done()
}

// RollbackReady says whether every shard is so far that the next phase can begin.
func (v *View) RollbackReady(r *Rollback, leader func(base.GroupID) base.NodeID) bool {
	return v.unready(r, leader) == nil
}

// unready returns a shard that is not so far that the next phase can begin.
func (v *View) unready(r *Rollback, leader func(base.GroupID) base.NodeID) *RollbackShard {
	needs := map[string]RollbackShardState{PhaseRollbackPrepare: RollbackShardServing, PhaseRollbackFence: RollbackShardFenced,
		PhaseRollbackSwap: RollbackShardSwapped, PhaseRollbackOpen: RollbackShardOpen}
	for _, s := range v.RollbackShards(r.ID) {
		rec := v.Shard(s.Group)
		if s.State.rank() < needs[r.Phase].rank() || rec == nil {
			return s
		}
		if r.Phase == PhaseRollbackPrepare && !s.PreparedQuorum(rec, leader(s.Group)) {
			return s
		}
	}
	return nil
}

// enter puts the operation into another phase; with its end the records of its
// shards go.
func (b *builder) enter(v *View, r *Rollback, nowMs uint64, phase, problem string) {
	next := *r.Operation
	next.Phase, next.Error, next.UpdatedMs = phase, cutText(problem, MaxOperationErrorBytes), max(nowMs, v.Clock())
	b.replace(kindOperation, idKey(kindOperation, r.ID), r.Revision, next)
	if next.Finished() {
		b.deleteOf(kindRollbackShard, r.ID)
	}
}

// turn ends the old incarnation.
func (b *builder) turn(v *View, r *Rollback, nowMs uint64) {
	last := v.SessionCount() <= maxRollbackSessions
	var sessions []*Session
	v.ScanSessions(func(s *Session) bool {
		sessions = append(sessions, s)
		return len(sessions) < MaxSessionBatch
	})
	if len(sessions) > 0 {
		b.end(v, sessions, false)
	}
	b.expect(idKey(kindOperation, r.ID), r.Revision)
	if !last {
		return
	}
	b.expectCounter(v, counterSession) // nobody opens one meanwhile
	cluster := *v.Cluster()
	cluster.Incarnation = r.Incarnation
	b.giveBack(v, r.Checkpoint, r.Incarnation)
	b.replace(kindCluster, clusterKey, cluster.Revision, cluster)
	for _, s := range v.RollbackShards(r.ID) {
		rec := *v.Shard(s.Group)
		rec.Epoch = s.Epoch
		b.replace(kindShard, idKey(kindShard, uint64(rec.ID)), rec.Revision, rec)
	}
	b.enter(v, r, nowMs, PhaseRollbackOpen, "")
}

// AbortRollbackTxn gives a rollback up for a reason. It is refused with
// base.ErrConflict once shards may be fenced: then it goes on to its end.
func AbortRollbackTxn(v *View, nowMs, operation uint64, reason string) (broadcast.Txn, error) {
	r := v.Rollback(operation)
	switch {
	case r == nil:
		return broadcast.Txn{}, notFound("operation", fmt.Sprintf("no rollback %d", operation))
	case r.Phase == PhaseFailed:
		return broadcast.Txn{}, nil
	case r.Phase != PhaseRollbackPrepare:
		return broadcast.Txn{}, conflict("operation", fmt.Sprintf("rollback %d cannot be given up any more, it is in the phase %s", operation, r.Phase))
	}
	b := builder{txn: broadcast.Txn{Stamp: nowMs}}
	b.enter(v, r, nowMs, PhaseFailed, reason)
	return b.done()
}

// refuseDuringRollback refuses what would change what a rollback relies on.
func refuseDuringRollback(v *View) error {
	if r := v.RunningRollback(); r != nil {
		return conflict("rollback", fmt.Sprintf("operation %d is rolling the cluster back to checkpoint %d", r.ID, r.Checkpoint))
	}
	return nil
}
