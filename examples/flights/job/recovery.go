package job

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
)

// Cluster is what a run with rollback needs besides the state.
type Cluster interface {
	// Begin opens a session of its own, whose end nothing replaces: whatever is
	// written under it is written in one incarnation.
	Begin(ctx context.Context) (Session, error)
	// RollBack takes the cluster back to a checkpoint and returns when it serves: all
	// sessions have ended then. A Failure of kind NotTaken may do better later.
	RollBack(ctx context.Context, checkpoint uint64) error
}

// Session is a store under one session. Its calls fail with the kind Lost once that
// has ended. Apply requires no position of the origin: an update is applied whatever
// the store holds.
type Session interface {
	Store
	// Turn is the newest turn that was taken; ok is false before the first. It goes
	// back with the state.
	Turn(ctx context.Context) (t Turn, ok bool, err error)
	// Take replaces the turn old (nil: none) in the incarnation that now names, and
	// does nothing if it is another: a Failure of kind Conflict, or Lost in another
	// incarnation.
	Take(ctx context.Context, old *Turn, now Turn) error
	// Incarnation is the one of the cluster in which the session writes.
	Incarnation(ctx context.Context) (uint64, error)
	// Participate makes the session the one that gives positions to checkpoints.
	Participate(ctx context.Context) (Participant, error)
	// Replaced says that the position is another living session's to give.
	Replaced(ctx context.Context) (bool, error)
	// Checkpoint takes a checkpoint.
	Checkpoint(ctx context.Context) error
	Close()
}

// Participant gives positions to checkpoints.
type Participant interface {
	// Last is what was given to the newest checkpoint that the cluster can be taken
	// back to, Restored what the state began with in the present incarnation: nil
	// for none.
	Last() *Given
	Restored() *Given
	// Next waits for a checkpoint that waits for a position.
	Next(ctx context.Context) (number uint64, err error)
	// Ack gives it, and returns when what is written from now on is no part of the
	// checkpoint. NotTaken: it has failed, which is no reason to stop.
	Ack(ctx context.Context, number uint64, position []byte) error
	// Done waits until the checkpoint is complete; NotTaken if it has failed.
	Done(ctx context.Context, number uint64) error
}

// Given is what a checkpoint was given.
type Given struct {
	Checkpoint uint64
	Position   []byte
}

// Turn says which attempt counts in an incarnation of the cluster (FJ8).
type Turn struct {
	Incarnation uint64 `json:"incarnation"`
	// Attempt names the attempt, Begun says that it may have counted rows.
	Attempt string `json:"attempt"`
	Begun   bool   `json:"begun,omitempty"`
}

// Place is a position in the source: everything up to a line is counted.
type Place struct {
	Keyspace string `json:"keyspace"`
	Source   string `json:"source"`
	Line     int64  `json:"line"`
}

func (p Place) encode() []byte {
	raw, err := json.Marshal(p)
	if err != nil {
		panic(err) // two strings and a number
	}
	return raw
}

// place reads a position of the same job.
func (o *Options) place(g *Given) (Place, error) {
	var p Place
	if err := json.Unmarshal(g.Position, &p); err != nil || p.Line < 0 {
		return p, fmt.Errorf("what checkpoint %d keeps is no position of this job: %.100q", g.Checkpoint, g.Position)
	}
	if p.Keyspace != o.Keyspace {
		return p, fmt.Errorf("the position in checkpoint %d is one of keyspace %s, this job counts into %s: give each keyspace another --participant",
			g.Checkpoint, p.Keyspace, o.Keyspace)
	}
	if p.Source != o.SourceID {
		return p, &OtherInput{Origin: "of checkpoint " + fmt.Sprint(g.Checkpoint), Ours: o.SourceID, Theirs: p.Source}
	}
	return p, nil
}

// Replaced says that another run of the job has taken over.
type Replaced struct{ Cause error }

func (e *Replaced) Error() string {
	return fmt.Sprintf("another run of this job has taken over. This run stops; nothing was counted twice (%v)", e.Cause)
}

func (e *Replaced) Unwrap() error { return e.Cause }

// NoPosition says that the state cannot be taken back to where the source's position
// is known.
type NoPosition struct{ Keyspace string }

func (e *NoPosition) Error() string {
	return fmt.Sprintf("keyspace %s holds flights, and no checkpoint that is kept has the position that belongs to them: "+
		"they were counted without --recovery rollback, or the cluster was taken back to a checkpoint without this participant, or the participant was removed. "+
		"Roll the cluster back to a checkpoint that has the position (keelctl checkpoint show), or use another --keyspace", e.Keyspace)
}

// again ends an attempt; the run begins another.
type again struct{ cause error }

func (e *again) Error() string { return e.cause.Error() }

func (e *again) Unwrap() error { return e.cause }

// kindOf is the kind of a failure, 0 if it is none.
func kindOf(err error) Kind {
	var f *Failure
	if errors.As(err, &f) {
		return f.Kind
	}
	return 0
}

// beginAgain makes an end of the attempt of what another call under the same session
// cannot mend: nobody can say whether a write of unknown outcome is in the state,
// unless that is taken back.
func beginAgain(err error) error {
	switch kindOf(err) {
	case Lost, Unknown, Conflict:
		// Not a Failure any more: it is not to be tried again.
		return &again{fmt.Errorf("%s", err)}
	}
	return err
}
