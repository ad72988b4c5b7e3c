package server

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
)

// metrics of the client API. Methods are those of the services, "other" for
// anything else; reasons are those of package base and "ok".
type metrics struct {
	// requests answered, by method and reason; each item of a write or read
	// stream counts as one. A rise of a reason says what clients meet.
	requests *prometheus.CounterVec
	// seconds from the receipt of a request to its answer, by method.
	seconds *prometheus.HistogramVec
	// streams that ended, by method and reason.
	streams *prometheus.CounterVec
	// open streams, by method.
	open *prometheus.GaugeVec
	// panics recovered: each is a bug.
	panics prometheus.Counter

	write, read itemMetrics
}

// itemMetrics are resolved once for the items of a stream.
type itemMetrics struct {
	method   string
	requests *prometheus.CounterVec
	ok       prometheus.Counter
	seconds  prometheus.Observer
}

const reasonOK = "ok"

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_api_requests_total",
			Help: "Requests answered, by method and reason; the items of a stream count one by one."}, []string{"method", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_api_request_seconds",
			Help: "Time from receiving a request to answering it.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 18)}, []string{"method"}),
		streams: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_api_streams_total",
			Help: "Streams that ended, by method and reason."}, []string{"method", "reason"}),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "keelstate_api_open_streams",
			Help: "Streams that are open."}, []string{"method"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{Name: "keelstate_api_panics_total",
			Help: "Panics recovered while serving; each is a bug."}),
	}
	m.write = m.item("State/WriteStream")
	m.read = m.item("State/ReadStream")
	if reg != nil {
		for _, c := range []prometheus.Collector{m.requests, m.seconds, m.streams, m.open, m.panics} {
			if err := reg.Register(c); err != nil {
				return nil, fmt.Errorf("registering metrics: %w", err)
			}
		}
	}
	return m, nil
}

func (m *metrics) item(method string) itemMetrics {
	return itemMetrics{method: method, requests: m.requests, ok: m.requests.WithLabelValues(method, reasonOK), seconds: m.seconds.WithLabelValues(method)}
}

func (i *itemMetrics) answered(err error, since time.Time) {
	i.seconds.Observe(time.Since(since).Seconds())
	if err == nil {
		i.ok.Inc()
		return
	}
	i.requests.WithLabelValues(i.method, reasonOf(err)).Inc()
}

// reasonOf bounds the label: a reason that this build does not know, from a
// newer peer, counts as internal.
func reasonOf(err error) string {
	if err == nil {
		return reasonOK
	}
	s := base.SentinelOf(err)
	if !known[s] {
		s = base.ErrInternal
	}
	return string(s.Reason)
}

var known = func() map[*base.Sentinel]bool {
	m := map[*base.Sentinel]bool{}
	for _, s := range base.Sentinels() {
		m[s] = true
	}
	return m
}()
