package keel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// pollInterval is how often the topology is asked for where a node cannot
// stream it.
const pollInterval = 2 * time.Second

// topology is the cluster as a node told it. It is immutable.
type topology struct {
	cluster     string
	incarnation uint64
	revision    uint64
	table       *keygroup.Table   // nil while the cluster is being founded: there are no shards yet
	addresses   map[string]string // node id -> gRPC address
	replicas    map[uint64][]string
	hints       map[uint64]string // shard -> leader's node id
	raw         *keelstatepb.Topology
}

func newTopology(t *keelstatepb.Topology) (*topology, error) {
	out := &topology{
		cluster: t.GetClusterId(), incarnation: t.GetIncarnation(), revision: t.GetRevision(), raw: t,
		addresses: make(map[string]string), replicas: make(map[uint64][]string), hints: make(map[uint64]string),
	}
	for _, n := range t.GetNodes() {
		if n.GetGrpcAddress() != "" && n.GetState() != "removed" {
			out.addresses[n.GetId()] = n.GetGrpcAddress()
		}
	}
	var entries []keygroup.Entry
	for _, s := range t.GetShards() {
		r := keygroup.Range{Lo: keygroup.Group(s.GetRange().GetLo()), Hi: keygroup.Group(s.GetRange().GetHi())}
		entries = append(entries, keygroup.Entry{Range: r, Shard: base.GroupID(s.GetId()), Epoch: base.Epoch(s.GetEpoch())})
		for _, r := range s.GetReplicas() {
			out.replicas[s.GetId()] = append(out.replicas[s.GetId()], r.GetNode())
		}
		out.hints[s.GetId()] = s.GetLeaderHint()
	}
	if len(entries) == 0 {
		return out, nil
	}
	var err error
	out.table, err = keygroup.NewTable(int(t.GetKeyGroups()), base.Revision(t.GetRevision()), entries)
	if err != nil {
		return nil, fmt.Errorf("reading the topology: %w", err)
	}
	return out, nil
}

// learn takes a topology in. An older one only refreshes leader hints; one of
// another cluster is refused, and so is one without shards, as ErrNotReady.
func (c *Client) learn(raw *keelstatepb.Topology) error {
	t, err := newTopology(raw)
	if err != nil {
		return err
	}
	var s *session
	var news []uint64
	defer func() { // after the unlock
		for _, shard := range news {
			s.newLeader(shard, t.hints[shard])
		}
	}()
	c.mu.Lock()
	defer c.mu.Unlock()
	s = c.mu.session
	old := c.topo.Load()
	if old != nil && old.cluster != t.cluster {
		e := newError(ErrIdentity, OutcomeNotApplied, fmt.Sprintf("the client belongs to cluster %s, the node to %s", old.cluster, t.cluster))
		c.mu.lastErr = e
		return e
	}
	if t.table == nil {
		e := newError(ErrNotReady, OutcomeNotApplied, "the cluster is being founded")
		if asked := c.mu.lastErr; asked == nil || asError(asked).Code != e.Code { // an older one may name the phase
			c.mu.lastErr = e
		}
		return e
	}
	c.mu.lastErr = nil
	for shard, hint := range t.hints {
		// A hint counts when it is news: a node may repeat an old one for long
		// after a refusal has named the leader.
		if hint != "" && (old == nil || old.hints[shard] != hint) {
			c.mu.leaders[shard] = hint
			if s != nil {
				news = append(news, shard)
			}
		}
	}
	if old == nil || t.revision >= old.revision {
		c.topo.Store(t)
	}
	c.sawRevision(t.revision)
	if old == nil {
		close(c.ready)
	}
	return nil
}

// follow keeps the topology fresh until the client is closed: it watches one
// node, and goes on to the next when that one fails.
func (c *Client) follow() {
	defer c.wg.Done()
	failures := 0
	for i := 0; c.ctx.Err() == nil; i++ {
		candidates := c.candidates()
		got, err := c.watch(candidates[i%len(candidates)])
		if got {
			failures = 0
		}
		c.note(err)
		if failures >= len(candidates)-1 {
			pause(c.ctx, c.opts.backoff(failures-len(candidates)+1))
		}
		failures++
	}
}

