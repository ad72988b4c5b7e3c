package checkpoint

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// Config is how checkpoints are taken. It may differ from step to step.
type Config struct {
	// Interval is the time between the starts of automatic checkpoints; 0 is none.
	Interval time.Duration
	// Retain is how many completed checkpoints are kept, at least 1.
	Retain int
	// Changelog: shards may store their log since an earlier checkpoint.
	Changelog bool
	// Timeout bounds a checkpoint that this coordinator starts. Default 10 min.
	Timeout time.Duration
	// Lost is for how long an uploader may seem down before the checkpoint fails.
	// Default 15 s.
	Lost time.Duration
	// SweepInterval is the time between searches for orphans, and an eighth of it
	// until the first one of a new coordinator; 0 is none.
	SweepInterval time.Duration
}

func (c *Config) ensureDefaults() {
	c.Retain = max(c.Retain, 1)
	if c.Timeout <= 0 {
		c.Timeout = 10 * time.Minute
	}
	if c.Lost <= 0 {
		c.Lost = 15 * time.Second
	}
}

// Retries of what the object store refused: the first after retryMin, then twice
// as long each time.
const (
	retryMin = 500 * time.Millisecond
	retryMax = time.Minute
)

// Input is what a step is decided by.
type Input struct {
	Config Config
	// View is the newest state of the metadata that the node has.
	View *meta.View
	// Now is the time since some moment, by a clock that never goes back.
	Now time.Duration
	// WallMs is the wall clock, in milliseconds. It is for show, except that a new
	// coordinator takes from it when the last checkpoint was.
	WallMs uint64
	// Alive says whether a node seems to live; nil: all do.
	Alive func(base.NodeID) bool
	// Leader says who leads a shard, "" if that is not known. It may be nil.
	Leader func(base.GroupID) base.NodeID
}

func (in *Input) alive(n base.NodeID) bool { return in.Alive == nil || in.Alive(n) }

// Kind says what an action is.
type Kind uint8

// The kinds of actions.
const (
	// Propose: propose Txn to the system group. What comes of it is seen in a
	// later view; if its conditions fail the next step makes another one.
	Propose Kind = iota + 1
	// StoreMetadata: make the `_metadata` of Checkpoint by a view that is at least
	// as new (Metadata), store it, and report to Stored.
	StoreMetadata
	// DeletePlanned: delete the keys of Plan from the object store, and report to
	// Deleted.
	DeletePlanned
	// FindOrphans: list the object store, and report to Found.
	FindOrphans
	// Complain: write Why to the log. Nothing else can be done.
	Complain
)

