package transport

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// FileHandler opens a file for a peer. The name comes from the network: the
// handler must not let it leave its directory (os.Root). If the reader is an
// io.Seeker, offsets cost nothing; else they are read and thrown away.
type FileHandler func(ctx context.Context, from base.NodeID, name string) (r io.ReadCloser, size int64, err error)

// ServeFiles registers the handler of file streams.
func (t *Transport) ServeFiles(h FileHandler) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.files = h
}

// File is an open file stream from another node. Every chunk is checksummed;
// Read returns io.EOF only after all Size bytes came. After any error the
// caller may fetch again with the offset that it reached.
type File struct {
	t       *Transport
	ctx     context.Context
	c       *clientConn
	r       *bufio.Reader
	name    string
	size    int64
	offset  int64  // of the next byte to hand out
	chunk   []byte // rest of the chunk at offset
	err     error  // sticky
	release func()
}

// Size is the size of the whole file, in bytes.
func (f *File) Size() int64 { return f.size }

// FetchFile opens a file of another node at an offset. It waits for a free
// stream (MaxFileStreams). The stream ends with ctx; a stream that brings
// nothing for StallTimeout fails with base.ErrUnavailable.
func (t *Transport) FetchFile(ctx context.Context, node base.NodeID, name string, offset int64) (*File, error) {
	if len(name) > MaxFileName || offset < 0 {
		return nil, fmt.Errorf("fetching file %.64q at %d from node %s: %w", name, offset, node, base.ErrInvalid)
	}
	select {
	case t.fileFetch <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("fetching file %s from node %s: %w: %w", name, node, base.ErrUnavailable, ctx.Err())
	case <-t.ctx.Done():
		return nil, fmt.Errorf("fetching file %s from node %s: %w", name, node, base.ErrClosed)
	}
	var f *File
	err := t.ctx.Err()
	if err != nil {
		err = base.ErrClosed
	} else {
		f, err = t.openFile(ctx, node, name, offset)
	}
	if err != nil {
		<-t.fileFetch
		return nil, fmt.Errorf("fetching file %s at %d from node %s: %w", name, offset, node, err)
	}
	return f, nil
}

func (t *Transport) openFile(ctx context.Context, node base.NodeID, name string, offset int64) (*File, error) {
	dialCtx, cancel := context.WithTimeout(ctx, t.opts.DialTimeout)
	defer cancel()
	c, err := t.connect(dialCtx, node, laneBulk)
	if err != nil {
		return nil, err
	}
	if err := t.adopt(c.wireConn); err != nil {
		return nil, err
	}
	if c.limited {
		c.close(base.ErrNotFounded)
		return nil, base.ErrNotFounded
	}
	f := &File{t: t, ctx: ctx, c: c, name: name, offset: offset, r: bufio.NewReaderSize(c.nc, ioBuffer)}
	stop := context.AfterFunc(ctx, func() { c.close(fmt.Errorf("%w: %w", base.ErrUnavailable, context.Cause(ctx))) })
	f.release = sync.OnceFunc(func() { stop(); <-t.fileFetch })
	if err := f.request(); err != nil {
		stop()
		c.close(err)
		return nil, err
	}
	return f, nil
}

func (f *File) request() error {
	b := putBytes16(beginFrame(len(f.name)+16), f.name)
	b = putU64(b, uint64(f.offset))
	if err := sealFrame(b, frame{typ: typeFileRequest, id: 1}); err != nil {
		return err
	}
	if err := f.c.nc.SetWriteDeadline(time.Now().Add(f.t.opts.StallTimeout)); err != nil {
		return f.failure(err)
	}
	if _, err := f.c.nc.Write(b); err != nil {
		return f.failure(err)
	}
	info, err := f.next()
	if err != nil {
		return err
	}
	r := wireReader{b: info.body}
	size := r.u64()
	if err := r.finish("a file's size"); err != nil || info.typ != typeFileInfo || int64(size) < f.offset {
		return fmt.Errorf("reading a file's size (frame type %d): %w", info.typ, base.ErrCorrupt)
	}
	f.size = int64(size)
	return nil
}

// next reads a frame within the stall timeout; an error frame is an error.
func (f *File) next() (frame, error) {
	if err := f.c.nc.SetReadDeadline(time.Now().Add(f.t.opts.StallTimeout)); err != nil {
		return frame{}, f.failure(err)
	}
	fr, err := readFrame(f.r)
	if err != nil {
		return frame{}, f.failure(err)
	}
	f.c.received(fr)
	if fr.flags&flagError != 0 {
		return frame{}, decodeError(fr.body, f.c.peer.Node)
	}
	return fr, nil
}

// failure prefers the reason for which the connection was closed.
func (f *File) failure(err error) error {
	if cause := f.c.err(); cause != nil {
		err = cause
	}
	if base.SentinelOf(err) == base.ErrInternal {
		return fmt.Errorf("%w: %w", base.ErrUnavailable, err)
	}
	return err
}

// Read implements io.Reader.
func (f *File) Read(p []byte) (int, error) {
	for len(f.chunk) == 0 && f.err == nil {
		if err := f.fill(); err != nil {
			f.err = err
			if !errors.Is(err, io.EOF) {
				f.err = fmt.Errorf("reading file %s at %d from node %s: %w", f.name, f.offset, f.c.peer.Node, err)
			}
		}
	}
	if len(f.chunk) == 0 {
		return 0, f.err
	}
	n := copy(p, f.chunk)
	f.chunk = f.chunk[n:]
	f.offset += int64(n)
	return n, nil
}

