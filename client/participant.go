package keel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// participantAttempt bounds one request that waits at the node: it answers sooner.
const participantAttempt = 10 * time.Second

// Participant takes part in every checkpoint of the cluster: what it gives, such as
// the position in the source that it reads, is kept with the checkpoint and given
// back when the cluster is taken back to it. It belongs to the client's session, and
// ends with it: then every call is ErrSessionEnded, and Participate makes another.
//
//	for number, err := p.Next(ctx); err == nil; number, err = p.Next(ctx) {
//		// stop writing, and wait until every write is acknowledged
//		err := p.Ack(ctx, number, position)
//		// go on writing, unless err says that p has ended
//	}
//
// The checkpoint holds exactly what this client has written up to Ack, provided
// that everything it writes is acknowledged when Ack is called, that it writes
// nothing before Ack has returned, and that nobody else writes for it.
type Participant struct {
	client   *Client
	id       string
	session  uint64
	restored *Restored
	last     *Position
	after    atomic.Uint64
}

// Position is what a participant has given to a checkpoint.
type Position struct {
	Checkpoint uint64
	Bytes      []byte
}

// Restored is what a participant had given to the checkpoint that the cluster was
// last rolled back to, or was made of.
type Restored struct {
	Position
	// Cluster is the one that has made the checkpoint, empty for this one.
	Cluster string
	// Incarnation is the cluster's that began with the checkpoint.
	Incarnation uint64
}

// Participate registers the client under a name, of which the newest registration
// counts: the one before gets ErrConflict. Until Close the cluster keeps the newest
// checkpoint that has the name's position, even if the client has gone.
func (c *Client) Participate(ctx context.Context, name string) (*Participant, error) {
	var s *session
	var got *keelstatepb.RegisterParticipantResponse
	for registered := false; !registered; {
		var err error
		if s, err = c.currentSession(ctx); err != nil {
			return nil, err
		}
		err = c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			got, err = keelstatepb.NewCheckpointsClient(conn).RegisterParticipant(ctx, &keelstatepb.RegisterParticipantRequest{Participant: name, Session: s.id})
			return err
		})
		switch {
		case err == nil:
			registered = true
		case errors.Is(err, ErrSessionEnded) && ctx.Err() == nil:
			s.end(asError(err)) // it has not heard of that yet; the next one lives
		default:
			return nil, err
		}
	}
	c.sawBarrier(got.GetBarrier())
	p := &Participant{client: c, id: name, session: s.id}
	p.last, p.restored = positions(got.GetParticipant())
	return p, nil
}

// Registered is a registration of a participant's name.
type Registered struct {
	Name string
	// Session is the session that has registered it; Alive says that it takes part.
	Session uint64
	Alive   bool
	Since   time.Time
	// Checkpoint is the newest checkpoint that has its position and can be rolled back
	// to, of PositionBytes bytes; 0 for none.
	Checkpoint    uint64
	PositionBytes int
}

// Participants lists the names that are registered, those with an ended session too.
func (c *Client) Participants(ctx context.Context) ([]Registered, error) {
	var got *keelstatepb.ListParticipantsResponse
	err := c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		got, err = keelstatepb.NewCheckpointsClient(conn).ListParticipants(ctx, &keelstatepb.ListParticipantsRequest{})
		return err
	})
	var out []Registered
	for _, p := range got.GetParticipants() {
		out = append(out, Registered{Name: p.GetParticipant(), Session: p.GetSession(), Alive: p.GetAlive(), Since: time.UnixMilli(int64(p.GetRegisteredMs())),
			Checkpoint: p.GetLast().GetCheckpoint(), PositionBytes: int(p.GetLast().GetBytes())})
	}
	return out, err
}

// Positions returns what the cluster keeps of a participant's name, without
// registering it: its part in the newest checkpoint that the cluster can be rolled
// back to, and what a restore or a rollback has given back; nil for none.
func (c *Client) Positions(ctx context.Context, name string) (last *Position, restored *Restored, err error) {
	var got *keelstatepb.Participant
	err = c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		got, err = keelstatepb.NewCheckpointsClient(conn).GetParticipant(ctx, &keelstatepb.GetParticipantRequest{Participant: name})
		return err
	})
	last, restored = positions(got)
	return last, restored, err
}

func positions(p *keelstatepb.Participant) (last *Position, restored *Restored) {
	if l := p.GetLast(); l != nil {
		last = &Position{Checkpoint: l.GetCheckpoint(), Bytes: l.GetPosition()}
	}
	if r := p.GetRestored(); r != nil {
		restored = &Restored{Position: Position{Checkpoint: r.GetCheckpoint(), Bytes: r.GetPosition()}, Cluster: r.GetCluster(), Incarnation: r.GetIncarnation()}
	}
	return last, restored
}

// Restored is what the registration was given back, nil for nothing. It does not
// change when something is written or another checkpoint is taken.
func (p *Participant) Restored() *Restored { return p.restored }

// Session is the number of the session that has registered the participant.
func (p *Participant) Session() uint64 { return p.session }

// Last is what the cluster kept of the name when it was registered: its part in the
// newest checkpoint that the cluster can be rolled back to, nil for none.
func (p *Participant) Last() *Position { return p.last }

// Next waits for a checkpoint, newer than the last one that it has returned, that
// waits for this participant. One goroutine at a time may call it.
func (p *Participant) Next(ctx context.Context) (number uint64, err error) {
	req := &keelstatepb.WaitCheckpointRequest{Participant: p.id, Session: p.session, After: p.after.Load()}
	err = p.poll(ctx, func(ctx context.Context, api keelstatepb.CheckpointsClient) (bool, error) {
		got, err := api.WaitCheckpoint(ctx, req)
		number = got.GetNumber()
		return number != 0, err
	})
	if err == nil {
		p.after.Store(number)
	}
	return number, err
}

