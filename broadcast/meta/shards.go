package meta

import (
	"fmt"
	"slices"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// PlaceShardsTxn records the first shards of a founded cluster. Their ranges
// must tile [0, M) (ME6), their ids be new, their replicas be on members;
// MaxGeneration is filled in. It is refused with base.ErrConflict once there are
// shards.
func PlaceShardsTxn(v *View, shards []Shard) (broadcast.Txn, error) {
	c := v.Cluster()
	if c == nil {
		return broadcast.Txn{}, base.ErrNotFounded
	}
	if len(v.Shards()) != 0 {
		return broadcast.Txn{}, conflict("shards", "the shards are placed already")
	}
	sorted := slices.Clone(shards)
	slices.SortFunc(sorted, func(a, b Shard) int { return a.Lo - b.Lo })
	if err := checkTiling(sorted, c.KeyGroups); err != nil {
		return broadcast.Txn{}, err
	}
	var b builder
	b.expect(clusterKey, c.Revision)
	next := v.next(counterShard)
	seen := make(map[base.GroupID]bool, len(sorted))
	for i := range sorted {
		s := &sorted[i]
		if s.ID < v.NextShardID() || seen[s.ID] {
			return broadcast.Txn{}, conflict("shard", fmt.Sprintf("shard number %d was used already", uint64(s.ID)))
		}
		if s.Epoch == 0 || s.Birth == 0 {
			return broadcast.Txn{}, base.Invalid("shard", fmt.Sprintf("shard %s needs an epoch and a birth", s.ID))
		}
		if err := v.checkSeed(s); err != nil {
			return broadcast.Txn{}, err
		}
		seen[s.ID] = true
		if err := b.checkReplicas(v, s); err != nil {
			return broadcast.Txn{}, err
		}
		s.MaxGeneration = 0
		for _, r := range s.Replicas {
			s.MaxGeneration = max(s.MaxGeneration, r.Generation)
		}
		next = max(next, uint64(s.ID)+1)
		b.replace(kindShard, idKey(kindShard, uint64(s.ID)), 0, s)
	}
	b.advance(v, counterShard, next)
	return b.done()
}

func checkTiling(sorted []Shard, m int) error {
	at := 0
	for i := range sorted {
		if s := &sorted[i]; s.Lo != at || s.Hi <= s.Lo {
			return base.Invalid("range", fmt.Sprintf("shard %s has [%d, %d), the range before it ends at %d", s.ID, s.Lo, s.Hi, at))
		}
		at = sorted[i].Hi
	}
	if at != m {
		return base.Invalid("range", fmt.Sprintf("the ranges end at %d, there are %d key groups", at, m))
	}
	return nil
}

// checkReplicas says whether the replicas of a shard are such that it can live,
// and expects that their nodes stay as they are.
func (b *builder) checkReplicas(v *View, s *Shard) error {
	field := fmt.Sprintf("shards[%s].replicas", s.ID)
	voters := 0
	nodes := make(map[base.NodeID]Role, len(s.Replicas))
	for _, r := range s.Replicas {
		n := v.Node(r.Node)
		switch {
		case n == nil || n.State == NodeRemoved || n.State == NodeJoining:
			return base.Invalid(field, fmt.Sprintf("node %q is not a member", r.Node))
		case nodes[r.Node] != "":
			return base.Invalid(field, fmt.Sprintf("node %s has two replicas", r.Node))
		case r.Generation == 0 || r.ReplicaID != base.MakeReplicaID(r.Node, r.Generation):
			return base.Invalid(field, fmt.Sprintf("replica id %q is not that of generation %d on node %s", r.ReplicaID, r.Generation, r.Node))
		case r.Role != RoleVoter && r.Role != RoleLearner:
			return base.Invalid(field, fmt.Sprintf("unknown role %q", r.Role))
		}
		nodes[r.Node] = r.Role
		b.expect(nameKey(kindNode, string(r.Node)), n.Revision)
		if r.Role == RoleVoter {
			voters++
		}
	}
	if voters == 0 {
		return base.Invalid(field, "a shard needs a voter")
	}
	if s.PreferredLeader != "" && nodes[s.PreferredLeader] != RoleVoter {
		return base.Invalid(field, fmt.Sprintf("the preferred leader %s is not a voter", s.PreferredLeader))
	}
	return nil
}

// UpdateReplicasTxn records who holds a shard and who should lead it, under the
// condition that the record is as the view showed it. A replica that was not
// there before has a generation above the shard's MaxGeneration (rule R3). It is
// empty if nothing would change.
func UpdateReplicasTxn(v *View, id base.GroupID, replicas []Replica, preferred base.NodeID) (broadcast.Txn, error) {
	have := v.Shard(id)
	if have == nil {
		return broadcast.Txn{}, notFound("shard", fmt.Sprintf("no shard %s", id))
	}
	next := *have
	next.Replicas, next.PreferredLeader = slices.Clone(replicas), preferred
	var b builder
	if err := b.checkReplicas(v, &next); err != nil {
		return broadcast.Txn{}, err
	}
	for _, r := range replicas {
		if slices.ContainsFunc(have.Replicas, func(old Replica) bool { return old.ReplicaID == r.ReplicaID }) {
			continue
		}
		if r.Generation <= have.MaxGeneration {
			return broadcast.Txn{}, conflict("replicas", fmt.Sprintf("a new replica of shard %s needs a generation above %d", id, have.MaxGeneration))
		}
		next.MaxGeneration = max(next.MaxGeneration, r.Generation)
	}
	if slices.Equal(next.Replicas, have.Replicas) && preferred == have.PreferredLeader {
		return broadcast.Txn{}, nil
	}
	b.replace(kindShard, idKey(kindShard, uint64(id)), have.Revision, next)
	return b.done()
}
