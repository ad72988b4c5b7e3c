package checkpoint

import (
	"fmt"
	"path"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

// Metadata makes the `_metadata` of a checkpoint that waits for it, by the records
// (CK3). Declarations are those of the view, which may be newer than the barrier;
// what a shard knew at the barrier is in its manifest's files. It fails with
// base.ErrConflict if the checkpoint is in another phase.
func Metadata(v *meta.View, number uint64) (*snapshot.Checkpoint, error) {
	c, cluster := v.Checkpoint(number), v.Cluster()
	if cluster == nil || c == nil || c.Phase != meta.CheckpointMetadata {
		return nil, fmt.Errorf("making the _metadata of checkpoint %d, which does not wait for it: %w", number, base.ErrConflict)
	}
	out := &snapshot.Checkpoint{
		ClusterID: cluster.ID, Number: number, Incarnation: c.Incarnation, FormatVersion: uint32(cluster.FormatVersion),
		M: c.KeyGroups, Engine: cluster.Engine, CreatedMs: c.CreatedMs, Savepoint: c.Savepoint,
	}
	for _, k := range v.Keyspaces() {
		out.Keyspaces = append(out.Keyspaces, snapshot.Keyspace{Name: k.Name, KeyType: k.KeyType})
	}
	for _, d := range append(v.States(), v.Dropped()...) {
		out.States = append(out.States, snapshot.State{
			ID: d.ID, Keyspace: d.Keyspace, Name: d.Name, Kind: d.Kind, KeyType: d.KeyType, UserKeyType: d.UserKeyType, ValueType: d.ValueType,
			Function: d.Function, FunctionParams: d.FunctionParams, CodecVersion: uint32(d.CodecVersion), DroppedMs: d.DroppedMs,
		})
	}
	for _, p := range v.Positions(number) {
		out.Participants = append(out.Participants, snapshot.Participant{ID: p.Participant, Bytes: p.Bytes})
	}
	for _, s := range v.CheckpointShards(number) {
		r := s.Report
		if r == nil {
			return nil, fmt.Errorf("making the _metadata of checkpoint %d: shard %s has no report: %w", number, s.Group, base.ErrInternal)
		}
		manifest := r.ManifestKey
		if c.Savepoint {
			manifest = path.Base(manifest) // the name within the folder, which may be moved
		}
		out.Shards = append(out.Shards, snapshot.Shard{
			Group: s.Group, Birth: s.Birth, Epoch: s.Epoch, Range: keygroup.Range{Lo: keygroup.Group(s.Lo), Hi: keygroup.Group(s.Hi)},
			Index: r.Index, Term: r.Term, Sequence: r.Sequence, ClockMs: r.ClockMs,
			ManifestKey: manifest, ManifestSHA256: r.ManifestSHA256, ManifestSize: r.ManifestSize,
			FullBytes: r.FullBytes, NewBytes: r.NewBytes,
		})
	}
	return out, nil
}
