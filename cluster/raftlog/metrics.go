package raftlog

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics receives what the log observes. Nil fields are skipped. The functions
// are called by the committer and the compactor and must not block.
type Metrics struct {
	// SyncSeconds is the time of one write and fsync.
	SyncSeconds func(float64)
	// BatchRecords and BatchBytes are the size of one batch.
	BatchRecords func(float64)
	BatchBytes   func(float64)
	// MovedBytes counts what the compactor wrote forward.
	MovedBytes func(float64)
	// Segments is the number of segment files now.
	Segments func(float64)
}

func (m *Metrics) batch(took time.Duration, records, bytes int) {
	observe(m.SyncSeconds, took.Seconds())
	observe(m.BatchRecords, float64(records))
	observe(m.BatchBytes, float64(bytes))
}

func (m *Metrics) moved(bytes int) { observe(m.MovedBytes, float64(bytes)) }
func (m *Metrics) segments(n int)  { observe(m.Segments, float64(n)) }

func observe(f func(float64), v float64) {
	if f != nil {
		f(v)
	}
}

// NewMetrics registers the log's metrics. A node has one log, so they have no
// labels.
func NewMetrics(reg prometheus.Registerer) Metrics {
	with := promauto.With(reg)
	return Metrics{
		SyncSeconds: with.NewHistogram(prometheus.HistogramOpts{
			Name:    "keelstate_raftlog_sync_seconds",
			Help:    "Time of one write and fsync of the Raft log. A rise slows every write of the node; seconds mean a failing disk.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 18),
		}).Observe,
		BatchRecords: with.NewHistogram(prometheus.HistogramOpts{
			Name:    "keelstate_raftlog_batch_records",
			Help:    "Calls that one fsync served. Near 1 under load means that groups do not share fsyncs.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 12),
		}).Observe,
		BatchBytes: with.NewHistogram(prometheus.HistogramOpts{
			Name:    "keelstate_raftlog_batch_bytes",
			Help:    "Bytes of one batch. Large values with slow fsyncs mean that the disk's bandwidth is the limit.",
			Buckets: prometheus.ExponentialBuckets(256, 4, 10),
		}).Observe,
		MovedBytes: with.NewCounter(prometheus.CounterOpts{
			Name: "keelstate_raftlog_moved_bytes_total",
			Help: "Bytes of live entries written forward to free old segments. A steady rise means groups that never truncate.",
		}).Add,
		Segments: with.NewGauge(prometheus.GaugeOpts{
			Name: "keelstate_raftlog_segments",
			Help: "Segment files. A rise means that entries are not truncated.",
		}).Set,
	}
}

// RegisterLog adds the gauges that are read from a log when they are scraped.
func RegisterLog(reg prometheus.Registerer, l *Log) {
	with := promauto.With(reg)
	with.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "keelstate_raftlog_file_bytes",
		Help: "Bytes of all segment files. Bounded by twice the live bytes plus a constant.",
	}, func() float64 { return float64(l.Space().FileBytes) })
	with.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "keelstate_raftlog_live_bytes",
		Help: "Bytes of live entries. A rise means that entries are not truncated.",
	}, func() float64 { return float64(l.Space().LiveBytes) })
	with.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "keelstate_raftlog_pending_sync_seconds",
		Help: "Age of the fsync under way. Over the mute limit the node falls silent so that others lead.",
	}, func() float64 { return l.OldestPendingSync().Seconds() })
}
