package cluster

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

// collector reads the gauges of all groups when metrics are scraped.
type collector struct{ node *Node }

var groupGauges = []struct {
	desc  *prometheus.Desc
	value func(*GroupStatus) float64
}{
	{gauge("keelstate_raft_term", "Raft term of the replica."), func(s *GroupStatus) float64 { return float64(s.Term) }},
	{gauge("keelstate_raft_commit_index", "Commit index known to the replica."), func(s *GroupStatus) float64 { return float64(s.Commit) }},
	{gauge("keelstate_applied_index", "Index applied by the replica's state machine."), func(s *GroupStatus) float64 { return float64(s.Applied) }},
	{gauge("keelstate_applied_lag_entries", "Committed entries that the replica has not applied."), func(s *GroupStatus) float64 {
		return float64(max(s.Commit, s.Applied) - s.Applied)
	}},
	{gauge("keelstate_raft_log_bytes", "Live bytes of the group in the Raft log."), func(s *GroupStatus) float64 { return float64(s.LogBytes) }},
	{gauge("keelstate_store_disk_bytes", "Bytes of the replica's live files."), func(s *GroupStatus) float64 { return float64(s.DiskBytes) }},
	{gauge("keelstate_store_keys_estimate", "Estimated keys of the replica."), func(s *GroupStatus) float64 { return float64(s.Keys) }},
	{gauge("keelstate_leader", "1 if this replica leads the group."), func(s *GroupStatus) float64 { return b2f(s.State == "leader") }},
	{gauge("keelstate_has_leader", "1 if this replica knows a leader of the group."), func(s *GroupStatus) float64 { return b2f(s.Leader != "") }},
	{gauge("keelstate_replica_damaged", "1 if the replica is damaged and being rebuilt."), func(s *GroupStatus) float64 { return b2f(s.Damage != "") }},
	{gauge("keelstate_replica_ready", "1 if the replica is ready to serve."), func(s *GroupStatus) float64 { return b2f(s.Ready) }},
}

var (
	readyDesc    = prometheus.NewDesc("keelstate_node_ready", "1 if the node is ready.", nil, nil)
	revisionDesc = prometheus.NewDesc("keelstate_metadata_revision", "Revision of the node's copy of the metadata.", nil, nil)
	pendingDesc  = prometheus.NewDesc("keelstate_raftlog_oldest_fsync_seconds", "Age of the oldest fsync in flight; a hung disk makes it grow.", nil, nil)
	queueDesc    = prometheus.NewDesc("keelstate_write_queue_requests", "Writes that wait to be proposed.", []string{"group"}, nil)
)

func gauge(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, []string{"group"}, nil)
}

func b2f(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range groupGauges {
		ch <- g.desc
	}
	for _, d := range []*prometheus.Desc{readyDesc, revisionDesc, pendingDesc, queueDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	st, err := c.node.NodeStatus(context.Background())
	if err != nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(readyDesc, prometheus.GaugeValue, b2f(st.Ready))
	ch <- prometheus.MustNewConstMetric(revisionDesc, prometheus.GaugeValue, float64(st.Revision))
	ch <- prometheus.MustNewConstMetric(pendingDesc, prometheus.GaugeValue, c.node.log.OldestPendingSync().Seconds())
	for i := range st.Groups {
		for _, g := range groupGauges {
			ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(&st.Groups[i]), st.Groups[i].Group.String())
		}
	}
	for _, r := range c.node.runningReplicas() {
		ch <- prometheus.MustNewConstMetric(queueDesc, prometheus.GaugeValue, float64(r.writes.queued()), r.id.String())
	}
}
