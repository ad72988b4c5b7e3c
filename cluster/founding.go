package cluster

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

// leadSystem is what the system group's leader looks after: the founding, the
// system group's own members, sessions, and replicas to rebuild.
func (n *Node) leadSystem(s *system, v *meta.View) {
	ctx, cancel := context.WithTimeout(n.ctx, systemProposeTimeout)
	defer cancel()
	warn := func(doing string, err error) {
		if err != nil && n.ctx.Err() == nil {
			n.logger.Warn(doing, "error", err)
		}
	}
	if founding(v) {
		op, spec, err := v.FoundingOperation()
		if err == nil {
			err = n.driveFounding(ctx, s, v, op, spec)
		}
		warn("founding the cluster", err)
	}
	warn("changing the system group's members", s.reconcileMembers(s.wantedMembers(v), nil))
	warn("ending sessions", n.expireSessions(ctx, s))
	warn("purging dropped states", n.purgeDropped(ctx, s, v))
	warn("deleting the claimed checkpoint", n.deleteClaimed(v))
}

// expireSessions advances the system clock while sessions live, and ends those
// whose lease is past by it.
func (n *Node) expireSessions(ctx context.Context, s *system) error {
	v, err := s.view()
	if err != nil || v.SessionCount() == 0 {
		return err
	}
	stamp, err := s.stampMs()
	if err != nil {
		return err
	}
	if err := s.awaitIn(ctx, s.raft.Apply(broadcast.EncodeTick(stamp), enqueueTimeout)); err != nil {
		return classify(err)
	}
	if g := s.graceUntil.Load(); g != nil && time.Now().Before(*g) {
		return nil
	}
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		txn, _, err := meta.ExpireSessionsTxn(v)
		return txn, err
	})
	return err
}

// driveFounding brings the founding one step further.
func (n *Node) driveFounding(ctx context.Context, s *system, v *meta.View, op *meta.Operation, spec meta.FoundingSpec) error {
	switch op.Phase {
	case meta.PhaseFoundAdmit:
		problem := n.admitAll(ctx, s, v, spec)
		if problem != "" {
			return n.advance(ctx, s, op, meta.PhaseFoundAdmit, problem)
		}
		failpoint.Hit("cluster.found.all-admitted")
		return n.advance(ctx, s, op, meta.PhaseFoundPlace, "")
	case meta.PhaseFoundPlace:
		if len(v.Shards()) == 0 {
			failpoint.Hit("cluster.found.before-place")
			return n.place(ctx, s, op, spec)
		}
		serve := 0
		for _, rec := range v.Shards() {
			if n.leaderHint(rec.ID) != "" {
				serve++
			}
		}
		if serve < len(v.Shards()) { // the others are being restored or elected
			return n.noteProgress(ctx, s, op, spec, serve)
		}
		if problem := s.lacksVoters(v); problem != "" {
			return n.advance(ctx, s, op, op.Phase, problem)
		}
		failpoint.Hit("cluster.found.before-done")
		return n.advance(ctx, s, op, meta.PhaseDone, "")
	}
	return nil
}

// safeVoters are the voters that the system group needs, where there are as many
// nodes, before the loss of one disk loses nothing.
const safeVoters = 3

// lacksVoters says in words what the system group of a founding lacks; until it
// has its voters, the loss of the founder's disk would lose the cluster.
func (s *system) lacksVoters(v *meta.View) string {
	var missing []string
	wanted := 0
	voters, _, err := s.voters()
	if err != nil {
		return err.Error()
	}
	for _, m := range s.wantedMembers(v) {
		if !m.voter {
			continue
		}
		wanted++
		if !slices.ContainsFunc(voters, func(srv raft.Server) bool { return srv.ID == m.id }) {
			missing = append(missing, string(m.node))
		}
	}
	if need := min(wanted, safeVoters); len(voters) < need {
		return fmt.Sprintf("%d of %d voters of the system group have caught up; waiting for %s", len(voters), need, strings.Join(missing, ", "))
	}
	return ""
}

// restoreProgress begins what a founding that restores says while nothing is wrong.
const restoreProgress = "restoring: "

