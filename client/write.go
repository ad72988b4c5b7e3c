package keel

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Token names a position in the history of one shard. Every write returns one.
type Token struct {
	Incarnation uint64 `json:"incarnation"`
	Shard       uint64 `json:"shard"`
	Birth       uint64 `json:"birth"`
	Sequence    uint64 `json:"sequence"`
	Barrier     uint64 `json:"barrier"`
}

func tokenOf(t *keelstatepb.Token) Token {
	return Token{Incarnation: t.GetIncarnation(), Shard: t.GetShard(), Birth: t.GetBirth(), Sequence: t.GetSequence(), Barrier: t.GetBarrier()}
}

// String is the token in one word, incarnation.shard.birth.sequence.barrier.
func (t Token) String() string {
	return fmt.Sprintf("%d.%d.%x.%d.%d", t.Incarnation, t.Shard, t.Birth, t.Sequence, t.Barrier)
}

// part is what a call writes to one shard.
type part struct {
	shard   uint64
	lo, hi  keygroup.Group // of its keys, hi exclusive
	content *keelstatepb.WriteRequest
	bytes   int
	write   *write
	lane    *lane
}

// begin routes a batch, numbers its parts and sends them; it waits only for
// room (KC5), for the first topology and for the first session.
func (c *Client) begin(ctx context.Context, b *Batch) ([]*part, error) {
	if b.err != nil {
		return nil, b.err
	}
	c.budget.called()
	if err := c.Ready(ctx); err != nil {
		return nil, err
	}
	parts, err := c.cut(b)
	if err != nil {
		return nil, err
	}
	for _, p := range parts {
		if b.sessionless {
			c.beginBare(ctx, p)
			continue
		}
		if e := c.dispatch(ctx, p); e != nil {
			p.write.err = e
			close(p.write.done)
		}
	}
	return parts, nil
}

// dispatch hands one part to its lane, under the current session.
func (c *Client) dispatch(ctx context.Context, p *part) *Error {
	if err := c.reserve(ctx, p); err != nil {
		return err
	}
	for {
		s, err := c.currentSession(ctx)
		if err != nil {
			c.bytes.Release(int64(p.write.size))
			return asError(err)
		}
		l, e := s.lane(p.shard)
		if e == nil {
			p.lane = l
			e = l.add(ctx, p.write)
		}
		switch {
		case e == nil:
			return nil
		case e.Code == codeSessionEnded && c.ctx.Err() == nil: // it was not taken: the next session takes it
			continue
		}
		c.bytes.Release(int64(p.write.size))
		e2 := *e
		e2.Outcome = OutcomeNotApplied
		return &e2
	}
}

// reserve waits until there is room for the bytes of a write.
func (c *Client) reserve(ctx context.Context, p *part) *Error {
	p.write = &write{shard: p.shard, content: p.content, size: proto.Size(p.content) + 128, done: make(chan struct{}),
		groups: keygroup.Range{Lo: p.lo, Hi: p.hi}}
	if err := c.bytes.Acquire(ctx, int64(p.write.size)); err != nil {
		return deadlineError(err, OutcomeNotApplied)
	}
	return nil
}

// cut parts a batch by shard. Ordinals are kept.
func (c *Client) cut(b *Batch) ([]*part, error) {
	t := c.topo.Load()
	var parts []*part
	byShard := make(map[base.GroupID]*part)
	place := func(cell *cell) (*part, error) {
		g, err := keygroup.GroupOfKey(cell.keyType, cell.key, t.table.M())
		if err != nil {
			return nil, invalid("key", err.Error())
		}
		e, _ := t.table.Find(g)
		p := byShard[e.Shard]
		if p == nil {
			p = &part{shard: uint64(e.Shard), lo: g, hi: g + 1,
				content: &keelstatepb.WriteRequest{Atomic: b.atomic}}
			byShard[e.Shard] = p
			parts = append(parts, p)
		}
		p.lo, p.hi = min(p.lo, g), max(p.hi, g+1)
		return p, nil
	}
	for i := range b.preconditions {
		pre := &b.preconditions[i]
		p, err := place(&pre.cell)
		if err != nil {
			return nil, err
		}
		p.bytes += len(pre.pb.Key) + len(pre.pb.UserKey) + len(pre.pb.Value) + len(pre.pb.GetNamespace().GetValue())
		p.content.Preconditions = append(p.content.Preconditions, pre.pb)
	}
	for i := range b.mutations {
		m := &b.mutations[i]
		p, err := place(&m.cell)
		if err != nil {
			return nil, err
		}
		p.bytes += m.bytes
		p.content.Mutations = append(p.content.Mutations, ordinal(m.pb, uint32(i)))
	}
	if len(parts) > 1 && (b.atomic || len(b.preconditions) > 0) {
		return nil, invalid("batch", fmt.Sprintf("it is atomic but its keys belong to %d shards; keys of one key group always share a shard", len(parts)))
	}
	for _, p := range parts {
		if p.bytes > maxRequestBytes || proto.Size(p.content) > maxMessageBytes-maxBatchBytes {
			e := newError(ErrTooLarge, OutcomeNotApplied, fmt.Sprintf("%d bytes for one shard, at most %d", p.bytes, maxRequestBytes))
			e.Field = "batch"
			return nil, e
		}
	}
	return parts, nil
}

