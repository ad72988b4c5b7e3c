package transport

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// TermAnswer is what a node answers about one group in a term poll.
type TermAnswer struct {
	// Known is false where the node has no replica of the group, or one that
	// must not count (muted); the other fields are then zero, WallClock aside.
	Known bool
	// Replica is the server id of the replica that answers: it counts as that
	// voter and no other.
	Replica base.ReplicaID
	// Term is the highest term that the replica ever stored or voted in.
	Term uint64
	// LastIndex is the last index of its log.
	LastIndex uint64
	// WallClock is the node's clock, in nanoseconds since 1970 (rule W5).
	WallClock int64
}

// PollHandler answers a term poll: one TermAnswer per group, in order. It must
// answer from memory: every read of the cluster waits for it.
type PollHandler func(groups []base.GroupID) []TermAnswer

// HandlePoll registers what answers term polls at this node.
func (t *Transport) HandlePoll(h PollHandler) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.poll = h
}

// answerPoll asks the local handler and hides what must not count.
func (t *Transport) answerPoll(groups []base.GroupID) ([]TermAnswer, error) {
	t.mu.Lock()
	h := t.mu.poll
	t.mu.Unlock()
	if h == nil {
		return nil, fmt.Errorf("answering a term poll: %w", base.ErrNotReady)
	}
	answers := h(groups)
	if len(answers) != len(groups) {
		return nil, fmt.Errorf("answering a term poll: %d answers for %d groups: %w", len(answers), len(groups), base.ErrInternal)
	}
	for i, id := range groups {
		g := t.group(id)
		if (g != nil && g.quiet()) || t.muted.Load() {
			answers[i] = TermAnswer{WallClock: answers[i].WallClock}
		}
	}
	return answers, nil
}

func putPollRequest(b []byte, groups []base.GroupID) []byte {
	b = putU32(b, uint32(len(groups)))
	for _, g := range groups {
		b = putU64(b, uint64(g))
	}
	return b
}

func decodePollRequest(body []byte) ([]base.GroupID, error) {
	r := wireReader{b: body}
	n := int(r.u32())
	if n > maxPollGroups || n > len(r.b)/8 {
		return nil, fmt.Errorf("decoding a term poll of %d groups: %w", n, base.ErrCorrupt)
	}
	groups := make([]base.GroupID, n)
	for i := range groups {
		groups[i] = base.GroupID(r.u64())
	}
	return groups, r.finish("a term poll")
}

func putPollAnswer(b []byte, answers []TermAnswer) []byte {
	b = putU32(b, uint32(len(answers)))
	for _, a := range answers {
		b = putBool(b, a.Known)
		b = putBytes16(b, a.Replica)
		b = putU64(b, a.Term)
		b = putU64(b, a.LastIndex)
		b = putU64(b, uint64(a.WallClock))
	}
	return b
}

func decodePollAnswer(body []byte, want int) ([]TermAnswer, error) {
	r := wireReader{b: body}
	if n := int(r.u32()); n != want {
		return nil, fmt.Errorf("decoding a term poll's answer: %d answers for %d groups: %w", n, want, base.ErrCorrupt)
	}
	answers := make([]TermAnswer, want)
	for i := range answers {
		answers[i] = TermAnswer{
			Known: r.boolean(), Replica: base.ReplicaID(r.str16()), Term: r.u64(), LastIndex: r.u64(), WallClock: int64(r.u64()),
		}
	}
	return answers, r.finish("a term poll's answer")
}

// servePoll answers a term poll in a goroutine of its own.
func (c *serverConn) servePoll(f frame) {
	groups, err := decodePollRequest(f.body)
	var answers []TermAnswer
	if err == nil {
		answers, err = c.t.answerPoll(groups)
	}
	if err != nil {
		c.replyError(f, err)
		return
	}
	c.replyOK(f, putPollAnswer(beginFrame(64*len(answers)+4), answers))
}

// PollResult is one node's part of a poll.
type PollResult struct {
	Node   base.NodeID
	Answer TermAnswer
	Err    error
}

// PollerOptions configures a Poller.
type PollerOptions struct {
	// Timeout bounds one round. Default 1 s.
	Timeout time.Duration
	// Rounds bounds the rounds to one node that are under way at once, so that
	// a lost answer does not hold up the next round. Default 2.
	Rounds int
}

// Poller asks nodes for the highest term that their replicas stored or voted
// in. All that waits for one node when a round starts shares one request.
//
// A round takes its waiters before it is encoded, and its answer goes to those
// waiters only: an answer never serves a read that arrived after the request
// was sent (invariant TR6). Requests are never sent twice.
type Poller struct {
	t    *Transport
	opts PollerOptions
	mu   struct {
		sync.Mutex
		nodes map[base.NodeID]*pollNode
	}
}

