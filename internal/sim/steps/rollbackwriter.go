package steps

import (
	"errors"
	"slices"
	"time"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// writer writes to a group: numbers into its list, in a session, and numbers as its
// value, without one.
type writer struct {
	g *group
	i int // whose metadata it asks
	// knows says that it has asked.
	knows       bool
	incarnation base.Incarnation
	epoch       base.Epoch
	session     base.SessionID
	opening     bool
	known       base.Revision
	// turns is how many rollbacks the cluster had opened when the session was.
	turns int
	// asked is how often the group had been rolled back when it asked.
	asked int
	next  uint64
	open  int64 // the number that is being added to the list, or 0
	last  int64
}

// sent is a request on its way.
type sent struct {
	req   raftfsm.Request
	known base.Revision
	add   int64 // or
	put   int64
	// rolls is how often the group had been rolled back when the request was made,
	// turns that of its session.
	rolls, turns int
}

func newWriter(g *group) *writer { return &writer{g: g} }

func (c *writer) live() {
	w := c.g.w
	w.loop.Every(40*time.Millisecond, func() bool { c.write(); return !w.quiet })
	w.loop.Every(100*time.Millisecond, func() bool { c.put(); return !w.quiet })
	w.loop.Every(120*time.Millisecond, func() bool { c.read(); return !w.quiet })
}

// ask learns where the shard is.
func (c *writer) ask() {
	w := c.g.w
	c.i = w.loop.IntN(replicas)
	v := w.view(c.i)
	if v.Cluster() == nil || v.Shard(c.g.id) == nil {
		return // a copy that begins anew
	}
	c.incarnation, c.epoch = v.Cluster().Incarnation, v.Shard(c.g.id).Epoch
	c.knows, c.asked = true, c.g.rolls
	if w.loop.chance(0.5) { // else it still takes its session for alive
		c.session = 0
	}
}

// write adds the next number to the list, or the same one again.
func (c *writer) write() {
	w := c.g.w
	switch {
	case !c.knows:
		c.ask()
		return
	case c.session == 0 && !c.opening:
		c.opening = true
		w.meta.open(c.i, time.Hour, func(id base.SessionID) {
			c.opening = false
			c.session, c.next, c.open, c.known, c.turns = id, 0, 0, w.meta.copies[0].rev, w.turns
		})
		return
	case c.session == 0:
		return
	}
	if c.open == 0 {
		c.next++
		c.last++
		c.open = c.last
	}
	m := state.Mutation{State: listID, Op: state.OpListAdd, Group: c.g.kg, Key: []byte(c.g.key), Elements: [][]byte{number(c.open)}}
	req := raftfsm.Request{Epoch: c.epoch, Incarnation: c.incarnation, Session: c.session, Seq: c.next, Prev: c.next - 1, Floor: c.next, Mutations: []raftfsm.Mutation{{Mutation: m}}}
	c.send(&sent{req: req, known: c.known, add: c.open, rolls: c.g.rolls, turns: c.turns})
}

// put sets the value, without a session: who repeats it repeats it.
func (c *writer) put() {
	if !c.knows {
		return
	}
	c.last++
	m := state.Mutation{State: valueID, Op: state.OpValuePut, Group: c.g.kg, Key: []byte(c.g.key), Value: number(c.last)}
	req := raftfsm.Request{Epoch: c.epoch, Incarnation: c.incarnation, Mutations: []raftfsm.Mutation{{Mutation: m}}}
	c.send(&sent{req: req, put: c.last, rolls: c.g.rolls, turns: -1})
}

func number(n int64) []byte {
	b, err := keygroup.Encode(keygroup.Int64, n)
	if err != nil {
		panic(err) // an int64 has a code
	}
	return b
}

// send lets a request travel: it may be lost, late and doubled, and so may the
// answer.
func (c *writer) send(s *sent) {
	l := c.g.w.loop
	for range 1 + l.IntN(10)/9 {
		if l.chance(0.1) {
			continue
		}
		late := 5 * time.Millisecond
		if l.chance(0.05) {
			late = 4 * time.Second
		}
		lost := l.chance(0.1)
		l.Soon(late, func() {
			c.g.serve(s, func(err error) {
				if !lost {
					l.Soon(20*time.Millisecond, func() { c.answered(s, err) })
				}
			})
		})
	}
}

// answered tells the client what came of a request.
func (c *writer) answered(s *sent, err error) {
	if s.req.Incarnation != c.incarnation {
		return
	}
	switch of := base.SentinelOf(err); {
	case errors.Is(err, base.ErrIncarnation), errors.Is(err, base.ErrStaleEpoch):
		c.knows = false
	case s.req.Session == 0 || s.req.Session != c.session:
	case err == nil:
		if s.add == c.open {
			c.open = 0
		}
	case of == base.ErrSessionEnded:
		c.session = 0
	case of == base.ErrSessionForgot && s.add != c.open: // a late double of what was answered
	case !of.Retryable:
		c.g.w.problem("shard %s, session %d number %d: %v", c.g.id, s.req.Session, s.req.Seq, err)
	}
}

// serve is what the leader does with a request: it looks at it, and later proposes it
// if it still leads.
func (g *group) serve(s *sent, answer func(error)) {
	w := g.w
	if g.leader < 0 || !g.seats[g.leader].serves() {
		answer(base.ErrNotReady)
		return
	}
	i, req := g.leader, s.req
	req.Mutations = slices.Clone(s.req.Mutations)
	if w.fault == ForgiveIncarnation {
		h := g.seats[i].m.Header()
		req.Incarnation, req.Epoch = h.Incarnation, h.Epoch
	}
	v := w.view(i)
	err := g.seats[i].m.CheckIncarnation(&req)
	switch {
	case err != nil:
	case req.Session != 0 && v.Revision() < s.known:
		err = base.ErrNotReady
	case req.Session != 0 && !v.SessionAlive(req.Session):
		err = base.ErrSessionEnded
	}
	if err != nil {
		answer(err)
		return
	}
	w.loop.Soon(15*time.Millisecond, func() {
		if g.leader != i {
			answer(base.ErrNotReady)
			return
		}
		encoded, err := raftfsm.AppendRequest(nil, &req)
		if err != nil {
			w.problem("%v", err)
			return
		}
		g.stamp += uint64(w.loop.IntN(20))
		out, ok := g.propose(raftfsm.AppendWrite(nil, g.stamp, v.Revision(), encoded))
		switch {
		case !ok:
			answer(base.ErrNotReady)
		case out.Err != nil:
			answer(out.Err)
		default:
			err := out.Results[0].Failure()
			if err == nil {
				g.applied(s, out.Results[0].Replayed)
			}
			answer(err)
		}
	})
}

// read reads with what the client knows, which may be old.
func (c *writer) read() {
	g := c.g
	if !c.knows || g.leader < 0 || !g.seats[g.leader].serves() {
		return
	}
	view, err := g.seats[g.leader].m.ReadView(0, c.incarnation)
	switch {
	case err == nil:
		view.Close()
		if c.asked != g.rolls {
			g.w.problem("shard %s was rolled back and serves a read of who does not know", g.id)
		}
		if g.rolls > g.w.turns {
			g.w.problem("shard %s is rolled back and serves reads before all shards are", g.id)
		}
	case errors.Is(err, base.ErrIncarnation):
		c.knows = false
	}
}
