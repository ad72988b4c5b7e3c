package base

import (
	"errors"
	"fmt"
	"time"
)

// Outcome says what is known about the effect of a request that failed.
type Outcome uint8

const (
	// OutcomeUnknown: the request may or may not have been applied, now or
	// later. It is the zero value on purpose: what is not listed is unknown.
	OutcomeUnknown Outcome = iota
	// OutcomeNotApplied: the request was not applied and never will be. Only
	// this may be retried blindly.
	OutcomeNotApplied
	// OutcomeApplied: the request was applied; only what came after it failed.
	OutcomeApplied
)

func (o Outcome) String() string {
	switch o {
	case OutcomeNotApplied:
		return "not applied"
	case OutcomeApplied:
		return "applied"
	default:
		return "unknown"
	}
}

// Reason is the stable code of an error, the same in Go, on the wire, in
// metrics and in the command line's JSON.
type Reason string

// Sentinel is an error value with a stable reason and a documented outcome.
type Sentinel struct {
	Reason  Reason
	Outcome Outcome
	// Retryable says that the same request may succeed later without any
	// change by the caller.
	Retryable bool
	text      string
}

func (s *Sentinel) Error() string { return s.text }

var sentinels []*Sentinel

func define(reason Reason, outcome Outcome, retryable bool, text string) *Sentinel {
	s := &Sentinel{Reason: reason, Outcome: outcome, Retryable: retryable, text: text}
	sentinels = append(sentinels, s)
	return s
}

// Sentinels returns every sentinel of the product, for tables and tests.
func Sentinels() []*Sentinel { return append([]*Sentinel(nil), sentinels...) }

// The sentinels, by who refuses. "Not applied" may be retried blindly where
// Retryable is set; "unknown" only under the same session number.
var (
	// Routing and office.
	ErrNotLeader      = define("not_leader", OutcomeNotApplied, true, "this replica does not lead the shard")
	ErrNoSuchShard    = define("no_such_shard", OutcomeNotApplied, true, "no such shard on this node")
	ErrStaleEpoch     = define("stale_epoch", OutcomeNotApplied, true, "the request carries another epoch than the shard's")
	ErrWrongRange     = define("wrong_range", OutcomeNotApplied, true, "the key group is outside the shard's range")
	ErrIncarnation    = define("rolled_back", OutcomeNotApplied, false, "the cluster was rolled back since the request's incarnation")
	ErrNotReady       = define("not_ready", OutcomeNotApplied, true, "the replica is not ready to serve")
	ErrNoQuorum       = define("no_quorum", OutcomeNotApplied, true, "no quorum of the group answered in time")
	ErrDamaged        = define("damaged", OutcomeNotApplied, true, "the replica is damaged and is being rebuilt")
	ErrShuttingDown   = define("shutting_down", OutcomeNotApplied, true, "the node is shutting down")
	ErrOverloaded     = define("overloaded", OutcomeNotApplied, true, "a bounded queue of the node is full")
	ErrDiskFull       = define("disk_full", OutcomeNotApplied, true, "the disk of the node is nearly full")
	ErrOutcomeUnknown = define("outcome_unknown", OutcomeUnknown, false, "whether the write was applied is not known")
	ErrDeadline       = define("deadline", OutcomeUnknown, false, "the deadline passed before the outcome was known")
	ErrUnavailable    = define("unavailable", OutcomeUnknown, true, "the node cannot be reached")
	ErrInternal       = define("internal", OutcomeUnknown, false, "internal error")

	// Sessions (rule W3).
	ErrSessionOrder  = define("session_order", OutcomeNotApplied, true, "the session's previous request has not been applied at this shard")
	ErrSessionForgot = define("session_forgotten_number", OutcomeUnknown, false, "the session number is older than what the shard remembers")
	ErrSessionEnded  = define("session_ended", OutcomeNotApplied, false, "the session has ended")
	ErrSessionStale  = define("session_stale", OutcomeNotApplied, true, "the leader's view of sessions is older than the shard's last forgetting")
	ErrSessionWindow = define("session_window", OutcomeNotApplied, true, "the session has too many open requests at this shard")

	// Content: recorded as results under a session.
	ErrPrecondition = define("precondition_failed", OutcomeNotApplied, false, "a precondition does not hold")
	ErrInvalid      = define("invalid_argument", OutcomeNotApplied, false, "invalid argument")
	ErrTooLarge     = define("too_large", OutcomeNotApplied, false, "over a documented size limit")
	ErrUndeclared   = define("undeclared_state", OutcomeNotApplied, false, "the state is not declared")
	ErrWrongKind    = define("wrong_kind", OutcomeNotApplied, false, "the operation does not fit the state's kind")
	ErrOutOfRange   = define("out_of_range", OutcomeNotApplied, false, "the result does not fit its type")
	ErrConflict     = define("conflict", OutcomeNotApplied, false, "conflicts with what exists")
	ErrNotFound     = define("not_found", OutcomeNotApplied, false, "not found")
	ErrUnsupported  = define("unsupported", OutcomeNotApplied, false, "not supported by this version")

	// Watches and history.
	ErrCompacted = define("compacted", OutcomeNotApplied, false, "the revision has been compacted")

	// Founding and identity.
	ErrNotFounded     = define("not_founded", OutcomeNotApplied, true, "the node does not belong to a cluster yet")
	ErrAlreadyFounded = define("already_founded", OutcomeNotApplied, false, "the node already belongs to a cluster")
	ErrIdentity       = define("identity_mismatch", OutcomeNotApplied, false, "cluster, node or disk identity does not match")

	// Storage.
	ErrCorrupt       = define("corrupt", OutcomeUnknown, false, "stored bytes are damaged")
	ErrFormatVersion = define("format_version", OutcomeUnknown, false, "stored bytes have a format version that this build does not know")
	ErrCheckpoint    = define("checkpoint_failed", OutcomeNotApplied, true, "the checkpoint failed; the state is as it was")
	ErrObjectStore   = define("object_store", OutcomeUnknown, true, "the object store did not do what it was asked")
	ErrClosed        = define("closed", OutcomeNotApplied, false, "closed")
	ErrReopen        = define("reopen", OutcomeNotApplied, true, "the store met a full disk and has to be opened again")
	ErrDiskFailed    = define("disk_failed", OutcomeUnknown, false, "the disk failed a write or an fsync")
)

