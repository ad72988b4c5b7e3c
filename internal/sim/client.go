package sim

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/workload"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// client drives the nodes of a world at package cluster's API, as a process of
// its own would: it finds leaders by hints, retries what was not applied, and
// what a process that died was going to answer never reaches it.
type client struct {
	w *world
	// leaders holds the node believed to lead each shard, by shard - 1.
	leaders []atomic.Int32
	// lanes are the sessions of this client, one for each shard; nil if the
	// client writes without.
	lanes []*lane
	// incarnation and epochs are those of when the client was made: it never learns
	// of others.
	incarnation base.Incarnation
	epochs      []base.Epoch
}

// Errors of a client's connection to a node.
var (
	// errRefused: nobody was there to take the request.
	errRefused = &base.Error{Cause: base.ErrNotReady, Ordinal: -1, Hint: "no process listens"}
	// errLost: the connection broke before the answer came.
	errLost = &base.Error{Cause: base.ErrUnavailable, Ordinal: -1, Hint: "the connection broke"}
)

func newClient(w *world, sessions bool) *client {
	c := &client{w: w, incarnation: w.incarnation, epochs: w.epochs, leaders: make([]atomic.Int32, w.cfg.Shards)}
	if sessions {
		for s := range w.cfg.Shards {
			c.lanes = append(c.lanes, &lane{c: c, shard: base.GroupID(s + 1)})
		}
	}
	return c
}

// stores are this client's stores for the workloads. Sessions always have lanes.
func (c *client) stores() workload.Client {
	s := c
	if c.lanes == nil {
		s = newClient(c.w, true)
	}
	return workload.Client{Registers: registers{c}, Counters: counters{c}, Lists: lists{c}, Maps: maps{c}, Banks: banks{c}, Sessions: numbered{s}}
}

// shardOf is the shard of a key.
func (c *client) shardOf(key []byte) base.GroupID {
	g, err := keygroup.GroupOfKey(keygroup.String, key, c.w.cfg.KeyGroups)
	if err != nil {
		panic(err) // a key of the workloads is a string
	}
	return base.GroupID(keygroup.OwnerOf(g, c.w.cfg.KeyGroups, c.w.cfg.Shards) + 1)
}

// call runs f against node i over a connection that dies with the process and,
// now and then, before the answer.
func (c *client) call(i int, f func(n *cluster.Node) error) error {
	life := c.w.hosts[i].life.Load()
	n := c.w.c.Get(i)
	if n == nil || life%2 == 0 {
		return errRefused
	}
	err := f(n)
	if c.w.hosts[i].life.Load() != life || c.w.chance(c.w.cfg.LostReplies) {
		return errLost
	}
	return err
}

// pick chooses a node to ask about a shard: mostly the believed leader, now and
// then any, so that deposed leaders are asked too.
func (c *client) pick(shard base.GroupID) int {
	if c.w.chance(c.w.cfg.Astray) {
		return c.w.intN(c.w.cfg.Nodes)
	}
	return int(c.leaders[shard-1].Load())
}

// learn takes what an error says about the leader.
func (c *client) learn(shard base.GroupID, asked int, err error) {
	var e *base.Error
	next := c.w.intN(c.w.cfg.Nodes)
	if errors.As(err, &e) && e.LeaderHint != "" {
		for i := range c.w.cfg.Nodes {
			if nodeID(i) == e.LeaderHint {
				next = i
			}
		}
	}
	if err == nil {
		next = asked
	}
	c.leaders[shard-1].Store(int32(next))
}

// again runs f at one node after the other until it succeeds, must not be tried
// again or the context ends. A read may be tried after any error.
func (c *client) again(ctx context.Context, shard base.GroupID, read bool, f func(n *cluster.Node) error) error {
	for try := 0; ; try++ {
		i := c.pick(shard)
		err := c.call(i, f)
		c.learn(shard, i, err)
		if err == nil {
			return nil
		}
		s := base.SentinelOf(err)
		again := s.Retryable && s.Outcome == base.OutcomeNotApplied
		if read {
			again = s.Retryable || s.Outcome == base.OutcomeUnknown
		}
		if !again {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(c.w.jitter(20 * time.Millisecond << min(try, 3))):
		}
	}
}

