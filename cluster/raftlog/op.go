package raftlog

import (
	"encoding/binary"
	"hash/crc32"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

type opKind uint8

const (
	opAppend opKind = iota
	opMove
	opDelete
	opStable
	opCreate
	opTombstone
)

// op is one record to be written, with what its effect in memory needs. The
// caller builds it and waits on done; in between it belongs to the committer.
type op struct {
	kind opKind
	g    *GroupLog
	typ  recordType
	// buf is the record: room for the header, the payload, the padding.
	buf        []byte
	payloadLen int
	payloadCRC uint32

	logs   []*raft.Log // opAppend: the entries, for the cache
	moves  []move      // opMove
	lo, hi uint64      // opDelete; opAppend: the entries' indices
	key    string      // opStable
	val    []byte
	gen    uint64 // opCreate
	prev   *op    // opAppend: the part before of the same call, refused together

	// Set by the committer.
	skip bool   // nothing to write or to apply: the call is done already
	off  uint32 // of the record in the segment
	err  error
	done chan struct{} // capacity 1: written once
}

// move says which live entry a copy stands for.
type move struct {
	index   uint64
	old     slot // only seg, off and len
	copyOff int  // of the copy in the payload
}

var bufPool = sync.Pool{New: func() any { b := make([]byte, 0, 16<<10); return &b }}

// newBuf returns a buffer with room for the record header and size bytes more.
func newBuf(size int) []byte {
	b := *bufPool.Get().(*[]byte)
	if cap(b) < recordHeaderBytes+pad(size) {
		b = make([]byte, 0, recordHeaderBytes+pad(size))
	}
	return b[:recordHeaderBytes]
}

func freeBuf(b []byte) {
	const keep = 1 << 20 // a giant entry must not stay in the pool
	if cap(b) <= keep {
		bufPool.Put(&b)
	}
}

// seal computes the checksum and pads; buf holds header room and payload.
func (o *op) seal() *op {
	o.payloadLen = len(o.buf) - recordHeaderBytes
	o.payloadCRC = crc32.Update(o.g.log.ident.salt(0), castagnoli, o.buf[recordHeaderBytes:])
	for len(o.buf)%recordAlign != 0 {
		o.buf = append(o.buf, 0)
	}
	return o
}

func newOp(kind opKind, g *GroupLog, typ recordType, payloadHint int) *op {
	return &op{kind: kind, g: g, typ: typ, buf: newBuf(payloadHint), done: make(chan struct{}, 1)}
}

func newRecordOp(kind opKind, g *GroupLog, typ recordType, payload []byte) *op {
	o := newOp(kind, g, typ, len(payload))
	o.buf = append(o.buf, payload...)
	return o.seal()
}

func newUint64Op(kind opKind, g *GroupLog, typ recordType, v uint64) *op {
	o := newRecordOp(kind, g, typ, binary.LittleEndian.AppendUint64(nil, v))
	o.gen = v
	return o
}

func newAppendOp(g *GroupLog, logs []*raft.Log, payloadBytes int) *op {
	o := newOp(opAppend, g, recAppend, payloadBytes)
	o.buf = binary.LittleEndian.AppendUint32(o.buf, uint32(len(logs)))
	for _, e := range logs {
		o.buf = appendEntry(o.buf, e, g.salt)
	}
	o.logs, o.lo, o.hi = logs, logs[0].Index, logs[len(logs)-1].Index
	return o.seal()
}

func newDeleteOp(g *GroupLog, lo, hi uint64) *op {
	o := newOp(opDelete, g, recDelete, 16)
	o.lo, o.hi = lo, hi
	o.encodeRange()
	return o
}

// encodeRange writes the payload of a delete; the committer calls it again when
// it has clamped the range.
func (o *op) encodeRange() {
	o.buf = binary.LittleEndian.AppendUint64(o.buf[:recordHeaderBytes], o.lo)
	o.buf = binary.LittleEndian.AppendUint64(o.buf, o.hi)
	o.seal()
}

// opQueue hands ops to the committer. It needs no bound of its own: each caller
// waits for its op, so the callers are the bound.
type opQueue struct {
	wake chan struct{} // capacity 1: there are ops, or the queue was closed
	mu   struct {
		sync.Mutex
		ops    []*op
		closed bool
	}
}

// put adds ops in order, all or none.
func (q *opQueue) put(ops ...*op) error {
	q.mu.Lock()
	if q.mu.closed {
		q.mu.Unlock()
		return base.ErrClosed
	}
	q.mu.ops = append(q.mu.ops, ops...)
	q.mu.Unlock()
	q.signal()
	return nil
}

func (q *opQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take moves what is queued into buf and says whether the queue is closed.
func (q *opQueue) take(buf []*op) ([]*op, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	buf = append(buf, q.mu.ops...)
	clear(q.mu.ops)
	q.mu.ops = q.mu.ops[:0]
	return buf, q.mu.closed
}

// close returns false if the queue was closed already.
func (q *opQueue) close() bool {
	q.mu.Lock()
	was := q.mu.closed
	q.mu.closed = true
	q.mu.Unlock()
	q.signal()
	return !was
}

// do hands ops to the committer and waits for all of them. It returns the first
// error.
func (l *Log) do(ops ...*op) error {
	if err := l.Err(); err != nil {
		return err
	}
	if err := l.queue.put(ops...); err != nil {
		return err
	}
	var first error
	for _, o := range ops {
		<-o.done
		if o.err != nil && first == nil {
			first = o.err
		}
		freeBuf(o.buf)
	}
	return first
}