// Error is an error with the details that a client needs to act. It wraps its
// cause, which should be (or wrap) a sentinel.
type Error struct {
	Cause error
	// Field names the request's field that is at fault, for ErrInvalid and the
	// like, in the form of the request ("mutations[3].key").
	Field string
	// Hint says what to do, in one sentence.
	Hint string
	// Group is the Raft group concerned; nil where none is.
	Group *GroupID
	// LeaderHint is the node believed to lead the group; a hint only.
	LeaderHint NodeID
	// Epoch is the group's epoch at the refusing replica; 0 where unknown.
	Epoch Epoch
	// RetryAfter is when a retry makes sense; 0 where at once.
	RetryAfter time.Duration
	// Ordinal is the mutation or precondition at fault; -1 where none is.
	Ordinal int
}

func (e *Error) Error() string {
	s := e.Cause.Error()
	if e.Field != "" {
		s = e.Field + ": " + s
	}
	if e.Group != nil {
		s = fmt.Sprintf("%s: %s", *e.Group, s)
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

func (e *Error) Unwrap() error { return e.Cause }

// Invalid builds an ErrInvalid that names the field and says what to do.
func Invalid(field, hint string) *Error {
	return &Error{Cause: ErrInvalid, Field: field, Hint: hint, Ordinal: -1}
}

// SentinelOf returns the sentinel that err is or wraps, or ErrInternal.
func SentinelOf(err error) *Sentinel {
	var s *Sentinel
	if errors.As(err, &s) {
		return s
	}
	return ErrInternal
}

// OutcomeOf returns what is known about the effect of the failed request.
func OutcomeOf(err error) Outcome {
	if err == nil {
		return OutcomeApplied
	}
	return SentinelOf(err).Outcome
}
