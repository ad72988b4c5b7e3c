package cluster_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
)

// Every metric of a node has the product's prefix, is there for a node that
// serves, and bears no label of the size of keys or clients.
func TestNodeExportsItsMetrics(t *testing.T) {
	t.Parallel()
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
				if !slices.Contains([]string{"group", "reason", "what", "lane", "direction", "type", "result", "peer", "outcome", "phase", "source"}, l.GetName()) {
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

// A refusal counts once, of reads and scans as of writes.
func TestEveryRefusalCountsOnce(t *testing.T) {
	regs := make([]*prometheus.Registry, 3)
	k := newKit(t, testcluster.Options{Configure: func(i int, o *cluster.Options) {
		regs[i] = prometheus.NewRegistry()
		o.Registerer = regs[i]
	}})
	f := k.follower()
	refusals := func() (total float64) {
		families, err := regs[f].Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, fam := range families {
			for _, m := range fam.GetMetric() {
				if fam.GetName() == "keelstate_refusals_total" {
					total += m.GetCounter().GetValue()
				}
			}
		}
		return total
	}
	q := state.Query{State: k.values, Kind: state.QueryGet, Key: []byte("k")}
	for name, refused := range map[string]func() error{
		"write": func() error { res := k.submit(f, k.request(k.seq+1, k.put("k", "v"))); return res.Failure() },
		"read":  func() error { _, err := k.readAt(f, testcluster.Wait, q); return err },
		"scan": func() error {
			_, err := k.Node(f).OpenScan(k.ctx(), &cluster.ScanRequest{Route: k.route(), Query: state.ScanQuery{State: k.values}})
			return err
		},
	} {
		before := refusals()
		if err := refused(); !errors.Is(err, base.ErrNotLeader) {
			t.Errorf("%s at a follower: %v", name, err)
		}
		if got := refusals() - before; got != 1 {
			t.Errorf("a refused %s counted %v times", name, got)
		}
	}
}
