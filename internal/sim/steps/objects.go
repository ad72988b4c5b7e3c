package steps

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// objects is an object store in memory, in virtual time. It does at once what it
// is asked; who asks lets time pass before and after, and now and then it fails.
type objects struct {
	loop *Loop
	held map[string]stored
	// trouble is the share of calls that fail, before or after their effect.
	trouble float64
	// changed is told of every effect.
	changed func()
	puts    int
	deletes int
}

type stored struct {
	body []byte
	at   time.Duration
}

var _ objectstore.Store = (*objects)(nil)

func (o *objects) fails() bool { return o.loop.chance(o.trouble) }

func (o *objects) down(what string) error {
	return fmt.Errorf("%s: %w", what, base.ErrObjectStore)
}

// Put implements objectstore.Store.
func (o *objects) Put(_ context.Context, key string, body objectstore.Body) error {
	if o.fails() {
		return o.down("putting")
	}
	if _, taken := o.held[key]; taken {
		return fmt.Errorf("putting %s: %w", key, base.ErrConflict)
	}
	b, err := io.ReadAll(body.Open())
	if err != nil {
		return err
	}
	o.held[key] = stored{b, o.loop.Now()}
	o.puts++
	o.changed()
	if o.fails() {
		return o.down("the answer of a put is lost")
	}
	return nil
}

// Get implements objectstore.Store.
func (o *objects) Get(_ context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if o.fails() {
		return nil, o.down("getting")
	}
	x, ok := o.held[key]
	if !ok {
		return nil, fmt.Errorf("getting %s: %w", key, base.ErrNotFound)
	}
	n, err := objectstore.Length(key, int64(len(x.body)), offset, length)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(bytes.NewReader(x.body[offset : offset+n])), nil
}

// Stat implements objectstore.Store.
func (o *objects) Stat(_ context.Context, key string) (objectstore.Object, error) {
	if o.fails() {
		return objectstore.Object{}, o.down("looking")
	}
	x, ok := o.held[key]
	if !ok {
		return objectstore.Object{}, fmt.Errorf("looking for %s: %w", key, base.ErrNotFound)
	}
	return o.object(key, x), nil
}

func (o *objects) object(key string, x stored) objectstore.Object {
	return objectstore.Object{Key: key, Size: int64(len(x.body)), Modified: atTime(x.at)}
}

// atTime is a moment of the loop by the store's clock.
func atTime(d time.Duration) time.Time { return time.Unix(1_000_000, 0).Add(d) }

// List implements objectstore.Store.
func (o *objects) List(_ context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	return func(yield func(objectstore.Object, error) bool) {
		for _, key := range slices.Sorted(maps.Keys(o.held)) {
			if !strings.HasPrefix(key, prefix) || key <= after {
				continue
			}
			if o.loop.chance(o.trouble / 20) {
				yield(objectstore.Object{}, o.down("listing"))
				return
			}
			if !yield(o.object(key, o.held[key]), nil) {
				return
			}
		}
	}
}

// Delete implements objectstore.Store. It may stop in the middle.
func (o *objects) Delete(_ context.Context, keys ...string) error {
	for _, key := range keys {
		if o.loop.chance(o.trouble / 4) {
			return o.down("deleting")
		}
		if _, ok := o.held[key]; ok {
			delete(o.held, key)
			o.deletes++
			o.changed()
		}
	}
	if o.fails() {
		return o.down("the answer of a delete is lost")
	}
	return nil
}

// Sweep implements objectstore.Store.
func (o *objects) Sweep(context.Context, string, time.Time) (int, error) { return 0, nil }

// Close implements objectstore.Store.
func (o *objects) Close() error { return nil }
