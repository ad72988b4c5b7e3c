package steps

import (
	"bytes"
	"context"
	"maps"
	"slices"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// applied notes that a request was applied, and demands SS12 of it.
func (g *group) applied(s *sent, replayed bool) {
	if s.rolls != g.rolls {
		g.w.problem("shard %s: a request that was made before a rollback was applied after it", g.id)
	}
	if s.turns >= 0 && s.turns != g.w.turns {
		g.w.problem("shard %s: a session of before a rollback was served after it", g.id)
	}
	if r := g.w.view(0).RunningRollback(); r != nil && r.Phase == meta.PhaseRollbackSwap {
		g.w.problem("shard %s: a write was acknowledged in the phase %s", g.id, r.Phase)
	}
	switch {
	case s.put != 0:
		g.now.value = s.put
	case slices.Contains(g.now.list, s.add) != replayed:
		g.w.problem("shard %s: number %d was applied, again %v, to a list that has it %v", g.id, s.add, replayed, !replayed)
	case !replayed:
		g.now.list = append(g.now.list, s.add)
	}
}

// barrier lets the shard pass the barrier of a checkpoint, and notes what it held.
func (g *group) barrier(c *meta.CheckpointShard) bool {
	if _, passed := g.saved[c.Checkpoint]; passed {
		return true
	}
	out, ok := g.propose(raftfsm.AppendBarrier(nil, raftfsm.Barrier{Number: c.Checkpoint, Epoch: c.Epoch, Attempt: c.Attempt, Uploader: c.Uploader}))
	if !ok || out.Err != nil {
		return false
	}
	g.saved[c.Checkpoint] = g.now.clone()
	return true
}

// observe looks, when the leader has the whole log, whether it was rolled back: then
// it holds exactly what it held at the barrier (SS11).
func (g *group) observe() {
	h := g.seats[g.leader].m.Header()
	if h.RolledBack <= g.rolled {
		return
	}
	r := g.w.view(0).Rollback(h.RolledBack)
	if r == nil {
		g.w.problem("shard %s was rolled back by operation %d, which nobody knows", g.id, h.RolledBack)
		return
	}
	g.rolled = h.RolledBack
	g.rolls++
	g.now = g.saved[r.Checkpoint].clone()
	g.w.loop.Note("shard %s is rolled back to checkpoint %d: %s", g.id, r.Checkpoint, g.now)
	if have := g.holds(g.leader); !have.equal(g.now) {
		g.w.problem("shard %s was rolled back to checkpoint %d and holds %s; at its barrier it held %s", g.id, r.Checkpoint, have, g.now)
	}
	// So do the files that the shard consists of.
	s, at := g.w.shards[g.id-1], [2]uint64{r.Checkpoint, uint64(g.id)}
	s.files, s.written = slices.Clone(g.w.cuts[at]), maps.Clone(g.w.counts[at])
}

// holds reads what a seat's machine holds.
func (g *group) holds(i int) (c content) {
	view, err := g.seats[i].m.View()
	if err != nil {
		g.w.loop.Problem("viewing shard %s: %v", g.id, err)
		return c
	}
	defer view.Close()
	decode := func(raw []byte) int64 {
		n, err := keygroup.Decode(keygroup.Int64, raw)
		if err != nil {
			g.w.loop.Problem("decoding a number of shard %s: %v", g.id, err)
			return 0
		}
		return n.(int64)
	}
	q := &state.Query{State: listID, Kind: state.QueryPage, Group: g.kg, Key: []byte(g.key)}
	for {
		a, err := view.Read(q)
		if err != nil {
			g.w.loop.Problem("reading shard %s: %v", g.id, err)
			return c
		}
		for _, e := range a.Elements {
			c.list = append(c.list, decode(e))
		}
		if q.Cursor = a.Next; a.Next == nil {
			break
		}
	}
	a, err := view.Read(&state.Query{State: valueID, Kind: state.QueryGet, Group: g.kg, Key: []byte(g.key)})
	if err != nil {
		g.w.loop.Problem("reading shard %s: %v", g.id, err)
	} else if a.Found {
		c.value = decode(a.Value)
	}
	return c
}

// checkRollback demands SS14 of the records.
func (w *checkpoints) checkRollback(v *meta.View) {
	r := v.RunningRollback()
	if r != nil {
		if c := v.Checkpoint(r.Checkpoint); c == nil || c.Phase != meta.CheckpointCompleted {
			w.problem("checkpoint %d, to which rollback %d goes back, is not kept", r.Checkpoint, r.ID)
		}
		if c := v.RunningCheckpoint(); c != nil {
			w.problem("checkpoint %d runs beside rollback %d", c.Number, r.ID)
		}
	}
	if w.seen.rollback != 0 && (r == nil || r.ID != w.seen.rollback) {
		if o := v.Operation(w.seen.rollback); o != nil && o.Phase == meta.PhaseFailed {
			w.rep.GivenUp++
			if w.seen.rollbackPhase != meta.PhaseRollbackPrepare {
				w.problem("rollback %d was given up in the phase %s", o.ID, w.seen.rollbackPhase)
			}
		} else {
			w.rep.RolledBack++
			if w.seen.rollbackPhase != meta.PhaseRollbackOpen {
				w.problem("rollback %d has ended in the phase %s", w.seen.rollback, w.seen.rollbackPhase)
			}
		}
	}
	w.seen.rollback, w.seen.rollbackPhase = 0, ""
	if r != nil {
		w.seen.rollback, w.seen.rollbackPhase = r.ID, r.Phase
	}
	w.checkTurn(v, r)
}

// checkTurn looks whether the cluster has a new incarnation: then every shard is
// rolled back, has a new epoch, and no session is left.
func (w *checkpoints) checkTurn(v *meta.View, r *meta.Rollback) {
	opened := r != nil && r.Phase == meta.PhaseRollbackOpen && r.ID != w.seen.opened
	if now := v.Cluster().Incarnation; opened == (now == w.seen.incarnation) || now < w.seen.incarnation {
		w.problem("the cluster's incarnation is %d after %d, opened %v", now, w.seen.incarnation, opened)
	}
	w.seen.incarnation = v.Cluster().Incarnation
	if !opened {
		return
	}
	w.seen.opened = r.ID
	w.turns++
	if n := v.SessionCount(); n > 0 {
		w.problem("%d sessions are left in incarnation %d", n, w.seen.incarnation)
	}
	for _, g := range w.groups {
		rec := v.Shard(g.id)
		if g.rolled != r.ID {
			w.problem("rollback %d opens, and shard %s is not rolled back", r.ID, g.id)
		}
		if g.leader >= 0 && g.seats[g.leader].serves() {
			if h := g.seats[g.leader].m.Header(); g.rolled == r.ID && (h.Incarnation != w.seen.incarnation || h.Epoch != rec.Epoch) {
				w.problem("shard %s has incarnation %d and epoch %d, its record %d and %d", g.id, h.Incarnation, h.Epoch, w.seen.incarnation, rec.Epoch)
			}
		}
	}
}

// settleGroups demands, at rest, that no rollback runs, no fence is up, every replica
// is well and holds what the model does (SS2).
func (w *checkpoints) settleGroups() {
	const mark = 99
	if r := w.view(0).RunningRollback(); r != nil {
		w.problem("rollback %d still runs, in the phase %s", r.ID, r.Phase)
	}
	for _, g := range w.groups {
		if g.leader < 0 {
			w.problem("shard %s has no leader", g.id)
			continue
		}
		if g.fenced() {
			w.problem("the fence of shard %s is still up", g.id)
		}
		g.append(raftfsm.AppendHashMark(nil, mark))
		g.advance(g.leader, len(g.log))
		var content, ops []byte
		for i, s := range g.seats {
			if s.replica == "" {
				continue
			}
			if _, ok := g.advance(i, len(g.log)); !ok {
				w.problem("shard %s at %s does not serve", g.id, s.node.id)
				continue
			}
			if have := g.holds(i); !have.equal(g.now) {
				w.problem("shard %s at %s holds %s and not %s", g.id, s.node.id, have, g.now)
			}
			r, err := s.m.HashAt(context.Background(), mark)
			if err != nil {
				w.problem("hashing shard %s at %s: %v", g.id, s.node.id, err)
				continue
			}
			c, o := r.Sum()
			if content == nil {
				content, ops = c, o
			}
			if !bytes.Equal(c, content) || !bytes.Equal(o, ops) {
				w.problem("shard %s at %s differs from the others", g.id, s.node.id)
			}
			if len(s.prepared) > 0 {
				w.problem("shard %s at %s keeps what was prepared for %d rollbacks", g.id, s.node.id, len(s.prepared))
			}
		}
	}
}
