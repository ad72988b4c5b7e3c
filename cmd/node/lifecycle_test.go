package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
)

// TestNodesFindEachOther starts two nodes in this process, the second with the
// first as its gossip seed, founds a cluster of both, and stops them. That
// nothing is left running is checked by TestMain.
func TestNodesFindEachOther(t *testing.T) {
	var ps []*process
	for i := 1; i <= 2; i++ {
		args := []string{"--node-id", fmt.Sprint("n", i), "--data-dir", filepath.Join(t.TempDir(), "data"), "--grpc-addr", "127.0.0.1:0",
			"--raft-addr", "127.0.0.1:0", "--gossip-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--engine", "mem", "--zone", fmt.Sprint("z", i)}
		if i == 2 {
			args = append(args, "--join", ps[0].gossip.running.Load().Addr())
		}
		c, err := load(t, nil, args...)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.validate(); err != nil {
			t.Fatal(err)
		}
		p, err := start(c, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		stopped := false
		stop := func() {
			if stopped {
				return
			}
			stopped = true
			if err := p.shutdown(context.Background(), false); err != nil {
				t.Errorf("stopping n%d: %v", i, err)
			}
		}
		t.Cleanup(stop)
		ps = append(ps, p)
	}
	hears := func(p *process, n base.NodeID, id base.ClusterID) error {
		for _, m := range p.gossip.running.Load().Members() {
			if m.Node == n && m.Cluster == id {
				return nil
			}
		}
		return fmt.Errorf("%v", p.gossip.Members())
	}
	eventually(t, "both hear of each other", func() error {
		if err := hears(ps[0], "n2", ""); err != nil {
			return err
		}
		return hears(ps[1], "n1", "")
	})
	spec := cluster.FoundSpec{Shards: 1}
	for _, p := range ps {
		spec.Nodes = append(spec.Nodes, cluster.FoundNode{ID: base.NodeID(p.conf.nodeID), RaftAddr: p.node.RaftAddr()})
	}
	reply, err := ps[0].node.Init(testContext(t), spec)
	if err != nil || reply.Phase != "done" {
		t.Fatalf("%v %v", reply, err)
	}
	eventually(t, "both tell which cluster they belong to", func() error {
		if err := hears(ps[0], "n2", reply.Cluster); err != nil {
			return err
		}
		return hears(ps[1], "n1", reply.Cluster)
	})
	// One that was slow may be taken for dead for a while.
	eventually(t, "each is known as what it is", func() error {
		topo, err := ps[1].node.Topology(testContext(t), 0)
		if err != nil || len(topo.Nodes) != len(ps) {
			return fmt.Errorf("%+v: %w", topo, err)
		}
		for i, n := range topo.Nodes {
			if p := ps[i]; n.GRPCAddr != p.grpcAddr() || n.HTTPAddr != p.conf.advertiseHTTP || n.Zone != p.conf.zone || !n.Alive {
				return fmt.Errorf("node %d is known as %+v", i, n)
			}
		}
		return nil
	})
	// Once the stop has begun, readiness is false and liveness is not (CN2).
	ps[1].observer.stopping.Store(true)
	web := "http://" + ps[1].conf.advertiseHTTP
	if code, body := get(web + "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "stopping") {
		t.Errorf("readyz: %d %s", code, body)
	}
	if code, body := get(web + "/livez"); code != http.StatusOK {
		t.Errorf("livez: %d %s", code, body)
	}
}

// TestFailedStartLeavesNothing: whatever fails, what was started before is
// stopped again.
func TestFailedStartLeavesNothing(t *testing.T) {
	taken, err := listen("test", "127.0.0.1:0", new(string))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	addr := taken.Addr().String()
	for _, flag := range []string{"--grpc-addr", "--http-addr", "--raft-addr", "--gossip-addr", "--pid-file", "--data-dir"} {
		args := []string{"--node-id", "n1", "--data-dir", filepath.Join(t.TempDir(), "data"), "--grpc-addr", "127.0.0.1:0",
			"--raft-addr", "127.0.0.1:0", "--gossip-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--engine", "mem"}
		switch flag {
		case "--pid-file", "--data-dir":
			args = append(args, flag, "/dev/null/x")
		default:
			args = append(args, flag, addr)
		}
		c, err := load(t, nil, args...)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.validate(); err != nil {
			t.Fatal(err)
		}
		if p, err := start(c, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%s: started", flag)
			_ = p.shutdown(context.Background(), false) // the failure is reported
		} else if !strings.Contains(err.Error(), addr) && !strings.Contains(err.Error(), "/dev/null") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
