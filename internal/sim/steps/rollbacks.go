package steps

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// RunRollbacks is RunCheckpoints with shards that hold something, are written to, and
// are rolled back; dir is for their stores and must be empty.
func RunRollbacks(seed uint64, d time.Duration, dir string, fault CheckpointFault, lines func(string)) (*CheckpointReport, error) {
	return runCheckpoints(seed, d, dir, fault, lines)
}

// rollable gives the shards groups, and users who write and roll back.
func (w *checkpoints) rollable(dir string) error {
	w.dir = dir
	for i, s := range w.shards {
		g, err := w.newGroup(s, i*checkpointGroups/checkpointShards, (i+1)*checkpointGroups/checkpointShards)
		if err != nil {
			return err
		}
		w.groups = append(w.groups, g)
	}
	l := w.loop
	for _, g := range w.groups {
		g.elect()
		l.Every(150*time.Millisecond, func() bool { g.elect(); return true })
		for i := range g.seats {
			l.Every(60*time.Millisecond, func() bool {
				if i != g.leader {
					g.advance(i, max(g.seats[i].applied, g.cut)+l.IntN(len(g.log)-max(g.seats[i].applied, g.cut)+1))
				}
				return true
			})
		}
		l.Every(time.Second, func() bool { g.change(); return true })
		l.Every(200*time.Millisecond, func() bool { g.record(); return true })
		l.Every(time.Second, func() bool { g.removeFiles(); return true })
		newWriter(g).live()
	}
	l.Every(700*time.Millisecond, func() bool {
		w.stalled[l.IntN(replicas)] = l.Now() + time.Duration(l.Int64N(int64(2*time.Second)))
		return !w.quiet
	})
	for _, n := range w.nodes {
		l.Every(30*time.Millisecond, func() bool { w.attendRollbacks(n); return true })
	}
	w.config.Interval = 3 * time.Second // there is time for rollbacks between them
	l.Every(400*time.Millisecond, func() bool { w.rollBack(l.IntN(replicas)); return !w.quiet })
	return nil
}

// rollBack is what users do about rollbacks.
func (w *checkpoints) rollBack(i int) {
	v := w.view(i)
	if r := v.RunningRollback(); r != nil && w.loop.chance(0.1) {
		w.meta.update(i, "abort", func(v *meta.View) (broadcast.Txn, error) {
			return meta.AbortRollbackTxn(v, w.meta.nowMs(), r.ID, "given up")
		}, func(bool) { w.check() })
	}
	var to []uint64
	for _, c := range v.Checkpoints() {
		if c.Phase == meta.CheckpointCompleted {
			to = append(to, c.Number)
		}
	}
	if len(to) == 0 || w.loop.chance(0.6) {
		return
	}
	number := to[w.loop.IntN(len(to))]
	timeout := []uint64{0, 1500, 6000}[w.loop.IntN(3)]
	force := w.loop.chance(0.5) // where a participant has no position in it
	w.meta.update(i, fmt.Sprintf("roll back to %d", number), func(v *meta.View) (broadcast.Txn, error) {
		txn, _, err := meta.StartRollbackTxn(v, w.meta.nowMs(), meta.RollbackStart{Checkpoint: number, TimeoutMs: timeout, Force: force})
		return txn, err
	}, func(bool) { w.check() })
}

// record brings the record of the shard to the members that the group has.
func (g *group) record() {
	var next []meta.Replica
	for _, s := range g.members() {
		_, gen, _ := s.replica.Split()
		next = append(next, meta.Replica{Node: s.node.id, Generation: gen, ReplicaID: s.replica, Role: meta.RoleVoter})
	}
	g.w.meta.update(0, "members", func(v *meta.View) (broadcast.Txn, error) { return meta.UpdateReplicasTxn(v, g.id, next, "") }, func(bool) { g.w.check() })
}

// removeFiles removes what the shard had at barriers whose checkpoints are gone.
func (g *group) removeFiles() {
	for number, dir := range g.files {
		if c := g.w.view(0).Checkpoint(number); c == nil || c.Phase == meta.CheckpointFailed || c.Phase == meta.CheckpointDeleting {
			delete(g.files, number)
			if err := os.RemoveAll(dir); err != nil {
				g.w.loop.Problem("%v", err)
			}
		}
	}
}

// attendRollbacks is what a node does about a rollback now and then, as package
// cluster does it.
func (w *checkpoints) attendRollbacks(n *checkpointNode) {
	if !n.up {
		return
	}
	v := w.view(n.i)
	op := v.RunningRollback()
	for _, g := range w.groups {
		s := g.seats[n.i]
		if !s.serves() || s.replica == "" {
			continue
		}
		s.removeEnded(v)
		if op == nil {
			continue
		}
		if rs := v.RollbackShard(op.ID, g.id); rs != nil {
			s.prepare(op, rs)
			if g.leader == n.i {
				s.lead(v, op, rs)
			}
		}
	}
}

