package rocks

// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"context"
	"errors"
	"syscall"
	"unsafe"

	"github.com/keelstate/keelstate/internal/base"
)

// codeErrors maps the codes of native.h. A full disk can be told from other
// failures of the disk by errors.Is(err, syscall.ENOSPC).
var codeErrors = map[C.int]error{
	C.KS_CORRUPT:         base.ErrCorrupt,
	C.KS_NO_SPACE:        errors.Join(base.ErrDiskFailed, syscall.ENOSPC),
	C.KS_IO:              base.ErrDiskFailed,
	C.KS_SHUTDOWN:        base.ErrClosed,
	C.KS_INVALID:         base.ErrInvalid,
	C.KS_UNSUPPORTED:     base.ErrUnsupported,
	C.KS_LOCKED:          base.ErrConflict,
	C.KS_NO_FAMILY:       base.ErrNotFound,
	C.KS_INTERNAL:        base.ErrInternal,
	C.KS_BAD_OPERAND:     base.ErrCorrupt,
	C.KS_OPERAND_VERSION: base.ErrFormatVersion,
	C.KS_CANCELLED:       context.Canceled,
	C.KS_CONFLICT:        base.ErrConflict,
}

// nativeError is a failure that the native code reported.
type nativeError struct {
	message string
	cause   error
}

func (e *nativeError) Error() string { return e.message }
func (e *nativeError) Unwrap() error { return e.cause }

// take converts a native status and frees its message.
func take(s C.ks_status) error {
	if s.code == C.KS_OK {
		return nil
	}
	e := &nativeError{message: C.GoString(s.message), cause: codeErrors[s.code]}
	C.free(unsafe.Pointer(s.message))
	if e.cause == nil {
		e.cause = base.ErrInternal
	}
	return e
}
