package server

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// RollBack implements the Checkpoints service.
func (v *checkpointService) RollBack(r *keelstatepb.RollBackRequest, stream grpc.ServerStreamingServer[keelstatepb.Rollback]) error {
	if r.GetNumber() == 0 {
		return base.Invalid("number", "give the number of a checkpoint")
	}
	const most = uint64(1<<63-1) / uint64(time.Millisecond)
	if r.GetTimeoutMs() > most {
		return base.Invalid("timeout_ms", "is too long")
	}
	ctx, cancel := v.s.drainContext(stream.Context())
	defer cancel()
	if r.GetDryRun() {
		plan, err := v.s.backend.PlanRollback(ctx, r.GetNumber())
		if err != nil {
			return err
		}
		return stream.Send(rollbackMessage(plan))
	}
	err := v.s.backend.Rollback(ctx, cluster.RollbackRequest{Checkpoint: r.GetNumber(), Timeout: time.Duration(r.GetTimeoutMs()) * time.Millisecond, Force: r.GetForce()},
		func(i *cluster.RollbackInfo) error { return stream.Send(rollbackMessage(i)) })
	if err != nil && stream.Context().Err() == nil && ctx.Err() != nil {
		return context.Cause(ctx) // the drain ended it, not the client
	}
	return err
}

// GetRollback implements the Checkpoints service.
func (v *checkpointService) GetRollback(ctx context.Context, r *keelstatepb.GetRollbackRequest) (*keelstatepb.Rollback, error) {
	i, err := v.s.backend.RollbackStatus(ctx, r.GetOperation())
	if err != nil {
		return nil, err
	}
	return rollbackMessage(i), nil
}

// AbortRollback implements the Checkpoints service.
func (v *checkpointService) AbortRollback(ctx context.Context, _ *keelstatepb.AbortRollbackRequest) (*keelstatepb.Rollback, error) {
	i, err := v.s.backend.AbortRollback(ctx)
	if err != nil {
		return nil, err
	}
	return rollbackMessage(i), nil
}

func rollbackMessage(i *cluster.RollbackInfo) *keelstatepb.Rollback {
	out := &keelstatepb.Rollback{Operation: i.Operation, Number: i.Checkpoint, Phase: i.Phase, Ended: i.Ended(), Error: i.Error, Incarnation: uint64(i.Incarnation)}
	names := func(nodes []base.NodeID) (out []string) {
		for _, n := range nodes {
			out = append(out, string(n))
		}
		return out
	}
	for _, p := range i.Lacked {
		out.Lacked = append(out.Lacked, &keelstatepb.LackedPosition{Participant: p.Participant, Alive: p.Alive, Newest: p.Newest})
	}
	for _, s := range i.Shards {
		out.Shards = append(out.Shards, &keelstatepb.RollbackShard{
			Shard: uint64(s.Group), Range: wireRange(keygroup.Range{Lo: keygroup.Group(s.Lo), Hi: keygroup.Group(s.Hi)}), Bytes: uint64(s.Bytes),
			State: string(s.State), Replicas: names(s.Replicas), Prepared: names(s.Prepared), Leader: string(s.Leader), Problem: s.Problem,
			DueBytes: uint64(s.Fetch.Due), HereBytes: uint64(s.Fetch.Here),
		})
	}
	return out
}
