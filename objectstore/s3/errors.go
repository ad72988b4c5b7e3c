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

// answer makes the error of a request one of the contract's.
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
	var response minio.ErrorResponse
	if !errors.As(err, &response) {
		return trouble(err, "see whether "+s.o.Endpoint+" can be reached from the node", 0)
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
	return trouble(err, s.hint(response), pauseOf(response))
}

func pauseOf(r minio.ErrorResponse) time.Duration {
	if r.StatusCode == http.StatusServiceUnavailable || r.StatusCode == http.StatusTooManyRequests || r.Code == "SlowDown" {
		return throttlePause
	}
	return 0
}

// hint says what the operator can do about a refusal.
func (s *Store) hint(r minio.ErrorResponse) string {
	switch {
	case r.Code == minio.NoSuchBucket:
		return "create bucket " + s.o.Bucket + ", or name another"
	case r.Code == "RequestTimeTooSkewed" || r.Code == "RequestExpired":
		return "set the node's clock: the service refuses requests that are minutes off"
	case r.Code == minio.AccessDenied || r.Code == "InvalidAccessKeyId" || r.Code == "SignatureDoesNotMatch" || r.StatusCode == http.StatusForbidden:
		return "look at the credentials, and at what they may do in bucket " + s.o.Bucket
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
