package cluster_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// Every metric of a node has the product's prefix, is there for a node that
// serves, and bears no label of the size of keys or clients.
func TestNodeExportsItsMetrics(t *testing.T) {
	regs := make([]*prometheus.Registry, 3)
	k := newKit(t, testcluster.Options{Engine: "rocks", Configure: func(i int, o *cluster.Options) {
		regs[i] = prometheus.NewRegistry()
		o.Registerer = regs[i]
	}})
	k.mustWrite(k.put("k", "v"))
	k.value("k")
	leader := k.Leader(1)
	families, err := regs[leader].Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if !slices.Contains([]string{"group", "reason", "what", "lane", "direction", "type", "result", "peer", "outcome"}, l.GetName()) {
					t.Errorf("%s has label %s; labels of keys or clients are without bound", f.GetName(), l.GetName())
				}
			}
		}
		if !strings.HasPrefix(f.GetName(), "keelstate_") {
			t.Errorf("%s lacks the prefix", f.GetName())
		}
	}
	for _, want := range []string{
		"keelstate_raft_term", "keelstate_raft_commit_index", "keelstate_applied_index", "keelstate_applied_lag_entries",
		"keelstate_raftlog_sync_seconds", "keelstate_write_queue_requests", "keelstate_commit_seconds", "keelstate_writes_total",
		"keelstate_reads_total", "keelstate_store_memtable_bytes", "keelstate_store_level0_files", "keelstate_apply_mutations_total",
		"keelstate_node_ready", "keelstate_metadata_revision",
	} {
		if !slices.Contains(names, want) {
			t.Errorf("metric %s is missing; there are %s", want, strings.Join(names, " "))
		}
	}
}
