package cluster

import (
	"context"
	"encoding/json"
	"maps"
	"sync"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// leaderTable is who leads which group, as far as this node was told: a hint
// for clients and status, never a proof.
type leaderTable struct {
	mu sync.Mutex
	m  map[base.GroupID]leaderEntry
}

type leaderEntry struct {
	Node base.NodeID `json:"node"`
	Term uint64      `json:"term"`
}

func (t *leaderTable) init() { t.m = map[base.GroupID]leaderEntry{} }

// note keeps the entry of the highest term; it says whether anything changed.
func (t *leaderTable) note(g base.GroupID, e leaderEntry) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, ok := t.m[g]
	if ok && (old.Term > e.Term || old == e) {
		return false
	}
	t.m[g] = e
	return true
}

func (t *leaderTable) get(g base.GroupID) base.NodeID {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[g].Node
}

// led lists the groups that this node leads, with their terms.
func (n *Node) led() map[base.GroupID]uint64 {
	out := map[base.GroupID]uint64{}
	for _, g := range n.groups() {
		if o := g.office.Load(); o != nil {
			if _, err := g.leading(); err == nil {
				out[g.id] = o.term
			}
		}
	}
	return out
}

// groups are the running groups of this node.
func (n *Node) groups() []*group {
	var out []*group
	if s := n.system.Load(); s != nil {
		out = append(out, &s.group)
	}
	for _, r := range n.runningReplicas() {
		out = append(out, &r.group)
	}
	return out
}

// runningReplicas are the replicas whose raft runs.
func (n *Node) runningReplicas() []*replica {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]*replica, 0, len(n.mu.replicas))
	for _, r := range n.mu.replicas {
		if r.raft != nil {
			out = append(out, r)
		}
	}
	return out
}

// leadersInterval is how often the led groups are told again, for those that
// missed it, if Options.CheckInterval is not longer.
const leadersInterval = 2 * time.Second

// announceLeaders tells every node which groups this node leads, when that
// changes and from time to time.
func (n *Node) announceLeaders() {
	var told map[base.GroupID]uint64
	timer := time.NewTicker(max(leadersInterval, n.opts.CheckInterval))
	defer timer.Stop()
	for {
		changed := n.changes.wait()
		now := n.led()
		if !maps.Equal(now, told) {
			n.tellLeaders(now)
			told = now
		}
		select {
		case <-n.ctx.Done():
			return
		case <-changed:
		case <-timer.C:
			told = nil
		}
	}
}

func (n *Node) tellLeaders(led map[base.GroupID]uint64) {
	for g, term := range led {
		if n.leaders.note(g, leaderEntry{Node: n.opts.NodeID, Term: term}) {
			n.poke()
		}
	}
	v, err := n.metaView()
	if err != nil || len(led) == 0 {
		return
	}
	msg, err := json.Marshal(led)
	if err != nil {
		return
	}
	var wg sync.WaitGroup
	for _, rec := range v.Nodes() {
		if rec.ID == n.opts.NodeID || rec.DiskID == "" {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(n.ctx, time.Second)
			defer cancel()
			if _, err := n.transport.Call(ctx, rec.ID, methodLeaders, msg); err != nil {
				n.logger.Debug("telling leaders", "to", string(rec.ID), "error", err)
			}
		}()
	}
	wg.Wait()
}

func (n *Node) serveLeaders(_ context.Context, from base.NodeID, req []byte) ([]byte, error) {
	var led map[base.GroupID]uint64
	if err := json.Unmarshal(req, &led); err != nil {
		return nil, base.Invalid("leaders", err.Error())
	}
	changed := false
	for g, term := range led {
		changed = n.leaders.note(g, leaderEntry{Node: from, Term: term}) || changed
	}
	if changed {
		n.poke()
	}
	return nil, nil
}

// leaderHint is the best guess of who leads a group.
func (n *Node) leaderHint(g base.GroupID) base.NodeID {
	for _, own := range n.groups() {
		if own.id == g {
			if l := own.leaderNode(); l != "" {
				return l
			}
		}
	}
	return n.leaders.get(g)
}
