package objectstore

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/keelstate/keelstate/internal/base"
)

// Body is what Put stores: bytes that can be read more than once, since an upload
// may have to be repeated, and what they are known to be.
type Body struct {
	Reader io.ReaderAt
	Size   int64
	SHA256 [sha256.Size]byte
}

// Bytes is the body of some bytes in memory.
func Bytes(b []byte) Body {
	return Body{Reader: bytes.NewReader(b), Size: int64(len(b)), SHA256: sha256.Sum256(b)}
}

// Check says why a body cannot be, with base.ErrInvalid.
func (b Body) Check() error {
	if b.Reader == nil {
		return base.Invalid("body", "a reader")
	}
	if b.Size < 0 {
		return base.Invalid("body.size", "0 or more bytes")
	}
	return nil
}

// Open reads the body from its start. The reader ends with base.ErrCorrupt where
// the bytes end early, go on beyond the size, or do not have the hash (OS1).
func (b Body) Open() io.Reader {
	// One byte more than the size, to see whether the source has grown.
	return &bodyReader{body: b, src: io.NewSectionReader(b.Reader, 0, b.Size+1), sum: sha256.New()}
}

type bodyReader struct {
	body Body
	src  io.Reader
	sum  hash.Hash
	n    int64
}

func (r *bodyReader) Read(p []byte) (int, error) {
	n, err := r.src.Read(p)
	r.n += int64(n)
	r.sum.Write(p[:n])
	switch {
	case r.n > r.body.Size:
		return 0, fmt.Errorf("body has more than %d bytes: %w", r.body.Size, base.ErrCorrupt)
	case err == nil:
		return n, nil
	case !errors.Is(err, io.EOF):
		return n, fmt.Errorf("reading body: %w", err)
	case r.n < r.body.Size:
		return n, fmt.Errorf("body has %d bytes of %d: %w", r.n, r.body.Size, base.ErrCorrupt)
	case [sha256.Size]byte(r.sum.Sum(nil)) != r.body.SHA256:
		return 0, fmt.Errorf("body of %d bytes does not have its SHA-256: %w", r.n, base.ErrCorrupt)
	}
	return n, io.EOF
}
