package cluster

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/raftfsm"
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

var storeGauges = []struct {
	desc  *prometheus.Desc
	value func(*engine.Stats) float64
}{
	{gauge("keelstate_store_memtable_bytes", "Bytes in the store's memtables; not yet flushed."), func(s *engine.Stats) float64 { return float64(s.MemtableBytes) }},
	{gauge("keelstate_store_cache_bytes", "Bytes in the block cache that the store shares with the others of the node."), func(s *engine.Stats) float64 { return float64(s.CacheBytes) }},
	{gauge("keelstate_store_pending_compaction_bytes", "Bytes that compaction has yet to rewrite; growth without end means that the disk is too slow."), func(s *engine.Stats) float64 { return float64(s.PendingCompact) }},
	{gauge("keelstate_store_level0_files", "Files on level 0; many make reads slow and stall writes."), func(s *engine.Stats) float64 { return float64(s.Level0Files) }},
	{gauge("keelstate_store_write_stalled", "1 while the store holds up writes for compaction."), func(s *engine.Stats) float64 { return b2f(s.WriteStalled) }},
	{gauge("keelstate_store_last_flush_seconds", "Duration of the last flush."), func(s *engine.Stats) float64 { return s.LastFlush.Seconds() }},
	{gauge("keelstate_store_failed", "1 if the store has failed and refuses writes."), func(s *engine.Stats) float64 { return b2f(s.Failed != "") }},
}

// applyCounters are totals of the state machine since the replica was opened.
var applyCounters = []struct {
	desc  *prometheus.Desc
	value func(*raftfsm.Counters) uint64
}{
	{gauge("keelstate_apply_entries_total", "Log entries applied."), func(c *raftfsm.Counters) uint64 { return c.Entries }},
	{gauge("keelstate_apply_requests_total", "Write requests decided at apply."), func(c *raftfsm.Counters) uint64 { return c.Requests }},
	{gauge("keelstate_apply_replayed_total", "Requests answered with their first result."), func(c *raftfsm.Counters) uint64 { return c.Replayed }},
	{gauge("keelstate_apply_mutations_total", "Mutations applied."), func(c *raftfsm.Counters) uint64 { return c.Mutations }},
	{gauge("keelstate_apply_batches_total", "Engine batches written."), func(c *raftfsm.Counters) uint64 { return c.Batches }},
	{gauge("keelstate_apply_batch_bytes_total", "Bytes of engine batches."), func(c *raftfsm.Counters) uint64 { return c.BatchBytes }},
}

var applyRefusals = prometheus.NewDesc("keelstate_apply_refusals_total", "Requests refused at apply, by reason.", []string{"group", "reason"}, nil)

var (
	readyDesc    = prometheus.NewDesc("keelstate_node_ready", "1 if the node is ready.", nil, nil)
	revisionDesc = prometheus.NewDesc("keelstate_metadata_revision", "Revision of the node's copy of the metadata.", nil, nil)
	pendingDesc  = prometheus.NewDesc("keelstate_raftlog_oldest_fsync_seconds", "Age of the oldest fsync in flight; a hung disk makes it grow.", nil, nil)
	diskLowDesc  = prometheus.NewDesc("keelstate_disk_low", "1 while the disk is nearly full: writes that add data are refused and others lead.", nil, nil)
	diskHungDesc = prometheus.NewDesc("keelstate_disk_hung", "1 while a write of the Raft log has not returned in time: the node is silent.", nil, nil)
	diskFreeDesc = prometheus.NewDesc("keelstate_disk_free_bytes", "Free bytes on the volume of the data directory, what is held back aside.", nil, nil)
	fetchDueDesc = gauge("keelstate_fetch_due_bytes", "Bytes that a replica has yet to bring here for a snapshot, a restore or a rollback; there while it does.")
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
	for _, g := range storeGauges {
		ch <- g.desc
	}
	for _, c := range applyCounters {
		ch <- c.desc
	}
	for _, g := range checkpointGauges {
		ch <- g.desc
	}
	for _, g := range changelogGauges {
		ch <- g.desc
	}
	for _, d := range []*prometheus.Desc{checkpointsDesc, scrubbedDesc, readyDesc, revisionDesc, pendingDesc, diskLowDesc, diskHungDesc, diskFreeDesc, fetchDueDesc, queueDesc, applyRefusals} {
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
	ch <- prometheus.MustNewConstMetric(diskLowDesc, prometheus.GaugeValue, b2f(c.node.disk.low.Load()))
	ch <- prometheus.MustNewConstMetric(diskHungDesc, prometheus.GaugeValue, b2f(c.node.disk.hung.Load()))
	ch <- prometheus.MustNewConstMetric(diskFreeDesc, prometheus.GaugeValue, float64(c.node.disk.free.Load()))
	ch <- prometheus.MustNewConstMetric(pendingDesc, prometheus.GaugeValue, c.node.log.OldestPendingSync().Seconds())
	c.node.collectCheckpoints(ch)
	for group, due := range c.node.fetches.due() {
		ch <- prometheus.MustNewConstMetric(fetchDueDesc, prometheus.GaugeValue, float64(due), group.String())
	}
	for i := range st.Groups {
		for _, g := range groupGauges {
			ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(&st.Groups[i]), st.Groups[i].Group.String())
		}
	}
	for _, r := range c.node.runningReplicas() {
		ch <- prometheus.MustNewConstMetric(queueDesc, prometheus.GaugeValue, float64(r.writes.queued()), r.id.String())
		r.collect(ch)
	}
}

var scrubbedDesc = gauge("keelstate_scrub_last_timestamp_seconds", "When the last whole scrub of the replica ended, in seconds since 1970; 0 if none has since the node started.")

// collect sends the figures of a replica's store and state machine.
func (r *replica) collect(ch chan<- prometheus.Metric) {
	label := r.id.String()
	ch <- prometheus.MustNewConstMetric(scrubbedDesc, prometheus.GaugeValue, float64(r.scrubs.at.Load())/1e9, label)
	if store, release, err := r.machine.Store(); err == nil {
		stats := store.Stats()
		release()
		for _, g := range storeGauges {
			ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(&stats), label)
		}
	}
	counters := r.machine.Counters()
	for _, c := range applyCounters {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(c.value(&counters)), label)
	}
	for reason, n := range counters.Refused {
		ch <- prometheus.MustNewConstMetric(applyRefusals, prometheus.CounterValue, float64(n), label, string(reason))
	}
}