// removeEnded removes what was prepared for operations that were given up, or that
// the store and the log have behind them.
func (s *seat) removeEnded(v *meta.View) {
	h := s.m.Header()
	for op, dir := range s.prepared {
		o := v.Operation(op)
		failed := o == nil && op < v.NextOperationID() || o != nil && o.Phase == meta.PhaseFailed
		if failed || h.RolledBack >= op && uint64(s.g.cut) >= h.RollbackIndex {
			delete(s.prepared, op)
			if err := os.RemoveAll(dir); err != nil {
				s.g.w.loop.Problem("%v", err)
			}
		}
	}
}

// prepare brings what the shard had at the checkpoint beside the store, and says so.
func (s *seat) prepare(op *meta.Rollback, rs *meta.RollbackShard) {
	done := rs.State == meta.RollbackShardSwapped || rs.State == meta.RollbackShardOpen || s.m.Header().RolledBack >= op.ID
	if done || slices.Contains(rs.Prepared, s.replica) || s.preparing == op.ID {
		return
	}
	s.preparing = op.ID
	w, life, replica := s.g.w, s.node.life, s.replica
	w.loop.Soon(2*w.latency(), func() {
		if s.node.life != life || s.replica != replica || !s.serves() {
			return
		}
		problem, err := "", error(nil)
		if w.fault != PreparedUntrue {
			problem, err = s.fetch(op)
		}
		w.meta.update(s.node.i, fmt.Sprintf("prepared %d of shard %s", op.ID, s.g.id), func(v *meta.View) (broadcast.Txn, error) {
			if err != nil {
				return meta.ReportUnpreparedTxn(v, w.meta.nowMs(), op.ID, s.g.id, err.Error(), problem != "")
			}
			return meta.ReportPreparedTxn(v, w.meta.nowMs(), op.ID, s.g.id, replica)
		}, func(ok bool) {
			w.check()
			if (!ok || err != nil) && s.node.life == life && s.preparing == op.ID {
				w.loop.Soon(200*time.Millisecond, func() {
					if s.node.life == life && s.preparing == op.ID {
						s.preparing = 0 // again
					}
				})
			}
		})
	})
}

