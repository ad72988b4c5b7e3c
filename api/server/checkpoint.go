package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// verifyPause is the least time between two messages about the progress of a
// verification.
const verifyPause = 200 * time.Millisecond

// checkpointService makes and keeps checkpoints.
type checkpointService struct {
	keelstatepb.UnimplementedCheckpointsServer
	s *Server
}

// CreateCheckpoint implements the Checkpoints service.
func (v *checkpointService) CreateCheckpoint(r *keelstatepb.CreateCheckpointRequest, stream grpc.ServerStreamingServer[keelstatepb.Checkpoint]) error {
	ctx, cancel := v.s.drainContext(stream.Context())
	defer cancel()
	create := v.s.backend.CreateCheckpoint
	if r.GetSavepoint() {
		create = v.s.backend.CreateSavepoint
	}
	err := create(ctx, func(c *cluster.CheckpointInfo) error { return stream.Send(checkpointMessage(c)) })
	if err != nil && stream.Context().Err() == nil && ctx.Err() != nil {
		return context.Cause(ctx) // the drain ended it, not the client
	}
	return err
}

// ListCheckpoints implements the Checkpoints service.
func (v *checkpointService) ListCheckpoints(ctx context.Context, _ *keelstatepb.ListCheckpointsRequest) (*keelstatepb.ListCheckpointsResponse, error) {
	list, err := v.s.backend.Checkpoints(ctx)
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.ListCheckpointsResponse{PendingDeletions: uint64(list.PendingDeletions), Objects: uint64(list.Objects), ObjectBytes: uint64(list.ObjectBytes)}
	for i := range list.Checkpoints {
		out.Checkpoints = append(out.Checkpoints, checkpointMessage(&list.Checkpoints[i]))
	}
	return out, nil
}

// GetCheckpoint implements the Checkpoints service.
func (v *checkpointService) GetCheckpoint(ctx context.Context, r *keelstatepb.GetCheckpointRequest) (*keelstatepb.Checkpoint, error) {
	c, err := v.s.backend.Checkpoint(ctx, r.GetNumber())
	if err != nil {
		return nil, err
	}
	return checkpointMessage(c), nil
}

// VerifyCheckpoint implements the Checkpoints service.
func (v *checkpointService) VerifyCheckpoint(r *keelstatepb.VerifyCheckpointRequest, stream grpc.ServerStreamingServer[keelstatepb.VerifyCheckpointProgress]) error {
	ctx, cancel := v.s.drainContext(stream.Context())
	defer cancel()
	var mu sync.Mutex
	var last time.Time
	var sendErr error
	found, err := v.s.backend.VerifyCheckpoint(ctx, r.GetNumber(), r.GetQuick(), func(done, total int) {
		mu.Lock()
		defer mu.Unlock()
		if sendErr != nil || time.Since(last) < verifyPause {
			return
		}
		last = time.Now()
		if sendErr = stream.Send(&keelstatepb.VerifyCheckpointProgress{Objects: uint64(done), Total: uint64(total)}); sendErr != nil {
			cancel()
		}
	})
	if err != nil {
		if stream.Context().Err() == nil && ctx.Err() != nil && sendErr == nil {
			return context.Cause(ctx)
		}
		return err
	}
	out := &keelstatepb.VerifyCheckpointProgress{Done: true, Objects: uint64(found.Objects), Total: uint64(found.Objects),
		Bytes: uint64(found.Bytes), Files: uint64(found.Files)}
	for _, b := range found.Bad {
		out.Findings = append(out.Findings, &keelstatepb.CheckpointFinding{Object: b.Key, Shard: uint64(b.Shard), Fault: string(b.Fault), Detail: b.Why})
	}
	return stream.Send(out)
}

// DeleteCheckpoint implements the Checkpoints service.
func (v *checkpointService) DeleteCheckpoint(ctx context.Context, r *keelstatepb.DeleteCheckpointRequest) (*keelstatepb.DeleteCheckpointResponse, error) {
	if r.GetNumber() == 0 {
		return nil, base.Invalid("number", "give the number of a checkpoint")
	}
	remove := v.s.backend.DeleteCheckpoint
	if r.GetSavepoint() {
		remove = v.s.backend.DeleteSavepoint
	}
	if err := remove(ctx, r.GetNumber()); err != nil {
		return nil, err
	}
	return &keelstatepb.DeleteCheckpointResponse{}, nil
}

func checkpointMessage(c *cluster.CheckpointInfo) *keelstatepb.Checkpoint {
	t := c.Totals
	out := &keelstatepb.Checkpoint{
		Number: c.Number, Phase: string(c.Phase), Ended: c.Ended(), Error: c.Error, Automatic: c.Automatic, Savepoint: c.Savepoint, CreatedMs: c.CreatedMs, EndedMs: c.EndedMs,
		FullBytes: uint64(t.FullBytes), NewBytes: uint64(t.NewBytes), Files: uint64(t.Files), NewFiles: uint64(t.NewFiles), Objects: uint64(t.Objects),
		Requests: uint64(t.Requests), SyncMs: t.SyncMs, AsyncMs: t.AsyncMs, Uri: c.URI, Incarnation: uint64(c.Incarnation), KeyGroups: uint32(c.KeyGroups),
	}
	out.Mode = "incremental"
	if c.Changelog {
		out.Mode = "changelog"
	}
	for _, s := range c.Shards {
		out.Shards = append(out.Shards, checkpointShard(s))
	}
	for _, p := range c.Positions {
		out.Participants = append(out.Participants, positionMessage(p))
	}
	return out
}

func checkpointShard(s *meta.CheckpointShard) *keelstatepb.CheckpointShard {
	out := &keelstatepb.CheckpointShard{
		Shard: uint64(s.Group), Epoch: uint64(s.Epoch), Uploader: string(s.Uploader), Attempt: s.Attempt, State: string(s.State), Objects: uint64(s.Objects + s.PriorObjects),
		Range: wireRange(keygroup.Range{Lo: keygroup.Group(s.Lo), Hi: keygroup.Group(s.Hi)}),
	}
	if r := s.Report; r != nil {
		out.Index, out.Sequence, out.ClockMs, out.Manifest = r.Index, r.Sequence, r.ClockMs, r.ManifestKey
		out.FullBytes, out.NewBytes, out.Files, out.NewFiles = uint64(r.FullBytes), uint64(r.NewBytes), uint64(r.Files), uint64(r.NewFiles)
		out.Requests, out.SyncMs, out.AsyncMs = uint64(r.Requests), r.SyncMs, r.AsyncMs
		out.BaseIndex, out.LogBytes, out.Segments = r.BaseIndex, uint64(r.LogBytes), uint64(r.Segments)
	}
	return out
}
