package apierr

import (
	"context"
	"errors"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// Limits of the texts of a detail, in bytes (AE5). Longer ones are cut at a
// character and end in an ellipsis. They keep a status far below the header
// limits of HTTP/2 proxies (8 KiB is common) even after base64.
const (
	MaxReasonBytes  = 64
	MaxMessageBytes = 1024
	MaxFieldBytes   = 256
	MaxHintBytes    = 512
	MaxNodeBytes    = 256
)

// ToStatus encodes an error as a gRPC status with a detail; nil for nil. An
// error that already is a gRPC status with a detail of ours is kept.
func ToStatus(err error) *status.Status {
	if err == nil {
		return nil
	}
	if st, ok := status.FromError(err); ok && detailOf(st) != nil {
		return st
	}
	return StatusOfDetail(ToDetail(err))
}

// StatusOfDetail builds the status that carries a detail.
func StatusOfDetail(d *keelstatepb.ErrorDetail) *status.Status {
	st := status.New(Code(base.Reason(d.GetReason())), d.GetMessage())
	with, err := st.WithDetails(d)
	if err != nil {
		// Only a code of OK fails, which no reason has.
		return st
	}
	return with
}

// ToDetail encodes an error as a wire detail; nil for nil.
func ToDetail(err error) *keelstatepb.ErrorDetail {
	if err == nil {
		return nil
	}
	err = classify(err)
	s := base.SentinelOf(err)
	d := &keelstatepb.ErrorDetail{
		Reason:    cut(string(s.Reason), MaxReasonBytes),
		Outcome:   outcomeToWire(s.Outcome),
		Retryable: s.Retryable,
	}
	message := err.Error()
	var be *base.Error
	if errors.As(err, &be) {
		fillDetail(d, be)
		// The fields travel apart from the text and are printed again by the
		// decoded error: leave them out of the message.
		message = strings.Replace(message, be.Error(), be.Cause.Error(), 1)
	}
	d.Message = cut(message, MaxMessageBytes)
	return d
}

func fillDetail(d *keelstatepb.ErrorDetail, be *base.Error) {
	d.Field = cut(be.Field, MaxFieldBytes)
	d.Hint = cut(be.Hint, MaxHintBytes)
	if be.Group != nil {
		d.HasGroup, d.Group = true, uint64(*be.Group)
	}
	d.LeaderHint = cut(string(be.LeaderHint), MaxNodeBytes)
	d.Epoch = uint64(be.Epoch)
	d.RetryAfterMs = millis(be.RetryAfter)
	if be.Ordinal >= 0 && uint64(be.Ordinal) <= math.MaxUint32 {
		d.HasOrdinal, d.Ordinal = true, uint32(be.Ordinal)
	}
}

// classify gives a sentinel to the errors of the standard library and of gRPC
// that handlers return when a call ends early.
func classify(err error) error {
	var s *base.Sentinel
	if errors.As(err, &s) {
		return err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return &remote{text: err.Error(), is: []error{base.ErrDeadline, err}}
	case errors.Is(err, context.Canceled):
		return &remote{text: err.Error(), is: []error{base.ErrOutcomeUnknown, err}}
	}
	if st, ok := status.FromError(err); ok && st.Code() != codes.OK {
		return fromTransport(st)
	}
	return err
}

// millis rounds up, so that a client never comes back too early.
func millis(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	if ms := (d-1)/time.Millisecond + 1; ms < math.MaxUint32 {
		return uint32(ms)
	}
	return math.MaxUint32
}

func outcomeToWire(o base.Outcome) keelstatepb.Outcome {
	switch o {
	case base.OutcomeNotApplied:
		return keelstatepb.Outcome_OUTCOME_NOT_APPLIED
	case base.OutcomeApplied:
		return keelstatepb.Outcome_OUTCOME_APPLIED
	default:
		return keelstatepb.Outcome_OUTCOME_UNKNOWN
	}
}

func outcomeFromWire(o keelstatepb.Outcome) base.Outcome {
	switch o {
	case keelstatepb.Outcome_OUTCOME_NOT_APPLIED:
		return base.OutcomeNotApplied
	case keelstatepb.Outcome_OUTCOME_APPLIED:
		return base.OutcomeApplied
	default:
		return base.OutcomeUnknown
	}
}

const ellipsis = "…"

// cut makes a text fit for a protobuf string of at most limit bytes: proto3
// refuses to encode what is not UTF-8, and error texts may quote keys.
func cut(s string, limit int) string {
	if len(s) > limit {
		n := limit - len(ellipsis)
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n] + ellipsis
	}
	// "?" is one byte, so a replacement never makes the text longer.
	return strings.ToValidUTF8(s, "?")
}
