package apierr_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// trips sends an error over every way that it can travel, bytes included.
func trips(t *rapid.T, err error) map[string]error {
	raw, merr := proto.Marshal(apierr.ToDetail(err))
	if merr != nil {
		t.Fatalf("encoding the detail: %v", merr)
	}
	var d keelstatepb.ErrorDetail
	if uerr := proto.Unmarshal(raw, &d); uerr != nil {
		t.Fatalf("decoding the detail: %v", uerr)
	}
	p := apierr.ToStatus(err).Proto()
	raw, merr = proto.Marshal(p)
	if merr != nil {
		t.Fatalf("encoding the status: %v", merr)
	}
	p.Reset()
	if uerr := proto.Unmarshal(raw, p); uerr != nil {
		t.Fatalf("decoding the status: %v", uerr)
	}
	return map[string]error{
		"detail":         apierr.FromDetail(&d),
		"status":         apierr.FromError(status.FromProto(p).Err()),
		"wrapped status": apierr.FromError(fmt.Errorf("calling: %w", status.FromProto(p).Err())),
	}
}

// TestSentinelsSurvive is AE1.
func TestSentinelsSurvive(t *testing.T) {
	for _, s := range base.Sentinels() {
		t.Run(string(s.Reason), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				g := base.GroupID(rapid.Uint64().Draw(t, "group"))
				in := &base.Error{
					Cause:      s,
					Field:      rapid.StringN(0, 20, 80).Draw(t, "field"),
					Hint:       rapid.StringN(0, 20, 80).Draw(t, "hint"),
					LeaderHint: base.NodeID(rapid.StringN(0, 20, 80).Draw(t, "leader")),
					Epoch:      base.Epoch(rapid.Uint64().Draw(t, "epoch")),
					RetryAfter: time.Duration(rapid.Uint32().Draw(t, "after")) * time.Millisecond,
					Ordinal:    int(rapid.Int32Range(-1, math.MaxInt32).Draw(t, "ordinal")),
				}
				if rapid.Bool().Draw(t, "has group") {
					in.Group = &g
				}
				for way, out := range trips(t, in) {
					checkSame(t, way, in, out, s)
				}
			})
			for _, err := range []error{s, fmt.Errorf("doing x: %w", s)} {
				rapid.Check(t, func(t *rapid.T) {
					for way, out := range trips(t, err) {
						if out.Error() != err.Error() {
							t.Fatalf("%s: text %q became %q", way, err, out)
						}
						if !errors.Is(out, s) || base.SentinelOf(out) != s {
							t.Fatalf("%s: %v is no longer %v", way, out, s)
						}
					}
				})
			}
		})
	}
}

func checkSame(t *rapid.T, way string, in *base.Error, out error, s *base.Sentinel) {
	var be *base.Error
	switch {
	case !errors.Is(out, s), base.SentinelOf(out) != s:
		t.Fatalf("%s: %v is no longer %v", way, out, s)
	case base.OutcomeOf(out) != s.Outcome:
		t.Fatalf("%s: outcome %v became %v", way, s.Outcome, base.OutcomeOf(out))
	case !errors.As(out, &be):
		t.Fatalf("%s: no base.Error in %v", way, out)
	}
	if (in.Group == nil) != (be.Group == nil) || in.Group != nil && *in.Group != *be.Group {
		t.Fatalf("%s: group differs", way)
	}
	a, b := *in, *be
	a.Group, b.Group = nil, nil
	if a != b || in.Error() != out.Error() {
		t.Fatalf("%s: %+v became %+v", way, in, be)
	}
}

// TestOtherSentinelsDoNotMatch guards against a round trip that makes
// everything equal to everything.
func TestOtherSentinelsDoNotMatch(t *testing.T) {
	for _, s := range base.Sentinels() {
		for _, other := range base.Sentinels() {
			if out := apierr.FromDetail(apierr.ToDetail(s)); s != other && errors.Is(out, other) {
				t.Errorf("%s came back as %s too", s.Reason, other.Reason)
			}
		}
	}
}

