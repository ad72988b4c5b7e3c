package meta

import (
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// FoundingRestore says which checkpoint a cluster is founded with.
type FoundingRestore struct {
	// Key is that of the checkpoint's `_metadata` in the nodes' object store. In
	// what an operator asks for it may be CLUSTER/latest; the founder records what
	// that was.
	Key string `json:"key"`
	// SHA256 is that of `_metadata`: whoever reads it again reads the same.
	SHA256 Sum `json:"sha256"`
	// Incarnation is that of the new cluster.
	Incarnation base.Incarnation `json:"incarnation"`
	// Claim says that the checkpoint is the new cluster's to delete, once a
	// checkpoint of its own has completed.
	Claim bool `json:"claim,omitempty"`
}

const latestCheckpoint = "/latest"

// meets says whether what was founded with is what was asked for.
func (r *FoundingRestore) meets(want *FoundingRestore) bool {
	if r == nil || want == nil {
		return r == want
	}
	cluster, latest := strings.CutSuffix(want.Key, latestCheckpoint)
	return r.Claim == want.Claim && (r.Key == want.Key || latest && strings.HasPrefix(r.Key, cluster+"/"))
}

// Asks says that it is what an operator asks for, not what a founder has found.
func (r *FoundingRestore) Asks() bool { return r == nil || r.SHA256 == Sum{} }

func (r *FoundingRestore) String() string {
	if r == nil {
		return "nothing"
	}
	if r.Claim {
		return r.Key + ", claimed"
	}
	return r.Key
}

// check refuses what a founding cannot record.
func (r *FoundingRestore) check() error {
	if r.Key == "" || checkText("restore", r.Key) != nil || strings.HasSuffix(r.Key, latestCheckpoint) || r.SHA256 == (Sum{}) || r.Incarnation == 0 {
		return base.Invalid("restore", "a founding records a checkpoint, its SHA-256 and the incarnation that follows on it")
	}
	return nil
}

// ShardSeed says how the first replicas of a shard begin that is made of a
// checkpoint: each with a snapshot that ends at Index of Term, in which the nodes
// that were given it first are the voters, all in generation 1. It never changes,
// whoever holds the shard later: two configurations at the first index would be two
// groups.
type ShardSeed struct {
	Index uint64 `json:"index"`
	Term  uint64 `json:"term"`
	// Nodes are places in the founding's list of nodes, which is kept for ever.
	Nodes []int `json:"nodes"`
}

func (s *ShardSeed) String() string {
	if s == nil {
		return "none"
	}
	return fmt.Sprintf("%d of term %d on nodes %v", s.Index, s.Term, s.Nodes)
}

// NewShardSeed is the seed of a shard whose replicas are the first ones.
func NewShardSeed(index, term uint64, spec FoundingSpec, replicas []Replica) *ShardSeed {
	s := &ShardSeed{Index: index, Term: term}
	for _, r := range replicas {
		s.Nodes = append(s.Nodes, slices.IndexFunc(spec.Nodes, func(n FoundingNode) bool { return n.ID == r.Node }))
	}
	return s
}

// Voters are the nodes of the first configuration.
func (s *ShardSeed) Voters(spec FoundingSpec) ([]base.NodeID, error) {
	var out []base.NodeID
	for _, i := range s.Nodes {
		if i < 0 || i >= len(spec.Nodes) {
			return nil, base.Invalid("seed", fmt.Sprintf("the founding has no node %d", i))
		}
		out = append(out, spec.Nodes[i].ID)
	}
	return out, nil
}

// checkSeed says what is wrong with the seed of a new shard.
func (v *View) checkSeed(s *Shard) error {
	if s.Seed == nil {
		return nil
	}
	refused := base.Invalid("seed", fmt.Sprintf("shard %s needs an index, a term and the nodes of its replicas", s.ID))
	_, spec, err := v.FoundingOperation()
	if err != nil {
		return err
	}
	nodes, err := s.Seed.Voters(spec)
	if err != nil || len(nodes) != len(s.Replicas) || s.Seed.Index == 0 || s.Seed.Term == 0 || spec.Restore == nil {
		return refused
	}
	for i, r := range s.Replicas {
		if r.Generation != 1 || r.Role != RoleVoter || nodes[i] != r.Node {
			return refused
		}
	}
	return nil
}

// RestoreUnderWay returns what the founding that has not ended restores, or nil.
func (v *View) RestoreUnderWay() *FoundingRestore {
	if !v.FoundingUnderWay() {
		return nil
	}
	_, spec, err := v.FoundingOperation()
	if err != nil {
		return nil
	}
	return spec.Restore
}

// RestoredStates are the declarations of a checkpoint, and what its participants
// had given. States whose DroppedMs is not 0 were dropped.
type RestoredStates struct {
	Keyspaces []Keyspace
	States    []Declaration
	Positions []RestoredPosition
}

// Check says why RestoreStatesTxn could not take all of it: a founding that began with
// such a checkpoint would never end.
func (r *RestoredStates) Check() error {
	keyspaces, ids := make(map[string]bool), make(map[uint32]bool)
	names, participants := make(map[string]bool), make(map[string]bool)
	twice := func(field, name string) error { return base.Invalid(field, fmt.Sprintf("%q is there twice", name)) }
	for i := range r.Keyspaces {
		k := &r.Keyspaces[i]
		if err := checkName("keyspace", k.Name); err != nil {
			return err
		}
		if keyspaces[k.Name] {
			return twice("keyspace", k.Name)
		}
		keyspaces[k.Name] = true
	}
	for i := range r.States {
		d := &r.States[i]
		name := stateName(d.Keyspace, d.Name)
		if err := checkDeclaration(d); err != nil {
			return err
		}
		switch {
		case d.ID == 0 || ids[d.ID]:
			return base.Invalid("state", fmt.Sprintf("state %s has number %d, which is 0 or that of another", name, d.ID))
		case d.DroppedMs == 0 && names[name]:
			return twice("state", name)
		}
		ids[d.ID] = true
		names[name] = names[name] || d.DroppedMs == 0
	}
	for i := range r.Positions {
		p := &r.Positions[i]
		if err := checkName("participant", p.Participant); err != nil {
			return err
		}
		if participants[p.Participant] {
			return twice("participant", p.Participant)
		}
		participants[p.Participant] = true
		if len(p.Bytes) > MaxPositionBytes {
			return tooMany("position", MaxPositionBytes)
		}
	}
	return nil
}

// The bounds of one transaction of RestoreStatesTxn.
const (
	maxRestoredStates = 2000
	maxRestoredBytes  = 2 << 20
)

// RestoreStatesTxn declares the states of a checkpoint under the numbers that they
// have there, and the numbers above them are free (ME1). What does not fit one
// transaction is left for the next: call it again until it is empty. It is refused
// with base.ErrConflict unless a founding that restores is under way, no shard is
// placed, and nothing else was declared.
func RestoreStatesTxn(v *View, want RestoredStates) (broadcast.Txn, error) {
	if v.RestoreUnderWay() == nil || len(v.Shards()) > 0 {
		return broadcast.Txn{}, conflict("restore", "states are restored while a cluster is founded, before its shards are placed")
	}
	var b builder
	b.expect(clusterKey, v.Cluster().Revision)
	b.expect(idKey(kindOperation, foundingOperation), v.Operation(foundingOperation).Revision)
	bytes := 0
	full := func() bool { return len(b.txn.Then) >= maxRestoredStates || bytes >= maxRestoredBytes }
	put := func(kind, key string, rec any) {
		b.replace(kind, key, 0, rec)
		bytes += len(b.txn.Then[len(b.txn.Then)-1].Value)
	}
	for i := range want.Keyspaces {
		k := want.Keyspaces[i]
		if have := v.Keyspace(k.Name); have != nil && have.KeyType == k.KeyType {
			continue
		}
		if err := checkName("keyspace", k.Name); err != nil {
			return broadcast.Txn{}, err
		}
		if put(kindKeyspace, nameKey(kindKeyspace, k.Name), k); full() {
			return b.done()
		}
	}
	next := v.next(counterState)
	for i := range want.States {
		d := want.States[i]
		next = max(next, uint64(d.ID)+1)
		if there, err := restored(v, &d); err != nil || there {
			if err != nil {
				return broadcast.Txn{}, err
			}
			continue
		}
		kind, key := kindState, nameKey(kindState, stateName(d.Keyspace, d.Name))
		if d.DroppedMs > 0 {
			kind, key = kindDropped, idKey(kindDropped, uint64(d.ID))
		}
		if put(kind, key, d); full() {
			return b.done()
		}
	}
	if next > v.next(counterState) {
		b.advance(v, counterState, next)
	}
	for _, p := range want.Positions {
		if v.RestoredPosition(p.Participant) != nil {
			continue
		}
		if err := checkName("participant", p.Participant); err != nil {
			return broadcast.Txn{}, err
		}
		p.Incarnation = v.Cluster().Incarnation
		if put(kindRestoredPosition, nameKey(kindRestoredPosition, p.Participant), p); full() {
			return b.done()
		}
	}
	if Empty(b.txn) {
		return broadcast.Txn{}, b.err
	}
	return b.done()
}

// restored says whether a state of a checkpoint is there already.
func restored(v *View, d *Declaration) (bool, error) {
	if err := checkDeclaration(d); err != nil {
		return false, err
	}
	have := v.StateByID(d.ID)
	if have == nil {
		have, _ = v.dropped.Get(d.ID)
	}
	if have == nil {
		return false, nil
	}
	if have.Keyspace != d.Keyspace || have.Name != d.Name || have.DroppedMs != d.DroppedMs {
		return false, conflict("states", fmt.Sprintf("number %d is that of state %s", d.ID, stateName(have.Keyspace, have.Name)))
	}
	return true, sameState(have, d)
}
