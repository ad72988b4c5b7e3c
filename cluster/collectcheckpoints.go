package cluster

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/broadcast/meta"
)

// checkpointFacts are what the metadata say of checkpoints.
type checkpointFacts struct {
	last, running, failed *meta.Checkpoint // nil if there is none
	objects, planned      int
	bytes                 int64
	nowMs                 uint64
}

var checkpointsDesc = prometheus.NewDesc("keelstate_checkpoints", "Checkpoints that are kept, by phase.", []string{"phase"}, nil)

// checkpointGauges are the same on every node, as far as its copy of the metadata
// is new.
var checkpointGauges = []struct {
	desc  *prometheus.Desc
	value func(*checkpointFacts) float64
}{
	{plain("keelstate_checkpoint_last_number", "Number of the newest completed checkpoint; 0 if there is none."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.last, func(c *meta.Checkpoint) float64 { return float64(c.Number) })
	}},
	{plain("keelstate_checkpoint_last_timestamp_seconds", "When the newest completed checkpoint was completed, in seconds since 1970; 0 if there is none."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.last, func(c *meta.Checkpoint) float64 { return float64(c.EndedMs) / 1000 })
	}},
	{plain("keelstate_checkpoint_last_seconds", "How long the newest completed checkpoint took."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.last, func(c *meta.Checkpoint) float64 { return float64(c.EndedMs-min(c.EndedMs, c.CreatedMs)) / 1000 })
	}},
	{plain("keelstate_checkpoint_last_full_bytes", "Size of the newest completed checkpoint."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.last, func(c *meta.Checkpoint) float64 { return float64(c.Totals.FullBytes) })
	}},
	{plain("keelstate_checkpoint_last_new_bytes", "Bytes that were uploaded for the newest completed checkpoint."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.last, func(c *meta.Checkpoint) float64 { return float64(c.Totals.NewBytes) })
	}},
	{plain("keelstate_checkpoint_last_failed_number", "Number of the newest failed checkpoint that is remembered; above the newest completed one it says that checkpoints fail now."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.failed, func(c *meta.Checkpoint) float64 { return float64(c.Number) })
	}},
	{plain("keelstate_checkpoint_running_seconds", "For how long the running checkpoint has run; 0 if none runs."), func(f *checkpointFacts) float64 {
		return ofCheckpoint(f.running, func(c *meta.Checkpoint) float64 { return float64(f.nowMs-min(f.nowMs, c.CreatedMs)) / 1000 })
	}},
	{plain("keelstate_checkpoint_objects", "Objects that checkpoints use."), func(f *checkpointFacts) float64 { return float64(f.objects) }},
	{plain("keelstate_checkpoint_object_bytes", "Bytes of the objects that checkpoints use."), func(f *checkpointFacts) float64 { return float64(f.bytes) }},
	{plain("keelstate_checkpoint_deletions_pending", "Objects that are being deleted; growth without end means that the store refuses."), func(f *checkpointFacts) float64 { return float64(f.planned) }},
}

// changelogGauges are there for the shards whose log this node stores between
// checkpoints.
var changelogGauges = []struct {
	desc  *prometheus.Desc
	value func(entries, bytes int64) float64
}{
	{gauge("keelstate_checkpoint_changelog_lag_entries", "Entries of the log that are not in the object store yet, on the node that uploads the shard in mode changelog."), func(entries, _ int64) float64 { return float64(entries) }},
	{gauge("keelstate_checkpoint_changelog_lag_bytes", "Bytes of the log that are not in the object store yet, on the node that uploads the shard in mode changelog; growth beyond some segments means that the store is too slow or refuses."), func(_, bytes int64) float64 { return float64(bytes) }},
}

func plain(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }

func ofCheckpoint(c *meta.Checkpoint, value func(*meta.Checkpoint) float64) float64 {
	if c == nil {
		return 0
	}
	return value(c)
}

// collectCheckpoints sends what this node's copy of the metadata says.
func (n *Node) collectCheckpoints(ch chan<- prometheus.Metric) {
	v, err := n.metaView()
	if err != nil || v.Cluster() == nil {
		return
	}
	f := checkpointFacts{last: v.LastCheckpoint(), running: v.RunningCheckpoint(), objects: v.ObjectCount(), nowMs: n.wallMs()}
	phases := map[meta.CheckpointPhase]int{meta.CheckpointWaiting: 0, meta.CheckpointAnnounced: 0, meta.CheckpointMetadata: 0, meta.CheckpointCompleted: 0,
		meta.CheckpointFailed: 0, meta.CheckpointDeleting: 0}
	for _, c := range v.Checkpoints() {
		phases[c.Phase]++
		if c.Phase == meta.CheckpointFailed {
			f.failed = c
		}
	}
	for _, p := range v.Plans() {
		f.planned += len(p.Keys)
	}
	v.ScanObjects(func(o *meta.Object) bool {
		f.bytes += o.Size
		return true
	})
	for phase, count := range phases {
		ch <- prometheus.MustNewConstMetric(checkpointsDesc, prometheus.GaugeValue, float64(count), string(phase))
	}
	for _, g := range checkpointGauges {
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(&f))
	}
	n.collectChangelogs(ch, v, f.last)
}

// collectChangelogs sends how far the logs are stored that this node uploads.
func (n *Node) collectChangelogs(ch chan<- prometheus.Metric, v *meta.View, last *meta.Checkpoint) {
	if last == nil || !last.Changelog {
		return
	}
	n.mu.Lock()
	replicas := slices.Collect(maps.Values(n.mu.replicas))
	n.mu.Unlock()
	for _, r := range replicas {
		l, s := r.changelog.get(), v.CheckpointShard(last.Number, r.id)
		if l == nil || r.raft == nil || s == nil || s.Uploader != n.opts.NodeID {
			continue
		}
		entries, bytes := r.changelogLag(l)
		for _, g := range changelogGauges {
			ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(entries, bytes), r.id.String())
		}
	}
}
