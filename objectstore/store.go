package objectstore

import (
	"context"
	"io"
	"iter"
	"time"
)

// Object says what is known of an object without reading it.
type Object struct {
	Key  string
	Size int64
	// Modified is when it was stored, by the store's clock.
	Modified time.Time
}

// Store keeps immutable objects under keys (CheckKey).
//
// Errors: base.ErrNotFound, base.ErrConflict, base.ErrCorrupt as said at the
// methods; base.ErrInvalid for a key or range that cannot be; base.ErrClosed
// after Close; base.ErrObjectStore, with a hint, if the store cannot be reached,
// refuses, or is full; and the context's.
type Store interface {
	// Put stores a new object. It fails with base.ErrConflict if the key is taken,
	// and with base.ErrCorrupt if the body is not the one that it says it is. A
	// Put that failed otherwise may have stored the object, whole: Stat tells.
	// No key may be a folder of another ("a" and "a/b").
	Put(ctx context.Context, key string, body Body) error
	// Get reads length bytes from offset on; a length of -1 is all that follow.
	// It fails with base.ErrNotFound, and with base.ErrCorrupt if the object has
	// fewer bytes. The caller closes the reader.
	Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)
	// Stat fails with base.ErrNotFound.
	Stat(ctx context.Context, key string) (Object, error)
	// List gives the objects whose keys begin with prefix and are greater than
	// after, in the order of their keys. It ends after an error.
	List(ctx context.Context, prefix, after string) iter.Seq2[Object, error]
	// Delete removes objects; one that is absent is no error. If it fails, some
	// may be removed.
	Delete(ctx context.Context, keys ...string) error
	// Sweep removes what uploads left below prefix that began before a time and
	// did not end, and says how many. An upload that goes on would fail, so the
	// time must be older than any can be.
	Sweep(ctx context.Context, prefix string, before time.Time) (int, error)
	// Close ends what is running. Objects stay.
	Close() error
}
