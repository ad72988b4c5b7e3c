package keel

import (
	"context"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// cell is one (state, key, namespace), with what routing needs.
type cell struct {
	state     uint32
	keyType   Type
	key       []byte
	namespace *keelstatepb.Namespace // nil is the void namespace
	err       error
}

// Mutation is one change of one state, made by the handles' ...Op methods. It
// may be used in several batches.
type Mutation struct {
	cell
	pb    *keelstatepb.Mutation
	bytes int
}

// Precondition must hold before the first mutation of its batch. The handles'
// If... methods make them.
type Precondition struct {
	cell
	pb *keelstatepb.Precondition
}

// Batch is mutations of several states and keys in one call. What belongs to
// one shard is one request, applied as a whole; parts for several shards are
// applied independently, unless the batch is atomic or has preconditions: then
// all its keys must share a shard. A Batch is used once.
type Batch struct {
	client        *Client
	mutations     []Mutation
	preconditions []Precondition
	atomic        bool
	sessionless   bool
	err           error // the first mutation or precondition that was no good
}

// Batch starts a batch.
func (c *Client) Batch() *Batch { return &Batch{client: c} }

// Add appends mutations; their order is kept.
func (b *Batch) Add(ms ...Mutation) *Batch {
	for _, m := range ms {
		b.check(m.err, len(b.mutations))
		b.mutations = append(b.mutations, m)
	}
	return b
}

// Require appends preconditions. With any, the batch is atomic.
func (b *Batch) Require(ps ...Precondition) *Batch {
	for _, p := range ps {
		b.check(p.err, len(b.preconditions))
		b.preconditions = append(b.preconditions, p)
	}
	return b
}

// Atomic makes the batch one request that is applied as a whole or refused.
func (b *Batch) Atomic() *Batch {
	b.atomic = true
	return b
}

// WithoutSession gives up exactly-once: the batch is sent again only while it
// cannot have been applied, and ends with an unknown outcome otherwise.
func (b *Batch) WithoutSession() *Batch {
	b.sessionless = true
	return b
}

// Len is the number of mutations.
func (b *Batch) Len() int { return len(b.mutations) }

func (b *Batch) check(err error, ordinal int) {
	if err != nil && b.err == nil {
		e := *asError(err)
		e.Ordinal = ordinal
		b.err = &e
	}
}

// Result is what became of a batch.
type Result struct {
	// Parts has one entry per shard, in the order of the shards' first keys.
	Parts []PartResult
}

// PartResult is what became of a batch at one shard.
type PartResult struct {
	Shard uint64
	// Ordinals are the positions in the batch of the mutations of this part.
	Ordinals []int
	// Token names the position of the write; zero if Err is not nil.
	Token Token
	// Replayed says that an earlier attempt had been applied.
	Replayed bool
	// Err is nil if the part was applied.
	Err *Error
}

// Token is the token of a batch with one part, and zero otherwise.
func (r Result) Token() Token {
	if len(r.Parts) != 1 {
		return Token{}
	}
	return r.Parts[0].Token
}

// Pending is a batch that is on its way.
type Pending struct {
	client *Client
	parts  []*part
	err    error // the batch was never started
}

// Start sends the batch and returns at once; it waits only for room and for
// the first connection. Batches that are started one after the other by one
// goroutine take effect in that order at each shard. Call Wait.
func (b *Batch) Start(ctx context.Context) *Pending {
	parts, err := b.client.begin(ctx, b)
	return &Pending{client: b.client, parts: parts, err: err}
}

// Wait waits for the result. If parts failed the error is the first of them;
// Result tells them apart. When ctx ends first the outcome is unknown, and the
// client goes on to resolve the request in the background.
func (p *Pending) Wait(ctx context.Context) (Result, error) {
	if p.err != nil {
		return Result{}, p.err
	}
	var r Result
	var first error
	for _, part := range p.parts {
		e := p.client.wait(ctx, part)
		pr := PartResult{Shard: part.shard, Err: e}
		for _, m := range part.content.Mutations {
			pr.Ordinals = append(pr.Ordinals, int(m.Ordinal))
		}
		if e == nil {
			pr.Token, pr.Replayed = tokenOf(part.write.token), part.write.replayed
		} else if first == nil {
			first = e
		}
		r.Parts = append(r.Parts, pr)
	}
	return r, first
}

// Commit is Start and Wait.
func (b *Batch) Commit(ctx context.Context) (Result, error) {
	ctx, cancel := b.client.bounded(ctx)
	defer cancel()
	p := b.Start(ctx)
	r, err := p.Wait(ctx)
	if !endedUnapplied(err) || len(p.parts) != 1 {
		return r, err
	}
	// The session had run out before the call: nothing of it was applied, and
	// nobody waits behind it, so the next session may have it.
	return b.Start(ctx).Wait(ctx)
}

func endedUnapplied(err error) bool {
	e, ok := err.(*Error)
	return ok && e.Code == codeSessionEnded && e.Outcome == OutcomeNotApplied
}

// commit runs one mutation.
func (c *Client) commit(ctx context.Context, m Mutation, pre ...Precondition) (Token, error) {
	b := c.Batch().Add(m).Require(pre...)
	r, err := b.Commit(ctx)
	return r.Token(), err
}
