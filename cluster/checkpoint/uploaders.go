package checkpoint

import (
	"slices"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// maxStrikes is how often in a row an uploader may fail where others did not
// before another one is chosen.
const maxStrikes = 2

// Spec is what a checkpoint that is started now is to be like.
func Spec(in *Input, automatic bool) meta.CheckpointSpec {
	cfg := in.Config
	cfg.ensureDefaults()
	return meta.CheckpointSpec{Automatic: automatic, Changelog: cfg.Changelog, TimeoutMs: uint64(cfg.Timeout.Milliseconds()), Uploaders: Uploaders(in)}
}

// Uploaders chooses who uploads each shard (CK4): the one of the last completed
// checkpoint, if it lives and holds a replica; else a living follower, those with
// the fewest shards first; else the leader; else any replica. An uploader that
// failed again and again where others did not is passed over.
func Uploaders(in *Input) map[base.GroupID]base.NodeID {
	v := in.View
	out := make(map[base.GroupID]base.NodeID, len(v.Shards()))
	load := make(map[base.NodeID]int)
	last, strikes := v.LastCheckpoint(), strikes(v)
	var open []*meta.Shard
	for _, s := range v.Shards() {
		if last != nil {
			if was := v.CheckpointShard(last.Number, s.ID); was != nil && in.alive(was.Uploader) && holds(s, was.Uploader) && strikes[strike{s.ID, was.Uploader}] < maxStrikes {
				out[s.ID] = was.Uploader
				load[was.Uploader]++
				continue
			}
		}
		open = append(open, s)
	}
	for _, s := range open {
		if n := choose(in, s, load, strikes); n != "" {
			out[s.ID] = n
			load[n]++
		}
	}
	return out
}

func holds(s *meta.Shard, n base.NodeID) bool {
	return slices.ContainsFunc(s.Replicas, func(r meta.Replica) bool { return r.Node == n })
}

// choose takes the best replica of a shard: the first difference counts.
func choose(in *Input, s *meta.Shard, load map[base.NodeID]int, strikes map[strike]int) base.NodeID {
	leader := base.NodeID("")
	if in.Leader != nil {
		leader = in.Leader(s.ID)
	}
	rank := func(r meta.Replica) [5]int {
		return [5]int{not(in.alive(r.Node)), not(strikes[strike{s.ID, r.Node}] < maxStrikes), not(r.Role == meta.RoleVoter), not(r.Node != leader), load[r.Node]}
	}
	var best base.NodeID
	var bestRank [5]int
	for _, r := range s.Replicas {
		if k := rank(r); best == "" || slices.Compare(k[:], bestRank[:]) < 0 || k == bestRank && r.Node < best {
			best, bestRank = r.Node, k
		}
	}
	return best
}

func not(b bool) int {
	if b {
		return 0
	}
	return 1
}

type strike struct {
	group base.GroupID
	node  base.NodeID
}

// strikes counts how often, since the last completed checkpoint, an uploader was
// missing when a checkpoint failed though another shard had uploaded: so neither
// the object store nor the barrier as a whole was the cause.
func strikes(v *meta.View) map[strike]int {
	out := make(map[strike]int)
	for _, c := range slices.Backward(v.Checkpoints()) {
		if c.Phase == meta.CheckpointCompleted {
			break
		}
		if c.Phase != meta.CheckpointFailed {
			continue
		}
		shards := v.CheckpointShards(c.Number)
		if !slices.ContainsFunc(shards, func(s *meta.CheckpointShard) bool { return !notUploaded(s) }) {
			continue
		}
		for _, s := range shards {
			if notUploaded(s) {
				out[strike{s.Group, s.Uploader}]++
			}
		}
	}
	return out
}
