package s3

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/keelstate/keelstate/internal/base"
)

// throttlePause is waited when a service throttles and does not say how long.
const throttlePause = time.Second

// answer makes the error of a request one of the contract's. The context is the
// one that the request was made with, below the caller's.
func (s *Store) answer(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if s.closed.Load() {
		return base.ErrClosed
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var sentinel *base.Sentinel
	if errors.As(err, &sentinel) {
		return err // the body's, or our own
	}
	var detail *base.Error
	if errors.As(err, &detail) {
		return err // the credentials' source's, or our own
	}
	var response minio.ErrorResponse
	if !errors.As(err, &response) {
		return trouble(s.source.redact(err), "see whether "+s.o.Endpoint+" can be reached from the node", 0)
	}
	switch response.Code {
	case minio.NoSuchKey, "NoSuchUpload", "NotFound":
		return base.ErrNotFound
	case minio.PreconditionFailed:
		return base.ErrConflict
	case "InvalidRange":
		return fmt.Errorf("the object is shorter than what was asked for: %w", base.ErrCorrupt)
	case "XAmzContentSHA256Mismatch", "BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody":
		return fmt.Errorf("the service received other bytes (%s): %w", response.Code, base.ErrCorrupt)
	}
	c := callOf(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	return trouble(s.source.redact(err), s.hint(response, c.skew), max(c.pause, pauseOf(response)))
}

func pauseOf(r minio.ErrorResponse) time.Duration {
	switch r.Code {
	case "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "TooManyRequests", "RequestLimitExceeded", "Throttling":
		return throttlePause
	}
	if r.StatusCode == http.StatusServiceUnavailable || r.StatusCode == http.StatusTooManyRequests {
		return throttlePause
	}
	return 0
}

// maxSkew is what a service allows between its clock and the node's.
const maxSkew = 15 * time.Minute

// hint says what the operator can do about a refusal.
func (s *Store) hint(r minio.ErrorResponse, skew time.Duration) string {
	switch {
	case r.Code == minio.NoSuchBucket:
		return "create bucket " + s.o.Bucket + ", or name another"
	case r.Code == "RequestTimeTooSkewed" || r.Code == "RequestExpired" || skew.Abs() > maxSkew:
		return fmt.Sprintf("set the node's clock: by the service's it is %v off, and it refuses requests that are minutes off", skew.Abs().Round(time.Second))
	case r.Code == minio.AccessDenied || r.Code == "InvalidAccessKeyId" || r.Code == "XAdminUserNotFound" || r.Code == "SignatureDoesNotMatch" || r.StatusCode == http.StatusForbidden:
		return "look at the credentials, and at what they may do in bucket " + s.o.Bucket
	case r.Code == "MethodNotAllowed":
		return "the service is read-only, or not for this"
	case r.Code == "XMinioStorageFull" || r.Code == "QuotaExceeded" || r.StatusCode == http.StatusInsufficientStorage:
		return "the service has no space: free some, or retain fewer checkpoints"
	case pauseOf(r) > 0:
		return "the service asks for fewer requests; they are repeated later"
	default:
		return "look at the service's log"
	}
}

func trouble(err error, hint string, pause time.Duration) error {
	return &base.Error{Cause: fmt.Errorf("%w: %w", base.ErrObjectStore, err), Hint: hint, RetryAfter: pause, Ordinal: -1}
}
