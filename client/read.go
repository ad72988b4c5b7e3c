package keel

import (
	"context"
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// shardOf returns the shard of a key.
func (c *Client) shardOf(ctx context.Context, cl *cell) (uint64, error) {
	if cl.err != nil {
		return 0, cl.err
	}
	if err := c.Ready(ctx); err != nil {
		return 0, err
	}
	t := c.topo.Load()
	g, err := keygroup.GroupOfKey(cl.keyType, cl.key, t.table.M())
	if err != nil {
		return 0, invalid("key", err.Error())
	}
	e, _ := t.table.Find(g)
	return uint64(e.Shard), nil
}

// query asks one shard, linearizably, as often as it takes.
func (c *Client) query(ctx context.Context, shard uint64, queries []*keelstatepb.Query) (*keelstatepb.ReadResult, error) {
	c.budget.called()
	size := 64
	for i, q := range queries {
		if e := checkQuery(q); e != nil {
			e.Shard, e.Ordinal = shard, i
			return nil, e
		}
		size += querySize(q)
	}
	if size > maxReadBytes {
		e := tooLarge("queries", fmt.Sprintf("%d bytes of queries for one shard, at most %d", size, maxReadBytes))
		e.Shard = shard
		return nil, e
	}
	var others foreign
	for n := 0; ; n++ {
		res, node, e := c.queryOnce(ctx, shard, queries, size)
		if e == nil {
			c.answered(shard, node)
			return res, nil
		}
		e.Shard, e.Outcome = shard, OutcomeNotApplied
		// A stream ends for all its reads, whoever's request it was that broke it:
		// try again before this one is held to be the one.
		again := readAgain(e) || e.stream && n < maxBroken
		if e.Code == codeIdentity {
			again = !others.everywhere(c, shard, node, e)
		}
		if ctx.Err() != nil || !again {
			c.noteIncarnation(e)
			return nil, e
		}
		wait := max(c.opts.backoff(n), e.RetryAfter)
		if c.reroute(shard, node, e) && n == 0 {
			wait = 0
		} else {
			wait = max(wait, c.budget.take())
		}
		if !pause(ctx, wait) {
			late := deadlineError(fmt.Errorf("%w: %w", ctx.Err(), e), OutcomeNotApplied)
			late.Shard, late.Hint = shard, e.Error()
			return nil, late
		}
	}
}

// maxBroken is how often a read may meet a stream that ended for a reason that
// does not call for another attempt.
const maxBroken = 3

func querySize(q *keelstatepb.Query) int {
	return 64 + len(q.Key) + len(q.UserKey) + len(q.Cursor) + len(q.GetNamespace().GetValue())
}

// checkQuery refuses what no shard can hold, before it reaches a stream that
// others share.
func checkQuery(q *keelstatepb.Query) *Error {
	for _, f := range []struct {
		name  string
		bytes []byte
	}{{"key", q.Key}, {"user_key", q.UserKey}, {"namespace", q.GetNamespace().GetValue()}} {
		if len(f.bytes) > maxNameBytes {
			return tooLarge(f.name, fmt.Sprintf("%d bytes, at most %d", len(f.bytes), maxNameBytes))
		}
	}
	return nil
}

// readAgain says that another attempt may succeed. A read has no effect, so an
// unknown outcome is no obstacle.
func readAgain(e *Error) bool {
	switch e.Code {
	case codeUnavailable, codeOutcomeUnknown, codeDeadline:
		return true
	}
	return e.Retryable
}

func (c *Client) queryOnce(ctx context.Context, shard uint64, queries []*keelstatepb.Query, size int) (*keelstatepb.ReadResult, string, *Error) {
	r, err := c.routeTo(shard)
	if err != nil {
		return nil, "", asError(err)
	}
	n, err := c.node(r.address)
	if err != nil {
		return nil, r.node, asError(err)
	}
	type outcome struct {
		res *keelstatepb.ReadResult
		err error
	}
	answer := make(chan outcome, 1)
	x := &readX{
		req: &keelstatepb.ReadRequest{Shard: shard, Epoch: r.epoch, Incarnation: r.topo.incarnation,
			MetadataRevision: c.revision.Load(), Queries: queries},
		size: size,
		done: func(res *keelstatepb.ReadResult, err error, _ bool) { answer <- outcome{res, err} },
	}
	pipe := n.reads()
	if err := pipe.enqueue(x); err != nil {
		return nil, r.node, fromStatus(err)
	}
	attempt, cancel := context.WithTimeout(ctx, c.opts.attemptTimeout)
	defer cancel()
	select {
	case <-attempt.Done():
		pipe.drop(x)
		return nil, r.node, deadlineError(attempt.Err(), OutcomeNotApplied)
	case o := <-answer:
		switch {
		case o.err != nil:
			e := fromStatus(o.err)
			e.stream = true
			return nil, r.node, e
		case o.res.GetError() != nil:
			return nil, r.node, fromDetail(o.res.GetError())
		case len(o.res.GetAnswers()) != len(queries):
			return nil, r.node, newError(ErrInternal, OutcomeNotApplied, "the node answered another number of queries")
		}
		c.sawBarrier(o.res.GetToken().GetBarrier())
		return o.res, r.node, nil
	}
}

// ask runs one query.
func (c *Client) ask(ctx context.Context, cl *cell, q *keelstatepb.Query) (*keelstatepb.Answer, Token, error) {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	shard, err := c.shardOf(ctx, cl)
	if err != nil {
		return nil, Token{}, harmless(err)
	}
	res, err := c.query(ctx, shard, []*keelstatepb.Query{q})
	if err != nil {
		return nil, Token{}, err
	}
	a := res.Answers[0]
	if a.GetError() != nil {
		e := fromDetail(a.GetError())
		e.Shard, e.Outcome = shard, OutcomeNotApplied
		return nil, Token{}, e
	}
	return a, tokenOf(res.GetToken()), nil
}

// ReadBatch asks several states and keys at once. The queries of one shard are
// answered from one instant if they are at most 1000 and their answers fit in
// one message (16 MiB); more take several requests, each from an instant of its
// own, which the tokens tell. Different shards are asked apart. A ReadBatch is
// used once.
type ReadBatch struct {
	client  *Client
	queries []readQuery
	err     error
}

type readQuery struct {
	cell   cell
	q      *keelstatepb.Query
	answer func(*keelstatepb.Answer, Token, error)
}

// ReadBatch starts a batch of reads; the handles' Queue methods add to it.
func (c *Client) ReadBatch() *ReadBatch { return &ReadBatch{client: c} }

func (b *ReadBatch) add(cl cell, q *keelstatepb.Query, answer func(*keelstatepb.Answer, Token, error)) {
	if cl.err != nil && b.err == nil {
		e := *asError(cl.err)
		e.Ordinal = len(b.queries)
		b.err = &e
	}
	if e := checkQuery(q); e != nil && b.err == nil {
		e.Ordinal = len(b.queries)
		b.err = e
	}
	b.queries = append(b.queries, readQuery{cell: cl, q: q, answer: answer})
}

// Do asks. Errors of single queries are in their futures; the error returned is
// the first of all.
func (b *ReadBatch) Do(ctx context.Context) error {
	if b.err != nil {
		return b.fail(harmless(b.err))
	}
	ctx, cancel := b.client.bounded(ctx)
	defer cancel()
	var shards []uint64
	byShard := make(map[uint64][]int)
	for i := range b.queries {
		s, err := b.client.shardOf(ctx, &b.queries[i].cell)
		if err != nil {
			return b.fail(harmless(err))
		}
		if byShard[s] == nil {
			shards = append(shards, s)
		}
		byShard[s] = append(byShard[s], i)
	}
	errs := make(chan error, len(shards))
	for _, s := range shards {
		go func() { errs <- b.ask(ctx, s, byShard[s]) }()
	}
	var first error
	for range shards {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

// fail gives every query an error, so that none looks as if nothing were there.
func (b *ReadBatch) fail(err error) error {
	for i := range b.queries {
		b.queries[i].answer(nil, Token{}, err)
	}
	return err
}

// ask runs the queries at the given positions, which belong to one shard, in as
// many requests as they take.
func (b *ReadBatch) ask(ctx context.Context, shard uint64, at []int) error {
	var first error
	for len(at) > 0 {
		n, bytes := 0, 0
		for n < len(at) && n < maxReadQueries && (n == 0 || bytes+querySize(b.queries[at[n]].q) <= chunkBytes) {
			bytes += querySize(b.queries[at[n]].q)
			n++
		}
		again, err := b.askChunk(ctx, shard, at[:n])
		if err != nil && first == nil {
			first = err
		}
		at = append(again, at[n:]...)
	}
	return first
}

// askChunk runs one request. It returns the queries whose answers did not fit
// beside the others', which then get no answer here.
func (b *ReadBatch) askChunk(ctx context.Context, shard uint64, at []int) (again []int, first error) {
	queries := make([]*keelstatepb.Query, len(at))
	for j, i := range at {
		queries[j] = b.queries[i].q
	}
	res, err := b.client.query(ctx, shard, queries)
	if err != nil {
		for _, i := range at {
			b.queries[i].answer(nil, Token{}, err)
		}
		return nil, err
	}
	large := func(a *keelstatepb.Answer) bool { return Code(a.GetError().GetReason()) == base.ErrTooLarge.Reason }
	// Asking again makes sense if something else took the room.
	crowded := slices.ContainsFunc(res.Answers, func(a *keelstatepb.Answer) bool { return !large(a) })
	for j, i := range at {
		a := res.Answers[j]
		switch {
		case a.GetError() == nil:
			b.queries[i].answer(a, tokenOf(res.GetToken()), nil)
		case large(a) && crowded:
			again = append(again, i)
		default:
			e := fromDetail(a.GetError())
			e.Shard, e.Ordinal, e.Outcome = shard, i, OutcomeNotApplied
			b.queries[i].answer(nil, Token{}, e)
			if first == nil {
				first = e
			}
		}
	}
	return again, first
}

// Future is the answer to a query of a ReadBatch, valid after Do.
type Future[T any] struct {
	item Item[T]
	err  error
}

// Get returns the answer; before Do it is absent.
func (f *Future[T]) Get() (Item[T], error) { return f.item, f.err }