func (c *client) route(shard base.GroupID) cluster.Route {
	return cluster.Route{Group: shard, Epoch: c.epochs[shard-1], Incarnation: c.incarnation, MetadataRevision: base.Revision(c.w.revision.Load())}
}

// read reads from one instant of one shard.
func (c *client) read(ctx context.Context, qs ...state.Query) ([]state.Answer, error) {
	shard := c.shardOf(qs[0].Key)
	var out []state.Answer
	err := c.again(ctx, shard, true, func(n *cluster.Node) error {
		r, err := n.Read(ctx, &cluster.ReadRequest{Route: c.route(shard), Queries: append([]state.Query(nil), qs...)})
		if err != nil {
			return err
		}
		out = r.Answers
		return errors.Join(r.Errs...)
	})
	return out, err
}

// page reads all of one key from one instant.
func (c *client) page(ctx context.Context, q state.Query) ([]state.Entry, error) {
	q.Kind = state.QueryPage
	q.Limit = 1 + c.w.intN(20)
	shard := c.shardOf(q.Key)
	var out []state.Entry
	err := c.again(ctx, shard, true, func(n *cluster.Node) error {
		out = nil
		own := q
		s, err := n.OpenScan(ctx, &cluster.ScanRequest{Route: c.route(shard), Key: &own})
		if err != nil {
			return err
		}
		defer s.Close()
		for more := true; more; {
			items, _, m, err := s.Next(ctx)
			if err != nil {
				return err
			}
			for _, it := range items {
				out = append(out, it.Entry)
			}
			if more = m; more && c.w.chance(0.1) { // others write meanwhile
				time.Sleep(c.w.jitter(50 * time.Millisecond))
			}
		}
		return nil
	})
	return out, err
}

// write applies a request to one shard, in a session if the client has them.
func (c *client) write(ctx context.Context, req raftfsm.Request, ms ...state.Mutation) error {
	for i, m := range ms {
		req.Mutations = append(req.Mutations, raftfsm.Mutation{Ordinal: uint32(i), Mutation: m})
	}
	shard := c.shardOf(ms[0].Key)
	if c.lanes != nil {
		return c.lanes[shard-1].start(ctx, req)()
	}
	return c.again(ctx, shard, false, func(n *cluster.Node) error {
		return submit(ctx, n, c.route(shard), own(&req))
	})
}

// own is a copy of a request that a node may fill in.
func own(r *raftfsm.Request) *raftfsm.Request {
	c := *r
	c.Mutations = append([]raftfsm.Mutation(nil), r.Mutations...)
	c.Preconditions = append([]state.Precondition(nil), r.Preconditions...)
	return &c
}

// submit sends a request and waits for its result or the end of ctx.
func submit(ctx context.Context, n *cluster.Node, r cluster.Route, req *raftfsm.Request) error {
	done := make(chan raftfsm.Result, 1) // one is sent
	n.Submit(ctx, r, req, func(res raftfsm.Result) { done <- res })
	select {
	case res := <-done:
		return res.Failure()
	case <-ctx.Done():
		return base.ErrDeadline
	}
}

// failure is an error as the workloads want it.
func failure(err error) error {
	if err == nil {
		return nil
	}
	var k *keel.Error
	if errors.As(err, &k) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		err = base.ErrDeadline
	}
	s := base.SentinelOf(err)
	return keel.NewError(s, s.Outcome, "", err.Error())
}

// seeded is a source of randomness for many goroutines. Which of them draws what
// is the scheduler's choice: a run is not replayed by its seed.
type seeded struct {
	mu  sync.Mutex
	rng *rand.Rand
}

func newSeeded(seed uint64) *seeded { return &seeded{rng: rand.New(rand.NewPCG(seed, 0x5eed))} }

func (s *seeded) intN(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(n)
}

func (s *seeded) chance(p float64) bool { return float64(s.intN(1<<20)) < p*(1<<20) }

// jitter is a time between half of d and d.
func (s *seeded) jitter(d time.Duration) time.Duration {
	return d/2 + time.Duration(s.intN(int(d/2)+1))
}
