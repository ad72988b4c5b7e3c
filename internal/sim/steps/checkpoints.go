package steps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster/checkpoint"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// The cluster of the world of checkpoints: a node for each copy of the metadata.
const (
	checkpointCluster = base.ClusterID("00112233445566778899aabbccddeeff")
	checkpointShards  = 3
	checkpointGroups  = 16
)

// CheckpointFault is a bug that is planted to see that the invariants notice it.
type CheckpointFault string

// The planted bugs.
const (
	// RetireBeforeMetadata completes a checkpoint when the storing of `_metadata`
	// begins.
	RetireBeforeMetadata CheckpointFault = "retire before _metadata"
	// ReusePlanned uses what an old view of the registry holds, and leaves out of
	// the report what is refused.
	ReusePlanned CheckpointFault = "reuse of planned objects"
	// SweepRunning deletes what is not in the registry, whoever is uploading it.
	SweepRunning CheckpointFault = "sweep ignores running attempts"
	// RegisterBeforePut reports objects before they are stored.
	RegisterBeforePut CheckpointFault = "register before put"
	// DeleteBeforePlan deletes when a plan is proposed, not when it is committed.
	DeleteBeforePlan CheckpointFault = "delete before the plan is committed"
	// SweepForeign takes every object that is not in the registry for an orphan.
	SweepForeign CheckpointFault = "sweep of foreign objects"
	// ForgetPlans forgets delete plans without executing them.
	ForgetPlans CheckpointFault = "plans are forgotten"
	// WriteBeforeBarrier lets participants go on before the barriers may be put.
	WriteBeforeBarrier CheckpointFault = "participants do not wait for the barriers"
	// CarryNoBarrier lets participants write without the barrier that they know.
	CarryNoBarrier CheckpointFault = "participants do not carry the barrier"
	// CountSavepoints deletes the oldest checkpoint when there are more, savepoints
	// among them, than are to be retained.
	CountSavepoints CheckpointFault = "savepoints are counted"
	// SweepAhead deletes what was stored of the log after a checkpoint, as if only the
	// attempts of the running one counted.
	SweepAhead CheckpointFault = "sweep ignores the log after a checkpoint"
	// LogBeyond stores entries for a checkpoint that come behind its barrier.
	LogBeyond CheckpointFault = "the log leads beyond the barrier"
	// RetireSavepoints deletes a savepoint that nobody has asked to delete.
	RetireSavepoints CheckpointFault = "savepoints are retired"
	// PreparedUntrue says of replicas that they are prepared though they are not.
	PreparedUntrue CheckpointFault = "replicas are not prepared"
	// PrepareOther prepares what the shard had at another checkpoint.
	PrepareOther CheckpointFault = "another checkpoint is prepared"
	// FenceUntold says that a shard is fenced, and puts up no fence.
	FenceUntold CheckpointFault = "no fence"
	// SwapUntold says that a shard is rolled back, and does nothing.
	SwapUntold CheckpointFault = "no swap"
	// ForgiveIncarnation takes requests of any incarnation for those of the present one.
	ForgiveIncarnation CheckpointFault = "incarnations are ignored"
	// RewindNothing lets participants go on where they are after a rollback.
	RewindNothing CheckpointFault = "participants do not rewind"
)

// CheckpointReport is what a run of RunCheckpoints showed.
type CheckpointReport struct {
	Seed      uint64
	Sum       string // hash of the trace
	Simulated time.Duration
	// Completed, Failed and Deleted count checkpoints, Swept orphans, Reused
	// objects that were used again.
	Completed, Failed, Deleted, Swept, Reused int
	Puts, Deletes                             int
	// Positions counts those in completed checkpoints, Lost the checkpoints that
	// failed because a participant was lost or late.
	Positions, Lost int
	// Logged counts shards that have reported a log in place of files, Ahead segments
	// that were stored between checkpoints, Registered those of them that one uses.
	Logged, Ahead, Registered int
	// RolledBack and GivenUp count rollbacks, Damaged replicas that were not prepared,
	// Rewound participants that were given a position back, Savepoints those that
	// completed.
	RolledBack, GivenUp, Damaged, Rewound, Savepoints int
	Problems                                          []string
}

