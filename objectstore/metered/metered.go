// Package metered counts what a store of objects is asked and how it answers.
//
// It must not know which store it wraps, or what objects mean.
//
// Concurrency: as package objectstore says.
package metered

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Metrics are the figures of one process's store.
type Metrics struct {
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	bytes   *prometheus.CounterVec
	repeats *prometheus.CounterVec
}

// NewMetrics makes the figures and registers them, if reg is not nil.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_object_store_calls_total",
			Help: "Calls of the object store that ended, repeats included, by operation and reason."}, []string{"op", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_object_store_seconds",
			Help:    "Time of one call of the object store; of a get until its body is closed.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9)}, []string{"op"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_object_store_bytes_total",
			Help: "Bytes of objects stored (put) and read (get)."}, []string{"op"}),
		repeats: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_object_store_repeats_total",
			Help: "Calls of the object store that were repeated because they failed."}, []string{"op"}),
	}
	if reg == nil {
		return m, nil
	}
	return m, errors.Join(reg.Register(m.calls), reg.Register(m.seconds), reg.Register(m.bytes), reg.Register(m.repeats))
}

// Repeated counts a repeat; it is made for retry.Options.
func (m *Metrics) Repeated(op string, _ int, _ error) { m.repeats.WithLabelValues(op).Inc() }

// reason is the label of how a call ended.
func reason(err error) string {
	var s *base.Sentinel
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "cancelled"
	case errors.As(err, &s):
		return string(s.Reason)
	}
	return "other"
}

func (m *Metrics) ended(op string, began time.Time, err error) {
	m.calls.WithLabelValues(op, reason(err)).Inc()
	m.seconds.WithLabelValues(op).Observe(time.Since(began).Seconds())
}

// Store counts the calls of another one. It implements objectstore.Store.
type Store struct {
	inner objectstore.Store
	m     *Metrics
}

var _ objectstore.Store = (*Store)(nil)

// Wrap returns a store that counts the calls of inner.
func Wrap(inner objectstore.Store, m *Metrics) *Store { return &Store{inner: inner, m: m} }

// Put implements objectstore.Store.
func (s *Store) Put(ctx context.Context, key string, body objectstore.Body) error {
	began := time.Now()
	err := s.inner.Put(ctx, key, body)
	s.m.ended("put", began, err)
	if err == nil {
		s.m.bytes.WithLabelValues("put").Add(float64(body.Size))
	}
	return err
}

// Get implements objectstore.Store.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	began := time.Now()
	r, err := s.inner.Get(ctx, key, offset, length)
	if err != nil {
		s.m.ended("get", began, err)
		return nil, err
	}
	return &reader{ReadCloser: r, m: s.m, began: began}, nil
}

type reader struct {
	io.ReadCloser
	m     *Metrics
	began time.Time
	err   error
	done  bool
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.m.bytes.WithLabelValues("get").Add(float64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

func (r *reader) Close() error {
	err := r.ReadCloser.Close()
	if !r.done {
		r.done = true
		r.m.ended("get", r.began, r.err)
	}
	return err
}

// Stat implements objectstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (objectstore.Object, error) {
	began := time.Now()
	o, err := s.inner.Stat(ctx, key)
	s.m.ended("stat", began, err)
	return o, err
}

// List implements objectstore.Store.
func (s *Store) List(ctx context.Context, prefix, after string) iter.Seq2[objectstore.Object, error] {
	return func(yield func(objectstore.Object, error) bool) {
		began := time.Now()
		var last error
		defer func() { s.m.ended("list", began, last) }()
		for o, err := range s.inner.List(ctx, prefix, after) {
			last = err
			if !yield(o, err) {
				return
			}
		}
	}
}

// Delete implements objectstore.Store.
func (s *Store) Delete(ctx context.Context, keys ...string) error {
	began := time.Now()
	err := s.inner.Delete(ctx, keys...)
	s.m.ended("delete", began, err)
	return err
}

// Sweep implements objectstore.Store.
func (s *Store) Sweep(ctx context.Context, prefix string, before time.Time) (int, error) {
	began := time.Now()
	n, err := s.inner.Sweep(ctx, prefix, before)
	s.m.ended("sweep", began, err)
	return n, err
}

// Close implements objectstore.Store.
func (s *Store) Close() error { return s.inner.Close() }
