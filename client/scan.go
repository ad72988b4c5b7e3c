package keel

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// scanCell iterates over the entries or elements of one key and namespace.
func (c *Client) scanCell(ctx context.Context, cl cell, keysOnly bool, limit uint64) iter.Seq2[*keelstatepb.ScanItem, error] {
	return func(yield func(*keelstatepb.ScanItem, error) bool) {
		ctx, cancel := c.bounded(ctx)
		defer cancel()
		shard, err := c.shardOf(ctx, &cl)
		if err != nil {
			yield(nil, harmless(err))
			return
		}
		if e := checkQuery(&keelstatepb.Query{Key: cl.key, Namespace: cl.namespace}); e != nil {
			e.Shard = shard
			yield(nil, e)
			return
		}
		req := &keelstatepb.ScanRequest{Shard: shard, State: cl.state, FilterKey: true, Key: cl.key,
			FilterNamespace: true, Namespace: cl.namespace, KeysOnly: keysOnly, Limit: limit}
		for it, err := range c.scanShard(ctx, req) {
			if !yield(it, err) || err != nil {
				return
			}
		}
	}
}

// scanShard runs one scan. A broken stream is resumed after the last page, at
// a later instant, but of the same incarnation: a rollback ends the scan, which would
// otherwise join what was with what is.
func (c *Client) scanShard(ctx context.Context, req *keelstatepb.ScanRequest) iter.Seq2[*keelstatepb.ScanItem, error] {
	return func(yield func(*keelstatepb.ScanItem, error) bool) {
		limit := req.Limit
		last := false // a page without a cursor came: nothing follows it
		begun := false
		var others foreign
		for n := 0; ; n++ {
			node, more, e := c.scanOnce(ctx, req, begun, func(p *keelstatepb.ScanPage) bool {
				n, begun = 0, true
				req.Cursor = p.GetCursor()
				last = len(req.Cursor) == 0
				for i, it := range p.GetItems() {
					if limit > 0 {
						if req.Limit--; req.Limit == 0 {
							yield(it, nil)
							return false
						}
					}
					if !yield(it, nil) {
						return false
					}
					p.Items[i] = nil // the page may be long
				}
				return true
			})
			if !more || e == nil || last {
				return
			}
			e.Shard, e.Outcome = req.Shard, OutcomeNotApplied
			again := readAgain(e) || e.Code == codeIdentity && !others.everywhere(c, req.Shard, node, e)
			if ctx.Err() != nil || !again {
				c.noteIncarnation(e)
				yield(nil, e)
				return
			}
			wait := max(c.opts.backoff(n), e.RetryAfter)
			if c.reroute(req.Shard, node, e) && n == 0 {
				wait = 0
			} else {
				wait = max(wait, c.budget.take())
			}
			if !pause(ctx, wait) {
				yield(nil, deadlineError(ctx.Err(), OutcomeNotApplied))
				return
			}
		}
	}
}