// checkpoints is the world: nodes with coordinators and uploaders, a system group,
// an object store.
type checkpoints struct {
	loop   *Loop
	meta   *metadata
	store  *objects
	fault  CheckpointFault
	nodes  [replicas]*checkpointNode
	shards [checkpointShards]*shardFiles
	cuts   map[[2]uint64][]string
	// logs are how many entries the shards' logs had at the cuts.
	logs map[[2]uint64]int
	// counts are what participants had written at the cuts.
	counts       map[[2]uint64]map[string]uint64
	participants []*participant
	foreign      map[string]stored
	// savepoints says of the checkpoints that were begun whether they are some.
	savepoints map[uint64]bool
	config     checkpoint.Config
	grace      time.Duration
	// groups are those of the shards, in a directory, if there are rollbacks; turns is
	// how many have opened.
	groups []*group
	dir    string
	turns  int
	// stalled is until when a copy of the metadata stands still.
	stalled [replicas]time.Duration
	// quiet ends faults and users.
	quiet bool
	seen  seen
	rep   CheckpointReport
}

// checkpointNode is a node's process; life counts its starts.
type checkpointNode struct {
	id    base.NodeID
	i     int
	life  int
	up    bool
	drift time.Duration
	jobs  map[uint64]*uploadJob // by attempt
	// lineages are what its process remembers of the shards that it uploads.
	lineages map[base.GroupID]*lineage
	// old is an old view, for ReusePlanned.
	old *meta.View
}

// shardFiles are the contents of a shard's files.
type shardFiles struct {
	id    base.GroupID
	files []string
	// entries is the length of its log.
	entries int
	// written is how often each participant has written here.
	written map[string]uint64
}

// RunCheckpoints simulates d of virtual time of checkpoints, then lets everything
// come to rest. lines, if not nil, gets the trace.
func RunCheckpoints(seed uint64, d time.Duration, fault CheckpointFault, lines func(string)) (*CheckpointReport, error) {
	return runCheckpoints(seed, d, "", fault, lines)
}

// runCheckpoints has rollbacks if there is a directory for stores.
func runCheckpoints(seed uint64, d time.Duration, dir string, fault CheckpointFault, lines func(string)) (*CheckpointReport, error) {
	l := NewLoop(seed)
	l.Lines = lines
	w := &checkpoints{loop: l, fault: fault, meta: newMetadata(l), cuts: map[[2]uint64][]string{}, logs: map[[2]uint64]int{}, counts: map[[2]uint64]map[string]uint64{}, foreign: map[string]stored{}, savepoints: map[uint64]bool{},
		store: &objects{loop: l, held: map[string]stored{}, trouble: 0.04}, grace: time.Duration(l.IntN(3)) * time.Second, seen: newSeen(),
		config: checkpoint.Config{Interval: 1500 * time.Millisecond, Retain: 1 + l.IntN(3), Timeout: 3 * time.Second, Lost: 800 * time.Millisecond, SweepInterval: 2 * time.Second}}
	if err := w.found(); err != nil {
		return nil, err
	}
	w.putForeign()
	w.seen.incarnation = w.view(0).Cluster().Incarnation
	if dir != "" {
		if err := w.rollable(dir); err != nil {
			return nil, err
		}
		defer w.closeGroups()
	}
	w.store.changed = w.check
	w.live()
	l.Run(d)
	w.rest()
	w.rep.Seed, w.rep.Sum, w.rep.Simulated = seed, l.Sum(), l.Now()
	w.rep.Puts, w.rep.Deletes, w.rep.Problems = w.store.puts, w.store.deletes, l.Problems()
	return &w.rep, nil
}

