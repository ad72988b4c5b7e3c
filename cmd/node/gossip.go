package main

import (
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/cluster/gossip"
	"github.com/keelstate/keelstate/internal/base"
)

// leaveTimeout bounds how long a stop waits to tell the others that it goes.
const leaveTimeout = 2 * time.Second

// gossiper is gossip as the node wants it. The node is made before gossip can
// start, since gossip tells the node's addresses.
type gossiper struct {
	conf    *config
	log     *slog.Logger
	running atomic.Pointer[gossip.Gossip]
	told    gossip.Meta // what was told last; start, then the readiness loop only
}

var _ cluster.Gossip = (*gossiper)(nil)

func newGossiper(c *config, log *slog.Logger) *gossiper { return &gossiper{conf: c, log: log} }

// Members implements cluster.Gossip.
func (g *gossiper) Members() []cluster.GossipMember {
	running := g.running.Load()
	if running == nil {
		return nil
	}
	var out []cluster.GossipMember
	for _, m := range running.Members() {
		out = append(out, cluster.GossipMember{Node: m.Node, RaftAddr: m.RaftAddr, Unbound: m.Cluster == ""})
	}
	return out
}

func (g *gossiper) start(n *cluster.Node) error {
	g.told = g.meta(n)
	running, err := gossip.Start(gossip.Options{BindAddr: g.conf.gossipAddr, AdvertiseAddr: g.conf.advertiseGossip,
		Seeds: g.conf.join, Meta: g.told, Logger: g.log})
	if err != nil {
		return err
	}
	g.running.Store(running)
	return nil
}

func (g *gossiper) meta(n *cluster.Node) gossip.Meta {
	return gossip.Meta{Node: base.NodeID(g.conf.nodeID), Cluster: n.Identity().Cluster, RaftAddr: n.RaftAddr(),
		GRPCAddr: g.conf.advertiseGRPC, HTTPAddr: g.conf.advertiseHTTP, Version: cluster.Version}
}

// refresh tells the others what has changed, such as the cluster of a node that
// was founded or admitted.
func (g *gossiper) refresh(n *cluster.Node) {
	running := g.running.Load()
	if running == nil {
		return
	}
	m := g.meta(n)
	if m == g.told {
		return
	}
	if err := running.SetMeta(m); err != nil {
		g.log.Warn("telling the others about a change", "error", err)
		return
	}
	g.told = m
}

// close stops gossip; with leave, the others are told first.
func (g *gossiper) close(leave bool) error {
	running := g.running.Swap(nil)
	if running == nil {
		return nil
	}
	var err error
	if leave {
		err = running.Leave(leaveTimeout)
	}
	if err != nil { // the others find out by probing
		g.log.Warn("leaving gossip", "error", err)
	}
	return errors.Join(running.Close())
}
