package check

import (
	"fmt"
	"slices"
	"time"
)

// ReplicaHash is the content hash of one replica at one applied index.
type ReplicaHash struct {
	Shard   uint64
	Node    string
	Applied uint64
	Hash    string
}

// Hashes judges whether the replicas of each shard agree: no two have different
// hashes at one applied index, and at some index at least want replicas of the
// shard have been seen with the same. A replica may be given at several indexes.
func Hashes(shards []uint64, want int, seen []ReplicaHash) Result {
	j := &judge{Result: Result{Name: "hashes"}}
	type place struct{ shard, applied uint64 }
	at := map[place][]ReplicaHash{}
	best := map[uint64]int{}
	for _, h := range seen {
		p := place{h.Shard, h.Applied}
		at[p] = append(at[p], h)
	}
	places := make([]place, 0, len(at))
	for p := range at {
		places = append(places, p)
	}
	slices.SortFunc(places, func(a, b place) int {
		return slices.Compare([]uint64{a.shard, a.applied}, []uint64{b.shard, b.applied})
	})
	for _, p := range places {
		nodes := map[string]bool{}
		for _, h := range at[p] {
			if first := at[p][0]; h.Hash != first.Hash {
				j.fail(shardName(p.shard), nil, "at applied index %d %s has %s and %s has %s", p.applied, first.Node, first.Hash, h.Node, h.Hash)
			}
			nodes[h.Node] = true
		}
		best[p.shard] = max(best[p.shard], len(nodes))
	}
	for _, s := range shards {
		if best[s] < want {
			j.undecided(shardName(s), nil, "%d of %d replicas were seen at one applied index", best[s], want)
		}
	}
	if len(shards) == 0 {
		j.undecided("", nil, "no shard was looked at: nothing is proved")
	}
	j.OK = len(seen)
	j.finish()
	return j.Result
}

func shardName(s uint64) string { return fmt.Sprintf("shard %d", s) }

// Healed is what was seen of a shard after everything had been healed: how long
// after it for the first time; negative for never.
type Healed struct {
	Shard                      uint64
	Led, Wrote, Read, Replicas time.Duration
}

// HealLimit is how long a healed cluster may take.
const HealLimit = 30 * time.Second

// Liveness judges whether every shard, within limit of healing, had a leader,
// took a write, answered a linearizable read and had all replicas with equal
// hashes. Limit 0 is HealLimit.
func Liveness(shards []Healed, limit time.Duration) Result {
	if limit == 0 {
		limit = HealLimit
	}
	j := &judge{Result: Result{Name: "liveness"}}
	for _, s := range shards {
		for _, step := range []struct {
			what string
			at   time.Duration
		}{{"has no leader", s.Led}, {"takes no write", s.Wrote}, {"answers no read", s.Read}, {"has replicas that differ", s.Replicas}} {
			switch {
			case step.at < 0:
				j.fail(shardName(s.Shard), nil, "it still %s after it was healed", step.what)
			case step.at > limit:
				j.fail(shardName(s.Shard), nil, "it %s until %v after it was healed, the limit is %v", step.what, step.at.Round(time.Millisecond), limit)
			default:
				j.OK++
			}
		}
	}
	if len(shards) == 0 {
		j.undecided("", nil, "no shard was looked at: nothing is proved")
	}
	j.finish()
	return j.Result
}
