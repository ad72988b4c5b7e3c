package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// DefaultSessionLease is the lease of a session that asks for none.
const DefaultSessionLease = time.Minute

// metaView is this node's newest copy of the metadata; base.ErrNotFounded before
// the node belongs to a cluster.
func (n *Node) metaView() (*meta.View, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	return s.view()
}

// waitMeta waits, at most metadataWait, until the copy is at least rev.
func (n *Node) waitMeta(ctx context.Context, rev base.Revision) (*meta.View, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, metadataWait)
	defer cancel()
	if err := s.store.WaitForRevision(ctx, rev); err != nil {
		return nil, &base.Error{Cause: base.ErrNotReady, Ordinal: -1, RetryAfter: 100 * time.Millisecond,
			Hint: fmt.Sprintf("the node's metadata is older than revision %d; retry", rev)}
	}
	return s.view()
}

// founded returns the system group of a node that belongs to a cluster.
func (n *Node) founded() (*system, error) {
	s := n.system.Load()
	if s == nil {
		return nil, &base.Error{Cause: base.ErrNotFounded, Ordinal: -1, Hint: "found the cluster with: keelctl cluster init --nodes id=raft-address,..."}
	}
	return s, nil
}

// replicaOf returns this node's running replica of a shard.
func (n *Node) replicaOf(g base.GroupID) (*replica, error) {
	n.mu.Lock()
	r := n.mu.replicas[g]
	closed := n.mu.closed
	n.mu.Unlock()
	switch {
	case closed:
		return nil, base.ErrShuttingDown
	case r == nil || r.raft == nil && r.damage.Load() == nil:
		if _, err := n.founded(); err != nil {
			return nil, err
		}
		return nil, &base.Error{Cause: base.ErrNoSuchShard, Group: &g, Ordinal: -1, LeaderHint: n.leaders.get(g),
			Hint: "the node holds no replica of the shard; refresh the topology"}
	case r.raft == nil:
		err := r.healthy()
		return nil, err
	}
	return r, nil
}

// Submit queues a write. Requests of one caller are proposed in the order of
// the calls. done is called exactly once, maybe before Submit returns; the
// result's Err is nil or has all details. Key groups are computed here.
func (n *Node) Submit(ctx context.Context, route Route, req *raftfsm.Request, done func(raftfsm.Result)) {
	r, err := n.replicaOf(route.Group)
	if err != nil {
		done(raftfsm.Result{Err: asError(err)})
		return
	}
	req.Epoch, req.Incarnation = route.Epoch, route.Incarnation
	r.submit(ctx, route, req, done)
}

// Read answers queries to one shard, linearizably and from one instant.
func (n *Node) Read(ctx context.Context, req *ReadRequest) (*ReadReply, error) {
	r, err := n.replicaOf(req.Group)
	if err != nil {
		return nil, err
	}
	return r.read(ctx, req)
}

// OpenScan opens a linearizable scan of one shard at one instant. Close it.
func (n *Node) OpenScan(ctx context.Context, req *ScanRequest) (*Scan, error) {
	r, err := n.replicaOf(req.Group)
	if err != nil {
		return nil, err
	}
	return r.scan(ctx, req)
}

// Topology is the cluster as this node knows it, at least at revision min.
func (n *Node) Topology(ctx context.Context, min base.Revision) (*Topology, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	if err := s.store.WaitForRevision(ctx, min); err != nil {
		return nil, fmt.Errorf("waiting for metadata revision %d: %w: %w", min, base.ErrNotReady, err)
	}
	return n.topology()
}

func (n *Node) topology() (*Topology, error) {
	v, err := n.metaView()
	if err != nil {
		return nil, err
	}
	c := v.Cluster()
	if c == nil {
		return nil, &base.Error{Cause: base.ErrNotReady, Ordinal: -1, RetryAfter: 100 * time.Millisecond,
			Hint: "the node has no copy of the cluster's metadata yet; retry"}
	}
	alive := n.alive()
	t := &Topology{Cluster: c.ID, Revision: v.Revision(), Incarnation: c.Incarnation, KeyGroups: c.KeyGroups,
		Engine: c.Engine, AnsweredBy: n.opts.NodeID, SystemLeaderHint: n.leaderHint(base.SystemGroup)}
	for _, rec := range v.Nodes() {
		t.Nodes = append(t.Nodes, NodeInfo{ID: rec.ID, RaftAddr: rec.RaftAddr, GRPCAddr: rec.GRPCAddr, HTTPAddr: rec.HTTPAddr,
			Zone: rec.Zone, State: string(rec.State), Alive: alive[rec.ID]})
	}
	for _, rec := range v.Shards() {
		t.Shards = append(t.Shards, n.shardInfo(rec))
	}
	return t, nil
}

func (n *Node) shardInfo(rec *meta.Shard) ShardInfo {
	s := ShardInfo{ID: rec.ID, Range: keygroup.Range{Lo: keygroup.Group(rec.Lo), Hi: keygroup.Group(rec.Hi)},
		Epoch: rec.Epoch, Birth: rec.Birth, LeaderHint: n.leaderHint(rec.ID)}
	for _, r := range rec.Replicas {
		s.Replicas = append(s.Replicas, ReplicaInfo{Node: r.Node, Replica: r.ReplicaID, Voter: r.Role == meta.RoleVoter})
	}
	return s
}

// alive is what gossip believes; without gossip everybody is. A process that belongs
// to no cluster is not the node of that name: its peers refuse it.
func (n *Node) alive() map[base.NodeID]bool {
	alive := map[base.NodeID]bool{n.opts.NodeID: true}
	if n.opts.Gossip == nil {
		if v, err := n.metaView(); err == nil {
			for _, rec := range v.Nodes() {
				alive[rec.ID] = true
			}
		}
		return alive
	}
	for _, m := range n.opts.Gossip.Members() {
		alive[m.Node] = !m.Unbound || m.Node == n.opts.NodeID
	}
	return alive
}