func TestReasonsAreUniqueAndHaveCodes(t *testing.T) {
	seen := map[base.Reason]bool{}
	for _, s := range base.Sentinels() {
		if seen[s.Reason] {
			t.Errorf("reason %s is used twice", s.Reason)
		}
		seen[s.Reason] = true
		if len(s.Reason) > apierr.MaxReasonBytes {
			t.Errorf("reason %s is too long", s.Reason)
		}
		st := apierr.ToStatus(s)
		if st.Code() == codes.OK || st.Code() != apierr.Code(s.Reason) {
			t.Errorf("%s: code %v", s.Reason, st.Code())
		}
		if s != base.ErrInternal && s != base.ErrDiskFailed && apierr.Code(s.Reason) == codes.Internal {
			t.Errorf("reason %s has no code of its own", s.Reason)
		}
		// A generic client that retries on Unavailable must not repeat what may
		// have been applied, except where the reason itself says "unreachable".
		if apierr.Code(s.Reason) == codes.Unavailable && s.Outcome != base.OutcomeNotApplied && s != base.ErrUnavailable {
			t.Errorf("reason %s: Unavailable with outcome %v", s.Reason, s.Outcome)
		}
	}
}

// TestUnknownReason is AE4: a newer server's reason.
func TestUnknownReason(t *testing.T) {
	for wire, want := range map[keelstatepb.Outcome]base.Outcome{
		keelstatepb.Outcome_OUTCOME_UNSPECIFIED: base.OutcomeUnknown,
		keelstatepb.Outcome_OUTCOME_NOT_APPLIED: base.OutcomeNotApplied,
		keelstatepb.Outcome_OUTCOME_APPLIED:     base.OutcomeApplied,
		keelstatepb.Outcome_OUTCOME_UNKNOWN:     base.OutcomeUnknown,
		keelstatepb.Outcome(77):                 base.OutcomeUnknown,
	} {
		for _, retryable := range []bool{false, true} {
			d := &keelstatepb.ErrorDetail{Reason: "from_the_future", Outcome: wire, Retryable: retryable, Message: "a new trouble", Field: "f"}
			for way, out := range map[string]error{
				"detail": apierr.FromDetail(d),
				"status": apierr.FromError(apierr.StatusOfDetail(d).Err()),
			} {
				s := base.SentinelOf(out)
				if !errors.Is(out, base.ErrInternal) || base.OutcomeOf(out) != want || s.Retryable != retryable ||
					s.Reason != "from_the_future" || out.Error() != "f: a new trouble" {
					t.Errorf("%s %v: %v, outcome %v, %+v", way, wire, out, base.OutcomeOf(out), s)
				}
				// And it can be passed on.
				again := apierr.ToDetail(out)
				if again.Reason != d.Reason || base.OutcomeOf(apierr.FromDetail(again)) != want {
					t.Errorf("%s %v: passed on as %v", way, wire, again)
				}
			}
		}
	}
}

// TestOutcomeOnWireWins is AE2.
func TestOutcomeOnWireWins(t *testing.T) {
	d := apierr.ToDetail(base.ErrNotLeader)
	d.Outcome = keelstatepb.Outcome_OUTCOME_UNSPECIFIED
	out := apierr.FromDetail(d)
	if !errors.Is(out, base.ErrNotLeader) || base.OutcomeOf(out) != base.OutcomeUnknown {
		t.Errorf("an unspecified outcome was read as %v (%v)", base.OutcomeOf(out), out)
	}
}

// TestTransportErrors is AE3.
func TestTransportErrors(t *testing.T) {
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		out := apierr.FromError(status.Error(code, "no detail"))
		want := base.OutcomeUnknown
		if code == codes.Unimplemented {
			want = base.OutcomeNotApplied
		}
		if base.OutcomeOf(out) != want {
			t.Errorf("%v: outcome %v", code, base.OutcomeOf(out))
		}
		if !strings.Contains(out.Error(), "no detail") {
			t.Errorf("%v: text lost: %v", code, out)
		}
	}
	for _, c := range []struct {
		in error
		is []error
	}{
		{status.Error(codes.Unavailable, ""), []error{base.ErrUnavailable}},
		{status.Error(codes.DeadlineExceeded, ""), []error{base.ErrDeadline, context.DeadlineExceeded}},
		{status.Error(codes.Canceled, ""), []error{base.ErrOutcomeUnknown, context.Canceled}},
		{status.Error(codes.ResourceExhausted, ""), []error{base.ErrTooLarge}},
		{status.Error(codes.Unimplemented, ""), []error{base.ErrUnsupported}},
		{status.Error(codes.Internal, ""), []error{base.ErrInternal}},
		{context.DeadlineExceeded, []error{base.ErrDeadline, context.DeadlineExceeded}},
		{fmt.Errorf("waiting: %w", context.Canceled), []error{base.ErrOutcomeUnknown, context.Canceled}},
		{io.ErrUnexpectedEOF, []error{base.ErrInternal, io.ErrUnexpectedEOF}},
	} {
		out := apierr.FromError(c.in)
		for _, is := range c.is {
			if !errors.Is(out, is) {
				t.Errorf("%v decoded to %v, which is not %v", c.in, out, is)
			}
		}
		var be *base.Error
		if !errors.As(out, &be) || be.Ordinal != -1 {
			t.Errorf("%v: want a base.Error without an ordinal, got %#v", c.in, out)
		}
	}
}

