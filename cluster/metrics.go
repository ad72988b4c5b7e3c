package cluster

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
)

// metrics are the node's counters and histograms per group; the gauges of
// groups are collected on demand by a collector (see collect.go).
type metrics struct {
	// requests per entry: low means that coalescing has nothing to do.
	entryRequests *prometheus.HistogramVec
	// bytes per entry.
	entryBytes *prometheus.HistogramVec
	// time from the proposal of an entry to its result on the leader.
	commitSeconds *prometheus.HistogramVec
	// writes answered with a result, content refusals included.
	writes *prometheus.CounterVec
	// requests refused before or after the log, by reason.
	refusals *prometheus.CounterVec
	// linearizable reads served.
	reads *prometheus.CounterVec
	// rounds of confirming office; reads per round shows the sharing.
	readRounds *prometheus.CounterVec
	// time that a read waited for its confirmation and apply.
	readSeconds *prometheus.HistogramVec
	// snapshots made and installed.
	snapshots *prometheus.CounterVec
	// replicas found damaged on this node since it started.
	damaged *prometheus.CounterVec
	// replicas opened again, since their store had met a full disk.
	reopened *prometheus.CounterVec
	// stores that were built again from the replica's own snapshot and log.
	rebuilt *prometheus.CounterVec
	// pauses of the apply goroutine at barriers, on uploaders.
	barrierSeconds *prometheus.HistogramVec
	// uploads of shards for checkpoints, by how they ended.
	uploads *prometheus.CounterVec
	// what changelog checkpoints have stored.
	materialisations, changelogBytes, changelogSegments *prometheus.CounterVec
	// segments of the log that were to be stored between checkpoints, by how it ended.
	changelogAhead *prometheus.CounterVec
	// bytes brought here for snapshots, restores and rollbacks, by where from.
	fetched *prometheus.CounterVec
	// bytes read by scrubs, and parts of replicas that they found damaged.
	scrubBytes, scrubFindings *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	group := []string{"group"}
	m := &metrics{
		entryRequests: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_entry_requests",
			Help: "Requests coalesced into one Raft entry.", Buckets: prometheus.ExponentialBuckets(1, 2, 11)}, group),
		entryBytes: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_entry_bytes",
			Help: "Size of a Raft entry in bytes.", Buckets: prometheus.ExponentialBuckets(64, 4, 9)}, group),
		commitSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_commit_seconds",
			Help: "Time from proposing an entry to its applied result on the leader.", Buckets: prometheus.ExponentialBuckets(0.0002, 2, 15)}, group),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_writes_total",
			Help: "Write requests answered by the state machine."}, group),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_refusals_total",
			Help: "Requests refused, by reason."}, []string{"group", "reason"}),
		reads: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_reads_total",
			Help: "Linearizable read requests served."}, group),
		readRounds: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_read_rounds_total",
			Help: "Rounds that confirmed the leader's office for reads."}, group),
		readSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_read_wait_seconds",
			Help: "Time that a read waited to be confirmed and applied.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 15)}, group),
		snapshots: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_snapshots_total",
			Help: "Snapshots, by what was done: made, installed, failed."}, []string{"group", "what"}),
		barrierSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "keelstate_barrier_pause_seconds",
			Help: "Time for which the uploader's apply stood at the barrier of a checkpoint.", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14)}, group),
		uploads: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_checkpoint_uploads_total",
			Help: "Uploads of shards for checkpoints, by how they ended: done, failed, abandoned."}, []string{"group", "what"}),
		materialisations: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_checkpoint_materialisations_total",
			Help: "Uploads for checkpoints of mode changelog that stored files; the others stored the log."}, group),
		changelogBytes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_checkpoint_changelog_bytes_total",
			Help: "Bytes of the log that were stored for checkpoints of mode changelog."}, group),
		changelogSegments: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_checkpoint_changelog_segments_total",
			Help: "Segments of the log that were stored for checkpoints of mode changelog."}, group),
		changelogAhead: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_checkpoint_changelog_ahead_total",
			Help: "Segments of the log that were to be stored between two checkpoints of mode changelog, by how that ended: stored, failed."}, []string{"group", "what"}),
		fetched: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_fetched_bytes_total",
			Help: "Bytes that replicas have brought here for snapshots, restores and rollbacks, by source: store, peer, or disk for what was here already and was compared."}, []string{"group", "source"}),
		damaged: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_replicas_damaged_total",
			Help: "Replicas found damaged on this node."}, group),
		reopened: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_replicas_reopened_total",
			Help: "Replicas that were closed and opened again, since their store had met a full disk."}, group),
		rebuilt: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_stores_rebuilt_total",
			Help: "Stores that could not be opened and were built again from the replica's own snapshot and log; any but after a power loss is a reason to look at the disk."}, group),
		scrubBytes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_scrub_bytes_total",
			Help: "Bytes that scrubs have read; standing still for longer than the interval means that none runs."}, group),
		scrubFindings: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "keelstate_scrub_findings_total",
			Help: "Parts of a replica (store, snapshot, Raft log) that a scrub found damaged; any is a reason to look at the disk."}, group),
	}
	if reg != nil {
		for _, c := range []prometheus.Collector{m.entryRequests, m.entryBytes, m.commitSeconds, m.writes, m.refusals,
			m.reads, m.readRounds, m.readSeconds, m.snapshots, m.barrierSeconds, m.uploads, m.materialisations, m.changelogBytes, m.changelogSegments, m.changelogAhead, m.fetched, m.damaged, m.reopened, m.rebuilt, m.scrubBytes, m.scrubFindings} {
			if err := reg.Register(c); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

// groupMetrics are the metrics of one group, resolved once: the hot path looks
// up no labels.
type groupMetrics struct {
	m             *metrics
	label         string
	entryRequests prometheus.Observer
	entryBytes    prometheus.Observer
	commitSeconds prometheus.Observer
	readSeconds   prometheus.Observer
	writes        prometheus.Counter
	reads         prometheus.Counter
	readRounds    prometheus.Counter

	barrierSeconds prometheus.Observer
}

func (m *metrics) group(id base.GroupID) *groupMetrics {
	l := id.String()
	return &groupMetrics{m: m, label: l,
		entryRequests: m.entryRequests.WithLabelValues(l), entryBytes: m.entryBytes.WithLabelValues(l),
		commitSeconds: m.commitSeconds.WithLabelValues(l), readSeconds: m.readSeconds.WithLabelValues(l),
		writes: m.writes.WithLabelValues(l), reads: m.reads.WithLabelValues(l), readRounds: m.readRounds.WithLabelValues(l),
		barrierSeconds: m.barrierSeconds.WithLabelValues(l)}
}

func (g *groupMetrics) entry(requests, bytes int) {
	g.entryRequests.Observe(float64(requests))
	g.entryBytes.Observe(float64(bytes))
}

func (g *groupMetrics) applied(requests int, d time.Duration) {
	g.writes.Add(float64(requests))
	g.commitSeconds.Observe(d.Seconds())
}

func (g *groupMetrics) refused(err error) {
	g.m.refusals.WithLabelValues(g.label, string(base.SentinelOf(err).Reason)).Inc()
}

func (g *groupMetrics) upload(what string) { g.m.uploads.WithLabelValues(g.label, what).Inc() }

func (g *groupMetrics) materialised() { g.m.materialisations.WithLabelValues(g.label).Inc() }

func (g *groupMetrics) changelog(bytes int64, segments int) {
	g.m.changelogBytes.WithLabelValues(g.label).Add(float64(bytes))
	g.m.changelogSegments.WithLabelValues(g.label).Add(float64(segments))
}

func (g *groupMetrics) fetchedFrom(source string) prometheus.Counter {
	return g.m.fetched.WithLabelValues(g.label, source)
}

func (g *groupMetrics) ahead(what string) {
	g.m.changelogAhead.WithLabelValues(g.label, what).Inc()
}

func (g *groupMetrics) snapshot(what string) { g.m.snapshots.WithLabelValues(g.label, what).Inc() }
