package retry

import (
	"context"
	"errors"
	"io"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Get implements objectstore.Store. A body that breaks is opened again where it
// broke (OT3). One that the store gave whole but short or long is damage, and not
// repeated.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := objectstore.CheckRange(offset, length); err != nil {
		return nil, err
	}
	if length < 0 { // to read on, the end must be known
		o, err := s.Stat(ctx, key)
		if err != nil {
			return nil, err
		}
		if offset <= o.Size {
			length = o.Size - offset
		}
	}
	r := &reader{ctx: ctx, s: s, key: key, offset: offset, left: length, call: call{s: s, op: "get"}}
	if err := r.open(); err != nil {
		return nil, err
	}
	return r, nil
}

type reader struct {
	ctx    context.Context
	s      *Store
	key    string
	offset int64 // of the next byte
	left   int64
	call   call
	body   io.ReadCloser
	err    error
}

// open opens the rest of the range, with as many attempts as are left.
func (r *reader) open() error {
	for {
		body, err := r.s.inner.Get(r.ctx, r.key, r.offset, r.left)
		if err == nil {
			r.body = body
			return nil
		}
		if !r.call.again(r.ctx, err) {
			return r.call.last(err)
		}
	}
}

func (r *reader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.body.Read(p)
	r.offset += int64(n)
	r.left -= int64(n)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF):
		r.s.o.Budget.success()
	case errors.Is(err, base.ErrObjectStore):
		if err = r.reopen(err); err == nil {
			return n, nil
		}
	}
	r.err = err
	return n, err
}

func (r *reader) reopen(broken error) error {
	if !r.call.again(r.ctx, broken) {
		return r.call.last(broken)
	}
	_ = r.body.Close() // it has failed already
	r.body = closedBody{}
	return r.open()
}

func (r *reader) Close() error { return r.body.Close() }

// closedBody stands for a body that could not be opened again.
type closedBody struct{}

func (closedBody) Read([]byte) (int, error) { return 0, base.ErrClosed }
func (closedBody) Close() error             { return nil }