// candidates lists the addresses that may know the topology: those given, then
// those learned.
func (c *Client) candidates() []string {
	out := slices.Clone(c.endpoints)
	if t := c.topo.Load(); t != nil {
		for _, n := range t.raw.GetNodes() {
			if a := t.addresses[n.GetId()]; a != "" && !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	return out
}

// watch streams the topology from one node; it says whether any came.
func (c *Client) watch(address string) (got bool, err error) {
	n, err := c.node(address)
	if err != nil {
		return false, err
	}
	api := keelstatepb.NewClusterClient(n.conn)
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	s, err := api.WatchTopology(ctx, &keelstatepb.GetTopologyRequest{})
	for err == nil {
		var t *keelstatepb.Topology
		if t, err = s.Recv(); err == nil {
			err = c.learn(t)
			got = got || err == nil
		}
	}
	if status.Code(err) != codes.Unimplemented {
		return got, n.founding(ctx, err)
	}
	for {
		t, err := api.GetTopology(ctx, &keelstatepb.GetTopologyRequest{})
		if err == nil {
			err = c.learn(t)
		}
		if err != nil {
			return got, n.founding(ctx, err)
		}
		got = true
		if !pause(ctx, pollInterval) {
			return got, ctx.Err()
		}
	}
}

// foundOperation is the kind of the operation that founds a cluster.
const foundOperation = "found"

// phasePatience bounds the question how far a founding is.
const phasePatience = time.Second

// founding adds to the error of a topology without shards how far the founding
// is and what it waits for, if the node knows.
func (n *node) founding(ctx context.Context, err error) error {
	var e *Error // learn's own, a node's is a status
	if !errors.As(err, &e) || e.Code != codeNotReady {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, phasePatience)
	defer cancel()
	resp, opErr := keelstatepb.NewAdminClient(n.conn).ListOperations(ctx, &keelstatepb.ListOperationsRequest{})
	if opErr != nil {
		return err
	}
	for _, o := range resp.GetOperations() {
		if o.GetKind() != foundOperation || o.GetDone() {
			continue
		}
		more := *e
		more.Hint += fmt.Sprintf(" (phase %s)", o.GetPhase())
		if o.GetError() != "" {
			more.Hint += ": " + o.GetError()
		}
		return &more
	}
	return err
}

// noteIncarnation takes in a refusal. After one for the incarnation the calls that
// follow are to use the new one.
func (c *Client) noteIncarnation(e *Error) {
	if e.Code == base.ErrIncarnation.Reason {
		c.refresh()
	}
}

// refresh asks for the topology besides the watch, in the background, after a
// refusal that says that the client's is old: one node after the other, until
// one knows a newer one. One refresh runs at a time.
func (c *Client) refresh() {
	if !c.refreshing.CompareAndSwap(false, true) {
		return
	}
	if !c.start() {
		return
	}
	go func() {
		defer c.wg.Done()
		defer c.refreshing.Store(false)
		revision := func() (r uint64) {
			if t := c.topo.Load(); t != nil {
				r = t.revision
			}
			return r
		}
		before := revision()
		for _, address := range c.candidates() {
			ctx, cancel := context.WithTimeout(c.ctx, time.Second)
			n, err := c.node(address)
			var t *keelstatepb.Topology
			if err == nil {
				t, err = keelstatepb.NewClusterClient(n.conn).GetTopology(ctx, &keelstatepb.GetTopologyRequest{})
			}
			cancel()
			if err == nil && c.learn(t) == nil && revision() > before {
				return
			}
		}
	}()
}

// route says where requests of a shard go now.
type route struct {
	topo    *topology
	epoch   uint64
	node    string // id
	address string
}

// routeTo picks the believed leader, else the replicas in turn.
func (c *Client) routeTo(shard uint64) (route, error) {
	t := c.topo.Load()
	if t == nil {
		return route{}, newError(ErrUnavailable, OutcomeNotApplied, "no node has told the topology yet")
	}
	entry, ok := t.table.Shard(base.GroupID(shard))
	if !ok {
		return route{}, newError(ErrNoSuchShard, OutcomeNotApplied, "")
	}
	r := route{topo: t, epoch: uint64(entry.Epoch)}
	c.mu.Lock()
	defer c.mu.Unlock()
	r.node = c.mu.leaders[shard]
	if t.addresses[r.node] == "" {
		replicas := t.replicas[shard]
		if len(replicas) == 0 {
			return route{}, newError(ErrUnavailable, OutcomeNotApplied, "the shard has no replica")
		}
		c.mu.turn[shard]++
		r.node = replicas[c.mu.turn[shard]%len(replicas)]
	}
	r.address = t.addresses[r.node]
	if r.address == "" {
		return route{}, newError(ErrUnavailable, OutcomeNotApplied, fmt.Sprintf("node %s has no address", r.node))
	}
	return r, nil
}

// misrouted takes in that a node does not lead a shard, and who may. It says
// whether the hint names another node, so that asking it at once makes sense.
func (c *Client) misrouted(shard uint64, from string, e *Error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.LeaderHint != "" && e.LeaderHint != from {
		c.mu.leaders[shard] = e.LeaderHint
		return true
	}
	if c.mu.leaders[shard] == from {
		delete(c.mu.leaders, shard)
	}
	return false
}

// answered takes in that a node serves a shard as its leader.
func (c *Client) answered(shard uint64, node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.leaders[shard] != node {
		c.mu.leaders[shard] = node
	}
}