// noteProgress tells how far a restore is, unless it waits for something.
func (n *Node) noteProgress(ctx context.Context, s *system, op *meta.Operation, spec meta.FoundingSpec, serve int) error {
	if spec.Restore == nil || op.Error != "" && !strings.HasPrefix(op.Error, restoreProgress) {
		return nil
	}
	return n.advance(ctx, s, op, op.Phase, fmt.Sprintf("%s%d of %d shards serve", restoreProgress, serve, spec.Shards))
}

func (n *Node) advance(ctx context.Context, s *system, op *meta.Operation, phase, problem string) error {
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		o := v.Operation(op.ID)
		if o == nil || o.Phase == phase && o.Error == problem {
			return broadcast.Txn{}, nil
		}
		return meta.AdvanceOperationTxn(v, s.node.wallMs(), op.ID, phase, problem)
	})
	return err
}

// place records the first shards, and the states before them if the cluster
// begins with a checkpoint.
func (n *Node) place(ctx context.Context, s *system, op *meta.Operation, spec meta.FoundingSpec) error {
	var from *snapshot.Checkpoint
	if spec.Restore != nil {
		var err error
		from, err = n.restoredFrom(ctx, spec.Restore)
		if err != nil {
			n.restores.note(base.SystemGroup, err, err.Error())
			return errors.Join(err, n.advance(n.ctx, s, op, op.Phase, err.Error()))
		}
		n.restores.note(base.SystemGroup, nil, "")
		if err := n.restoreStates(ctx, s, from); err != nil {
			return err
		}
	}
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		if len(v.Shards()) > 0 {
			return broadcast.Txn{}, nil
		}
		var nodes []meta.Node
		for _, m := range spec.Nodes {
			rec := v.Node(m.ID)
			if rec == nil || rec.State != meta.NodeMember {
				return broadcast.Txn{}, fmt.Errorf("node %s is not a member yet: %w", m.ID, base.ErrNotReady)
			}
			nodes = append(nodes, *rec)
		}
		shards, err := firstShards(v.NextShardID(), nodes, spec, from)
		if err != nil {
			return broadcast.Txn{}, err
		}
		return meta.PlaceShardsTxn(v, shards)
	})
	return err
}

// firstShards chooses the first shards and their replicas; with a checkpoint also
// how they begin.
func firstShards(first base.GroupID, nodes []meta.Node, spec meta.FoundingSpec, from *snapshot.Checkpoint) ([]meta.Shard, error) {
	var places []keygroup.PlaceNode
	for _, n := range nodes {
		places = append(places, keygroup.PlaceNode{ID: n.ID, Zone: n.Zone})
	}
	ids := make([]base.GroupID, spec.Shards)
	for i := range ids {
		ids[i] = first + base.GroupID(i)
	}
	plan, err := keygroup.Place(places, ids, spec.Replication)
	if err != nil {
		return nil, err
	}
	shards := newShards(ids, plan, spec)
	for i := range shards {
		if from != nil {
			shards[i].Seed = seedOf(from, &shards[i], spec)
		}
	}
	return shards, nil
}

func newShards(ids []base.GroupID, plan map[base.GroupID][]base.NodeID, spec meta.FoundingSpec) []meta.Shard {
	shards := make([]meta.Shard, len(ids))
	for i, id := range ids {
		r := keygroup.RangeOf(i, spec.KeyGroups, spec.Shards)
		sh := meta.Shard{ID: id, Lo: int(r.Lo), Hi: int(r.Hi), Epoch: 1, Birth: randomBirth(), PreferredLeader: plan[id][0]}
		for _, node := range plan[id] {
			sh.Replicas = append(sh.Replicas, meta.Replica{Node: node, Generation: 1, ReplicaID: base.MakeReplicaID(node, 1), Role: meta.RoleVoter})
		}
		shards[i] = sh
	}
	return shards
}

func randomBirth() base.Birth {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(fmt.Sprintf("reading random bytes: %v", err)) // crypto/rand never fails on Linux
	}
	return base.Birth(binary.LittleEndian.Uint64(b[:]) | 1)
}