// Ack gives a checkpoint this participant's position, at most 512 KiB, and returns
// when what is written from now on is surely no part of it. ErrCheckpoint says that
// the checkpoint has failed, which hinders nobody from writing. After any other
// error, Ack has to be called again with the same position, or the client registered
// anew, before something is written.
func (p *Participant) Ack(ctx context.Context, number uint64, position []byte) error {
	req := &keelstatepb.AcknowledgeCheckpointRequest{Participant: p.id, Session: p.session, Number: number, Position: position}
	err := p.poll(ctx, func(ctx context.Context, api keelstatepb.CheckpointsClient) (bool, error) {
		got, err := api.AcknowledgeCheckpoint(ctx, req)
		return got.GetPassed(), err
	})
	if err == nil {
		p.client.sawBarrier(number) // no shard applies a later write before the barrier
	}
	return err
}

// Done waits for the end of a checkpoint: nil if it is completed, ErrCheckpoint if
// it has failed, ErrNotFound if it is not kept any more.
func (p *Participant) Done(ctx context.Context, number uint64) error {
	var got *keelstatepb.Checkpoint
	err := p.poll(ctx, func(ctx context.Context, api keelstatepb.CheckpointsClient) (_ bool, err error) {
		got, err = api.AwaitCheckpoint(ctx, &keelstatepb.AwaitCheckpointRequest{Number: number})
		return got.GetEnded(), err
	})
	if err == nil && got.GetPhase() == "failed" {
		return newError(ErrCheckpoint, OutcomeNotApplied, got.GetError())
	}
	return err
}

// Close unregisters the participant: checkpoints do not wait for it any more, and
// its positions are not kept longer than others.
func (p *Participant) Close(ctx context.Context) error {
	return p.client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := keelstatepb.NewCheckpointsClient(conn).UnregisterParticipant(ctx, &keelstatepb.UnregisterParticipantRequest{Participant: p.id, Session: p.session})
		return err
	})
}

// poll repeats a request that waits at the node until it is done, the context ends,
// or the cluster refuses it.
func (p *Participant) poll(ctx context.Context, f func(context.Context, keelstatepb.CheckpointsClient) (bool, error)) error {
	for {
		done := false
		err := p.client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			done, err = f(ctx, keelstatepb.NewCheckpointsClient(conn))
			return err
		}, AttemptTimeout(participantAttempt), withoutBudget)
		switch {
		case err == nil && done:
			return nil
		case ctx.Err() != nil:
			if err == nil {
				err = deadlineError(ctx.Err(), OutcomeUnknown)
			}
			return err
		case errors.Is(err, ErrCheckpoint), err != nil && !errors.Is(err, ErrDeadline) && !asError(err).Retryable:
			return err
		}
	}
}

// RollBackOption changes how RollBack goes back.
type RollBackOption func(*keelstatepb.RollBackRequest)

// WithoutPositions goes back also to a checkpoint that may hold writes of a registered
// participant and has no position of it: that one is given nothing back.
func WithoutPositions() RollBackOption {
	return func(r *keelstatepb.RollBackRequest) { r.Force = true }
}

// RollBack takes the whole cluster back to a completed checkpoint and returns when
// it serves again. All sessions end, that of this client too: a later write opens
// another. If the context ends before, the rollback goes on; it may be called again.
// A checkpoint from which a registered participant could not go on is refused with
// ErrPrecondition, by the names of both and of the newest that has its position.
func (c *Client) RollBack(ctx context.Context, number uint64, options ...RollBackOption) error {
	req := &keelstatepb.RollBackRequest{Number: number}
	for _, o := range options {
		o(req)
	}
	var last *keelstatepb.Rollback
	err := c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		stream, err := keelstatepb.NewCheckpointsClient(conn).RollBack(ctx, req)
		if err == nil {
			last, err = stream.Recv()
		}
		return err
	})
	if err != nil {
		return err
	}
	for !last.GetEnded() {
		if !pause(ctx, 50*time.Millisecond) {
			return deadlineError(ctx.Err(), OutcomeUnknown)
		}
		err := c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			now, err := keelstatepb.NewCheckpointsClient(conn).GetRollback(ctx, &keelstatepb.GetRollbackRequest{Operation: last.GetOperation()})
			if err == nil {
				last = now
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if last.GetPhase() == "failed" {
		return newError(ErrCheckpoint, OutcomeNotApplied, fmt.Sprintf("the rollback to checkpoint %d: %s", number, last.GetError()))
	}
	return nil
}

// Checkpoint takes a checkpoint of the whole cluster, and returns its number when it
// is completed; ErrCheckpoint if it fails.
func (c *Client) Checkpoint(ctx context.Context) (number uint64, err error) {
	err = c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		stream, err := keelstatepb.NewCheckpointsClient(conn).CreateCheckpoint(ctx, &keelstatepb.CreateCheckpointRequest{})
		if err != nil {
			return err
		}
		var last *keelstatepb.Checkpoint
		for {
			next, err := stream.Recv()
			switch {
			case err == nil:
				last, number = next, next.GetNumber()
				continue
			case !errors.Is(err, io.EOF):
				return err
			case last.GetPhase() == "failed":
				return newError(ErrCheckpoint, OutcomeNotApplied, last.GetError())
			}
			return nil
		}
	}, AttemptTimeout(0))
	return number, err
}
