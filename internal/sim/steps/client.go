package steps

import (
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// window is how many requests of a client are open at a time.
const window = 6

// client appends numbers to a list of its own, in a session, as often as it takes.
type client struct {
	loop    *Loop
	shard   *shard
	key     string
	session base.SessionID
	opening bool
	asleep  bool // it keeps nothing alive and sends nothing
	known   base.Revision
	next    uint64   // number of the session
	open    []uint64 // ascending
	value   int64    // the last appended value; value - next is fixed in a session

	acked map[int64]bool // values that were acknowledged
	sent  map[int64]bool
}

func newClient(s *shard, n int) *client {
	return &client{loop: s.loop, shard: s, key: fmt.Sprintf("client-%d", n), acked: map[int64]bool{}, sent: map[int64]bool{}}
}

// live is the client's life until a moment; then it resolves what is open.
func (c *client) live(until time.Duration) {
	c.loop.Every(30*time.Millisecond, func() bool {
		if c.session == 0 {
			c.begin()
		} else if !c.asleep && len(c.open) < window && c.loop.Now() < until {
			c.next++
			c.value++
			c.open = append(c.open, c.next)
			c.sent[c.value] = true
			c.send(c.next)
		}
		return true
	})
	c.loop.Every(150*time.Millisecond, func() bool { // again, in order
		for _, n := range slices.Clone(c.open) {
			if !c.asleep {
				c.send(n)
			}
		}
		return true
	})
	c.loop.Every(400*time.Millisecond, func() bool { c.keepAlive(); return true })
	c.loop.Every(4*time.Second, func() bool {
		c.asleep = c.loop.Now() < until && c.loop.chance(0.3)
		return true
	})
}

func (c *client) begin() {
	if c.opening || c.asleep {
		return
	}
	c.opening = true
	i := c.loop.IntN(replicas)
	c.shard.meta.open(i, 2*time.Second, func(id base.SessionID) {
		c.opening = false
		c.session, c.next, c.open = id, 0, nil
		c.known = c.shard.meta.copies[0].rev
		c.loop.Note("%s has session %d", c.key, id)
	})
}

func (c *client) keepAlive() {
	if c.session == 0 || c.asleep {
		return
	}
	id := c.session
	c.shard.meta.update(c.loop.IntN(replicas), "keep", func(v *meta.View) (broadcast.Txn, error) {
		t, _, err := meta.KeepAliveTxn(v, c.shard.meta.nowMs(), []base.SessionID{id})
		return t, err
	}, func(bool) {})
}

// send sends one open number; it may be lost, late and doubled, and so may the
// answer.
func (c *client) send(n uint64) {
	session, value := c.session, c.value-int64(c.next)+int64(n)
	element, err := keygroup.Encode(keygroup.Int64, value)
	if err != nil {
		c.loop.Problem("encoding %d: %v", value, err)
		return
	}
	req := raftfsm.Request{Epoch: 1, Incarnation: 1, Session: session, Seq: n, Prev: n - 1, Floor: c.open[0], Mutations: []raftfsm.Mutation{
		{Mutation: state.Mutation{State: listID, Op: state.OpListAdd, Group: groupOf(c.key), Key: []byte(c.key), Elements: [][]byte{element}}}}}
	known := c.known
	for range 1 + c.loop.IntN(10)/9 {
		if c.loop.chance(0.1) {
			continue
		}
		lostAnswer := c.loop.chance(0.1)
		late := 5 * time.Millisecond
		if c.loop.chance(0.05) {
			late = 3 * time.Second // longer than a session may live
		}
		c.loop.Soon(late, func() {
			own := req
			own.Mutations = slices.Clone(req.Mutations)
			err := c.shard.propose(&own, known)
			c.loop.Note("%s session %d number %d: %s", c.key, session, n, reason(err))
			if !lostAnswer {
				c.loop.Soon(20*time.Millisecond, func() { c.answered(session, n, value, err) })
			}
		})
	}
}

func reason(err error) base.Reason {
	if err == nil {
		return "ok"
	}
	return base.SentinelOf(err).Reason
}

func (c *client) answered(session base.SessionID, n uint64, value int64, err error) {
	if err == nil {
		c.acked[value] = true
	}
	if session != c.session {
		return
	}
	switch s := base.SentinelOf(err); {
	case err == nil:
		c.open = slices.DeleteFunc(c.open, func(o uint64) bool { return o == n })
	case s == base.ErrSessionEnded:
		// What is open may be applied or not: it stays unknown.
		c.loop.Note("%s gives session %d up with %d open", c.key, session, len(c.open))
		c.session, c.open = 0, nil
	case s == base.ErrSessionForgot && !slices.Contains(c.open, n): // a late double of what was answered
	case !s.Retryable:
		c.loop.Problem("%s session %d number %d: %v", c.key, session, n, err)
	}
}

// check demands SS3.
func (c *client) check() {
	last, seen := int64(0), map[int64]bool{}
	for _, v := range c.shard.elements(c.key) {
		switch {
		case seen[v]:
			c.loop.Problem("%s: %d was applied twice", c.key, v)
		case !c.sent[v]:
			c.loop.Problem("%s: %d was never sent", c.key, v)
		case v < last:
			c.loop.Problem("%s: %d was applied after %d", c.key, v, last)
		}
		seen[v], last = true, max(last, v)
	}
	missing := 0
	for v := range c.acked {
		if !seen[v] {
			missing++
		}
	}
	if missing > 0 {
		c.loop.Problem("%s: %d acknowledged numbers are missing", c.key, missing)
	}
	c.loop.Note("%s: %d sent, %d acknowledged, %d there", c.key, len(c.sent), len(c.acked), len(seen))
}