// apply puts a transaction into the log at once.
func (w *checkpoints) apply(txn broadcast.Txn, err error) error {
	if err != nil {
		return err
	}
	cmd, err := broadcast.EncodeTxn(txn)
	if err != nil {
		return err
	}
	w.meta.log = append(w.meta.log, cmd)
	for i := range w.meta.copies {
		for _, r := range w.meta.advance(i, len(w.meta.log)) {
			if err := r.Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *checkpoints) found() error {
	spec := meta.FoundingSpec{KeyGroups: checkpointGroups, Shards: checkpointShards, Replication: replicas, Engine: "mem"}
	var holders []meta.Replica
	for i := range w.nodes {
		id := base.NodeID(fmt.Sprintf("n%d", i+1))
		w.nodes[i] = &checkpointNode{id: id, i: i, up: true, jobs: map[uint64]*uploadJob{}, lineages: map[base.GroupID]*lineage{}, drift: time.Duration(w.loop.IntN(1000)) * time.Second}
		spec.Nodes = append(spec.Nodes, meta.FoundingNode{ID: id, RaftAddr: string(id) + ":1"})
		holders = append(holders, meta.Replica{Node: id, Generation: 1, ReplicaID: base.MakeReplicaID(id, 1), Role: meta.RoleVoter})
	}
	txn, _, err := meta.FoundTxn(w.view(0), meta.Founding{Spec: spec, Self: "n1", Cluster: checkpointCluster, FormatVersion: 1, NowMs: 1})
	if err := w.apply(txn, err); err != nil {
		return err
	}
	for _, n := range w.nodes {
		if err := w.apply(meta.AdmitNodeTxn(w.view(0), meta.Node{ID: n.id, DiskID: base.DiskID("d" + n.id), RaftAddr: string(n.id) + ":1"})); err != nil {
			return err
		}
	}
	var shards []meta.Shard
	for i := range w.shards {
		s := meta.Shard{ID: base.GroupID(i + 1), Lo: i * checkpointGroups / checkpointShards, Hi: (i + 1) * checkpointGroups / checkpointShards, Epoch: 1, Birth: base.Birth(i + 1), Replicas: holders}
		shards = append(shards, s)
		w.shards[i] = &shardFiles{id: s.ID, written: map[string]uint64{}}
		for range 4 {
			w.shards[i].write(w.loop)
		}
	}
	if err := w.apply(meta.PlaceShardsTxn(w.view(0), shards)); err != nil {
		return err
	}
	op, _, err := w.view(0).FoundingOperation()
	if err != nil {
		return err
	}
	return w.apply(meta.AdvanceOperationTxn(w.view(0), 1, op.ID, meta.PhaseDone, ""))
}

func (w *checkpoints) view(i int) *meta.View { return w.meta.view(i) }

// write adds a file. Contents come again, also in other shards, also long after
// the file that had them is gone (B47).
func (s *shardFiles) write(l *Loop) {
	text := fmt.Sprintf("file %d of shard %d", l.IntN(25), s.id)
	if l.chance(0.3) {
		text = fmt.Sprintf("common file %d", l.IntN(8))
	}
	if !slices.Contains(s.files, text) {
		s.files = append(s.files, text)
	}
}

// live is the life of the world until it is quiet.
func (w *checkpoints) live() {
	l := w.loop
	for i := 1; i < replicas; i++ {
		l.Every(25*time.Millisecond, func() bool {
			if behind := len(w.meta.log) - w.meta.copies[i].applied; behind > 0 && w.stalled[i] <= l.Now() {
				w.meta.advance(i, w.meta.copies[i].applied+l.IntN(behind+1))
			}
			return true
		})
		l.Every(6*time.Second, func() bool { w.meta.restart(i); return !w.quiet })
	}
	for _, n := range w.nodes {
		l.Every(30*time.Millisecond, func() bool { w.work(n); return true })
		l.Every(4*time.Second, func() bool { w.crash(n); return !w.quiet })
		l.Every(700*time.Millisecond, func() bool { n.old = w.view(n.i); return true })
	}
	for _, s := range w.shards {
		l.Every(250*time.Millisecond, func() bool {
			if len(s.files) > 3 {
				i := l.IntN(len(s.files))
				s.files = slices.Delete(s.files, i, i+1)
			}
			s.write(l)
			return !w.quiet
		})
	}
	l.Every(2500*time.Millisecond, func() bool { w.takeOffice(l.IntN(replicas), 3*time.Second); return !w.quiet })
	w.takeOffice(0, 3*time.Second)
	l.Every(1200*time.Millisecond, func() bool { w.use(l.IntN(replicas)); return !w.quiet })
	l.Every(3*time.Second, func() bool { w.move(); return !w.quiet })
	for i := range l.IntN(3) {
		w.participate(fmt.Sprintf("p%d", i))
	}
	if w.groups == nil {
		w.liveChangelog()
	}
}

// crash ends a node's process, with all that it has under way, and starts it again.
func (w *checkpoints) crash(n *checkpointNode) {
	if w.quiet || !n.up {
		return
	}
	n.up = false
	n.life++
	n.jobs, n.lineages = map[uint64]*uploadJob{}, map[base.GroupID]*lineage{}
	w.loop.Note("%s crashes", n.id)
	w.closeSeats(n)
	w.loop.Soon(2*time.Second, func() {
		n.up = true
		w.openSeats(n)
	})
}

// use is what users do.
func (w *checkpoints) use(i int) {
	if w.quiet {
		return
	}
	if w.loop.chance(0.4) {
		savepoint := w.loop.chance(0.3) || w.groups != nil && w.loop.chance(0.5)
		w.meta.update(i, "create", func(v *meta.View) (broadcast.Txn, error) {
			in := w.input(w.nodes[i])
			in.View = v
			spec := checkpoint.Spec(in, false)
			spec.Savepoint = savepoint
			txn, _, err := meta.StartCheckpointTxn(v, w.meta.nowMs(), spec)
			return txn, err
		}, func(bool) { w.check() })
		return
	}
	list := w.view(i).Checkpoints()
	if len(list) == 0 || w.loop.chance(0.5) {
		return
	}
	c := list[w.loop.IntN(len(list))]
	number, remove := c.Number, meta.DeleteCheckpointTxn
	if c.Savepoint != w.loop.chance(0.1) { // else it asks for the wrong kind
		remove = meta.DeleteSavepointTxn
	}
	w.meta.update(i, fmt.Sprintf("delete %d", number), func(v *meta.View) (broadcast.Txn, error) {
		txn, err := remove(v, w.meta.nowMs(), number)
		w.seen.asked[number] = w.seen.asked[number] || err == nil
		return txn, err
	}, func(ok bool) {
		if ok {
			w.rep.Deleted++
		}
		w.check()
	})
}

// move takes a replica from a shard, or gives it one back.
func (w *checkpoints) move() {
	if w.quiet || w.groups != nil || w.loop.chance(0.5) {
		return
	}
	s := w.view(0).Shard(base.GroupID(1 + w.loop.IntN(checkpointShards)))
	var next []meta.Replica
	if len(s.Replicas) < replicas {
		next = slices.Clone(s.Replicas)
		for _, n := range w.nodes {
			if !slices.ContainsFunc(next, func(r meta.Replica) bool { return r.Node == n.id }) {
				next = append(next, meta.Replica{Node: n.id, Generation: s.MaxGeneration + 1, ReplicaID: base.MakeReplicaID(n.id, s.MaxGeneration+1), Role: meta.RoleVoter})
			}
		}
	} else {
		i := w.loop.IntN(len(s.Replicas))
		next = slices.Delete(slices.Clone(s.Replicas), i, i+1)
	}
	w.meta.update(0, "move", func(v *meta.View) (broadcast.Txn, error) { return meta.UpdateReplicasTxn(v, s.ID, next, "") }, func(bool) { w.check() })
}

// input is what a coordinator at a node knows.
func (w *checkpoints) input(n *checkpointNode) *checkpoint.Input {
	return &checkpoint.Input{Config: w.config, View: w.view(n.i), Now: w.loop.Now() + n.drift, WallMs: w.meta.nowMs(),
		Leader: w.leaders(), Alive: func(id base.NodeID) bool {
			for _, other := range w.nodes {
				if other.id == id {
					return other.up
				}
			}
			return false
		}}
}

// takeOffice lets a node coordinate, for a while: one that is deposed goes on
// until it notices.
func (w *checkpoints) takeOffice(i int, atMost time.Duration) {
	n := w.nodes[i]
	if !n.up {
		return
	}
	c, life := checkpoint.New(), n.life
	until := w.loop.Now() + atMost + time.Duration(w.loop.Int64N(int64(3*time.Second)))
	w.loop.Note("%s coordinates", n.id)
	w.loop.Every(30*time.Millisecond, func() bool {
		if n.life != life || w.loop.Now() > until {
			return false
		}
		for _, a := range c.Step(*w.input(n)) {
			w.act(n, c, a)
		}
		return true
	})
}

// act does what a coordinator wants. The answers are late, or never come because
// the node has crashed; what the store was asked may be done all the same.
func (w *checkpoints) act(n *checkpointNode, c *checkpoint.Coordinator, a checkpoint.Action) {
	life := n.life
	answer := func(f func(now time.Duration)) {
		w.loop.Soon(40*time.Millisecond, func() {
			if n.life == life {
				f(w.loop.Now() + n.drift)
			}
		})
	}
	ctx := context.Background()
	switch a.Kind {
	case checkpoint.Propose:
		if w.fault == DeleteBeforePlan {
			w.deletePlansOf(a.Txn)
		}
		w.meta.update(n.i, a.Why, func(*meta.View) (broadcast.Txn, error) { return a.Txn, nil }, func(bool) {
			w.check()
			w.retire()
		})
	case checkpoint.Complain:
		w.loop.Problem("%s complains: %s", n.id, a.Why)
	case checkpoint.StoreMetadata:
		m, err := checkpoint.Metadata(w.view(n.i), a.Checkpoint)
		if err != nil {
			answer(func(now time.Duration) { c.Stored(now, a.Checkpoint, [32]byte{}, 0, err) })
			return
		}
		if w.fault == RetireBeforeMetadata {
			c.Stored(w.loop.Now()+n.drift, a.Checkpoint, [32]byte{1}, 1, nil)
		}
		w.loop.Soon(w.latency(), func() {
			sum, size, err := snapshot.StoreMetadata(ctx, w.store, m)
			w.loop.Note("%s stores _metadata of %d: %v", n.id, a.Checkpoint, err)
			if errors.Is(err, base.ErrConflict) {
				w.loop.Problem("storing _metadata of %d: %v", a.Checkpoint, err)
			}
			answer(func(now time.Duration) { c.Stored(now, a.Checkpoint, sum, size, err) })
		})
	case checkpoint.DeletePlanned:
		w.loop.Soon(w.latency(), func() {
			var err error
			if w.fault != ForgetPlans {
				err = snapshot.ExecutePlan(ctx, w.store, checkpointCluster, a.Plan.Keys)
			}
			w.loop.Note("%s executes plan %d of %d keys: %v", n.id, a.Plan.ID, len(a.Plan.Keys), err)
			answer(func(now time.Duration) { c.Deleted(now, a.Plan.ID, err) })
		})
	case checkpoint.FindOrphans:
		test := w.view(n.i).OrphanTest()
		w.loop.Soon(w.latency(), func() {
			keys, err := w.findOrphans(ctx, n, test)
			answer(func(now time.Duration) { c.Found(now, w.config.SweepInterval, keys, err) })
		})
	}
}

// latency bounds what a request takes; a few take very long.
func (w *checkpoints) latency() time.Duration {
	if !w.quiet && w.loop.chance(0.03) {
		return 4 * time.Second
	}
	return 60 * time.Millisecond
}

func (w *checkpoints) findOrphans(ctx context.Context, n *checkpointNode, test func(string) (bool, bool)) ([]string, error) {
	v := w.view(n.i)
	switch w.fault {
	case SweepRunning, SweepForeign, SweepAhead:
		var wrong []string
		for key, x := range w.store.held {
			_, _, attempt, object := snapshot.ParseObjectKey(key)
			_, foreign := test(key)
			if w.fault == SweepAhead {
				object = object && attempt < v.OldestRunningAttempt() && x.at < w.loop.Now()-w.grace
			}
			if v.ObjectByKey(key) == nil && (w.fault == SweepForeign || object && !foreign) {
				wrong = append(wrong, key)
			}
		}
		slices.Sort(wrong)
		return nil, w.store.Delete(ctx, wrong...)
	}
	o, err := snapshot.FindOrphans(ctx, w.store, checkpointCluster, snapshot.OrphanOptions{
		Before: atTime(w.loop.Now() - w.grace), IsOrphan: func(key string) bool { orphan, _ := test(key); return orphan }})
	if err != nil {
		return nil, err
	}
	w.rep.Swept += len(o.Keys)
	w.loop.Note("%s finds %d orphans among %d objects", n.id, len(o.Keys), o.Objects)
	return o.Keys, nil
}

// rest ends the faults, and lets one coordinator bring everything to its end:
// then there is nothing in the store but what is retained, and what is foreign.
func (w *checkpoints) rest() {
	w.quiet, w.store.trouble = true, 0
	w.loop.Run(w.loop.Now() + 8*time.Second)
	w.config.Interval = 0
	w.takeOffice(0, time.Hour)
	w.loop.Run(w.loop.Now() + 30*time.Second)
	w.check()
	w.checkEnd()
	w.settleGroups()
	w.meta.settle()
}
