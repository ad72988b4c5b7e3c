package s3

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Store keeps objects in a bucket. It implements objectstore.Store.
type Store struct {
	o         Options
	core      minio.Core
	transport *http.Transport
	prefix    string // with a slash at its end, or empty
	closed    atomic.Bool
	life      context.Context
	end       context.CancelFunc
}

var _ objectstore.Store = (*Store)(nil)

// Open returns the store after it has seen the bucket. It fails with
// base.ErrInvalid for bad options, and with base.ErrObjectStore if the bucket is
// not there or cannot be reached.
func Open(ctx context.Context, o Options) (*Store, error) {
	o.ensureDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("opening bucket: %w", err)
	}
	s := &Store{o: o, transport: o.transport()}
	if o.Prefix != "" {
		s.prefix = o.Prefix + "/"
	}
	core, err := minio.NewCore(o.Endpoint, &minio.Options{
		Creds: o.credentials(), Secure: !o.Insecure, Region: o.Region, Transport: s.transport,
		MaxRetries: 1, // package retry repeats
	})
	if err != nil {
		return nil, fmt.Errorf("opening bucket %s: %w", o.Bucket, base.Invalid("endpoint", err.Error()))
	}
	s.core = *core
	s.life, s.end = context.WithCancel(context.Background())
	ctx, cancel := context.WithTimeout(ctx, o.Idle)
	defer cancel()
	exists, err := s.core.BucketExists(ctx, o.Bucket)
	if err == nil && !exists {
		err = minio.ErrorResponse{Code: minio.NoSuchBucket, Message: "no such bucket"}
	}
	if err != nil {
		err = fmt.Errorf("opening bucket %s at %s: %w", o.Bucket, o.Endpoint, s.answer(ctx, err))
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close implements objectstore.Store. It ends the requests that are running.
func (s *Store) Close() error {
	if !s.closed.Swap(true) {
		s.end()
		s.transport.CloseIdleConnections()
	}
	return nil
}

// enter begins a call: its context ends with the store's.
func (s *Store) enter(ctx context.Context, keys ...string) (context.Context, context.CancelFunc, error) {
	for _, k := range keys {
		if err := objectstore.CheckKey(k); err != nil {
			return nil, nil, err
		}
	}
	if s.closed.Load() {
		return nil, nil, fmt.Errorf("bucket %s: %w", s.o.Bucket, base.ErrClosed)
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.life, cancel)
	return ctx, func() { stop(); cancel() }, nil
}

// Stat implements objectstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (objectstore.Object, error) {
	inner, leave, err := s.enter(ctx, key)
	if err != nil {
		return objectstore.Object{}, fmt.Errorf("looking at object: %w", err)
	}
	defer leave()
	info, err := s.core.StatObject(inner, s.o.Bucket, s.prefix+key, minio.StatObjectOptions{})
	if err != nil {
		return objectstore.Object{}, fmt.Errorf("looking at object %s: %w", key, s.answer(ctx, err))
	}
	return objectstore.Object{Key: key, Size: info.Size, Modified: info.LastModified}, nil
}

// List implements objectstore.Store. What lies in the bucket under a name that no
// key can have is not listed. A service whose pages are not in order is an error
// (OS4).
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	return func(yield func(objectstore.Object, error) bool) {
		inner, leave, err := s.enter(ctx)
		if err == nil {
			defer leave()
			err = objectstore.CheckPrefix(prefix)
		}
		if err != nil {
			yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, err))
			return
		}
		o := minio.ListObjectsOptions{Prefix: s.prefix + prefix, Recursive: true}
		if after != "" {
			o.StartAfter = s.prefix + after
		}
		last := ""
		for info := range s.core.ListObjectsIter(inner, s.o.Bucket, o) {
			if info.Err == nil && (info.Key <= last || !strings.HasPrefix(info.Key, o.Prefix)) {
				info.Err = fmt.Errorf("object %q was listed after %q at %q", info.Key, last, o.Prefix)
			}
			if info.Err != nil {
				yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, s.answer(ctx, info.Err)))
				return
			}
			last = info.Key
			key := strings.TrimPrefix(info.Key, s.prefix)
			if key <= after || objectstore.CheckKey(key) != nil {
				continue
			}
			if !yield(objectstore.Object{Key: key, Size: info.Size, Modified: info.LastModified}, nil) {
				return
			}
		}
		if err := ctx.Err(); err != nil { // the iteration may end without a word
			yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, err))
		} else if s.closed.Load() {
			yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, base.ErrClosed))
		}
	}
}

// Delete implements objectstore.Store, in batches of 1,000 as the protocol has
// them.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	inner, leave, err := s.enter(ctx, keys...)
	if err != nil {
		return fmt.Errorf("deleting objects: %w", err)
	}
	defer leave()
	if len(keys) == 0 {
		return nil
	}
	objects := func(yield func(minio.ObjectInfo) bool) {
		for _, k := range keys {
			if !yield(minio.ObjectInfo{Key: s.prefix + k}) {
				return
			}
		}
	}
	results, err := s.core.RemoveObjectsWithIter(inner, s.o.Bucket, objects, minio.RemoveObjectsOptions{})
	if err != nil {
		return fmt.Errorf("deleting objects: %w", s.answer(ctx, err))
	}
	for r := range results {
		if r.Err == nil {
			continue
		}
		if err := s.answer(ctx, r.Err); !errors.Is(err, base.ErrNotFound) {
			return fmt.Errorf("deleting object %s: %w", strings.TrimPrefix(r.ObjectName, s.prefix), err)
		}
	}
	return s.answer(ctx, ctx.Err())
}

// Sweep implements objectstore.Store: it aborts uploads in parts that began before
// a time and did not complete.
func (s *Store) Sweep(ctx context.Context, prefix string, before time.Time) (int, error) {
	inner, leave, err := s.enter(ctx)
	if err == nil {
		defer leave()
		err = objectstore.CheckPrefix(prefix)
	}
	if err != nil {
		return 0, fmt.Errorf("sweeping uploads: %w", err)
	}
	n := 0
	for upload := range s.core.ListIncompleteUploads(inner, s.o.Bucket, s.prefix+prefix, true) {
		err := upload.Err
		if err == nil && upload.Initiated.Before(before) && strings.HasPrefix(upload.Key, s.prefix+prefix) {
			if err = s.core.AbortMultipartUpload(inner, s.o.Bucket, upload.Key, upload.UploadID); err == nil {
				n++
			} else if errors.Is(s.answer(ctx, err), base.ErrNotFound) {
				err = nil // it has just ended
			}
		}
		if err != nil {
			return n, fmt.Errorf("sweeping uploads: %w", s.answer(ctx, err))
		}
	}
	return n, s.answer(ctx, ctx.Err())
}
