package transport

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// MethodAdmission is the only method that a node without a cluster serves: it
// is how a founder admits it.
const MethodAdmission uint8 = 1

// maxCallTime bounds a call whose caller names no deadline.
const maxCallTime = 24 * time.Hour

// CallHandler serves a node-level call. ctx ends with the caller's deadline,
// its cancellation or its connection. An error reaches the caller by its
// Reason, with the details of a base.Error.
type CallHandler func(ctx context.Context, from base.NodeID, req []byte) ([]byte, error)

// Handle registers the handler of a method, replacing an earlier one.
func (t *Transport) Handle(method uint8, h CallHandler) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.calls[method] = h
}

func (t *Transport) callHandler(method uint8) CallHandler {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.calls[method]
}

// Call calls a method of a node (this node included) with at most MaxCall
// bytes. Without a deadline in ctx it waits as long as the connection lives.
// Errors: those of the handler, base.ErrUnavailable (outcome unknown),
// base.ErrDeadline, base.ErrUnsupported (no such method), base.ErrOverloaded.
func (t *Transport) Call(ctx context.Context, node base.NodeID, method uint8, req []byte) ([]byte, error) {
	if len(req) > MaxCall {
		return nil, fmt.Errorf("calling method %d of node %s with %d bytes: %w", method, node, len(req), base.ErrTooLarge)
	}
	var body []byte
	var err error
	if node == t.opts.Identity.Node {
		body, err = t.runCall(ctx, node, method, req)
	} else {
		body, err = t.callRemote(ctx, node, method, req)
	}
	switch {
	case err == nil:
		return body, nil
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
		return nil, fmt.Errorf("calling method %d of node %s: %w: %w", method, node, base.ErrDeadline, err)
	}
	return nil, fmt.Errorf("calling method %d of node %s: %w", method, node, err)
}

func (t *Transport) callRemote(ctx context.Context, node base.NodeID, method uint8, req []byte) ([]byte, error) {
	c, err := t.peer(node).call.get(ctx)
	if err != nil {
		return nil, err
	}
	if c.limited && method != MethodAdmission {
		return nil, fmt.Errorf("node %s: %w", node, base.ErrNotFounded)
	}
	budget := uint64(0) // milliseconds; 0 means no deadline
	if at, ok := ctx.Deadline(); ok {
		budget = uint64(max(1, time.Until(at).Milliseconds()))
	}
	b := append(beginFrame(len(req)+16), method)
	b = putU64(b, budget)
	b = putBytes32(b, req)
	type answer struct {
		body []byte
		err  error
	}
	got := make(chan answer, 1)
	id, err := c.start(b, typeCall, 0, &pending{done: func(body []byte, err error) { got <- answer{body, err} }}, ctx.Done(), time.Time{})
	if err != nil {
		return nil, err
	}
	select {
	case a := <-got:
		return a.body, a.err
	case <-ctx.Done():
		c.forget(id)
		if b := beginFrame(0); sealFrame(b, frame{typ: typeCancel, id: id}) == nil {
			_ = c.trySend(b) // the handler's deadline covers a lost cancel
		}
		return nil, fmt.Errorf("waiting for node %s: %w: %w", node, base.ErrOutcomeUnknown, ctx.Err())
	}
}

func (t *Transport) runCall(ctx context.Context, from base.NodeID, method uint8, req []byte) ([]byte, error) {
	h := t.callHandler(method)
	if h == nil {
		return nil, fmt.Errorf("serving method %d: %w", method, base.ErrUnsupported)
	}
	return h(ctx, from, req)
}

// serveCall runs a call in a goroutine of its own.
func (c *serverConn) serveCall(f frame) {
	r := wireReader{b: f.body}
	method, budget, req := r.u8(), r.u64(), r.bytes32()
	if err := r.finish("a call"); err != nil {
		c.replyError(f, err)
		return
	}
	if c.limited && method != MethodAdmission {
		c.replyError(f, fmt.Errorf("serving method %d: %w", method, base.ErrNotFounded))
		return
	}
	limit := maxCallTime
	if budget > 0 && budget < uint64(maxCallTime/time.Millisecond) {
		limit = time.Duration(budget) * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(c.ctx, limit)
	defer cancel()
	c.cmu.Lock()
	c.cancels[f.id] = cancel
	c.cmu.Unlock()
	defer func() {
		c.cmu.Lock()
		defer c.cmu.Unlock()
		delete(c.cancels, f.id)
	}()
	body, err := c.t.runCall(ctx, c.peer.Node, method, req)
	switch {
	case err != nil:
		c.replyError(f, err)
	case len(body) > MaxCall:
		c.replyError(f, fmt.Errorf("answering method %d with %d bytes: %w", method, len(body), base.ErrTooLarge))
	default:
		c.replyOK(f, append(beginFrame(len(body)), body...))
	}
}
