package s3

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Store keeps objects in a bucket. It implements objectstore.Store.
type Store struct {
	o         Options
	source    *source
	core      minio.Core
	transport *http.Transport
	prefix    string // with a slash at its end, or empty
	closed    atomic.Bool
	life      context.Context
	end       context.CancelFunc
}

var _ objectstore.Store = (*Store)(nil)

// Open returns the store, without asking the service anything: that may be down
// when the node starts. It fails with base.ErrInvalid for bad options.
func Open(o Options) (*Store, error) {
	o.ensureDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("opening bucket: %w", err)
	}
	transport, err := o.transport()
	if err != nil {
		return nil, fmt.Errorf("opening bucket %s: %w", o.Bucket, err)
	}
	s := &Store{o: o, transport: transport, source: o.source()}
	if o.Prefix != "" {
		s.prefix = o.Prefix + "/"
	}
	core, err := minio.NewCore(o.Endpoint, &minio.Options{
		Creds: credentials.New(s.source), Secure: !o.Insecure, Region: o.Region, Transport: watched{transport},
		BucketLookup: o.lookup(), MaxRetries: 1, // package retry repeats
	})
	if err != nil {
		return nil, fmt.Errorf("opening bucket %s: %w", o.Bucket, base.Invalid("endpoint", err.Error()))
	}
	s.o.AccessKey, s.o.SecretKey = "", "" // the source has them
	s.core = *core
	s.life, s.end = context.WithCancel(context.Background())
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

// enter begins a call: its context ends with the store's, and carries what the
// responses say.
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
	ctx, cancel := context.WithCancel(context.WithValue(ctx, callKey{}, &call{}))
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
		return objectstore.Object{}, fmt.Errorf("looking at object %s: %w", key, s.answer(inner, err))
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
				yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, s.answer(inner, info.Err)))
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
		if err := inner.Err(); err != nil { // the iteration may end without a word
			yield(objectstore.Object{}, fmt.Errorf("listing objects at %q: %w", prefix, s.answer(inner, err)))
		}
	}
}

// Delete implements objectstore.Store, in batches of 1,000 as the protocol has
// them. A service that leaves a key unanswered has not deleted it (OC3).
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	inner, leave, err := s.enter(ctx, keys...)
	if err != nil {
		return fmt.Errorf("deleting objects: %w", err)
	}
	defer leave()
	if len(keys) == 0 {
		return nil
	}
	open := make(map[string]bool, len(keys))
	for _, k := range keys {
		open[s.prefix+k] = true
	}
	objects := func(yield func(minio.ObjectInfo) bool) {
		for _, k := range slices.Sorted(maps.Keys(open)) {
			if !yield(minio.ObjectInfo{Key: k}) {
				return
			}
		}
	}
	results, err := s.core.RemoveObjectsWithIter(inner, s.o.Bucket, objects, minio.RemoveObjectsOptions{})
	if err != nil {
		return fmt.Errorf("deleting objects: %w", s.answer(inner, err))
	}
	answered := 0
	for r := range results {
		if r.Err != nil {
			if err := s.answer(inner, r.Err); !errors.Is(err, base.ErrNotFound) {
				return fmt.Errorf("deleting object %s: %w", strings.TrimPrefix(r.ObjectName, s.prefix), err)
			}
		}
		if open[r.ObjectName] {
			answered++
		}
	}
	if err := inner.Err(); err != nil {
		return fmt.Errorf("deleting objects: %w", s.answer(inner, err))
	}
	if answered < len(open) {
		return trouble(fmt.Errorf("deleting objects: the service answers for %d of %d", answered, len(open)), "look at the service's log", 0)
	}
	return nil
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
	n, key, id := 0, "", ""
	for {
		page, err := s.core.ListMultipartUploads(inner, s.o.Bucket, s.prefix+prefix, key, id, "", 0)
		if err != nil {
			return n, fmt.Errorf("sweeping uploads: %w", s.answer(inner, err))
		}
		for _, upload := range page.Uploads {
			if !upload.Initiated.Before(before) || !strings.HasPrefix(upload.Key, s.prefix+prefix) {
				continue
			}
			err := s.core.AbortMultipartUpload(inner, s.o.Bucket, upload.Key, upload.UploadID)
			if err == nil {
				n++
			} else if err = s.answer(inner, err); !errors.Is(err, base.ErrNotFound) { // else it has just ended
				return n, fmt.Errorf("sweeping uploads: %w", err)
			}
		}
		if !page.IsTruncated {
			return n, nil
		}
		if page.NextKeyMarker < key || page.NextKeyMarker == key && page.NextUploadIDMarker == id {
			return n, trouble(fmt.Errorf("sweeping uploads: the page after upload %q of %q begins with the same again", id, key), "look at the service's log", 0)
		}
		key, id = page.NextKeyMarker, page.NextUploadIDMarker
	}
}
