package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Put implements objectstore.Store.
func (s *Store) Put(ctx context.Context, key string, body objectstore.Body) error {
	inner, leave, err := s.enter(ctx, key)
	if err != nil {
		return fmt.Errorf("putting object: %w", err)
	}
	defer leave()
	if err := body.Check(); err != nil {
		return fmt.Errorf("putting object %s: %w", key, err)
	}
	if body.Size > s.o.PartBytes*maxParts {
		return fmt.Errorf("putting object %s of %d bytes in parts of %d: %w", key, body.Size, s.o.PartBytes, base.ErrTooLarge)
	}
	if body.Size <= s.o.PartBytes {
		err = s.putWhole(inner, key, body)
	} else {
		err = s.putParts(inner, key, body)
	}
	if err != nil {
		return fmt.Errorf("putting object %s: %w", key, s.answer(inner, err))
	}
	return nil
}

// ifAbsent is the condition of OC2.
func ifAbsent() minio.PutObjectOptions {
	o := minio.PutObjectOptions{ContentType: "application/octet-stream"}
	o.SetMatchETagExcept("*")
	return o
}

// within bounds a request that sends so many bytes (OC4): a slow line gets its
// time, one on which nothing moves does not.
func (s *Store) within(ctx context.Context, n int64) (context.Context, context.CancelFunc) {
	const slowest = 128 << 10 // bytes a second
	return context.WithTimeout(ctx, s.o.Idle+time.Duration(n)*time.Second/slowest)
}

// putWhole reads the body before it is sent, so that what is sent is right.
func (s *Store) putWhole(ctx context.Context, key string, body objectstore.Body) error {
	buffer := bytes.NewBuffer(make([]byte, 0, body.Size+bytes.MinRead))
	if _, err := io.Copy(buffer, body.Open()); err != nil {
		return err
	}
	ctx, cancel := s.within(ctx, body.Size)
	defer cancel()
	_, err := s.core.PutObject(ctx, s.o.Bucket, s.prefix+key, bytes.NewReader(buffer.Bytes()), body.Size, "",
		hex.EncodeToString(body.SHA256[:]), ifAbsent())
	return err
}

// putParts uploads part after part, and completes when the whole is right.
func (s *Store) putParts(ctx context.Context, key string, body objectstore.Body) error {
	// The condition holds at the end only: look before sending it all.
	if _, err := s.core.StatObject(ctx, s.o.Bucket, s.prefix+key, minio.StatObjectOptions{}); err == nil {
		return base.ErrConflict
	}
	id, err := s.core.NewMultipartUpload(ctx, s.o.Bucket, s.prefix+key, minio.PutObjectOptions{ContentType: "application/octet-stream"})
	if err != nil {
		return err
	}
	parts, err := s.sendParts(ctx, key, id, body)
	if err == nil {
		_, err = s.core.CompleteMultipartUpload(ctx, s.o.Bucket, s.prefix+key, id, parts, ifAbsent())
	}
	if err != nil {
		s.abort(key, id)
		return err
	}
	// The service has put it together: what came of it has the size at least.
	info, err := s.core.StatObject(ctx, s.o.Bucket, s.prefix+key, minio.StatObjectOptions{})
	if err == nil && info.Size != body.Size {
		return fmt.Errorf("the service made %d bytes of the parts, not %d: %w", info.Size, body.Size, base.ErrCorrupt)
	}
	return err
}

// abort gives the parts up; what it cannot, Sweep does. The call's own context may
// be what has ended.
func (s *Store) abort(key, id string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = s.core.AbortMultipartUpload(ctx, s.o.Bucket, s.prefix+key, id)
}

func (s *Store) sendParts(ctx context.Context, key, id string, body objectstore.Body) ([]minio.CompletePart, error) {
	src := body.Open() // fails at its end if the whole is not right (OC1)
	buffer := make([]byte, s.o.PartBytes)
	var parts []minio.CompletePart
	for sent := int64(0); sent < body.Size; {
		n, err := io.ReadFull(src, buffer[:min(s.o.PartBytes, body.Size-sent)])
		if err != nil {
			return nil, err
		}
		part, err := s.sendPart(ctx, key, id, len(parts)+1, buffer[:n])
		if err != nil {
			return nil, err
		}
		parts = append(parts, part)
		sent += int64(n)
	}
	if _, err := io.ReadFull(src, buffer[:1]); !errors.Is(err, io.EOF) {
		return nil, err
	}
	return parts, nil
}

func (s *Store) sendPart(ctx context.Context, key, id string, number int, b []byte) (minio.CompletePart, error) {
	ctx, cancel := s.within(ctx, int64(len(b)))
	defer cancel()
	sum := sha256.Sum256(b)
	part, err := s.core.PutObjectPart(ctx, s.o.Bucket, s.prefix+key, id, number, bytes.NewReader(b), int64(len(b)),
		minio.PutObjectPartOptions{Sha256Hex: hex.EncodeToString(sum[:])})
	if err != nil {
		return minio.CompletePart{}, fmt.Errorf("part %d: %w", number, err)
	}
	return minio.CompletePart{PartNumber: number, ETag: part.ETag}, nil
}
