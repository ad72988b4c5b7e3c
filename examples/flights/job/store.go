package job

import (
	"context"
	"fmt"
	"iter"
)

// Position is how far an origin has been counted, and by whom.
type Position struct {
	// Run is the run that owns the origin.
	Run string `json:"run"`
	// Source is the input, see Reader.SourceID.
	Source string `json:"source"`
	// Line is the last line of the input that was counted; 0 is none.
	Line int64 `json:"line"`
	// Generation orders the runs, see Generation. It is left out where it is 0,
	// so that positions of runs without one keep their encoding.
	Generation int64 `json:"generation,omitempty"`
}

func (p Position) String() string {
	if p == (Position{}) {
		return "none"
	}
	return fmt.Sprintf("line %d by run %s of generation %d", p.Line, p.Run, p.Generation)
}

// Generation is the newest run of the keyspace. Each run raises the number by
// one at its start, so of two runs the one that started later has the higher.
type Generation struct {
	Number int64 `json:"number"`
	// Run is whose number it is: a run whose answer was lost finds its own.
	Run string `json:"run"`
}

// Update is what a batch of rows of one origin does, in one atomic request
// that requires Before and writes After.
type Update struct {
	Origin        string
	Before, After Position
	Rows          int
	// Last is the newest flight (Value).
	Last Flight
	// Late are the flights that were late, to append (List).
	Late []Flight
	// Destinations has the new number of flights to each destination that the
	// batch names (Map).
	Destinations map[string]int64
	// DelayMax and DistanceSum are added to a maximum and a sum (Reducing).
	DelayMax, DistanceSum int64
	// Delays are added to a mean (Aggregating).
	Delays []int64
	// Days is how many flights to add by day, the namespace (Reducing).
	Days []DayCount
}

// DayCount is a number of flights of an origin on one day.
type DayCount struct {
	Origin, Day string
	Flights     int64
}

// Store is what the job needs of a cluster. Errors that are no *Failure end the
// run.
type Store interface {
	// Generation returns the newest generation; ok is false before the first.
	Generation(ctx context.Context) (g Generation, ok bool, err error)
	// Raise replaces the generation old (nil: none) and does nothing if it is
	// another: a Failure of kind Conflict.
	Raise(ctx context.Context, old *Generation, raised Generation) error
	// Position returns the position of an origin; ok is false if it has none.
	Position(ctx context.Context, origin string) (p Position, ok bool, err error)
	// Claim replaces the position old (nil: none) and does nothing if the
	// position is another: a Failure of kind Conflict.
	Claim(ctx context.Context, origin string, old *Position, claimed Position) error
	// Destinations returns the flights to each destination.
	Destinations(ctx context.Context, origin string) (map[string]int64, error)
	// Apply applies an update as a whole, and returns the shard that did; or
	// nothing if the position is not u.Before: a Failure of kind Conflict.
	Apply(ctx context.Context, u *Update) (shard uint64, err error)
	// Origins lists the origins that have a position, in any order.
	Origins(ctx context.Context) iter.Seq2[string, error]
}

// Source is what the reports read.
type Source interface {
	Origins(ctx context.Context) iter.Seq2[string, error]
	// Summary reads the state of one origin, but for the days.
	Summary(ctx context.Context, origin string) (Summary, error)
	// Days lists all counts per day, in any order.
	Days(ctx context.Context) iter.Seq2[DayCount, error]
}

// Summary is the state of one origin.
type Summary struct {
	Destinations          map[string]int64
	DelayMax, DistanceSum int64
	DelayMean             float64
	Last                  Flight
	Late                  int64
}

// Kind says what a failed call of the store means to the job.
type Kind int

// The kinds of a Failure.
const (
	// Conflict: the position was another; nothing was written.
	Conflict Kind = iota + 1
	// Transient: nothing was written, and the same call may do better later.
	Transient
	// Unknown: the write may have been applied, or may yet be.
	Unknown
	// Lost: the session has ended, because the cluster was rolled back, say, or the
	// participant has been replaced. Nothing more is written under it.
	Lost
	// NotTaken: the checkpoint has failed, or cannot be taken now.
	NotTaken
)

// Failure is an error that the job can deal with.
type Failure struct {
	Kind  Kind
	Cause error
}

func (f *Failure) Error() string { return f.Cause.Error() }

func (f *Failure) Unwrap() error { return f.Cause }

// Fenced says that another run has taken an origin over.
type Fenced struct {
	Origin       string
	Ours, Theirs Position
}

func (e *Fenced) Error() string {
	return fmt.Sprintf("origin %s: another run has taken over: it is at %s, this run was at %s. "+
		"This run stops; nothing was counted twice", e.Origin, e.Theirs, e.Ours)
}

// OtherInput says that an origin was counted from another input.
type OtherInput struct {
	Origin       string
	Ours, Theirs string
}

func (e *OtherInput) Error() string {
	return fmt.Sprintf("origin %s was counted from another input (its first lines hash to %s, here %s): "+
		"use another --keyspace for another file", e.Origin, e.Theirs, e.Ours)
}
