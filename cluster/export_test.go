package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// ShardSessions is what a node's replica remembers: how many sessions, and the
// system revision of the last forgetting.
func (n *Node) ShardSessions(g base.GroupID) (sessions int, forgotten base.Revision, err error) {
	r, err := n.replicaOf(g)
	if err != nil {
		return 0, 0, err
	}
	h := r.machine.Header()
	return int(h.Sessions), h.Forgotten, nil
}

// ProposeAs proposes one write at this leader as if its copy of the metadata
// were of another revision, past all early checks.
func (n *Node) ProposeAs(g base.GroupID, revision base.Revision, req *raftfsm.Request) (raftfsm.Result, error) {
	r, err := n.replicaOf(g)
	if err != nil {
		return raftfsm.Result{}, err
	}
	if err := r.fillGroups(req); err != nil {
		return raftfsm.Result{}, err
	}
	encoded, err := raftfsm.AppendRequest(nil, req)
	if err != nil {
		return raftfsm.Result{}, err
	}
	out, err := r.command(r.ctx, raftfsm.AppendWrite(nil, r.machine.Header().ClockMs, revision, encoded))
	if err != nil {
		return raftfsm.Result{}, err
	}
	if len(out.Results) != 1 {
		return raftfsm.Result{}, errors.New("not one result")
	}
	return out.Results[0], nil
}

// StoreFamilies lists the families that exist in a replica's live store.
func (n *Node) StoreFamilies(g base.GroupID) ([]engine.FamilyID, error) {
	r, err := n.replicaOf(g)
	if err != nil {
		return nil, err
	}
	store, release, err := r.machine.Store()
	if err != nil {
		return nil, err
	}
	defer release()
	return slices.Sorted(maps.Keys(store.Families())), nil
}

// CountsAsVoter says whether this node, asked whether a replica may be given up,
// would count the one on another node as healthy.
func (n *Node) CountsAsVoter(ctx context.Context, g base.GroupID, node base.NodeID) bool {
	v, err := n.metaView()
	if err != nil {
		return false
	}
	for _, r := range v.Shard(g).Replicas {
		if r.Node == node {
			return n.votes(ctx, g, r)
		}
	}
	return false
}

// ForgetRaftLog leaves a directory as a crash leaves it that comes right after
// the node has noted that its next Raft log is a new one.
func ForgetRaftLog(dir string, node base.NodeID, engine string) error {
	id, err := openIdentity(dir, node, engine)
	if err != nil {
		return err
	}
	n := &Node{opts: Options{DataDir: dir}}
	n.mu.identity = *id
	return n.forgetLog()
}

// SystemSnapshot takes a snapshot of the system group at its leader and returns
// what sends it to a node, as a request of this term that was delayed.
func (n *Node) SystemSnapshot() (send func(to base.NodeID) error, err error) {
	s := n.system.Load()
	f := s.raft.Snapshot()
	if err := f.Error(); err != nil {
		return nil, err
	}
	meta, rc, err := f.Open()
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(rc)
	if err != nil {
		return nil, err
	}
	term := s.raft.CurrentTerm()
	return func(to base.NodeID) error {
		args := &raft.InstallSnapshotRequest{
			RPCHeader:       raft.RPCHeader{ProtocolVersion: 3, ID: []byte(s.replica), Addr: []byte(n.opts.NodeID)},
			SnapshotVersion: meta.Version, Term: term, Leader: []byte(n.opts.NodeID), LastLogIndex: meta.Index, LastLogTerm: meta.Term,
			Configuration: raft.EncodeConfiguration(meta.Configuration), ConfigurationIndex: meta.ConfigurationIndex, Size: int64(len(data))}
		var resp raft.InstallSnapshotResponse
		err := s.wire.InstallSnapshot(raft.ServerID(base.MakeReplicaID(to, 1)), raft.ServerAddress(to), args, &resp, bytes.NewReader(data))
		if err == nil && !resp.Success {
			err = errors.New("refused")
		}
		return err
	}, nil
}

// PreferredLeader is the node that is to lead a shard when it can.
func (n *Node) PreferredLeader(g base.GroupID) (base.NodeID, error) {
	rec, err := n.shardRecord(g)
	if err != nil {
		return "", err
	}
	return rec.PreferredLeader, nil
}

// SystemVoters is how many voters the system group has by this node's newest
// configuration.
func (n *Node) SystemVoters() int {
	voters, _, err := n.system.Load().voters()
	if err != nil {
		return 0
	}
	return len(voters)
}

// SystemState is the revision of this node's copy of the metadata and the last
// index of its log.
func (n *Node) SystemState() (revision base.Revision, last uint64) {
	s := n.system.Load()
	last, _ = s.log.LastIndex()
	return s.store.Snapshot().Revision(), last
}

// CutShardLog takes a snapshot of this node's replica of a shard and keeps nothing of
// the log before it.
func (n *Node) CutShardLog(ctx context.Context, g base.GroupID) error {
	n.mu.Lock()
	r := n.mu.replicas[g]
	n.mu.Unlock()
	return r.cutLogOnce(ctx)
}