// scanOnce runs one stream; begun says that pages have come before. more is false
// when the consumer wants no more.
func (c *Client) scanOnce(ctx context.Context, req *keelstatepb.ScanRequest, begun bool, page func(*keelstatepb.ScanPage) bool) (string, bool, *Error) {
	r, err := c.routeTo(req.Shard)
	if err != nil {
		return "", true, asError(err)
	}
	n, err := c.node(r.address)
	if err != nil {
		return r.node, true, asError(err)
	}
	req.Epoch, req.MetadataRevision = r.epoch, c.revision.Load()
	if !begun {
		req.Incarnation = r.topo.incarnation
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// Each page has the time of an attempt; what the consumer takes for its items
	// does not count.
	timer := time.AfterFunc(c.opts.attemptTimeout, func() { cancel(context.DeadlineExceeded) })
	defer timer.Stop()
	s, err := keelstatepb.NewStateClient(n.conn).Scan(ctx, req)
	for err == nil {
		var p *keelstatepb.ScanPage
		timer.Reset(c.opts.attemptTimeout)
		p, err = s.Recv()
		timer.Stop()
		if err != nil {
			break
		}
		c.answered(req.Shard, r.node)
		c.sawBarrier(p.GetToken().GetBarrier())
		if !page(p) {
			return r.node, false, nil
		}
	}
	if errors.Is(err, io.EOF) {
		return r.node, true, nil
	}
	if context.Cause(ctx) == context.DeadlineExceeded {
		return r.node, true, deadlineError(context.DeadlineExceeded, OutcomeNotApplied)
	}
	return r.node, true, fromStatus(err)
}

// ScanOptions restrict a scan of a state. The zero value is all of it.
type ScanOptions struct {
	// Namespace restricts the scan to one namespace if it is not nil.
	Namespace *Namespace
	// Limit is the largest number of items, 0 for no limit.
	Limit uint64
}

// KeyItem is a key of a state.
type KeyItem struct {
	// Key is of the Go types of Dynamic.
	Key       any
	Namespace Namespace
	Group     uint32
	Shard     uint64
}

// ScanItem is an item of a scan: a value, list element, map entry, or result of
// a Reducing or Aggregating state.
type ScanItem struct {
	KeyItem
	// UserKey is set for maps only. UserKey and Value are of the Go types of
	// Dynamic.
	UserKey any
	Value   any
	Null    bool
	Version uint64
}

// ListKeys lists each key and namespace of the state once, over all shards, in
// order of key groups. Each shard is seen at one instant of its own. After an
// error, which comes last, the loop ends.
func (h *handle) ListKeys(ctx context.Context, o ScanOptions) iter.Seq2[KeyItem, error] {
	return func(yield func(KeyItem, error) bool) {
		for it, err := range h.scan(ctx, o, true) {
			if !yield(it.KeyItem, err) || err != nil {
				return
			}
		}
	}
}

// Scan lists all that the state holds, as ListKeys does.
func (h *handle) Scan(ctx context.Context, o ScanOptions) iter.Seq2[ScanItem, error] {
	return h.scan(ctx, o, false)
}

func (h *handle) scan(ctx context.Context, o ScanOptions, keysOnly bool) iter.Seq2[ScanItem, error] {
	return func(yield func(ScanItem, error) bool) {
		c := h.client
		ctx, cancel := c.bounded(ctx)
		defer cancel()
		if err := c.Ready(ctx); err != nil {
			yield(ScanItem{}, harmless(err))
			return
		}
		left := o.Limit
		for _, e := range c.topo.Load().table.Entries() {
			req := &keelstatepb.ScanRequest{Shard: uint64(e.Shard), State: h.decl.ID, KeysOnly: keysOnly, Limit: left}
			if o.Namespace != nil {
				req.FilterNamespace, req.Namespace = true, o.Namespace.toWire()
			}
			for pb, err := range c.scanShard(ctx, req) {
				if err != nil {
					yield(ScanItem{}, err)
					return
				}
				it, err := h.item(pb, e.Shard, keysOnly)
				if !yield(it, err) || err != nil {
					return
				}
				if o.Limit > 0 {
					if left--; left == 0 {
						return
					}
				}
			}
		}
	}
}

func (h *handle) item(pb *keelstatepb.ScanItem, shard base.GroupID, keysOnly bool) (ScanItem, error) {
	it := ScanItem{KeyItem: KeyItem{Namespace: namespaceOf(pb.GetNamespace()), Group: pb.GetGroup(), Shard: uint64(shard)}}
	var err error
	if it.Key, err = decodeValue(Dynamic(h.decl.KeyType), pb.GetKey()); err != nil || keysOnly {
		return it, err
	}
	e := pb.GetEntry()
	it.Null, it.Version = e.GetNull(), e.GetVersion()
	if h.decl.Kind == KindMap {
		if it.UserKey, err = decodeValue(Dynamic(h.decl.UserKeyType), e.GetUserKey()); err != nil {
			return it, err
		}
	}
	if it.Null {
		return it, nil
	}
	it.Value, err = decodeValue(Dynamic(h.resultType()), e.GetValue())
	return it, err
}

// resultType is the type of what reads of the state return.
func (h *handle) resultType() keygroup.Type {
	if h.decl.Kind == KindAggregating {
		return ResultType(h.decl.Function, h.decl.ValueType)
	}
	return h.decl.ValueType
}
