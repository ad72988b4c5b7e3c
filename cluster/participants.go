package cluster

import (
	"context"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
)

// participantPatience bounds how long one call waits for a checkpoint; then the
// caller asks again, maybe another node.
const participantPatience = 3 * time.Second

// ParticipantInfo is what the metadata show of a participant.
type ParticipantInfo struct {
	ID string
	// Session is 0 if it is not registered; Alive says that it takes part.
	Session base.SessionID
	Alive   bool
	// RegisteredMs is 0 if it is not registered.
	RegisteredMs uint64
	// Barrier is the newest checkpoint of which shards may have passed the barrier.
	Barrier uint64
	// Last and Restored are nil if there is no such position.
	Last     *meta.Position
	Restored *meta.RestoredPosition
}

func participantInfo(v *meta.View, id string) *ParticipantInfo {
	info := &ParticipantInfo{ID: id, Barrier: v.PassedBarrier(), Last: v.LastPosition(id), Restored: v.RestoredPosition(id)}
	if p := v.Participant(id); p != nil {
		info.Session, info.Alive, info.RegisteredMs = p.Session, v.Takes(p), p.RegisteredMs
	}
	return info
}

// RegisterParticipant makes a session take part in the checkpoints that start from
// now on.
func (n *Node) RegisterParticipant(ctx context.Context, id string, session base.SessionID) (*ParticipantInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	if _, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return meta.RegisterTxn(v, n.wallMs(), id, session) }); err != nil {
		return nil, fmt.Errorf("registering participant %q: %w", id, err)
	}
	return n.Participant(ctx, id) // by metadata that are newer than the registration
}

// UnregisterParticipant ends a registration of a session, or any with session 0.
func (n *Node) UnregisterParticipant(ctx context.Context, id string, session base.SessionID) error {
	s, err := n.founded()
	if err != nil {
		return err
	}
	if _, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return meta.UnregisterTxn(v, id, session) }); err != nil {
		return fmt.Errorf("unregistering participant %q: %w", id, err)
	}
	return nil
}

// ForgetParticipant ends a registration whose session has ended; base.ErrConflict if
// it lives.
func (n *Node) ForgetParticipant(ctx context.Context, id string) error {
	s, err := n.founded()
	if err != nil {
		return err
	}
	if _, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) { return meta.ForgetTxn(v, id) }); err != nil {
		return fmt.Errorf("forgetting participant %q: %w", id, err)
	}
	return nil
}

// Participants shows all that are registered, in the order of their names.
func (n *Node) Participants(ctx context.Context) ([]*ParticipantInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	var list []*ParticipantInfo
	for _, p := range v.Participants() {
		list = append(list, participantInfo(v, p.ID))
	}
	return list, nil
}

// Participant shows what is kept of a participant, registered or not.
func (n *Node) Participant(ctx context.Context, id string) (*ParticipantInfo, error) {
	s, err := n.founded()
	if err != nil {
		return nil, err
	}
	v, err := s.sync(ctx)
	if err != nil {
		return nil, err
	}
	return participantInfo(v, id), nil
}

// watch calls look with ever newer metadata until it is done, for
// participantPatience at most; then it returns false.
func (n *Node) watch(ctx context.Context, look func(v *meta.View) (done bool, err error)) (bool, error) {
	s, err := n.founded()
	if err != nil {
		return false, err
	}
	timer := time.NewTimer(participantPatience)
	defer timer.Stop()
	v, err := s.sync(ctx)
	if err != nil {
		return false, err
	}
	for {
		changed := n.changes.wait()
		if done, err := look(v); done || err != nil {
			return done, err
		}
		if newer, err := n.metaView(); err != nil {
			return false, err
		} else if newer.Revision() > v.Revision() {
			v = newer
			continue
		}
		select {
		case <-changed:
		case <-timer.C:
			return false, nil
		case <-ctx.Done():
			return false, fmt.Errorf("waiting for a checkpoint: %w: %w", base.ErrDeadline, ctx.Err())
		case <-n.ctx.Done():
			return false, base.ErrShuttingDown
		}
	}
}

// WaitCheckpoint waits for a checkpoint above after that waits for the participant;
// 0 if there is none yet.
func (n *Node) WaitCheckpoint(ctx context.Context, id string, session base.SessionID, after uint64) (number uint64, err error) {
	_, err = n.watch(ctx, func(v *meta.View) (bool, error) {
		switch p := v.Participant(id); {
		case !v.SessionAlive(session):
			return false, &base.Error{Cause: base.ErrSessionEnded, Field: "session", Ordinal: -1, Hint: fmt.Sprintf("session %d has ended; register again under a new one", session)}
		case p == nil || p.Session != session:
			return false, &base.Error{Cause: base.ErrConflict, Field: "participant", Ordinal: -1, Hint: fmt.Sprintf("%q was registered by another session, or unregistered", id)}
		}
		c := v.RunningCheckpoint()
		if c == nil || c.Phase != meta.CheckpointWaiting || c.Number <= after {
			return false, nil
		}
		if at := v.Position(c.Number, id); at == nil || at.Session != session {
			return false, nil
		}
		number = c.Number
		return true, nil
	})
	return number, err
}

// AcknowledgeCheckpoint gives a participant's position and waits until the shards
// may pass the barrier; false if that is not so yet. base.ErrCheckpoint says that
// the checkpoint has failed.
func (n *Node) AcknowledgeCheckpoint(ctx context.Context, id string, session base.SessionID, number uint64, position []byte) (passed bool, err error) {
	s, err := n.founded()
	if err != nil {
		return false, err
	}
	fail := func(c *meta.Checkpoint) error {
		return &base.Error{Cause: base.ErrCheckpoint, Field: "number", Ordinal: -1, Hint: fmt.Sprintf("checkpoint %d has failed: %s", number, c.Error)}
	}
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		if c := v.Checkpoint(number); c != nil && c.Phase == meta.CheckpointFailed {
			return broadcast.Txn{}, fail(c)
		}
		return meta.AcknowledgeTxn(v, n.wallMs(), number, id, session, position)
	})
	if err != nil {
		return false, fmt.Errorf("acknowledging checkpoint %d by participant %q: %w", number, id, err)
	}
	return n.watch(ctx, func(v *meta.View) (bool, error) {
		switch c := v.Checkpoint(number); {
		case c == nil:
			return false, &base.Error{Cause: base.ErrCheckpoint, Field: "number", Ordinal: -1, Hint: fmt.Sprintf("checkpoint %d is not kept", number)}
		case c.Phase == meta.CheckpointFailed:
			return false, fail(c)
		default:
			return c.Phase != meta.CheckpointWaiting, nil
		}
	})
}

// AwaitCheckpoint waits for the end of a checkpoint, and returns it as it is if
// that does not come soon.
func (n *Node) AwaitCheckpoint(ctx context.Context, number uint64) (info *CheckpointInfo, err error) {
	_, err = n.watch(ctx, func(v *meta.View) (bool, error) {
		c := v.Checkpoint(number)
		if c == nil {
			return false, noCheckpoint(number)
		}
		i := n.checkpointInfo(v, c, true)
		info = &i
		return info.Ended(), nil
	})
	return info, err
}
