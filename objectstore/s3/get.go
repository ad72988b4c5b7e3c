package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Get implements objectstore.Store.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	inner, leave, err := s.enter(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("getting object: %w", err)
	}
	r, err := s.get(inner, key, offset, length)
	if err != nil {
		err = s.answer(inner, err)
		leave()
		return nil, fmt.Errorf("getting object %s: %w", key, err)
	}
	r.leave = leave
	return r, nil
}

func (s *Store) get(ctx context.Context, key string, offset, length int64) (*reader, error) {
	if err := objectstore.CheckRange(offset, length); err != nil {
		return nil, err
	}
	if length <= 0 {
		// A range of no bytes cannot be asked for, and one to the end has to be
		// known, to see whether it comes whole.
		info, err := s.core.StatObject(ctx, s.o.Bucket, s.prefix+key, minio.StatObjectOptions{})
		if err != nil {
			return nil, err
		}
		if length, err = objectstore.Length(key, info.Size, offset, length); err != nil {
			return nil, err
		}
		if length == 0 {
			return &reader{body: io.NopCloser(bytes.NewReader(nil))}, nil
		}
	}
	var o minio.GetObjectOptions
	if offset > maxOffset-length {
		return nil, fmt.Errorf("%d bytes from %d on: %w", length, offset, base.ErrCorrupt)
	}
	if err := o.SetRange(offset, offset+length-1); err != nil {
		return nil, base.Invalid("offset", err.Error())
	}
	body, info, header, err := s.core.GetObject(ctx, s.o.Bucket, s.prefix+key, o)
	if err != nil {
		return nil, err
	}
	if err := checkResponse(key, offset, length, info.Size, header.Get("Content-Range")); err != nil {
		return nil, errors.Join(err, body.Close())
	}
	r := &reader{ctx: ctx, s: s, idle: s.o.Idle}
	r.body = objectstore.Exactly(key, length, body)
	r.watch = time.AfterFunc(r.idle, func() { _ = body.Close() })
	r.watch.Stop()
	return r, nil
}

// maxOffset is beyond every object of S3 (5 TiB), and far from overflow.
const maxOffset = 1 << 50

// checkResponse compares what comes with what was asked for (OC3).
func checkResponse(key string, offset, length, got int64, contentRange string) error {
	// Of a body that tells no length the reader counts the bytes.
	if got >= 0 && got != length {
		return fmt.Errorf("object %s: the service gives %d bytes from %d on, asked for %d: %w", key, got, offset, length, base.ErrCorrupt)
	}
	want := fmt.Sprintf("bytes %d-%d/", offset, offset+length-1)
	// A service may answer a range that is the whole object without one.
	if !strings.HasPrefix(contentRange, want) && (contentRange != "" || offset > 0) {
		return fmt.Errorf("object %s: the service gives range %q, asked for %q: %w", key, contentRange, want, base.ErrCorrupt)
	}
	return nil
}

// reader is a body that fails when nothing comes for a while.
type reader struct {
	ctx   context.Context
	s     *Store
	body  io.ReadCloser
	idle  time.Duration
	watch *time.Timer // nil for a body of no bytes
	leave func()
}

func (r *reader) Read(p []byte) (int, error) {
	if r.watch == nil {
		return r.body.Read(p)
	}
	r.watch.Reset(r.idle)
	n, err := r.body.Read(p)
	// The time between two reads is the caller's.
	if !r.watch.Stop() && err != nil {
		err = trouble(fmt.Errorf("nothing came for %v", r.idle), "see whether "+r.s.o.Endpoint+" is overloaded", 0)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = r.s.answer(r.ctx, err)
	}
	return n, err
}

func (r *reader) Close() error {
	if r.watch != nil {
		r.watch.Stop()
	}
	err := r.body.Close()
	r.leave()
	return err
}