// WatchTopology calls fn at once and after every change of the metadata or of a
// leader hint, until fn returns an error or the context ends.
func (n *Node) WatchTopology(ctx context.Context, fn func(*Topology) error) error {
	if _, err := n.founded(); err != nil {
		return err
	}
	for {
		changed := n.changes.wait()
		t, err := n.topology()
		if err == nil {
			err = fn(t)
		} else if errors.Is(err, base.ErrNotReady) {
			err = nil // it comes with a later change
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-n.ctx.Done():
			return base.ErrShuttingDown
		case <-changed:
		}
	}
}

// Declare declares a state, idempotently when equal.
func (n *Node) Declare(ctx context.Context, d state.Declaration) (got state.Declaration, created bool, rev base.Revision, err error) {
	s, err := n.founded()
	if err != nil {
		return got, false, 0, err
	}
	if d.CodecVersion == 0 {
		d.CodecVersion = 1
	}
	if err := state.ValidateDeclaration(&d); err != nil {
		return got, false, 0, err
	}
	want := meta.Declaration{Keyspace: d.Keyspace, Name: d.Name, Kind: d.Kind.String(), KeyType: d.KeyType.String(),
		ValueType: d.ValueType.String(), Function: d.Function, CodecVersion: int(d.CodecVersion)}
	if d.Kind == state.KindMap {
		want.UserKeyType = d.UserKeyType.String()
	}
	if d.Function != "" { // in its canonical form, so that equal functions compare equal
		f, err := state.ParseFunction(d.Kind, d.ValueType, d.Function)
		if err != nil {
			return got, false, 0, err
		}
		want.Function = f.String()
	}
	var decl *meta.Declaration
	rev, err = s.update(ctx, func(v *meta.View) (txn broadcast.Txn, err error) {
		txn, decl, created, err = meta.DeclareTxn(v, want, nil)
		return txn, err
	})
	if err != nil {
		return got, false, 0, err
	}
	got, err = stateDeclaration(decl)
	return got, created, rev, err
}

// Drop drops a state on every shard.
func (n *Node) Drop(ctx context.Context, keyspace, name string) (base.Revision, error) {
	s, err := n.founded()
	if err != nil {
		return 0, err
	}
	var id uint32
	return s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		d := v.State(keyspace, name)
		if id != 0 && (d == nil || d.ID != id) {
			return broadcast.Txn{}, nil // an attempt of unknown outcome has dropped it
		}
		txn, err := meta.DropTxn(v, keyspace, name)
		if err == nil {
			id = d.ID
		}
		return txn, err
	})
}

// States lists the declared states, of one keyspace or of all.
func (n *Node) States(ctx context.Context, keyspace string) ([]state.Declaration, base.Revision, error) {
	s, err := n.founded()
	if err != nil {
		return nil, 0, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, 0, err
	}
	var out []state.Declaration
	for _, d := range v.States() {
		if keyspace != "" && d.Keyspace != keyspace {
			continue
		}
		sd, err := stateDeclaration(d)
		if err != nil {
			return nil, 0, err
		}
		out = append(out, sd)
	}
	return out, v.Revision(), nil
}

// OpenSession opens a session with a lease; 0 means DefaultSessionLease.
func (n *Node) OpenSession(ctx context.Context, lease time.Duration) (base.SessionID, base.Revision, time.Duration, error) {
	s, err := n.founded()
	if err != nil {
		return 0, 0, 0, err
	}
	if lease == 0 {
		lease = DefaultSessionLease
	}
	var id base.SessionID
	rev, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		id = v.NextSessionID()
		return meta.OpenSessionTxn(v, s.leaseFromMs(v), id, uint64(lease.Milliseconds()))
	})
	failpoint.Hit("cluster.session.opened")
	return id, rev, lease, err
}

// KeepAliveSession renews the lease of a session; base.ErrSessionEnded if it
// has ended.
func (n *Node) KeepAliveSession(ctx context.Context, id base.SessionID) (time.Duration, error) {
	s, err := n.founded()
	if err != nil {
		return 0, err
	}
	var lease time.Duration
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		rec := v.Session(id)
		if rec == nil {
			return broadcast.Txn{}, &base.Error{Cause: base.ErrSessionEnded, Field: "session", Ordinal: -1,
				Hint: fmt.Sprintf("session %d has ended; open a new one", uint64(id))}
		}
		lease = time.Duration(rec.LeaseMs) * time.Millisecond
		txn, _, err := meta.KeepAliveTxn(v, s.leaseFromMs(v), []base.SessionID{id})
		return txn, err
	})
	return lease, err
}

// CloseSession ends a session.
func (n *Node) CloseSession(ctx context.Context, id base.SessionID) error {
	s, err := n.founded()
	if err != nil {
		return err
	}
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return meta.CloseSessionTxn(v, id) })
	return err
}

// Operations lists the persisted operations.
func (n *Node) Operations(ctx context.Context) ([]OperationInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	var out []OperationInfo
	for _, o := range v.Operations() {
		fetches, stuck := n.progressOf(ctx, v, o)
		out = append(out, OperationInfo{ID: fmt.Sprint(o.ID), Kind: o.Kind, Phase: o.Phase, Error: o.Error,
			Done: o.Finished(), StartedMs: o.CreatedMs, UpdatedMs: o.UpdatedMs, Fetches: fetches, Stuck: stuck})
	}
	return out, nil
}