func TestServerSideClassification(t *testing.T) {
	for _, c := range []struct {
		in   error
		code codes.Code
		want base.Reason
	}{
		{context.DeadlineExceeded, codes.DeadlineExceeded, base.ErrDeadline.Reason},
		{context.Canceled, codes.Unknown, base.ErrOutcomeUnknown.Reason},
		{errors.New("anything"), codes.Internal, base.ErrInternal.Reason},
		{fmt.Errorf("%w: %w", base.ErrNotReady, context.DeadlineExceeded), codes.Unavailable, base.ErrNotReady.Reason},
		{status.Error(codes.Unavailable, "peer"), codes.Unavailable, base.ErrUnavailable.Reason},
	} {
		st := apierr.ToStatus(c.in)
		d := apierr.DetailOf(st.Err())
		if st.Code() != c.code || d.GetReason() != string(c.want) {
			t.Errorf("%v: %v %v", c.in, st.Code(), d)
		}
	}
	st := apierr.ToStatus(base.ErrNotLeader)
	if got := apierr.ToStatus(st.Err()); got.Code() != st.Code() || len(got.Details()) != 1 {
		t.Errorf("a status of ours was encoded again: %v", got)
	}
}

func TestNil(t *testing.T) {
	if apierr.ToStatus(nil) != nil || apierr.ToDetail(nil) != nil || apierr.FromError(nil) != nil || apierr.FromDetail(nil) != nil ||
		apierr.DetailOf(nil) != nil {
		t.Error("nil is not nil")
	}
}

func TestWrappedDetailsKeepTheirText(t *testing.T) {
	g := base.GroupID(3)
	in := fmt.Errorf("submitting: %w", &base.Error{Cause: base.ErrInvalid, Field: "key", Hint: "give one", Group: &g, Ordinal: 2})
	d := apierr.ToDetail(in)
	if d.Message != "submitting: invalid argument" || d.Field != "key" || d.Hint != "give one" || d.Ordinal != 2 {
		t.Errorf("got %v", d)
	}
}

// TestTextsAreBounded is AE5.
func TestTextsAreBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		junk := func(name string) string {
			b := rapid.SliceOfN(rapid.Byte(), 0, 3000).Draw(t, name)
			return strings.Repeat(string(b), rapid.IntRange(1, 3).Draw(t, name+" times"))
		}
		in := &base.Error{Cause: fmt.Errorf("%s: %w", junk("text"), base.ErrInvalid), Field: junk("field"), Hint: junk("hint"),
			LeaderHint: base.NodeID(junk("leader")), Ordinal: -1}
		d := apierr.ToDetail(in)
		for text, limit := range map[string]int{d.Message: apierr.MaxMessageBytes, d.Field: apierr.MaxFieldBytes,
			d.Hint: apierr.MaxHintBytes, d.LeaderHint: apierr.MaxNodeBytes} {
			if len(text) > limit || !utf8.ValidString(text) {
				t.Fatalf("%d bytes, limit %d, valid %v", len(text), limit, utf8.ValidString(text))
			}
		}
		for way, out := range trips(t, in) {
			if !errors.Is(out, base.ErrInvalid) {
				t.Fatalf("%s: %v", way, out)
			}
		}
		// A peer that keeps no limits is cut on arrival.
		huge := &keelstatepb.ErrorDetail{Reason: junk("reason"), Message: junk("message"), Field: junk("f2"), Hint: junk("h2")}
		if out := apierr.FromDetail(huge); len(out.Error()) > apierr.MaxMessageBytes+apierr.MaxFieldBytes+apierr.MaxHintBytes+16 {
			t.Fatalf("decoded text of %d bytes", len(out.Error()))
		}
	})
}

func TestRetryAfterRoundsUp(t *testing.T) {
	for d, want := range map[time.Duration]uint32{0: 0, -time.Second: 0, 1: 1, time.Millisecond: 1,
		time.Millisecond + 1: 2, math.MaxInt64: math.MaxUint32} {
		if got := apierr.ToDetail(&base.Error{Cause: base.ErrOverloaded, RetryAfter: d}).RetryAfterMs; got != want {
			t.Errorf("%v: %d ms, want %d", d, got, want)
		}
	}
}
