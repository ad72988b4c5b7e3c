// Package apierr is the only place where errors of the product become gRPC
// statuses and wire details, and where these become errors again. Servers call
// ToStatus and ToDetail; clients call FromError and FromDetail.
//
// It must not know who serves or who calls: it depends on internal/base and on
// the generated messages alone. Everything in it is safe for concurrent use.
//
// Invariants:
//
//	AE1  Every sentinel of internal/base survives the round trip through a
//	     status and through a detail: errors.Is holds after it, and so do the
//	     outcome, the retryability and every field of base.Error.
//	AE2  An outcome is never improved on the way. The outcome on the wire wins
//	     over the table of this build; where none is given it is unknown.
//	AE3  A status without a detail comes from the transport, not from a handler
//	     of ours: its outcome is unknown, unless no handler can have run
//	     (Unimplemented).
//	AE4  A reason that this build does not know keeps its text, its outcome and
//	     its retryability, and wraps base.ErrInternal.
//	AE5  Texts are valid UTF-8 and of bounded size, both when encoded and when
//	     decoded.
package apierr