// pollNode is guarded by Poller.mu.
type pollNode struct {
	waiting []pollWaiter // arrived, in no round yet
	rounds  int          // under way
}

type pollWaiter struct {
	group base.GroupID
	out   chan<- PollResult // has room for one result of each node
}

// NewPoller returns a Poller over t. It ends with t.
func NewPoller(t *Transport, o PollerOptions) *Poller {
	setDefault(&o.Timeout, time.Second)
	setDefault(&o.Rounds, 2)
	p := &Poller{t: t, opts: o}
	p.mu.nodes = make(map[base.NodeID]*pollNode)
	return p
}

// PollNodes asks every node about a group and returns a channel that brings
// exactly one result per node, in any order. It does not block, and the caller
// may stop to read at any time, for instance once it has a quorum.
func (p *Poller) PollNodes(group base.GroupID, nodes []base.NodeID) <-chan PollResult {
	out := make(chan PollResult, len(nodes))
	for _, n := range nodes {
		p.t.metrics.pollWaiters.Inc()
		p.add(n, pollWaiter{group, out})
	}
	return out
}

// Poll asks one node about one group.
func (p *Poller) Poll(ctx context.Context, node base.NodeID, group base.GroupID) (TermAnswer, error) {
	select {
	case r := <-p.PollNodes(group, []base.NodeID{node}):
		return r.Answer, r.Err
	case <-ctx.Done():
		return TermAnswer{}, fmt.Errorf("polling node %s about group %s: %w: %w", node, group, base.ErrNoQuorum, ctx.Err())
	}
}

func (p *Poller) add(node base.NodeID, w pollWaiter) {
	p.mu.Lock()
	n := p.mu.nodes[node]
	if n == nil {
		n = new(pollNode)
		p.mu.nodes[node] = n
	}
	n.waiting = append(n.waiting, w)
	start := n.rounds < p.opts.Rounds
	if start {
		n.rounds++
	}
	p.mu.Unlock()
	if start && !p.t.spawn(func() { p.run(node, n) }) {
		p.mu.Lock()
		n.rounds--
		failed := n.waiting
		n.waiting = nil
		p.mu.Unlock()
		for _, w := range failed {
			w.out <- PollResult{Node: node, Err: fmt.Errorf("polling node %s: %w", node, base.ErrClosed)}
		}
	}
}

// run does rounds until nobody waits.
func (p *Poller) run(node base.NodeID, n *pollNode) {
	for {
		p.mu.Lock()
		batch, groups, index := n.takeLocked()
		if len(batch) == 0 {
			n.rounds--
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
		answers, err := p.round(node, groups)
		for _, w := range batch {
			r := PollResult{Node: node, Err: err}
			if err == nil {
				r.Answer = answers[index[w.group]]
				if g := p.t.group(w.group); g != nil && g.quiet() {
					r = PollResult{Node: node, Err: g.silenced()}
				}
			}
			w.out <- r // never blocks: the channel has room for each node's result
		}
	}
}

// takeLocked takes the waiters of the next round: all of them, unless they ask
// about more groups than one request holds.
func (n *pollNode) takeLocked() (batch []pollWaiter, groups []base.GroupID, index map[base.GroupID]int) {
	index = make(map[base.GroupID]int)
	for i, w := range n.waiting {
		if _, known := index[w.group]; !known {
			if len(groups) == maxPollGroups {
				batch, n.waiting = n.waiting[:i:i], n.waiting[i:]
				return batch, groups, index
			}
			index[w.group] = len(groups)
			groups = append(groups, w.group)
		}
	}
	batch, n.waiting = n.waiting, nil
	return batch, groups, index
}

func (p *Poller) round(node base.NodeID, groups []base.GroupID) ([]TermAnswer, error) {
	p.t.metrics.pollRounds.Inc()
	if node == p.t.opts.Identity.Node {
		return p.t.answerPoll(groups)
	}
	if p.t.muted.Load() {
		return nil, fmt.Errorf("polling node %s: this node is muted: %w", node, base.ErrNotReady)
	}
	ctx, cancel := context.WithTimeout(p.t.ctx, p.opts.Timeout)
	defer cancel()
	body, err := p.t.peer(node).urgent.roundTrip(ctx, putPollRequest(beginFrame(8*len(groups)+4), groups), typePoll, 0, nil)
	if err != nil {
		return nil, fmt.Errorf("polling node %s: %w", node, err)
	}
	if p.t.muted.Load() {
		return nil, fmt.Errorf("polling node %s: this node is muted: %w", node, base.ErrNotReady)
	}
	return decodePollAnswer(body, len(groups))
}
