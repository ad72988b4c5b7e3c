package steps

import (
	"encoding/binary"
	"maps"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// participant writes to all shards, and gives every checkpoint the number of its
// writes. life counts its starts; what it has written outlives it.
type participant struct {
	w        *checkpoints
	id       string
	life     int
	node     int // whose view it sees
	session  base.SessionID
	position uint64
	// barrier is the newest that it has seen; its writes carry it.
	barrier uint64
	// stopped is the checkpoint for which it does not write, acked the newest that it
	// has answered.
	stopped, acked uint64
	// turns is how many rollbacks had opened when it registered.
	turns int
}

// participate lets a participant live.
func (w *checkpoints) participate(id string) {
	p := &participant{w: w, id: id}
	w.participants = append(w.participants, p)
	p.start()
	w.loop.Every(40*time.Millisecond, func() bool { p.write(); return !w.quiet })
	w.loop.Every(50*time.Millisecond, func() bool { p.look(); return true })
	w.loop.Every(5*time.Second, func() bool {
		if !w.quiet && w.loop.chance(0.5) {
			p.crash()
		}
		return !w.quiet
	})
}

// start gets a session and registers, until that is known to have succeeded.
func (p *participant) start() {
	w, life := p.w, p.life
	p.node = w.loop.IntN(replicas)
	again := func() { w.loop.Soon(300*time.Millisecond, func() { p.startAgain(life) }) }
	w.meta.open(p.node, time.Hour, func(id base.SessionID) {
		if id == 0 {
			again()
			return
		}
		w.meta.update(p.node, "register "+p.id, func(v *meta.View) (broadcast.Txn, error) { return meta.RegisterTxn(v, w.meta.nowMs(), p.id, id) }, func(ok bool) {
			switch {
			case p.life != life:
			case !ok:
				again()
			default:
				// The answer says what the leader's metadata show.
				p.session, p.barrier = id, max(p.barrier, w.view(0).PassedBarrier())
				p.begin(w.view(0))
			}
		})
	})
}

func (p *participant) startAgain(life int) {
	if p.life == life && p.session == 0 {
		p.start()
	}
}

// crash forgets what the process knew; its session may be closed or stay.
func (p *participant) crash() {
	w, old := p.w, p.session
	p.life++
	p.session, p.stopped, p.acked, p.barrier = 0, 0, 0, 0
	w.loop.Note("participant %s crashes", p.id)
	if old != 0 && w.loop.chance(0.5) {
		w.meta.update(0, "close", func(v *meta.View) (broadcast.Txn, error) { return meta.CloseSessionTxn(v, old) }, func(bool) {})
	}
	life := p.life
	w.loop.Soon(time.Second, func() { p.startAgain(life) })
}

// write writes to one shard, which first passes the barrier that the write carries.
func (p *participant) write() {
	if p.session == 0 || p.stopped != 0 {
		return
	}
	s := p.w.shards[p.w.loop.IntN(checkpointShards)]
	if p.w.groups != nil && (!p.w.groups[s.id-1].serves() || p.rewinds()) {
		return
	}
	if p.w.fault != CarryNoBarrier {
		if c := p.w.view(0).RunningCheckpoint(); c != nil && c.Number <= p.barrier && c.Phase == meta.CheckpointAnnounced {
			if !p.w.cut([2]uint64{c.Number, uint64(s.id)}) {
				return // it tries again
			}
		}
	}
	s.written[p.id]++
	p.position++
}

// look sees whether a checkpoint waits, or has gone on or ended.
func (p *participant) look() {
	w := p.w
	v := w.view(p.node)
	if p.stopped != 0 {
		c := v.Checkpoint(p.stopped)
		switch {
		case c == nil && v.NextCheckpoint() <= p.stopped, c != nil && c.Phase == meta.CheckpointWaiting:
			return // or the view is older than what was seen
		case c != nil && c.Phase != meta.CheckpointFailed:
			p.barrier = max(p.barrier, p.stopped)
		}
		p.stopped = 0
	}
	c := v.RunningCheckpoint()
	if p.session == 0 || c == nil || c.Phase != meta.CheckpointWaiting || c.Number <= p.acked {
		return
	}
	if at := v.Position(c.Number, p.id); at == nil || at.Session != p.session {
		return
	}
	p.acked = c.Number
	if w.fault != WriteBeforeBarrier {
		p.stopped = c.Number
	}
	if !w.quiet && w.loop.chance(0.05) {
		return // never
	}
	late := 300 * time.Millisecond
	if !w.quiet && w.loop.chance(0.1) {
		late = 5 * time.Second
	}
	number, life, bytes := c.Number, p.life, binary.BigEndian.AppendUint64(nil, p.position)
	for range 1 + w.loop.IntN(2) { // maybe twice
		w.loop.Soon(late, func() { p.acknowledge(life, number, bytes) })
	}
}

func (p *participant) acknowledge(life int, number uint64, bytes []byte) {
	if p.life != life {
		return
	}
	session := p.session
	p.w.meta.update(p.node, "acknowledge "+p.id, func(v *meta.View) (broadcast.Txn, error) {
		return meta.AcknowledgeTxn(v, p.w.meta.nowMs(), number, p.id, session, bytes)
	}, func(ok bool) {
		p.w.check()
		if c := p.w.view(p.node).Checkpoint(number); !ok && c != nil && c.Phase == meta.CheckpointWaiting {
			p.w.loop.Soon(100*time.Millisecond, func() { p.acknowledge(life, number, bytes) })
		}
	})
}

// cut fixes what a shard holds at its barrier, once; false if it cannot pass it now.
func (w *checkpoints) cut(id [2]uint64) bool {
	if w.cuts[id] != nil {
		return true
	}
	if w.groups != nil {
		c := w.view(0).CheckpointShard(id[0], base.GroupID(id[1]))
		if c == nil || !w.groups[id[1]-1].barrier(c) {
			return false
		}
	}
	s := w.shards[id[1]-1]
	w.cuts[id], w.counts[id], w.logs[id] = slices.Clone(s.files), maps.Clone(s.written), s.entries
	return true
}

// checkParticipants demands SS10 of a completed checkpoint.
func (w *checkpoints) checkParticipants(m *snapshot.Checkpoint) {
	for _, p := range m.Participants {
		var held uint64
		for _, s := range m.Shards {
			held += w.counts[[2]uint64{m.Number, uint64(s.Group)}][p.ID]
		}
		if given := binary.BigEndian.Uint64(p.Bytes); given != held {
			w.problem("checkpoint %d: participant %s has given %d, the cuts hold %d", m.Number, p.ID, given, held)
		}
		if !w.seen.positions[m.Number] {
			w.rep.Positions++
		}
	}
	w.seen.positions[m.Number] = true
}

// begin takes what it has given to the checkpoint that the cluster was last taken back
// to: that is what the shards hold of it (SS10).
func (p *participant) begin(v *meta.View) {
	w := p.w
	if w.groups == nil || p.turns == w.turns {
		return
	}
	p.turns = w.turns
	if w.fault == RewindNothing {
		return
	}
	var held uint64
	for _, s := range w.shards {
		held += s.written[p.id]
	}
	p.position = held // who has given nothing is told by somebody else
	if at := v.RestoredPosition(p.id); at != nil {
		w.rep.Rewound++
		if given := binary.BigEndian.Uint64(at.Bytes); given != held {
			w.problem("participant %s is given %d back, the shards hold %d", p.id, given, held)
		}
	}
}

// rewinds sees that its incarnation has ended, and begins again.
func (p *participant) rewinds() bool {
	if p.turns == p.w.turns {
		return false
	}
	p.life++
	p.session, p.stopped, p.acked, p.barrier = 0, 0, 0, 0
	life := p.life
	p.w.loop.Soon(300*time.Millisecond, func() { p.startAgain(life) })
	return true
}
