package server

import (
	"context"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
)

// RegisterParticipant implements the Checkpoints service.
func (v *checkpointService) RegisterParticipant(ctx context.Context, r *keelstatepb.RegisterParticipantRequest) (*keelstatepb.RegisterParticipantResponse, error) {
	p, err := v.s.backend.RegisterParticipant(ctx, r.GetParticipant(), base.SessionID(r.GetSession()))
	if err != nil {
		return nil, err
	}
	return &keelstatepb.RegisterParticipantResponse{Barrier: p.Barrier, Participant: participantMessage(p)}, nil
}

// UnregisterParticipant implements the Checkpoints service.
func (v *checkpointService) UnregisterParticipant(ctx context.Context, r *keelstatepb.UnregisterParticipantRequest) (*keelstatepb.UnregisterParticipantResponse, error) {
	var err error
	switch {
	case !r.GetEndedOnly():
		err = v.s.backend.UnregisterParticipant(ctx, r.GetParticipant(), base.SessionID(r.GetSession()))
	case r.GetSession() != 0:
		err = base.Invalid("ended_only", "it is for a registration of whatever session")
	default:
		err = v.s.backend.ForgetParticipant(ctx, r.GetParticipant())
	}
	if err != nil {
		return nil, err
	}
	return &keelstatepb.UnregisterParticipantResponse{}, nil
}

// ListParticipants implements the Checkpoints service.
func (v *checkpointService) ListParticipants(ctx context.Context, _ *keelstatepb.ListParticipantsRequest) (*keelstatepb.ListParticipantsResponse, error) {
	list, err := v.s.backend.Participants(ctx)
	if err != nil {
		return nil, err
	}
	out := &keelstatepb.ListParticipantsResponse{}
	for _, p := range list {
		m := participantMessage(p)
		if m.Last != nil {
			m.Last.Position = nil // all of them may be more than a message takes
		}
		if m.Restored != nil {
			m.Restored.Position = nil
		}
		out.Participants = append(out.Participants, m)
	}
	return out, nil
}

// GetParticipant implements the Checkpoints service.
func (v *checkpointService) GetParticipant(ctx context.Context, r *keelstatepb.GetParticipantRequest) (*keelstatepb.Participant, error) {
	p, err := v.s.backend.Participant(ctx, r.GetParticipant())
	if err != nil {
		return nil, err
	}
	return participantMessage(p), nil
}

// WaitCheckpoint implements the Checkpoints service.
func (v *checkpointService) WaitCheckpoint(ctx context.Context, r *keelstatepb.WaitCheckpointRequest) (*keelstatepb.WaitCheckpointResponse, error) {
	number, err := v.s.backend.WaitCheckpoint(ctx, r.GetParticipant(), base.SessionID(r.GetSession()), r.GetAfter())
	if err != nil {
		return nil, err
	}
	return &keelstatepb.WaitCheckpointResponse{Number: number}, nil
}

// AcknowledgeCheckpoint implements the Checkpoints service.
func (v *checkpointService) AcknowledgeCheckpoint(ctx context.Context, r *keelstatepb.AcknowledgeCheckpointRequest) (*keelstatepb.AcknowledgeCheckpointResponse, error) {
	passed, err := v.s.backend.AcknowledgeCheckpoint(ctx, r.GetParticipant(), base.SessionID(r.GetSession()), r.GetNumber(), r.GetPosition())
	if err != nil {
		return nil, err
	}
	return &keelstatepb.AcknowledgeCheckpointResponse{Passed: passed}, nil
}

// AwaitCheckpoint implements the Checkpoints service.
func (v *checkpointService) AwaitCheckpoint(ctx context.Context, r *keelstatepb.AwaitCheckpointRequest) (*keelstatepb.Checkpoint, error) {
	c, err := v.s.backend.AwaitCheckpoint(ctx, r.GetNumber())
	if err != nil {
		return nil, err
	}
	return checkpointMessage(c), nil
}

func participantMessage(p *cluster.ParticipantInfo) *keelstatepb.Participant {
	out := &keelstatepb.Participant{Participant: p.ID, Session: uint64(p.Session), Alive: p.Alive, RegisteredMs: p.RegisteredMs}
	if p.Last != nil {
		out.Last = positionMessage(p.Last)
	}
	if r := p.Restored; r != nil {
		out.Restored = &keelstatepb.RestoredPosition{Checkpoint: r.Checkpoint, Cluster: string(r.Cluster), Incarnation: uint64(r.Incarnation),
			Position: r.Bytes, Bytes: uint64(len(r.Bytes))}
	}
	return out
}

func positionMessage(p *meta.Position) *keelstatepb.ParticipantPosition {
	return &keelstatepb.ParticipantPosition{Participant: p.Participant, Given: p.Given, Position: p.Bytes, Bytes: uint64(len(p.Bytes)), Checkpoint: p.Checkpoint}
}