func (f *File) fill() error {
	fr, err := f.next()
	if err != nil {
		return err
	}
	r := wireReader{b: fr.body}
	at := int64(r.u64())
	switch {
	case at != f.offset || r.bad:
		return fmt.Errorf("checking a chunk at %d: %w", at, base.ErrCorrupt)
	case fr.typ == typeFileEnd && f.offset == f.size && len(r.b) == 0:
		return io.EOF
	case fr.typ != typeFileChunk || len(r.b) == 0 || int64(len(r.b)) > f.size-f.offset:
		return fmt.Errorf("checking a chunk of %d bytes, type %d: %w", len(r.b), fr.typ, base.ErrCorrupt)
	}
	f.chunk = r.b
	f.t.metrics.fileBytes.WithLabelValues("received").Add(float64(len(r.b)))
	ReportProgress(f.ctx, len(r.b))
	return nil
}

// Close ends the stream. It may be called more than once.
func (f *File) Close() error {
	f.c.close(base.ErrClosed)
	f.release()
	return nil
}

// serveFile serves the one request of a bulk connection and closes it.
func (c *serverConn) serveFile() {
	defer c.close(base.ErrClosed)
	if err := c.nc.SetReadDeadline(time.Now().Add(c.t.opts.StallTimeout)); err != nil {
		return
	}
	req, err := readFrame(bufio.NewReader(c.nc))
	if err != nil {
		return
	}
	c.received(req)
	if err := c.streamFile(req); err != nil {
		// Best effort: if the connection is what failed, nobody reads this.
		_ = c.writeBulk(frame{typ: typeFileInfo, flags: flagResponse | flagError, id: req.id}, putError(beginFrame(256), err))
	}
}

func (c *serverConn) streamFile(req frame) error {
	r := wireReader{b: req.body}
	name, offset := r.str16(), int64(r.u64())
	if err := r.finish("a file request"); err != nil || req.typ != typeFileRequest || len(name) > MaxFileName || offset < 0 {
		return fmt.Errorf("reading a file request: %w", base.ErrInvalid)
	}
	c.t.mu.Lock()
	h := c.t.mu.files
	c.t.mu.Unlock()
	switch {
	case c.limited:
		return fmt.Errorf("serving file %s: %w", name, base.ErrNotFounded)
	case h == nil:
		return fmt.Errorf("serving file %s: %w", name, base.ErrUnsupported)
	}
	select {
	case c.t.fileServe <- struct{}{}:
		defer func() { <-c.t.fileServe }()
	default:
		c.t.metrics.overloads.Inc()
		return fmt.Errorf("serving file %s: too many streams: %w", name, base.ErrOverloaded)
	}
	src, size, err := h(c.ctx, c.peer.Node, name)
	if err != nil {
		return fmt.Errorf("opening file %s: %w", name, err)
	}
	defer src.Close()
	if offset > size {
		return fmt.Errorf("serving file %s at %d of %d bytes: %w", name, offset, size, base.ErrOutOfRange)
	}
	if err := skip(src, offset); err != nil {
		return fmt.Errorf("seeking file %s to %d: %w", name, offset, err)
	}
	if err := c.writeBulk(frame{typ: typeFileInfo, flags: flagResponse, id: req.id}, putU64(beginFrame(8), uint64(size))); err != nil {
		return err
	}
	return c.sendChunks(req, src, name, offset, size)
}

func skip(src io.Reader, offset int64) error {
	if offset == 0 {
		return nil
	}
	if s, ok := src.(io.Seeker); ok {
		_, err := s.Seek(offset, io.SeekStart)
		return err
	}
	_, err := io.CopyN(io.Discard, src, offset)
	return err
}

// sendChunks sends src up to size; a file that is shorter is damaged, what is
// beyond size is not sent.
func (c *serverConn) sendChunks(req frame, src io.Reader, name string, offset, size int64) error {
	buf := make([]byte, headerSize+8+fileChunk)
	for offset < size {
		n := int(min(fileChunk, size-offset))
		b := buf[:headerSize+8+n]
		putU64(b[:headerSize], uint64(offset))
		if _, err := io.ReadFull(src, b[headerSize+8:]); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = fmt.Errorf("%w: %w", base.ErrCorrupt, err)
			}
			return fmt.Errorf("reading file %s at %d: %w", name, offset, err)
		}
		if err := c.writeBulk(frame{typ: typeFileChunk, flags: flagResponse, id: req.id}, b); err != nil {
			return err
		}
		offset += int64(n)
		c.t.metrics.fileBytes.WithLabelValues("sent").Add(float64(n))
	}
	return c.writeBulk(frame{typ: typeFileEnd, flags: flagResponse, id: req.id}, putU64(beginFrame(8), uint64(size)))
}

// writeBulk writes one frame on a bulk connection within the stall timeout.
func (c *serverConn) writeBulk(f frame, b []byte) error {
	if err := sealFrame(b, f); err != nil {
		return err
	}
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.t.opts.StallTimeout)); err != nil {
		return fmt.Errorf("writing to node %s: %w: %w", c.peer.Node, base.ErrUnavailable, err)
	}
	if _, err := c.nc.Write(b); err != nil {
		return fmt.Errorf("writing to node %s: %w: %w", c.peer.Node, base.ErrUnavailable, err)
	}
	c.traffic.sent(1, len(b))
	return nil
}
