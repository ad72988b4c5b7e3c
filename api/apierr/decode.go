package apierr

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// remote is an error that came from, or is made for, the wire. is lists what it
// is under errors.Is and errors.As; the first entry decides its outcome.
type remote struct {
	text string
	is   []error
}

func (r *remote) Error() string   { return r.text }
func (r *remote) Unwrap() []error { return r.is }

// FromError decodes the error of a gRPC call: nil for nil, a *base.Error for
// anything else. An error that already carries a sentinel is returned as it is.
// io.EOF of a stream means its end and is for the caller to handle first.
func FromError(err error) error {
	if err == nil {
		return nil
	}
	var s *base.Sentinel
	if errors.As(err, &s) {
		return err
	}
	if st, ok := status.FromError(err); ok {
		if d := detailOf(st); d != nil {
			return FromDetail(d)
		}
		return &base.Error{Cause: fromTransport(st), Ordinal: -1}
	}
	cause := classify(err)
	if cause == err {
		cause = fmt.Errorf("%w: %w", base.ErrInternal, err)
	}
	return &base.Error{Cause: cause, Ordinal: -1}
}

// DetailOf returns the detail that the error of a gRPC call carries, or nil.
func DetailOf(err error) *keelstatepb.ErrorDetail {
	st, ok := status.FromError(err)
	if !ok {
		return nil
	}
	return detailOf(st)
}

func detailOf(st *status.Status) *keelstatepb.ErrorDetail {
	for _, d := range st.Details() {
		if d, ok := d.(*keelstatepb.ErrorDetail); ok {
			return d
		}
	}
	return nil
}

// FromDetail decodes a wire detail: nil for nil, a *base.Error otherwise.
func FromDetail(d *keelstatepb.ErrorDetail) error {
	if d == nil {
		return nil
	}
	be := &base.Error{
		Cause:      causeOf(d),
		Field:      cut(d.GetField(), MaxFieldBytes),
		Hint:       cut(d.GetHint(), MaxHintBytes),
		LeaderHint: base.NodeID(cut(d.GetLeaderHint(), MaxNodeBytes)),
		Epoch:      base.Epoch(d.GetEpoch()),
		RetryAfter: time.Duration(d.GetRetryAfterMs()) * time.Millisecond,
		Ordinal:    -1,
	}
	if d.GetHasGroup() {
		g := base.GroupID(d.GetGroup())
		be.Group = &g
	}
	if d.GetHasOrdinal() && uint64(d.GetOrdinal()) <= math.MaxInt {
		be.Ordinal = int(d.GetOrdinal())
	}
	return be
}

// causeOf rebuilds the chain below a base.Error: the sentinel itself where the
// text says no more than it, else a text that wraps it.
func causeOf(d *keelstatepb.ErrorDetail) error {
	known := byReason[base.Reason(d.GetReason())]
	outcome := outcomeFromWire(d.GetOutcome())
	message := cut(d.GetMessage(), MaxMessageBytes)
	if known != nil && known.Outcome == outcome && known.Retryable == d.GetRetryable() {
		if message == known.Error() || message == "" {
			return known
		}
		return &remote{text: message, is: []error{known}}
	}
	// The other side is of another version: what it says of this very failure
	// wins over the table of this build (AE2, AE4).
	said := &base.Sentinel{
		Reason:    base.Reason(cut(d.GetReason(), MaxReasonBytes)),
		Outcome:   outcome,
		Retryable: d.GetRetryable(),
	}
	if known == nil {
		known = base.ErrInternal
	}
	if message == "" {
		message = known.Error()
	}
	return &remote{text: message, is: []error{said, known}}
}

// fromTransport reads a status that carries no detail (AE3).
func fromTransport(st *status.Status) error {
	text := cut(fmt.Sprintf("%s: %s", st.Code(), st.Message()), MaxMessageBytes)
	switch st.Code() {
	case codes.Unavailable:
		return &remote{text: text, is: []error{base.ErrUnavailable}}
	case codes.DeadlineExceeded:
		return &remote{text: text, is: []error{base.ErrDeadline, context.DeadlineExceeded}}
	case codes.Canceled:
		return &remote{text: text, is: []error{base.ErrOutcomeUnknown, context.Canceled}}
	case codes.Unimplemented:
		return &remote{text: text, is: []error{base.ErrUnsupported}}
	case codes.ResourceExhausted:
		// A message over a limit of the transport. Which of the two messages it
		// was cannot be told, so the request may have been applied.
		said := &base.Sentinel{Reason: base.ErrTooLarge.Reason, Outcome: base.OutcomeUnknown}
		return &remote{text: text, is: []error{said, base.ErrTooLarge}}
	default:
		return &remote{text: text, is: []error{base.ErrInternal}}
	}
}
