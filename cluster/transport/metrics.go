package transport

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/internal/base"
)

// metrics are the transport's counters. Labels are lanes and reasons only,
// never nodes or groups.
type metrics struct {
	framesSent     *prometheus.CounterVec
	framesReceived *prometheus.CounterVec
	bytesSent      *prometheus.CounterVec
	bytesReceived  *prometheus.CounterVec
	dials          *prometheus.CounterVec
	refusals       *prometheus.CounterVec
	overloads      prometheus.Counter
	muted          prometheus.Counter
	wrongReplica   prometheus.Counter
	pollRounds     prometheus.Counter
	pollWaiters    prometheus.Counter
	fileBytes      *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "keelstate", Subsystem: "transport", Name: name, Help: help}, labels)
	}
	one := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "keelstate", Subsystem: "transport", Name: name, Help: help})
	}
	m := &metrics{
		framesSent:     vec("frames_sent_total", "Frames written to nodes, by lane.", "lane"),
		framesReceived: vec("frames_received_total", "Frames read from nodes, by lane.", "lane"),
		bytesSent:      vec("bytes_sent_total", "Bytes written to nodes, by lane; with frames_sent_total, the mean frame.", "lane"),
		bytesReceived:  vec("bytes_received_total", "Bytes read from nodes, by lane.", "lane"),
		dials:          vec("dials_total", "Connections tried, by outcome; a growing failure count means a node is down or unreachable.", "outcome"),
		refusals:       vec("handshake_refusals_total", "Handshakes refused by either side, by reason; any growth is a misconfiguration or a foreign node.", "reason"),
		overloads:      one("overloads_total", "Requests refused because a bounded queue was full."),
		muted:          one("muted_total", "Raft messages dropped because the group or the node is muted."),
		wrongReplica:   one("wrong_replica_total", "Raft requests refused because they meant another replica id of this node."),
		pollRounds:     one("poll_rounds_total", "Term polls sent to nodes."),
		pollWaiters:    one("poll_waiters_total", "Reads that waited for a term poll; with poll_rounds_total, the mean batch."),
		fileBytes:      vec("file_bytes_total", "Bytes of file streams, by direction.", "direction"),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.framesSent, m.framesReceived, m.bytesSent, m.bytesReceived, m.dials, m.refusals,
		m.overloads, m.muted, m.wrongReplica, m.pollRounds, m.pollWaiters, m.fileBytes} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// traffic are the counters of one lane, looked up once for a connection: a
// look-up by label for each frame costs more than the count.
type traffic struct {
	framesSent, framesReceived, bytesSent, bytesReceived prometheus.Counter
}

func (m *metrics) traffic(l lane) traffic {
	name := l.String()
	return traffic{framesSent: m.framesSent.WithLabelValues(name), framesReceived: m.framesReceived.WithLabelValues(name),
		bytesSent: m.bytesSent.WithLabelValues(name), bytesReceived: m.bytesReceived.WithLabelValues(name)}
}

func (t traffic) sent(frames, bytes int) {
	t.framesSent.Add(float64(frames))
	t.bytesSent.Add(float64(bytes))
}

func (t traffic) received(bytes int) {
	t.framesReceived.Inc()
	t.bytesReceived.Add(float64(bytes))
}

func (m *metrics) refused(err error) {
	m.refusals.WithLabelValues(string(base.SentinelOf(err).Reason)).Inc()
}
