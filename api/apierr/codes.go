package apierr

import (
	"google.golang.org/grpc/codes"

	"github.com/keelstate/keelstate/internal/base"
)

// reasonCodes is the gRPC code of each reason. Codes are coarse: they serve
// tools that know nothing of Keelstate. Clients decide by the detail.
var reasonCodes = map[base.Reason]codes.Code{
	// Routing and office. The codes that generic retry policies act on
	// (Unavailable) are given only where the same node may answer later.
	base.ErrNotLeader.Reason:      codes.FailedPrecondition,
	base.ErrNoSuchShard.Reason:    codes.FailedPrecondition,
	base.ErrStaleEpoch.Reason:     codes.FailedPrecondition,
	base.ErrWrongRange.Reason:     codes.FailedPrecondition,
	base.ErrIncarnation.Reason:    codes.FailedPrecondition,
	base.ErrNotReady.Reason:       codes.Unavailable,
	base.ErrNoQuorum.Reason:       codes.Unavailable,
	base.ErrDamaged.Reason:        codes.Unavailable,
	base.ErrShuttingDown.Reason:   codes.Unavailable,
	base.ErrOverloaded.Reason:     codes.ResourceExhausted,
	base.ErrDiskFull.Reason:       codes.ResourceExhausted,
	base.ErrOutcomeUnknown.Reason: codes.Unknown,
	base.ErrDeadline.Reason:       codes.DeadlineExceeded,
	base.ErrUnavailable.Reason:    codes.Unavailable,
	base.ErrInternal.Reason:       codes.Internal,

	base.ErrSessionOrder.Reason:  codes.Aborted,
	base.ErrSessionForgot.Reason: codes.FailedPrecondition,
	base.ErrSessionEnded.Reason:  codes.FailedPrecondition,
	base.ErrSessionStale.Reason:  codes.Aborted,
	base.ErrSessionWindow.Reason: codes.ResourceExhausted,

	base.ErrPrecondition.Reason: codes.FailedPrecondition,
	base.ErrInvalid.Reason:      codes.InvalidArgument,
	base.ErrTooLarge.Reason:     codes.InvalidArgument,
	base.ErrUndeclared.Reason:   codes.NotFound,
	base.ErrWrongKind.Reason:    codes.InvalidArgument,
	base.ErrOutOfRange.Reason:   codes.OutOfRange,
	base.ErrConflict.Reason:     codes.AlreadyExists,
	base.ErrNotFound.Reason:     codes.NotFound,
	base.ErrUnsupported.Reason:  codes.Unimplemented,

	base.ErrCompacted.Reason: codes.OutOfRange,

	base.ErrNotFounded.Reason:     codes.Unavailable,
	base.ErrAlreadyFounded.Reason: codes.AlreadyExists,
	base.ErrIdentity.Reason:       codes.FailedPrecondition,

	base.ErrCorrupt.Reason:       codes.DataLoss,
	base.ErrFormatVersion.Reason: codes.FailedPrecondition,
	base.ErrCheckpoint.Reason:    codes.Aborted,
	base.ErrObjectStore.Reason:   codes.Aborted,
	base.ErrClosed.Reason:        codes.Unavailable,
	base.ErrReopen.Reason:        codes.Unavailable,
	base.ErrDiskFailed.Reason:    codes.Internal,
}

// Code returns the gRPC code of a reason, codes.Internal for one that this
// build does not know.
func Code(reason base.Reason) codes.Code {
	if c, ok := reasonCodes[reason]; ok {
		return c
	}
	return codes.Internal
}

// byReason finds a sentinel by its reason; read only after init.
var byReason = func() map[base.Reason]*base.Sentinel {
	m := make(map[base.Reason]*base.Sentinel)
	for _, s := range base.Sentinels() {
		m[s.Reason] = s
	}
	return m
}()
