package keel

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// Code is the stable name of an error's reason, the same on the wire, in
// metrics and in the command line's JSON.
type Code = base.Reason

// Outcome says what is known about the effect of a call that failed.
type Outcome = base.Outcome

// The outcomes.
const (
	OutcomeUnknown    = base.OutcomeUnknown
	OutcomeNotApplied = base.OutcomeNotApplied
	OutcomeApplied    = base.OutcomeApplied
)

// The conditions of errors, for errors.Is. Their documentation is that of the
// server's reasons, docs/errors.md.
var (
	ErrNotLeader      error = base.ErrNotLeader
	ErrNoSuchShard    error = base.ErrNoSuchShard
	ErrStaleEpoch     error = base.ErrStaleEpoch
	ErrWrongRange     error = base.ErrWrongRange
	ErrIncarnation    error = base.ErrIncarnation
	ErrNotReady       error = base.ErrNotReady
	ErrNoQuorum       error = base.ErrNoQuorum
	ErrDamaged        error = base.ErrDamaged
	ErrShuttingDown   error = base.ErrShuttingDown
	ErrOverloaded     error = base.ErrOverloaded
	ErrOutcomeUnknown error = base.ErrOutcomeUnknown
	ErrDeadline       error = base.ErrDeadline
	ErrUnavailable    error = base.ErrUnavailable
	ErrInternal       error = base.ErrInternal
	ErrSessionForgot  error = base.ErrSessionForgot
	ErrSessionEnded   error = base.ErrSessionEnded
	ErrPrecondition   error = base.ErrPrecondition
	ErrInvalid        error = base.ErrInvalid
	ErrTooLarge       error = base.ErrTooLarge
	ErrUndeclared     error = base.ErrUndeclared
	ErrWrongKind      error = base.ErrWrongKind
	ErrOutOfRange     error = base.ErrOutOfRange
	ErrConflict       error = base.ErrConflict
	ErrNotFound       error = base.ErrNotFound
	ErrUnsupported    error = base.ErrUnsupported
	ErrNotFounded     error = base.ErrNotFounded
	ErrAlreadyFounded error = base.ErrAlreadyFounded
	ErrIdentity       error = base.ErrIdentity
	ErrCorrupt        error = base.ErrCorrupt
	ErrObjectStore    error = base.ErrObjectStore
	ErrCheckpoint     error = base.ErrCheckpoint
	ErrClosed         error = base.ErrClosed
)

// Error is every error of this package. errors.Is finds the condition.
type Error struct {
	// Code is the stable reason.
	Code Code
	// Outcome says what is known about the effect. For reads it is always
	// OutcomeNotApplied.
	Outcome Outcome
	// Retryable says that the same call may succeed later unchanged. After an
	// unknown outcome a retry may apply the write a second time.
	Retryable bool
	// Field names the part of the request at fault, empty where none is.
	Field string
	// Hint says in one sentence what to do, empty where nothing is known.
	Hint string
	// Shard is the shard concerned, 0 where none is.
	Shard uint64
	// LeaderHint is the node believed to lead the shard, empty where unknown.
	LeaderHint string
	// RetryAfter is when a retry makes sense, 0 where at once.
	RetryAfter time.Duration
	// Ordinal is the position of the mutation or precondition at fault in its
	// batch, -1 where none is.
	Ordinal int

	cause  error
	stream bool // it ended a stream that others share
}

// Error is one line of text: field, condition, shard, hint.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("keel: ")
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	if text := base.SentinelOf(e.cause).Error(); text != "" {
		b.WriteString(text)
	} else { // a reason of a newer server
		b.WriteString(e.cause.Error())
	}
	if e.Shard != 0 {
		fmt.Fprintf(&b, ", shard %d", e.Shard)
	}
	if e.Outcome != OutcomeNotApplied {
		fmt.Fprintf(&b, ", outcome %s", e.Outcome)
	}
	if e.Hint != "" {
		b.WriteString(" (" + e.Hint + ")")
	}
	return b.String()
}

// Unwrap returns the cause, which is or wraps one of the conditions above.
func (e *Error) Unwrap() error { return e.cause }

// asError brings any error into the form of this package.
func asError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	switch { // the caller's own context, before anything was sent
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return deadlineError(err, OutcomeUnknown)
	}
	s := base.SentinelOf(err)
	e = &Error{Code: s.Reason, Outcome: s.Outcome, Retryable: s.Retryable, Ordinal: -1, cause: err}
	var d *base.Error
	if errors.As(err, &d) {
		e.Field, e.Hint, e.Ordinal = d.Field, d.Hint, d.Ordinal
		e.LeaderHint, e.RetryAfter = string(d.LeaderHint), d.RetryAfter
		if d.Group != nil {
			e.Shard = uint64(*d.Group)
		}
		if text := d.Cause.Error(); e.Hint == "" && text != s.Error() {
			e.Hint = text
		}
	} else if text := err.Error(); text != s.Error() {
		e.Hint = strings.TrimPrefix(text, s.Error()+": ")
	}
	return e
}

// fromStatus reads the error of a call that failed.
func fromStatus(err error) *Error {
	var own *Error
	if errors.As(err, &own) {
		e := *own
		return &e
	}
	for _, d := range status.Convert(err).Details() {
		if detail, ok := d.(*keelstatepb.ErrorDetail); ok {
			return fromDetail(detail)
		}
	}
	return asError(apierr.FromError(err))
}

// fromDetail reads the error of one result. The outcome is the one on the wire:
// a newer server may give a reason that this build does not know.
func fromDetail(d *keelstatepb.ErrorDetail) *Error {
	e := asError(apierr.FromDetail(d))
	e.Code, e.Retryable = Code(d.GetReason()), d.GetRetryable()
	switch d.GetOutcome() {
	case keelstatepb.Outcome_OUTCOME_NOT_APPLIED:
		e.Outcome = OutcomeNotApplied
	case keelstatepb.Outcome_OUTCOME_APPLIED:
		e.Outcome = OutcomeApplied
	default:
		e.Outcome = OutcomeUnknown
	}
	return e
}

func newError(s error, outcome Outcome, hint string) *Error {
	sentinel := base.SentinelOf(s)
	return &Error{Code: sentinel.Reason, Outcome: outcome, Retryable: sentinel.Retryable, Hint: hint, Ordinal: -1, cause: s}
}

func tooLarge(field, hint string) *Error {
	e := newError(ErrTooLarge, OutcomeNotApplied, hint)
	e.Field = field
	return e
}

func invalid(field, hint string) *Error {
	e := newError(ErrInvalid, OutcomeNotApplied, hint)
	e.Field = field
	return e
}

// deadlineError is a call that its caller's context ended.
func deadlineError(cause error, outcome Outcome) *Error {
	e := newError(ErrDeadline, outcome, "")
	e.cause = fmt.Errorf("%w: %w", base.ErrDeadline, cause)
	if errors.Is(cause, context.Canceled) {
		e.Hint = "the call was cancelled"
	}
	return e
}

// harmless marks the error of a call that has no effect whatever happens.
func harmless(err error) error {
	if err == nil {
		return nil
	}
	e := *asError(err)
	e.Outcome = OutcomeNotApplied
	return &e
}

// NewError builds an error of this package for a condition that its caller
// found by itself, such as a command line that asks for what is not there.
func NewError(condition error, outcome Outcome, field, hint string) *Error {
	e := newError(condition, outcome, hint)
	e.Field = field
	return e
}
