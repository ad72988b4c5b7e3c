package objectstore

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/keelstate/keelstate/internal/base"
)

// CheckRange says why a range of a Get cannot be, with base.ErrInvalid.
func CheckRange(offset, length int64) error {
	if offset < 0 {
		return base.Invalid("offset", "0 or more")
	}
	if length < -1 {
		return base.Invalid("length", "0 or more, or -1 for all that follow")
	}
	return nil
}

// Length is how many bytes of an object of so many a Get gives. It fails with
// base.ErrCorrupt if the object has fewer than were asked for.
func Length(key string, size, offset, length int64) (int64, error) {
	if offset > size || length > size-offset {
		return 0, fmt.Errorf("object %s has %d bytes, asked for %d from %d on: %w", key, size, length, offset, base.ErrCorrupt)
	}
	if length < 0 {
		length = size - offset
	}
	return length, nil
}

// Exactly makes sure that a body has n bytes: one that ends early or goes on
// fails with base.ErrCorrupt, and an error of the body itself is never taken for
// its end (OS3).
func Exactly(key string, n int64, body io.ReadCloser) io.ReadCloser {
	return &exactReader{key: key, want: n, left: n, body: body}
}

type exactReader struct {
	key        string
	want, left int64
	body       io.ReadCloser
	err        error
}

func (r *exactReader) Close() error { return r.body.Close() }

func (r *exactReader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	if r.left == 0 {
		r.err = r.atEnd()
		return 0, r.err
	}
	if int64(len(p)) > r.left {
		p = p[:r.left]
	}
	n, err := r.body.Read(p)
	r.left -= int64(n)
	if err != nil && r.left > 0 {
		if errors.Is(err, io.EOF) {
			err = fmt.Errorf("object %s ends after %d bytes of %d: %w", r.key, r.want-r.left, r.want, base.ErrCorrupt)
		}
		r.err = err
		return n, err
	}
	return n, nil // an error at the end is met by the next Read
}

// atEnd looks whether the body ends where it should.
func (r *exactReader) atEnd() error {
	var extra [1]byte
	for range 100 { // a reader may give nothing for a while
		n, err := r.body.Read(extra[:])
		switch {
		case n > 0:
			return fmt.Errorf("object %s goes on after %d bytes: %w", r.key, r.want, base.ErrCorrupt)
		case errors.Is(err, io.EOF):
			return io.EOF
		case err != nil:
			return err
		}
	}
	return fmt.Errorf("object %s: %w", r.key, io.ErrNoProgress)
}

// ReadAll reads a whole object that must have size bytes at most; a larger one
// is base.ErrTooLarge.
func ReadAll(ctx context.Context, s Store, key string, limit int64) ([]byte, error) {
	o, err := s.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if o.Size > limit {
		return nil, fmt.Errorf("object %s has %d bytes, the limit is %d: %w", key, o.Size, limit, base.ErrTooLarge)
	}
	r, err := s.Get(ctx, key, 0, o.Size)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}