// ordinal returns m under a position; a mutation that is used twice is copied.
func ordinal(m *keelstatepb.Mutation, i uint32) *keelstatepb.Mutation {
	if i == 0 {
		return m
	}
	return &keelstatepb.Mutation{Ordinal: i, State: m.State, Op: m.Op, Key: m.Key, Namespace: m.Namespace, Value: m.Value,
		Elements: m.Elements, Entries: m.Entries, Sources: m.Sources, NullElements: m.NullElements}
}

// beginBare sends a write without a session: again only while no attempt can
// have been applied (KC1).
func (c *Client) beginBare(ctx context.Context, p *part) {
	if err := c.reserve(ctx, p); err != nil {
		p.write.err = err
		close(p.write.done)
		return
	}
	w := p.write
	if !c.start() {
		w.err = newError(ErrClosed, OutcomeNotApplied, "")
		c.bytes.Release(int64(w.size))
		close(w.done)
		return
	}
	go func() {
		defer c.wg.Done()
		defer close(w.done)
		defer c.bytes.Release(int64(w.size))
		res, err := c.bare(ctx, p)
		w.token, w.replayed, w.err = res.GetToken(), false, err
	}()
}

func (c *Client) bare(ctx context.Context, p *part) (*keelstatepb.WriteResult, *Error) {
	var others foreign
	for n := 0; ; n++ {
		res, node, e := c.bareOnce(ctx, p)
		if e == nil {
			c.answered(p.shard, node)
			return res, nil
		}
		e.Shard = p.shard
		if e.Code == codeIdentity && !others.everywhere(c, p.shard, node, e) {
			e.Retryable = true
		}
		if e.Outcome != OutcomeNotApplied || !e.Retryable {
			c.noteIncarnation(e)
			return nil, e
		}
		wait := max(c.opts.backoff(n), e.RetryAfter)
		if c.reroute(p.shard, node, e) && n == 0 {
			wait = 0
		} else {
			wait = max(wait, c.budget.take())
		}
		if !pause(ctx, wait) {
			return nil, e
		}
	}
}

func (c *Client) bareOnce(ctx context.Context, p *part) (*keelstatepb.WriteResult, string, *Error) {
	r, err := c.routeTo(p.shard)
	if err != nil {
		return nil, "", asError(err)
	}
	n, err := c.node(r.address)
	if err != nil {
		return nil, r.node, asError(err)
	}
	req := &keelstatepb.WriteRequest{
		Shard: p.shard, Epoch: r.epoch, Incarnation: r.topo.incarnation, BarrierSeen: c.barrier.Load(),
		MetadataRevision: c.revision.Load(), Atomic: p.content.Atomic,
		Preconditions: p.content.Preconditions, Mutations: p.content.Mutations,
	}
	type outcome struct {
		res  *keelstatepb.WriteResult
		err  error
		sent bool
	}
	answer := make(chan outcome, 1)
	x := &writeX{req: req, size: p.write.size, done: func(res *keelstatepb.WriteResult, err error, sent bool) {
		answer <- outcome{res, err, sent}
	}}
	pipe := n.writes()
	if err := pipe.enqueue(x); err != nil {
		e := fromStatus(err)
		e.Outcome = OutcomeNotApplied
		return nil, r.node, e
	}
	select {
	case <-ctx.Done():
		if pipe.drop(x) {
			return nil, r.node, deadlineError(ctx.Err(), OutcomeNotApplied)
		}
		return nil, r.node, deadlineError(ctx.Err(), OutcomeUnknown)
	case o := <-answer:
		c.sawBarrier(o.res.GetToken().GetBarrier())
		switch {
		case o.err != nil:
			e := streamError(o.err, o.sent)
			e.Retryable = e.Retryable || !o.sent
			return nil, r.node, e
		case o.res.GetError() != nil:
			return nil, r.node, fromDetail(o.res.GetError())
		}
		return o.res, r.node, nil
	}
}

// streamError reads the failure of a stream for one request on it. The status
// of a stream speaks of the stream: whatever it says, a request that may have
// left before it may have been applied.
func streamError(err error, sent bool) *Error {
	e := fromStatus(err)
	e.Outcome = OutcomeNotApplied
	if sent && e.Code != codeIdentity { // another cluster's node refuses the stream before it reads from it
		e.Outcome = OutcomeUnknown
	}
	return e
}

// reroute takes in a refusal of a read or a bare write. It says whether asking
// the node that the refusal names makes sense at once.
func (c *Client) reroute(shard uint64, node string, e *Error) bool {
	switch e.Code {
	case base.ErrOverloaded.Reason:
		return false
	case base.ErrNotLeader.Reason:
		return c.misrouted(shard, node, e)
	case base.ErrStaleEpoch.Reason, base.ErrWrongRange.Reason, base.ErrNoSuchShard.Reason:
		c.refresh()
	}
	c.misrouted(shard, node, e)
	return false
}

// wait waits for the result of one part. A call that ends first leaves its
// request open in the session (KC3).
func (c *Client) wait(ctx context.Context, p *part) *Error {
	select {
	case <-p.write.done:
		return p.write.err
	default:
	}
	select {
	case <-p.write.done:
		return p.write.err
	case <-ctx.Done():
		if p.lane != nil && p.lane.withdraw(p.write, deadlineError(ctx.Err(), OutcomeNotApplied)) {
			<-p.write.done
			return p.write.err
		}
		e := deadlineError(ctx.Err(), OutcomeUnknown)
		e.Shard = p.shard
		return e
	}
}