// CompactSystem takes a snapshot of this node's copy of the metadata and cuts the
// log to its end.
func (n *Node) CompactSystem() error {
	s := n.system.Load()
	rc := s.raft.ReloadableConfig()
	rc.TrailingLogs = 0
	if err := s.raft.ReloadConfig(rc); err != nil {
		return err
	}
	return s.raft.Snapshot().Error()
}

// NotedRevision is the revision of the metadata that a restart of this node would
// begin with at least.
func (n *Node) NotedRevision() base.Revision {
	s := n.system.Load()
	s.noting <- struct{}{}
	defer func() { <-s.noting }()
	return s.noted
}

// WaitMetadata waits until this node's copy of the metadata is at least rev.
func (n *Node) WaitMetadata(ctx context.Context, rev base.Revision) error {
	return n.system.Load().store.WaitForRevision(ctx, rev)
}

// MetadataSum is a checksum of all keys and values of the metadata, as of now.
func (n *Node) MetadataSum(ctx context.Context) (string, error) {
	s := n.system.Load()
	if _, err := s.sync(ctx); err != nil {
		return "", err
	}
	h := sha256.New()
	s.store.Snapshot().Scan("", "", func(key string, e *broadcast.Entry) bool {
		fmt.Fprintf(h, "%q=%q;", key, e.Value)
		return true
	})
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Term is the term of this node's replica.
func (n *Node) Term(id base.GroupID) uint64 { return n.groupForPoll(id).raft.CurrentTerm() }

// FeelPulses looks at every group now, beside the look that goes on by itself.
func (n *Node) FeelPulses() {
	for _, g := range n.groups() {
		g.feelPulse()
	}
}

// PulsesSince fails while the main loop of a group has not answered since t.
func (n *Node) PulsesSince(t time.Time) error {
	for _, g := range n.groups() {
		if at := g.pulse.loop.at.Load(); at == nil || at.Before(t) {
			return fmt.Errorf("%s has not answered", g.id)
		}
	}
	return nil
}

// HashAsLeader asks this node's replica for its hashes as if it led the shard.
func (n *Node) HashAsLeader(ctx context.Context, g base.GroupID, mark uint64) error {
	r, err := n.replicaOf(g)
	if err == nil {
		_, err = r.hashAt(ctx, shardRequest{Group: g, Mark: mark, To: n.opts.NodeID})
	}
	return err
}

// MaxOpening bounds the replicas that are opened or closed at once.
func MaxOpening() int { return maxOpening() }

// GiveUp has this node's replica replaced as if a scrub had found it damaged.
// judged, if set, is called when the others were found to be a quorum.
func (n *Node) GiveUp(g base.GroupID, judged func()) error {
	r, err := n.replicaOf(g)
	if err == nil {
		n.judged = judged
		r.giveUp(fmt.Errorf("found by a test: %w", base.ErrCorrupt))
	}
	return err
}

// AppliedCommand is the newest command that this node's replica has applied.
func (n *Node) AppliedCommand(g base.GroupID) (uint64, error) {
	r, err := n.replicaOf(g)
	if err != nil {
		return 0, err
	}
	index, _ := r.machine.Applied()
	return index, nil
}

// InstallOwnSnapshot installs the replica's newest snapshot as if its manifest
// said that it reaches further by so much.
func (n *Node) InstallOwnSnapshot(g base.GroupID, further uint64) error {
	r, err := n.replicaOf(g)
	if err != nil {
		return err
	}
	manifest, _, files, err := r.snaps.newest()
	if err != nil {
		return err
	}
	m := *manifest
	m.Index += further
	return r.installStore(&m, files)
}

// ChangelogAhead is how many segments of a shard's log this node has stored since the
// last checkpoint, and how many bytes are not stored yet; false if the node is not
// to store any.
func (n *Node) ChangelogAhead(g base.GroupID) (segments int, lag int64, ok bool) {
	n.mu.Lock()
	r := n.mu.replicas[g]
	n.mu.Unlock()
	v, err := n.metaView()
	if r == nil || err != nil {
		return 0, 0, false
	}
	l := r.changelog.get()
	if l == nil || l.attempt == 0 || v.LogAttempt(g, n.opts.NodeID) != l.attempt {
		return 0, 0, false
	}
	_, lag = r.changelogLag(l)
	return len(l.ahead), lag, true
}

// DroppedStates is how many states this node's replica of a shard has dropped.
func (n *Node) DroppedStates(g base.GroupID) int {
	n.mu.Lock()
	r := n.mu.replicas[g]
	n.mu.Unlock()
	if r == nil {
		return 0
	}
	return r.machine.Header().Dropped
}

// ProposingRollback makes a replica believe that a rollback is being proposed, until
// it is released.
func (n *Node) ProposingRollback(g base.GroupID) (release func(), err error) {
	r, err := n.replicaOf(g)
	if err != nil {
		return nil, err
	}
	r.rollback.members.Lock()
	return r.rollback.members.Unlock, nil
}