func (k Kind) String() string {
	switch k {
	case Propose:
		return "propose"
	case StoreMetadata:
		return "store-metadata"
	case DeletePlanned:
		return "delete-planned"
	case FindOrphans:
		return "find-orphans"
	case Complain:
		return "complain"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Action is something that is to be done now. An action other than Propose is not
// given again before its outcome was reported.
type Action struct {
	Kind Kind
	// Why is for the log.
	Why        string
	Txn        broadcast.Txn
	Checkpoint uint64
	Plan       *meta.DeletePlan
}

// Coordinator leads the checkpoints of a cluster while its node leads the system
// group. A node that comes into office makes a new one.
type Coordinator struct {
	office time.Duration
	begun  bool

	// next is the number of the next checkpoint as last seen; since is when that
	// changed, or when the last checkpoint was started as far as is known.
	next  uint64
	since time.Duration
	// running is the checkpoint that was last seen running, from runningSince on.
	running      uint64
	runningSince time.Duration
	// rolling is the rollback that was last seen running, from rollingSince on.
	// rollingReady is until when one that could be fenced waits for more replicas, 0
	// before that.
	rolling                    uint64
	rollingSince, rollingReady time.Duration
	// downSince is since when nodes seem down.
	downSince map[base.NodeID]time.Duration

	metadata metadataJob
	// deleting are the plans that are being executed or were.
	deleting map[uint64]*job
	sweep    job
	found    []string
}

// job is something that the caller does for the coordinator.
type job struct {
	underWay, done bool
	// again is when it may be tried again, pause for how long it waited.
	again, pause time.Duration
	err          error
}

func (j *job) ready(now time.Duration) bool { return !j.underWay && !j.done && now >= j.again }

func (j *job) ended(now time.Duration, err error) {
	j.underWay, j.err = false, err
	if err == nil {
		j.done = true
		return
	}
	j.pause = min(max(2*j.pause, retryMin), retryMax)
	j.again = now + j.pause
}

// metadataJob is the storing of one checkpoint's `_metadata`.
type metadataJob struct {
	job
	number uint64
	sum    [32]byte
	size   int64
}

// New returns the coordinator of a node that has come into office.
func New() *Coordinator {
	return &Coordinator{downSince: make(map[base.NodeID]time.Duration), deleting: make(map[uint64]*job)}
}

// Step says what is to be done now: all of it, in this order, except that
// proposals, which come last, may be left to a later step. It is called whenever
// something has changed, and from time to time.
func (c *Coordinator) Step(in Input) []Action {
	in.Config.ensureDefaults()
	v := in.View
	if v == nil || v.Cluster() == nil {
		return nil
	}
	c.observe(&in)
	var out []Action
	propose := func(why string, txn broadcast.Txn, err error) {
		switch {
		case err != nil:
			out = append(out, Action{Kind: Complain, Why: fmt.Sprintf("%s: %v", why, err)})
		case !meta.Empty(txn):
			out = append(out, Action{Kind: Propose, Why: why, Txn: txn})
		}
	}
	if r := v.RunningCheckpoint(); r != nil {
		c.lead(&in, r, propose, &out)
	} else if r := v.RunningRollback(); r != nil {
		c.rollBack(&in, r, propose)
	} else {
		if v.DeletionsPending() {
			txn, err := meta.PlanDeletionsTxn(v, in.WallMs)
			propose("planning deletions", txn, err)
		}
		if c.due(&in) {
			txn, _, err := meta.StartCheckpointTxn(v, in.WallMs, Spec(&in, true))
			propose("starting an automatic checkpoint", txn, err)
			if err != nil {
				c.since = in.Now // not before the next is due
			}
		}
	}
	c.executePlans(&in, propose, &out)
	c.sweepOrphans(&in, propose, &out)
	// Proposals come last: who stops at one that fails has begun the rest.
	slices.SortStableFunc(out, func(a, b Action) int { return proposal(a) - proposal(b) })
	return out
}

func proposal(a Action) int {
	if a.Kind == Propose {
		return 1
	}
	return 0
}

// observe notes what time the changes are seen.
func (c *Coordinator) observe(in *Input) {
	v, now := in.View, in.Now
	if !c.begun {
		c.begun, c.office, c.next, c.since = true, now, v.NextCheckpoint(), now
		// Early: a leader may not be in office for a whole interval.
		c.sweep.again = now + in.Config.SweepInterval/8
		if all := v.Checkpoints(); len(all) > 0 {
			// As long ago as the wall clock says, but not in the future, and
			// not so long that it could not have been this interval's.
			ago := time.Duration(in.WallMs-min(in.WallMs, all[len(all)-1].CreatedMs)) * time.Millisecond
			c.since = now - min(max(ago, 0), in.Config.Interval)
		}
	}
	if next := v.NextCheckpoint(); next != c.next {
		c.next, c.since = next, now
	}
	if r := v.RunningCheckpoint(); r != nil && r.Number != c.running {
		c.running, c.runningSince = r.Number, now
		c.metadata = metadataJob{number: r.Number}
	}
	for _, n := range v.Nodes() {
		if in.alive(n.ID) {
			delete(c.downSince, n.ID)
		} else if _, known := c.downSince[n.ID]; !known {
			c.downSince[n.ID] = now
		}
	}
}

// due says whether an automatic checkpoint is to be started.
func (c *Coordinator) due(in *Input) bool {
	return in.Config.Interval > 0 && in.Now-c.since >= in.Config.Interval && len(in.View.Shards()) > 0
}

type proposeFunc = func(why string, txn broadcast.Txn, err error)

// lead brings a running checkpoint on, or fails it.
func (c *Coordinator) lead(in *Input, r *meta.Checkpoint, propose proposeFunc, out *[]Action) {
	v := in.View
	if r.Phase == meta.CheckpointMetadata && c.metadata.done {
		txn, err := meta.CompleteTxn(v, in.WallMs, r.Number, c.metadata.sum, c.metadata.size, in.Config.Retain)
		propose(fmt.Sprintf("completing checkpoint %d", r.Number), txn, err)
		if err == nil {
			return
		}
		// It ends at its timeout at the latest (CK2).
	}
	shards := v.CheckpointShards(r.Number)
	if reason := c.hopeless(in, r, shards); reason != "" {
		txn, err := meta.FailCheckpointTxn(v, in.WallMs, r.Number, reason)
		propose(fmt.Sprintf("failing checkpoint %d: %s", r.Number, reason), txn, err)
		return
	}
	switch {
	case r.Phase == meta.CheckpointWaiting:
		if v.WaitingFor(r.Number) == "" {
			txn, err := meta.PutBarriersTxn(v, in.WallMs, r.Number)
			propose(fmt.Sprintf("every participant has acknowledged checkpoint %d", r.Number), txn, err)
		}
	case r.Phase == meta.CheckpointMetadata:
		if c.metadata.ready(in.Now) {
			c.metadata.underWay = true
			*out = append(*out, Action{Kind: StoreMetadata, Why: "every shard has uploaded", Checkpoint: r.Number})
		}
	case !slices.ContainsFunc(shards, notUploaded):
		txn, err := meta.MetadataPhaseTxn(v, in.WallMs, r.Number)
		propose(fmt.Sprintf("every shard of checkpoint %d has uploaded", r.Number), txn, err)
	}
}

func notUploaded(s *meta.CheckpointShard) bool { return s.State != meta.CheckpointShardUploaded }

// hopeless says why a running checkpoint is to fail, or nothing.
func (c *Coordinator) hopeless(in *Input, r *meta.Checkpoint, shards []*meta.CheckpointShard) string {
	if r.Phase == meta.CheckpointWaiting {
		if id := in.View.LostParticipant(r.Number); id != "" {
			return fmt.Sprintf("participant %q is lost: its session has ended, or it has registered again or gone", id)
		}
	}
	if r.Phase == meta.CheckpointWaiting || r.Phase == meta.CheckpointAnnounced {
		if why := mapChange(in.View, shards); why != "" {
			return "the shard map has changed: " + why
		}
		for _, s := range shards {
			if since, down := c.downSince[s.Uploader]; notUploaded(s) && down && in.Now-since >= in.Config.Lost {
				return fmt.Sprintf("shard %s: node %s, which uploads it, is down", s.Group, s.Uploader)
			}
		}
	}
	if err := c.metadata.err; err != nil && (errors.Is(err, base.ErrConflict) || errors.Is(err, base.ErrInvalid)) {
		return fmt.Sprintf("storing _metadata: %v", err)
	}
	timeout := time.Duration(r.TimeoutMs) * time.Millisecond
	if in.Now-c.runningSince < timeout {
		return ""
	}
	if id := in.View.WaitingFor(r.Number); r.Phase == meta.CheckpointWaiting && id != "" {
		return fmt.Sprintf("not done after %s; participant %q has not acknowledged", timeout, id)
	}
	if r.Phase == meta.CheckpointMetadata {
		if c.metadata.err != nil {
			return fmt.Sprintf("not done after %s; storing _metadata: %v", timeout, c.metadata.err)
		}
		return fmt.Sprintf("not done after %s; _metadata is not stored", timeout)
	}
	missing, first := 0, (*meta.CheckpointShard)(nil)
	for _, s := range shards {
		if notUploaded(s) {
			missing++
			if first == nil {
				first = s
			}
		}
	}
	if first == nil {
		return fmt.Sprintf("not done after %s", timeout)
	}
	return fmt.Sprintf("not done after %s; %d of %d shards are missing, the first is shard %s, %s on node %s", timeout, missing, len(shards), first.Group, first.State, first.Uploader)
}

// mapChange says how the shard map differs from that of the barriers, for shards
// that have not uploaded.
func mapChange(v *meta.View, shards []*meta.CheckpointShard) string {
	for _, s := range shards {
		if !notUploaded(s) {
			continue
		}
		now := v.Shard(s.Group)
		switch {
		case now == nil:
			return fmt.Sprintf("shard %s is gone", s.Group)
		case now.Epoch != s.Epoch || now.Birth != s.Birth || now.Lo != s.Lo || now.Hi != s.Hi:
			return fmt.Sprintf("shard %s is at epoch %d, not %d", s.Group, now.Epoch, s.Epoch)
		case !slices.ContainsFunc(now.Replicas, func(r meta.Replica) bool { return r.Node == s.Uploader }):
			return fmt.Sprintf("node %s, which uploads shard %s, has no replica of it any more", s.Uploader, s.Group)
		}
	}
	return ""
}

// Stored reports that the `_metadata` of a checkpoint is durable, or why not. An
// error that is base.ErrConflict (other bytes are there) or base.ErrInvalid (it
// cannot be made) fails the checkpoint; after others it is tried again.
func (c *Coordinator) Stored(now time.Duration, number uint64, sum [32]byte, size int64, err error) {
	if number != c.metadata.number {
		return
	}
	c.metadata.sum, c.metadata.size = sum, size
	c.metadata.ended(now, err)
}

// executePlans has the oldest delete plan executed, one after the other: what
// names objects is deleted before them.
func (c *Coordinator) executePlans(in *Input, propose proposeFunc, out *[]Action) {
	plans := in.View.Plans()
	for id := range c.deleting {
		if in.View.Plan(id) == nil {
			delete(c.deleting, id)
		}
	}
	for _, p := range plans {
		j := c.deleting[p.ID]
		if j == nil {
			j = &job{}
			c.deleting[p.ID] = j
		}
		if j.done {
			txn, err := meta.FinishPlanTxn(in.View, p.ID)
			propose(fmt.Sprintf("delete plan %d is executed", p.ID), txn, err)
			continue
		}
		if j.ready(in.Now) {
			j.underWay = true
			*out = append(*out, Action{Kind: DeletePlanned, Why: p.Why, Plan: p})
		}
		return
	}
}

// Deleted reports that the keys of a delete plan are deleted, or why not; then it
// is tried again.
func (c *Coordinator) Deleted(now time.Duration, plan uint64, err error) {
	if j := c.deleting[plan]; j != nil {
		j.ended(now, err)
	}
}

// sweepOrphans has orphans looked for, and plans what was found.
func (c *Coordinator) sweepOrphans(in *Input, propose proposeFunc, out *[]Action) {
	if len(c.found) > 0 {
		txn, rest, err := meta.PlanOrphansTxn(in.View, in.WallMs, c.found)
		propose("planning the deletion of orphans", txn, err)
		if err == nil && meta.Empty(txn) {
			c.found = rest
		}
		return
	}
	if in.Config.SweepInterval > 0 && c.sweep.ready(in.Now) {
		c.sweep.underWay = true
		*out = append(*out, Action{Kind: FindOrphans, Why: "the interval of sweeps"})
	}
}

// Found reports the keys that FindOrphans found to be orphans by some view, or why
// it could not look.
func (c *Coordinator) Found(now time.Duration, interval time.Duration, keys []string, err error) {
	c.sweep.ended(now, err)
	if err == nil {
		c.sweep = job{again: now + interval}
		c.found = append(c.found, keys...)
	}
}
