package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// admission is what a founder (or, later, a cluster that admits a node) sends
// to a node, and what it answers.
type admission struct {
	Init    *FoundSpec             `json:"init,omitempty"` // forwarded init: found it yourself
	Cluster base.ClusterID         `json:"cluster,omitempty"`
	Node    base.NodeID            `json:"node"`
	Peers   map[base.NodeID]string `json:"peers,omitempty"`
}

type admitted struct {
	Reply    *FoundReply `json:"reply,omitempty"` // of a forwarded init
	Disk     base.DiskID `json:"disk,omitempty"`
	Engine   string      `json:"engine,omitempty"`
	RaftAddr string      `json:"raftAddr,omitempty"`
	GRPCAddr string      `json:"grpcAddr,omitempty"`
	HTTPAddr string      `json:"httpAddr,omitempty"`
	Zone     string      `json:"zone,omitempty"`
}

// serveAdmission is what an unfounded node serves: a forwarded init, or its
// admission to a cluster.
func (n *Node) serveAdmission(ctx context.Context, from base.NodeID, req []byte) ([]byte, error) {
	var a admission
	if err := json.Unmarshal(req, &a); err != nil {
		return nil, base.Invalid("admission", err.Error())
	}
	if a.Node != n.opts.NodeID {
		return nil, &base.Error{Cause: base.ErrIdentity, Field: "nodes", Ordinal: -1,
			Hint: fmt.Sprintf("the node at this address is %s, not %s; correct the list", n.opts.NodeID, a.Node)}
	}
	if a.Init != nil {
		reply, err := n.Init(ctx, *a.Init)
		return jsonReply(admitted{Reply: reply}, err)
	}
	if a.Cluster == "" {
		return nil, base.Invalid("cluster", "an admission names a cluster")
	}
	if err := n.admit(a, from); err != nil {
		return nil, err
	}
	id := n.Identity()
	return json.Marshal(admitted{Disk: id.Disk, Engine: id.Engine, RaftAddr: n.RaftAddr(), GRPCAddr: n.opts.GRPCAddr,
		HTTPAddr: n.opts.HTTPAddr, Zone: n.opts.Zone})
}

// admit binds this node to a cluster, durably and only once.
func (n *Node) admit(a admission, from base.NodeID) error {
	n.foundMu.Lock()
	defer n.foundMu.Unlock()
	switch have := n.Identity().Cluster; {
	case have == a.Cluster:
		return nil
	case have != "":
		return &base.Error{Cause: base.ErrAlreadyFounded, Field: "nodes", Ordinal: -1,
			Hint: fmt.Sprintf("node %s belongs to cluster %s; give it an empty data directory, or leave it out", n.opts.NodeID, have)}
	}
	if err := n.addresses.learn(a.Peers); err != nil {
		return err
	}
	if err := n.changeIdentity(func(id *Identity) { id.Cluster, id.SystemGeneration = a.Cluster, 1 }); err != nil {
		return err
	}
	failpoint.Hit("cluster.found.admitted-here")
	n.logger.Info("admitted to a cluster", "cluster", string(a.Cluster), "by", string(from))
	// The connection that this came by is closed by SetCluster; the admission
	// is asked for again and then answered at once.
	if err := n.transport.SetCluster(a.Cluster); err != nil {
		return err
	}
	return n.joinSystem()
}

// admitAll admits every node that is not a member yet, and says in words what
// is still missing.
func (n *Node) admitAll(ctx context.Context, s *system, v *meta.View, spec meta.FoundingSpec) string {
	peers := map[base.NodeID]string{}
	for _, m := range spec.Nodes {
		peers[m.ID] = m.RaftAddr
	}
	peers[n.opts.NodeID] = n.RaftAddr()
	problem := ""
	for _, m := range spec.Nodes {
		if rec := v.Node(m.ID); rec != nil && rec.DiskID != "" {
			continue
		}
		if err := n.admitOne(ctx, s, m, peers); err != nil {
			problem = fmt.Sprintf("node %s at %s: %v", m.ID, m.RaftAddr, err)
			n.logger.Warn("admitting a node", "admitted", string(m.ID), "addr", m.RaftAddr, "error", err)
		}
	}
	return problem
}

func (n *Node) admitOne(ctx context.Context, s *system, m meta.FoundingNode, peers map[base.NodeID]string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	id := n.Identity()
	a := admitted{Disk: id.Disk, Engine: id.Engine, RaftAddr: n.RaftAddr(), GRPCAddr: n.opts.GRPCAddr, HTTPAddr: n.opts.HTTPAddr, Zone: n.opts.Zone}
	if m.ID != n.opts.NodeID {
		msg, err := json.Marshal(admission{Cluster: id.Cluster, Node: m.ID, Peers: peers})
		if err != nil {
			return err
		}
		raw, err := n.transport.Call(ctx, m.ID, methodAdmission, msg)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(raw, &a); err != nil {
			return fmt.Errorf("reading the admission's answer: %v: %w", err, base.ErrInternal)
		}
	}
	if a.Engine != id.Engine {
		return &base.Error{Cause: base.ErrIdentity, Field: "engine", Ordinal: -1,
			Hint: fmt.Sprintf("node %s runs engine %s, this one %s; they must be the same", m.ID, a.Engine, id.Engine)}
	}
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		return meta.AdmitNodeTxn(v, meta.Node{ID: m.ID, DiskID: a.Disk, RaftAddr: m.RaftAddr, GRPCAddr: a.GRPCAddr, HTTPAddr: a.HTTPAddr, Zone: a.Zone})
	})
	return err
}