// fetch fetches what the shard had, looks at it, and keeps it; hopeless says that the
// error stays.
func (s *seat) fetch(op *meta.Rollback) (hopeless string, err error) {
	w := s.g.w
	if s.prepared[op.ID] != "" {
		return "", nil // before a restart
	}
	if w.store.fails() {
		return "", fmt.Errorf("fetching: %w", base.ErrObjectStore)
	}
	if !w.quiet && w.loop.chance(0.005) {
		return "damaged", base.ErrCorrupt
	}
	number := op.Checkpoint
	if w.fault == PrepareOther {
		for other := range s.g.files {
			number = max(number, other)
		}
	}
	from := s.g.files[number]
	if from == "" {
		if r := w.view(0).RunningRollback(); r != nil && r.ID == op.ID {
			w.problem("shard %s: nothing is left of checkpoint %d, to which rollback %d goes back", s.g.id, number, op.ID)
		}
		return "gone", base.ErrNotFound
	}
	dir, try := s.g.newDir("prepared"), s.g.newDir("try")
	if err := errors.Join(os.CopyFS(dir, os.DirFS(from)), os.CopyFS(try, os.DirFS(from))); err != nil {
		return "", err
	}
	store, err := s.driver.Open(try)
	if err != nil {
		return "", err
	}
	if err := errors.Join(raftfsm.CheckPrepared(store, s.m.Header()), store.Close(), os.RemoveAll(try)); err != nil {
		if !errors.Is(err, base.ErrNotReady) { // it has no store to speak of yet
			w.problem("what shard %s had at checkpoint %d: %v", s.g.id, number, err)
		}
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	s.prepared[op.ID] = dir
	return "", nil
}

// lead does as the leader what the phase of the rollback asks for, and says when the
// shard has done its part.
func (s *seat) lead(v *meta.View, op *meta.Rollback, rs *meta.RollbackShard) {
	g := s.g
	var state meta.RollbackShardState
	var step func() bool
	switch {
	case op.Phase == meta.PhaseRollbackFence && rs.State == meta.RollbackShardServing:
		state, step = meta.RollbackShardFenced, func() bool {
			return g.w.fault == FenceUntold || g.done(raftfsm.AppendFence(nil, raftfsm.Fence{Operation: op.ID, Checkpoint: op.Checkpoint}))
		}
	case op.Phase == meta.PhaseRollbackSwap && rs.State == meta.RollbackShardFenced:
		state, step = meta.RollbackShardSwapped, func() bool { return g.w.fault == SwapUntold || s.swap(op, rs) }
	case op.Phase == meta.PhaseRollbackOpen && rs.State == meta.RollbackShardSwapped:
		revision := v.Revision()
		state, step = meta.RollbackShardOpen, func() bool {
			return g.done(raftfsm.AppendReopen(nil, raftfsm.Reopen{Operation: op.ID, Revision: revision}))
		}
	}
	if step == nil || s.leading {
		return
	}
	s.leading = true
	life := s.node.life
	g.w.loop.Soon(20*time.Millisecond, func() {
		if s.node.life != life {
			return
		}
		if g.leader != s.node.i || !step() {
			s.leading = false
			return
		}
		g.w.meta.update(s.node.i, fmt.Sprintf("shard %s is %s", g.id, state), func(v *meta.View) (broadcast.Txn, error) {
			return meta.ReportRollbackStateTxn(v, g.w.meta.nowMs(), op.ID, g.id, state)
		}, func(bool) {
			g.w.check()
			if s.node.life == life {
				s.leading = false
			}
		})
	})
}

// done proposes a command and says whether it did what it says.
func (g *group) done(cmd []byte) bool {
	out, ok := g.propose(cmd)
	return ok && out.Err == nil
}

// swap proposes the rollback, if a quorum of those who vote by now is prepared and
// the leader is; then it cuts the log.
func (s *seat) swap(op *meta.Rollback, rs *meta.RollbackShard) bool {
	g := s.g
	if s.m.Header().RolledBack < op.ID {
		ready := 0
		for _, m := range g.members() {
			if m == s || slices.Contains(rs.Prepared, m.replica) {
				ready++
			}
		}
		if s.prepared[op.ID] == "" && g.w.fault != PreparedUntrue {
			g.leader = -1 // it leaves that to one that is
			return false
		}
		if ready < len(g.members())/2+1 {
			return false
		}
		cmd := raftfsm.AppendRollback(nil, raftfsm.Rollback{Operation: op.ID, Checkpoint: op.Checkpoint, Incarnation: op.Incarnation, Epoch: rs.Epoch})
		if out, ok := g.propose(cmd); !ok || out.Err != nil && !errors.Is(out.Err, base.ErrConflict) {
			return false
		}
	}
	if s.m.Header().RolledBack < op.ID {
		return false
	}
	if err := s.store.Flush(); err != nil {
		g.w.loop.Problem("flushing shard %s: %v", g.id, err)
		return false
	}
	g.cut = max(g.cut, s.applied)
	return true
}

// serves says that the shard takes writes.
func (g *group) serves() bool {
	return g.leader >= 0 && g.seats[g.leader].serves() && g.seats[g.leader].m.Header().Fence == 0
}

// leaders are those of the shards as one node knows them; some it does not know.
func (w *checkpoints) leaders() func(base.GroupID) base.NodeID {
	known := map[base.GroupID]base.NodeID{}
	for _, g := range w.groups {
		if g.leader >= 0 && w.loop.chance(0.98) {
			known[g.id] = w.nodes[g.leader].id
		}
	}
	return func(id base.GroupID) base.NodeID { return known[id] }
}

// closeSeats ends what a node's process has open; what its stores had not flushed is
// gone.
func (w *checkpoints) closeSeats(n *checkpointNode) {
	for _, g := range w.groups {
		s := g.seats[n.i]
		if s.m != nil && s.struck == nowhere && w.loop.chance(0.5) {
			if err := s.store.Flush(); err != nil {
				w.loop.Problem("flushing shard %s: %v", g.id, err)
			}
		}
		s.close()
		if g.leader == n.i {
			g.leader = -1
		}
	}
}

func (w *checkpoints) openSeats(n *checkpointNode) {
	for _, g := range w.groups {
		if s := g.seats[n.i]; s.replica != "" && s.m == nil {
			if err := s.open(); err != nil {
				w.loop.Problem("opening shard %s at %s: %v", g.id, n.id, err)
			}
		}
	}
}

func (w *checkpoints) closeGroups() {
	for _, g := range w.groups {
		for _, s := range g.seats {
			s.close()
		}
	}
}

// retire is what planted bugs do when a checkpoint may have completed.
func (w *checkpoints) retire() {
	v := w.view(0)
	var kept []*meta.Checkpoint
	for _, c := range v.Checkpoints() {
		if c.Phase == meta.CheckpointCompleted {
			kept = append(kept, c)
		}
	}
	for _, c := range kept {
		switch {
		case w.fault == CountSavepoints && len(kept) > w.config.Retain && !c.Savepoint:
			w.meta.update(0, "retire", func(v *meta.View) (broadcast.Txn, error) {
				return meta.DeleteCheckpointTxn(v, w.meta.nowMs(), c.Number)
			}, func(bool) { w.check() })
			return
		case w.fault == RetireSavepoints && c.Savepoint:
			w.meta.update(0, "retire", func(v *meta.View) (broadcast.Txn, error) {
				return meta.DeleteSavepointTxn(v, w.meta.nowMs(), c.Number)
			}, func(bool) { w.check() })
			return
		}
	}
}
