package fault

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/keelstate/keelstate/internal/base"
)

type body struct {
	ctx    context.Context
	inner  io.ReadCloser
	fault  Body
	n      int64 // bytes given so far
	closed chan struct{}
	once   sync.Once
}

func newBody(ctx context.Context, r io.ReadCloser, f Body) *body {
	return &body{ctx: ctx, inner: r, fault: f, closed: make(chan struct{})}
}

func (b *body) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.inner.Close()
}

func (b *body) Read(p []byte) (int, error) {
	left := b.fault.At - b.n
	if left <= 0 && b.fault.Kind != BodyFlip {
		return 0, b.end()
	}
	if b.fault.Kind != BodyFlip && int64(len(p)) > left {
		p = p[:left]
	}
	n, err := b.inner.Read(p)
	if b.fault.Kind == BodyFlip && b.n <= b.fault.At && b.fault.At < b.n+int64(n) {
		p[b.fault.At-b.n] ^= 1
	}
	b.n += int64(n)
	return n, err
}

func (b *body) end() error {
	switch b.fault.Kind {
	case BodyCut:
		return io.EOF
	case BodyStall:
		select {
		case <-b.closed:
			return fmt.Errorf("reading a body that stalled: %w", base.ErrClosed)
		case <-b.ctx.Done():
			return b.ctx.Err()
		}
	default:
		return Trouble("the connection broke")
	}
}
